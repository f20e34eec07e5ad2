"""Output of commands: results to standard output or a file, everything else to stderr."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from vit.errors import VitError, printable

LONGEST = 220  # bytes of a name; file systems take 255, and unfinished files have longer ones


def check_output(path: str | None, *, overwrite: bool) -> None:
    """Check, before any work is done, that a file can be written at the end.

    Raises:
        VitError: The file exists and `overwrite` is off, is a folder, its name is too long, or its
            folder is missing.
    """
    if path is None or is_device(path):
        return
    name, folder = printable(path), resolve_link(path).parent
    if os.path.isdir(path):
        raise VitError(f"{name} is a folder; give the name of a file in it")
    if (size := len(os.fsencode(resolve_link(path).name))) > LONGEST:
        raise VitError(f"{name}: the name has {size} bytes; give one of {LONGEST} at most")
    if os.path.exists(path) and not overwrite:
        raise VitError(f"{name} exists; choose another name, or add --overwrite")
    if not folder.is_dir():
        raise VitError(f"{name}: there is no folder {printable(folder)}; create it first")
    if not os.access(folder, os.W_OK):
        raise VitError(f"{name}: the folder {printable(folder)} cannot be written")


def check_folder(folder: str, *, overwrite: bool) -> None:
    """Check, before any work is done, that drawings can be written to a folder.

    Raises:
        VitError: It has files and `overwrite` is off, is no folder, or cannot be made or written.
    """
    path, name = Path(folder), printable(folder)
    if path.exists() and not path.is_dir():
        raise VitError(f"{name} is a file; give a folder for the drawings")
    parent = path if path.exists() else path.parent
    if not parent.is_dir():
        raise VitError(f"{name}: there is no folder {printable(parent)}; create it first")
    if not os.access(parent, os.W_OK | os.X_OK | os.R_OK):
        raise VitError(f"{name}: the folder {printable(parent)} cannot be written")
    if path.exists() and any(path.iterdir()) and not overwrite:
        raise VitError(f"{name} has files; choose another folder, or add --overwrite")


@contextmanager
def open_output(path: str | None) -> Iterator[TextIO]:
    """UTF-8 text to standard output, or to a file that appears when the block ends well.

    A pipe or a device, such as /dev/stdout, is written as it is.

    Raises:
        VitError: The file cannot be written; what was there before is untouched.
    """
    if path is None:
        yield standard_output()
        sys.stdout.flush()  # here a reader that has gone is still noticed by the caller
    elif is_device(path):
        with open(path, "w", encoding="utf-8", newline="") as stream:
            yield stream
    else:
        with explain_write_errors(path), atomic_text_file(resolve_link(path)) as stream:
            yield stream


def write_json(path: str | None, content: Any) -> None:
    """Write a JSON file as `open_output` does; nothing without a path."""
    if path is None:
        return
    from vit.output.prediction_results import to_json

    with open_output(path) as out:
        out.write(to_json(content, indent=2) + "\n")


def standard_output() -> TextIO:
    """Standard output, in UTF-8 where it is not a terminal, with line ends left as they are."""
    stream = sys.stdout
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        encoding = None if stream.isatty() else "utf-8"
        reconfigure(encoding=encoding, errors="backslashreplace", newline="", line_buffering=True)
    return stream


@contextmanager
def atomic_text_file(path: Path) -> Iterator[TextIO]:
    """Write beside `path`, flush to the disk, and rename; nothing is left after an error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "w", encoding="utf-8", newline="") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def explain_write_errors(path: str) -> Iterator[None]:
    """Turn an OSError inside the `with` into a VitError that names the file and the cause."""
    try:
        yield
    except OSError as error:
        raise VitError(f"{printable(path)} could not be written: {error.strerror}") from None


def is_device(path: str) -> bool:
    """Whether `path` is a pipe, a socket or a device, which no rename may replace."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def resolve_link(path: str) -> Path:
    """The file that a rename is to replace: what a link leads to, and not the link."""
    return Path(os.path.realpath(path) if os.path.islink(path) else path)


def notify(*words: Any) -> None:
    """One line on standard error."""
    print(*words, file=sys.stderr)


def progress_bar(total: int, *, unit: str, results_on_terminal: bool, done: int = 0) -> Any:
    """A bar with rate and remaining time on a terminal; hidden elsewhere, or if rows of results
    are printed on the same terminal."""
    from tqdm import tqdm

    quiet = results_on_terminal or not sys.stderr.isatty()
    # with a delay nothing is shown before the first step, so notes have their lines to themselves
    return tqdm(
        total=total, initial=done, unit=f" {unit}", disable=quiet, dynamic_ncols=True, delay=0.1
    )


@contextmanager
def image_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar of images; call the function with the images done and their total."""
    with progress_bar(0, unit="image", results_on_terminal=False) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total or None
            bar.update(done - bar.n)

        yield update
