"""Reads lists of captions: which image is described how, row by row.

    a table       CSV or TSV whose header names a column of images and one or more of captions
    JSON lines    {"file_name": "1.jpg", "text": "..."}, or "captions": ["...", "..."]
    token file    1.jpg#0<TAB>a caption (Flickr8k; Hodosh, Young and Hockenmaier, 2013)
    bars          image_name| comment_number| comment (Flickr30k)
    COCO          {"images": [...], "annotations": [...]} (Chen et al., 2015, arXiv:1504.00325)

The content tells which it is; a name's ending only where the content is damaged.

A row of a list of captions, and which columns of a table, or keys of a record, it is made of.
Reads captions in JSON: an object a line, or a file of COCO's.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vit.data.sources.table_reader import (
    beginning,
    below_separator,
    check_width,
    fields,
    json_kind,
    json_records,
    parse_json,
    read_table,
    text_lines,
    whole_text,
    wrong,
)
from vit.errors import DataError, printable
from vit.text import join_names

EXPECTED = (
    "expected a table (CSV, TSV) with a header such as `image,caption`, JSON lines such as "
    '{"file_name": ..., "text": ...}, a token file, or captions of COCO'
)
IMAGE_COLUMNS = (
    *("file_name", "filename", "image", "image_name", "image_path", "image_file"),
    *("path", "filepath", "file_path", "file", "img"),
)
"""Names of the column of images, the first one there is."""
CAPTION_KINDS = ("caption", "text", "sentence", "comment", "description")
"""Names of columns of captions: all of the first kind there is, maybe with an s or a number."""
LABEL_COLUMNS = ("label", "class")


class Row(NamedTuple):
    """What one line, or one image of COCO's, says."""

    line: int
    """Where it begins, from 1; 0 where the file is no lines."""
    name: str
    """Of the image's file, as it is written there."""
    captions: Sequence[str]
    """As they are written there; some may be empty."""
    label: str
    """Name of its class, empty where there is none."""


@dataclass(frozen=True)
class Columns:
    """Places of the columns that are read; `image` is -1 where there is none."""

    image: int
    captions: tuple[int, ...]
    label: int | None
    unused: tuple[str, ...]

    @property
    def known(self) -> bool:
        """Whether there is anything."""
        return self.image >= 0 or bool(self.captions)

    @property
    def whole(self) -> bool:
        """Whether there is all that a list of captions needs."""
        return self.image >= 0 and bool(self.captions)


def find_columns(names: Sequence[str]) -> Columns:
    """The columns by their names; capitals and white space around a name do not count."""
    plain = [name.strip().lower() for name in names]
    image = next((plain.index(name) for name in IMAGE_COLUMNS if name in plain), -1)
    captions: tuple[int, ...] = ()
    for kind in CAPTION_KINDS:
        pattern = re.compile(rf"{kind}s?[ _-]?\d*")
        captions = captions or tuple(i for i, name in enumerate(plain) if pattern.fullmatch(name))
    label = next((plain.index(name) for name in LABEL_COLUMNS if name in plain), None)
    used = {image, *captions, label}
    unused = tuple(name.strip() for i, name in enumerate(names) if i not in used)
    return Columns(image, captions, label, unused)


def choose_columns(names: Sequence[str], path: str, line: int, notes: list[str]) -> Columns:
    """The columns of the list `path` whose header, or first record, is at `line`.

    Raises:
        DataError: There are none of images or of captions.
    """
    columns = find_columns(names)
    has = join_names([printable(name.strip()) for name in names]) or "none"
    if columns.image < 0:
        expected = ", ".join(IMAGE_COLUMNS[:3])
        raise wrong(path, f"no column of images among {has}; expected {expected}", line)
    if not columns.captions:
        expected = "caption, captions, text, or caption_0, caption_1"
        raise wrong(path, f"no column of captions among {has}; expected {expected}", line)
    if columns.unused:
        unused = join_names([printable(name) for name in columns.unused])
        captions = join_names([printable(names[at].strip()) for at in columns.captions])
        notes.append(f"{printable(path)}: captions from {captions}; not used: {unused}")
    return columns


def json_rows(path: str, notes: list[str]) -> Iterator[Row]:
    """The rows of a file with an object a line; the first one's columns are told in `notes`.

    Raises:
        DataError: A line is no such object.
    """
    known: dict[tuple[str, ...], Columns] = {}
    for line, record in json_records(path):
        keys = tuple(record)
        if keys not in known:
            known[keys] = choose_columns(keys, path, line, [] if known else notes)
        yield _row_of_record(record, keys, known[keys], path, line)


def _row_of_record(
    record: dict[str, Any], keys: tuple[str, ...], columns: Columns, path: str, line: int
) -> Row:
    name = record[keys[columns.image]]
    if not isinstance(name, str):
        raise wrong(path, f"{keys[columns.image]} is {json_kind(name)}; expected a file name", line)
    captions: list[str] = []
    for at in columns.captions:
        value = record[keys[at]]
        for caption in value if isinstance(value, list) else [value]:
            if not isinstance(caption, str | None):
                where = f"{keys[at]} {'holds' if isinstance(value, list) else 'is'}"
                raise wrong(
                    path, f"{where} {json_kind(caption)}; expected a text or a list of texts", line
                )
            captions.append(caption or "")
    label = record[keys[columns.label]] if columns.label is not None else ""
    if isinstance(label, bool) or not isinstance(label, str | int | None):
        raise wrong(path, f"the label is {json_kind(label)}; expected a name or a number", line)
    return Row(line, name, captions, "" if label is None else str(label).strip())


def coco_rows(path: str) -> Iterator[Row]:
    """The images of a file of COCO's captions, each with all of its captions.

    Raises:
        DataError: It is no such file.
    """
    data = parse_json(whole_text(path), path)
    if not isinstance(data, dict):
        raise wrong(path, f"{json_kind(data)}; {EXPECTED}")
    for part in ("images", "annotations"):
        if not isinstance(data.get(part), list):
            has = ", ".join(printable(key) for key in [*data][:5]) or "nothing"
            raise wrong(path, f"has {has}, but no list of {part}, so it is not COCO; {EXPECTED}")
    names: dict[int | str, str] = {}
    for at, image in enumerate(data["images"]):
        number, name = _two(image, "id", "file_name", f"images[{at}]", path)
        if names.setdefault(number, name) != name:
            raise wrong(path, f"images[{at}] has the id {number!a} of another image")
    captions: dict[int | str, list[str]] = {number: [] for number in names}
    for at, annotation in enumerate(data["annotations"]):
        number, caption = _two(annotation, "image_id", "caption", f"annotations[{at}]", path)
        if number not in captions:
            raise wrong(path, f"annotations[{at}] has image_id {number!a}, which is no image's id")
        captions[number].append(caption)
    for number, name in names.items():
        yield Row(0, name, captions[number], "")


def _two(record: object, key: str, text: str, where: str, path: str) -> tuple[int | str, str]:
    """The number and the text of one entry."""
    if not isinstance(record, dict):
        raise wrong(path, f"{where} is {json_kind(record)}; expected an object")
    for name, kinds in ((key, (int, str)), (text, (str,))):
        value = record.get(name)
        if name not in record:
            hint = "; expected captions, not boxes or outlines" if name == "caption" else ""
            raise wrong(path, f"{where} has no {name}{hint}")
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise wrong(path, f"{where}: {name} is {json_kind(value)}")
    return record[key], record[text]


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
    """The one that gives a column of images or captions, best of both."""
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
        notes.append(
            f"{printable(path)}: no bar after the number in line {join_names(mended)}; read so"
        )


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
