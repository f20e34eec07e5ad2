"""`vit calibrate`: what it measures is stored in the run folder, and predictions use it."""

import dataclasses
import json
import math
import os
import shutil

import pytest

from vit.commands.main import main
from vit.errors import ConfigError, DataError, RunError, VitError
from vit.inference.calibrate import calibrate
from vit.inference.evaluate import evaluate
from vit.inference.predictor import Predictor
from vit.score_calibration import decision_confidence
from vit.weights.saved_model import load_run, update_run

COLOURS = ("blue", "green", "red")
EXACT = {"device": "cpu", "precision": "fp32"}
WORDS = ["--device", "cpu", "--precision", "fp32"]
pytestmark = pytest.mark.usefixtures("twenty_images_calibrate")


@pytest.fixture
def run(tiny_run, tmp_path):
    return shutil.copytree(tiny_run, tmp_path / "run")


@pytest.fixture
def several(several_run, several_list, tmp_path):
    """A run of several classes an image, its data, and the images."""
    images = [str(path) for path in sorted(several_list.parent.glob("*.png"))]
    return shutil.copytree(several_run, tmp_path / "run"), str(several_list), images


def test_the_measured_calibration_is_that_of_the_predictions(run, tiny_data, capsys):
    raw = evaluate(run, str(tiny_data), **EXACT)
    out = run.parent / "scores.json"
    words = ["calibrate", str(run), str(tiny_data), *WORDS, "--json", str(out)]
    before = (run / "config.json").read_bytes()
    assert main([*words, "--target-precision", "0.99"]) == 2
    assert "keeps its calibration: no score from which on 99%" in capsys.readouterr().err
    assert (run / "config.json").read_bytes() == before
    assert main(words) == 0
    printed = capsys.readouterr()
    found = json.loads(out.read_text())
    assert load_run(run).calibration.to_dict() == found["calibration"]
    assert found["calibration"]["images"] == 27
    assert found["calibration"]["target_precision"] == 0.8
    assert "or a lower --target-precision" in printed.err
    for name in ("ece", "nll", "brier", "top1"):
        assert found["before"][name] == pytest.approx(raw[name], abs=1e-9)
    assert found["calibration_error"] == pytest.approx(found["after"]["ece"], abs=1e-12)
    stored = json.loads((run / "config.json").read_text())["vit"]
    assert stored["calibration_error"] == found["calibration_error"]
    assert found["after"]["nll"] < found["before"]["nll"]
    assert found["after"]["top1"] == raw["top1"]
    assert f"{found['after']['ece']:.4f} after" in printed.out
    assert "temperature" in printed.err
    assert printed.out.endswith(f"stored in          {run / 'config.json'}\n")
    again = evaluate(run, str(tiny_data), **EXACT)
    assert again["top1"] == raw["top1"]
    assert again["nll"] < raw["nll"]
    assert evaluate(run, str(tiny_data), no_calibration=True, **EXACT)["nll"] == raw["nll"]


def test_unreadable_images_are_counted(run, tiny_data, tmp_path, capsys):
    data = shutil.copytree(tiny_data, tmp_path / "data")
    next(data.rglob("*.png")).write_bytes(b"")
    assert main(["calibrate", str(run), str(data), *WORDS]) == 1
    failed = "1 of 27 images failed and are left out of the calibration"
    assert failed in capsys.readouterr().err
    assert load_run(run).calibration.images == 26


def test_a_second_calibration_replaces_the_first(run, tiny_data):
    first = calibrate(run, str(tiny_data), **EXACT)
    config = (run / "config.json").read_bytes()
    assert calibrate(run, str(tiny_data), **EXACT) == first
    assert (run / "config.json").read_bytes() == config


def test_a_multilabel_run_decides_as_before(several):
    run, data, images = several
    before = [[*dict(one.predictions)] for one in Predictor(run, **EXACT)(images)]
    for _ in range(2):
        found = calibrate(run, data, **EXACT)
        assert [[*dict(one.predictions)] for one in Predictor(run, **EXACT)(images)] == before
    assert len({*map(tuple, before)}) > 1
    assert found["calibration_error"] == pytest.approx(found["after"]["ece"], abs=1e-12)
    assert found["after"]["nll"] <= found["before"]["nll"]
    with pytest.raises(ConfigError, match=r"no score is proven to be right for 80% of"):
        Predictor(run, **EXACT)(images, reject=True)


def test_a_multilabel_run_rejects_answers_and_returns_sets(several):
    run, data, images = several
    calibrate(run, data, **EXACT)
    loaded = load_run(run)
    assert loaded.calibration.multilabel
    outputs = next(Predictor(run, **EXACT).batches(images))
    limits = loaded.thresholds
    sure = sorted(decision_confidence(one.probabilities.tolist(), limits) for one in outputs)
    calibration = dataclasses.replace(loaded.calibration, threshold=(sure[15] + sure[16]) / 2)
    update_run(run, {"calibration": calibration.to_dict()})
    predictor = Predictor(run, **EXACT)
    found = predictor(images, reject=True, sets=0.8)
    for one, output in zip(found, next(predictor.batches(images)), strict=False):
        scores = output.probabilities.tolist()
        named = {name for name, _ in one.predictions}
        right = [p if name in named else 1 - p for name, p in zip(COLOURS, scores, strict=True)]
        assert (one.unknown is None) == (math.prod(right) >= calibration.threshold)
        level = calibration.set_level(0.8)
        in_set = [name for name, p in zip(COLOURS, scores, strict=True) if 1 - p <= level]
        assert {*one.prediction_set} == {*in_set}
    assert {one.unknown for one in found} == {None, "uncertain"}
    with pytest.raises(ConfigError, match=r"reject with threshold=0.4: .* leave one of the two"):
        predictor(images, reject=True, threshold=0.4)
    with pytest.raises(ConfigError, match=r"list of classes.*leave it out"):
        calibrate(run, data, target_class="red", **EXACT)


def test_a_class_keeps_the_target_on_its_own(run, tiny_data, input_images, capsys):
    words = ["calibrate", str(run), str(tiny_data), *WORDS]
    rows = evaluate(run, str(tiny_data), **EXACT)["per_class"]
    name = max(rows, key=lambda row: row["recall"])["label"]
    assert main([*words, "--target-precision", "0.001", "--target-class", name]) == 0
    printed = capsys.readouterr().err
    assert f"answers of class {name} from a score of" in printed
    assert "which only a training measures" in printed
    calibration = load_run(run).calibration
    assert [*calibration.class_thresholds] == [name]
    for one in Predictor(run, **EXACT)(input_images, reject=True):
        (best, score), *_ = one.predictions
        least = calibration.class_thresholds.get(best, calibration.threshold)
        assert (one.unknown is None) == (least is not None and score >= least)
    assert main([*words, "--target-class", name[:-1] + "x"]) == 2
    assert f"no such class; did you mean {name}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"target_precision": 1.0}, "target_precision=1: a share above 0 and below 1"),
        ({"patch_size": 4}, "the run keeps a calibration of its own network"),
        ({"merge_tokens": 1}, "the run keeps a calibration of its own network"),
        ({"keep_aspect": True}, r"keep_aspect=True: .* square crops; leave it out"),
        ({"group": "no (such)"}, "it matches none of 27 paths"),
    ],
    ids=str,
)
def test_settings_of_another_network_and_data_are_refused(run, tiny_data, settings, reason):
    with pytest.raises(VitError, match=reason):
        calibrate(run, str(tiny_data), **EXACT, **settings)


def test_what_cannot_be_calibrated_is_refused(run, tiny_data, tmp_path, monkeypatch):
    with pytest.raises(RunError, match="no run folder"):
        calibrate(tmp_path / "weights.safetensors", str(tiny_data))
    monkeypatch.setattr("vit.inference.calibrate.MIN_IMAGES", 50)
    before = (run / "config.json").read_bytes()
    with pytest.raises(DataError, match=r"27 labelled images can be read.*needs 50"):
        calibrate(run, str(tiny_data), **EXACT)
    assert (run / "config.json").read_bytes() == before


def test_threshold_and_sets_of_groups(run, tiny_data):
    found, told = [], []
    for group in (None, r"(\d)\.\w+$"):  # 9 groups of the same number
        notes: list[str] = []
        settings = {"group": group, **EXACT}
        calibrate(run, str(tiny_data), notify=notes.append, **settings)
        found.append(load_run(run).calibration)
        told.append(any("new group" in one or "groups without" in one for one in notes))
    alone, grouped = found
    assert told == [False, True]
    assert grouped.temperature == alone.temperature
    assert grouped.set_levels != alone.set_levels
    assert (alone.groups, grouped.groups) == (None, 9)
    assert "groups" not in alone.to_dict()


def test_a_run_folder_that_cannot_be_written_is_refused_first(run, monkeypatch):
    monkeypatch.setattr("vit.output.output_file.os.access", lambda _path, mode: not mode & os.W_OK)
    with pytest.raises(VitError, match=r"run cannot be written"):
        calibrate(run, "no such data", **EXACT)
