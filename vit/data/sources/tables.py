"""Reads tables and lines of JSON that somebody else wrote, row by row, whatever is in them."""

import csv
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vit.data.sources.text_files import text_lines, wrong


class Table(NamedTuple):
    """A CSV file, opened."""

    names: list[str]
    """The header's cells."""
    line: int
    """Where the header is, from 1."""
    rows: Iterator[tuple[int, list[str]]]
    """The line where each row begins, and its cells, as many as there are names."""


def read_table(path: str, delimiter_of: Callable[[str], str]) -> Table:
    """The table `path`, whose header's line tells `delimiter_of` what is between two cells.

    Raises:
        DataError: It is no text, or has no header; while it is read: a row is no CSV or has
            another number of cells.
    """
    lines = text_lines(path)
    found = next(((number, text) for number, text in enumerate(lines, 1) if text.strip()), None)
    if found is None:
        raise wrong(path, "nothing in it; expected a header and rows")
    line, header = found
    delimiter = delimiter_of(header)
    names = fields(header, delimiter)
    return Table(names, line, _rows(path, lines, line, delimiter, len(names)))


def _rows(
    path: str, lines: Iterator[str], above: int, delimiter: str, width: int
) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    line = above + 1
    try:
        for cells in reader:
            if cells:
                check_width(cells, width, path, line)
                yield line, cells
            line = above + reader.line_num + 1  # where the next row begins: one may take several
    except csv.Error as error:
        raise wrong(
            path, f"not CSV ({error}); a quote inside a quoted cell is doubled", line
        ) from None


def fields(header: str, delimiter: str) -> list[str]:
    """The cells of one line."""
    return next(csv.reader([header.rstrip("\r\n")], delimiter=delimiter), [])


def check_width(cells: list[str], width: int, path: str, line: int) -> None:
    """Refuse a row that has more or fewer cells than the header."""
    if len(cells) != width:
        advice = "a cell with commas needs quotes around it"
        raise wrong(path, f"{len(cells)} cells, but {width} in the header; {advice}", line)


def json_records(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file that has one in each line, and their lines.

    Raises:
        DataError: A line is no such object.
    """
    for line, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        record = parse_json(text, path, line)
        if not isinstance(record, dict):
            raise wrong(path, f"{json_kind(record)}; expected an object in each line", line)
        yield line, record


def parse_json(text: str, path: str, line: int = 0) -> Any:
    """The value of a text from `path`, of one line or of all of it.

    Raises:
        DataError: It is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = line or error.lineno
        raise wrong(path, f"not JSON ({error.msg}, column {error.colno})", at) from None
    except (ValueError, RecursionError) as error:
        raise wrong(path, f"not JSON ({type(error).__name__})", line) from None


def json_kind(value: object) -> str:
    """What a JSON value is, in a word or two."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return kinds.get(type(value), "null" if value is None else "a number")
