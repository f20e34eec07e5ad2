"""Locks on open files against other processes; Windows has no such locks."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

HAS_LOCKS = find_spec("fcntl") is not None
"""Whether this system locks files, and deletes open ones."""


def lock_file(
    file: BinaryIO, *, wait: bool = False, shared: bool = False, inherited: bool = True
) -> bool:
    """Lock `file` until it and its mappings are closed; False if another process holds it."""
    try:
        import fcntl
    except ImportError:
        return True
    lock = fcntl.flock if inherited else fcntl.lockf
    try:
        lock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        return False
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of the file at `path`, which is created; wait for other processes."""
    with path.open("ab") as file:
        lock_file(file, wait=True)
        yield
