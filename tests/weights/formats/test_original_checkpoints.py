"""Checkpoints of the original repositories, and state dicts without metadata."""

import json
import re
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.eva import checkpoint_filter_fn as eva_filter
from timm.models.vision_transformer import checkpoint_filter_fn as vit_filter
from torch import Tensor

from tests.weights.parity import parity_error
from vit.data.preprocessing import Preprocessing
from vit.errors import WeightsError
from vit.weights.formats.timm_weights import looks_like_timm, read_timm
from vit.weights.load_model import open_pretrained
from vit.weights.state_dict_readers import read_state

OPEN_CLIP = "open_clip_model.safetensors"
SMALL = {"embed_dim": 128, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8}
State = dict[str, Tensor]


def renamed(state: State, *table: tuple[str, str]) -> State:
    for theirs, other in table:
        state = {re.sub(theirs, other, name): tensor for name, tensor in state.items()}
    return state


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "model.module._orig_mod."])
def test_wrapper_prefixes_are_removed(wrapper, build):
    model, state = build("vit_small_patch16_224")
    found = read_timm(
        {f"{wrapper}{name}": t for name, t in state.items()}, architecture=None, where="x"
    )
    assert parity_error(found, model) < 1e-4


@pytest.mark.parametrize("prefix", ["backbone.", "module.backbone.", "encoder."])
def test_the_encoder_of_a_training_is_taken(prefix, build):
    model, state = build("vit_small_patch16_224", num_classes=0)
    state = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    head = f"{prefix.removesuffix('backbone.').removesuffix('encoder.')}head.mlp.0.weight"
    assert looks_like_timm({**state, head: torch.zeros(2, 2)})
    found = read_timm({**state, head: torch.zeros(2, 2)}, architecture=None, where="x")
    assert parity_error(found, model) < 1e-4
    assert any("head.mlp.0.weight" in note for note in found.notes)


def test_a_stray_tensor_does_not_hide_the_network(build):
    _, state = build("vit_small_patch16_224")
    with pytest.raises(WeightsError, match=r"unknown: encoder\.proj\.weight"):
        read_timm({**state, "encoder.proj.weight": torch.zeros(2, 2)}, architecture=None, where="x")


def test_i_jepa_is_read_as_timm_does(build, tmp_path):
    name = "vit_huge_patch14_gap_224"
    model, state = build(name, num_classes=0)
    part = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"encoder": part, "predictor": part, "opt": {}}, tmp_path / "x.pth.tar")
    model.load_state_dict(vit_filter({"encoder": part}, model))
    read = read_state(tmp_path / "x.pth.tar").tensors
    found = read_timm(read, architecture=name, model_args=SMALL, where="x")
    assert parity_error(found, model) < 1e-4


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", ["vit_giant_patch14_dinov2", "vit_giant_patch14_reg4_dinov2"])
def test_dinov2(name, named, build):
    model, state = build(name, num_classes=0)
    state = renamed(
        state, (r"mlp\.fc1\.", "mlp.w12."), (r"mlp\.fc2\.", "mlp.w3."), (r"^reg_", "register_")
    )
    state["mask_token"] = torch.zeros(1, 128)
    if "register_token" in state:
        state["register_tokens"] = state.pop("register_token")
        first = torch.randn(1, 1, 128)
        state["pos_embed"] = torch.cat([first, state["pos_embed"]], dim=1)
        state["cls_token"] = state["cls_token"] - first
    model.load_state_dict(vit_filter(dict(state), model))
    args = {"architecture": name, "model_args": SMALL} if named else {"architecture": None}
    found = read_timm(state, **args, where="x")
    assert parity_error(found, model) < 1e-4
    assert "left out: mask_token (the mask token of pre-training)" in found.notes


@pytest.mark.parametrize("named", [True, False])
def test_dinov3(named, build):
    model, _ = build("vit_small_patch16_dinov3_qkvb", global_pool="token")
    _, state = build("vit_small_patch16_224", no_embed_class=True, init_values=1e-5, num_classes=0)
    del state["pos_embed"]
    state["storage_tokens"] = torch.randn(1, 4, 128)
    state["mask_token"] = torch.zeros(1, 128)
    state["rope_embed.periods"] = (100 ** (torch.arange(16) / 16)).bfloat16().float()
    for block in (0, 1):
        mask = torch.ones(3, 128)
        mask[1] = 0
        state[f"blocks.{block}.attn.qkv.bias_mask"] = mask.flatten()
    model.load_state_dict(eva_filter(dict(state), model))
    args = {**SMALL, "global_pool": "token"}
    named_args = {"architecture": "vit_small_patch16_dinov3_qkvb", "model_args": args}
    found = read_timm(state, **(named_args if named else {"architecture": None}), where="x")
    assert parity_error(found, model) < 1e-4
    assert found.config.rotary_temperature == 100
    assert any("rope_embed.periods" in note for note in found.notes)
    without = {"architecture": "vit_small_patch16_dinov3", "model_args": args}
    with pytest.raises(WeightsError, match=r"unknown: blocks.0.attn.qkv.bias"):
        read_timm(state, **without, where="x")
    for name in [name for name in state if name.endswith("qkv.bias")]:
        state[name] = torch.zeros(384)
    zeros = read_timm(state, **without, where="x")
    assert not zeros.config.qkv_bias
    assert any("all zeros" in note for note in zeros.notes)


CLIP = (
    (r"^cls_token$", "class_embedding"),
    (r"^pos_embed$", "positional_embedding"),
    (r"^patch_embed\.proj\.", "conv1."),
    (r"^norm_pre\.", "ln_pre."),
    (r"^norm\.", "ln_post."),
    (r"^blocks\.", "transformer.resblocks."),
    (r"\.attn\.qkv\.", ".attn.in_proj_"),
    (r"\.attn\.proj\.", ".attn.out_proj."),
    (r"\.norm([12])\.", r".ln_\1."),
    (r"\.fc1\.", ".c_fc."),
    (r"\.fc2\.", ".c_proj."),
    (r"^", "visual."),
)


@pytest.fixture(params=["openai", "laion"])
def clip(request, build):
    """A tower of CLIP in timm, and its state dict in CLIP's own names."""
    name = f"vit_base_patch16_clip{'_quickgelu' * (request.param == 'openai')}_224"
    model, state = build(name, num_classes=0)
    state = renamed(state, *CLIP)
    state["visual.class_embedding"] = state["visual.class_embedding"].flatten()
    state["visual.positional_embedding"] = state["visual.positional_embedding"][0]
    return name, model, state


@pytest.mark.parametrize("named", [True, False])
def test_clip(clip, named):
    name, model, state = clip
    state["visual.proj"] = torch.randn(128, 16)
    state["token_embedding.weight"] = torch.randn(3, 4)
    state["logit_scale"] = torch.tensor(1.0)
    integers = ["input_resolution"] if "quickgelu" in name else []
    assert looks_like_timm(state)
    args = {"architecture": name, "model_args": SMALL} if named else {"architecture": None}
    found = read_timm(state, **args, other_names=integers, where="x")
    assert parity_error(found, model) < 1e-4
    assert any("token_embedding.weight, logit_scale" in note for note in found.notes)
    assert any("left out: proj (CLIP's" in note for note in found.notes)


@pytest.mark.parametrize("clip", ["openai"], indirect=True)
def test_a_saved_state_dict_of_openai(clip, tmp_path):
    _, model, state = clip
    whole = {"input_resolution": torch.tensor(32), "context_length": torch.tensor(77)}
    torch.save({**state, **whole}, tmp_path / "clip.pth")
    found = open_pretrained(tmp_path / "clip.pth")
    assert found.config.activation == "quick_gelu"
    assert parity_error(found, model) < 1e-4
    left = "left out: input_resolution, context_length (integers, which are no weights)"
    assert left in found.notes


def test_a_folder_of_open_clip(clip, tmp_path):
    name, model, state = clip
    save_file({name: t.contiguous() for name, t in state.items()}, tmp_path / OPEN_CLIP)
    prepare = {"mean": [0.4] * 3, "std": [0.6] * 3, "interpolation": "bilinear"}
    content = {
        "model_cfg": {"quick_gelu": "quickgelu" in name, "vision_cfg": {"image_size": 32}},
        "preprocess_cfg": {**prepare, "resize_mode": "squash"},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    found = open_pretrained(tmp_path)
    assert parity_error(found, model) < 1e-4
    assert found.license == "mit"
    prepared = Preprocessing(image_size=(32, 32), resize="squash", crop_share=1.0)
    assert found.preprocessing == replace(
        prepared, interpolation="bilinear", mean=(0.4,) * 3, std=(0.6,) * 3
    )


def test_open_clip_names_its_tower_of_timm(tmp_path):
    model = timm.create_model("test_vit", num_classes=0)
    state = {f"visual.trunk.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / OPEN_CLIP)
    content = {"model_cfg": {"vision_cfg": {"timm_model_name": "test_vit"}}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    assert open_pretrained(tmp_path).origin == "timm test_vit"
    (tmp_path / "open_clip_config.json").write_text("{}")
    assert open_pretrained(tmp_path).origin == "a network in timm's names"


def test_open_clip_with_a_tower_of_timm(build):
    model, state = build("vit_base_patch16_siglip_224", num_classes=0)
    state = {f"visual.trunk.{name}": tensor for name, tensor in state.items()}
    state |= {"text.a": torch.zeros(1), "visual.head.proj.weight": torch.zeros(2, 128)}
    found = read_timm(state, architecture=None, where="x")
    assert parity_error(found, model) < 1e-4
    assert any("text.a, visual.head.proj.weight" in note for note in found.notes)


def test_mae_without_its_decoder(build):
    model, state = build("vit_base_patch16_224", num_classes=0)
    extra = ("mask_token", "decoder_pos_embed", "decoder_blocks.0.norm1.weight")
    found = read_timm(
        {**state, **{name: torch.zeros(1) for name in extra}}, architecture=None, where="x"
    )
    assert parity_error(found, model) < 1e-4
    left = [note for note in found.notes if note.startswith("left out")]
    assert all(any(name in note for note in left) for name in extra)


def test_deit3_with_its_own_names(build):
    model, state = build("deit3_small_patch16_224", num_classes=5)
    state = renamed(state, (r"\.ls([12])\.gamma", r".gamma_\1"))
    assert parity_error(read_timm(state, architecture=None, where="x"), model) < 1e-4


def test_a_head_of_two_layers_is_left_out(build):
    _, state = build("vit_base_patch16_224")
    state["pre_logits.fc.weight"] = torch.zeros(128, 128)
    found = read_timm(state, architecture=None, where="x")
    assert found.config.num_classes == 0
    assert any("pre_logits.fc.weight" in n and "head.bias" in n for n in found.notes)


def test_other_networks_do_not_look_like_it():
    for name in ("resnet18", "swin_tiny_patch4_window7_224", "mixer_s16_224"):
        with torch.device("meta"):
            assert not looks_like_timm(timm.create_model(name).state_dict())
