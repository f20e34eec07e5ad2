"""Models saved by transformers give the same outputs here; unsupported ones raise."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from vit.errors import WeightsError
from vit.model.build import assemble_model
from vit.model.layers import ACTIVATIONS as OURS
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


def encoder(part: str, answer: Answer = pooled) -> Answer:
    return lambda model, images: answer(getattr(model, part), images)


def build(name: str, config: str, **settings) -> Network:
    kind = getattr(transformers, config)
    if "ForImageClassification" in name:
        settings["id2label"] = NAMES
    return getattr(transformers, name)(kind(**settings))


def with_text(name: str, family: str, **vision) -> Network:
    parts = {"text_config": TEXT, "vision_config": {**WIDE, **vision}}
    return build(name, f"{family}Config", **parts)


def vit(name: str, **settings) -> Network:
    return build(name, "ViTConfig", **WIDE, **settings)


def deit(name: str) -> Network:
    return build(name, "DeiTConfig", **WIDE)


def mae(name: str) -> Network:
    return build(name, "ViTMAEConfig", **WIDE, mask_ratio=0.0, decoder_num_hidden_layers=1)


def beit(name: str, **settings) -> Network:
    settings = {"use_absolute_position_embeddings": True, **settings}
    return build(name, "BeitConfig", **WIDE, **settings)


def relative(name: str, *, own: bool = False, shared: bool = False) -> Network:
    kinds = {"use_relative_position_bias": own, "use_shared_relative_position_bias": shared}
    kind = "BeitConfig" if name.startswith("Beit") else "Data2VecVisionConfig"
    return build(name, kind, **WIDE, **kinds)


def dinov2(name: str, **settings) -> Network:
    return build(name, "Dinov2Config", **SIZES, **settings)


def registers(name: str, **settings) -> Network:
    return build(name, "Dinov2WithRegistersConfig", **SIZES, **settings)


def dinov3(name: str, **settings) -> Network:
    return build(name, "DINOv3ViTConfig", **WIDE, **settings)


def last_backbone_token(model: Network, images: Tensor) -> Tensor:
    tokens = model(images, output_hidden_states=True).hidden_states[-1]
    norm = model.norm if hasattr(model, "norm") else model.layernorm
    return norm(tokens)[:, 0]


NO_BIASES = {f"{name}_bias": False for name in ("query", "key", "value")}
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
CASES: dict[str, tuple[Callable[[], Network], Answer]] = {
    "vit": (lambda: vit("ViTModel"), first_token),
    "vit classifier": (lambda: vit("ViTForImageClassification"), logits),
    "vit without biases, another gelu": (
        lambda: vit("ViTForImageClassification", qkv_bias=False, hidden_act="gelu_new"),
        logits,
    ),
    "vit large epsilon": (lambda: vit("ViTForImageClassification", layer_norm_eps=0.1), logits),
    "vit one channel": (lambda: vit("ViTForImageClassification", num_channels=1), logits),
    "vit masked": (lambda: vit("ViTForMaskedImageModeling"), encoder("vit", first_token)),
    "mae": (lambda: mae("ViTMAEModel"), first_token),
    "mae with its decoder": (lambda: mae("ViTMAEForPreTraining"), encoder("vit", first_token)),
    "msn": (lambda: build("ViTMSNModel", "ViTMSNConfig", **WIDE), first_token),
    "msn classifier": (
        lambda: build("ViTMSNForImageClassification", "ViTMSNConfig", **WIDE),
        logits,
    ),
    "i-jepa": (lambda: build("IJepaModel", "IJepaConfig", **WIDE), mean_token),
    "i-jepa classifier": (
        lambda: build("IJepaForImageClassification", "IJepaConfig", **WIDE),
        logits,
    ),
    "deit": (lambda: deit("DeiTModel"), first_token),
    "deit classifier": (lambda: deit("DeiTForImageClassification"), logits),
    "deit two heads": (lambda: deit("DeiTForImageClassificationWithTeacher"), logits),
    "deit masked": (lambda: deit("DeiTForMaskedImageModeling"), encoder("deit", first_token)),
    "beit": (lambda: beit("BeitModel"), pooled),
    "beit classifier": (lambda: beit("BeitForImageClassification"), logits),
    "beit class token": (
        lambda: beit("BeitModel", use_mean_pooling=False, layer_scale_init_value=0.0),
        pooled,
    ),
    "beit without places": (
        lambda: beit("BeitForImageClassification", use_absolute_position_embeddings=False),
        logits,
    ),
    "beit relative": (lambda: relative("BeitForImageClassification", own=True), logits),
    "beit shared": (lambda: relative("BeitModel", shared=True), pooled),
    "beit both": (lambda: relative("BeitForImageClassification", own=True, shared=True), logits),
    "data2vec": (
        lambda: relative("Data2VecVisionForImageClassification", own=True, shared=True),
        logits,
    ),
    "data2vec without its pooler": (
        lambda: relative("Data2VecVisionModel", own=True),
        mean_patch,
    ),
    "data2vec class token": (
        lambda: build(
            "Data2VecVisionModel", "Data2VecVisionConfig", **WIDE, use_mean_pooling=False
        ),
        first_token,
    ),
    "beit masked": (
        lambda: beit("BeitForMaskedImageModeling", use_mask_token=True),
        lambda model, images: model.layernorm(model.beit(images)[0])[:, 1:].mean(1),
    ),
    "dinov2": (lambda: dinov2("Dinov2Model"), pooled),
    "dinov2 classifier": (lambda: dinov2("Dinov2ForImageClassification"), logits),
    "dinov2 gated": (
        lambda: dinov2("Dinov2ForImageClassification", use_swiglu_ffn=True, mlp_ratio=3),
        logits,
    ),
    "dinov2 relu, without biases": (
        lambda: dinov2("Dinov2Model", hidden_act="relu", qkv_bias=False),
        pooled,
    ),
    "dinov2 backbone": (lambda: dinov2("Dinov2Backbone"), last_backbone_token),
    "registers": (lambda: registers("Dinov2WithRegistersModel"), pooled),
    "registers classifier": (
        lambda: registers("Dinov2WithRegistersForImageClassification", num_register_tokens=3),
        logits,
    ),
    "registers gated": (
        lambda: registers("Dinov2WithRegistersForImageClassification", use_swiglu_ffn=True),
        logits,
    ),
    "no registers": (
        lambda: registers("Dinov2WithRegistersModel", num_register_tokens=0),
        pooled,
    ),
    "dinov3": (lambda: dinov3("DINOv3ViTModel", num_register_tokens=4), pooled),
    "dinov3 without registers": (lambda: dinov3("DINOv3ViTModel", rope_theta=30.0), pooled),
    "dinov3 gated": (lambda: dinov3("DINOv3ViTModel", **GATED), pooled),
    "dinov3 all biases": (lambda: dinov3("DINOv3ViTModel", key_bias=True), pooled),
    "dinov3 few biases": (
        lambda: dinov3("DINOv3ViTModel", query_bias=False, proj_bias=False),
        pooled,
    ),
    "dinov3 no biases": (
        lambda: dinov3("DINOv3ViTModel", **NO_BIASES, proj_bias=False, mlp_bias=False, **GATED),
        pooled,
    ),
    "dinov3 backbone": (lambda: dinov3("DINOv3ViTBackbone"), last_backbone_token),
    "clip": (lambda: with_text("CLIPModel", "CLIP"), encoder("vision_model")),
    "clip of laion": (
        lambda: with_text("CLIPModel", "CLIP", hidden_act="gelu", layer_norm_eps=1e-6),
        encoder("vision_model"),
    ),
    "clip encoder": (lambda: build("CLIPVisionModel", "CLIPVisionConfig", **WIDE), pooled),
    "clip projection": (
        lambda: build("CLIPVisionModelWithProjection", "CLIPVisionConfig", **WIDE),
        encoder("vision_model"),
    ),
    "clip classifier": (lambda: with_text("CLIPForImageClassification", "CLIP"), logits),
    "siglip": (lambda: with_text("SiglipModel", "Siglip"), encoder("vision_model")),
    "siglip encoder": (lambda: build("SiglipVisionModel", "SiglipVisionConfig", **WIDE), pooled),
    "siglip without its head": (
        lambda: build("SiglipVisionModel", "SiglipVisionConfig", **WIDE, vision_use_head=False),
        mean_token,
    ),
    "siglip classifier": (lambda: with_text("SiglipForImageClassification", "Siglip"), logits),
}


def save(model: Network, randomise, folder: Path) -> None:
    model.load_state_dict(randomise(model.state_dict()))
    model.eval().save_pretrained(folder)


def read(folder: Path, *, inside: Network | None = None, **changes) -> Pretrained:
    """The folder that transformers wrote; `inside` gives the names inside transformers instead."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    file = load_file(folder / "model.safetensors")
    state = inside.state_dict() if inside is not None else file
    return read_huggingface({**config, **changes}, None, state, str(folder))


def ours(found: Pretrained) -> nn.Module:
    with torch.device("meta"):
        model = assemble_model(found.config)
    model.load_state_dict(found.state, assign=True)
    return model.eval()


@torch.no_grad()
def assert_equal(
    found: Pretrained, theirs: Network, answer: Answer = logits, *, batch: int = 3
) -> None:
    config = found.config
    images = torch.randn(batch, config.channels, config.image_size, config.image_size)
    mine, other = ours(found)(images), answer(theirs, images)
    spread = other.std(dim=0).mean()
    assert spread > 0.01 * other.abs().max(), "answers alike for all images show nothing"
    difference = (mine - other).abs().max() / other.abs().max()
    assert difference < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_answers_as_transformers_does(name, randomise, tmp_path):
    make, answer = CASES[name]
    theirs = make()
    save(theirs, randomise, tmp_path)
    found = read(tmp_path)
    assert_equal(found, theirs, answer)
    classifies = answer is logits
    assert found.config.num_classes == (3 if classifies else 0)
    assert found.classes == (("cat", "dog", "emu") if classifies else None)
    assert found.license is None
    assert found.origin == f"transformers {type(theirs).__name__}"


@pytest.mark.parametrize("name", CASES)
def test_names_in_memory_are_read(name, randomise, tmp_path):
    theirs = CASES[name][0]()
    save(theirs, randomise, tmp_path)
    file, memory = read(tmp_path), read(tmp_path, inside=theirs)
    assert file.config == memory.config
    assert file.state.keys() == memory.state.keys()
    assert all(torch.equal(file.state[key], memory.state[key]) for key in file.state)


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
    if model_type.startswith("dinov2"):
        del defaults["intermediate_size"]
    if model_type == "dinov2":
        assert defaults.pop("num_register_tokens") == 0
    if not hasattr(config, "vision_use_head"):  # before transformers 5.23 it had no name
        defaults.pop("vision_use_head", None)
    assert defaults == {name: getattr(config, name) for name in defaults}


@pytest.fixture
def saved(randomise, tmp_path) -> Callable[[str], tuple[dict, dict[str, Tensor]]]:
    """config.json and tensors of a case, as transformers saves them."""

    def make(name: str) -> tuple[dict, dict[str, Tensor]]:
        save(CASES[name][0](), randomise, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        return config, load_file(tmp_path / "model.safetensors")

    return make


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
    ],
)
def test_dropped_tensors_are_noted(name, left_out, saved):
    config, state = saved(name)
    found = read_huggingface(config, None, state, "a folder")
    for part in left_out:
        assert any(note.startswith(f"left out: {part}") for note in found.notes), found.notes


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
        ("vit", {"model_type": "siglip2"}, "model_type='siglip2'"),
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


@pytest.mark.parametrize("name", [CLASSIFIER, "registers gated", "dinov3", "siglip"])
def test_tensors_of_any_other_shape_are_refused(name, saved):
    config, state = saved(name)
    read = [key for key in state if not key.startswith(("text", "logit")) and "mask" not in key]
    for key in read:
        for odd in ODD:
            with pytest.raises(WeightsError):
                read_huggingface(config, None, {**state, key: odd}, "x")
        without = {other: tensor for other, tensor in state.items() if other != key}
        with pytest.raises(WeightsError):
            read_huggingface(config, None, without, "x")
