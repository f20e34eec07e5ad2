"""Lists of captions: where they are found, one sample per image, splits, groups, folds, classes."""

import csv
import json
import os
import zlib

import pytest
from PIL import Image

from vit.data.archives import relative
from vit.data.dataset_types import NO_LABEL
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.list_files import common_folders
from vit.data.sources.open_dataset import locate_in_lists, open_eval_split, open_splits
from vit.errors import DataError


def opened(data, *, val_share=0.25, seed=0, with_classes=False, fold=None, **settings):
    spec = DatasetSpec(str(data), captions=True, labels=with_classes, multilabel=False, **settings)
    return open_splits(spec, val_share=val_share, seed=seed, fold=fold)


def open_captioned(data, *, split, classes=(), held_out=None, images=None):
    spec = DatasetSpec(
        data, images, captions=True, labels=bool(classes), multilabel=False, split=split
    )
    return open_eval_split(spec, split=split, classes=classes, held_out=held_out)


def noted(splits, text: str) -> bool:
    return any(text in note for note in splits.notes)


def names(samples, root):
    return [relative(sample.path, root) for sample in samples]


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


def coco(path, captions):
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [*captions]
    images = [{"id": n, "file_name": name} for n, name in enumerate(files)]
    annotations = [
        {"image_id": files.index(name), "caption": caption}
        for name, said in captions.items()
        for caption in said
    ]
    path.write_text(json.dumps({"images": images, "annotations": annotations}))


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
    assert splits.classes == ()
    assert splits.made
    assert splits.root == flickr
    assert all(os.path.isfile(sample.path) for sample in everything)
    assert noted(splits, f"captions.txt: its images are taken from {flickr}/Images")
    assert noted(splits, "held out 3 images, 25% of all")


def test_the_split_is_of_images_and_hardly_changes(flickr):
    splits = opened(flickr)
    assert len(splits.val) == 3
    assert not {s.path for s in splits.train} & {s.path for s in splits.val}
    assert opened(flickr).val == splits.val
    assert opened(flickr, seed=1).val != splits.val
    draw(flickr / "Images", "new.png")
    with (flickr / "captions.txt").open("a") as file:
        file.write("new.png,another\r\n")
    before, after = ({s.path for s in part.val} for part in (splits, opened(flickr)))
    assert len(before & after) >= len(before) - 1
    for split in (splits.train, splits.val):
        assert list(split) == sorted(split, key=lambda sample: sample.path)


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


def test_images_that_are_nowhere_are_said(tmp_path):
    splits = opened(table(tmp_path / "list.csv", [(f"{n}.png", "x") for n in range(4)]))
    assert len(splits.train) + len(splits.val) == 4
    assert noted(splits, "such as 0.png, are neither beside it nor in a folder beside it; say wh")


def test_images_in_several_folders_are_refused(flickr):
    draw(flickr / "Thumbs", "00.png")
    with pytest.raises(DataError, match=r"several folders: .*Images, .*Thumbs; .* with --images"):
        opened(flickr)
    assert not noted(opened(flickr, images=str(flickr / "Images")), "taken from")


def test_images_beside_the_list_come_first(tmp_path):
    draw(tmp_path, *(f"{n}.png" for n in range(4)))
    draw(tmp_path / "other", "0.png")
    splits = opened(table(tmp_path / "list.csv", [(f"{n}.png", "x") for n in range(4)]))
    assert {os.path.dirname(s.path) for s in splits.train} == {str(tmp_path)}


def test_images_says_where_file_names_begin(flickr, tmp_path):
    (flickr / "Images").rename(tmp_path / "elsewhere")
    splits = opened(flickr / "captions.txt", images=str(tmp_path / "elsewhere"))
    assert splits.root == tmp_path / "elsewhere"
    assert names(splits.val, splits.root)[0].endswith(".png")
    assert all(os.path.isfile(sample.path) for sample in splits.train)
    with pytest.raises(DataError, match="nowhere: no such folder of images"):
        opened(flickr, images=str(tmp_path / "nowhere"))


def test_absolute_names_may_be_anywhere_unless_the_folder_is_given(tmp_path):
    draw(tmp_path / "far", *(f"{n}.png" for n in range(4)))
    rows = [(f"{tmp_path}/far/./{n}.png", "x") for n in range(4)]
    path = table(tmp_path / "lists/list.csv", rows)
    splits = opened(path)
    assert {s.path for s in (*splits.train, *splits.val)} == {
        f"{tmp_path}/far/{n}.png" for n in range(4)
    }
    inside = opened(path, images=str(tmp_path / "far"))
    assert {s.path for s in (*inside.train, *inside.val)} == {
        f"{tmp_path}/far/{n}.png" for n in range(4)
    }
    with pytest.raises(DataError, match=r"list.csv.* line 2: .*0.png lies outside of .*lists; say"):
        opened(path, images=str(tmp_path / "lists"))
    outside = opened(path, images=str(tmp_path / "lists"), allow_outside=True)
    assert len(outside.train) + len(outside.val) == 4


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


def test_a_list_of_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"list.csv: no captions in it"):
        opened(table(tmp_path / "list.csv", []))


def test_an_image_folder_with_its_own_splits(tmp_path):
    root = image_folder(tmp_path, ("train", "validation", "test"))
    splits = opened(root)
    assert not splits.made
    assert splits.notes == ()
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
        said = {name: [f"{split} one", f"{split} two"] for name in files}
        coco(tmp_path / f"annotations/captions_{split}.json", said)
    (tmp_path / "annotations/instances_train2017.json").write_text('{"images": [], "annotations":')
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
    assert noted(splits, "1 image in training and in validation or test (leak): ")
    table(tmp_path / "my_val.csv", [(f"{n}.png", "x") for n in range(5)])
    with pytest.raises(DataError, match="all 5 validation or test images are training images too"):
        opened(tmp_path)


def test_several_lists_are_refused(flickr):
    table(flickr / "other.csv", [("00.png", "x")])
    (flickr / "notes.txt").write_text("nothing of interest")
    with pytest.raises(DataError, match=r"several lists .* as DATA: .*captions.txt, .*other.csv"):
        opened(flickr)
    assert opened(flickr / "captions.txt").train
    for name in ("metadata.csv", "metadata.jsonl"):
        (flickr / f"train/{name}").parent.mkdir(exist_ok=True)
        (flickr / f"train/{name}").write_text("")
    with pytest.raises(DataError, match=r"several lists .*metadata.csv, .*metadata.jsonl"):
        opened(flickr)


def test_folders_without_a_list_are_refused(tmp_path, make_tree):
    with pytest.raises(DataError, match="no list of captions in it; expected DATA/train/meta"):
        opened(make_tree({"train/a": 2, "val/a": 2}))
    (tmp_path / "data/labels.csv").write_text("image,label\na.png,1\n")
    (tmp_path / "data/more.csv").write_text("image,label\na.png,1\n")
    with pytest.raises(DataError, match=r"\(labels.csv, more.csv: give one to see what is wrong"):
        opened(tmp_path / "data")
    (tmp_path / "data/train/metadata.csv").write_text("name,text\na.png,1\n")
    with pytest.raises(DataError, match=r"metadata.csv, line 1: no column of images among name"):
        opened(tmp_path / "data")
    with pytest.raises(DataError, match="no such folder"):
        opened(tmp_path / "missing")
    with pytest.raises(DataError, match="no data given"):
        opened("")


def test_captions_of_validation_only_are_refused(tmp_path):
    image_folder(tmp_path, ("val",))
    with pytest.raises(DataError, match="has captions for val, not for train"):
        opened(tmp_path)


def test_classes_are_the_folders(tmp_path):
    root = image_folder(tmp_path)
    splits = opened(root, with_classes=True)
    plain = open_splits(str(root), val_share=0.25, seed=0)
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
    table(flickr / "captions.txt", rows, ("image", "caption", "label"))
    splits = opened(flickr, with_classes=True)
    assert splits.classes == ("even", "odd")
    assert all(s.label == int(s.path[-5]) % 2 for s in (*splits.train, *splits.val))
    assert opened(flickr).classes == ()
    table(flickr / "captions.txt", [*rows, ("03.png", "y", "even")], ("image", "caption", "label"))
    with pytest.raises(DataError, match=r"line 14: 03.png has two labels, odd and even"):
        opened(flickr, with_classes=True)
    table(flickr / "captions.txt", [*rows[1:], ("00.png", "x", "")], ("image", "caption", "label"))
    with pytest.raises(DataError, match=r"txt, line 13: .*00.png: no label, but others have one"):
        opened(flickr, with_classes=True)
    table(flickr / "captions.txt", [(*row[:2], "x") for row in rows], ("image", "caption", "label"))
    with pytest.raises(DataError, match="only one class"):
        opened(flickr, with_classes=True)


def test_evaluation_of_one_split(tmp_path):
    root = image_folder(tmp_path, ("train", "valid"))
    samples, notes = open_captioned(str(root), split="val")
    assert samples == opened(root).val
    assert notes == ("measured on valid",)
    samples, notes = open_captioned(str(root), split="train", classes=["z", "dog", "cat"])
    assert {(os.path.basename(os.path.dirname(s.path)), s.label) for s in samples} == {
        ("dog", 1),
        ("cat", 2),
    }
    assert notes == (f"{root}/train/metadata.jsonl has no images of class z",)
    with pytest.raises(DataError, match="classes that the model does not have: dog"):
        open_captioned(str(root), split="val", classes=["cat"])
    with pytest.raises(DataError, match="no test list; it has train, valid"):
        open_captioned(str(root), split="test")


def test_a_line_names_each_image(flickr):
    spec = DatasetSpec(str(flickr), captions=True, labels=False)
    path = str(flickr / "Images/01.png")
    assert locate_in_lists(spec, [path]) == {path: f"{flickr}/captions.txt, line 5"}


def test_no_file_is_looked_at_for_each_line(flickr, monkeypatch):
    rows = [(f"{n:02d}.png", f"{k}") for n in range(3000) for k in range(3)]
    table(flickr / "captions.txt", rows)
    looked = []
    real = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: looked.append(path) or real(path))
    open_captioned(str(flickr), split="val")
    assert 0 < len(looked) <= 1000


def test_images_are_searched_for_in_the_deepest_folder_of_all():
    assert common_folders("b", ["a/x/1.png", "a/y/2.png"]) == ["b/a"]
    assert common_folders("b", ["a/1.png", "2.png"]) == ["b"]
    assert common_folders("b", ["a/1.png", "/c/2.png"]) == []
