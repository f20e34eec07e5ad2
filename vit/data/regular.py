"""Opens a picture's file unless reading it may block, never end, or be too long."""

import errno
import os
import stat
from typing import IO, BinaryIO

from vit.data.containers import MAX_BYTES, open_member


class Refused(Exception):
    """Why a file is not accepted, without its name."""


def open_regular(name: str) -> BinaryIO:
    """Open `name` unless it is something whose reading may block, never end, or be too long."""
    try:
        # Looked at before opening too: opening a device can have effects of its own.
        _check(os.stat(name))
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(name, flags), "rb")
    except FileNotFoundError:
        raise Refused(
            "a link to a missing file" if os.path.islink(name) else "no such file"
        ) from None
    except NotADirectoryError:
        return open_member(name)
    except PermissionError:
        raise Refused("no permission to read it") from None
    except OSError as error:
        loop = error.errno == errno.ELOOP
        reason = "a link that leads in a circle" if loop else error.strerror
        raise Refused(reason or "cannot be opened") from None
    try:
        _check(os.fstat(file.fileno()))
    except Refused:
        file.close()
        raise
    return file


def all_of(file: IO[bytes]) -> bytes:
    """All bytes of an open file, from its beginning.

    No more than it has are asked for: room for a length that it might have costs more than reading.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return file.read(min(size, MAX_BYTES))


def _check(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise Refused("a folder, not a picture")
    if not stat.S_ISREG(status.st_mode):
        raise Refused("not a regular file (a pipe, socket or device)")
    if not status.st_size:
        raise Refused("an empty file (0 bytes)")
    if status.st_size > MAX_BYTES:
        raise Refused(f"{status.st_size:,} bytes are more than the limit of {MAX_BYTES:,}")
