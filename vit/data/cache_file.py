"""The file of a cache: its header and index, and who may write it.

header    magic, digest of the index              128 bytes
index     place, height, width; size and mtime_ns of the picture's file
pixels    RGB bytes, (height, width, 3) each
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAGIC = b"vit cache 1\n"
HEADER = 128
INDEX = np.dtype([(name, "<i8") for name in ("place", "height", "width", "size", "mtime")])
NOWHERE = -1
"""Place of a picture that cannot be read."""

Index = np.ndarray[Any, Any]


def stamps_of(paths: Sequence[str]) -> Index:
    """An index with size and time of each picture's file, or of the file that it lies in."""
    index = np.zeros(len(paths), INDEX)
    index["place"] = NOWHERE
    for number, path in enumerate(paths):
        status = _status(path)
        if status is not None:
            index["size"][number], index["mtime"][number] = status.st_size, status.st_mtime_ns
    return index


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except NotADirectoryError:  # something inside a file, or inside of such
        return _status(os.path.dirname(path))
    except OSError:
        return None


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
    same = all(np.array_equal(index[name], stamps[name]) for name in ("size", "mtime"))
    return index if same else None


def header_of(index: bytes) -> bytes:
    return (MAGIC + hashlib.sha256(index).hexdigest().encode()).ljust(HEADER)


@contextlib.contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Be the only builder, where the system has locks; wait for one that is at work."""
    with lock.open("ab") as file:
        lock_file(file, wait=True)
        yield


def lock_file(file: BinaryIO, *, wait: bool) -> bool:
    """Lock `file` until it is closed, or its process killed; False where another one has it."""
    try:
        import fcntl
    except ImportError:  # Windows: two builders each build one, and the last one stays
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def sweep(folder: Path) -> None:
    """Delete what builders left that were killed: a live one holds a lock on its file."""
    for left in folder.glob("pictures-*.building-*"):
        with contextlib.suppress(OSError), left.open("ab") as file:
            if lock_file(file, wait=False):
                left.unlink()
