"""The file of a cache: its header and index, and who may write it.

header    magic, digest of the index              128 bytes
index     place, height, width; stamp of the picture's file (stamps.py)
pixels    RGB bytes, (height, width, 3) each
"""

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vit.data.stamps import stamp_of
from vit.errors import DataError, printable

OURS = b"vit cache "
MAGIC = OURS + b"2\n"
HEADER = 128
STAMP = ("size", "mtime", "ctime", "number")
INDEX = np.dtype([(name, "<i8") for name in ("place", "height", "width", *STAMP)])
NAME = re.compile(r"pictures-[0-9a-f]{24}")
NOWHERE = -1
"""Place of a picture that cannot be read."""

Index = np.ndarray[Any, Any]


def stamps_of(paths: Sequence[str]) -> Index:
    """An index with the stamp of each picture's file, or of the file that it lies in."""
    index = np.zeros(len(paths), INDEX)
    index["place"] = NOWHERE
    stamps = np.array([stamp_of(path) for path in paths], np.int64).reshape(-1, len(STAMP))
    for name, column in zip(STAMP, stamps.T, strict=True):
        index[name] = column
    return index


def make_folder(folder: Path, *, private: bool) -> None:
    """Make the folder.

    Args:
        folder: Where it goes.
        private: Whether it lies where all users write: one of them may have made it before.

    Raises:
        DataError: It is not private.
        OSError: It cannot be made.
    """
    if not private:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not own or status.st_mode & 0o077:
        raise DataError(
            f"cache=ram: {printable(folder)} is not a folder of this user alone, so others could "
            "change the pictures; have it deleted, or use --cache disk"
        )


def usable_index(file: Path, stamps: Index) -> Index | None:
    """The index of a complete cache whose pictures are as they were, or None."""
    try:
        with file.open("rb") as opened:
            head, body = opened.read(HEADER), opened.read(stamps.nbytes)
    except FileNotFoundError:
        return None
    if head != header_of(body) or len(body) != stamps.nbytes:
        return None
    index = np.frombuffer(body, INDEX)
    same = all(np.array_equal(index[name], stamps[name]) for name in STAMP)
    return index if same else None


def header_of(index: bytes) -> bytes:
    return (MAGIC + hashlib.sha256(index).hexdigest().encode()).ljust(HEADER)


@contextlib.contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Be the only builder, where the system has locks; wait for one that is at work."""
    with lock.open("ab") as file:
        lock_file(file, wait=True)
        yield


def lock_file(file: BinaryIO, *, wait: bool, shared: bool = False) -> bool:
    """Lock `file` until it is closed, or its process killed; False where another one has it.

    Args:
        file: An open one; what maps it keeps the lock too.
        wait: Until the other one gives it back.
        shared: Among all who ask for it shared.
    """
    try:
        import fcntl
    except ImportError:  # Windows: two builders each build one, and the last one stays
        return True
    try:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, how | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def sweep(folder: Path) -> None:
    """Delete what builders left that were killed: a live one holds a lock on its file."""
    for left in folder.glob("pictures-*.building-*"):
        with contextlib.suppress(OSError), left.open("ab") as file:
            if lock_file(file, wait=False):
                left.unlink()


def surplus(folder: Path, file: Path, most: int) -> dict[Path, int]:
    """Caches besides `file` to delete, so that the others take `most` bytes, with their bytes.

    They are the least recently used ones; one that a process maps is never among them.
    """
    found: list[tuple[int, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if NAME.fullmatch(path.name) and path != file:
                status = path.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, path))
    over = sum(size for _, size, _ in found) - most
    chosen: dict[Path, int] = {}
    for _, size, path in sorted(found):
        if over <= 0:
            break
        if unused(path):
            chosen[path] = size
            over -= size
    return chosen


def unused(path: Path, *, delete: bool = False) -> bool:
    """Whether no process maps the cache in `path`; it may be deleted then."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        if file.read(len(OURS)) == OURS and lock_file(file, wait=False):
            if delete:
                path.unlink()
            return True
    return False
