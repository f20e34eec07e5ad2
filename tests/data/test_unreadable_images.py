"""Unreadable images are found before training, and left out of the dataset."""

import threading
import time
from pathlib import Path

import pytest

from vit.data.image_io import check_header
from vit.data.sources.open_dataset import open_splits
from vit.errors import DataError
from vit.training import settings_from_data
from vit.training.settings_from_data import exclude_images, scan_headers

SPLIT = {"train/a": 12, "train/b": 12, "val/a": 3, "val/b": 2}


def open_data(root):
    return open_splits(str(root), val_share=0.25, seed=0)


def checked(root):
    splits = open_data(root)
    return exclude_images(splits, scan_headers(splits.train + splits.val).bad)


def has_note(splits, text: str) -> bool:
    return any(text in note for note in splits.notes)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def test_unreadable_images_are_found_in_order_and_excluded(make_tree):
    root = make_tree(SPLIT)
    (root / "train/b/3.png").write_bytes(b"")
    (root / "train/a/7.png").write_bytes(b"<html>404</html>")
    truncate(root / "val/a/1.png")
    splits = open_data(root)
    bad = scan_headers(splits.train + splits.val).bad
    assert [Path(image.path).relative_to(root).as_posix() for image in bad] == [
        "train/a/7.png",
        "train/b/3.png",
        "val/a/1.png",
    ]
    kept = exclude_images(splits, bad)
    assert len(kept.train) == 22
    assert len(kept.val) == 4
    assert has_note(kept, "left out 3 images that cannot be read: ")
    assert exclude_images(splits, []) is splits


@pytest.mark.parametrize("seconds", [0.0, 0.02])  # a fast disk and a slow one
def test_several_threads_read_the_headers_from_a_slow_disk(make_tree, monkeypatch, seconds):
    root = make_tree(SPLIT)
    for name in ("train/a/7.png", "train/b/3.png", "val/a/1.png"):
        (root / name).write_bytes(b"")
    splits = open_data(root)
    samples = splits.train + splits.val
    expected = [image.path for image in scan_headers(samples).bad]
    threads = set()

    def slow_check(path, _axes=""):
        threads.add(threading.get_ident())
        time.sleep(seconds)
        return check_header(path)

    monkeypatch.setattr(settings_from_data, "check_header", slow_check)
    monkeypatch.setattr(settings_from_data, "CHUNK", 2)
    assert [image.path for image in scan_headers(samples).bad] == expected
    if seconds:
        assert len(threads) > 2


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
