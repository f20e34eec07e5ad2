"""Files and folders that appear when they are complete, and locks on files."""

import errno
import os
from pathlib import Path

import pytest

from vit.atomic_files import HAS_LOCKS, atomic_folder, lock_file, locked, open_atomic, write_text
from vit.errors import RunError

needs_locks = pytest.mark.skipif(not HAS_LOCKS, reason="no locks on Windows")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(KeyError), open_atomic(path, "w") as file:
        file.write("half")
        raise KeyError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"a\.txt could not be written: the disk is full.*: free"),
        (errno.EIO, "error"),
    ],
)
def test_errors_name_the_file_and_the_cause(tmp_path, number, message):
    with pytest.raises(RunError, match=message), open_atomic(tmp_path / "a.txt"):
        raise OSError(number, "I/O error")
    assert os.listdir(tmp_path) == []


def test_a_folder_replaces_the_old_one(tmp_path):
    for name in ("old", "new"):
        with atomic_folder(tmp_path / "deep" / "out") as folder:
            (folder / name).touch()
    assert os.listdir(tmp_path / "deep") == ["out"]
    assert os.listdir(tmp_path / "deep" / "out") == ["new"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_folder_that_cannot_be_replaced_is_restored(tmp_path, monkeypatch, times):
    folder, real, left = tmp_path / "out", Path.rename, [times]
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")

    def rename(path: Path, target: Path) -> Path:
        if target == folder and left[0]:
            left[0] -= 1
            raise PermissionError(13, "Permission denied")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(RunError, match="could not be written") as refused, atomic_folder(folder):
        pass
    if times == 1:
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert (folder / "mine.txt").read_text() == "mine"
    else:
        assert (Path(str(refused.value).split(" is now ")[1]) / "mine.txt").is_file()


# two open files of one process stand for two processes
@needs_locks
@pytest.mark.parametrize(
    ("first", "second", "both"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_only_shared_locks_are_held_together(first, second, both, tmp_path):
    with (tmp_path / "lock").open("ab") as one, (tmp_path / "lock").open("ab") as other:
        assert lock_file(one, shared=first)
        assert lock_file(other, shared=second) == both
        one.close()
        assert lock_file(other, shared=second)


@needs_locks
def test_a_locked_path_is_free_again_after_the_block(tmp_path):
    with locked(tmp_path / "lock"), (tmp_path / "lock").open("ab") as other:
        assert not lock_file(other)
    with (tmp_path / "lock").open("ab") as other:
        assert lock_file(other)
