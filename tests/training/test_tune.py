"""`tune`: a search that is killed resumes to the same result, and leaves other files alone."""

import contextlib
import json
import shutil

import pytest
import yaml

from tests.conftest import save_untrained
from tests.training.searches import COSTS
from vit.config.stored_config import stored_config
from vit.errors import BadImage, ConfigError, DataError, RunError
from vit.stop_signals import Interrupted
from vit.training import successive_halving, training_loop
from vit.training import tune as tuning
from vit.training.successive_halving import with_steps
from vit.training.trainer import TrainingResult
from vit.training.tune import tune


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "digits"}, "time is missing"),
        ({"time": "5m"}, "data is missing"),
        ({"data": "digits", "time": "5m", "folds": 3}, "folds=3: a tuning validates on one part"),
        ({"data": "digits", "time": "5m", "epochs": 3}, "epochs=3: trials have lengths"),
        ({"data": "digits", "time": "5m", "patience": 3}, "patience=3: trials have lengths"),
        ({"data": "digits", "time": "5m", "weights": "runs/x"}, "leave out --model, --weights"),
        (
            {"data": "digits", "time": "5m", "task": "caption"},
            "a search needs the score of classes",
        ),
        (
            {"data": "digits", "time": "5m", "lr": 1e-3, "depth": 2, "batch_size": 8}
            | {"min_crop": 1.0, "drop_path": 0.0, "smoothing": 0.0, "weight_decay": 0.0},
            "every setting that a tuning searches is given",
        ),
    ],
)
def test_settings_that_leave_nothing_to_search_are_refused(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        tune(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_search_of_one_trial_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="trials=1: a search compares at least 2"):
        tune({"data": "digits", "time": "5m"}, tmp_path / "out", trials=1)


def test_a_search_whose_data_are_refused_leaves_no_folder(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        settings = {"data": str(tmp_path / "missing"), "time": "5m", "precision": "fp32"}
        tune(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


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
def quick(monkeypatch, colour_data, known_speed):
    """Settings of a tuning of four trials whose lengths do not depend on any clock."""
    monkeypatch.setattr(successive_halving, "costs_of", lambda *_: COSTS)
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


def pull_the_plug(*_):
    raise Power


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


@pytest.mark.slow
def test_a_killed_search_resumes_to_the_same_result(quick, cut, tmp_path, capsys):
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


def test_a_failed_trial_ranks_last(pretended, tmp_path, capsys):
    finished = tune(pretended, tmp_path / "out", trials=4)
    assert finished.record["results"][2] == {
        "rung": 1, "trial": 2, "steps": 8, "error": "the loss became nan",
        "seconds": finished.record["results"][2]["seconds"],
    }  # fmt: skip
    assert "trial 2  failed: the loss became nan" in capsys.readouterr().err
    assert any("failed" in line and "the loss became nan" in line for line in finished.lines)
    assert "the loss became nan" in (tmp_path / "out" / "tune.html").read_text()


def test_what_is_large_of_a_finished_trial_is_deleted(pretended, tmp_path, monkeypatch):
    out, learn = tmp_path / "out", tuning.train
    large = ("model.safetensors", "teacher.safetensors")

    def train(config, folder, **options):
        result = learn(config, folder, **options)
        for name in large:
            (folder / name).touch()
        return result

    monkeypatch.setattr(tuning, "train", train)
    with monkeypatch.context() as patched, pytest.raises(Power):
        patched.setattr(tuning, "drop_weights", pull_the_plug)
        tune(pretended, out, trials=4)
    assert {path.name for path in out.glob("trials/*/*.safetensors")} == set(large)
    tune(out=out, resume=True)
    assert not [*out.glob("trials/*/*.safetensors")]


def test_notes_are_printed_once_with_a_teacher(pretended, colour_data, tmp_path, capsys):
    classes = [path.name for path in (colour_data / "train").iterdir()]
    teacher = save_untrained(tmp_path / "teacher", classes, "classify", lambda _head: None)
    settings = {**pretended, "teacher": str(teacher), "feature_cache": str(tmp_path / "answers")}
    tune(settings, tmp_path / "out", trials=4)
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("teacher: ") for line in lines) == 1
    assert len({*lines}) == len(lines)


def test_a_search_that_is_slower_than_measured_ends_early(pretended, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "seconds_spent", lambda record: 1300.0 * len(record["results"]))
    finished = tune(pretended, tmp_path / "out", trials=4)
    assert [one["trial"] for one in finished.record["results"]] == [0, 1, 2]
    assert "the search ended in rung 1, before trial 3" in capsys.readouterr().err
    assert finished.record["time"] == "450.0s"


@pytest.mark.parametrize("stop", [Interrupted("x", 15), BadImage("a.png", "cut")])
def test_errors_that_no_setting_causes_end_the_search(quick, tmp_path, monkeypatch, stop):
    def train(*_, **__):
        raise stop

    monkeypatch.setattr(tuning, "train", train)
    with pytest.raises(type(stop)):
        tune(quick, tmp_path / "out", trials=4)


def test_a_resumed_search_takes_the_flags_that_its_error_names(pretended, tmp_path, monkeypatch):
    out, learn, seen = tmp_path / "out", tuning.train, []

    def train(config, *args, **options):
        seen.append((config.data.on_bad_image, config.origins))
        if config.data.on_bad_image == "stop":
            raise BadImage("a.png", "cut")
        return learn(config, *args, **options)

    monkeypatch.setattr(tuning, "train", train)
    with pytest.raises(BadImage):
        tune(pretended, out, trials=4)
    with pytest.raises(ConfigError, match="accumulate=7: does not divide"):
        tune(out=out, resume=True, accumulate=7)
    tune(out=out, resume=True, on_bad_image="skip")
    assert [flag for flag, _ in seen] == ["stop", *["skip"] * 7]  # six trials, and the best
    assert all("on_bad_image" in origins for _, origins in seen[1:])
    record = json.loads((out / tuning.TUNE_FILE).read_text())
    assert record["settings"]["on_bad_image"] == "skip"  # the next one needs no flag


def test_a_search_with_a_setting_of_several_values_is_resumed(pretended, tmp_path):
    settings = {**pretended, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.2, 0.2)}
    tune(settings, tmp_path / "out", trials=4)
    path = tmp_path / "out" / tuning.TUNE_FILE
    tuning.require_same(settings, 4, tuning.read_record(path), path)
    with pytest.raises(ConfigError, match=r"std=\[0\.3"):
        other = {**settings, "std": (0.3, 0.2, 0.2)}
        tuning.require_same(other, 4, tuning.read_record(path), path)


def test_a_refused_search_leaves_the_one_that_it_would_overwrite(quick, tmp_path, monkeypatch):
    out = tmp_path / "out"
    (out / "trials" / "0-rung0").mkdir(parents=True)
    for name in (tuning.TUNE_FILE, tuning.PAGE_FILE, "trials/0-rung0/config.yaml"):
        (out / name).write_text("{}")
    before = sorted(path for path in out.rglob("*") if path.name != ".lock")

    def refuse(*_):
        raise ConfigError("time=1s: too short")

    monkeypatch.setattr(tuning, "plan_search", refuse)
    with pytest.raises(ConfigError, match="too short"):
        tune(quick, out, overwrite=True)
    assert sorted(path for path in out.rglob("*") if path.name != ".lock") == before


def test_folders_with_other_files_are_refused(quick, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("lr: 1")
    with pytest.raises(RunError, match="is a run folder itself"):
        tune(quick, tmp_path / "run", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match=r"no tuning wrote \(thesis\.txt\)"):
        tune(quick, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").is_file()
    # nor in the run folders that are deleted, and trained in after the search
    for place in ("best", "best/checkpoints", "trials/00-rung1"):
        (tmp_path / "tuned" / place).mkdir(parents=True)
        (tmp_path / "tuned" / place / "distance.safetensors").touch()
        (tmp_path / "tuned" / place / "thesis.txt").touch()
        with pytest.raises(RunError, match=rf"tuned/{place}/\S+ was written by no tuning.*move"):
            tune(quick, tmp_path / "tuned", overwrite=True)
        shutil.rmtree(tmp_path / "tuned" / place)
