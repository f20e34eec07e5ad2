"""Paths as arguments, suggestions for missing ones, names on all file systems, the user's cache
folder, digests of files."""

import hashlib
import itertools
import os
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vit.errors import ConfigError, RunError
from vit.text import nearest_names, printable

GROUPS_FILE = "groups.csv"
"""Of a run folder: the images that belong together."""
MAX_NAMES = 4096
"""Names of a folder that are compared: a million must not delay an error message."""
MAX_NAME_LENGTH = 255
"""Bytes of a name on most file systems."""
DEVICES = {"con", "prn", "aux", "nul"} | {f"{k}{n}" for k in ("com", "lpt") for n in range(10)}
"""Names that mean devices on Windows, with any ending."""


def is_group_list(group: str | None) -> bool:
    """Whether `group` names a file of groups."""
    return group is not None and group.lower().endswith(".csv")


def path_argument(name: str, value: Any, wanted: str) -> str:
    """`value`, the argument `name` of a Python call, as text."""
    if isinstance(value, os.PathLike):
        value = value.__fspath__()
    if isinstance(value, str):
        return value
    shown = printable(repr(value))
    text = f"{shown} ({type(value).__name__})" if len(shown) <= 40 else type(value).__name__
    raise ConfigError(f"{name}={text}: give {wanted}")


def did_you_mean(path: str | os.PathLike[str]) -> str:
    """`; did you mean X?` for a path that does not exist, or "" if no name is similar.

    Only its folder, or the nearest parent that exists, is searched.
    """
    text = os.fspath(path)
    home = os.path.expanduser(text)
    if home != text and os.path.exists(home):
        return f"; did you mean {printable(home)}?"
    folder, name = os.path.split(os.path.normpath(text))
    while folder and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder, name = os.path.split(folder)
    if os.path.lexists(os.path.join(folder, name)):  # a broken link, or a path inside a file
        return ""
    near = nearest_names(name[:MAX_NAME_LENGTH], names_in(folder or os.curdir))
    paths = [printable(os.path.join(folder, name)) for name in near]
    return f"; did you mean {' or '.join(paths)}?" if paths else ""


def is_run_folder(folder: str) -> bool:
    """Whether `folder` is that of a training, even of one that was stopped in its first moments."""
    begun = ("metrics.jsonl", "model.safetensors", ".lock", "checkpoints")
    has_settings = os.path.isfile(os.path.join(folder, "config.yaml"))
    return has_settings and any(os.path.exists(os.path.join(folder, name)) for name in begun)


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Sorted names in a folder that are not hidden, of its first MAX_NAMES entries."""
    try:
        with os.scandir(folder) as entries:
            first = itertools.islice(entries, MAX_NAMES)
            return sorted(entry.name for entry in first if entry.name[0] != ".")
    except OSError:
        return []


def casefold_name(name: str) -> str:
    """A key that is equal for names that some file system treats as the same."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


class UniqueNames:
    """Makes names unique by adding a number: `a.png`, `a-2.png`, ...

    Names that differ in case or composition alone are one on some disks, and count as equal. No
    name gets a number that makes it one of `reserved`.
    """

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self.reserved, self.taken = {*map(casefold_name, reserved)}, set[str]()
        self.following: dict[str, int] = {}
        """Number after the last one given to each name."""

    def add(self, name: str) -> str:
        """`name`, with a number before its suffix if it is taken; it may be a path with `/`."""
        folder, slash, last = name.rpartition("/")
        stem, suffix = os.path.splitext(last)
        key = own = casefold_name(name)
        while key in self.taken or (key != own and key in self.reserved):
            number = self.following.get(own, 2)
            self.following[own] = number + 1
            end = f"-{number}{suffix}"
            name = f"{folder}{slash}{cut_name(stem, MAX_NAME_LENGTH - len(os.fsencode(end)))}{end}"
            key = casefold_name(name)
        self.taken.add(key)
        return name


def cut_name(name: str, most: int) -> str:
    """The start of `name`, limited in bytes."""
    while len(os.fsencode(name)) > most:
        name = name[:-1]
    return name


def is_device_name(name: str) -> bool:
    """Whether Windows takes `name` for a device."""
    return name.lower().split(".")[0].strip() in DEVICES


def user_cache() -> Path:
    """The folder of files that this package can make again: `~/.cache/vit-toolkit`.

    `XDG_CACHE_HOME` replaces `~/.cache` where it is an absolute path.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "vit-toolkit"


def sha256_of_files(paths: Sequence[Path]) -> str:
    """SHA-256 over names, sizes and contents of files."""
    total = hashlib.sha256()
    path = Path()
    try:
        for path in paths:
            with open(path, "rb") as file:
                total.update(os.fsencode(path.name) + b"\0%d\0" % os.path.getsize(path))
                while chunk := file.read(1 << 20):
                    total.update(chunk)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    return total.hexdigest()
