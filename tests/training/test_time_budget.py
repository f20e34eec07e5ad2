"""Epochs that fit a given time, on a clock that the tests control."""

import dataclasses
import itertools
import math
import re
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vit import timing
from vit.config.stored_config import stored_config
from vit.errors import ConfigError
from vit.training import time_budget, trainer, training_loop
from vit.training.distributed.devices import make_accelerator
from vit.training.lr_schedule import image_side, learning_rate
from vit.training.settings_from_data import prepare_data
from vit.training.time_budget import Costs, count_that_fit, fit_time, settle_steps
from vit.training.train import train
from vit.training.training_context import Step
from vit.training.validation import Validation

STEP, VALIDATION, COMPILING, STARTING = 0.25, 0.5, 20.0, 2.0
SIZES = {"image_size": 32, "patch_size": 4}
GROWING = {**SIZES, "start_image_size": 8}


class Clock:
    """Stands still between the steps and validations of a test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.step, self.validation = STEP, VALIDATION
        self.steps: list[int] = []
        self.validated: list[int] = []

    def __call__(self) -> float:
        return self.now

    def train_one_step(self, run, micro_batches, **_):
        """Costs by the number of pixels; what is new in the process or the run costs more."""
        side = micro_batches[0].images.shape[-1]
        self.now += COMPILING * (side not in self.steps)
        self.steps.append(side)
        begun = run.__dict__.setdefault("begun", set())
        self.now += STARTING * (side not in begun)
        begun.add(side)
        self.now += self.step * side**2 / run.config.model.image_size**2
        return Step(0.0, 12, 0.0, 0.0, 0, False)

    def validate(self, _, loader, expected):
        images = sum(len(batch.labels) for batch in loader)
        assert images == expected
        self.validated.append(images)
        self.now += self.validation * images / 21
        return Validation(images, {"val_loss": 1.0, "val_top1": 0.5}, 0)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for name, value in {"SAVE": 0.0, "DISK": float("inf"), "REPORT": 0.0}.items():
        monkeypatch.setattr(time_budget, name, value)
    for module in (time_budget, timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock, monotonic=clock))
    monkeypatch.setattr(time_budget, "train_one_step", clock.train_one_step)
    monkeypatch.setattr(time_budget, "validate", clock.validate)
    monkeypatch.setattr("vit.training.final_report.MIN_DISTANCES", 99)  # a pass with its own time
    return clock


@pytest.fixture
def fit(tiny_config):
    """Settings for a time, the lines that were said, and the settings that were found."""

    def act(began: float, planned: bool = False, **changes):
        said: list[str] = []
        config = tiny_config(**{"warmup_epochs": None, **changes})
        accelerator = make_accelerator(config.run)
        config, splits, _ = prepare_data(config, accelerator, said.append)
        fitted, act.budget = fit_time(
            config, splits, accelerator, said.append, began=began, planned=planned
        )
        assert accelerator._models == accelerator._optimizers == []
        return config, said, fitted

    return act


def fit_costs(said: list[str]) -> tuple[float, float]:
    """Seconds of a step and of a validation that a line names."""
    match = re.search(r"\((\S+) s a step, (\S+) s a validation\)", said[0])
    assert match is not None
    return float(match[1]), float(match[2])


def test_the_schedule_ends_within_the_time(clock, fit):
    config, said, fitted = fit(95.0, time="5m")
    assert config.training.epochs == 3
    assert fitted.training.time is None
    found = {"epochs": 3, "steps": None, "epoch_steps": None, "time": "5m"}
    training = dataclasses.replace(fitted.training, **found)
    assert dataclasses.replace(fitted, training=training) == config  # nothing else has changed
    spent = clock.now - 95
    assert spent < 5 + COMPILING + 2 * STARTING + 300 / 10
    steps, epochs = fitted.training.steps, fitted.training.epochs
    assert epochs == math.ceil(steps / fitted.training.epoch_steps)
    needed = spent + STARTING + steps * STEP + epochs * VALIDATION
    assert 0.99 * 300 < needed <= 0.995 * 300
    assert epochs * VALIDATION <= time_budget.VALIDATIONS_SHARE * 300
    match = re.fullmatch(
        r"note: time=5m: ([\d,]+) steps \(0\.25 s a step, 0\.5 s a validation\), about 5 min",
        said[0],
    )
    assert match is not None
    assert int(match[1].replace(",", "")) == steps
    assert len(said) == 1
    assert fit.budget is None  # a cosine cannot settle its length on the way


@pytest.mark.slow
def test_the_pass_over_test_images_counts_towards_the_time(clock, fit, tiny_config, tmp_path):
    shutil.copytree(tiny_config().data.data, tmp_path / "data")
    (tmp_path / "data/val").rename(tmp_path / "data/test")
    settings = {"time": "5m", "data": str(tmp_path / "data")}
    fit(clock.now, **settings)  # compiles
    with_test = fit(clock.now, **settings)[2].training.steps
    shutil.rmtree(tmp_path / "data/test")
    steps = fit(clock.now, **settings)[2].training.steps
    assert steps - with_test == pytest.approx(VALIDATION / STEP, abs=1)


@pytest.mark.slow
def test_images_that_grow_cost_less_at_first(clock, fit):
    _, _, fitted = fit(100.0, time="5m", **GROWING)
    assert set(clock.steps) == {8, 32}  # the smallest and the full size were measured
    steps, epochs = fitted.training.steps, fitted.training.epochs
    sides = [
        image_side(fitted, step // fitted.training.epoch_steps, epochs) for step in range(steps)
    ]
    assert {8, 12, 16, 20, 24, 28, 32} == set(sides)
    spent = clock.now - 100
    seconds = sum(STEP * side**2 / 32**2 for side in sides)
    needed = spent + 2 * STARTING + seconds + epochs * VALIDATION
    assert 0.99 * 300 < needed <= 0.995 * 300
    _, _, full = fit(100.0, time="5m", image_size=32, patch_size=4)
    assert full.training.steps < steps


def test_the_last_whole_epoch_has_images_of_full_size(clock, fit):
    config, _, _ = fit(clock.now, time="5m", **GROWING)
    sides = [image_side(time_budget.with_growth(config, 4.3), epoch, 5) for epoch in range(5)]
    assert sides == [8, 16, 24, 32, 32]


@pytest.mark.slow
def test_an_epoch_remains_a_pass_over_the_images_if_settings_count_in_epochs(clock, fit):
    _, _, fitted = fit(clock.now, time="5m", warmup_epochs=2)
    assert fitted.training.epoch_steps is None
    assert fitted.training.epochs == math.ceil(fitted.training.steps / 3)


@pytest.mark.parametrize(
    "pace", [*(pytest.param(pace, marks=pytest.mark.slow) for pace in (0.8, 1.0)), 1.5]
)
def test_the_number_of_steps_adapts_when_the_cooldown_begins(clock, fit, pace):
    _, _, fitted = fit(clock.now, time="10m", schedule="wsd", **GROWING)
    training = fitted.training
    each, ends = training.epoch_steps, fit.budget.ends
    first = training.steps - round(training.cooldown_epochs * each)
    assert first % each == 0
    assert 0.25 < first / training.steps < 0.35
    costs, accelerator = fit.budget.costs, make_accelerator(fitted.run)
    took = pace * costs.between(fitted, each, 0, first)
    clock.now = ends - costs.ending - costs.between(fitted, each, 0, training.steps) + took

    def rate_of(config):
        return learning_rate(config.training, epoch_steps=each, total=config.training.steps)

    settled = settle_steps(fitted, rate_of(fitted), fit.budget, each, first, pace, accelerator)
    left = pace * (costs.between(settled, each, first, settled.training.steps) + costs.ending)
    assert ends - 2 * pace * STEP - VALIDATION < clock.now + left <= ends
    sizes = [image_side(fitted, epoch, training.epochs) for epoch in range(first // each)]
    again = [image_side(settled, n, settled.training.epochs) for n in range(first // each)]
    assert sizes == again  # what was learned is what the settings say
    assert settled.training.cooldown_epochs == (settled.training.steps - first) / each
    # once more an epoch later: what the first of the cooldown had, it has in the new settings
    clock.now -= 30
    later = settle_steps(
        settled, rate_of(settled), fit.budget, each, first + each, pace, accelerator
    )
    assert later.training.steps > settled.training.steps
    assert (len(settled.training.cooldown_shares), len(later.training.cooldown_shares)) == (1, 2)
    before, after = rate_of(settled), rate_of(later)
    steps = range(first + each + 1)
    assert [before(step) for step in steps] == [after(step) for step in steps]
    assert after(first + 2 * each) == pytest.approx(
        fitted.training.lr * later.training.cooldown_shares[1]
    )
    assert after(later.training.steps - 1) < 0.1 * fitted.training.lr


@pytest.mark.slow
@pytest.mark.parametrize("slower", [0.9, 3.0])
def test_a_machine_that_changes_in_the_last_epoch_still_ends_in_time(
    clock, tiny_config, tmp_path, monkeypatch, capfd, slower
):
    began, seconds = clock.now, 300
    clock.step, clock.validation = 2.0, 2.5
    made: list[tuple[int, float]] = []

    def train_one_step(run, micro_batches, epoch, real=training_loop.train_one_step, **options):
        clock.now += clock.step * (slower if clock.now - began > 0.85 * seconds else 1.0)
        step = real(run, micro_batches, epoch, **options)
        made.append((epoch, step.lr))
        return step

    def validate(*given, real=trainer.validate):
        clock.now += clock.validation
        return real(*given)

    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=clock, monotonic=clock))
    monkeypatch.setattr(training_loop, "train_one_step", train_one_step)
    monkeypatch.setattr(trainer, "validate", validate)
    config = tiny_config(warmup_epochs=None, time=f"{seconds}s", schedule="wsd")
    train(config, tmp_path / "a", began=began)
    note = f"note: time={seconds}s chooses the length of the training: epochs=3 is not used"
    assert note in capfd.readouterr().err
    took = clock.now + clock.validation - began  # the report validates once more
    assert 0.97 * seconds < took <= seconds
    settled = stored_config(tmp_path / "a")
    training, last = settled.training, settled.training.cooldown_steps[-1]
    start = training.steps - round(training.cooldown_epochs * training.epoch_steps)
    assert start + last > (training.epochs - 1) * training.epoch_steps  # settled within it
    first, made[:] = list(made), []
    train(settled, tmp_path / "b")
    assert made == first
    assert len(made) == training.steps
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in "ab"]
    assert models[0] == models[1]


def test_a_time_that_is_too_short_is_refused_with_a_longer_one(clock, fit):
    with pytest.raises(ConfigError, match="time=29s: start, one step") as refused:
        fit(clock.now, time="29s")
    enough = re.search(r"use --time (\d+s) or more", str(refused.value))
    assert enough
    clock.steps.clear()
    _, said, fitted = fit(clock.now, time=enough[1])
    assert fitted.training.epochs >= 1
    warning = "can hardly learn anything, and the rest of the time goes to start"
    assert (warning in said[-1]) == (fitted.training.steps < 20)
    assert fitted.training.steps < 20


@pytest.mark.slow
def test_a_time_that_nobody_asked_for_gets_longer_on_a_slow_machine(clock, fit):
    began = clock.now
    _, said, fitted = fit(began, planned=True, time="29s")  # refused above
    note = re.fullmatch(
        r"note: time=(\d+)s instead of the planned 29s: start, validations and report take "
        r"(\d+) s on this machine, which is slow or busy", said[0]
    )  # fmt: skip
    assert note
    assert int(note[1]) == pytest.approx(int(note[2]) + 29 / 2, abs=1.5)
    assert fitted.training.steps * STEP > 0.9 * 29 / 2
    began = clock.now
    _, said, _ = fit(began, planned=True, time="5m")
    assert "instead of" not in said[0]


def test_a_warmup_that_does_not_fit_is_refused_with_the_steps_that_fit(clock, fit):
    with pytest.raises(ConfigError, match=r"time=50s has room for \d+ epochs: warmup_epochs=25"):
        fit(clock.now, time="50s", warmup_epochs=25, epochs=30)


def test_without_a_time_nothing_is_measured(clock, fit):
    config, said, fitted = fit(0.0)
    assert fitted == config
    assert not said
    assert not clock.steps


def test_bursts_of_loading_are_measured(clock, fit, monkeypatch):
    """Eight batches come at once, then comes a pause; the first came before the clock ran."""
    calls = itertools.count(1)

    def train_one_step(run, micro_batches, epoch):
        call = next(calls)
        clock.now += 0.8 if call > 16 and call % 8 == 1 else 0.01
        return Step(0.0, 12, 0.0, 0.0, 0, False)

    monkeypatch.setattr(time_budget, "train_one_step", train_one_step)
    _, said, _ = fit(100.0, time="10m")
    step = float(re.search(r"\((\S+) s a step", said[0])[1])
    assert step == pytest.approx((0.8 + 7 * 0.01) / 8, rel=0.15)


@pytest.mark.slow
def test_measuring_a_training_changes_no_state(fit, monkeypatch, data_with_a_bad_image):
    monkeypatch.setattr(time_budget, "MOST_SECONDS", 0.05)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    _, said, fitted = fit(
        time.monotonic(),
        time="1h",
        data=str(data_with_a_bad_image),
        workers=1,
        accumulate=3,
    )
    assert fitted.training.epochs > 1
    assert fitted.data.on_bad_image == "stop"
    assert "time=1h" in said[0]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


@pytest.mark.parametrize("room", [0.0, 0.9, 1.0, 6.99, 7.0, 7.01, 250.0])
def test_the_number_of_steps_is_the_largest_that_fits(room):
    found = count_that_fit(room, lambda epochs: epochs * 1.0)
    assert found == int(room)


def test_saving_and_ending_count_towards_the_time():
    costs = Costs(start=1, small_step=2, full_step=2, validation=3, saving=4, ending=5)
    config = SimpleNamespace(
        model=SimpleNamespace(image_size=16, patch_size=8),
        training=SimpleNamespace(start_image_size=None, growth_epochs=None),
    )
    assert costs.of(config, epoch_steps=10, steps=20) == 1 + 2 * (10 * 2 + 3 + 4) + 5
    assert costs.of(config, epoch_steps=10, steps=11) == 1 + 11 * 2 + 2 * (3 + 4) + 5
    assert costs.between(config, 10, 10, 11) == 2 + 3 + 4
    later = dataclasses.replace(costs, setup=100)
    assert later.of(config, epoch_steps=10, steps=20) == costs.of(config, 10, 20) + 100
