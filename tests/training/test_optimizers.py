"""Parameter groups and optimisers, against timm's layer decay."""

import pytest
import torch
from torch import nn

from tests.training.runs import SIZES
from vit.config import TrainingConfig
from vit.config.setting_layers import make_config
from vit.errors import ConfigError
from vit.training.optimizers import layer_of, make_optimizer, parameter_groups, set_lr

from vit.model.build import create_model  # isort: skip


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_tiny_patch16_224", num_classes=3, registers=2, **SIZES)


def test_weight_decay_stays_off_biases_norms_positions_and_tokens(network):
    groups = parameter_groups(network, depth=2, weight_decay=0.05, layer_decay=1.0)
    decayed = {name for group in groups if group["weight_decay"] for name in group["names"]}
    kept = {name for group in groups if not group["weight_decay"] for name in group["names"]}
    assert decayed | kept == {name for name, _ in network.named_parameters()}
    assert all(name.endswith(".weight") and "norm" not in name for name in decayed)
    assert {"cls_token", "reg_token", "pos_embed", "norm.weight", "head.bias"} <= kept


def test_relative_positions_do_not_decay_and_are_no_matrices_of_muon():
    model = create_model("vit_tiny_patch16_224", position="relative", **SIZES)
    optimizer = make_optimizer(model, TrainingConfig(optimizer="muon"), depth=2)
    groups = [g for g in optimizer.param_groups if any("rel_pos" in n for n in g["names"])]
    assert sum("rel_pos" in n for g in groups for n in g["names"]) == 2
    assert all(g["weight_decay"] == 0 and g["use_fallback"] for g in groups)


def test_layer_decay_falls_from_the_head_to_the_patches(network):
    groups = parameter_groups(network, depth=2, weight_decay=0.05, layer_decay=0.5)
    scale = {name: group["lr_scale"] for group in groups for name in group["names"]}
    assert scale["head.weight"] == 1.0
    assert scale["blocks.1.attn.qkv.weight"] == scale["norm.weight"] == 0.5
    assert scale["blocks.0.norm1.bias"] == 0.25
    assert scale["patch_embed.proj.weight"] == scale["cls_token"] == scale["pos_embed"] == 0.125


def test_layer_decay_equals_timms(network):
    import timm
    from timm.optim import param_groups_layer_decay

    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2,
        num_classes=3, reg_tokens=2,
    )  # fmt: skip
    expected = {}
    for group in param_groups_layer_decay(theirs, layer_decay=0.7):
        for name, parameter in theirs.named_parameters():
            if any(parameter is member for member in group["params"]):
                expected[name] = group["lr_scale"]
    ours = {name: 0.7 ** (3 - layer_of(name, 2)) for name, _ in network.named_parameters()}
    shared = ours.keys() & expected.keys()
    assert len(shared) > 20
    assert {n: ours[n] for n in shared} == pytest.approx({n: expected[n] for n in shared})


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd", "muon", "lion"])
def test_optimisers_take_a_step(network, name):
    before = network.blocks[0].attn.qkv.weight.detach().clone()
    optimizer = make_optimizer(network, TrainingConfig(optimizer=name), depth=2)
    named = {name for group in optimizer.param_groups for name in group["names"]}
    assert named == {name for name, _ in network.named_parameters()}
    nn.init.normal_(network.head.weight)
    network(torch.randn(2, 3, 16, 16)).square().sum().backward()
    set_lr(optimizer, 0.01)
    optimizer.step()
    assert not torch.equal(before, network.blocks[0].attn.qkv.weight)


def test_a_setting_the_optimiser_does_not_take_is_refused(network):
    config = make_config({"opt": "sgd", "betas": [0.9, 0.95]}).training
    with pytest.raises(ConfigError, match="optimizer='sgd' has none"):
        make_optimizer(network, config, depth=2)
