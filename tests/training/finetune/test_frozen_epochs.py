"""--freeze-epochs: the head alone first, then all of a pretrained network."""

from pathlib import Path

import pytest
import torch

import vit
from tests.training.children import complete
from tests.training.runs import (
    ON_CPU,
    SIZES,
    assert_equal_runs,
    events,
    last_weights,
    signalled_at,
)
from vit.config.setting_layers import make_config
from vit.errors import ConfigError
from vit.training.finetune.lora import HEAD
from vit.training.train import train
from vit.weights.saved_model import load_run

FREEZE = {"freeze_epochs": 1, "epochs": 3, "lr": 3e-3, "drop_path": 0.1, "ema": 0.9}


@pytest.fixture(scope="module")
def backbone(colour_data, tmp_path_factory) -> Path:
    """A run, whose weights are fine-tuned."""
    folder = tmp_path_factory.mktemp("backbone") / "run"
    settings = {
        **SIZES,
        **ON_CPU,
        "epochs": 2,
        "lr": 3e-3,
        "stem": "conv",
        "stem_norm": "batchnorm",
    }
    settings = {name: settings[name] for name in settings if not name.startswith("stem")}
    return train(make_config({"data": str(colour_data), **settings}), folder).folder


@pytest.fixture
def settings(colour_data, backbone):
    return {"data": str(colour_data), "weights": str(backbone), **ON_CPU, **FREEZE}


@pytest.fixture(scope="module")
def whole(colour_data, backbone, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    data = {"data": str(colour_data), "weights": str(backbone)}
    return train(make_config({**data, **ON_CPU, **FREEZE}), folder, report=False).folder


class Keep:
    """A callback that keeps the network after each step."""

    def __init__(self):
        self.states, self.rates = [], []

    def after_step(self, run, _step):
        state = run.network.state_dict()
        self.states.append({name: tensor.clone() for name, tensor in state.items()})
        self.rates.append({group["lr"] for group in run.optimizer.param_groups})


def test_the_head_learns_first_and_then_all_with_its_own_rates(settings, backbone, tmp_path):
    keep, linear = Keep(), Keep()
    vit.train(make_config(settings), tmp_path / "run", callbacks=[keep], report=False)
    first = load_run(backbone).model.state_dict()
    for step, state in enumerate(keep.states):
        moved = {name for name in first if not torch.equal(state[name], first[name])}
        head = {name for name in first if name.startswith(HEAD)}
        assert head <= moved
        assert (moved == head) is (step < 3), step
    assert len(keep.rates[-1]) > 1  # of each layer its own
    # its epoch is that of the method that trains the head alone
    same = {**settings, "method": "linear", "weight_decay": 0.05}
    same = {name: same[name] for name in same if name != "freeze_epochs"}
    vit.train(make_config(same), tmp_path / "linear", callbacks=[linear], report=False)
    for one, other in zip(keep.states[:3], linear.states, strict=False):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_moments_of_what_was_frozen_begin_with_the_first_step_of_all(whole):
    steps = {
        name.split("/")[1]: value.item()
        for name, value in last_weights(whole).items()
        if name.endswith("/step")
    }
    assert {steps[name] for name in steps if name.startswith(HEAD)} == {9}
    assert {steps[name] for name in steps if not name.startswith(HEAD)} == {6}


EVERY = [pytest.param(step, marks=pytest.mark.slow) for step in (1, 2, 4, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize("step", [3, *EVERY])
def test_a_run_that_is_cut_at_any_step_ends_as_if_it_was_not(settings, whole, tmp_path, step):
    with signalled_at(step):
        vit.train(make_config(settings), tmp_path / "run", report=False)
    vit.train(out=tmp_path / "run", resume=True, report=False)
    assert_equal_runs(whole, tmp_path / "run")
    one, other = last_weights(whole), last_weights(tmp_path / "run")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": None}, "freeze_epochs=1: weights=none does not read it; another weights does"),
        ({"method": "lora"}, "freeze_epochs=1: method=lora does not read it; method=full does"),
        ({"method": "linear"}, "freeze_epochs=1: method=linear does not read it"),
        ({"freeze_epochs": 3}, "freeze_epochs=3: must be less than epochs=3"),
        ({"freeze_epochs": 0}, "freeze_epochs=0: must be at least 1"),
    ],
)
def test_settings_without_a_second_part_are_refused(settings, tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        vit.train(make_config({**settings, **changes}), tmp_path / "run")


@pytest.mark.slow
def test_the_frozen_epochs_take_the_place_of_the_probe(settings, whole, tmp_path):
    assert "probe_first: false\n" in (whole / "config.yaml").read_text()
    cache = {"feature_cache": str(tmp_path / "cache"), "probe_first": True, "epochs": 2}
    vit.train(make_config({**settings, **cache}), tmp_path / "run", report=False)
    assert [event["epoch"] for event in events(tmp_path / "run")] == [0, 1, 2]


def train_plainly(config, out) -> int:
    vit.train(config, out, report=False)
    return 0


@pytest.mark.slow
def test_two_processes_freeze_as_one_does(settings, tmp_path):
    config = make_config({**settings, "drop_path": 0, "workers": 0, "ema": 0})
    for processes in (1, 2):
        out, log = tmp_path / f"{processes}", tmp_path / "log"
        complete(train_plainly, config, out, log=log, processes=processes)
    one, other = (last_weights(tmp_path / name) for name in "12")
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=3e-4, rtol=1e-2)
