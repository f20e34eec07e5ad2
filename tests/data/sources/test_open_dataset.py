"""Opening a dataset: layouts, class names, what is left out, what is refused."""

import os
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from tests.data.sources.conftest import names, noted, opened, plant, png
from vit.config import DataConfig
from vit.data.image_archives import relative
from vit.data.sources import file_walk, list_files, open_dataset, tar_shards
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import list_images, open_eval_split, refuse_captions
from vit.data.sources.split_file import HeldOutSplit
from vit.data.sources.train_val_split import Fold
from vit.errors import DataError
from vit.paths import did_you_mean

SPLIT = {"train/a": 12, "train/b": 12, "val/a": 3, "val/b": 2}


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_a_validation_folder_is_used(make_tree, val):
    root = make_tree({name.replace("val", val): count for name, count in SPLIT.items()})
    splits = opened(root)
    assert (splits.classes, splits.made, splits.notes) == (("a", "b"), False, ())
    assert [(one.path, one.label) for one in splits.val] == [
        (f"{root}/{val}/{name}.png", "ab".index(name[0]))
        for name in ("a/0", "a/1", "a/2", "b/0", "b/1")
    ]
    assert (len(splits.train), splits.test) == (24, ())
    assert len(opened(make_tree({"test/a": 1, "test/b": 1})).val) == 5  # rather than test


def test_test_images_choose_nothing(make_tree):
    """Without other images for validation, some are held out of train, as if there were no test."""
    root = make_tree({name.replace("val", "test"): count for name, count in SPLIT.items()})
    splits = opened(root)
    assert splits.made
    assert (len(splits.train), len(splits.val)) == (18, 6)
    assert {one.split("/")[0] for one in names((*splits.train, *splits.val), root)} == {"train"}
    assert [name.split("/")[:2] for name in names(splits.test, root)] == [
        *[["test", "a"]] * 3,
        *[["test", "b"]] * 2,
    ]
    assert noted(splits, "5 test images kept for the end")
    more = opened(root, val_share=0.5)
    assert (len(more.train), len(more.val), more.test) == (12, 12, splits.test)
    folds = [opened(root, fold=Fold(n, 2)) for n in (1, 2)]
    assert sum(len(fold.val) for fold in folds) == 24
    assert not any(fold.test for fold in folds)


def test_copies_and_groups_of_test_images_are_named(make_tree):
    root = make_tree({"train/a": 12, "train/b": 12, "test/a": 2, "test/b": 2})
    (root / "test/a/0.png").write_bytes((root / "train/a/0.png").read_bytes())
    assert noted(opened(root), "1 image in training and in validation or test (leak): ")
    with pytest.raises(DataError, match=r"test: 2 groups .* in training too: 0, 1; move each"):
        opened(root, group=r"/(\d+)\.png")


def test_a_folder_of_many_images_is_not_searched_by_patterns(make_tree, monkeypatch):
    """Of each of a million names only the suffix is compared, and no captions are looked for."""
    root = make_tree({"": 5})
    monkeypatch.setattr(list_files, "SPLIT", None)
    assert not list_files.is_list(str(root))
    assert tar_shards._tars(str(root)) == []
    monkeypatch.setattr(open_dataset, "source_of", None)
    refuse_captions(str(root))


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_without_a_split_a_share_of_each_class_is_held_out(make_tree, prefix):
    root = make_tree({prefix + "a": 40, prefix + "b": 12, prefix + "c": 2, prefix + "d": 1})
    splits = opened(root)
    assert splits.made
    counts = [sum(s.label == label for s in splits.val) for label in range(4)]
    assert counts == [10, 3, 1, 0]
    assert noted(splits, "held out 14 images, 25% of each class")
    assert noted(splits, "held out none of class d")
    both = names(splits.train, root) + names(splits.val, root)
    assert len(set(both)) == len(both) == 55
    assert opened(root).val == splits.val
    assert opened(root, seed=1).val != splits.val


def test_the_split_hardly_changes_when_images_are_added(make_tree):
    root = make_tree({"a": 40, "b": 40})
    before = set(names(opened(root).val, root))
    (root / "a/new.png").write_bytes((root / "b/1.png").read_bytes() + b"\0")
    after = set(names(opened(root).val, root))
    assert len(before & after) >= len(before) - 1


def test_classes_are_sorted_by_name_and_may_be_any_text(make_tree):
    odd = ["10", "2", "=1+1", "<b>", 'a,b"c', "A", "a b", "é"]
    splits = opened(make_tree(dict.fromkeys(odd, 10)))
    assert splits.classes == tuple(sorted(odd))


def test_other_formats_and_deeper_folders_belong_to_the_class(make_tree):
    root = make_tree(SPLIT | {"train/a/day 1/cam": 3})
    for number, suffix in enumerate((".JPG", ".webp", ".BMP", ".tiff", ".gif")):
        Image.new("RGB", (4, 4), (9 * number, 99, 0)).save(root / "train/a" / f"x{suffix}")
    splits = opened(root)
    assert [sample.label for sample in splits.train].count(0) == 12 + 3 + 5


@pytest.mark.parametrize(
    ("more", "planted", "notes"),
    [
        (
            {"train/.git": 1, "train/__MACOSX": 2, ".ipynb_checkpoints": 1, "train/a/.thumbs": 1},
            {"train/a/._0.png": "", "train/a/.DS_Store": "", "train/.z.png": ""},
            ["left out hidden and system names: ._0.png, .git, .ipynb_checkpoints"],
        ),
        (
            {},
            {"train/a/1.psd": "", "train/a/2.PSD": "", "train/a/x.txt": "", "train/a/x": ""},
            ["left out 4 files not taken for images: .psd 2, .txt 1, no suffix 1; convert .psd to"],
        ),
        ({"train/a/folder.png": 0}, {}, ["without images: train/a/folder.png"]),
        (
            {},
            {"train/a/x.png": Path("no"), "train/a/y.png": Path("y.png"), "train/a/z.png": None},
            ["special files (pipes, broken links): train/a/x.png, train/a/y.png, train/a/z.png"],
        ),
        (
            {},
            {"train/a/1": Path("."), "train/a/2": Path("../.."), "train/b/3": Path("../../val/a")},
            ["around them: train/a/1, train/a/2, train/b/3"],
        ),
        (
            {"train": 2, "extra/x": 3},
            {},
            ["lie in no class folder: train/0.png, train/1.png", "folders beside train: extra"],
        ),
    ],
    ids=["hidden", "suffixes", "empty", "special files", "circles", "outside"],
)
def test_what_is_left_out_is_noted(make_tree, more, planted, notes):
    root = make_tree(SPLIT | more)
    plant(root, planted)
    splits = opened(root)
    assert (splits.classes, len(splits.train), len(splits.val)) == (("a", "b"), 24, 5)
    assert all(noted(splits, note) for note in notes)
    assert len(splits.notes) == len(notes)


@pytest.mark.parametrize(
    ("suffixes", "note"),
    [
        ({".heic": 2, ".txt": 1}, ".heic 2, .txt 1; {heic}"),
        ({".heic": 2, ".psd": 1}, ".heic 2, .psd 1; {heic}; convert .psd to JPEG or PNG"),
        ({".txt": 1}, ".txt 1"),
    ],
)
def test_the_note_about_heic_files_has_the_extra_that_reads_them(monkeypatch, suffixes, note):
    monkeypatch.setattr(file_walk, "UNSUPPORTED_SUFFIXES", frozenset((".heic", ".psd")))
    found = file_walk.ignored_suffixes_note(Counter(suffixes), "file")
    assert found.endswith(note.format(heic="to read .heic: pip install 'vit-toolkit[heic]'"))


@pytest.mark.parametrize("train", ["train", "Training"])
def test_circular_links_and_system_folders_beside_folders_are_left_out(make_tree, train):
    root = make_tree({f"{train}/a": 6, f"{train}/b": 6, "test/a": 1, "test/b": 1})
    for folder in (root, root / train, root / "test"):
        (folder / "circle").symlink_to("circle")
        (folder / "__MACOSX" / "a").mkdir(parents=True)
    splits = opened(root)
    assert (splits.classes, len(splits.train), len(splits.val)) == (("a", "b"), 8, 4)
    assert len(splits.test) == 2


def test_linked_classes_and_folders_outside_are_read(make_tree, tmp_path):
    root = make_tree(SPLIT)
    (root / "train/b").rename(tmp_path / "elsewhere")
    more = tmp_path / "more"
    links = {"train/b": tmp_path / "elsewhere", "train/a/more": more, "train/a/twice": more}
    plant(root, {f"{more}/x.png": png(1), **links})
    splits = opened(root)
    assert len(splits.train) == 25
    assert noted(splits, "followed links to folders outside: train/a/more")
    assert noted(splits, "left out links to folders of this dataset or around them: train/a/twice")


def test_a_class_without_validation_images_gets_a_note_and_keeps_the_labels(make_tree):
    root = make_tree({"train/a": 12, "train/b": 12, "train/c": 12, "val/b": 3, "val/c": 0})
    splits = opened(root)
    assert {sample.label for sample in splits.val} == {1}
    assert noted(splits, "has no images of class a, c")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"": 0}, "has no class folders"),
        ({"train": 3, "val/a": 1}, r"train has no class folders \(3 images straight in it\)"),
        ({"": 3}, "add --labels LIST; without labels, vit pretrain .*, and vit suggest"),
        ({"train/a": 20, "val/a": 3}, r"only one class \(a\)"),
        ({"a": 20}, r"only one class \(a\)"),
        ({"val/a": 3}, "has val but no train"),
        (SPLIT | {"train/empty": 0}, "class empty has no images; .*--on-bad-image skip"),
        ({"a": 0, "b": 0}, "no images in the class folders a, b"),
        (SPLIT | {"val/extra": 2}, "val has classes that train does not have: extra;"),
        (SPLIT | {"val/aa": 2}, "does not have: aa; did you mean a"),
        (SPLIT | {"val/red\x1b[31m\u202e": 1}, r"red\\x1b\[31m\\u202e"),
        ({"train/a": 2, "train/b": 2, "val/a": 0}, "no images left to validate on"),
        ({"train/a": 2, "train/b": 2, "val": 0}, "val has no class folders"),
        ({"a": 1, "b": 1}, "no images left to validate on"),
        ({"car": 9, "train": 9, "up": 9}, "and car, up beside it: .*rename it, such as to train_"),
    ],
)
def test_datasets_that_cannot_be_trained_on_are_refused(make_tree, tree, message):
    with pytest.raises(DataError, match=message):
        opened(make_tree(tree))


def test_beside_train_only_the_usual_names_are_splits(make_tree):
    others = dict.fromkeys(("dev", "Val/a", "evaluation/results", "Testing"), 3)
    splits = opened(make_tree({"train/a": 12, "train/b": 12} | others))
    assert splits.made
    assert noted(splits, "left out folders beside train: Testing, Val, dev, evaluation")


def test_empty_classes_are_left_out_on_request(make_tree):
    root = make_tree(SPLIT | {"train/empty": 0})
    splits = opened(root, skip_empty=True)
    assert splits.classes == ("a", "b")
    assert noted(splits, "left out folders without images: train/empty")
    spec = DatasetSpec.from_config(DataConfig(data="x", on_bad_image="skip"))
    assert spec.skip_empty


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{root}/missing", r"no such folder or file, and no built-in dataset \(digits"),
        ("{root}/x/*.png", "no such folder or file"),
        ("", "no data given"),
        ("{root}/x/train", r"is a file, not a folder .* give Parquet .* as hf:PATH"),
        ("{root}/x", "train is a file, not a folder"),
        ("{root}/x/a.json", "is a file, not a folder"),  # a pipe, which is not read
    ],
)
def test_what_is_no_dataset_is_refused(make_tree, given, message):
    root = make_tree({"x": 1})
    (root / "x/train").touch()
    os.mkfifo(root / "x/a.json")
    with pytest.raises(DataError, match=message):
        opened(given.format(root=root))


def test_the_error_for_a_missing_path_suggests_a_similar_name(make_tree, monkeypatch):
    root = make_tree({"photos/cat": 1, ".phots": 0})
    (root / "link").symlink_to("gone")
    monkeypatch.chdir(root)
    for given, offered in (
        ("phots", "photos"),
        ("PHOTOS/", "photos"),
        ("photos/cap", "photos/cat"),
        ("phtos/cat/0.png", "photos"),
        ("phtos/dog", "photos"),
        (str(root / "phots"), str(root / "photos")),
    ):
        assert did_you_mean(given) == f"; did you mean {offered}?"
    with pytest.raises(DataError, match="did you mean photos/cat"):
        opened("photos/cap")
    make_tree(dict.fromkeys(("b1", "b2", "batch1", "batch2"), 0))
    assert did_you_mean("batch3") == "; did you mean batch1 or batch2?"
    # half of a short name is none
    for nothing in ("b3", "xyz", "link", "photos/cat/0.png/inside", "", "a\0b", "x" * 5000):
        assert did_you_mean(nothing) == ""


@pytest.mark.parametrize(
    ("tree", "classes", "note"),
    [
        ({"caf\u00e9": 12, "cafe\u0301": 12}, 2, r"'cafe\u0301', 'caf\xe9'"),
        ({"train/caf\u00e9": 9, "train/b": 9, "val/cafe\u0301": 2, "val/b": 2}, 2, "other Unicode"),
        ({"Hat": 3, "hat": 3, "c": 3}, 3, "classes 'Hat', 'hat' differ only in case or spaces"),
        ({"a b": 3, "a  b": 3, "c": 3}, 3, "classes 'a  b', 'a b' differ only"),
    ],
)
def test_nearly_equal_class_names_get_a_note(make_tree, tree, classes, note):
    splits = opened(make_tree(tree))
    assert len(splits.classes) == classes
    assert {sample.label for sample in splits.val} == {*range(classes)}
    assert noted(splits, note)


def test_evaluation_labels_are_indices_into_the_models_classes(make_tree):
    root = make_tree(SPLIT)
    samples, notes = open_eval_split(str(root), split="val", classes=["z", "b", "a"])
    assert [sample.label for sample in samples] == [1, 1, 2, 2, 2]
    assert names(samples, root)[0] == "val/b/0.png"
    assert notes == (f"{root}/val has no images of class z",)
    samples, _ = open_eval_split(str(root), split="train", classes=["a", "b"])
    assert len(samples) == 24


@pytest.mark.parametrize(
    ("split", "classes", "message"),
    [
        ("val", "ac", "classes that the model does not have: b"),
        ("test", "ab", "no test folder; it has train, val"),
    ],
)
def test_evaluation_refuses_unknown_classes_and_splits(make_tree, split, classes, message):
    with pytest.raises(DataError, match=message):
        open_eval_split(str(make_tree(SPLIT)), split=split, classes=classes)


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_evaluation_uses_the_images_that_training_held_out(make_tree, prefix):
    root = make_tree({prefix + "a": 20, prefix + "b": 20})
    splits = opened(root)
    held_out = HeldOutSplit(root.resolve(), names(splits.val, root))
    samples, notes = open_eval_split(
        str(root), split="val", classes=splits.classes, held_out=held_out
    )
    assert samples == splits.val
    assert "took the 10 images that training held out" in notes[0]
    samples, notes = open_eval_split(str(root), split="val", classes=splits.classes)
    assert len(samples) == 40
    assert "took all 40 images" in notes[0]


def test_inputs_keep_their_order(make_tree):
    root = make_tree({"x": 3, "x/deep": 1, "y": 2, ".hidden": 1})
    (root / "x/photo.HEIC").write_bytes(b"")
    (root / "x/notes.txt").write_bytes(b"")
    (root / "y/[odd].png").write_bytes(b"")
    notes: list[str] = []
    inputs = ["y/1.png", "x", "y/?.png", "missing.png", "y/[odd].png", "y/1.png"]
    found = list_images([str(root / given) for given in inputs], notes=notes)
    assert [relative(path, root) for path in found] == [
        "y/1.png",
        *("x/0.png", "x/1.png", "x/2.png", "x/deep/0.png", "x/photo.HEIC"),
        *("y/0.png", "y/1.png"),
        "missing.png",
        "y/[odd].png",
        "y/1.png",
    ]
    assert any(".txt 1" in note for note in notes)


def test_a_pattern_that_matches_folders_too_lists_each_image_once(make_tree):
    root = make_tree({"x": 2, "x/deep": 1, "y": 1})
    found = list_images([f"{root}/**", f"{root}/y/0.png"])
    assert [relative(path, root) for path in found] == [
        *("x/0.png", "x/1.png", "x/deep/0.png", "y/0.png"),
        "y/0.png",  # given twice
    ]


@pytest.mark.parametrize(
    ("given", "message"), [("empty", "no images in this folder"), ("*.jpg", "matches no file")]
)
def test_inputs_without_images_are_refused(make_tree, given, message):
    with pytest.raises(DataError, match=message):
        list_images([f"{make_tree({'x': 1, 'empty': 0})}/{given}"])
