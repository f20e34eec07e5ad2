"""evaluate: names decide, unreadable images are left out and listed, own splits are honoured."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from tests.inference.answers import right_answers
from vit.commands.main import main
from vit.config.setting_layers import make_config, write_settings
from vit.config.stored_config import stored_config, write_paths
from vit.data.corruptions import CORRUPTIONS, Corruption
from vit.data.image_io import read_image
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import read_source
from vit.data.sources.split_file import split_record
from vit.errors import ConfigError, DataError, RunError
from vit.evaluation import classification_metrics, multilabel_metrics
from vit.evaluation.intervals import number_groups, share_interval
from vit.inference.calibrate import calibrate
from vit.inference.compare import compare
from vit.inference.evaluate import evaluate
from vit.inference.evaluation_data import with_training_settings
from vit.inference.predictor import Predictor
from vit.tasks import multilabel

pytestmark = pytest.mark.auto_precision

KEYS = {
    *("count", "top1", "top5", "top1_interval", "loss", "macro_f1", "balanced_accuracy", "ece"),
    *("nll", "brier", "ece_chance", "ece_debiased", "per_class", "slices", "failed", "confusion"),
    *("nll_interval", "brier_interval", "balanced_accuracy_interval", "macro_f1_interval"),
}


@pytest.fixture
def data(tiny_data: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_data, tmp_path / "data"))


@pytest.fixture(params=[("tiny_run", "tiny_data"), ("captioner", "captioned_data")])
def own_run_and_data(request, tmp_path: Path) -> list[Path]:
    """A run of each task and images for it, copies that a test may change."""
    folders = map(request.getfixturevalue, request.param)
    return [
        Path(shutil.copytree(folder, tmp_path / name))
        for folder, name in zip(folders, ("run", "data"), strict=True)
    ]


@pytest.mark.parametrize(
    "settings", [{"precision": "fp32"}, {"precision": "bf16"}, {"keep_aspect": True}], ids=str
)
def test_scores_equal_those_counted_from_predictions(tiny_run, tiny_data, input_images, settings):
    settings, steps = {"precision": "fp32", "batch_size": 4, **settings}, []
    scores = evaluate(
        tiny_run, str(tiny_data), progress=lambda *step: steps.append(step), **settings
    )
    found = Predictor(tiny_run, **settings)(input_images)
    right = sum(p.predictions[0][0] == Path(p.image).parent.name for p in found)
    assert scores.keys() == KEYS
    assert scores["count"] == len(input_images) == 27
    assert scores["top1"] == right / 27
    assert 0 < scores["top1"] < 1
    assert scores["failed"] == []
    assert scores["loss"] > 0
    answers = Counter((Path(p.image).parent.name, p.predictions[0][0]) for p in found)
    counts = {(a, b): n for a, row in scores["confusion"].items() for b, n in row.items()}
    assert counts == answers
    assert steps == [*((done, 27) for done in range(4, 27, 4)), (27, 27)]


def test_classes_are_matched_by_name(tiny_run, data):
    whole = evaluate(tiny_run, str(data), precision="fp32")
    shutil.rmtree(data / "val" / "apple")
    notes: list[str] = []
    part = evaluate(tiny_run, str(data), precision="fp32", notify=notes.append)
    assert [row["count"] for row in part["per_class"]] == [0, 9, 9]
    for before, after in zip(whole["per_class"][1:], part["per_class"][1:], strict=True):
        assert (before["label"], before["recall"]) == (after["label"], after["recall"])
    assert any("apple" in note for note in notes)


def test_unreadable_images_are_listed_and_not_counted(own_run_and_data):
    run, data = own_run_and_data
    lost, *others = sorted((data / "val").rglob("*.*g"))
    lost.write_bytes(b"")
    scores = evaluate(run, str(data))
    assert scores["count"] == 26
    assert [row["image"] for row in scores["failed"]] == [str(lost)]
    assert scores["failed"][0]["error"]
    for path in others:
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of 27 images"):
        evaluate(run, str(data))


def test_a_class_that_the_model_lacks_is_an_error(tiny_run, data):
    (data / "val" / "apple").rename(data / "val" / "pear")
    with pytest.raises(DataError, match="pear"):
        evaluate(tiny_run, str(data))


def test_only_images_that_training_held_out_are_evaluated(own_run_and_data):
    run, data = own_run_and_data
    held_out = ["apple/0.png", "class10/3.jpg", "class2/4.png"]
    record = {"root": str((data / "val").resolve()), "seed": 0, "val_share": 0.1, "val": held_out}
    (run / "split.json").write_text(json.dumps(record))
    scores = evaluate(run, str(data / "val"), **FP32)
    assert scores["count"] == 3
    assert [row["count"] for row in scores.get("per_class", ())] in ([1, 1, 1], [])
    assert evaluate(run, str(data), **FP32)["count"] == 27  # a validation folder of its own


def half_renamed(data: Path) -> None:
    for number, path in enumerate(sorted(data.rglob("*.*"))):
        if number % 2:
            path.unlink()
        else:
            path.rename(path.with_name(f"new{number}{path.suffix}"))


def test_every_command_measures_the_images_that_it_says(tiny_run, data, tmp_path, monkeypatch):
    """tests/data/sources/test_split_file.py has all changes of a dataset."""
    for module in ("evaluation.temperature_scaling", "inference.calibrate"):
        monkeypatch.setattr(f"vit.{module}.MIN_IMAGES", 8)
    runs = [Path(shutil.copytree(tiny_run, tmp_path / name)) for name in "ab"]
    paths = sorted(str(path) for path in (data / "val").rglob("*.*"))
    for run, own in zip(runs, (paths[:18], paths[9:]), strict=True):
        (run / "split.json").write_text(json.dumps(split_record(own, data / "val")))
    moved = Path(shutil.move(data / "val", tmp_path / "moved"))
    half_renamed(moved)
    said: list[str] = []
    assert evaluate(runs[0], str(moved), notify=said.append, **FP32)["count"] == 9
    assert compare(*runs, str(moved), notify=said.append, **FP32).to_dict()["count"] == 4
    fitted = calibrate(runs[0], str(moved), notify=said.append, **FP32)
    assert fitted["calibration"]["images"] == 9
    assert sum("took the 9 images left of the 18 that training held" in one for one in said) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("split", "{"),
        ("split", "[]"),
        ("split", '{"val": [1], "root": "x"}'),
        ("split", '{"val": []}'),
        ("split", '{"root": "x", "val": ["a"], "val_digests": []}'),
        ("split", '{"root": "x", "val": ["a"], "val_digests": [5]}'),
        ("split", '{"root": "x", "val": ["a\\u0000"], "val_digests": ["3:ab"]}'),
        ("paths", "{"),
        ("paths", "[]x"),
        ("paths", "3"),
        pytest.param("paths", "[" * 10**5, id="nested"),
    ],
)
def test_a_damaged_file_of_a_run_is_an_error(tiny_run, tiny_data, tmp_path, name, text):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (run / "config.yaml").write_text("data: photos\n")
    (run / f"{name}.json").write_text(text)
    with pytest.raises(RunError, match=rf"{name}\.json is damaged"):
        evaluate(run, str(tiny_data))


@pytest.mark.parametrize(
    ("spec", "column", "group"),
    [
        (DatasetSpec("hf:photos.parquet"), "coarse", "patient"),
        (DatasetSpec("hf:photos.parquet", label_column="fine"), "fine", "patient"),
        (DatasetSpec("hf:other.parquet"), None, None),
    ],
)
def test_a_table_is_read_with_the_columns_of_the_training(tmp_path, spec, column, group):
    given = {"data": "hf:photos.parquet", "label_column": "coarse", "group": "patient"}
    write_settings(tmp_path / "config.yaml", make_config(given), "")
    found = with_training_settings(spec, tmp_path)
    assert (found.label_column, found.group) == (column, group)


def test_numbers_are_those_of_the_training_unless_others_are_named(tmp_path):
    write_settings(tmp_path / "config.yaml", make_config({"data": "a.csv", "target": "age"}), "")
    for spec, numbers in (
        (DatasetSpec("b.csv", labels=False), ("age",)),
        (DatasetSpec("folder", labels=False), ("age",)),  # which reading refuses
        (DatasetSpec("b.csv", labels=False, target=("width",)), ("width",)),
        (DatasetSpec("b.csv"), ()),
    ):
        assert with_training_settings(spec, tmp_path).numbers == numbers


FP32 = {"device": "cpu", "precision": "fp32"}


def trained_elsewhere(tmp_path, monkeypatch, **settings):
    """A run that was trained on `photos` in the folder `work`; the working folder is another."""
    work, run = tmp_path / "work", tmp_path / "work" / "runs" / "run"
    for folder in (work / "photos", run, tmp_path / "here"):
        folder.mkdir(parents=True)
    for name in ("bad.csv", "new.csv"):
        (work / name).write_text("image\n")
    given = {"data": "photos", "exclude": "bad.csv", "group": "patient", **settings}
    write_settings(run / "config.yaml", make_config(given), "")
    monkeypatch.chdir(work)
    write_paths(run, make_config(given))
    monkeypatch.chdir(tmp_path / "here")
    return work.resolve(), run


def test_settings_of_a_training_hold_in_other_places(tmp_path, monkeypatch):
    work, run = trained_elsewhere(tmp_path, monkeypatch, corrections="new.csv")
    notes: list[str] = []
    found = with_training_settings(DatasetSpec("../work/photos"), run, notes.append)
    assert (found.group, notes) == ("patient", [])
    assert (found.exclude, found.corrections) == (str(work / "bad.csv"), str(work / "new.csv"))
    spec = DatasetSpec.from_config(stored_config(run).data, split="val")
    assert spec.data == str(work / "photos")
    assert with_training_settings(spec, run).exclude == str(work / "bad.csv")
    with monkeypatch.context() as patch:
        patch.chdir(work)
        assert with_training_settings(DatasetSpec("photos"), run).exclude == "bad.csv"
    moved = work.rename(tmp_path / "moved")
    found = with_training_settings(DatasetSpec(str(moved / "photos")), moved / "runs" / "run")
    assert (found.group, found.exclude) == ("patient", str(moved / "bad.csv"))


def test_settings_that_are_given_win_over_those_of_the_training(tmp_path, monkeypatch):
    work, run = trained_elsewhere(tmp_path, monkeypatch, corrections="new.csv")
    lists = {"exclude": "mine.csv", "corrections": "fixed.csv", "label_list": "labels.csv"}
    for data in (str(work / "photos"), "list.csv"):
        found = with_training_settings(DatasetSpec(data, **lists), run)
        assert {name: getattr(found, name) for name in lists} == lists


@pytest.mark.parametrize("gone", [False, True])
def test_a_list_that_was_changed_since_the_training_is_named(tmp_path, monkeypatch, gone):
    work, run = trained_elsewhere(tmp_path, monkeypatch)
    (work / "bad.csv").write_text("image\na.png\n")
    if gone:
        (work / "bad.csv").unlink()
    notes: list[str] = []
    found = with_training_settings(DatasetSpec("../work/photos"), run, notes.append)
    copy = run.resolve() / "lists" / "copy-exclude.csv"
    assert (found.exclude, copy.read_text()) == (str(copy), "image\n")
    assert notes == [
        f"note: exclude=bad.csv has changed since the training, or is gone: its copy {copy} is used"
    ]


def test_settings_of_a_training_that_are_not_applied_are_named(tmp_path, monkeypatch):
    work, run = trained_elsewhere(tmp_path, monkeypatch, allow_outside=True)
    for name in (tmp_path / "photos", "photos2"):
        shutil.copytree(work / "photos", name)  # the first one is beside the folder of the run
    shutil.copy(work / "bad.csv", tmp_path)
    notes: list[str] = []
    for name in (str(tmp_path / "photos"), "photos2"):
        spec = DatasetSpec(name)
        assert with_training_settings(spec, run, notes.append) == spec
    shutil.rmtree(run / "lists")
    (work / "bad.csv").unlink()
    found = with_training_settings(DatasetSpec("../work/photos"), run, notes.append)
    assert (found.group, found.exclude) == ("patient", None)
    same_name, other_name, gone = notes
    assert "group=patient, exclude=" in same_name
    assert "bad.csv on ../work/photos, not applied" in same_name.replace(str(tmp_path), "..")
    assert "not applied: photos2 is not its data; if it should be" in other_name
    assert "exclude" not in other_name  # of lists that name other images
    assert "trained with exclude=bad.csv on " in gone
    assert "not applied: the files are not found; start in the folder in" in gone


@pytest.fixture
def photo_list(data):
    """photos.csv of the 27 images, with the camera and the hour of each; one hour is missing."""
    paths = sorted((data / "val").rglob("*.*"))
    rows = [
        f"{path.relative_to(data)},{path.parent.name},{'old' if number % 2 else 'new'},{hour}"
        for number, path in enumerate(paths)
        for hour in ["" if number == 26 else number]
    ]
    (data / "photos.csv").write_text("\n".join(["image,label,Camera,hour", *rows]) + "\n")
    return data / "photos.csv", paths


def test_slices_are_those_counted_from_predictions(tiny_run, photo_list, monkeypatch):
    listed, paths = photo_list
    read = Mock(wraps=read_source)
    monkeypatch.setattr("vit.inference.evaluation_data.read_source", read)
    notes: list[str] = []
    words = {"slice": ["camera", "hour"], "notify": notes.append}
    rows = evaluate(tiny_run, str(listed), **words, **FP32)["slices"]
    assert [call.args[0].columns for call in read.mock_calls] == [("camera", "hour")]
    assert not any("not used" in note for note in notes)
    right = right_answers(tiny_run, paths)
    groups = {
        ("file_type", "PNG"): [path.suffix == ".png" for path in paths],
        ("file_type", "JPEG"): [path.suffix == ".jpg" for path in paths],
        ("column:camera", "new"): [number % 2 == 0 for number in range(27)],
        ("column:camera", "old"): [number % 2 == 1 for number in range(27)],
    }
    assert {(row["feature"], row["slice"]) for row in rows} == groups.keys()
    for row in rows:
        inside = groups[row["feature"], row["slice"]]
        hits = sum(hit for hit, own in zip(right, inside, strict=True) if own)
        assert (row["count"], row["rest_count"]) == (sum(inside), 27 - sum(inside))
        assert row["accuracy"] == hits / sum(inside)
        assert row["rest_accuracy"] == (sum(right) - hits) / (27 - sum(inside))


def test_columns_that_are_not_there_are_errors(tiny_run, photo_list, tiny_data):
    for where, column in ((photo_list[0], "lens"), (tiny_data, "camera")):
        with pytest.raises(ConfigError, match=f"slice={column}: .* has no such column"):
            evaluate(tiny_run, str(where), slice=[column], **FP32)


@pytest.mark.parametrize("group", ["hour", r"(\d)\.\w+$"])
def test_intervals_take_groups_as_independent(tiny_run, photo_list, group):
    listed, paths = photo_list
    digits = [re.search(r"(\d)\.\w+$", str(path))[1] for path in paths]
    names = digits if group != "hour" else [str(place) for place in range(27)]
    right = torch.tensor(right_answers(tiny_run, paths))
    scores = evaluate(tiny_run, str(listed), group=group, **FP32)
    assert scores.keys() == KEYS | {"groups"}
    assert scores["groups"] == len({*names})
    assert scores["top1_interval"] == share_interval(right, number_groups(names))
    alone = evaluate(tiny_run, str(listed), **FP32)
    assert alone["top1_interval"] == share_interval(right, None)
    assert alone["top1"] == scores["top1"]


@pytest.mark.parametrize(
    ("run", "data", "expected"),
    [
        ("tiny_run", "tiny_data", {"class_intervals": 1}),
        ("several_run", "several_list", {"multilabel_intervals": 1, "map_interval": 3}),
    ],
)
def test_corrupted_images_have_one_interval_and_it_is_computed_once(
    request, run, data, expected, monkeypatch
):
    """The draws of the others take longer than a small network."""
    modules = {
        "class_intervals": classification_metrics,
        "multilabel_intervals": multilabel,
        "map_interval": multilabel_metrics,
    }
    counted = {name: Mock(wraps=getattr(module, name)) for name, module in modules.items()}
    for name, mock in counted.items():
        monkeypatch.setattr(modules[name], name, mock)
    monkeypatch.setattr("vit.inference.evaluate.SEVERITIES", (1,))
    named = {name: CORRUPTIONS[name] for name in ("contrast", "brightness")}
    monkeypatch.setattr("vit.inference.evaluate.CORRUPTIONS", named)
    run, data = map(request.getfixturevalue, (run, data))
    evaluate(run, str(data), group=r"(\d)\.\w+$", corruptions=True, **FP32)
    assert {name: mock.call_count for name, mock in counted.items() if mock.called} == expected


def test_few_groups_are_said(tiny_run, photo_list, capsys):
    words = ["--device", "cpu", "--group", "camera"]
    assert main(["evaluate", str(tiny_run), str(photo_list[0]), *words]) == 0
    assert "(95 % interval: 0.00% to 100.00%, of 2 groups)" in capsys.readouterr().out


def test_slices_decode_no_image_twice(tiny_run, tiny_data, monkeypatch):
    read = Mock(wraps=read_image)
    monkeypatch.setattr("vit.data.preprocessing.read_image", read)
    monkeypatch.setattr("vit.data.image_io.read_header", None)
    assert evaluate(tiny_run, str(tiny_data), **FP32)["slices"]
    assert read.call_count == len({call.args[0] for call in read.mock_calls}) == 27


def test_several_labels_are_right_where_all_are(several_run, several_list, monkeypatch):
    monkeypatch.setattr("vit.evaluation.accuracy_slices.MIN_IMAGES", 1)
    scores = evaluate(several_run, str(several_list), **FP32)
    rows = [row for row in scores["slices"] if row["feature"] == "brightness"]
    assert sum(row["count"] for row in rows) == 32
    right = sum(row["count"] * row["accuracy"] for row in rows)
    assert right / 32 == pytest.approx(scores["subset_accuracy"])
    assert 0 < right < 32


def test_robustness_is_the_accuracy_on_corrupted_images(
    tiny_run, tiny_data, input_images, monkeypatch
):
    blank = (lambda image, value, _: Image.new("RGB", image.size, (value,) * 3), (1, 2, 3, 4, 5))
    monkeypatch.setitem(CORRUPTIONS, "blank", blank)
    names = ("gaussian_noise", "blank")
    monkeypatch.setattr("vit.inference.evaluate.CORRUPTIONS", {n: CORRUPTIONS[n] for n in names})
    monkeypatch.setattr("vit.inference.evaluate.SEVERITIES", (1, 5))
    steps = []
    settings = {**FP32, "batch_size": 9, "group": r"(\d)\.\w+$"}
    told = {"progress": lambda *step: steps.append(step)}
    scores = evaluate(tiny_run, str(tiny_data), corruptions=True, **settings, **told)
    assert steps == [(done, 27 * 5) for done in range(9, 27 * 5 + 1, 9)]
    found, predictor = scores.pop("robustness"), Predictor(tiny_run, **FP32)
    rows = found["corruptions"]
    pairs = [(name, severity) for name in names for severity in (1, 5)]
    assert [(row["corruption"], row["severity"]) for row in rows] == pairs
    groups = number_groups([Path(path).stem for path in input_images])
    for row, (name, severity) in zip(rows, pairs, strict=True):
        prepared = {"severity": severity, "preprocessing": predictor.preprocessing}
        corruption = Corruption(name=name, **prepared)
        answers = predictor([corruption(read_image(path)) for path in input_images])
        right = [
            one.predictions[0][0] == Path(path).parent.name
            for one, path in zip(answers, input_images, strict=True)
        ]
        assert row["top1"] == sum(right) / 27
        assert row["top1_interval"] == share_interval(torch.tensor(right), groups)
    assert found["clean"] == scores["top1"]
    assert found["mean"] == pytest.approx(sum(row["top1"] for row in rows) / 4)
    assert scores == evaluate(tiny_run, str(tiny_data), **settings)  # digits depend on the batch
    assert rows[-1]["top1"] == 1 / 3  # one answer for all images
