"""Tables (CSV) and JSON lines of any origin, row by row, with line numbers in all errors.

Text is in UTF-8. The rows of a workbook (.xlsx) are lines of CSV here.
"""

import codecs
import csv
import io
import json
import math
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from vit.data.workbook import is_workbook, read_sheet
from vit.errors import DataError
from vit.paths import did_you_mean
from vit.text import join_names, plural, printable

MAX_BYTES = 10 * 2**30
MAX_JSON_BYTES = 2 * 2**30
"""Of a file that is read as a whole."""
MAX_LINE = 2**24
MAX_BAD_LINES = 10
BEGINNING, BEGINNING_ROWS = 2**16, 20
JSON_CONSTANTS = {"NaN": None, "Infinity": math.inf, "-Infinity": -math.inf}
"""Values of the names that Python writes into JSON; NaN is a gap in a table of pandas."""
REMEDY = "save it as UTF-8 (in Excel: CSV UTF-8)"

OnError = Callable[[DataError], object]
"""Called with the error of a line; if it returns, the line is skipped."""


def stop(error: DataError) -> None:
    """An `OnError` that raises the first error."""
    raise error


class LineError(DataError):
    """An error at a line of a file, from 1; 0 if it is not of a line."""

    def __init__(self, path: str, what: str, line: int) -> None:
        where = f", line {line}" if line else ""
        super().__init__(f"{printable(path)}{where}: {printable(what)}")
        self.path, self.what, self.line = path, what, line


def wrong(path: str, what: str, line: int = 0) -> LineError:
    """The error `what` in the file `path`, at a line unless it is 0."""
    return LineError(path, what, line)


class BadLines:
    """Collects the errors of a file's lines, for one error that names them."""

    def __init__(self) -> None:
        self.first: list[LineError] = []
        self.count = 0

    def add(self, error: DataError) -> None:
        """Add an error of a line, of which the first are kept; raise one of the whole file."""
        if not isinstance(error, LineError) or not error.line:
            raise error
        self.count += 1
        if len(self.first) < MAX_BAD_LINES:
            self.first.append(error)

    def raise_all(self) -> None:
        """Raise one error with the first lines, by reason, and the number of all; or none."""
        if self.count == 1:
            raise self.first[0]
        if not self.first:
            return
        lines: dict[str, list[int]] = defaultdict(list)
        for error in self.first:
            lines[error.what].append(error.line)
        groups = [f"line {join_names(at, MAX_BAD_LINES)}: {what}" for what, at in lines.items()]
        more = self.count - len(self.first)
        rest = f"; and {more:,} more" if more else ""
        raise DataError(
            f"{self.first[0].path}: {self.count:,} lines cannot be read: {'; '.join(groups)}{rest}"
        )


def text_lines(path: str) -> Iterator[str]:
    """The lines of a file with their ends, without a byte order mark."""
    if is_workbook(path):
        yield from _sheet_lines(path)
        return
    check_file(path, MAX_BYTES)
    number = 0
    try:
        with open(path, "rb") as file:
            while raw := file.readline(MAX_LINE + 1):
                number += 1
                if len(raw) > MAX_LINE:
                    raise wrong(path, f"more than {MAX_LINE:,} bytes in one line", number)
                yield _decoded(raw, path, number)
    except OSError as error:
        raise wrong(path, f"cannot be read ({error.strerror})") from None


def _sheet_lines(path: str) -> Iterator[str]:
    """The rows of a workbook as lines of CSV; a line break in a cell becomes a space."""
    check_file(path, MAX_BYTES)
    for cells in read_sheet(path):
        row = io.StringIO()
        writer = csv.writer(row, lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writerow(" ".join(cell.split("\n")) for cell in cells)
        yield row.getvalue()


def _decoded(raw: bytes, path: str, number: int, *, whole: bool = True) -> str:
    """Decode `raw`, whose first line is `number`; unless `whole`, it may end in mid-character."""
    if b"\0" in raw:
        line = number + raw[: raw.index(b"\0")].count(b"\n")
        raise wrong(path, f"has a NUL byte, which UTF-8 has not; {REMEDY}", line)
    try:
        text, _ = codecs.utf_8_decode(raw, "strict", whole)
    except UnicodeDecodeError as error:
        line = number + raw[: error.start].count(b"\n")
        byte = raw[error.start]
        raise wrong(path, f"not UTF-8 (byte 0x{byte:02x}); {REMEDY}", line) from None
    return text.removeprefix("\ufeff") if number == 1 else text


def check_file(path: str, most: int) -> None:
    """Require a regular file of 1 to `most` bytes."""
    try:
        status = os.stat(path)
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise wrong(path, what + did_you_mean(path)) from None
    if not stat.S_ISREG(status.st_mode):
        raise wrong(path, "no regular file")
    if not status.st_size:
        raise wrong(path, "an empty file (0 bytes)")
    if status.st_size > most:
        size, limit = status.st_size / 2**30, most / 2**30
        raise wrong(path, f"{size:.1f} GiB, more than the {limit:.0f} GiB read here; split it")


def beginning(path: str) -> str:
    """The first characters of a file of text, `BEGINNING` bytes of them."""
    if is_workbook(path):
        return "".join(islice(_sheet_lines(path), BEGINNING_ROWS))
    raw = _bytes(path, MAX_BYTES, BEGINNING)
    return _decoded(raw, path, 1, whole=len(raw) < BEGINNING)


def whole_text(path: str) -> str:
    """All of a file of text that is short enough to be read as a whole."""
    return _decoded(_bytes(path, MAX_JSON_BYTES, -1), path, 1)


def _bytes(path: str, most: int, number: int) -> bytes:
    check_file(path, most)
    try:
        with open(path, "rb") as file:
            return file.read(number)
    except OSError as error:
        raise wrong(path, f"cannot be read ({error.strerror})") from None


LONGEST = 80
"""Characters that an error quotes of a line that is no CSV."""
MARKS = ' \t\r\n,;|"'
"""Characters of a line without content."""
IN_HEADER = "but {} in the header; a cell with commas needs quotes around it"
IN_SHEET = "but {} in the header; the first row has to name the columns, without a title above"


class Table(NamedTuple):
    """A CSV file, opened."""

    names: list[str]
    """The header's cells."""
    line: int
    """Where the header is, from 1."""
    rows: Iterator[tuple[int, list[str]]]
    """The line where each row begins, and its cells, as many as there are names."""
    delimiter: str
    """Between two cells."""
    blank: list[int]
    """Lines of rows whose cells are all empty, which are left out: complete once `rows` ended."""

    def blank_notes(self, path: str) -> list[str]:
        """How many rows of the table `path` were left out since they are empty."""
        if not self.blank:
            return []
        rows = plural(len(self.blank), "empty row")
        return [f"{printable(path)}: left out {rows}, the first in line {self.blank[0]}"]


def read_table(path: str, delimiter_of: Callable[[str], str], on_error: OnError = stop) -> Table:
    """Open a table; its rows are read lazily."""
    lines = text_lines(path)
    blank: list[int] = []
    for line, header in enumerate(lines, 1):
        if header.strip(MARKS):
            break
        if header.strip():
            blank.append(line)
    else:
        raise wrong(path, "nothing in it; expected a header and rows")
    if "\r" in header.rstrip("\r\n"):
        raise wrong(path, "lines end in CR alone, as on old Macs; save it as CSV UTF-8", line)
    delimiter = delimiter_of(header)
    names = fields(header, delimiter)
    rows = _rows(path, lines, line + 1, delimiter, len(names), blank, on_error)
    return Table(names, line, rows, delimiter, blank)


def _rows(
    path: str,
    lines: Iterator[str],
    line: int,
    delimiter: str,
    width: int,
    blank: list[int],
    on_error: OnError,
) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(MAX_LINE)  # of this process; 131,072 characters by default
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    while True:
        began = line + reader.line_num
        try:
            cells = next(reader, None)
        except csv.Error as error:
            what = f"not CSV ({error}); a quote inside a quoted cell is doubled"
            on_error(wrong(path, what, began))
            return  # its quote may span valid rows
        if cells is None:
            return
        if cells and not any(cell.strip() for cell in cells):
            blank.append(began)
        elif cells and len(cells) != width:
            expected = IN_SHEET if is_workbook(path) else IN_HEADER
            on_error(wrong(path, f"{plural(len(cells), 'cell')}, {expected.format(width)}", began))
        elif cells:
            yield began, cells


def fields(header: str, delimiter: str) -> list[str]:
    """The cells of one line; a single one where it is no CSV."""
    text = header.rstrip("\r\n")
    try:
        return next(csv.reader([text], delimiter=delimiter), [])
    except csv.Error:
        return [text[:LONGEST]]


def json_records(path: str, on_error: OnError = stop) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and value of the JSON objects in a file with one in each line."""
    for line, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        try:
            record = parse_json(text, path, line)
            if not isinstance(record, dict):
                raise wrong(path, f"{json_kind(record)}; expected an object in each line", line)
        except DataError as error:
            on_error(error)
        else:
            yield line, record


def parse_json(text: str, path: str, line: int = 0) -> Any:
    """The value of a text from `path`, of one line or of all of it."""
    try:
        return json.loads(text, parse_constant=JSON_CONSTANTS.get)
    except json.JSONDecodeError as error:
        at = line or error.lineno
        raise wrong(path, f"not JSON ({error.msg}, column {error.colno})", at) from None
    except (ValueError, RecursionError) as error:
        raise wrong(path, f"not JSON ({type(error).__name__})", line) from None


def json_kind(value: object) -> str:
    """The type of a JSON value, for errors."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return kinds.get(type(value), "null" if value is None else "a number")
