"""Schedule, groups, losses and moving average against formulas and torch's own."""

import dataclasses
import math
from functools import partialmethod

import pytest
import torch
import torch._dynamo.config as dynamo
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vit.config import TrainingConfig
from vit.config.parser import make_config
from vit.errors import ConfigError
from vit.tasks.losses import smoothed_cross_entropy
from vit.training.ema import ExponentialMovingAverage, swapped_weights
from vit.training.lr_schedule import CosineSchedule, WarmupStableDecay, image_size_at, learning_rate
from vit.training.optimizers import layer_of, make_optimizer, parameter_groups, set_lr
from vit.training.setup import make_training

from vit.model.build import create_model  # isort: skip

TINY = {"image_size": 16, "patch_size": 8, "dim": 16, "depth": 2, "num_heads": 2}


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_tiny_patch16_224", num_classes=3, registers=2, **TINY)


def test_cosine_equals_torchs():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.001)
    ours = CosineSchedule(peak=0.1, least=0.001, warmup_steps=0, total_steps=50)
    for step in range(50):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_warm_up_rises_to_the_peak_and_the_end_is_the_least():
    rate = CosineSchedule(peak=1.0, least=0.01, warmup_steps=4, total_steps=20)
    assert [rate(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rate(20) == pytest.approx(0.01)
    assert all(rate(step) > rate(step + 1) for step in range(4, 20))


def test_wsd_is_constant_then_linear():
    rate = WarmupStableDecay(
        peak=1.0, least=0.001, warmup_steps=4, cooldown_steps=10, total_steps=20
    )
    assert [rate(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert [rate(step) for step in range(4, 11)] == [1.0] * 7
    assert [rate(step) for step in range(10, 20)] == pytest.approx([1 - n / 10 for n in range(10)])
    assert rate(20) == 0.001


def test_the_cooldown_goes_through_its_shares_and_ends_at_zero():
    rate = WarmupStableDecay(
        peak=1.0, least=0.0, warmup_steps=0, cooldown_steps=25, total_steps=45,
        shares=(0.5, 0.4), epoch_steps=10,
    )  # fmt: skip
    found = [rate(step) for step in (0, 20, 25, 30, 35, 40, 42, 45)]
    assert found == pytest.approx([1, 1, 0.75, 0.5, 0.45, 0.4, 0.24, 0.0])
    straight = dataclasses.replace(rate, shares=())
    known = dataclasses.replace(rate, shares=(straight.share(30), straight.share(40)))
    rates = [[each(step) for step in range(46)] for each in (straight, known)]
    assert rates[0] == pytest.approx(rates[1])  # shares on the line change nothing


def test_wsd_before_the_cooldown_does_not_depend_on_the_length_of_the_run():
    short = TrainingConfig(schedule="wsd", epochs=8, cooldown_epochs=4.5, warmup_epochs=1)
    long = TrainingConfig(schedule="wsd", epochs=12, cooldown_epochs=8.25, warmup_epochs=1)
    rates = [
        learning_rate(training, epoch_steps=20, total=total)
        for training, total in ((short, 150), (long, 225))
    ]
    assert [rates[0](step) for step in range(60)] == [rates[1](step) for step in range(60)]
    assert rates[0](62) < rates[1](60) == short.lr


def test_images_grow_to_full_size_and_fit_the_patch():
    sizes = [image_size_at(epoch, growth=15, start=32, full=64, multiple=8) for epoch in range(20)]
    assert sizes[0] == 32
    assert sizes == sorted(sizes)
    assert set(sizes) == {32, 40, 48, 56, 64}
    assert all(size == 64 for size in sizes[15:])


def test_weight_decay_stays_off_biases_norms_positions_and_tokens(network):
    groups = parameter_groups(network, depth=2, weight_decay=0.05, layer_decay=1.0)
    decayed = {name for group in groups if group["weight_decay"] for name in group["names"]}
    kept = {name for group in groups if not group["weight_decay"] for name in group["names"]}
    assert decayed | kept == {name for name, _ in network.named_parameters()}
    assert all(name.endswith(".weight") and "norm" not in name for name in decayed)
    assert {"cls_token", "reg_token", "pos_embed", "norm.weight", "head.bias"} <= kept


def test_relative_positions_do_not_decay_and_are_no_matrices_of_muon():
    model = create_model("vit_tiny_patch16_224", position="relative", **TINY)
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


def test_an_unknown_optimiser_is_named(network):
    with pytest.raises(ConfigError, match="optimizer='adamq' is not known"):
        make_optimizer(network, TrainingConfig(optimizer="adamq"), depth=2)


def test_a_setting_the_optimiser_does_not_take_is_refused(network):
    config = make_config({"opt": "sgd", "betas": [0.9, 0.95]}).training
    with pytest.raises(ConfigError, match="optimizer='sgd' has none"):
        make_optimizer(network, config, depth=2)


def test_loss_equals_torchs_on_labels():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 4), torch.tensor([0, 3, 1, 1, 2])
    targets = nn.functional.one_hot(labels, 4).float()
    expected = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, labels) * 5
    torch.testing.assert_close(smoothed_cross_entropy(logits, targets, smoothing=0.1), expected)


def test_moving_average_equals_torchs():
    torch.manual_seed(0)
    ours_of, theirs_of = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs_of.load_state_dict(ours_of.state_dict())
    ours = ExponentialMovingAverage(ours_of, 0.9)
    theirs = AveragedModel(theirs_of, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(theirs_of)  # its first update copies
    for step in range(200, 210):  # beyond the early steps, which count more here
        for parameter, other in zip(ours_of.parameters(), theirs_of.parameters(), strict=True):
            parameter.data += 0.1
            other.data += 0.1
        ours.update(step)
        theirs.update_parameters(theirs_of)
    for name, value in theirs.module.named_parameters():
        torch.testing.assert_close(ours.average[name], value.detach())


def test_early_steps_count_more():
    model = nn.Linear(1, 1)
    average = ExponentialMovingAverage(model, 0.999)
    model.weight.data.fill_(5.0)
    for step in range(100):
        average.update(step)
    assert math.isclose(average.average["weight"].item(), 5.0, abs_tol=0.01)


def test_the_average_is_in_place_only_inside():
    model = nn.Linear(1, 1)
    model.weight.data.fill_(1.0)
    average = ExponentialMovingAverage(model, 0.9)
    model.weight.data.fill_(2.0)
    with swapped_weights(model, average.state_dict()):
        assert model.weight.item() == 1.0
    assert (model.weight.item(), average.average["weight"].item()) == (2.0, 1.0)


@pytest.mark.slow
def test_many_patch_sizes_compile_each(monkeypatch, tiny_config):
    sizes = (4, 5, 6, 8, 10, 12, 15, 20, 24, 30)
    settings = {"image_size": 120, "patch_size": 60, "patch_sizes": sizes, "depth": 1}
    config = tiny_config(**settings, drop_path=0.0, compile=True)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    with dynamo.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        run = make_training(config, Accelerator(cpu=True), 10)
        run.model.train()
        for size in config.model.training_patch_sizes:
            run.network.patch_embed.current_patch_size = size
            run.model(torch.zeros(2, 3, 120, 120))
    torch.compiler.reset()
