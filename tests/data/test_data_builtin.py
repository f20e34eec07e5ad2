"""The built-in digits are scikit-learn's, and their folder is whole or written again."""

import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from vit.data.sources.builtin_datasets import digits_folder, is_intact
from vit.data.sources.open_dataset import open_splits
from vit.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return digits_folder(tmp_path_factory.mktemp("cache"))


def test_images_and_classes_are_those_of_scikit_learn(folder):
    reference = load_digits()
    files = sorted(folder.glob("*/*/*.png"), key=lambda path: path.name)
    assert [path.name for path in files] == [f"{number:04d}.png" for number in range(1797)]
    assert [int(path.parent.name) for path in files] == reference.target.tolist()
    for path, expected in zip(files, reference.images, strict=True):
        with Image.open(path) as image:
            assert image.mode == "L"
            assert np.array_equal(np.rint(np.asarray(image) * (16 / 255)), expected)


def test_each_class_has_a_fifth_for_validation(folder):
    for label in range(10):
        train, val = (len(list((folder / s / str(label)).iterdir())) for s in ("train", "val"))
        assert val == (train + val) // 5


def test_a_whole_folder_is_left_alone(folder):
    before = (folder / "train/0").stat().st_mtime_ns
    assert digits_folder(folder.parent) == folder
    assert (folder / "train/0").stat().st_mtime_ns == before
    assert [path.name for path in folder.parent.iterdir()] == ["digits-v1"]


@pytest.mark.parametrize("damage", ["change", "lose", "add", "all"])
def test_a_damaged_folder_is_written_again(folder, tmp_path, damage):
    folder = shutil.copytree(folder, tmp_path / folder.name)
    victim = next((folder / "val/3").iterdir())
    if damage == "change":
        victim.write_bytes(b"x")
    elif damage == "lose":
        victim.unlink()
    elif damage == "add":
        (folder / "val/3/extra.png").write_bytes(b"x")
    else:
        (folder / ".digest").unlink()
    assert not is_intact(folder)
    assert is_intact(digits_folder(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["digits-v1"]


def test_processes_may_write_it_at_the_same_time(tmp_path):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        folders = pool.map(digits_folder, [tmp_path] * 2, chunksize=1)
    assert set(folders) == {tmp_path / "digits-v1"}
    assert is_intact(folders[0])


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set XDG_CACHE_HOME"):
        digits_folder(tmp_path / "file")


def test_it_opens_by_name_unless_a_folder_has_it(monkeypatch, tmp_path, folder, make_tree):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/vit-toolkit").symlink_to(folder.parent)
    monkeypatch.chdir(tmp_path)
    splits = open_splits("digits", val_share=0.2, seed=0)
    assert splits.classes == tuple("0123456789")
    assert len(splits.train) + len(splits.val) == 1797
    assert splits.notes == ()
    assert not splits.made
    make_tree({"a": 20, "b": 20}).rename(tmp_path / "digits")
    splits = open_splits("digits", val_share=0.2, seed=0)
    assert splits.classes == ("a", "b")
    assert "not the built-in dataset" in splits.notes[0]
