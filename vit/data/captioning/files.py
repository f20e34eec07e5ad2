"""Reads lists of captions: which picture is described how, row by row.

    a table       CSV or TSV whose header names a column of pictures and one or more of captions
    JSON lines    {"file_name": "1.jpg", "text": "..."}, or "captions": ["...", "..."]
    token file    1.jpg#0<TAB>a caption (Flickr8k; Hodosh, Young and Hockenmaier, 2013)
    bars          image_name| comment_number| comment (Flickr30k)
    COCO          {"images": [...], "annotations": [...]} (Chen et al., 2015, arXiv:1504.00325)

The content tells which it is; a name's ending only where the content is damaged.
"""

import json
import re
from collections.abc import Callable, Iterator

from vit.data.captioning.columns import EXPECTED, Columns, Row, choose_columns, find_columns
from vit.data.captioning.json_lists import coco_rows, json_rows
from vit.data.sources.folders import some
from vit.data.sources.tables import below_separator, check_width, fields, read_table
from vit.data.sources.text_files import beginning, text_lines, wrong
from vit.errors import DataError, printable

TOKEN = re.compile(r"([^\t]+)#\d+[ ]*\t(.*)", re.DOTALL)
DELIMITERS = "\t|,;"


Reader = Callable[[str, list[str]], Iterator[Row]]


def read_rows(path: str, notes: list[str]) -> Iterator[Row]:
    """The rows of a list.

    Args:
        path: The list.
        notes: Receives what of it is not used.

    Raises:
        DataError: It is no list of captions, or damaged.
    """
    return READERS[format_of(path)](path, notes)


def is_list(path: str) -> bool:
    """Whether the file begins like a list of captions."""
    try:
        kind, (said, start) = format_of(path), below_separator(beginning(path).lstrip())
    except DataError:
        return False
    first = start.lstrip().split("\n", 1)[0]
    if kind == "COCO":
        return bool(re.search(r'"(images|annotations)"\s*:', start))
    if kind == "JSON lines":
        return find_columns(_keys(first)).whole
    return kind == "token file" or any(
        find_columns(fields(first, d)).whole for d in said or DELIMITERS
    )


def format_of(path: str) -> str:
    """A name in `READERS`.

    Raises:
        DataError: It begins like none of them.
    """
    said, start = below_separator(beginning(path).lstrip())
    if said is not None:
        return "table"
    first, _, rest = start.partition("\n")
    if first.startswith(("{", "[")):
        return _json_format(path, first, alone=not rest.strip())
    if TOKEN.match(first):
        return "token file"
    delimiter = _delimiter(first)
    if delimiter is None:
        start = first.strip()[:60] or "nothing"
        raise wrong(path, f"no list of captions, it begins with {start!a}; {EXPECTED}")
    return "bars" if delimiter == "|" else "table"


def _json_format(path: str, first: str, *, alone: bool) -> str:
    """Whether it is lines of JSON or JSON as a whole, which may be one line too."""
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        is_lines = path.lower().endswith((".jsonl", ".ndjson"))
        return "JSON lines" if is_lines else "COCO"
    parts = {"images", "annotations"} & set(value if isinstance(value, dict) else ())
    return "COCO" if alone and (parts or isinstance(value, list)) else "JSON lines"


def _keys(line: str) -> list[str]:
    """The keys of a record, none where it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return list(record) if isinstance(record, dict) else []


def _delimiter(header: str) -> str | None:
    """The one that gives a column of pictures or captions, best of both."""
    found = [d for d in DELIMITERS if find_columns(fields(header, d)).known]
    both = [d for d in found if find_columns(fields(header, d)).whole]
    return next(iter(both + found), None)


def _table(path: str, notes: list[str]) -> Iterator[Row]:
    table = read_table(path, lambda header: _delimiter(header) or ",")
    columns = choose_columns(table.names, path, table.line, notes)
    for line, cells in table.rows:
        yield _row_of_cells(cells, columns, path, line)
    notes += table.blank_notes(path)


def _row_of_cells(cells: list[str], columns: Columns, path: str, line: int) -> Row:
    captions = [cells[at] for at in columns.captions]
    for caption in captions:
        if caption.startswith(('["', "['")) and caption.rstrip().endswith("]"):
            advice = "give each caption its own column or row, or use JSON lines"
            raise wrong(path, f"a list in a cell: {caption[:40]!a}; {advice}", line)
    label = cells[columns.label].strip() if columns.label is not None else ""
    return Row(line, cells[columns.image], captions, label)


def _bars(path: str, notes: list[str]) -> Iterator[Row]:
    names: list[str] = []
    mended: list[str] = []
    for line, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        if not names:
            names = [cell.strip() for cell in text.split("|")]
            columns = choose_columns(names, path, line, notes)
            continue
        cells = text.split("|", len(names) - 1)
        if len(cells) == 2 and len(names) == 3:
            # One line of Flickr30k's well-known file lacks its second bar.
            cells = [cells[0], *re.split(r"(?<=\d)\s+", cells[1].lstrip(), maxsplit=1)]
            mended.append(f"{line}")
        check_width(cells, len(names), path, line)
        yield _row_of_cells(cells, columns, path, line)
    if mended:
        notes.append(f"{printable(path)}: no bar after the number in line {some(mended)}; read so")


def _tokens(path: str) -> Iterator[Row]:
    for line, text in enumerate(text_lines(path), 1):
        found = TOKEN.match(text)
        if found:
            yield Row(line, found[1], (found[2],), "")
        elif text.strip():
            raise wrong(path, f"{text.strip()[:60]!a}; expected IMAGE#NUMBER<TAB>CAPTION", line)


READERS: dict[str, Reader] = {
    "COCO": lambda path, _: coco_rows(path),
    "JSON lines": json_rows,
    "bars": _bars,
    "table": _table,
    "token file": lambda path, _: _tokens(path),
}
