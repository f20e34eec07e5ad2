"""Settings follow from the shapes and names of a state dict, or the user is asked for a name."""

import pytest
import timm
import torch

from tests.weights.parity import parity_error
from vit.errors import WeightsError
from vit.weights.formats.infer_architecture import infer_preprocessing
from vit.weights.formats.timm_weights import looks_like_timm, read_timm

Q_AND_QKV = ("blocks.0.attn.q.weight", "blocks.0.attn.qkv.weight")
SIZES = {"embed_dim": 192, "depth": 12, "num_heads": 3, "patch_size": 16}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("vit_small_patch16_224", {}),
        ("vit_small_patch16_224", {"num_classes": 0}),
        ("vit_base_patch16_clip_224", {"num_classes": 5}),
        ("vit_base_patch16_siglip_gap_224", {"num_classes": 5}),
        ("vit_base_patch16_siglip_224", {}),
        ("vit_medium_patch16_gap_256", {"num_classes": 5, "qk_norm": True, "num_heads": 8}),
        ("vit_small_patch14_reg4_dinov2", {}),
        ("vit_giant_patch14_dinov2", {}),
        ("deit3_small_patch16_224", {}),
        ("vit_small_patch16_224", {"reg_tokens": 3, "class_token": False, "global_pool": "avg"}),
    ],
    ids=str,
)
def test_settings_are_inferred_from_shapes(name, args, build):
    model, state = build(name, **args)
    assert looks_like_timm(state)
    found = read_timm(state, architecture=None, where="x.pth")
    assert parity_error(found, model) < 1e-4
    if "qk_norm" not in args:
        assert "num_heads=2 assumed: 64 channels a head" in found.notes
    assert any("norm_eps=1e-0" in note for note in found.notes)


@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch16_224",
        "vit_so400m_patch14_siglip_224",
        "vit_huge_patch14_224",
        "vit_giant_patch14_224",
        "vit_gigantic_patch14_clip_224",
        "vit_giant_patch14_dinov2",
        "vit_giantopt_patch16_siglip_gap_256",
    ],
)
def test_heads_of_large_networks_are_those_of_timm(name):
    with torch.device("meta"):
        model = timm.create_model(name, depth=1)
    found = read_timm(model.state_dict(), architecture=None, where="x")
    assert found.config.num_heads == model.blocks[0].attn.num_heads
    assert any(f"num_heads={found.config.num_heads} assumed" in note for note in found.notes)


@pytest.mark.parametrize(
    ("mark", "trained"),
    [
        ("norm_pre.weight", "vit_base_patch16_clip_224.openai"),
        ("visual.ln_pre.weight", "vit_base_patch16_clip_224.openai"),
        ("module.mask_token", "vit_small_patch14_dinov2.lvd142m"),
        ("storage_tokens", "vit_small_patch16_dinov3.lvd1689m"),
        ("decoder_embed.weight", "vit_base_patch16_224.mae"),
    ],
)
def test_names_of_a_family_decide_the_colours(mark, trained):
    found, (note,) = infer_preprocessing(["cls_token", mark], 224)
    known = timm.get_pretrained_cfg(trained)
    assert (found.mean, found.std) == (known.mean, known.std)
    assert found.interpolation == known.interpolation
    assert "assumed: the middle" in note


def test_other_names_leave_the_colours_open():
    assert infer_preprocessing(["cls_token", "norm.weight"], 224) == (None, ())
    beit = ["mask_token", "blocks.0.attn.relative_position_bias_table"]
    assert infer_preprocessing(beit, 224) == (None, ())


def test_a_model_name_resolves_ambiguous_shapes(build):
    model, state = build("vit_tiny_patch16_224", embed_dim=96, depth=12, num_heads=3, img_size=32)
    with pytest.raises(WeightsError, match=r"x: 96 channels do not split .*model=NAME"):
        read_timm(state, architecture=None, where="x")
    model, state = build("vit_tiny_patch16_224", **SIZES)
    found = read_timm(state, architecture="vit_tiny_patch16_224", where="x")
    assert found.config.image_size == 32
    assert "image_size=32, which pos_embed is for; 224 is usual" in found.notes
    assert parity_error(found, model) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("pos_embed"), "no pos_embed: positions may be rotary; .*model=NAME"),
        (
            lambda s: s.update(pos_embed=torch.zeros(1, 9, 128), reg_token=torch.zeros(1, 4, 128)),
            "9 rows, which is 3 x 3 and 0 or 2 x 2 and 5 .*model=NAME",
        ),
        (lambda s: s.update(pos_embed=torch.zeros(1, 8, 128)), "8 rows, which is no square"),
        (lambda s: s.pop("blocks.0.norm1.weight"), "not a Vision Transformer's"),
        (lambda s: s.pop("blocks.1.norm2.bias"), "missing: blocks.1.norm2.bias"),
        (lambda s: s.update({"blocks.3.norm1.bias": torch.zeros(128)}), "block 2 is missing"),
        (lambda s: s.update({"blocks.0.attn.q_bias": torch.zeros(128)}), "timm's many Eva"),
        (lambda s: s.update(dist_token=torch.zeros(1, 1, 128)), "unknown: dist_token"),
        (lambda s: s.update(reg_token=torch.zeros(4)), "x: "),
        (lambda s: s["head.bias"].fill_(float("nan")), "not finite: head.bias"),
        (lambda s: s.update({"norm.bias": torch.zeros(128).byte()}), "norm.bias holds torch.uint8"),
        (lambda s: s.update({"module.norm.bias": torch.zeros(128)}), "unknown: module.norm.bias"),
        (
            lambda s: s.update(dict.fromkeys(Q_AND_QKV, torch.zeros(384, 128))),
            "blocks.0.attn.q.weight is there beside a whole qkv",
        ),
        (
            lambda s: s.update({"blocks.0.mlp.w12.weight": s["blocks.0.mlp.fc1.weight"]}),
            "two tensors are both blocks.0.mlp.fc1.weight",
        ),
    ],
)
def test_ambiguous_shapes_raise(change, message, build):
    _, state = build("vit_small_patch16_224")
    state = {name: tensor.clone() for name, tensor in state.items()}
    change(state)
    with pytest.raises(WeightsError, match=message):
        read_timm(state, architecture=None, where="x")
