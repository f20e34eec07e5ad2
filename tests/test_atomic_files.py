"""Files and folders that appear when they are complete, and locks on files."""

import contextlib
import errno
import os
import sys
import threading
from pathlib import Path

import pytest

from vit.atomic_files import (
    LOCKED_BYTE,
    POSIX,
    atomic_folder,
    lock_file,
    locked,
    open_atomic,
    write_text,
)
from vit.errors import RunError

needs_shared_locks = pytest.mark.skipif(not POSIX, reason="Windows has none")


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
@needs_shared_locks
@pytest.mark.parametrize(
    ("first", "second", "both"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_only_shared_locks_are_held_together(first, second, both, tmp_path):
    with (tmp_path / "lock").open("ab") as one, (tmp_path / "lock").open("ab") as other:
        assert lock_file(one, shared=first)
        assert lock_file(other, shared=second) == both
        one.close()
        assert lock_file(other, shared=second)


def test_a_locked_path_is_free_again_after_the_block(tmp_path):
    with locked(tmp_path / "lock"), (tmp_path / "lock").open("ab") as other:
        assert not lock_file(other)
    with (tmp_path / "lock").open("ab") as other:
        assert lock_file(other)


class Msvcrt:
    """The locks of Windows: exclusive, of one byte, refused also to the file that has them."""

    LK_UNLCK, LK_NBLCK = 0, 2

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self.turn = threading.Lock()

    def locking(self, file: int, mode: int, size: int) -> None:
        with self.turn:
            self.change(file, mode, size)

    def change(self, file: int, mode: int, size: int) -> None:
        assert (os.lseek(file, 0, os.SEEK_CUR), size) == (LOCKED_BYTE, 1)
        inode = os.fstat(file).st_ino
        holder = self.holders.pop(inode, None)
        if holder is not None and not is_open(holder):
            holder = None
        if holder != (file if mode == self.LK_UNLCK else None):
            if holder is not None:
                self.holders[inode] = holder
            raise PermissionError(errno.EACCES, "Permission denied")
        if mode == self.LK_NBLCK:
            self.holders[inode] = file


def is_open(file: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.fstat(file))
    return False


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", Msvcrt())


def test_a_file_is_locked_on_windows_and_keeps_its_position(windows, tmp_path):
    path = tmp_path / "lock"
    with path.open("w+b") as one, path.open("rb") as other:
        one.write(b"some")
        assert lock_file(one)
        assert lock_file(one)
        one.write(b"thing")
        one.flush()
        assert not lock_file(other)
        assert not lock_file(other, shared=True)
        assert other.read() == b"something"
        assert lock_file(one, shared=True)  # others may have it now, too
        assert lock_file(other, shared=True)
        assert lock_file(other)


def test_a_lock_is_waited_for_on_windows(windows, tmp_path):
    path = tmp_path / "lock"
    with path.open("ab") as one:
        assert lock_file(one)
        with path.open("ab") as other:
            waiting = threading.Thread(target=lock_file, args=(other,), kwargs={"wait": True})
            waiting.start()
            assert waiting.is_alive()
            lock_file(one, shared=True)  # gives it back: the other may have it at once
            waiting.join(10.0)
            assert not waiting.is_alive()
            assert not lock_file(one)
