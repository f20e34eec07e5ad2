"""Models saved by transformers give the same outputs here; unsupported ones raise."""

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

from tests.slow_cases import mostly_slow
from tests.weights.parity import build
from vit.errors import WeightsError
from vit.model.layers import ACTIVATIONS as OURS
from vit.weights.adapt_weights import adapt_weights
from vit.weights.formats.huggingface_config import ACTIVATIONS, FAMILIES
from vit.weights.formats.huggingface_weights import read_huggingface
from vit.weights.formats.pretrained import Pretrained

TOLERANCE = 1e-4
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"image_size": 32, "patch_size": 8}
WIDE = {**SIZES, "intermediate_size": 80}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
TEXT |= {"intermediate_size": 64, "max_position_embeddings": 8}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NAMES = {0: "cat", 1: "dog", 2: "emu"}
Network = nn.Module
Answer = Callable[[Network, Tensor], Tensor]


def logits(model: Network, images: Tensor) -> Tensor:
    return model(images).logits


def pooled(model: Network, images: Tensor) -> Tensor:
    return model(images).pooler_output


def first_token(model: Network, images: Tensor) -> Tensor:
    return model(images).last_hidden_state[:, 0]


def mean_token(model: Network, images: Tensor) -> Tensor:
    return model(images).last_hidden_state.mean(dim=1)


def mean_patch(model: Network, images: Tensor) -> Tensor:
    return model(images).last_hidden_state[:, 1:].mean(dim=1)


def whole_image(answer: Answer) -> Answer:
    """Images as rows of pixels of patches, all of them seen."""

    def answered(model: Network, images: Tensor) -> Tensor:
        config = getattr(model.config, "vision_config", model.config)
        rows = [convert_image_to_patches(image, config.patch_size) for image in images]
        side = images.shape[-1] // config.patch_size
        shapes = torch.full((len(images), 2), side)
        seen = torch.ones(len(images), side**2)
        inputs = {"pixel_attention_mask": seen, "spatial_shapes": shapes}
        return answer(partial(model, **inputs), torch.stack(rows))

    return answered


def encoder(part: str, answer: Answer = pooled) -> Answer:
    return lambda model, images: answer(getattr(model, part), images)


def masked_beit(model: Network, images: Tensor) -> Tensor:
    return model.layernorm(model.beit(images)[0])[:, 1:].mean(1)


def last_backbone_token(model: Network, images: Tensor) -> Tensor:
    tokens = model(images, output_hidden_states=True).hidden_states[-1]
    norm = model.norm if hasattr(model, "norm") else model.layernorm
    return norm(tokens)[:, 0]


MAE = {"mask_ratio": 0.0, "decoder_num_hidden_layers": 1}
PLACES = {"use_absolute_position_embeddings": True}
OWN, SHARED = {"use_relative_position_bias": True}, {"use_shared_relative_position_bias": True}
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
NO_BIASES = {f"{name}_bias": False for name in ("query", "key", "value", "proj", "mlp")}
# a class of transformers, or the name before its ForImageClassification; settings of the encoder
CASES: dict[str, tuple[str, dict[str, object], Answer]] = {
    "vit": ("ViTModel", {}, first_token),
    "vit classifier": ("ViT", {}, logits),
    "vit without biases, another gelu": (
        "ViT",
        {"qkv_bias": False, "hidden_act": "gelu_new"},
        logits,
    ),
    "vit large epsilon": ("ViT", {"layer_norm_eps": 0.1}, logits),
    "vit one channel": ("ViT", {"num_channels": 1}, logits),
    "vit masked": ("ViTForMaskedImageModeling", {}, encoder("vit", first_token)),
    "mae": ("ViTMAEModel", MAE, first_token),
    "mae with its decoder": ("ViTMAEForPreTraining", MAE, encoder("vit", first_token)),
    "msn": ("ViTMSNModel", {}, first_token),
    "msn classifier": ("ViTMSN", {}, logits),
    "i-jepa": ("IJepaModel", {}, mean_token),
    "i-jepa classifier": ("IJepa", {}, logits),
    "deit": ("DeiTModel", {}, first_token),
    "deit classifier": ("DeiT", {}, logits),
    "deit two heads": ("DeiTForImageClassificationWithTeacher", {}, logits),
    "deit masked": ("DeiTForMaskedImageModeling", {}, encoder("deit", first_token)),
    "beit": ("BeitModel", PLACES, pooled),
    "beit classifier": ("Beit", PLACES, logits),
    "beit class token": (
        "BeitModel",
        {**PLACES, "use_mean_pooling": False, "layer_scale_init_value": 0.0},
        pooled,
    ),
    "beit without places": ("Beit", {}, logits),
    "beit relative": ("Beit", OWN, logits),
    "beit shared": ("BeitModel", SHARED, pooled),
    "beit both": ("Beit", OWN | SHARED, logits),
    "data2vec": ("Data2VecVision", OWN | SHARED, logits),
    "data2vec without its pooler": ("Data2VecVisionModel", OWN, mean_patch),
    "data2vec class token": ("Data2VecVisionModel", {"use_mean_pooling": False}, first_token),
    "beit masked": ("BeitForMaskedImageModeling", {**PLACES, "use_mask_token": True}, masked_beit),
    "dinov2": ("Dinov2Model", {}, pooled),
    "dinov2 classifier": ("Dinov2", {}, logits),
    "dinov2 gated": ("Dinov2", {"use_swiglu_ffn": True, "mlp_ratio": 3}, logits),
    "dinov2 relu, without biases": (
        "Dinov2Model",
        {"hidden_act": "relu", "qkv_bias": False},
        pooled,
    ),
    "dinov2 backbone": ("Dinov2Backbone", {}, last_backbone_token),
    "registers": ("Dinov2WithRegistersModel", {}, pooled),
    "registers classifier": ("Dinov2WithRegisters", {"num_register_tokens": 3}, logits),
    "registers gated": ("Dinov2WithRegisters", {"use_swiglu_ffn": True}, logits),
    "no registers": ("Dinov2WithRegistersModel", {"num_register_tokens": 0}, pooled),
    "dinov3": ("DINOv3ViTModel", {"num_register_tokens": 4}, pooled),
    "dinov3 without registers": ("DINOv3ViTModel", {"rope_theta": 30.0}, pooled),
    "dinov3 gated": ("DINOv3ViTModel", GATED, pooled),
    "dinov3 all biases": ("DINOv3ViTModel", {"key_bias": True}, pooled),
    "dinov3 few biases": ("DINOv3ViTModel", {"query_bias": False, "proj_bias": False}, pooled),
    "dinov3 no biases": ("DINOv3ViTModel", NO_BIASES | GATED, pooled),
    "dinov3 backbone": ("DINOv3ViTBackbone", {}, last_backbone_token),
    "clip": ("CLIPModel", {}, encoder("vision_model")),
    "clip of laion": (
        "CLIPModel",
        {"hidden_act": "gelu", "layer_norm_eps": 1e-6},
        encoder("vision_model"),
    ),
    "clip encoder": ("CLIPVisionModel", {}, pooled),
    "clip projection": ("CLIPVisionModelWithProjection", {}, encoder("vision_model")),
    "clip classifier": ("CLIP", {}, logits),
    "siglip": ("SiglipModel", {}, encoder("vision_model")),
    "siglip encoder": ("SiglipVisionModel", {}, pooled),
    "siglip without its head": ("SiglipVisionModel", {"vision_use_head": False}, mean_token),
    "siglip classifier": ("Siglip", {}, logits),
    "siglip 2": ("Siglip2Model", {}, encoder("vision_model", whole_image(pooled))),
    "siglip 2 encoder": ("Siglip2VisionModel", {"num_channels": 1}, whole_image(pooled)),
    "siglip 2 without its head": (
        "Siglip2VisionModel",
        {"vision_use_head": False},
        whole_image(mean_token),
    ),
    "siglip 2 classifier": ("Siglip2", {}, whole_image(logits)),
    "metaclip 2": ("MetaClip2Model", {}, encoder("vision_model")),
    "metaclip 2 encoder": ("MetaClip2VisionModel", {}, pooled),
    "metaclip 2 projection": ("MetaClip2VisionModelWithProjection", {}, encoder("vision_model")),
    "metaclip 2 classifier": ("MetaClip2", {}, logits),
    "tips": ("Tipsv2Model", {}, encoder("vision_model")),
    "tips encoder": ("Tipsv2VisionModel", {"num_register_tokens": 3}, pooled),
    "tips gated": ("Tipsv2VisionModel", {"use_swiglu_ffn": True}, pooled),
    "tips backbone": ("Tipsv2VisionBackbone", {}, last_backbone_token),
    "aim": ("Aimv2Model", {}, encoder("vision_model", mean_token)),
    "aim without its head": ("Aimv2VisionModel", {"use_head": False}, mean_token),
    "aim native": ("Aimv2VisionModel", {"is_native": True, "rms_norm_eps": 0.1}, mean_token),
}


def network(case: str) -> Network:
    name, changes, _ = CASES[case]
    kind = getattr(transformers, name, None)
    kind = kind or getattr(transformers, f"{name}ForImageClassification")
    settings = {**(SIZES if name.startswith(("Dinov2", "Tips")) else WIDE), **changes}
    if name.startswith("Siglip2"):
        settings["num_patches"] = (settings.pop("image_size") // settings["patch_size"]) ** 2
    if "vision_config" in kind.config_class.sub_configs:
        text = TEXT | ({"hidden_size": 48} if name.startswith("Tips") else {})
        settings = {"text_config": text, "vision_config": settings}
    if "ForImageClassification" in kind.__name__:
        settings["id2label"] = NAMES
    return kind(kind.config_class(**settings))


def files(model: Network, randomise, folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """config.json and tensors of a model with random weights, as transformers saves them."""
    model.load_state_dict(model.state_dict() | randomise(dict(model.named_parameters())))
    model.eval().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(folder / "model.safetensors")


@torch.no_grad()
def assert_equal(
    found: Pretrained, theirs: Network, answer: Answer = logits, *, batch: int = 3
) -> None:
    config = found.config
    images = torch.randn(batch, config.channels, config.image_size, config.image_size)
    mine, other = build(found.state, config)(images), answer(theirs, images)
    spread = other.std(dim=0).mean()
    assert spread > 0.01 * other.abs().max(), "answers alike for all images show nothing"
    difference = (mine - other).abs().max() / other.abs().max()
    assert difference < TOLERANCE


@pytest.mark.parametrize("name", mostly_slow(CASES))
def test_answers_as_transformers_does(name, randomise, tmp_path):
    theirs, answer = network(name), CASES[name][2]
    config, state = files(theirs, randomise, tmp_path)
    found = read_huggingface(config, None, state, "a folder")
    assert_equal(found, theirs, answer)
    classifies = "ForImageClassification" in type(theirs).__name__
    assert found.config.num_classes == (3 if classifies else 0)
    assert found.classes == (("cat", "dog", "emu") if classifies else None)
    assert found.license is None
    assert found.origin == f"transformers {type(theirs).__name__}"
    # the names inside transformers, which are others than those of its files
    memory = read_huggingface(config, None, theirs.state_dict(), "a folder")
    assert found.config == memory.config
    assert found.state.keys() == memory.state.keys()
    assert all(torch.equal(found.state[key], memory.state[key]) for key in found.state)


CLASSIFIER = "vit classifier"


@pytest.mark.slow
def test_full_size_equals_transformers(randomise):
    with torch.device("meta"):
        theirs = transformers.ViTForImageClassification(transformers.ViTConfig())
    state = randomise(theirs.state_dict())
    theirs.load_state_dict(state, assign=True)
    found = read_huggingface({"model_type": "vit"}, None, state, "a folder")
    assert found.config.dim == 768
    assert_equal(found, theirs.eval(), batch=2)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_theirs(name):
    x = torch.linspace(-6, 6, 1001)
    mine = OURS[ACTIVATIONS[name]]()(x)
    assert (mine - transformers.activations.ACT2FN[name](x)).abs().max() < 1e-5


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_theirs(model_type):
    config = transformers.AutoConfig.for_model(model_type)
    config = getattr(config, "vision_config", config)
    defaults = dict(FAMILIES[model_type].defaults)
    if model_type.startswith(("dinov2", "tipsv2")):
        del defaults["intermediate_size"]
    if model_type == "dinov2":
        assert defaults.pop("num_register_tokens") == 0
    if model_type.startswith("siglip2"):
        del defaults["image_size"]
    if not hasattr(config, "vision_use_head"):  # before transformers 5.23 it had no name
        defaults.pop("vision_use_head", None)
    assert defaults == {name: getattr(config, name) for name in defaults}


@pytest.fixture
def saved(randomise, tmp_path) -> Callable[[str], tuple[dict, dict[str, Tensor]]]:
    return lambda name: files(network(name), randomise, tmp_path)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("vit", ["a pooler of its own (pooler.dense.bias, pooler.dense.weight)"]),
        ("vit masked", ["a mask token", "the decoder of masked images (decoder.0.bias"]),
        ("beit masked", ["a mask token", "the head of masked images (lm_head.bias"]),
        ("mae with its decoder", ["the decoder of masked images"]),
        ("dinov2", ["a mask token (embeddings.mask_token)"]),
        ("clip", ["the text tower (text_model.", "the comparison with texts (logit_scale, vis"]),
        ("clip classifier", ["a norm that its classifier does not use"]),
        ("siglip", ["the text tower", "the comparison with texts (logit_bias, logit_scale)"]),
        ("siglip classifier", ["a pooling that its classifier does not use"]),
        ("tips", ["the text tower (text_encoder.", "the comparison with texts (temperature)"]),
        ("aim", ["the text tower", "the comparison with texts (logit_scale, visual_projection"]),
        ("aim native", ["attention pooling, which is another than the one here (head.cls_token"]),
    ],
)
def test_dropped_tensors_are_noted(name, left_out, saved):
    config, state = saved(name)
    found = read_huggingface(config, None, state, "a folder")
    for part in left_out:
        assert any(note.startswith(f"left out: {part}") for note in found.notes), found.notes


@pytest.mark.parametrize("name", ["siglip 2 encoder", "tips encoder"])
@torch.no_grad()
def test_antialiased_positions_are_nearer_to_theirs(name, randomise, tmp_path):
    """Ours are bicubic and theirs bilinear, so they are not equal."""
    theirs = network(name)
    config, tensors = files(theirs, randomise, tmp_path)
    found = read_huggingface(config, None, tensors, "a folder")
    small = dataclasses.replace(found.config, image_size=16)
    images = torch.randn(3, small.channels, 16, 16)
    expected = CASES[name][2](theirs, images)
    errors = []
    for antialias in (found.antialias, not found.antialias):
        state, _ = adapt_weights(dataclasses.replace(found, antialias=antialias), small)
        errors.append((build(state, small)(images) - expected).abs().mean())
    assert errors[0] < 0.5 * errors[1]


def test_nothing_else_is_left_out(saved):
    config, state = saved(CLASSIFIER)
    assert not [note for note in read_huggingface(config, None, state, "x").notes if "left" in note]
    with pytest.raises(WeightsError, match=r"^x: .*ForImageClassification .* has no vit.extra"):
        read_huggingface(config, None, {**state, "vit.extra": torch.zeros(1)}, "x")


def test_older_files_of_clip_are_read(saved):
    """They have settings in a second group that wins."""
    config, state = saved("clip")
    vision = config["vision_config"]
    wrong = {**vision, "num_attention_heads": 6, "hidden_act": "gelu"}
    both = {"vision_config": wrong, "vision_config_dict": {**SIZES, "intermediate_size": 80}}
    found = read_huggingface({**config, **both}, None, state, "x")
    theirs = transformers.CLIPConfig(text_config=TEXT, **both).vision_config
    assert found.config.num_heads == theirs.num_attention_heads == 4
    assert found.config.activation == theirs.hidden_act == "quick_gelu"


@pytest.mark.parametrize(
    ("labels", "classes", "said"),
    [
        ({"0": "a", "1": "b", "2": "c"}, ("a", "b", "c"), ""),
        ({0: "a", 1: "b", 2: "c"}, ("a", "b", "c"), ""),
        ({"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, None, "no names"),
        (None, None, "no names"),
        ({"0": "crane", "1": "b", "2": "crane"}, ("crane (0)", "b", "crane (2)"), "crane"),
    ],
)
def test_names_of_classes(labels, classes, said, saved):
    config, state = saved(CLASSIFIER)
    found = read_huggingface({**config, "id2label": labels}, None, state, "x")
    assert found.classes == classes
    assert said in " ".join(found.notes)


def test_the_problem_type_is_noted(saved):
    config, state = saved(CLASSIFIER)
    config["problem_type"] = "multi_label_classification"
    assert any("multi_label" in note for note in read_huggingface(config, None, state, "x").notes)


def test_half_precision_becomes_float32(saved):
    config, state = saved(CLASSIFIER)
    half = {name: tensor.bfloat16() for name, tensor in state.items()}
    found = read_huggingface(config, None, half, "x")
    assert {tensor.dtype for tensor in found.state.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("vit", {"model_type": "swin"}, "model_type='swin'.*there are vit, vit_mae"),
        ("vit", {"model_type": None}, "model_type=None"),
        ("vit", {"model_type": None, "auto_map": {}}, "auto_map, is not run: see vit models"),
        ("vit", {"quantization_config": {}}, "quantised"),
        ("vit", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("vit", {"hidden_size": "48"}, "hidden_size='48'"),
        ("vit", {"hidden_size": True}, "hidden_size=True"),
        ("vit", {"hidden_size": 50}, "num_heads=4"),
        ("vit", {"head_dim": 16}, "head_dim=16"),
        ("vit", {"image_size": [32, 64]}, "image_size=.*for squares"),
        ("vit", {"patch_size": 0}, "patch_size=0"),
        ("vit", {"layer_norm_eps": float("nan")}, "layer_norm_eps=nan"),
        ("vit", {"layer_norm_eps": None}, "layer_norm_eps=None"),
        ("vit", {"qkv_bias": 1}, "qkv_bias=1"),
        ("vit", {"qkv_bias": False}, "unknown: blocks.0.attn.qkv.bias"),
        ("vit", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, but there are only"),
        ("vit", {"num_hidden_layers": 1}, "unknown: blocks.1"),
        ("vit", {"num_channels": 4}, "patch_embed.proj.weight"),
        ("vit", {"architectures": ["ViTForImageClassification"]}, "classifier.weight is missing"),
        ("vit classifier", {"id2label": {"0": "a"}}, "id2label has 1 names for 3 outputs"),
        ("vit classifier", {"id2label": {"0": "a", "1": "b", "2": 3}}, "id2label has 3 names"),
        (
            "beit",
            {"use_relative_position_bias": True, "use_absolute_position_embeddings": True},
            "use_relative_position_bias=True: this network has one kind of positions",
        ),
        ("dinov2 backbone", {"apply_layernorm": False}, "apply_layernorm=False"),
        ("dinov2", {"use_swiglu_ffn": True}, "has no encoder.layer.0.mlp.fc1.bias"),
        ("dinov2", {"mlp_ratio": 5}, "mlp.fc1.weight"),
        ("dinov3 gated", {"hidden_act": "gelu"}, "hidden_act='gelu'.*silu only"),
        ("dinov3 all biases", {"key_bias": False}, "no blocks.0.attn.k.bias"),
        ("dinov3", {"key_bias": True}, "blocks.0.attn.key.bias is missing"),
        ("dinov3", {"rope_theta": 0}, "rotary_temperature=0.0"),
        ("clip", {"vision_config": 5}, "vision_config is not that of a clip"),
        ("clip", {"vision_config": {"model_type": "x"}}, "vision_config is not that of a clip"),
        ("siglip", {"vision_config": {}}, "do not fit"),
        ("siglip 2 encoder", {"num_channels": 3}, "not of squares of 3 channels"),
        ("siglip 2 encoder", {"num_patches": 25}, "do not fit"),
        ("aim native", {"hidden_act": "gelu"}, "hidden_act='gelu': an AIMv2 has silu"),
        ("aim native", {"image_size": 8 * 10**9}, "asks for an impossible network"),
        ("aim native", {"mlp_bias": True}, "mlp_bias=True: an AIMv2 has False"),
    ],
)
def test_unsupported_settings_raise(name, changes, message, saved):
    config, state = saved(name)
    with pytest.raises(WeightsError, match=rf"^a\\x1bb: .*{message}") as caught:
        read_huggingface({**config, **changes}, None, state, "a\x1bb")
    assert "\n" not in str(caught.value)


ODD = [
    torch.tensor(1.0),
    torch.zeros(0),
    torch.zeros(5),
    torch.zeros(5, 7),
    torch.ones(48, 48).int(),
]


ALL_PARTS = (CLASSIFIER, "registers gated", "dinov3", "siglip", "siglip 2", "tips", "aim")


@pytest.mark.parametrize("name", mostly_slow(ALL_PARTS))
def test_tensors_of_any_other_shape_are_refused(name, saved):
    config, state = saved(name)
    # and blocks that are as the first
    left_out = r"text|visual_|logit|temp|.*mask|.*model.head|.*(layers?|blocks)\.1\."
    left_out = re.compile(left_out)
    for key in [key for key in state if not left_out.match(key)]:
        for odd in ODD:
            with pytest.raises(WeightsError):
                read_huggingface(config, None, {**state, key: odd}, "x")
        without = {other: tensor for other, tensor in state.items() if other != key}
        with pytest.raises(WeightsError):
            read_huggingface(config, None, without, "x")
