"""Output files: checks before any work is done, and how they are opened."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from vit.atomic_files import open_atomic
from vit.errors import VitError
from vit.text import printable

REPORTS = ("--json", "--html")
"""Flags of files that a command makes anew, and replaces. Rows and lists took time, or a person
edits them: those are replaced with --overwrite."""
MAX_NAME_BYTES = 220  # file systems take 255, and unfinished files have longer names


def check_output(path: str | None, *, overwrite: bool) -> None:
    """Refuse a file that could not be written at the end."""
    if path in (None, "-") or is_device(path):
        return
    if not path:
        raise VitError("the name of an output file is empty; is a variable of the shell not set?")
    name, target = printable(path), resolve_link(path)
    if os.path.isdir(path):
        raise VitError(f"{name} is a folder; give the name of a file in it")
    if (size := len(os.fsencode(target.name))) > MAX_NAME_BYTES:
        raise VitError(f"{name}: the name has {size} bytes; give one of {MAX_NAME_BYTES} at most")
    if os.path.exists(path) and not overwrite:
        raise VitError(f"{name} exists; choose another name, or add --overwrite")
    _check_parent(name, target.parent, os.W_OK)


def check_outputs(
    outputs: Mapping[str, str | None],
    inputs: Iterable[str | None] = (),
    *,
    overwrite: bool = False,
) -> None:
    """Check, before any work is done, the files that a command writes, given by its flags."""
    for flag, path in outputs.items():
        check_output(path, overwrite=overwrite or flag in REPORTS)
    check_distinct(outputs, inputs)


def check_distinct(outputs: Mapping[str, str | None], inputs: Iterable[str | None] = ()) -> None:
    """Refuse outputs that are one file, or a file that is read; devices are not checked."""
    kept = {os.path.realpath(path) for path in inputs if path is not None and os.path.isfile(path)}
    flags: dict[str, str] = {}
    for flag, path in outputs.items():
        if path is None or is_device(path):
            continue
        target = os.path.realpath(path)
        if target in kept:
            raise VitError(f"{flag} {path} is a file that is read: give another name")
        if target in flags:
            raise VitError(f"{flags[target]} and {flag} are one file: give two names")
        flags[target] = flag


def check_folder(folder: str, *, overwrite: bool, content: str, overwriting: str = "") -> None:
    """Refuse a folder that cannot be written to, or, unless `overwrite`, one that has files."""
    path, name = Path(folder), printable(folder)
    if path.exists() and not path.is_dir():
        raise VitError(f"{name} is a file; give a folder for the {content}")
    _check_parent(name, path if path.exists() else path.parent, os.W_OK | os.X_OK | os.R_OK)
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise VitError(f"{name} has files; choose another folder, or add --overwrite{overwriting}")


def _check_parent(name: str, parent: Path, access: int) -> None:
    if not parent.is_dir():
        raise VitError(f"{name}: there is no folder {parent}; create it first")
    if not os.access(parent, access):
        raise VitError(f"{name}: the folder {parent} cannot be written")


@contextmanager
def open_output(path: str | None) -> Iterator[TextIO]:
    """UTF-8 text to standard output, or to a file that appears when the block ends well.

    A pipe or a device, such as /dev/stdout, is written as it is; after an error, what was there
    before is untouched.
    """
    if path is None:
        yield standard_output()
        sys.stdout.flush()  # here a reader that has gone is still noticed by the caller
    elif is_device(path):
        with open(path, "w", encoding="utf-8", newline="") as stream:
            yield stream
    else:
        with open_atomic(resolve_link(path), "w", encoding="utf-8", newline="") as stream:
            yield stream


def standard_output() -> TextIO:
    """Standard output, in UTF-8 where it is not a terminal, with line ends left as they are."""
    stream = sys.stdout
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        encoding = None if stream.isatty() else "utf-8"
        reconfigure(encoding=encoding, errors="backslashreplace", newline="", line_buffering=True)
    return stream


def is_device(path: str) -> bool:
    """Whether `path` is a pipe, a socket or a device, which no rename may replace."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def resolve_link(path: str) -> Path:
    """The file that a rename is to replace: what a link leads to, and not the link."""
    return Path(os.path.realpath(path) if os.path.islink(path) else path)
