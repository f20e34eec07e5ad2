"""Exceptions for errors the user can fix: one line with the value, the reason and the remedy."""

import contextlib
import errno
from collections.abc import Iterator

from vit.text import printable

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of an OSError where a disk or its quota is full."""
REFUSED_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EROFS, errno.EIO)
"""Numbers of an OSError where the system, or its disk, refuses a path that a user named."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, of torch or a VitError about it, means full memory of a device."""
    return any(words in str(error) for words in ("out of memory", "allocate memory"))


class VitError(Exception):
    """Base class for errors the user can fix; commands print it and exit with its code.

    Its text is safe to print: names of files and classes in it need no escapes of their own.
    """

    exit_code = 2
    on_all_processes = True
    """Whether all processes of a distributed run raise it, so that only one prints it."""

    def __str__(self) -> str:
        return printable(super().__str__())


def error_text(error: BaseException, limit: int = 200) -> str:
    """Message of an error on one line; of another library's its first characters, or its type."""
    if isinstance(error, VitError):
        return str(error)
    unnamed = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    return printable(" ".join(str(error).split())[:limit] or unnamed)


class ConfigError(VitError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another one."""

    setting = ""
    """The setting that is refused, if it is known."""


class DataError(VitError, ValueError):
    """A dataset cannot be used as it is."""


class WeightsError(VitError, ValueError):
    """A weight file is damaged, or does not fit the network."""


class RunError(VitError):
    """A run folder is missing, already exists, or cannot be written or resumed."""


class BadImage(VitError, ValueError):
    """One image cannot be read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = printable(reason)

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.reason}"


@contextlib.contextmanager
def explain_full_memory() -> Iterator[None]:
    """Turn an error of torch about full memory inside the `with` into a RunError with a remedy."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(
            "out of memory: use another --device, or a smaller --batch-size where a command has it"
        ) from None
