"""Weights that are not what they should be are refused by name."""

import pytest
import torch

from vit.config import ModelConfig
from vit.errors import WeightsError
from vit.weights.folder import empty_model
from vit.weights.formats.names import (
    check_fit,
    from_huggingface,
    from_timm,
    from_torchvision,
    fuse_qkv,
    some,
)

CONFIG = ModelConfig(image_size=16, patch_size=8, dim=32, depth=1, num_heads=4, num_classes=3)
ONE = torch.zeros(1)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(t.shape) for name, t in empty_model(CONFIG).state_dict().items()}


def test_a_fitting_state_is_taken(state):
    check_fit(state, empty_model(CONFIG))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("norm.bias"), "missing: norm.bias"),
        (lambda s: s.update(extra=ONE), "unknown: extra"),
        (lambda s: s.update({"head.bias": ONE}), r"head.bias \(1,\) instead of \(3,\)"),
        (lambda s: s["head.bias"].fill_(float("nan")), "not finite: head.bias"),
        (lambda s: s["head.bias"].fill_(float("inf")), "not finite: head.bias"),
        (lambda s: s.clear(), "missing: cls_token, pos_embed, patch_embed.proj.weight and 17 more"),
    ],
)
def test_what_does_not_fit_is_named(state, change, message):
    change(state)
    with pytest.raises(WeightsError, match=message):
        check_fit(state, empty_model(CONFIG))


@pytest.mark.parametrize("convert", [from_huggingface, from_torchvision])
def test_unknown_names_are_refused(convert):
    with pytest.raises(WeightsError, match=r"has no blocks.0.x, resnet.y"):
        convert({"blocks.0.x": ONE, "resnet.y": ONE})


def test_a_name_is_matched_whole():
    with pytest.raises(WeightsError, match=r"has no module\.class_token"):
        from_torchvision({"module.class_token": ONE})


def test_two_spellings_of_one_tensor_are_refused():
    twice = {
        "vit.layers.0.mlp.fc1.bias": ONE,
        "vit.encoder.layer.0.intermediate.dense.bias": ONE,
    }
    with pytest.raises(WeightsError, match=r"second tensor for blocks.0.mlp.fc1.bias"):
        from_huggingface(twice)


def test_a_missing_key_matrix_is_named():
    state = {f"blocks.0.attn.{word}.weight": ONE for word in ("query", "value")}
    with pytest.raises(WeightsError, match=r"blocks.0.attn.key.weight is missing"):
        fuse_qkv(state)


def test_weights_of_something_else_are_refused():
    with pytest.raises(WeightsError, match="not a Vision Transformer's"):
        from_timm({"conv1.weight": ONE})


def test_names_are_printed_safely_and_shortened():
    assert some(["a\x1b", "b", "c", "d", "e"]) == "a\\x1b, b, c and 2 more"
