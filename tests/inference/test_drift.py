"""`vit drift`: images and files of the server are compared with those of the calibration."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

import vit
from vit.calibration_reference import CalibrationReference, bin_counts, bin_edges, load_reference
from vit.commands.main import main
from vit.inference.calibrate import calibrate
from vit.inference.predictor import Predictor
from vit.weights.saved_model import load_run, update_run

EXACT = {"device": "cpu", "precision": "fp32"}
WORDS = ["--device", "cpu", "--precision", "fp32"]


@pytest.fixture
def run(reference_run):
    return reference_run


@pytest.fixture
def black(tmp_path):
    """A folder of 60 images that no photograph is like."""
    (tmp_path / "black").mkdir()
    for number in range(60):
        Image.new("RGB", (20, 20)).save(tmp_path / "black" / f"{number:02d}.png")
    return str(tmp_path / "black")


def test_the_reference_is_what_the_run_answers(run, tiny_data):
    images = [str(path) for path in sorted((tiny_data / "val").rglob("*.*"))]
    predictor = Predictor(run, **EXACT)
    predictor.engine.returns_distances = True
    outputs = [one for batch in predictor.batches(images) for one in batch]
    kept = load_reference(run, load_run(run).calibration)
    answers = [predictor.classes[one.probabilities.argmax()] for one in outputs]
    assert kept.answers == {name: answers.count(name) for name in predictor.classes}
    assert sum(kept.answers.values()) == len(images) == 27
    scores = sorted(float(one.probabilities.max()) for one in outputs)
    np.testing.assert_allclose(kept.scores, scores, atol=2e-6)
    np.testing.assert_allclose(kept.distances, sorted(one.distance for one in outputs), atol=1e-4)


def test_values_are_counted_in_bins_of_the_reference():
    reference = [number / 100 for number in range(101)]
    edges = bin_edges(reference)
    assert edges.tolist() == pytest.approx([0.01, 0.02, 0.05, *np.arange(0.1, 1, 0.1), *edges[-3:]])
    assert bin_counts([-1, 0.01, 0.0100001, 0.011, 2], reference) == [3, 1, *[0] * 13, 1]
    assert bin_counts([1, 1.0000001, 0.5], [1.0] * 9) == [3, 0]


def test_images_of_the_calibration_are_as_before_and_others_are_not(
    run, tiny_data, black, tmp_path, capsys
):
    assert main(["drift", str(run), str(tiny_data / "val"), *WORDS]) == 0
    assert capsys.readouterr().out.startswith("as before: ")
    out = tmp_path / "drift.json"
    words = ["drift", str(run), str(tiny_data / "val"), black, *WORDS, "--json", str(out)]
    assert main(words) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    assert shown.startswith("different since image 51 (87 images, 27 of the calibration)")
    assert shown.count("\n") == 1
    assert f"vit calibrate {run} DATA" in shown
    assert found["verdict"] == "different"
    assert (found["since"], found["noticed"], found["images"]) == (51, 87, 87)
    assert {*found["p_values"]} == {"answers", "scores", "distances"}


def test_unreadable_images_are_left_out(run, black, tmp_path, capsys):
    (tmp_path / "black" / "broken.png").write_bytes(b"x")
    assert main(["drift", str(run), black, *WORDS]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("different since image 1 (60 images")
    assert "broken.png: " in printed.err
    alone = str(tmp_path / "black" / "broken.png")
    assert main(["drift", str(run), alone, *WORDS]) == 2
    assert "no image can be read" in capsys.readouterr().err


def line(reference: CalibrationReference, **changes) -> str:
    about = {"time": "2026-11-30T00:00:00+00:00", "calibration": reference.calibration}
    return json.dumps({**about, "images": 27, **reference.counts(), **changes}) + "\n"


def test_lines_of_this_calibration_are_read(run, tmp_path):
    reference = load_reference(run, load_run(run).calibration)
    file, notes = tmp_path / "field.jsonl", []
    other = line(reference, calibration="other")
    file.write_text(line(reference) + other + line(reference) + line(reference)[:60])
    found = vit.drift(run, file, notify=notes.append)
    assert (found.images, found.different) == (54, False)
    assert notes == [
        "note: line 4 of field.jsonl cannot be read",
        "note: 1 line of another calibration left out",
    ]


@pytest.mark.parametrize(
    ("text", "words"), [(None, "is no file; `vit serve"), ("", "no images yet"), ("x", "no images")]
)
def test_a_file_without_lines_is_refused(run, tmp_path, capsys, text, words):
    file = tmp_path / "field.jsonl"
    if text is not None:
        file.write_text(text)
    assert main(["drift", str(run), str(file)]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_reference_of_its_calibration_is_refused(
    run, several_run, tiny_run, tiny_data, capsys
):
    file = str(run / "field.jsonl")
    assert main(["drift", str(tiny_run), file]) == 2
    assert "`vit calibrate RUN DATA` makes one" in capsys.readouterr().err
    stored = json.loads((run / "config.json").read_text())["vit"]["calibration"]
    update_run(run, {"calibration": {**stored, "temperature": 2.0}})
    assert main(["drift", str(run), file]) == 2
    assert "has no reference" in capsys.readouterr().err
    assert main(["drift", str(several_run), file]) == 2
    assert "this network's task is multilabel" in capsys.readouterr().err


@pytest.mark.usefixtures("twenty_images_calibrate")
def test_of_images_in_groups_one_each_is_a_reference(distance_run, tiny_data, tmp_path):
    run = shutil.copytree(distance_run, tmp_path / "run")
    calibrate(run, str(tiny_data), group=r"(\d)\.", **EXACT)
    reference = json.loads((run / "reference.json").read_text())
    stored = json.loads((run / "config.json").read_text())["vit"]["calibration"]
    groups = stored["groups"]
    assert len(reference["scores"]) == sum(reference["answers"].values()) == groups < 20
