"""Formats of lists of images: each is read as rows with named columns.

    table         CSV or TSV whose header names the columns
    JSON lines    {"file_name": "1.jpg", "label": "cat"}, one object per line
    COCO          {"images": [...], "annotations": [...]} (Chen et al., 2015, arXiv:1504.00325),
                  for captions only

The content decides the format; the file extension only where the content is damaged.
"""

import dataclasses
import json
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.list_columns import (
    IMAGE_COLUMNS,
    caption_columns,
    check_header,
    choose_columns,
    match_name,
)
from vit.data.sources.table_reader import (
    OnError,
    beginning,
    fields,
    json_records,
    parse_json,
    read_table,
    stop,
    whole_text,
    wrong,
)
from vit.errors import DataError
from vit.text import join_names, printable

EXPECTED = (
    "expected a table (CSV, TSV) with a header such as `image,caption`, JSON lines such as "
    '{"file_name": ..., "text": ...}, or captions of COCO'
)
DELIMITERS = ",\t;|"


class Row(NamedTuple):
    """A row of a table, a JSON object, or an image of COCO."""

    line: int
    """First line of the row, from 1; 0 where the file is not read by lines."""
    names: Sequence[str]
    header: int
    values: dict[str, Any]
    """By name: text in tables, any JSON value otherwise."""
    delimiter: str = ""
    """Between the cells of a table; empty where the values are no cells."""

    @property
    def is_table(self) -> bool:
        """Whether the values are cells of a table."""
        return bool(self.delimiter)


Reader = Callable[[str, DatasetSpec, list[str], OnError], Iterator[Row]]


def read_rows(
    path: str, spec: DatasetSpec, notes: list[str], on_error: OnError = stop
) -> Iterator[Row]:
    return READERS[list_format(path, spec)](path, spec, notes, on_error)


def list_format(path: str, spec: DatasetSpec) -> str:
    first, _, rest = beginning(path).lstrip().partition("\n")
    if not first.startswith(("{", "[")):
        return "table"
    if spec.captions:
        return _json_format(path, first, single_line=not rest.strip())
    if first[0] == "[":
        raise wrong(path, "a list in JSON; write one object in each line (JSON lines)", 1)
    return "JSON lines"


def _json_format(path: str, first: str, *, single_line: bool) -> str:
    """JSON lines, or COCO in one JSON value, which may be one line too."""
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        is_lines = path.lower().endswith((".jsonl", ".ndjson"))
        return "JSON lines" if is_lines else "COCO"
    parts = {"images", "annotations"} & set(value if isinstance(value, dict) else ())
    return "COCO" if single_line and (parts or isinstance(value, list)) else "JSON lines"


def find_delimiter(header: str) -> str:
    """The delimiter that yields the columns that a list needs, or else the most columns."""

    def score(mark: str) -> tuple[int, int]:
        names = fields(header, mark)
        found = match_name(names, IMAGE_COLUMNS), caption_columns(names)
        return sum(map(bool, found)), len(names)

    return max(DELIMITERS, key=score)


def has_classes(path: str, numbers: tuple[str, ...] = ()) -> bool:
    """Whether the file starts like a list of images and classes, or of these `numbers`."""
    return _has_columns(path, DatasetSpec(path, labels=not numbers, target=numbers))


def has_captions(path: str, spec: DatasetSpec | None = None) -> bool:
    """Whether the file starts like a list of captions, with the columns that `spec` names."""
    spec = dataclasses.replace(spec or DatasetSpec(path), captions=True, label_column=None)
    try:
        kind = list_format(path, spec)
    except DataError:
        return False
    if kind == "COCO":
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return text.find(b'"caption"') >= 0
    return _has_columns(path, spec)


def _has_columns(path: str, spec: DatasetSpec) -> bool:
    """Whether the first record, or the header of a table, has the columns that are read."""
    try:
        if list_format(path, spec) == "JSON lines":
            names = [*next(json_records(path))[1]]
        else:
            names = read_table(path, find_delimiter).names
        choose_columns(names, path, 1, spec)
    except (DataError, StopIteration):
        return False
    return True


def _table_rows(path: str, spec: DatasetSpec, notes: list[str], on_error: OnError) -> Iterator[Row]:
    table = read_table(path, find_delimiter, on_error)
    check_header(table, path, spec)
    counts = Counter(name for name in table.names if name.strip())
    repeated = [printable(name) for name, number in counts.items() if number > 1]
    if repeated:
        raise wrong(path, f"two columns are called {join_names(repeated)}; rename one", table.line)
    for line, cells in table.rows:
        values = dict(zip(table.names, cells, strict=True))
        yield Row(line, table.names, table.line, values, table.delimiter)
    notes += table.blank_notes(path)


def _json_rows(path: str, _: DatasetSpec, __: list[str], on_error: OnError) -> Iterator[Row]:
    for line, record in json_records(path, on_error):
        yield Row(line, tuple(record), line, record)


def _coco_rows(path: str, _: DatasetSpec, __: list[str], ___: OnError) -> Iterator[Row]:
    """The images of a COCO file of captions, each with all of its captions."""
    data = parse_json(whole_text(path), path)
    try:
        names = {image["id"]: image["file_name"] for image in data["images"]}
        captions: dict[int | str, list[Any]] = {number: [] for number in names}
        for annotation in data["annotations"]:
            captions[annotation["image_id"]].append(annotation["caption"])
    except (KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise wrong(path, f"not captions of COCO ({reason}); {EXPECTED}") from None
    if len(names) < len(data["images"]):
        raise wrong(path, "several images of COCO have one id")
    columns = ("file_name", "captions")
    for number, name in names.items():
        yield Row(0, columns, 0, {"file_name": name, "captions": captions[number]})


READERS: dict[str, Reader] = {
    "COCO": _coco_rows,
    "JSON lines": _json_rows,
    "table": _table_rows,
}
