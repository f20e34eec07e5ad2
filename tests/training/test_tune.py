"""A search from the plan on: what it tries, how long, and that a kill changes nothing of it."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from vit.config.parser import make_config
from vit.errors import BadImage, ConfigError, RunError
from vit.evaluation.tune_report import axis, noise, tune_page, verdict
from vit.training import plan as planning
from vit.training import training_loop
from vit.training import tune as tuning
from vit.training.checkpoint.run_folder import stored_config
from vit.training.distributed.stop_signals import Interrupted
from vit.training.plan_rules import (
    PHOTO_NETWORKS,
    TINY_NETWORKS,
    Facts,
    make_plan,
    neighbours,
    network_settings,
)
from vit.training.time_budget import Costs
from vit.training.trainer import TrainingResult
from vit.training.tune import (
    LEAST_STEPS,
    SPACE,
    count_trials,
    entrants,
    make_rungs,
    make_trials,
    network_key,
    rung_sizes,
    seconds_of_first_rung,
    steps_in,
    tune,
    with_steps,
)

PHOTOS = Facts(
    images=3000,
    classes=10,
    side=160,
    grey=False,
    validation=600,
    divided=True,
    device="cpu",
    flops=80e9,
    memory=8 * 2**30,
    seconds=600.0,
)
DIGITS = dataclasses.replace(PHOTOS, images=1442, side=8, grey=True, validation=355)
COSTS = Costs(start=1.0, small_step=0.1, full_step=0.1, validation=0.5, saving=0.0, ending=0.0)


def trials_of(facts=PHOTOS, seed=0, most=12, **values):
    given = {"data": "photos", **values}
    return make_trials(make_plan(facts, given), given, seed, most)


@pytest.mark.parametrize("facts", [PHOTOS, DIGITS])
def test_trials_are_the_plan_and_different_changes_of_it(facts):
    trials = trials_of(facts)
    assert len(trials) == 12
    assert trials[0]["changes"] == {}
    plan = make_plan(facts, {"data": "photos"})
    planned = make_config({"data": "photos", **plan.settings, "time": None})
    assert make_config({**trials[0]["settings"], "time": None}) == planned
    assert all(trial["changes"] for trial in trials[1:])
    assert len({json.dumps(trial["settings"]) for trial in trials}) == 12
    for trial in trials:
        make_config(trial["settings"])  # they fit together


def test_each_setting_of_the_table_is_searched():
    trials = trials_of(most=18)
    assert {name for trial in trials for name in trial["changes"]} == {one.name for one in SPACE}
    plan = trials[0]["settings"]
    for trial in trials:
        settings = trial["settings"]
        # as the plan has it: the root of the batch above 64, times a factor between 0.4 and 2.5
        scale = max(settings["batch_size"] / max(plan["batch_size"], 64), 1) ** 0.5
        assert 0.39 < settings["lr"] / plan["lr"] / scale < 2.51
        assert settings["lr"] / settings["fallback_lr"] == pytest.approx(1.5, rel=0.01)


def test_a_trial_is_a_function_of_the_seed_and_of_what_is_searched():
    assert trials_of() == trials_of()
    assert trials_of(most=4) == trials_of()[:4]
    assert trials_of(seed=1)[1:] != trials_of()[1:]
    # a setting that is given stays, and the others are drawn as if it were not
    free, fixed = trials_of(), trials_of(drop_path=0.15)
    assert {trial["settings"]["drop_path"] for trial in fixed} == {0.15}
    assert not any("drop_path" in trial["changes"] for trial in fixed)
    both = zip(free, fixed, strict=True)
    same = [("lr" in one["changes"]) == ("lr" in other["changes"]) for one, other in both]
    assert sum(same) >= 10


def test_characters_are_not_cut():
    assert not any("min_crop" in trial["changes"] for trial in trials_of(DIGITS))


def test_a_chosen_network_is_not_searched():
    for given in ({"depth": 3}, {"image_size": 96, "patch_size": 8}):
        networks = {trial["values"]["network"] for trial in trials_of(**given)}
        assert len(networks) == 1


def test_neighbours_stand_beside_the_plan_on_the_ladder():
    plan = make_plan(dataclasses.replace(PHOTOS, seconds=6000.0), {})
    # of images of 160 px
    ladder = [network_settings(row) for row in PHOTO_NETWORKS if row.side <= 160]
    (at,) = (n for n, network in enumerate(ladder) if network.items() <= plan.settings.items())
    assert 0 < at < len(ladder) - 1
    assert neighbours(plan) == [ladder[at - 1], ladder[at + 1]]
    assert neighbours(make_plan(PHOTOS, {"dim": 100, "num_heads": 4})) == []
    smallest = make_plan(dataclasses.replace(DIGITS, seconds=10.0), {})
    (larger,) = neighbours(smallest)
    assert larger.items() >= {"image_size": 16, "patch_size": 4, "stem_width": 24}.items()


def test_each_network_of_a_ladder_has_a_name_of_its_own():
    for ladder in (PHOTO_NETWORKS, TINY_NETWORKS):
        assert len({network_key(network_settings(network)) for network in ladder}) == len(ladder)


@pytest.mark.parametrize(
    ("trials", "sizes"),
    [(2, [2]), (3, [3]), (5, [5, 2]), (6, [6, 2]), (9, [9, 3]), (18, [18, 6, 2])],
)
def test_each_rung_has_a_third_of_the_trials(trials, sizes):
    assert rung_sizes(trials) == sizes
    parts = [size * 3**at for at, size in enumerate(sizes)]
    assert seconds_of_first_rung(trials, 60.0) * sum(parts) == pytest.approx(60.0)


def test_more_time_tries_more():
    config = make_config({"batch_size": 50, "schedule": "wsd"})

    def number(room):
        return count_trials(18, (config, COSTS), images=1000, start=1.0, room=room, asked=None)

    numbers = [number(room) for room in (30.0, 300.0, 600.0, 3000.0, 30_000.0)]
    assert numbers == sorted(numbers)
    assert {numbers[0], numbers[-1]} == {3, 18}
    assert count_trials(5, (config, COSTS), images=1000, start=1.0, room=1.0, asked=5) == 5
    with pytest.raises(ConfigError, match="leave only 2 different trials"):
        count_trials(2, (config, COSTS), images=1000, start=1.0, room=1.0, asked=None)


def test_all_trials_of_a_rung_have_the_same_time():
    config = make_config({"batch_size": 50, "schedule": "wsd"})
    dearer = dataclasses.replace(COSTS, small_step=0.3, full_step=0.3)
    costs = [(config, COSTS), (config, dearer), (config, COSTS), (config, COSTS)]
    rungs = make_rungs(costs, start=1.0, room=300.0, seconds=700.0, asked=True)
    assert [rung["trials"] for rung in rungs] == [4, 2]
    assert rungs[1]["seconds"] == pytest.approx(3 * rungs[0]["seconds"], abs=0.1)
    for rung in rungs:
        for (one, cost), steps in zip(costs, rung["steps"], strict=True):
            sized = with_steps(one, steps)
            took = 1.0 + cost.of(sized, sized.training.epoch_steps, steps)
            assert took <= rung["seconds"]
            assert took == pytest.approx(rung["seconds"], abs=0.9)
        assert rung["steps"][0] > 2.5 * rung["steps"][1]
    assert steps_in(0.0, config, COSTS) == LEAST_STEPS
    with pytest.raises(
        ConfigError, match=r"time=20s: half of it .* use --time \d+s or more, or fe"
    ):
        make_rungs(costs, start=1.0, room=8.0, seconds=20.0, asked=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "digits"}, "time is missing"),
        ({"time": "5m"}, "data is missing"),
        ({"data": "digits", "time": "5m", "folds": 3}, "folds=3: a tuning validates on one part"),
        ({"data": "digits", "time": "5m", "epochs": 3}, "epochs=3: trials have lengths"),
        ({"data": "digits", "time": "5m", "patience": 3}, "patience=3: trials have lengths"),
        ({"data": "digits", "time": "5m", "weights": "runs/x"}, "leave out --model, --weights"),
        ({"data": "digits", "time": "5m", "task": "caption"}, "captions have no plan"),
        (
            {"data": "digits", "time": "5m", "lr": 1e-3, "depth": 2, "batch_size": 8}
            | {"min_crop": 1.0, "drop_path": 0.0, "smoothing": 0.0, "weight_decay": 0.0},
            "every setting that a tuning searches is given",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        tune(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_trial_is_no_search(tmp_path):
    with pytest.raises(ConfigError, match="trials=1: a search compares at least 2"):
        tune({"data": "digits", "time": "5m"}, tmp_path / "out", trials=1)


def result(rung, trial, score, **more):
    return {
        "rung": rung,
        "trial": trial,
        "measure": "top1",
        "score": score,
        "loss": 1.0,
        "scores": {"top1": score, "loss": 1.0},
        "epochs": [score / 2, score],
        "epoch": 2,
        "steps": 10,
        "seconds": 1.0,
    } | more


def test_the_plan_and_the_best_go_on():
    record = {
        "trials": [{"trial": n} for n in range(6)],
        "rungs": [{"trials": 6}, {"trials": 2}],
        "results": [result(1, n, score) for n, score in enumerate([0.1, 0.5, 0.9, 0.4, 0.9, 0.2])],
    }
    assert entrants(record, 1) == [0, 1, 2, 3, 4, 5]
    assert entrants(record, 2) == [0, 2]  # of equals the earlier one, and the plan for comparison
    record["results"][2] = {"rung": 1, "trial": 2, "error": "the loss became nan"}
    assert entrants(record, 2) == [0, 4]


def test_the_verdict_knows_noise():
    record = {"validation": 400, "results": [result(1, 0, 0.8), result(1, 3, 0.7)]}
    plan, little, much = result(1, 0, 0.80), result(1, 3, 0.81), result(1, 3, 0.95)
    assert 0.05 < noise(0.8, 0.81, 400) < 0.06
    assert noise(1.0, 1.0, 400) > 0.004
    assert "1.0 points above the plan" in verdict(record, little, plan)
    assert "and this is no more" in verdict(record, little, plan)
    assert "and this is more" in verdict(record, much, plan)
    assert "No trial was better than the plan" in verdict(record, plan, plan)
    assert "No trial was compared" in verdict({**record, "results": [plan]}, plan, plan)


def test_an_axis_is_logarithmic_where_many_numbers_are_above_zero():
    place, marks = axis([0.1, 0.2, 0.4, 0.8, 1.6, 3.2], 0.4)
    assert place(0.4) - place(0.2) == pytest.approx(place(3.2) - place(1.6))
    assert sorted(marks.values()) == [0.1, 0.4, 3.2]
    assert sorted(axis([0.1, 0.2, 0.4, 0.8, 1.6, 3.2], 3.0)[1].values()) == [0.1, 3.2]
    place, marks = axis(["b", "a", "b"], "a")
    assert (place("a"), place("b")) == (0.0, 1.0)


TINY = {
    "dim": 16,
    "num_heads": 2,
    "depth": 2,
    "image_size": 16,
    "patch_size": 8,
    "precision": "fp32",
    "device": "cpu",
    "workers": 0,
    "time": "1h",
    "checkpoint_steps": 1,
}


@pytest.fixture
def quick(monkeypatch, colour_data):
    """Settings of a tuning of four trials whose lengths do not depend on any clock."""
    monkeypatch.setattr(tuning, "costs_of", lambda *_: COSTS)
    monkeypatch.setattr(planning, "measured_flops", lambda *_: 80e9)
    monkeypatch.setattr(
        tuning,
        "make_rungs",
        lambda *_, **__: [
            {"trials": 4, "seconds": 1.0, "steps": [8, 9, 8, 10]},
            {"trials": 2, "seconds": 2.0, "steps": [12, 13, 12, 14]},
        ],
    )
    original = tuning.train

    def train(config, *args, **options):
        if config.training.time is not None:  # the best
            config = with_steps(config, 8)
        return original(config, *args, **options)

    monkeypatch.setattr(tuning, "train", train)
    return {**TINY, "data": str(colour_data)}


@pytest.fixture
def pretended(quick, monkeypatch):
    """The same, with trainings that learn nothing but how good they are; trial 2 fails."""

    def train(_config, out, **_):
        if out.name.startswith("02"):
            raise RunError("the loss became nan")
        out.mkdir(parents=True)
        event = {"event": "epoch", "epoch": 1, "val_top1": 0.5, "val_loss": 1.0}
        (out / "metrics.jsonl").write_text(json.dumps(event))
        scores = {"top1": 0.5, "loss": 1.0}
        return TrainingResult(
            folder=out, classes=("a",), epoch=1, val_top1=0.5, scores=scores, failed={}
        )

    monkeypatch.setattr(tuning, "train", train)
    return quick


def untimed(record):
    """A record without seconds."""
    results = [{k: v for k, v in one.items() if k != "seconds"} for one in record["results"]]
    rest = {k: v for k, v in record.items() if k not in ("seconds", "results", "time")}
    return {**rest, "results": results}


class Power(BaseException):
    """The plug is pulled."""


@pytest.fixture
def cut(monkeypatch):
    """Pulls the plug before a given optimiser step of all that are made, or before a given save."""

    def arrange(*, step=None, save=None):
        with monkeypatch.context() as patched:
            counts = {"step": 0, "save": 0}

            def counting(name, most, act):
                def wrapped(*args, **options):
                    counts[name] += 1
                    if counts[name] == most:
                        raise Power
                    return act(*args, **options)

                return wrapped

            patched.setattr(
                training_loop,
                "train_one_step",
                counting("step", step, training_loop.train_one_step),
            )
            patched.setattr(tuning, "save", counting("save", save, tuning.save))
            yield

    return contextlib.contextmanager(arrange)


def test_a_tuning_that_is_killed_ends_as_if_it_had_not_been(quick, cut, tmp_path, capsys):
    whole = tune(quick, tmp_path / "whole", trials=4)
    said = capsys.readouterr().err
    out = tmp_path / "cut"
    # in the first trial, before a result is written, in later ones, before the best is trained, in
    # the middle of that, and before its result is written
    kills = [("step", 3), ("save", 2), ("step", 12), ("step", 30)]
    for name, most in [*kills, ("save", 2), ("step", 4), ("save", 2)]:
        with pytest.raises(Power), cut(**{name: most}):
            tune(quick, out, trials=4, resume=True)
    again = tune(quick, out, trials=4, resume=True)
    assert untimed(again.record) == untimed(whole.record)
    assert (again.best, again.settings) == (whole.best, whole.settings)
    first, second = (
        (folder / "best" / "model.safetensors").read_bytes()
        for folder in (whole.folder, again.folder)
    )
    assert first == second
    assert again.lines[:-1] == whole.lines[:-1]

    record = json.loads((out / "tune.json").read_text())
    assert record == again.record
    assert [(one["rung"], one["trial"]) for one in record["results"][:4]] == [
        (1, 0), (1, 1), (1, 2), (1, 3),
    ]  # fmt: skip
    assert {one["trial"] for one in record["results"][4:]} >= {0}
    assert len(record["results"]) == 6
    # what is large of trials is gone, what was measured stays
    left = {path.name for path in out.glob("trials/*/*")}
    assert {"config.yaml", "metrics.jsonl"} <= left
    assert not left & {"model.safetensors", "checkpoints", "report.html", "config.json"}
    # each trial has its line, and its epochs none
    assert said.count("rung 1, ") == 4
    assert said.count("rung 2, ") == 2
    assert said.count("epoch   1/") == 1
    # trials differ from the plan in what they say
    for one in record["trials"]:
        stored = stored_config(out / "trials" / f"{one['trial']:02d}-rung1")
        assert stored.training.lr == one["settings"]["lr"]
        assert stored.training.smoothing == one["settings"]["smoothing"]

    page = (out / "tune.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert "vit predict" in page
    recipe = yaml.safe_load((out / "best.yaml").read_text())
    assert recipe["time"] == record["time"]
    assert recipe["lr"] == whole.settings["lr"]
    # a finished tuning is not begun again, but for its answer
    with pytest.raises(RunError, match=r"tune\.json exists: --resume continues it"):
        tune(quick, out, trials=4)
    with pytest.raises(ConfigError, match=r"hflip=0\.1 differs from None in"):
        tune({**quick, "hflip": 0.1}, out, trials=4, resume=True)
    with pytest.raises(ConfigError, match=r"trials=5 differs from 4"):
        tune(quick, out, trials=5, resume=True)
    (out / "tune.json").write_text("{}")
    with pytest.raises(RunError, match=r"tune\.json is damaged"):
        tune(quick, out, trials=4, resume=True)


def test_a_trial_that_fails_is_the_last(pretended, tmp_path, capsys):
    find_result = tune(pretended, tmp_path / "out", trials=4)
    assert find_result.record["results"][2] == {
        "rung": 1, "trial": 2, "steps": 8, "error": "the loss became nan",
        "seconds": find_result.record["results"][2]["seconds"],
    }  # fmt: skip
    assert "trial 2  failed: the loss became nan" in capsys.readouterr().err
    assert any("failed" in line and "the loss became nan" in line for line in find_result.lines)
    assert "the loss became nan" in (tmp_path / "out" / "tune.html").read_text()


def test_a_search_that_is_too_slow_ends(pretended, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "seconds_spent", lambda record: 1300.0 * len(record["results"]))
    find_result = tune(pretended, tmp_path / "out", trials=4)
    assert [one["trial"] for one in find_result.record["results"]] == [0, 1, 2]
    assert "the search ended in rung 1, before trial 3" in capsys.readouterr().err
    assert find_result.record["time"] == "450.0s"


@pytest.mark.parametrize("stop", [Interrupted("x", 15), BadImage("a.png", "cut")])
def test_what_is_no_fault_of_a_trial_ends_the_tuning(quick, tmp_path, monkeypatch, stop):
    def train(*_, **__):
        raise stop

    monkeypatch.setattr(tuning, "train", train)
    with pytest.raises(type(stop)):
        tune(quick, tmp_path / "out", trials=4)


def test_other_peoples_folders_are_left_alone(quick, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("lr: 1")
    with pytest.raises(RunError, match="is a run folder itself"):
        tune(quick, tmp_path / "run", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match=r"no tuning wrote \(thesis\.txt\)"):
        tune(quick, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").is_file()


def test_the_page_draws_each_setting_where_there_are_enough_trials(tmp_path):
    trials = [{"trial": n, **trial} for n, trial in enumerate(trials_of(most=9))]
    record = {
        "settings": {"data": "photos", "time": "5m"},
        "validation": 100,
        "seconds": 1.0,
        "time": "150s",
        "trials": trials,
        "rungs": [{"trials": 9, "seconds": 3.0, "steps": [9] * 9}],
        "results": [result(1, n, 0.5 + n / 50) for n in range(9)],
        "result": {"epoch": 2, "scores": {"top1": 0.9, "loss": 0.1}},
    }
    leaderboard = record["results"][::-1]
    page = tune_page(record, leaderboard, record["results"][0], tmp_path / "runs")
    varied = {name for trial in trials for name in trial["changes"]}
    charts = re.findall(r"<svg.*?</svg>", page)
    assert len(charts) == len(varied) + 1  # and the curves
    for chart in charts[1:]:
        points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="5" class="(\w+)"', chart)
        assert len(points) == 9
        assert [style for *_, style in points].count("val") == 1
        assert all(54 <= float(x) <= 402 and 46 <= float(y) <= 220 for x, y, _ in points)
    assert "\\n" not in page
    assert "90.00%" in page


def test_names_on_the_page_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    trial = {"values": {"lr": 1.0}, "changes": {}, "settings": {"lr": 1.0}}
    record = {
        "settings": {"data": evil, "time": "5m"},
        "validation": 10,
        "seconds": 1.0,
        "time": "9s",
        "trials": [{"trial": 0, **trial}, {"trial": 1, **trial, "changes": {"lr": evil}}],
        "rungs": [{"trials": 2, "seconds": 3.0, "steps": [1, 1]}],
        "results": [result(1, 0, 0.5), result(1, 1, 0.0, error=evil)],
    }
    page = tune_page(record, record["results"], record["results"][0], Path(tmp_path / evil[:5]))
    assert evil not in page
    assert "&lt;script&gt;" in page
