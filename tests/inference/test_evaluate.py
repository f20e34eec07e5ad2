"""evaluate: names decide, unreadable images are left out and listed, own splits are honoured."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image

from vit.commands.main import main
from vit.config.setting_layers import make_config, write_settings
from vit.config.stored_config import stored_config, write_paths
from vit.data.corruptions import CORRUPTIONS, Corruption
from vit.data.image_io import read_image
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import read_source
from vit.data.sources.split_file import split_record
from vit.errors import ConfigError, DataError, RunError
from vit.evaluation import multilabel_metrics
from vit.evaluation.intervals import number_groups, share_interval
from vit.inference.calibrate import calibrate
from vit.inference.compare import compare
from vit.inference.evaluate import evaluate
from vit.inference.evaluation_data import with_training_settings
from vit.inference.predictor import Predictor
from vit.tasks import classification, multilabel
from vit.weights.saved_model import load_run

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


@pytest.mark.parametrize(
    "settings", [{"precision": "fp32"}, {"precision": "bf16"}, {"keep_aspect": True}], ids=str
)
def test_scores_equal_those_counted_from_predictions(tiny_run, tiny_data, settings):
    settings = {"precision": "fp32", "batch_size": 4, **settings}
    scores = evaluate(tiny_run, str(tiny_data), **settings)
    files = sorted((tiny_data / "val").rglob("*.*"))
    found = Predictor(tiny_run, **settings)(files)
    right = sum(p.predictions[0][0] == Path(p.image).parent.name for p in found)
    assert scores.keys() == KEYS
    assert scores["count"] == len(files) == 27
    assert scores["top1"] == right / 27
    assert 0 < scores["top1"] < 1
    assert scores["failed"] == []
    assert scores["loss"] > 0
    answers = Counter((Path(p.image).parent.name, p.predictions[0][0]) for p in found)
    counts = {(a, b): n for a, row in scores["confusion"].items() for b, n in row.items()}
    assert counts == answers


def test_classes_are_matched_by_name(tiny_run, data):
    whole = evaluate(tiny_run, str(data), precision="fp32")
    shutil.rmtree(data / "val" / "apple")
    notes: list[str] = []
    part = evaluate(tiny_run, str(data), precision="fp32", notify=notes.append)
    assert [row["count"] for row in part["per_class"]] == [0, 9, 9]
    for before, after in zip(whole["per_class"][1:], part["per_class"][1:], strict=True):
        assert (before["label"], before["recall"]) == (after["label"], after["recall"])
    assert any("apple" in note for note in notes)


def test_unreadable_images_are_listed_and_not_counted(tiny_run, data):
    whole = evaluate(tiny_run, str(data))
    lost = data / "val" / "apple" / "0.png"
    lost.write_bytes(b"")
    scores = evaluate(tiny_run, str(data))
    assert scores["count"] == whole["count"] - 1
    assert [row["image"] for row in scores["failed"]] == [str(lost)]
    assert scores["failed"][0]["error"]
    assert scores["per_class"][0]["count"] == 8
    for path in (data / "val").rglob("*.*"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of 27 images"):
        evaluate(tiny_run, str(data))


def test_a_class_that_the_model_lacks_is_an_error(tiny_run, data):
    (data / "val" / "apple").rename(data / "val" / "pear")
    with pytest.raises(DataError, match="pear"):
        evaluate(tiny_run, str(data))


def test_held_out_images_of_moved_shards_are_recognised(tiny_run, data, tmp_path, capfd):
    run, held_out = tmp_path / "run", ["apple/0.png", "class10/3.png", "class2/4.png"]
    shutil.copytree(tiny_run, run)
    for name in held_out:
        for path in (data / "val").glob(f"{name[:-3]}*"):
            path.rename(path.with_suffix(".png"))
    shards = tmp_path / "shards"
    assert main(["data", str(data / "val"), "--to", "shards", "--out", str(shards)]) == 0
    images = [str(data / "val" / name) for name in held_out]
    record = {**split_record(images, data / "val"), "root": str(tmp_path / "gone" / "shards.tar")}
    (run / "split.json").write_text(json.dumps(record))
    assert evaluate(run, str(shards))["count"] == 3
    assert [row["count"] for row in evaluate(run, str(shards))["per_class"]] == [1, 1, 1]


def test_only_images_that_training_held_out_are_evaluated(tiny_run, data, tmp_path):
    run, held_out = tmp_path / "run", ["apple/0.png", "class10/3.jpg", "class2/4.png"]
    shutil.copytree(tiny_run, run)
    record = {"root": str((data / "val").resolve()), "seed": 0, "val_share": 0.1, "val": held_out}
    (run / "split.json").write_text(json.dumps(record))
    scores = evaluate(run, str(data / "val"))
    assert scores["count"] == 3
    assert [row["count"] for row in scores["per_class"]] == [1, 1, 1]
    moved, notes = shutil.copytree(data / "val", tmp_path / "moved"), []
    assert (
        evaluate(run, str(moved), notify=notes.append)["count"] == 27
    )  # equal names prove nothing
    assert any("took all 27 images: the run knows its images by name only" in one for one in notes)
    images = [str(data / "val" / name) for name in held_out]
    (run / "split.json").write_text(json.dumps(split_record(images, data / "val")))
    assert evaluate(run, str(moved)) == scores
    assert evaluate(run, str(data))["count"] == 27  # a validation folder of its own


def images_turned(data: Path) -> None:
    """Each image of a class has the name of another one."""
    for folder in data.iterdir():
        paths = sorted(folder.iterdir())
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, contents[2:] + contents[:2], strict=True):
            path.write_bytes(content)


def half_renamed(data: Path) -> None:
    for number, path in enumerate(sorted(data.rglob("*.*"))):
        if number % 2:
            path.unlink()
        else:
            path.rename(path.with_name(f"new{number}{path.suffix}"))


def encoded_again(data: Path) -> None:
    for path in data.rglob("*.*"):
        with Image.open(path) as image:
            image.convert("RGB").save(path, compress_level=0, quality=50)


CHANGES = {
    images_turned: "took the 18 images that training held out",
    half_renamed: "took the 9 images left of the 18 that training held out",
    encoded_again: "training held out none of them; equal in name, but not in content: 18 images",
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_command_measures_the_images_that_it_says(
    change, tiny_run, data, tmp_path, monkeypatch
):
    """tests/data/sources/test_split_file.py has more changes of a dataset."""
    for module in ("evaluation.temperature_scaling", "inference.calibrate"):
        monkeypatch.setattr(f"vit.{module}.MIN_IMAGES", 8)
    runs = [Path(shutil.copytree(tiny_run, tmp_path / name)) for name in "ab"]
    paths = sorted(str(path) for path in (data / "val").rglob("*.*"))
    for run, own in zip(runs, (paths[:18], paths[9:]), strict=True):
        (run / "split.json").write_text(json.dumps(split_record(own, data / "val")))
    held_out = [{Path(path).read_bytes() for path in own} for own in (paths[:18], paths[9:])]
    moved = Path(shutil.move(data / "val", tmp_path / "moved"))
    change(moved)
    contents = [path.read_bytes() for path in moved.rglob("*.*")]
    counts = [sum(one in own for one in contents) or 27 for own in held_out]
    both = sum(one in held_out[0] & held_out[1] for one in contents) or 27
    said: list[str] = []
    assert evaluate(runs[0], str(moved), notify=said.append, **FP32)["count"] == counts[0]
    assert CHANGES[change] in said[0]
    assert compare(*runs, str(moved), notify=said.append, **FP32).to_dict()["count"] == both
    fitted = calibrate(runs[0], str(moved), notify=said.append, **FP32)
    assert fitted["calibration"]["images"] == counts[0]
    assert sum(CHANGES[change] in one for one in said) == 3


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"val": [1], "root": "x"}',
        '{"val": []}',
        '{"root": "x", "val": ["a"], "val_digests": []}',
        '{"root": "x", "val": ["a"], "val_digests": [5]}',
        '{"root": "x", "val": ["a\\u0000"], "val_digests": ["3:ab"]}',
    ],
)
def test_a_damaged_split_file_is_an_error(tiny_run, tiny_data, tmp_path, text):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (run / "split.json").write_text(text)
    with pytest.raises(RunError, match=r"split\.json is damaged"):
        evaluate(run, str(tiny_data))


def test_progress_is_reported_after_each_batch(tiny_run, tiny_data):
    steps = []
    evaluate(
        load_run(tiny_run),
        str(tiny_data),
        batch_size=10,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(10, 27), (20, 27), (27, 27)]


def test_a_table_is_read_with_the_columns_of_the_training(tmp_path):
    given = {"data": "hf:photos.parquet", "label_column": "coarse", "group": "patient"}
    write_settings(tmp_path / "config.yaml", make_config(given), "")
    assert (
        with_training_settings(DatasetSpec("hf:photos.parquet"), tmp_path).label_column == "coarse"
    )
    assert with_training_settings(DatasetSpec("hf:photos.parquet"), tmp_path).group == "patient"
    other = with_training_settings(DatasetSpec("hf:other.parquet"), tmp_path)
    assert (other.label_column, other.group) == (None, None)
    own = DatasetSpec("hf:photos.parquet", label_column="fine")
    assert with_training_settings(own, tmp_path).label_column == "fine"


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


def test_settings_of_a_training_hold_in_another_working_folder(tmp_path, monkeypatch):
    work, run = trained_elsewhere(tmp_path, monkeypatch, corrections="new.csv")
    notes: list[str] = []
    found = with_training_settings(DatasetSpec("../work/photos"), run, notes.append)
    assert (found.group, notes) == ("patient", [])
    assert (found.exclude, found.corrections) == (str(work / "bad.csv"), str(work / "new.csv"))
    monkeypatch.chdir(work)
    assert with_training_settings(DatasetSpec("photos"), run).exclude == "bad.csv"


def test_settings_that_are_given_win_over_those_of_the_training(tmp_path, monkeypatch):
    work, run = trained_elsewhere(tmp_path, monkeypatch, corrections="new.csv")
    lists = {"exclude": "mine.csv", "corrections": "fixed.csv", "label_list": "labels.csv"}
    for data in (str(work / "photos"), "list.csv"):
        found = with_training_settings(DatasetSpec(data, **lists), run)
        assert {name: getattr(found, name) for name in lists} == lists


def test_lists_of_a_training_elsewhere_are_found_for_its_held_out_images(tmp_path, monkeypatch):
    work, run = trained_elsewhere(tmp_path, monkeypatch)
    spec = DatasetSpec.from_config(stored_config(run).data, split="val")
    assert spec.data == str(work / "photos")
    assert with_training_settings(spec, run).exclude == str(work / "bad.csv")


def test_a_run_and_its_data_may_be_moved_together(tmp_path, monkeypatch):
    work, run = trained_elsewhere(tmp_path, monkeypatch)
    moved = work.rename(tmp_path / "moved")
    run = moved / run.relative_to(work)
    found = with_training_settings(DatasetSpec(str(moved / "photos")), run)
    assert (found.group, found.exclude) == ("patient", str(moved / "bad.csv"))


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


def test_another_folder_of_the_same_name_is_not_the_data_of_a_run(tmp_path, monkeypatch):
    _, run = trained_elsewhere(tmp_path, monkeypatch, allow_outside=True)
    other = tmp_path / "photos"  # beside the folder of the run
    other.mkdir()
    (tmp_path / "bad.csv").write_text("image\n")
    notes: list[str] = []
    found = with_training_settings(DatasetSpec(str(other)), run, notes.append)
    assert found == DatasetSpec(str(other))
    assert "group=patient, exclude=" in notes[0]
    assert "bad.csv on ../work/photos, not applied" in notes[0].replace(str(tmp_path), "..")


def test_settings_of_a_training_that_are_not_applied_are_named(tmp_path, monkeypatch):
    work, run = trained_elsewhere(tmp_path, monkeypatch)
    shutil.copytree(work / "photos", "photos2")
    notes: list[str] = []
    assert with_training_settings(DatasetSpec("photos2"), run, notes.append).group is None
    shutil.rmtree(run / "lists")
    (work / "bad.csv").unlink()
    found = with_training_settings(DatasetSpec("../work/photos"), run, notes.append)
    assert (found.group, found.exclude) == ("patient", None)
    first, second = notes
    assert "not applied: photos2 is not its data; if it should be" in first
    assert "exclude" not in first  # of lists that name other images
    assert first.endswith("give it again")
    assert "trained with exclude=bad.csv on " in second
    assert "not applied: the files are not found; start in the folder in" in second


@pytest.mark.parametrize("text", ["{", "[]x", "3", pytest.param("[" * 10**5, id="nested")])
def test_damaged_paths_of_a_run_are_an_error(tmp_path, text):
    (tmp_path / "config.yaml").write_text("data: photos\n")
    (tmp_path / "paths.json").write_text(text)
    with pytest.raises(RunError, match=r"paths\.json is damaged .*; delete it"):
        stored_config(tmp_path)


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
    read = []

    def counted(spec):
        read.append(spec.columns)
        return read_source(spec)

    monkeypatch.setattr("vit.inference.evaluation_data.read_source", counted)
    notes: list[str] = []
    words = {"slice": ["camera", "hour"], "notify": notes.append}
    rows = evaluate(tiny_run, str(listed), **words, **FP32)["slices"]
    assert read == [("camera", "hour")]
    assert not any("not used" in note for note in notes)
    found = Predictor(tiny_run, **FP32)(paths)
    right = [p.predictions[0][0] == Path(p.image).parent.name for p in found]
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
    found = Predictor(tiny_run, **FP32)(paths)
    right = [p.predictions[0][0] == Path(p.image).parent.name for p in found]
    scores = evaluate(tiny_run, str(listed), group=group, **FP32)
    assert scores.keys() == KEYS | {"groups"}
    assert scores["groups"] == len({*names})
    assert scores["top1_interval"] == share_interval(torch.tensor(right), number_groups(names))
    alone = evaluate(tiny_run, str(listed), **FP32)
    assert alone["top1_interval"] == share_interval(torch.tensor(right), None)
    assert alone["top1"] == scores["top1"]


def test_intervals_of_corrupted_images_take_groups_as_independent(
    tiny_run, photo_list, monkeypatch
):
    none = {"none": (lambda image, _value, _rng: image, (1,))}
    monkeypatch.setattr("vit.inference.evaluate.CORRUPTIONS", none)
    monkeypatch.setattr("vit.inference.evaluate.SEVERITIES", (1,))
    monkeypatch.setattr("vit.data.corruptions.CORRUPTIONS", none)
    settings = {**FP32, "group": r"(\d)\.\w+$", "corruptions": True}
    scores = evaluate(tiny_run, str(photo_list[0]), **settings)
    (row,) = scores["robustness"]["corruptions"]
    assert row["top1_interval"] == scores["top1_interval"]


@pytest.mark.parametrize("several", [False, True])
def test_corrupted_images_have_one_interval_and_it_is_computed_once(
    request, tiny_run, photo_list, several, monkeypatch
):
    """The draws of the others take longer than a small network."""
    counted: Counter[str] = Counter()

    def count(module, name):
        original = getattr(module, name)

        def counting(*arguments, **settings):
            counted[name] += 1
            return original(*arguments, **settings)

        monkeypatch.setattr(module, name, counting)

    count(classification, "class_intervals")
    count(multilabel, "multilabel_intervals")
    count(multilabel_metrics, "map_interval")
    monkeypatch.setattr("vit.inference.evaluate.SEVERITIES", (1,))
    named = {name: CORRUPTIONS[name] for name in ("contrast", "brightness")}
    monkeypatch.setattr("vit.inference.evaluate.CORRUPTIONS", named)
    run = request.getfixturevalue("several_run") if several else tiny_run
    data = request.getfixturevalue("several_list") if several else photo_list[0]
    evaluate(run, str(data), group=r"(\d)\.\w+$", corruptions=True, **FP32)
    expected = {"multilabel_intervals": 1, "map_interval": 3} if several else {"class_intervals": 1}
    assert counted == expected


def test_few_groups_are_said(tiny_run, photo_list, capsys):
    words = ["evaluate", str(tiny_run), str(photo_list[0]), "--device", "cpu", "--group"]
    assert main([*words, "camera"]) == 0
    assert "(95 % interval: 0.00% to 100.00%, of 2 groups)" in capsys.readouterr().out
    assert main([*words, "camra"]) == 2
    assert "group=camra: no column of that name" in capsys.readouterr().err


def test_slices_decode_no_image_twice(tiny_run, tiny_data, monkeypatch):
    read = []

    def read_once(path, **options):
        read.append(path)
        return read_image(path, **options)

    monkeypatch.setattr("vit.data.preprocessing.read_image", read_once)
    monkeypatch.setattr("vit.data.image_io.read_header", None)
    assert evaluate(tiny_run, str(tiny_data), **FP32)["slices"]
    assert len(read) == len({*read}) == 27


def test_several_labels_are_right_where_all_are(several_run, several_list, monkeypatch):
    monkeypatch.setattr("vit.evaluation.accuracy_slices.MIN_IMAGES", 1)
    scores = evaluate(several_run, str(several_list), **FP32)
    rows = [row for row in scores["slices"] if row["feature"] == "brightness"]
    assert sum(row["count"] for row in rows) == 32
    right = sum(row["count"] * row["accuracy"] for row in rows)
    assert right / 32 == pytest.approx(scores["subset_accuracy"])
    assert 0 < right < 32


def test_robustness_is_the_accuracy_on_corrupted_images(tiny_run, tiny_data, monkeypatch):
    blank = (lambda image, value, _: Image.new("RGB", image.size, (value,) * 3), (1, 2, 3, 4, 5))
    monkeypatch.setitem(CORRUPTIONS, "blank", blank)
    names = ("gaussian_noise", "blank")
    monkeypatch.setattr("vit.inference.evaluate.CORRUPTIONS", {n: CORRUPTIONS[n] for n in names})
    monkeypatch.setattr("vit.inference.evaluate.SEVERITIES", (1, 5))
    steps = []
    settings = {**FP32, "batch_size": 9, "progress": lambda *step: steps.append(step)}
    scores = evaluate(tiny_run, str(tiny_data), corruptions=True, **settings)
    assert steps == [(done, 27 * 5) for done in range(9, 27 * 5 + 1, 9)]
    found, predictor = scores.pop("robustness"), Predictor(tiny_run, **FP32)
    rows = found["corruptions"]
    pairs = [(name, severity) for name in names for severity in (1, 5)]
    assert [(row["corruption"], row["severity"]) for row in rows] == pairs
    paths = sorted((tiny_data / "val").rglob("*.*"))
    for row in rows:
        corruption = Corruption(
            name=row["corruption"],
            severity=row["severity"],
            preprocessing=predictor.preprocessing,
        )
        answers = predictor([corruption(read_image(path)) for path in paths])
        right = sum(
            one.predictions[0][0] == path.parent.name
            for one, path in zip(answers, paths, strict=True)
        )
        assert row["top1"] == right / 27
        assert row["top1_interval"][0] <= row["top1"] <= row["top1_interval"][1]
    assert found["clean"] == scores["top1"]
    assert found["mean"] == pytest.approx(sum(row["top1"] for row in rows) / 4)
    again = evaluate(tiny_run, str(tiny_data), **FP32, batch_size=9)
    assert scores == again  # digits depend on the size of a batch
    assert rows[-1]["top1"] == 1 / 3  # one answer for all images
