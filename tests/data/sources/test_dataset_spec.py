"""Errors for inputs that are no dataset: each names the remedy."""

import json
import os

import pytest

from vit.commands.main import main
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.image_list import images_in
from vit.data.sources.open_dataset import open_splits, read_source
from vit.errors import DataError


def open_data(data):
    return open_splits(str(data), val_share=0.25, seed=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.XLSM", "an Excel workbook of another kind than .xlsx, not a list: save it as CSV"),
        ("a.xls", "an Excel workbook"),
        ("a.ods", "a spreadsheet, not a list: save it as CSV"),
        ("a.numbers", "a spreadsheet, not a list"),
        ("a.gsheet", "a spreadsheet, not a list"),
        ("a.zip", "is an archive: unpack it first"),
        ("a.rar", "is an archive: unpack it first"),
        ("a.7z", "is an archive: unpack it first"),
        ("a.csv.gz", "is an archive: unpack it first"),
        ("a.tgz", "compressed with gzip.*unpack it"),
        ("a.parquet", r"is a Parquet table: if it has images, give it as hf:PATH"),
        ("a.arrow", "an Arrow table: .* as hf:FOLDER"),
        (
            "a.tfrecord-00000-of-00002",
            "a file of records, arrays or Python objects: save its images as files",
        ),
        ("a.h5", "a file of records, arrays"),
        ("a.NPZ", "a file of records, arrays"),
        ("a.pkl", "records, arrays or Python objects"),
        ("a.jpg", "DATA is one folder, .*, not a single image: .*a.jpg"),
    ],
)
def test_spreadsheets_archives_and_images_are_refused_with_a_remedy(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / name)


def test_a_run_folder_is_no_dataset(tmp_path, capsys):
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="is a run folder, a trained network: give a folder or l"):
        open_data(tmp_path)
    assert main(["check", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("is a run folder") == 1


@pytest.mark.parametrize("command", ["train", "check", "evaluate", "data"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], "b is one argument too many; names with spaces need quotes"),
        (["a", "--no-such-flag", "b"], "--no-such-flag is not an argument"),
    ],
)
def test_extra_arguments_are_refused(capsys, command, words, message):
    others = {"evaluate": ["RUN"], "data": ["--to", "folder", "--out", "no"]}.get(command, [])
    assert main([command, *others, *words]) == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


def test_a_glob_is_no_dataset(make_tree):
    root = make_tree({"x": 1})
    with pytest.raises(DataError, match=r"one folder, .* not a pattern"):
        open_data(root / "x" / "*.png")


COCO = {"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [{"id": 1, "image_id": 1}]}


def test_a_pipe_called_json_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(DataError, match="is a file, not a folder"):
        open_data(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            COCO | {"annotations": [{"image_id": 1, "category_id": 1}]},
            "COCO's annotations with cat",
        ),
        (COCO | {"annotations": [{"image_id": 1, "caption": "x"}]}, "learn them with --task capti"),
        (
            [{"annotations": [{"result": [{"value": {"choices": ["a"]}}]}]}],
            "export of Label Studio",
        ),
        ([{"image": "1.jpg", "label": "a"}], r"not a list: write one object, .* of a .jsonl \(jq"),
        ({"1.jpg": "a"}, "not a list: write one object"),
    ],
)
def test_json_is_named_by_what_is_in_it(tmp_path, value, message):
    (tmp_path / "a.json").write_text(json.dumps(value))
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["train.parquet", "data.mdb", "x.tfrecord-00000-of-00001"])
def test_a_folder_of_another_format_is_named(make_tree, name):
    root = make_tree({"x": 5, "y": 5})
    (root / name).touch()
    assert open_data(root).classes == ("x", "y")
    (root / "z").mkdir()
    (root / "z" / name).touch()
    with pytest.raises(DataError, match=r"has a (Parquet table|file of)"):
        open_data(root / "z")


def test_a_path_of_another_notation_is_named_by_its_own(make_tree, monkeypatch):
    root = make_tree({"a b/x": 5, "a b/y": 5})
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(root))
    with pytest.raises(DataError, match=r"; did you mean .*/a b\?$"):
        open_data("~/a b")
    for image in (f"file://{root}/a%20b/x/0.png", "a b/x/0.png"):
        (root / "list.csv").write_text(f"image\n{image}\n")
        assert images_in("list.csv") == ["a b/x/0.png"]


@pytest.mark.parametrize("setting", ["label_list", "exclude", "corrections"])
def test_lists_beside_the_data_are_named_in_the_same_way(make_tree, setting):
    root = make_tree({"x": 5, "y": 5})
    for name, message in (("l.parquet", "is a Parquet table"), ("l.zip", "is an archive")):
        (root / name).write_bytes(b"PAR1")
        with pytest.raises(DataError, match=message):
            read_source(DatasetSpec(str(root), **{setting: str(root / name)}))
    (root / "l.csv").write_text("image,label\nx/0.png,y\n")
    with pytest.raises(DataError, match=r"No such file or directory\); did you mean .*/l\.csv"):
        read_source(DatasetSpec(str(root), **{setting: f"{root}/ll.csv"}))
