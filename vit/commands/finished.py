"""Finished rows, read again: are they of these pictures, and how many have an error?"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from vit.data.sources.folders import count
from vit.errors import RunError, printable
from vit.runtime.results import column_width, csv_text, pad

Row = tuple[bool, bool]
"""Whether it is of its picture, and whether it is an error."""


def failed_rows(path: Path, style: str, images: Sequence[str]) -> int:
    """How many of `images` have an error in a finished file.

    Args:
        path: Of the file.
        style: Its format.
        images: Whose names its rows must have, in this order.

    Raises:
        RunError: It is of other pictures or of another format, or cannot be read.
    """
    name = printable(path)
    other = "give another --out, or begin again with --overwrite"
    try:
        with open(path, "rb") as file:
            rows = sum(1 for _ in file) - (style != "jsonl")
        if rows != len(images):
            raise RunError(
                f"{name} is complete with {count(rows, 'row')}, and the inputs are "
                f"{count(len(images), 'picture')}: {other}"
            )
        failed = 0
        with open(path, encoding="utf-8", newline="\n") as text:
            for number, (same, error) in enumerate(READERS[style](text, images), 1):
                if not same:
                    raise RunError(f"{name}, row {number} is of another picture: {other}")
                failed += error
    except OSError as error:
        raise RunError(f"{name} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, csv.Error):
        raise RunError(f"{name} is complete, and not as {style}: {other}") from None
    return failed


def _json(file: TextIO, images: Sequence[str]) -> Iterator[Row]:
    for line, image in zip(file, images, strict=True):
        record = json.loads(line)
        yield record["image"] == image, "error" in record


def _csv(file: TextIO, images: Sequence[str]) -> Iterator[Row]:
    rows = csv.reader(file)
    next(rows)
    for row, image in zip(rows, images, strict=True):
        yield row[0] == csv_text(image), bool(row[-1])


def _table(file: TextIO, images: Sequence[str]) -> Iterator[Row]:
    width = column_width("image", *images)
    next(file)
    for line, image in zip(file, images, strict=True):
        start = pad(printable(image), width) + "  "
        yield line.startswith(start), line.startswith("error: ", len(start))


READERS: dict[str, Callable[[TextIO, Sequence[str]], Iterator[Row]]] = {
    "jsonl": _json,
    "csv": _csv,
    "table": _table,
}
