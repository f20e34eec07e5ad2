"""What is told about a data set before training: unreadable, equal, few or unequal images."""

import os
from pathlib import Path

import pytest

from vit.data.bad_images import check_samples, without
from vit.data.sources.dataset_warnings import equal_files
from vit.data.sources.open_dataset import open_splits
from vit.errors import DataError

SPLIT = {"train/a": 12, "train/b": 12, "val/a": 3, "val/b": 2}


def opened(root):
    return open_splits(str(root), val_share=0.25, seed=0)


def checked(root):
    splits = opened(root)
    return without(splits, check_samples(splits.train + splits.val))


def noted(splits, text: str) -> bool:
    return any(text in note for note in splits.notes)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def test_broken_images_are_found_in_order_and_left_out(make_tree):
    root = make_tree(SPLIT)
    (root / "train/b/3.png").write_bytes(b"")
    (root / "train/a/7.png").write_bytes(b"<html>404</html>")
    halve(root / "val/a/1.png")
    splits = opened(root)
    bad = check_samples(splits.train + splits.val)
    assert [Path(image.path).relative_to(root).as_posix() for image in bad] == [
        "train/a/7.png",
        "train/b/3.png",
        "val/a/1.png",
    ]
    kept = without(splits, bad)
    assert len(kept.train) == 22
    assert len(kept.val) == 4
    assert noted(kept, "left out 3 images that cannot be read: ")
    assert without(splits, []) is splits


def test_a_class_without_readable_images_is_refused(make_tree):
    root = make_tree(SPLIT)
    for path in (root / "train/b").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no training image of class b can be read"):
        checked(root)


def test_validation_without_readable_images_is_refused(make_tree):
    root = make_tree(SPLIT)
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no validation image can be read"):
        checked(root)


def test_a_leak_is_said(make_tree):
    root = make_tree(SPLIT)
    for number in range(2):
        copy = (root / f"val/a/{number}.png").read_bytes()
        (root / f"train/a/copy{number}.png").write_bytes(copy)
    splits = opened(root)
    assert noted(splits, "2 images in training and in validation (leak): train/a/copy0.png = val")
    assert len(splits.train) == 26


def test_an_image_of_two_classes_is_said(make_tree):
    root = make_tree(SPLIT)
    (root / "train/b/twin.png").write_bytes((root / "train/a/0.png").read_bytes())
    assert noted(opened(root), "1 image in more than one class: train/a/0.png = train/b/twin.png")


def test_equal_images_of_one_class_are_fine(make_tree):
    root = make_tree(SPLIT)
    (root / "train/a/twin.png").write_bytes((root / "train/a/0.png").read_bytes())
    assert opened(root).notes == ()


def test_files_that_differ_in_the_middle_are_not_equal(tmp_path):
    contents = {"a": b"1" * 9000, "b": b"1" * 9000, "c": b"1" * 100 + b"2" + b"1" * 8899, "d": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [str(tmp_path / name) for name in [*contents, "missing"]]
    assert equal_files(paths) == [paths[:2]]


def test_files_whose_reading_may_never_end_are_not_compared(tmp_path):
    for name in ("a.png", "b.png"):
        os.mkfifo(tmp_path / f"pipe_{name}")
        (tmp_path / f"none_{name}").touch()
        with open(tmp_path / f"long_{name}", "wb") as file:
            file.truncate(2**43)  # takes no room on the disk, and hours to read
    assert equal_files(map(str, sorted(tmp_path.iterdir()))) == []


def test_unequal_and_few_images_are_said(make_tree):
    splits = opened(make_tree({"a": 60, "b": 4}))
    assert noted(splits, "imbalanced classes: b has the fewest, 3 images; a has 45")
    splits = opened(make_tree({"a": 2, "b": 2}))
    assert noted(opened(make_tree({"train/a": 1, "train/b": 1, "val/a": 1})), "only 2 training")
