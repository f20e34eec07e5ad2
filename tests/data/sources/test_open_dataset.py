"""Opening a dataset: layouts, class names, what is left out, what is refused."""

import os
from collections import Counter

import pytest
from PIL import Image

from vit.config import DataConfig
from vit.data.archives import relative
from vit.data.sources import file_walk, list_files, open_dataset, tar_shards
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import list_images, open_eval_split, open_splits, refuse_captions
from vit.data.sources.split_file import HeldOutSplit
from vit.data.sources.train_val_split import Fold
from vit.errors import DataError
from vit.paths import did_you_mean

SPLIT = {"train/a": 12, "train/b": 12, "val/a": 3, "val/b": 2}


def open_data(root, **settings):
    return open_splits(str(root), **{"val_share": 0.25, "seed": 0} | settings)


def has_note(splits, text: str) -> bool:
    return any(text in note for note in splits.notes)


def names(samples, root):
    return [relative(sample.path, root) for sample in samples]


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_a_validation_folder_is_used(make_tree, val):
    root = make_tree({name.replace("val", val): count for name, count in SPLIT.items()})
    splits = open_data(root)
    assert splits.classes == ("a", "b")
    assert not splits.made
    assert names(splits.val, root) == [
        f"{val}/{n}.png" for n in ("a/0", "a/1", "a/2", "b/0", "b/1")
    ]
    assert [sample.label for sample in splits.val] == [0, 0, 0, 1, 1]
    assert len(splits.train) == 24
    assert (splits.notes, splits.test) == ((), ())


def test_test_images_choose_nothing(make_tree):
    """Without other images for validation, some are held out of train, as if there were no test."""
    root = make_tree({name.replace("val", "test"): count for name, count in SPLIT.items()})
    splits = open_data(root)
    assert splits.made
    assert (len(splits.train), len(splits.val)) == (18, 6)
    assert {one.split("/")[0] for one in names((*splits.train, *splits.val), root)} == {"train"}
    assert names(splits.test, root) == [
        f"test/{n}.png" for n in ("a/0", "a/1", "a/2", "b/0", "b/1")
    ]
    assert has_note(splits, "5 test images kept for the end")
    more = open_data(root, val_share=0.5)
    assert (len(more.train), len(more.val), more.test) == (12, 12, splits.test)
    folds = [open_data(root, fold=Fold(n, 2)) for n in (1, 2)]
    assert sum(len(fold.val) for fold in folds) == 24
    assert not any(fold.test for fold in folds)


def test_copies_and_groups_of_test_images_are_named(make_tree):
    root = make_tree({"train/a": 12, "train/b": 12, "test/a": 2, "test/b": 2})
    (root / "test/a/0.png").write_bytes((root / "train/a/0.png").read_bytes())
    assert has_note(open_data(root), "1 image in training and in validation or test (leak): ")
    with pytest.raises(DataError, match=r"test: 2 groups .* in training too: 0, 1; move each"):
        open_splits(DatasetSpec(str(root), group=r"/(\d+)\.png"), val_share=0.25, seed=0)


def test_a_folder_of_many_images_is_not_searched_by_patterns(make_tree, monkeypatch):
    """Of each of a million names only the suffix is compared, and no captions are looked for."""
    root = make_tree({"": 5})
    monkeypatch.setattr(list_files, "SPLIT", None)
    assert not list_files.is_list(str(root))
    assert tar_shards._tars(str(root)) == []
    monkeypatch.setattr(open_dataset, "source_of", None)
    refuse_captions(str(root))


def test_val_is_preferred_to_test(make_tree):
    splits = open_data(make_tree(SPLIT | {"test/a": 1, "test/b": 1}))
    assert len(splits.val) == 5


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_without_a_split_a_share_of_each_class_is_held_out(make_tree, prefix):
    root = make_tree({prefix + "a": 40, prefix + "b": 12, prefix + "c": 2, prefix + "d": 1})
    splits = open_data(root)
    assert splits.made
    counts = [sum(s.label == label for s in splits.val) for label in range(4)]
    assert counts == [10, 3, 1, 0]
    assert has_note(splits, "held out 14 images, 25% of each class")
    assert has_note(splits, "held out none of class d")
    both = names(splits.train, root) + names(splits.val, root)
    assert len(set(both)) == len(both) == 55
    assert open_data(root).val == splits.val
    assert open_data(root, seed=1).val != splits.val


def test_the_split_hardly_changes_when_images_are_added(make_tree):
    root = make_tree({"a": 40, "b": 40})
    before = set(names(open_data(root).val, root))
    (root / "a/new.png").write_bytes((root / "b/1.png").read_bytes() + b"\0")
    after = set(names(open_data(root).val, root))
    assert len(before & after) >= len(before) - 1


def test_classes_are_sorted_by_name_and_may_be_any_text(make_tree):
    odd = ["10", "2", "=1+1", "<b>", 'a,b"c', "A", "a b", "é"]
    splits = open_data(make_tree(dict.fromkeys(odd, 10)))
    assert splits.classes == tuple(sorted(odd))


def test_other_formats_and_deeper_folders_belong_to_the_class(make_tree):
    root = make_tree(SPLIT | {"train/a/day 1/cam": 3})
    for number, suffix in enumerate((".JPG", ".webp", ".BMP", ".tiff", ".gif")):
        Image.new("RGB", (4, 4), (9 * number, 99, 0)).save(root / "train/a" / f"x{suffix}")
    splits = open_data(root)
    assert [sample.label for sample in splits.train].count(0) == 12 + 3 + 5


def test_hidden_and_system_names_are_left_out_with_a_note(make_tree):
    junk = {"train/.git": 1, "train/__MACOSX": 2, ".ipynb_checkpoints": 1, "train/a/.thumbs": 1}
    root = make_tree(SPLIT | junk)
    (root / "train/a/._0.png").write_bytes(b"\0")
    (root / "train/a/.DS_Store").write_bytes(b"\0")
    (root / "train/.z.png").write_bytes(b"\0")
    splits = open_data(root)
    assert splits.classes == ("a", "b")
    assert len(splits.train) == 24
    assert has_note(splits, "left out hidden and system names: ._0.png, .git, .ipynb_checkpoints")
    assert not has_note(splits, "lie in no class folder")


def test_files_that_are_no_images_are_counted(make_tree):
    root = make_tree(SPLIT)
    for name in ("1.psd", "2.PSD", "notes.txt", "nosuffix"):
        (root / "train/a" / name).write_bytes(b"x")
    splits = open_data(root)
    text = (
        "left out 4 files not taken for images: .psd 2, .txt 1, no suffix 1; convert .psd to JPEG"
    )
    assert has_note(splits, text)


def test_the_note_about_heic_files_has_the_extra_that_reads_them(monkeypatch):
    monkeypatch.setattr(file_walk, "UNSUPPORTED_SUFFIXES", frozenset((".heic", ".psd")))
    note = file_walk.ignored_suffixes_note(Counter({".heic": 2, ".txt": 1}), "file")
    assert note.endswith(".heic 2, .txt 1; to read .heic: pip install 'vit-toolkit[heic]'")
    note = file_walk.ignored_suffixes_note(Counter({".heic": 2, ".psd": 1}), "file")
    assert note.endswith(
        "; to read .heic: pip install 'vit-toolkit[heic]'; convert .psd to JPEG or PNG"
    )
    assert file_walk.unsupported_advice([".txt"]) == ""


def test_special_files_are_left_out_with_a_note(make_tree):
    root = make_tree(SPLIT)
    os.mkfifo(root / "train/a/pipe.png")
    (root / "train/a/dangling.png").symlink_to("nowhere.png")
    (root / "train/a/circle.png").symlink_to("circle.png")
    (root / "train/a/folder.png").mkdir()
    splits = open_data(root)
    assert len(splits.train) == 24
    found = "train/a/circle.png, train/a/dangling.png, train/a/pipe.png"
    assert has_note(splits, f"special files (pipes, broken links): {found}")
    assert has_note(splits, "without images: train/a/folder.png")


def test_circular_links_are_left_out_with_a_note(make_tree):
    root = make_tree(SPLIT)
    (root / "train/a/again").symlink_to(".")
    (root / "train/a/up").symlink_to("../..")
    (root / "train/b/other").symlink_to("../../val/a")
    splits = open_data(root)
    assert len(splits.train) == 24
    assert has_note(splits, "around them: train/a/again, train/a/up, train/b/other")


@pytest.mark.parametrize("train", ["train", "Training"])
def test_circular_links_and_system_folders_beside_folders_are_left_out(make_tree, train):
    root = make_tree({f"{train}/a": 6, f"{train}/b": 6, "test/a": 1, "test/b": 1})
    for folder in (root, root / train, root / "test"):
        (folder / "circle").symlink_to("circle")
        (folder / "__MACOSX" / "a").mkdir(parents=True)
    splits = open_data(root)
    assert (splits.classes, len(splits.train), len(splits.val)) == (("a", "b"), 8, 4)
    assert len(splits.test) == 2


def test_linked_classes_and_folders_outside_are_read(make_tree, tmp_path):
    root = make_tree(SPLIT)
    (root / "train/b").rename(tmp_path / "elsewhere")
    (root / "train/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "more").mkdir()
    Image.new("RGB", (3, 3)).save(tmp_path / "more/x.png")
    (root / "train/a/more").symlink_to(tmp_path / "more")
    (root / "train/a/twice").symlink_to(tmp_path / "more")
    splits = open_data(root)
    assert len(splits.train) == 25
    assert has_note(splits, "followed links to folders outside: train/a/more")
    assert has_note(
        splits, "left out links to folders of this dataset or around them: train/a/twice"
    )


def test_images_outside_of_class_folders_get_a_note(make_tree):
    root = make_tree(SPLIT | {"train": 2, "extra/x": 3})
    splits = open_data(root)
    assert has_note(splits, "lie in no class folder: train/0.png, train/1.png")
    assert has_note(splits, "left out folders beside train: extra")


def test_a_class_without_validation_images_gets_a_note_and_keeps_the_labels(make_tree):
    root = make_tree({"train/a": 12, "train/b": 12, "train/c": 12, "val/b": 3, "val/c": 0})
    splits = open_data(root)
    assert {sample.label for sample in splits.val} == {1}
    assert has_note(splits, "has no images of class a, c")


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
        ({"train/a": 2, "train/b": 2, "val/a": 0}, "no images left to validate on"),
        ({"train/a": 2, "train/b": 2, "val": 0}, "val has no class folders"),
        ({"a": 1, "b": 1}, "no images left to validate on"),
    ],
)
def test_datasets_that_cannot_be_trained_on_are_refused(make_tree, tree, message):
    with pytest.raises(DataError, match=message):
        open_data(make_tree(tree))


@pytest.mark.parametrize(
    "tree",
    [
        {"Train": 9, "Car": 9},  # images straight in them: classes
        {"Training/day": 9, "Car/day": 9},
        {"Testing/a": 9, "Validation/a": 9, "Car": 9},
        {"Training/s1": 9, "Testing/s2": 9},
        {"Training/day": 9, "Testing/day": 9},
        {"Train/a": 6, "Train/b": 6, "Test/c": 9, "Test/d": 3},
        {"Train/a": 6, "Train/b": 6, "Bus": 9, "Car": 9},
    ],
)
def test_classes_may_have_names_like_splits(make_tree, tree):
    assert open_data(make_tree(tree)).classes == tuple(sorted({x.split("/")[0] for x in tree}))


def test_beside_train_only_the_usual_names_are_splits(make_tree):
    tree = {"train/a": 12, "train/b": 12}
    for name in ("dev", "Val/a", "evaluation/results", "Testing"):
        tree |= {name: 3}
    splits = open_data(make_tree(tree))
    assert splits.made
    assert has_note(splits, "left out folders beside train: Testing, Val, dev, evaluation")


def test_a_class_called_train_is_named(make_tree):
    with pytest.raises(
        DataError, match=r"and car, plane beside it: .*rename it, such as to train_"
    ):
        open_data(make_tree({"car": 9, "plane": 9, "train": 9}))


def test_empty_classes_are_left_out_on_request(make_tree):
    root = make_tree(SPLIT | {"train/empty": 0})
    settings = {"val_share": 0.25, "seed": 0}
    splits = open_splits(DatasetSpec(str(root), skip_empty=True), **settings)
    assert splits.classes == ("a", "b")
    assert has_note(splits, "left out folders without images: train/empty")
    spec = DatasetSpec.from_config(DataConfig(data="x", on_bad_image="skip"))
    assert spec.skip_empty


def test_missing_data_and_files_are_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"no such folder or file, and no built-in dataset \(digits"
    ):
        open_data(tmp_path / "missing")
    with pytest.raises(DataError, match="no data given"):
        open_data("")
    (tmp_path / "train").write_text("")
    with pytest.raises(DataError, match="is a file, not a folder"):
        open_data(tmp_path / "train")
    with pytest.raises(DataError, match="train is a file, not a folder"):
        open_data(tmp_path)


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
        if not given.endswith("png"):
            with pytest.raises(DataError, match=f"did you mean {offered}"):
                open_data(given)
    (root / "b1").mkdir()
    (root / "b2").mkdir()
    assert did_you_mean("b3") == ""  # half of a short name is none
    (root / "batch1").mkdir()
    (root / "batch2").mkdir()
    assert did_you_mean("batch3") == "; did you mean batch1 or batch2?"
    for nothing in ("xyz", "link", "photos/cat/0.png/inside", "", "a\0b", "x" * 5000):
        assert did_you_mean(nothing) == ""


def test_names_in_errors_are_safe_on_a_terminal(make_tree):
    root = make_tree(SPLIT | {"val/red\x1b[31m\u202e": 1})
    with pytest.raises(DataError) as caught:
        open_data(root)
    assert r"red\x1b[31m\u202e" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_class_names_equal_after_normalisation_get_a_note(make_tree):
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    splits = open_data(make_tree({composed: 12, decomposed: 12}))
    assert splits.classes == (decomposed, composed)
    assert has_note(splits, r"'cafe\u0301', 'caf\xe9'")


def test_classes_match_across_unicode_forms(make_tree):
    tree = {"train/caf\u00e9": 12, "train/b": 12, "val/cafe\u0301": 2, "val/b": 2}
    splits = open_data(make_tree(tree))
    assert {sample.label for sample in splits.val} == {0, 1}
    assert has_note(splits, "in other Unicode")


def test_evaluation_labels_are_indices_into_the_models_classes(make_tree):
    root = make_tree(SPLIT)
    samples, notes = open_eval_split(str(root), split="val", classes=["z", "b", "a"])
    assert [sample.label for sample in samples] == [1, 1, 2, 2, 2]
    assert names(samples, root)[0] == "val/b/0.png"
    assert notes == (f"{root}/val has no images of class z",)
    samples, _ = open_eval_split(str(root), split="train", classes=["a", "b"])
    assert len(samples) == 24


def test_evaluation_refuses_unknown_classes_and_splits(make_tree):
    root = make_tree(SPLIT)
    with pytest.raises(DataError, match="classes that the model does not have: b"):
        open_eval_split(str(root), split="val", classes=["a", "c"])
    with pytest.raises(DataError, match="no test folder; it has train, val"):
        open_eval_split(str(root), split="test", classes=["a", "b"])


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_evaluation_uses_the_images_that_training_held_out(make_tree, prefix):
    root = make_tree({prefix + "a": 20, prefix + "b": 20})
    splits = open_data(root)
    held_out = HeldOutSplit(root.resolve(), names(splits.val, root))
    samples, notes = open_eval_split(
        str(root), split="val", classes=splits.classes, held_out=held_out
    )
    assert samples == splits.val
    assert "took the 10 images that training held out" in notes[0]
    samples, notes = open_eval_split(str(root), split="val", classes=splits.classes)
    assert len(samples) == 40
    assert "took all 40 images" in notes[0]


def test_class_names_that_differ_in_case_or_spaces_get_a_note(make_tree):
    notes = "\n".join(open_data(make_tree({"Hat": 3, "hat": 3, "a b": 3, "a  b": 3, "c": 3})).notes)
    assert "classes 'Hat', 'hat' differ only in case or spaces" in notes
    assert "classes 'a  b', 'a b' differ only" in notes


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


def test_inputs_without_images_are_refused(make_tree):
    root = make_tree({"x": 1, "empty": 0})
    with pytest.raises(DataError, match="no images in this folder"):
        list_images([str(root / "empty")])
    with pytest.raises(DataError, match="matches no file"):
        list_images([str(root / "*.jpg")])
