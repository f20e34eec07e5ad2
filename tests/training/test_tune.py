"""`tune`: the plan is trial 0, a search ends in its time, and a killed one loses no trial."""

import itertools
import json
from types import SimpleNamespace

import pytest

from tests.slow_cases import mostly_slow
from tests.training.runs import SIZES, equal_models
from vit.config.setting_layers import make_config, with_settings, write_settings
from vit.config.stored_config import stored_config
from vit.errors import BadImage, ConfigError, DataError, RunError
from vit.stop_signals import Interrupted
from vit.training import training_loop
from vit.training import tune as tuning
from vit.training.plan import plan_training
from vit.training.trainer import TrainingResult
from vit.training.tune import draw_trials, relative_cost, rung_sizes, tune


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "digits"}, "time is missing"),
        ({"time": "5m"}, "data is missing"),
        ({"data": "digits", "time": "5m", "folds": 3}, "folds=3: a tuning validates on one part"),
        ({"data": "digits", "time": "5m", "weights": "runs/x"}, "leave out --model, --weights"),
        ({"data": "digits", "time": "5m", "task": "caption"}, "task=caption: a search compares"),
        ({"data": "digits", "time": "5m", "task": "simclr"}, "task=simclr: a search compares"),
        ({"data": "nowhere", "time": "5m", "precision": "fp32"}, "nowhere: no such folder"),
    ],
)
def test_settings_that_leave_nothing_to_search_are_refused(settings, message, tmp_path):
    with pytest.raises((ConfigError, DataError), match=message):
        tune(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_column_asks_is_known_before_anything_is_measured(tmp_path):
    (tmp_path / "ages.csv").write_text("image,age\n1.png,3\n2.png,4\n")
    asked = {"data": str(tmp_path / "ages.csv"), "target": ("age",), "time": "60s"}
    with pytest.raises(ConfigError, match="task=regression: a search compares classifiers"):
        tune(asked, tmp_path / "out")


def test_trials_are_the_plan_and_different_changes_of_it():
    planned = {"lr": 2e-3, "fallback_lr": 4e-3, "min_crop": 0.35, "optimizer": "muon"}
    config = make_config(planned)
    trials = draw_trials(config, {})
    assert trials[0] == {}
    assert all(trials[1:])
    assert len({json.dumps(one) for one in trials}) == len(trials) >= 18
    searched = {*tuning.FACTORS, *tuning.VALUES}
    assert {*itertools.chain(*trials)} == searched | {"fallback_lr"}
    for changes in trials:
        make_config({**planned, **changes})
        if "lr" in changes:
            assert changes["fallback_lr"] == pytest.approx(2 * changes["lr"], rel=0.01)
            assert 0.39 < changes["lr"] / planned["lr"] < 2.51
    assert draw_trials(config, {}) == trials
    assert draw_trials(with_settings(config, seed=1), {}) != trials
    # a setting that is given stays, and the others are drawn as if it were not
    fixed = draw_trials(config, {"drop_path": 0.15})
    others = [{n: v for n, v in one.items() if n != "drop_path"} for one in trials]
    assert [one for n, one in enumerate(others) if one not in others[:n]] == fixed
    assert not any("lr" in one for one in draw_trials(config, {"lr": 1.0, "fallback_lr": 1.0}))
    characters = with_settings(config, min_crop=1.0)
    assert not any("min_crop" in one for one in draw_trials(characters, {}))
    whole = {"lr": 1e-3, "fallback_lr": None, "weight_decay": 0.0, "min_crop": 1.0}
    with pytest.raises(ConfigError, match="every setting that a tuning searches is given"):
        draw_trials(config, {**whole, "drop_path": 0.0, "smoothing": 0.0})


@pytest.mark.parametrize(
    ("trials", "sizes"),
    [(2, [2]), (3, [3]), (5, [5, 2]), (6, [6, 2]), (9, [9, 3]), (18, [18, 6, 2])],
)
def test_each_rung_has_a_third_of_the_trials(trials, sizes):
    assert rung_sizes(trials) == sizes
    assert relative_cost(trials) == sum(size * 3**at for at, size in enumerate(sizes))


@pytest.fixture
def settings(colour_data, known_speed):
    machine = {"precision": "fp32", "device": "cpu", "workers": 0}
    return {"data": str(colour_data), **SIZES, **machine, "time": "1h", "checkpoint_steps": 1}


def write_run(config, folder, score):
    """A run folder of a finished training, and its result."""
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(folder / "config.yaml", with_settings(config, epochs=1))
    facts = {"epochs": 1, "metric": "val_top1", "score": score, "stopped_early": False}
    (folder / "summary.json").write_text(json.dumps(facts))
    scores = {"top1": score, "loss": 1.0}
    return TrainingResult(
        folder=folder, classes=("a",), epoch=1, val_top1=score, scores=scores, failed={}
    )


@pytest.fixture
def pretended(settings, monkeypatch):
    """Settings, and trainings that take all of their time and learn nothing: `calls` of them.

    The scores of trials are 0.5, of the plan 0.4, and of trial 3 0.7; trial 2 fails.
    """
    state = SimpleNamespace(settings=settings, calls=[], now=0.0, slowness=1.0)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: state.now))

    def train(config, out, report=True, **_):
        assert report == (out.name == "best")
        state.calls.append((out.name, config))
        state.now += state.slowness * config.training.seconds
        if out.name.endswith("02"):
            raise RunError("the loss became nan")
        return write_run(config, out, {"00": 0.4, "03": 0.7}.get(out.name[-2:], 0.5))

    monkeypatch.setattr(tuning, "train", train)
    return state


@pytest.mark.parametrize("time", mostly_slow(["1m", "7m", "24m", "1h", "10h"]))
def test_a_search_fills_its_time_and_a_failed_trial_does_not_end_it(
    pretended, tmp_path, capsys, time
):
    finished = tune({**pretended.settings, "time": time}, tmp_path / "out", began=0.0)
    names = [name for name, _ in pretended.calls]
    first = [name for name in names if name.startswith("rung1")]
    number = {"1m": 3, "7m": 3, "24m": 6, "1h": 9, "10h": 18}[time]
    assert first == [f"rung1-trial{n:02d}" for n in range(number)]
    seconds = make_config({"time": time}).training.seconds
    assert pretended.now == pytest.approx(seconds, abs=1)
    searched = pretended.now - pretended.calls[-1][1].training.seconds
    assert searched == pytest.approx(seconds / 2, rel=0.01)
    times = {}
    for name, config in pretended.calls[:-1]:
        times.setdefault(name.split("-")[0], set()).add(config.training.seconds)
    assert all(len(each) == 1 for each in times.values())  # all of a rung have the same
    assert finished.best == (3 if number > 3 else 1)
    assert names[-1] == "best"
    for rung in times:  # the plan is compared to the end
        assert f"{rung}-trial00" in names
    assert "rung1-trial02 " in (said := capsys.readouterr().err)
    assert "failed: the loss became nan" in said
    assert not any(name in ("rung2-trial02", "rung3-trial02") for name in names)
    chosen = dict(pretended.calls)["rung1-trial01"]
    assert chosen.chosen("depth")
    assert not chosen.chosen("lr")  # the search decided it, or the plan


def test_a_search_whose_trials_are_too_slow_ends_early(pretended, tmp_path):
    pretended.slowness = 4.0
    tune(pretended.settings, tmp_path / "out", began=0.0)
    assert {name[:5] for name, _ in pretended.calls} == {"rung1", "best"}
    assert pretended.calls[-1][1].training.seconds == 900  # a quarter of it at least


def test_a_trial_zero_without_time_names_its_share(settings, tmp_path, monkeypatch):
    def train(*_, **__):
        raise ConfigError("time=600s: too short")

    monkeypatch.setattr(tuning, "train", train)
    with pytest.raises(ConfigError, match=r"the tuning 3[67] times as long: time=600s"):
        tune(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stop", [Interrupted("x", 15), BadImage("a.png", "cut")])
def test_errors_that_no_setting_causes_end_the_search(settings, tmp_path, monkeypatch, stop):
    def train(config, out, **_):
        if out.name.endswith("01"):
            raise stop
        return write_run(config, out, 0.5)

    monkeypatch.setattr(tuning, "train", train)
    with pytest.raises(type(stop)):
        tune(settings, tmp_path / "out")


def test_a_search_is_resumed_with_its_own_settings(pretended, tmp_path):
    out = tmp_path / "out"
    mean = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.2, 0.2)}
    finished = tune({**pretended.settings, **mean}, out)
    with pytest.raises(RunError, match="is not empty: --resume continues a search"):
        tune({**pretended.settings, **mean}, out)
    with pytest.raises(ConfigError, match=r"std=\(0\.3, .* differs from \(0\.2"):
        tune({**pretended.settings, **mean, "std": (0.3, 0.2, 0.2)}, out, resume=True)
    with pytest.raises(ConfigError, match=r"hflip=0\.1 differs from None in"):
        tune(out=out, resume=True, hflip=0.1)
    # finished trials are not trained again; a flag that may change on resume is taken
    pretended.calls.clear()
    (out / "rung1-trial01" / "summary.json").unlink()
    record = json.loads((out / tuning.TUNE_FILE).read_text())
    del record["best"]
    (out / tuning.TUNE_FILE).write_text(json.dumps(record))
    again = tune(out=out, resume=True, on_bad_image="skip")
    assert [name for name, _ in pretended.calls] == ["rung1-trial01", "rung1-trial02", "best"]
    assert {config.data.on_bad_image for _, config in pretended.calls} == {"skip"}
    assert (again.best, again.changes) == (finished.best, finished.changes)
    (out / tuning.TUNE_FILE).write_text("{}")
    with pytest.raises(RunError, match=r"tune\.json is damaged"):
        tune(out=out, resume=True)


def test_folders_with_other_files_are_refused(settings, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="is not empty"):
        tune(settings, tmp_path, resume=True)
    with pytest.raises(RunError, match="is a file: give a folder"):
        tune(settings, tmp_path / "thesis.txt")


class Power(BaseException):
    """The plug is pulled."""


@pytest.mark.slow
def test_a_killed_search_resumes_to_the_same_result(settings, tmp_path, monkeypatch):
    """Trials have a number of steps here, which does not depend on any clock."""
    learn, step, made = tuning.train, training_loop.train_one_step, []

    def train(config, *args, **options):
        length = {"steps": 8, "epoch_steps": 2, "epochs": 4}
        return learn(with_settings(config, time=None, **length), *args, **options)

    def counted_step(*args, **options):
        made.append(1)
        if len(made) in kills:
            raise Power
        return step(*args, **options)

    monkeypatch.setattr(tuning, "train", train)
    monkeypatch.setattr(training_loop, "train_one_step", counted_step)
    monkeypatch.setattr(tuning, "TRIAL_COUNTS", (5,))
    kills = ()
    whole = tune(settings, tmp_path / "whole")
    planned, _ = plan_training({**settings, "time": "1800.0s"})
    stored = stored_config(tmp_path / "whole" / "rung1-trial00")
    assert (stored.training.lr, stored.model) == (planned.training.lr, stored.model)
    assert len(made) == 8 * (5 + 2 + 1)
    made.clear()
    # in the first trial, in others, and while the best is trained
    kills = (3, 13, 42, 60)
    for _ in kills:
        with pytest.raises(Power):
            tune(settings, tmp_path / "cut", resume=True)
    again = tune(settings, tmp_path / "cut", resume=True)
    assert (again.best, again.changes) == (whole.best, whole.changes)
    assert again.training.scores == whole.training.scores
    assert equal_models(whole.folder / "best", again.folder / "best")
