"""Images that a review leaves out, and labels that it corrects."""

import pytest
from PIL import Image

from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_splits, read_source
from vit.errors import ConfigError, DataError
from vit.output.prediction_results import csv_row
from vit.text import csv_text


@pytest.fixture
def data(tmp_path):
    """train/ and val/ with two classes of three images each."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for number in range(3):
                path = tmp_path / "photos" / split / name / f"{number}.png"
                Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    return tmp_path / "photos"


def labels(spec):
    index = read_source(spec)
    return {
        (split, "/".join(record.path.split("/")[-2:])): record.labels[0]
        for split, records in index.splits.items()
        for record in records
    }, index.notes


@pytest.mark.parametrize("absolute", [False, True])
def test_excluded_images_are_left_out_and_counted(data, tmp_path, absolute):
    base = f"{data}/" if absolute else ""
    rows = [f"{base}train/cat/1.png,cat,dog", f"{base}val/dog/0.png,dog,cat", "train/no.png,x,y"]
    (tmp_path / "list.csv").write_text("image,label,likely\n" + "\n".join(rows) + "\n")
    before, _ = labels(DatasetSpec(str(data)))
    after, notes = labels(DatasetSpec(str(data), exclude=str(tmp_path / "list.csv")))
    assert before.keys() - after.keys() == {("train", "cat/1.png"), ("val", "dog/0.png")}
    assert notes[-1].endswith("list.csv: 2 images (1 other not in the data) left out")


def test_corrected_labels_replace_those_of_the_data(data, tmp_path):
    (tmp_path / "list.jsonl").write_text(
        '{"image": "train/cat/1.png", "label": "dog"}\n{"image": "val/dog/0.png", "label": "dog"}\n'
    )
    spec = DatasetSpec(str(data), corrections=str(tmp_path / "list.jsonl"))
    before, _ = labels(DatasetSpec(str(data)))
    after, notes = labels(spec)
    assert after == {**before, ("train", "cat/1.png"): "dog"}
    assert notes[-1].endswith("2 images read, 1 label corrected")
    splits = open_splits(spec, val_share=0.2, seed=0)
    found = {one.path[-15:]: splits.classes[one.label] for one in splits.train}
    assert found["train/cat/1.png"] == "dog"
    assert len(splits.val) == 6


def test_a_review_written_for_spreadsheets_has_the_names_of_the_data(data, tmp_path):
    odd = data / "train" / "=cmd()|a"
    (data / "train" / "cat").rename(odd)
    (data / "val" / "cat").rename(data / "val" / "=cmd()|a")
    (odd / "0.png").rename(odd / "-0\t.png")
    names = [f"train/=cmd()|a/{name}" for name in ("-0\t.png", "1.png")]
    root = str(data / "train")
    rows = [[csv_text(name.removeprefix("train/")), csv_text("=cmd()|a")] for name in names] + [
        ["dog/0.png", csv_text("=cmd()|a")]
    ]
    path = tmp_path / "list.csv"
    path.write_text("image,label\n" + "".join(map(csv_row, rows)), encoding="utf-8")
    assert path.read_text().count("'=cmd()") == 5
    after, notes = labels(DatasetSpec(root, corrections=str(path)))
    assert notes[-1].endswith("list.csv: 3 images read, 1 label corrected")
    assert [*after.values()].count("=cmd()|a") == 4
    after, notes = labels(DatasetSpec(root, exclude=str(path)))
    assert notes[-1].endswith("list.csv: 3 images left out")


@pytest.mark.parametrize(
    ("setting", "rows", "message"),
    [
        ("exclude", "train/x.png,cat", r"none of its 1 image, such as train/x\.png, is in the"),
        ("corrections", "train/cat/1.png,dgo", "line 2: no image .* dgo; did you mean dog"),
        ("corrections", "train/cat/1.png,cat|dog", "line 2: 2 classes; an image has one here"),
    ],
)
def test_a_review_that_does_not_fit_is_refused(data, tmp_path, setting, rows, message):
    (tmp_path / "list.csv").write_text(f"image,label\n{rows}\n")
    with pytest.raises(DataError, match=message):
        read_source(DatasetSpec(str(data), **{setting: str(tmp_path / "list.csv")}))


def test_labels_are_corrected_only_where_they_are_read(data, tmp_path):
    (tmp_path / "list.csv").write_text("image,label\ntrain/cat/1.png,dog\n")
    with pytest.raises(ConfigError, match="these data have no labels"):
        read_source(DatasetSpec(str(data), labels=False, corrections=str(tmp_path / "list.csv")))
