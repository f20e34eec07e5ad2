"""Renaming tables, qkv fusion and the check of a state dict against a network."""

import re

import pytest
import torch

from vit.config import ModelConfig
from vit.errors import WeightsError
from vit.model.build import check_fit, meta_model
from vit.weights.formats.state_dict_names import (
    deduplicate_names,
    flatten_patches,
    fuse_qkv,
    rename,
)

CONFIG = ModelConfig(image_size=16, patch_size=8, dim=32, depth=1, num_heads=4, num_classes=3)
ONE = torch.zeros(1)
TABLE = (
    (r"layer.{b}.{qkv}.{p}", "blocks.{b}.attn.{qkv}.{p}"),
    (r"layer.{b}.{fc}.{p}", "blocks.{b}.mlp.{fc}.{p}"),
    (r"(?:last|final).{p}", "norm.{p}"),
)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(t.shape) for name, t in meta_model(CONFIG).state_dict().items()}


def test_a_matching_state_dict_passes(state):
    model = meta_model(CONFIG)
    check_fit(state, model)
    loaded = model.load_state_dict(state, assign=True, strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])


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
def test_mismatched_tensors_are_named(state, change, message):
    change(state)
    with pytest.raises(WeightsError, match=message):
        check_fit(state, meta_model(CONFIG))


def test_names_follow_the_table():
    state = {"layer.3.query.bias": ONE, "layer.0.fc2.weight": ONE, "last.bias": ONE}
    assert set(rename(state, TABLE, "Theirs")) == {
        "blocks.3.attn.query.bias",
        "blocks.0.mlp.fc2.weight",
        "norm.bias",
    }


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["blocks.0.x", "resnet.y"], "Theirs has no blocks.0.x, resnet.y"),
        (["last.bias", "final.bias"], "final.bias is a second tensor for norm.bias"),
        # a name is matched whole
        (["module.last.bias"], "Theirs has no module.last.bias"),
        (["last.bias.0"], "Theirs has no last.bias.0"),
        (["lastXbias"], "Theirs has no lastXbias"),
        (["last.gamma"], "Theirs has no last.gamma"),
    ],
)
def test_names_beside_the_table_are_refused(names, message):
    with pytest.raises(WeightsError, match=re.escape(message)):
        rename(dict.fromkeys(names, ONE), TABLE, "Theirs")


def test_duplicate_class_names_get_an_index():
    assert deduplicate_names(["cat", "dog"]) == (("cat", "dog"), ())
    names, (note,) = deduplicate_names(["crane", "owl", "crane", "crane (0)"])
    assert names == ("crane (0)", "owl", "crane (2)", "crane (0) (3)")
    assert "crane" in note


def test_a_missing_key_matrix_is_named():
    state = {f"blocks.0.attn.{word}.weight": ONE for word in ("query", "value")}
    with pytest.raises(WeightsError, match=r"blocks.0.attn.key.weight is missing"):
        fuse_qkv(state)


def test_weights_of_something_else_are_refused():
    with pytest.raises(WeightsError, match="not a Vision Transformer's"):
        flatten_patches({"conv1.weight": ONE})
