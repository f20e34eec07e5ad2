"""Reads lists of pictures and their classes: CSV, TSV or lines of JSON.

    image,label            {"image": "1.jpg", "label": "cat"}
    1.jpg,cat              {"image": "2.jpg", "labels": ["cat", "dog"]}
    2.jpg,cat|dog

One list, whose column `split` may tell training from validation pictures, or a folder with
train.csv and val.csv. File names are relative to the folder of the pictures and stay inside.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vit.data.captioning.columns import IMAGE_COLUMNS
from vit.data.captioning.lists import SPLIT
from vit.data.sources.asked import Asked
from vit.data.sources.classes import SPLIT_NAMES
from vit.data.sources.faults import leave
from vit.data.sources.folders import count, some
from vit.data.sources.label_columns import (
    SPLIT_COLUMN,
    LabelColumns,
    cell_group,
    cell_labels,
    check_header,
    check_record,
    choose_columns,
    comma_notes,
    split_cell,
    usual,
)
from vit.data.sources.list_entries import Entry, ReadList
from vit.data.sources.list_names import tidy_name
from vit.data.sources.tables import fields, json_records, read_table
from vit.data.sources.text_files import OnWrong, beginning, stop, wrong
from vit.errors import DataError, printable
from vit.settings import nearest

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
DELIMITERS = ",\t;|"
INSIDE = "say which folder holds the pictures with --images, or take it with --allow-outside"


def is_list(data: str) -> bool:
    """Whether `data` names a list of pictures, or a folder with one for each split."""
    if os.path.isdir(data):
        return bool(lists_in(data))
    return data.lower().endswith(SUFFIXES) and os.path.lexists(data)


def lists_in(folder: str) -> dict[str, str]:
    """The lists of classes straight in `folder` by split; none without one for train.

    None either where `train` is a folder of class folders: those are read then.
    """
    found: dict[str, str] = {}
    for name in sorted(_listed(folder)):
        stem, suffix = os.path.splitext(name.lower())
        split, path = SPLIT.fullmatch(stem), os.path.join(folder, name)
        if suffix not in SUFFIXES or not split or not has_classes(path):
            continue
        if split[1] in found:
            both = some([printable(found[split[1]]), printable(path)])
            raise DataError(f"several lists for {split[1]}, give one of them as DATA: {both}")
        found[split[1]] = path
    inside = os.path.join(folder, "train")
    if "train" not in found or any(os.path.isdir(f"{inside}/{name}") for name in _listed(inside)):
        return {}
    return found


def _listed(folder: str) -> list[str]:
    """What is in a folder; nothing where that cannot be said, which its reader will tell."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def has_classes(path: str) -> bool:
    """Whether the file begins like a list of pictures and classes."""
    try:
        header = next(_headers(path))
        return bool(choose_columns(header, path, 1, Asked(path)))
    except (DataError, StopIteration):
        return False


def _headers(path: str) -> Iterator[Sequence[str]]:
    if _is_json(path):
        yield from (tuple(record) for _, record in json_records(path))
    else:
        yield read_table(path, delimiter).names


def _is_json(path: str) -> bool:
    start = beginning(path).lstrip()[:1]
    if start == "[":
        raise wrong(path, "a list in JSON; write one object in each line (JSON lines)", 1)
    return start == "{"


def delimiter(header: str) -> str:
    """What is between two cells: the mark that gives a column of pictures, or the most cells."""
    known = [mark for mark in DELIMITERS if usual(fields(header, mark), IMAGE_COLUMNS)]
    return max(known or DELIMITERS, key=lambda mark: len(fields(header, mark)))


class Line(NamedTuple):
    """A row of a table, or an object of JSON."""

    line: int
    """Where it begins."""
    names: Sequence[str]
    """Of the columns, or keys."""
    header: int
    """The line of the names."""
    values: dict[str, Any]


def rows(path: str, asked: Asked, notes: list[str], on_wrong: OnWrong = stop) -> Iterator[Line]:
    """The lines of a list; at its end `notes` receives how many were empty.

    Args:
        path: The list.
        asked: Which columns are wanted.
        notes: What to say of it.
        on_wrong: Given a line that cannot be read.

    Raises:
        DataError: It is no list.
    """
    if _is_json(path):
        for line, record in json_records(path, on_wrong):
            yield Line(line, tuple(record), line, record)
        return
    table = read_table(path, delimiter, on_wrong)
    check_header(table, path, asked)
    named = Counter(name for name in table.names if name.strip())
    doubled = [printable(name) for name, number in named.items() if number > 1]
    if doubled:
        raise wrong(path, f"two columns are called {some(doubled)}; rename one", table.line)
    for line, cells in table.rows:
        yield Line(line, table.names, table.line, dict(zip(table.names, cells, strict=True)))
    notes += table.blank_notes(path)


def read_list(path: str, asked: Asked, notes: list[str], *, labels: bool = True) -> ReadList:
    """What one list says of each picture; names are tidy, and not yet looked for in a folder.

    Raises:
        DataError: It is damaged or contradicts itself.
    """
    read = ReadList(path, faults=None if asked.faults is None else [])
    table = not _is_json(path)
    first: Sequence[str] = ()
    for row in rows(path, asked, notes, lambda error: leave(read.faults, "bad_line", error)):
        if read.columns is None:
            read.columns = choose_columns(row.names, path, row.header, asked, labels=labels)
            first = row.names
        _take(read, row, read.columns, asked, table=table, labels=labels, first=first)
    if not read.entries and not read.faults:
        raise wrong(path, "no pictures in it; expected a line for each")
    if read.columns is not None and read.columns.unused and labels:
        unused = some([printable(name) for name in read.columns.unused])
        label = printable(read.columns.label)
        notes.append(f"{printable(path)}: classes from {label}; not used: {unused}")
    if table:
        notes += comma_notes(path, (entry.labels for entry in read.entries.values()))
    if read.twice and read.faults is None:
        pictures = count(read.twice, "line")
        notes.append(f"{printable(path)}: left out {pictures} that name a picture again")
    return read


def _take(
    read: ReadList,
    row: Line,
    columns: LabelColumns,
    asked: Asked,
    *,
    table: bool,
    labels: bool,
    first: Sequence[str],
) -> None:
    """Add what one line says to `read`, or leave it out as a fault."""
    path, (line, names, _, values) = read.path, row
    kind, name = "bad_line", ""
    try:
        if names != first:
            check_record(names, columns, asked, path, line, labels=labels)
        written = values.get(columns.image)
        if not isinstance(written, str):
            raise wrong(path, f"{columns.image}: expected a file name in each line", line)
        kind = "bad_path"
        name = tidy_name(
            written, path, line, absolute=True, outside=asked.allow_outside, remedy=INSIDE
        )
        kind = "bad_line"
        value = values.get(columns.label)
        if table and isinstance(value, str):
            value = split_cell(value)
        found = cell_labels(value, path, line) if labels else ()
        read.several = read.several or (line if len(found) > 1 else 0)
        read.empty = read.empty or (line if not found else 0)
        split = _split(values.get(columns.split), path, line) if columns.split else ""
        group = cell_group(values.get(columns.group), path, line) if columns.group else ""
        kind = "contradiction"
        read.add(name, Entry(line, found, split, group))
    except DataError as error:
        leave(read.faults, kind, error, *filter(None, [name]))


def _split(value: object, path: str, line: int) -> str:
    name = str("" if value is None else value).strip().lower()
    if name not in SPLIT_NAMES:
        hint = nearest(name, SPLIT_NAMES)
        expected = ", ".join(SPLIT_NAMES)
        said = f"{name!a}" if name else "nothing"
        raise wrong(path, f"{SPLIT_COLUMN} is {said}; expected {expected}{hint}", line)
    return name
