"""Files and folders that appear when they are complete, and locks on files.

They are written beside their path, flushed to disk and renamed, so that either the old or the
complete new version exists at any time. Locks hold against other processes.
"""

import contextlib
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from vit.errors import DISK_FULL, RunError

POSIX = find_spec("fcntl") is not None
"""Whether this system has shared locks, and deletes open files: all but Windows."""
LOCKED_BYTE, LOCK_SECONDS = 2**31 - 2, 0.1
"""The byte that is locked on Windows, where nobody may read it, and the time between attempts."""


@contextlib.contextmanager
def atomic_file(path: Path, needed: int = 0) -> Iterator[Path]:
    """A path to write a file to, which is flushed to disk and renamed to `path` after the block.

    Args:
        needed: Its size in bytes, for the message of a full disk; 0 if unknown.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_write_errors(path, needed):
        try:
            yield temporary
            with contextlib.suppress(PermissionError):  # some network file systems have no modes
                temporary.chmod(0o666 & ~_umask())  # some writers create private files
            _fsync(temporary)
            rename_file(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def rename_file(source: Path, path: Path) -> None:
    """Rename a complete file of the same folder to `path`, which it replaces."""
    with explain_write_errors(path):
        source.replace(path)
        _fsync(path.parent)


@contextlib.contextmanager
def open_atomic(path: Path, mode: str = "wb", **options: Any) -> Iterator[Any]:
    """Like open(), of a file that gets its name after the block."""
    with atomic_file(path) as temporary, open(temporary, mode, **options) as file:
        yield file


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically, with the line ends of the system."""
    with open_atomic(path, "w", encoding="utf-8") as file:
        file.write(text)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_file(path, len(content)) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder that replaces `path` after the block; after an error, what was there is restored."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        new, old = beside / "new", beside / "old"
        try:
            new.mkdir()
            yield new
            with contextlib.suppress(FileNotFoundError):
                path.rename(old)
            new.rename(path)
        finally:
            if old.exists() and not path.exists():
                _restore(old, path)
            shutil.rmtree(beside, ignore_errors=True)


def _restore(old: Path, path: Path) -> None:
    try:
        old.rename(path)
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror}; what was there is now {old}"
        ) from None


@contextlib.contextmanager
def explain_write_errors(path: str | Path, needed: int = 0) -> Iterator[None]:
    """Convert an OSError inside the `with` to a RunError that names `path` and the cause."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in DISK_FULL:
            left = f"{shutil.disk_usage(Path(path).parent).free / 1e6:,.1f} MB"
            space = f" ({left} are left, and it needs {needed / 1e6:,.1f})" if needed else ""
            reason = f"the disk is full{space}: free some space"
        raise RunError(f"{path} could not be written: {reason}") from None


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask


def _fsync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(
    file: BinaryIO, *, wait: bool = False, shared: bool = False, inherited: bool = True
) -> bool:
    """Lock `file` until it and its mappings are closed; False if another process holds it.

    On Windows a shared lock waits for or finds exclusive ones, and is then given back.
    """
    try:
        import fcntl
    except ImportError:
        return _lock_on_windows(file.fileno(), wait=wait, shared=shared)
    lock = fcntl.flock if inherited else fcntl.lockf
    try:
        lock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _lock_on_windows(file: int, *, wait: bool, shared: bool) -> bool:
    msvcrt: Any = importlib.import_module("msvcrt")
    place = os.lseek(file, 0, os.SEEK_CUR)
    os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
    try:
        with contextlib.suppress(OSError):  # a lock of this file from before
            msvcrt.locking(file, msvcrt.LK_UNLCK, 1)
        while True:
            with contextlib.suppress(PermissionError):
                msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
                if shared:
                    msvcrt.locking(file, msvcrt.LK_UNLCK, 1)
                return True
            if not wait:
                return False
            time.sleep(LOCK_SECONDS)
    finally:
        os.lseek(file, place, os.SEEK_SET)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of the file at `path`, which is created; wait for other processes."""
    with path.open("ab") as file:
        lock_file(file, wait=True)
        yield
