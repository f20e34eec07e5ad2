"""Warnings about a dataset before training: identical files, few or imbalanced images."""

import os

import pytest

from vit.data.sources.dataset_warnings import equal_files, misspelt_names
from vit.data.sources.open_dataset import open_splits

SPLIT = {"train/a": 12, "train/b": 12, "val/a": 3, "val/b": 2}


def open_data(root):
    return open_splits(str(root), val_share=0.25, seed=0)


def has_note(splits, text: str) -> bool:
    return any(text in note for note in splits.notes)


def test_identical_files_in_both_splits_get_a_note(make_tree):
    root = make_tree(SPLIT)
    for number in range(2):
        copy = (root / f"val/a/{number}.png").read_bytes()
        (root / f"train/a/copy{number}.png").write_bytes(copy)
    splits = open_data(root)
    assert has_note(
        splits, "2 images in training and in validation or test (leak): train/a/copy0.png = val"
    )
    assert len(splits.train) == 26


def test_identical_files_in_two_classes_get_a_note(make_tree):
    root = make_tree(SPLIT)
    (root / "train/b/twin.png").write_bytes((root / "train/a/0.png").read_bytes())
    assert has_note(
        open_data(root), "1 image in more than one class: train/a/0.png = train/b/twin.png"
    )


def test_identical_files_in_two_splits_and_classes_get_both_notes(make_tree):
    root = make_tree(SPLIT)
    (root / "train/b/twin.png").write_bytes((root / "val/a/0.png").read_bytes())
    splits = open_data(root)
    pair = "train/b/twin.png = val/a/0.png"
    assert has_note(
        splits, f"1 image in training and in validation or test (leak): {pair}; the scores"
    )
    assert has_note(splits, f"1 image in more than one class: {pair}; keep the right one")


def test_identical_files_in_one_class_get_no_note(make_tree):
    root = make_tree(SPLIT)
    (root / "train/a/twin.png").write_bytes((root / "train/a/0.png").read_bytes())
    assert open_data(root).notes == ()


def test_files_that_differ_in_the_middle_are_not_equal(tmp_path):
    contents = {"a": b"1" * 9000, "b": b"1" * 9000, "c": b"1" * 100 + b"2" + b"1" * 8899, "d": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [str(tmp_path / name) for name in [*contents, "missing"]]
    assert equal_files(paths) == [paths[:2]]


def test_pipes_and_huge_files_are_not_compared(tmp_path):
    for name in ("a.png", "b.png"):
        os.mkfifo(tmp_path / f"pipe_{name}")
        (tmp_path / f"none_{name}").touch()
        with open(tmp_path / f"long_{name}", "wb") as file:
            file.truncate(2**43)  # takes no room on the disk, and hours to read
    assert equal_files(map(str, sorted(tmp_path.iterdir()))) == []


def test_small_classes_among_larger_ones_get_a_note(make_tree):
    root = make_tree({"a": 32, "b": 32})
    assert not has_note(open_data(root), "very few")
    splits = open_data(make_tree({"c": 8, "d": 4}))
    assert has_note(splits, "classes of fewer than 10 training images, very few: d 3, c 6")
    assert not has_note(splits, "imbalanced")


@pytest.mark.parametrize(
    ("counts", "pairs"),
    [
        ({"yellow": 60, "yelow": 2, "red": 30}, [("yelow", "yellow")]),
        ({"yellow": 60, "yelow": 7}, []),  # a tenth would be a typo
        ({"yellow": 200, "Yellow": 2}, []),  # which similar_names has
        ({"class 10": 200, "class 11": 2}, []),
        ({"cat": 200, "car": 2, "horse": 200, "hare": 1}, []),
        ({"yellow": 200, "yellowish": 2}, []),
    ],
)
def test_the_name_of_a_rare_class_may_be_a_typo(counts, pairs):
    assert misspelt_names(counts) == pairs


def test_imbalanced_and_small_classes_get_a_note(make_tree):
    splits = open_data(make_tree({"a": 60, "b": 4}))
    assert has_note(splits, "imbalanced classes: b has the fewest, 3 images; a has 45")
    assert has_note(splits, "classes of fewer than 10 training images, very few: b 3")
    splits = open_data(make_tree({"a": 2, "b": 2}))
    assert has_note(
        open_data(make_tree({"train/a": 1, "train/b": 1, "val/a": 1})), "only 2 training"
    )
