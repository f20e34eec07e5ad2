"""--threshold and --sort-into: what is named, and where images go."""

import csv
import io
import json
import os
from pathlib import Path

import pytest

from vit.inference.predictor import Predictor

pytestmark = pytest.mark.auto_precision


def files_in(folder: Path) -> dict[str, bytes]:
    """Contents of all files, by their path from `folder`."""
    found = [path for path in folder.rglob("[!.]*") if not path.is_dir()]  # no half copies
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.fixture
def best(tiny_run, input_images):
    """(label, score) of each image, and a threshold between the scores."""
    found = [one.predictions[0] for one in Predictor(tiny_run)(input_images)]
    scores = sorted(score for _, score in found)
    return found, (scores[8] + scores[9]) / 2


def test_a_threshold_leaves_classes_unnamed(predict, tiny_run, input_images, best):
    _, threshold = best
    words = (*input_images, "--threshold", repr(threshold))
    _, out, _ = predict(*words, "--format", "jsonl")
    for line, whole in zip(out, Predictor(tiny_run)(input_images), strict=True):
        named = [(one["label"], one["score"]) for one in json.loads(line)["predictions"]]
        assert named == [pair for pair in whole.predictions if pair[1] >= threshold]
    empty = [json.loads(line)["predictions"] == [] for line in out]
    assert sum(empty) == 9
    _, out, _ = predict(*words, "--format", "csv")
    rows = list(csv.reader(io.StringIO("\n".join(out))))
    assert {len(row) for row in rows} == {8}
    assert [row[1] == "" for row in rows[1:]] == empty
    _, out, _ = predict(*words)
    assert [line.split()[1:] == ["-"] for line in out[1:]] == empty


@pytest.mark.parametrize("way", ["copy", "symlink"])
def test_images_are_sorted_by_their_best_class(
    predict, input_images, bad_images, best, tmp_path, way
):
    found, threshold = best
    before = [Path(path).read_bytes() for path in input_images]
    folder = tmp_path / "sorted"
    words = (*input_images, *bad_images, "--sort-into", folder, "--sort-with", way)
    for more in ([], ["--overwrite"]):  # the second time all is there
        code, _, err = predict(*words, "--threshold", repr(threshold), *more)
        assert code == 1
        assert err[0] == (
            f"vit predict: 27 images sorted into {folder}, 9 of them into _unsure; "
            f"{len(bad_images)} failed and stay out of it"
        )
        places = files_in(folder)
        assert sorted(places.values()) == sorted(before)
        for content, (label, score) in zip(before, found, strict=True):
            homes = [name.split("/")[0] for name, other in places.items() if other == content]
            assert homes == [label if score >= threshold else "_unsure"]
    assert [Path(path).read_bytes() for path in input_images] == before


def test_sorting_goes_on_after_a_kill(predict, interrupted, input_images, tmp_path):
    words = (*input_images, "-b", 4, "--threshold", "0.9")
    predict(*words, "--out", tmp_path / "a.csv", "--sort-into", tmp_path / "a")
    words = (*words, "--out", tmp_path / "b.csv", "--sort-into", tmp_path / "b")
    interrupted(*words)
    assert len(files_in(tmp_path / "b")) == 12  # the last four have no row yet
    assert predict(*words)[0] == 2
    code, _, err = predict(*words, "--resume", "--sort-with", "copy")  # the usual way
    assert code == 0
    assert "resuming after 8 of 27 images" in err[0]
    assert "27 images sorted" in err[1]
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_a_folder_with_files_or_inputs_is_one_line(
    refusal, tiny_run, tiny_data, input_images, tmp_path
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for folder, inputs, reason in (
        (tmp_path / "full", input_images, "has files"),
        (tmp_path / "full", [*input_images, "--resume", "--out", tmp_path / "a.csv"], "has files"),
        (tiny_data / "val" / "new", [tiny_data], "lies in the input"),
        (tiny_data, input_images, "holds the inputs"),
    ):
        assert reason in refusal("predict", tiny_run, *inputs, "--sort-into", folder)
    assert not (tiny_data / "val" / "new").exists()
    assert os.listdir(tmp_path) == ["full"]
    assert os.listdir(tmp_path / "full") == ["file"]


def test_unknown_images_are_sorted_into_unsure(predict, calibrated_run, input_images, tmp_path):
    words = (*input_images, "--reject", "--sets", "0.8", "--sort-into", tmp_path / "sorted")
    code, out, err = predict(*words, "--format", "jsonl", model=calibrated_run)
    assert code == 0
    rows = [json.loads(line) for line in out]
    unknown = [row for row in rows if row["unknown"]]
    assert 0 < len(unknown) < len(rows)
    assert {row["reason"] for row in unknown} == {"uncertain"}
    assert all(row["set"] for row in rows)
    assert f"{len(unknown)} of 27 images are unknown" in err[0]
    files = files_in(tmp_path / "sorted")
    assert sum(name.startswith("_unsure/") for name in files) == len(unknown)
    assert len(files) == 27
