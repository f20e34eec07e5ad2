"""Inputs of prediction: files, folders, globs; their order, and what is refused."""

import pytest

from vit.data.archives import relative
from vit.data.sources.image_inputs import list_images
from vit.errors import DataError


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
