"""Listing of images: what this toolkit wrote is no data, and files of other suffixes are named."""

import os
import shutil

import pydicom
import pydicom.data
import pytest

from tests.data.sources.conftest import opened, plant, png
from vit.commands.main import main
from vit.data.checks.check_listing import list_dataset
from vit.data.sources.dataset_export import export_data
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.file_walk import OUTPUT_MARKER, FolderWalker, holds_output_only
from vit.data.sources.open_dataset import list_images, read_source
from vit.errors import DataError

RUN = ("config.yaml", "metrics.jsonl")


@pytest.fixture
def photos(make_tree):
    return make_tree({"cat": 6, "dog": 6})


def touch(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    plant(folder, dict.fromkeys(names, b""))


@pytest.mark.parametrize(
    "files",
    [
        {"runs/photos": (*RUN, "report.html")},
        {"anything": RUN},
        {"runs/stopped": ("config.yaml", ".lock")},
        {"runs": ("overview.html",), "runs/photos": RUN, "runs/empty": ()},
        {"cv/fold-1": RUN, "cv/fold-2": RUN, "cv": ("folds.json", "rows.jsonl")},
        {"runs/photos": RUN, "runs/photos/drawn": ("0.png", "1.png")},
        {"drawn": (OUTPUT_MARKER, "0001-cat.png", "0001-cat.json")},
        {"export": ("m.onnx", "m.onnx.data"), "vino": ("m.xml", "m.bin")},
        {"out": ("rows.csv", "Rows.JSONL", "vectors.npz", "check.html", "list.xlsx")},
        {"embedded": ("rows.jsonl", "vectors.npy")},
        {"cache": ("images-0123456789abcdef01234567", "images-0123456789abcdef01234567.lock")},
    ],
)
def test_what_vit_wrote_is_no_data(photos, files):
    for folder, names in files.items():
        touch(photos / folder, *names)
    folders = ", ".join(sorted({name.split("/")[0] for name in files}))
    note = f"left out folders of runs, lists, reports, networks or other output: {folders}"
    splits = opened(photos)
    assert splits.classes == ("cat", "dog")
    assert note in splits.notes
    unlabelled = read_source(DatasetSpec(str(photos), labels=False))
    assert (len(unlabelled.train), note in unlabelled.notes) == (12, True)
    notes: list[str] = []
    assert len(list_images([str(photos)], notes=notes)) == 12
    assert notes == [f"{photos}: {note}"]
    assert {one.kind for one in list_dataset(str(photos)).problems} == {"no_val", "output"}


@pytest.mark.parametrize(
    "files",
    [
        {"fox": ()},
        {"fox": ("a.txt",)},
        {"fox": ("0.nef",)},
        {"fox": ("config.yaml", "notes.doc")},
        {"fox/a": RUN, "fox/b": ("0.psd",)},
    ],
)
def test_other_folders_without_images_are_empty_classes(photos, files):
    for folder, names in files.items():
        touch(photos / folder, *names)
    with pytest.raises(DataError, match="class fox has no images"):
        opened(photos)


def test_images_beside_lists_and_runs_are_data(photos):
    touch(photos / "cat", "labels.csv", "model.onnx")
    touch(photos / "cat/run", *RUN)
    assert not holds_output_only(str(photos / "cat"))
    walker = FolderWalker(str(photos))
    assert len(walker.images(str(photos / "cat"))) == 6
    assert walker.left_out["output"] == ["cat/run"]


def test_arrays_are_images_but_beside_images_embeddings(photos, tmp_path):
    touch(photos / "cat", "vectors.npy")
    assert len(FolderWalker(str(photos)).images(str(photos / "cat"))) == 6
    assert len(list_images([str(photos)])) == 12
    touch(tmp_path / "heat", "0.npy", "1.npy")
    assert len(list_images([str(tmp_path / "heat")])) == 2


def test_dicom_files_without_a_suffix_are_images(tmp_path, capsys):
    data = pydicom.dcmread(pydicom.data.get_testdata_file("CT_small.dcm"))
    for name in ("well", "ill"):
        (tmp_path / name).mkdir()
        for number in range(3):
            data.PixelData = bytes([number + 8 * (name == "ill")]) * len(data.PixelData)
            data.save_as(tmp_path / name / f"IM{number:06d}")
    touch(tmp_path, "DICOMDIR", "LICENSE")
    shutil.copy(tmp_path / "ill/IM000000", tmp_path / "DICOMDIR")
    os.mkfifo(tmp_path / "ill/pipe")
    assert len(read_source(DatasetSpec(str(tmp_path))).train) == 6
    assert len(list_images([str(tmp_path / "ill")])) == 3
    assert main(["check", str(tmp_path)]) == 0
    assert "left out files not taken for images: DICOMDIR, LICENSE" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["folder", "shards"])
def test_an_export_into_its_own_data_is_left_out_there_and_read_elsewhere(photos, to):
    export_data(str(photos), str(photos / "copy"), to=to)
    export_data(str(photos / "copy"), str(photos.parent / "other"), to=to)
    assert not (photos.parent / "other" / OUTPUT_MARKER).exists()
    for data in (photos, photos / "copy", photos.parent / "other"):
        assert len(read_source(DatasetSpec(str(data))).train) == 12


def test_a_list_of_captions_alone_in_a_folder_is_data(make_tree):
    root = make_tree({"images": 2})
    line = "../images/0.png,a dog\n"
    plant(root, {"train/captions.txt": line, "train/metadata.csv": f"file_name,text\n{line}"})
    found = FolderWalker(str(root), suffixes=frozenset({".csv"})).images(str(root))
    assert found == [str(root / "train/metadata.csv")]


def test_tar_shards_beside_a_run_are_still_shards(photos):
    shards = photos.parent / "shards"
    export_data(str(photos), str(shards), to="shards")
    touch(shards / "runs/shards", *RUN)
    assert len(read_source(DatasetSpec(str(shards))).train) == 12


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.jpg_large", r".jpg_large 2; cat/x.jpg_large is a PNG image: rename .* end in .png"),
        ("x", r"no suffix 2; cat/x is a PNG image: rename such files to end in .png"),
        ("x.nef", r"\.nef 2; convert \.nef to JPEG or PNG"),
    ],
)
def test_missing_images_name_the_files_that_are_there_and_the_remedy(tmp_path, name, message):
    content = b"" if "nef" in name else png(1)
    plant(tmp_path, {f"cat/{name}": content, f"dog/{name}": content})
    there = f"left out 2 files not taken for images: {message}"
    with pytest.raises(DataError, match=f"no images in the class folders cat, dog; {there}"):
        opened(tmp_path)
    for folder in ("cat", "dog"):
        with pytest.raises(DataError, match=message.split()[-1]):
            read_source(DatasetSpec(str(tmp_path / folder), labels=False))
    problems = {one.kind: one.detail for one in list_dataset(str(tmp_path)).problems}
    assert message.split()[-1].lstrip(r"\.") in problems["no_pictures"]


def test_one_class_without_images_names_its_files(photos):
    plant(photos, {"fox/a.nef": "", "fox/b.nef": "", "cat/notes.txt": ""})
    with pytest.raises(DataError, match=r"fox has no images; left out 2 files .*: \.nef 2;"):
        opened(photos)


@pytest.mark.slow
def test_training_inside_of_the_images_may_be_repeated(photos, monkeypatch, capsys):
    monkeypatch.chdir(photos)
    sizes = "--steps 1 --dim 32 --depth 1 --image-size 16 --patch-size 8 -j 0 --precision fp32"
    for words in (["--out", "first"], ["--out", "first", "--resume"], []):
        assert main(["train", ".", *sizes.split(), *words]) == 0
    assert "left out folders of runs, lists, reports, networks or other output: first" in (
        capsys.readouterr().err
    )
    assert main(["predict", "first", ".", "--format", "csv", "--precision", "fp32"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 13
