"""`vit calibrate`: what it measures is stored in the run folder, and predictions use it."""

import json
import shutil

import pytest

from vit.commands.main import main
from vit.errors import ConfigError, DataError, RunError
from vit.inference.calibrate import calibrate
from vit.inference.evaluate import evaluate
from vit.inference.predictor import Predictor
from vit.weights.saved_model import load_run, set_thresholds

EXACT = {"device": "cpu", "precision": "fp32"}


@pytest.fixture(autouse=True)
def _few_images_suffice(monkeypatch):
    for module in ("evaluation.temperature_scaling", "inference.calibrate"):
        monkeypatch.setattr(f"vit.{module}.MIN_IMAGES", 20)


@pytest.fixture
def run(tiny_run, tmp_path):
    return shutil.copytree(tiny_run, tmp_path / "run")


def test_the_measured_calibration_is_that_of_the_predictions(run, tiny_data, capsys):
    raw = evaluate(run, str(tiny_data), **EXACT)
    words = ["calibrate", str(run), str(tiny_data), "--device", "cpu", "--precision", "fp32"]
    out = run.parent / "scores.json"
    assert main([*words, "--target-precision", "0.05", "--json", str(out)]) == 0
    printed = capsys.readouterr()
    found = json.loads(out.read_text())
    assert load_run(run).calibration.to_dict() == found["calibration"]
    assert found["calibration"]["images"] == 27
    assert found["calibration"]["target_precision"] == 0.05
    for name in ("ece", "nll", "brier", "top1"):
        assert found["before"][name] == pytest.approx(raw[name], abs=1e-9)
    assert found["calibration_error"] == pytest.approx(found["after"]["ece"], abs=1e-12)
    stored = json.loads((run / "config.json").read_text())["vit"]
    assert stored["calibration_error"] == found["calibration_error"]
    assert found["after"]["nll"] < found["before"]["nll"]
    assert found["after"]["top1"] == raw["top1"]
    assert f"{found['after']['ece']:.4f} after" in printed.out
    assert "temperature" in printed.err
    again = evaluate(run, str(tiny_data), **EXACT)
    assert again["top1"] == raw["top1"]
    assert again["nll"] < raw["nll"]
    assert evaluate(run, str(tiny_data), no_calibration=True, **EXACT)["nll"] == raw["nll"]


def test_a_second_calibration_replaces_the_first(run, tiny_data):
    first = calibrate(run, str(tiny_data), **EXACT)
    config = (run / "config.json").read_bytes()
    assert calibrate(run, str(tiny_data), **EXACT) == first
    assert (run / "config.json").read_bytes() == config


def test_a_multilabel_run_decides_as_before(several_run, several_list, tmp_path):
    folder = shutil.copytree(several_run, tmp_path / "run")
    set_thresholds(folder, [0.3, 0.5, 0.7])
    images = [str(path) for path in sorted(several_list.parent.glob("*.png"))]
    before = Predictor(folder, **EXACT)(images)
    for _ in range(2):
        found = calibrate(folder, str(several_list), **EXACT)
        after = Predictor(folder, **EXACT)(images)
        for one, other in zip(before, after, strict=True):
            assert [name for name, _ in one.predictions] == [name for name, _ in other.predictions]
    assert found["calibration_error"] == pytest.approx(found["after"]["ece"], abs=1e-12)
    assert found["after"]["nll"] <= found["before"]["nll"]
    with pytest.raises(ConfigError, match="one class an image"):
        Predictor(folder, **EXACT)(images, reject=True)


def test_what_cannot_be_calibrated_is_refused(run, tiny_data, tmp_path, monkeypatch):
    with pytest.raises(RunError, match="no run folder"):
        calibrate(tmp_path / "weights.safetensors", str(tiny_data))
    with pytest.raises(ConfigError, match="target_precision=1: a share above 0 and below 1"):
        calibrate(run, str(tiny_data), target_precision=1.0)
    monkeypatch.setattr("vit.inference.calibrate.MIN_IMAGES", 50)
    before = (run / "config.json").read_bytes()
    with pytest.raises(DataError, match=r"27 labelled images can be read.*needs 50"):
        calibrate(run, str(tiny_data), **EXACT)
    assert (run / "config.json").read_bytes() == before
