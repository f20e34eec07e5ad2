"""Warnings about a dataset before training: identical files, few or imbalanced images."""

import os
import shutil

import pytest

from tests.data.sources.conftest import noted, opened
from vit.data.sources.dataset_warnings import equal_files, misspelt_names

SPLIT = {"train/a": 12, "train/b": 12, "val/a": 3, "val/b": 2}


LEAK = "in training and in validation or test (leak): "


@pytest.mark.parametrize(
    ("copies", "notes"),
    [
        (
            {"train/a/copy0.png": "val/a/0.png", "train/a/copy1.png": "val/a/1.png"},
            [f"2 images {LEAK}train/a/copy0.png = val/a/0.png"],
        ),
        (
            {"train/b/twin.png": "train/a/0.png"},
            ["1 image in more than one class: train/a/0.png = train/b/twin.png"],
        ),
        (
            {"train/b/twin.png": "val/a/0.png"},
            [
                f"1 image {LEAK}train/b/twin.png = val/a/0.png; the scores",
                "1 image in more than one class: train/b/twin.png = val/a/0.png; keep the right",
            ],
        ),
        ({"train/a/twin.png": "train/a/0.png"}, []),
    ],
    ids=["splits", "classes", "both", "one class"],
)
def test_identical_files_in_several_splits_or_classes_get_a_note(make_tree, copies, notes):
    root = make_tree(SPLIT)
    for copy, file in copies.items():
        shutil.copy(root / file, root / copy)
    splits = opened(root)
    assert len(splits.train) == 24 + len(copies)
    assert len(splits.notes) == len(notes)
    assert all(noted(splits, note) for note in notes)


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


FEW = "classes of fewer than 10 training images, very few: "


@pytest.mark.parametrize(
    ("tree", "notes"),
    [
        ({"a": 32, "b": 32}, []),
        ({"a": 32, "b": 32, "c": 8, "d": 4}, [f"{FEW}d 3, c 6"]),
        (
            {"a": 60, "b": 4},
            ["imbalanced classes: b has the fewest, 3 images; a has 45", f"{FEW}b 3"],
        ),
        ({"train/a": 1, "train/b": 1, "val/a": 1}, ["only 2 training", "very few"]),
    ],
)
def test_small_and_unequal_classes_get_a_note(make_tree, tree, notes):
    splits = opened(make_tree(tree))
    assert all(noted(splits, note) for note in notes)
    for words in ("very few", "imbalanced"):
        assert noted(splits, words) == any(words in note for note in notes)


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
