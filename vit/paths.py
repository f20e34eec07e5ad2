"""Paths as arguments, suggestions for missing ones, names on all file systems, the user's cache
folder, digests of files."""

import hashlib
import itertools
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from vit.errors import ConfigError, RunError
from vit.text import nearest_names, printable

MODEL_FILES = ("config.json", "model.safetensors")
MAX_NAMES = 4096
"""Names of a folder that are compared: a million must not delay an error message."""
MAX_NAME_LENGTH = 255
DEVICES = {"con", "prn", "aux", "nul"} | {f"{k}{n}" for k in ("com", "lpt") for n in range(10)}
"""Names that mean devices on Windows, with any ending."""


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
    # as a shell, a browser, a text or Windows has it
    spellings = [os.path.expandvars(os.path.expanduser(text)), text.strip(" '\"")]
    spellings += [unquote(text.removeprefix("file:").removeprefix("//")), text.replace("\\", "/")]
    for spelling in spellings:
        if spelling != text and os.path.exists(spelling):
            return f"; did you mean {printable(spelling)}?"
    folder, name = os.path.split(os.path.normpath(text))
    rest = ""
    while folder and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        rest = os.path.join(name, rest) if rest else name
        folder, name = os.path.split(folder)
    if os.path.lexists(os.path.join(folder, name)):  # a broken link, or a path inside a file
        return ""
    near = nearest_names(name[:MAX_NAME_LENGTH], names_in(folder or os.curdir))
    paths = []
    for one in near:
        found = os.path.join(folder, one)
        whole = os.path.join(found, rest)
        paths.append(whole if rest and os.path.exists(whole) else found)
    return f"; did you mean {' or '.join(map(printable, paths))}?" if paths else ""


def is_saved_model(path: str) -> bool:
    """Whether `path` is a folder with a network in the format of run folders and timm."""
    return all(os.path.isfile(os.path.join(path, name)) for name in MODEL_FILES)


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
