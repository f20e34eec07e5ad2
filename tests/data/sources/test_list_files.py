"""Lists of captions: where they are found, one sample per image, splits, groups, folds, classes."""

import csv
import json
import os
import shutil
import zlib

import pytest
from PIL import Image

from tests.data.sources import conftest
from tests.data.sources.conftest import coco, names, noted, plant
from vit.data.dataset_types import NO_LABEL
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.list_files import common_folders
from vit.data.sources.open_dataset import open_eval_split
from vit.errors import DataError


def opened(data, *, with_classes=False, **settings):
    return conftest.opened(data, captions=True, labels=with_classes, **settings)


def draw(folder, *names):
    """Different small images."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        path = folder / name
        shade = zlib.crc32("/".join(path.parts[-4:]).encode())
        Image.new("RGB", (4, 4), (shade & 255, shade >> 8 & 255, shade >> 16 & 255)).save(path)


def table(path, rows, header=("image", "caption")):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def flickr(tmp_path):
    """Twelve images with three captions each, in Images/."""
    root = tmp_path / "data"
    files = [f"{number:02d}.png" for number in range(12)]
    draw(root / "Images", *files)
    table(root / "captions.txt", [(name, f"{name} {n}") for name in files for n in "abc"])
    return root


def image_folder(root, splits=("train", "val")):
    for split in splits:
        files = [f"{'cat' if n % 2 else 'dog'}/{split}{n}.png" for n in range(20)]
        draw(root / split, *files)
        records = [{"file_name": name, "captions": ["a " + name, "b"]} for name in files]
        lines(root / split / "metadata.jsonl", records)
    return root


def test_an_image_is_one_sample_with_all_its_captions(flickr):
    splits = opened(flickr)
    everything = sorted([*splits.train, *splits.val], key=lambda sample: sample.path)
    assert names(everything, flickr) == [f"Images/{number:02d}.png" for number in range(12)]
    assert everything[3].captions == ("03.png a", "03.png b", "03.png c")
    assert {sample.label for sample in everything} == {NO_LABEL}
    assert (splits.classes, splits.made, splits.root) == ((), True, flickr)
    assert noted(splits, f"captions.txt: its images are taken from {flickr}/Images")
    assert noted(splits, "held out 3 images, 25% of all")


def test_captions_are_tidied_and_each_counts_once(tmp_path):
    draw(tmp_path, *(f"{n}.png" for n in range(4)))
    said = [" a\t dog\u00a0\n runs ", "a dog runs", "cafe\u0301", "caf\u00e9", "", " \n"]
    rows = [("0.png", caption) for caption in said]
    rows += [("1.png", ""), ("2.png", "x"), ("./3.png", "y"), ("sub/../3.png", "z")]
    splits = opened(table(tmp_path / "list.csv", rows))
    found = {s.path: s.captions for s in (*splits.train, *splits.val)}
    assert {os.path.basename(path): said for path, said in found.items()} == {
        "0.png": ("a dog runs", "caf\u00e9"),
        "2.png": ("x",),
        "3.png": ("y", "z"),
    }
    assert noted(splits, "left out 5 captions, empty or repeated")
    assert noted(splits, f"left out 1 image without a caption: {tmp_path}/1.png")
    assert not noted(splits, "that no line of a list names")


def test_missing_images_stay_and_extra_ones_are_counted(flickr):
    (flickr / "Images/04.png").unlink()
    draw(flickr / "Images", "x.png", "deep/y.png")
    splits = opened(flickr)
    assert len(splits.train) + len(splits.val) == 12
    assert noted(splits, "left out 2 images that no line of a list names: Images/deep/y.png")
    draw(flickr, "00.png")  # images beside the list come first
    assert {os.path.dirname(one.path) for one in opened(flickr).train} == {str(flickr)}
    for folder in ("", "Images"):
        (flickr / folder / "00.png").unlink()
    shutil.rmtree(flickr / "Images")
    assert noted(opened(flickr), "such as 00.png, are neither beside it nor in a folder beside it")


def test_images_in_several_folders_are_refused(flickr):
    draw(flickr / "Thumbs", "00.png")
    with pytest.raises(DataError, match=r"several folders: .*Images, .*Thumbs; .* with --images"):
        opened(flickr)
    assert not noted(opened(flickr, images=str(flickr / "Images")), "taken from")


def test_absolute_names_may_be_anywhere_unless_the_folder_is_given(flickr, tmp_path):
    rows = [(f"{flickr}/Images/./{number:02d}.png", "x") for number in range(4)]
    path = table(tmp_path / "lists/list.csv", rows)
    there = {f"{flickr}/Images/{number:02d}.png" for number in range(4)}
    lists = str(tmp_path / "lists")
    for settings in ({}, {"images": f"{flickr}/Images"}, {"images": lists, "allow_outside": True}):
        splits = opened(path, **settings)
        assert {sample.path for sample in (*splits.train, *splits.val)} == there
    with pytest.raises(DataError, match=r"list.csv.* line 2: .*0.png lies outside of .*lists; say"):
        opened(path, images=lists)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"file_name": "a\0b", "text": "x"}, "line 1: a file name with a NUL"),
        ({"file_name": "a", "text": "x\0"}, "line 1: a caption with a NUL"),
        ({"file_name": "a\ud800", "text": "x"}, "line 1: half a character"),
        ({"file_name": "a", "text": "x\udc80"}, "line 1: half a character"),
        ({"file_name": "a", "text": " "}, "no image has a caption"),
        ({"file_name": "a", "captions": []}, "no image has a caption"),
        ({"file_name": "a", "text": "x"}, "no images left to validate on"),
    ],
)
def test_texts_that_are_none_are_refused(tmp_path, record, message):
    lines(tmp_path / "metadata.jsonl", [record])
    with pytest.raises(DataError, match=message):
        opened(tmp_path)


def test_an_image_folder_with_its_own_splits(tmp_path):
    root = image_folder(tmp_path, ("train", "validation", "test"))
    splits = opened(root)
    assert (splits.made, splits.notes) == (False, ())
    assert names(splits.val, root)[0] == "validation/cat/validation1.png"
    assert splits.val[0].captions == ("a cat/validation1.png", "b")
    assert len(splits.train) == len(splits.val) == 20
    (root / "extra").mkdir()
    assert noted(opened(root), "left out folders without a list of captions of a split: extra")
    (root / "validation/metadata.jsonl").unlink()
    assert opened(root).made
    assert names(opened(root).test, root)[0] == "test/cat/test1.png"


@pytest.mark.parametrize("place", ["", "images"])
def test_coco(tmp_path, place):
    for split in ("train2017", "val2017"):
        files = [f"{n:012d}.png" for n in range(5)]
        draw(tmp_path / place / split, *files)
        said = coco({name: [f"{split} one", f"{split} two"] for name in files})
        plant(tmp_path, {f"annotations/captions_{split}.json": said})
    plant(tmp_path, {"annotations/instances_train2017.json": '{"images": [], "annotations":'})
    splits = opened(tmp_path)
    inside = f"{place}/" if place else ""
    assert names(splits.train, tmp_path)[0] == f"{inside}train2017/000000000000.png"
    assert names(splits.val, tmp_path)[0] == f"{inside}val2017/000000000000.png"
    assert splits.val[0].captions == ("val2017 one", "val2017 two")
    assert not splits.made
    assert noted(splits, f"are taken from {tmp_path / place / 'val2017'}")
    one = opened(tmp_path / "annotations/captions_val2017.json")
    assert one.made
    assert {s.path for s in (*one.train, *one.val)} == {s.path for s in splits.val}
    given = opened(tmp_path, images=str(tmp_path / place))
    assert [s.path for s in given.val] == [s.path for s in splits.val]


def test_lists_whose_names_say_the_split(tmp_path):
    draw(tmp_path / "pics", *(f"{n}.png" for n in range(9)))
    for split, numbers in {"train": range(6), "val": range(5, 9)}.items():
        table(tmp_path / f"my_{split}.csv", [(f"{n}.png", "x") for n in numbers])
    splits = opened(tmp_path)
    assert (len(splits.train), len(splits.val), splits.made) == (6, 4, False)
    table(tmp_path / "my_val.csv", [(f"{n}.png", "x") for n in range(5)])
    with pytest.raises(DataError, match="all 5 validation or test images are training images too"):
        opened(tmp_path)


LABELS = "image,label\na.png,1\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train/a/0.png": "", "val/a/0.png": ""}, "no list of captions in it; expected DATA/tra"),
        ({"a.csv": LABELS, "b.csv": LABELS}, r"\(a.csv, b.csv: give one to see what is wrong"),
        (
            {"train/metadata.csv": "name,text\na,x\n"},
            "metadata.csv, line 1: no column of images among",
        ),
        (
            {"a.txt": "image,caption\na.png,x\n", "b.csv": "image,caption\na.png,x\n", "c.txt": ""},
            r"several lists .* as DATA: .*a.txt, .*b.csv$",
        ),
        (
            {"train/metadata.csv": "", "train/metadata.jsonl": ""},
            r"several lists .*metadata.csv, .*metadata.jsonl",
        ),
        ({"val/metadata.jsonl": ""}, "has captions for val, not for train"),
    ],
)
def test_folders_without_one_list_of_captions_are_refused(tmp_path, files, message):
    plant(tmp_path, files)
    with pytest.raises(DataError, match=message):
        opened(tmp_path)


def test_classes_are_the_folders(tmp_path):
    root = image_folder(tmp_path)
    splits = opened(root, with_classes=True)
    plain = conftest.opened(root)
    assert splits.classes == plain.classes == ("cat", "dog")
    assert {(s.path, s.label) for s in splits.train} == {(s.path, s.label) for s in plain.train}
    assert {(s.path, s.label) for s in splits.val} == {(s.path, s.label) for s in plain.val}
    (root / "train/metadata.jsonl").rename(root / "train/cat.jsonl")
    draw(root / "train", "loose.png")
    with (root / "train/cat.jsonl").open("a") as file:
        file.write('{"file_name": "loose.png", "captions": ["x"]}\n')
    with pytest.raises(DataError, match=r"loose.png: no label and no class folder; expected a col"):
        opened(root, with_classes=True)


def test_classes_are_a_column(flickr):
    rows = [(f"{n:02d}.png", "x", "odd" if n % 2 else "even") for n in range(12)]
    header = ("image", "caption", "label")
    path = table(flickr / "captions.txt", rows, header)
    splits = opened(flickr, with_classes=True)
    assert splits.classes == ("even", "odd")
    assert all(s.label == int(s.path[-5]) % 2 for s in (*splits.train, *splits.val))
    assert opened(flickr).classes == ()
    for wrong, message in (
        ([*rows, ("03.png", "y", "even")], r"line 14: 03.png has two labels, odd and even"),
        ([*rows[1:], ("00.png", "x", "")], r"txt, line 13: .*00.png: no label, but others have"),
        ([(*row[:2], "x") for row in rows], "only one class"),
    ):
        table(path, wrong, header)
        with pytest.raises(DataError, match=message):
            opened(flickr, with_classes=True)


def test_evaluation_of_one_split(tmp_path):
    root = image_folder(tmp_path, ("train", "valid"))
    plain, labelled = (DatasetSpec(str(root), captions=True, labels=it) for it in (False, True))
    samples, notes = open_eval_split(plain, split="val", classes=())
    assert samples == opened(root).val
    assert notes == ("measured on valid",)
    samples, notes = open_eval_split(labelled, split="train", classes=["z", "dog", "cat"])
    found = {(os.path.basename(os.path.dirname(one.path)), one.label) for one in samples}
    assert found == {("dog", 1), ("cat", 2)}
    assert notes == (f"{root}/train/metadata.jsonl has no images of class z",)
    with pytest.raises(DataError, match="classes that the model does not have: dog"):
        open_eval_split(labelled, split="val", classes=["cat"])
    with pytest.raises(DataError, match="no test list; it has train, valid"):
        open_eval_split(plain, split="test", classes=())


def test_no_file_is_looked_at_for_each_line(flickr, monkeypatch):
    rows = [(f"{n:02d}.png", f"{k}") for n in range(3000) for k in range(3)]
    table(flickr / "captions.txt", rows)
    looked = []
    real = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: looked.append(path) or real(path))
    opened(flickr)
    assert 0 < len(looked) <= 1000


def test_images_are_searched_for_in_the_deepest_folder_of_all():
    assert common_folders("b", ["a/x/1.png", "a/y/2.png"]) == ["b/a"]
    assert common_folders("b", ["a/1.png", "2.png"]) == ["b"]
    assert common_folders("b", ["a/1.png", "/c/2.png"]) == []
