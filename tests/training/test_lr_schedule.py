"""Learning-rate schedules against torch's own and their formulas."""

import dataclasses

import pytest
import torch
from torch import nn

from vit.config import Config, ModelConfig, TrainingConfig
from vit.errors import ConfigError
from vit.training.lr_schedule import CosineSchedule, WarmupStableDecay, image_side, learning_rate


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
        shares=((10, 0.5), (20, 0.4)),
    )  # fmt: skip
    found = [rate(step) for step in (0, 20, 25, 30, 35, 40, 42, 45)]
    assert found == pytest.approx([1, 1, 0.75, 0.5, 0.45, 0.4, 0.24, 0.0])
    straight = dataclasses.replace(rate, shares=())
    known = dataclasses.replace(rate, shares=((10, straight.share(30)), (15, straight.share(35))))
    rates = [[each(step) for step in range(46)] for each in (straight, known)]
    assert rates[0] == pytest.approx(rates[1])  # shares on the line change nothing


def test_shares_are_of_epochs_unless_their_steps_are_given():
    training = TrainingConfig(schedule="wsd", cooldown_epochs=2.5, cooldown_shares=(0.5, 0.4))
    rates = [
        learning_rate(one, epoch_steps=10, total=45)
        for one in (training, dataclasses.replace(training, cooldown_steps=(10, 20)))
    ]
    assert rates[0] == rates[1]
    assert rates[0](40) == 0.4 * training.lr
    with pytest.raises(ConfigError, match="must be 2 increasing steps"):
        dataclasses.replace(training, cooldown_steps=(20, 10))


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
    config = Config(
        model=ModelConfig(image_size=64, patch_size=8),
        training=TrainingConfig(start_image_size=32, growth_epochs=15),
    )
    sizes = [image_side(config, epoch, 20) for epoch in range(20)]
    assert sizes[0] == 32
    assert sizes == sorted(sizes)
    assert set(sizes) == {32, 40, 48, 56, 64}
    assert all(size == 64 for size in sizes[15:])
