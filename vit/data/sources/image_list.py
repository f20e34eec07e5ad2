"""Opens lists of images and their classes: finds the images' folder, and the splits.

What a list says of each image, line by line, and what it may not say twice.
Reads lists of images and their classes: CSV, TSV or lines of JSON.

    image,label            {"image": "1.jpg", "label": "cat"}
    1.jpg,cat              {"image": "2.jpg", "labels": ["cat", "dog"]}
    2.jpg,cat|dog

One list, whose column `split` may tell training from validation images, or a folder with
train.csv and val.csv. File names are relative to the folder of the images and stay inside.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vit.config.parser import nearest
from vit.data.captions.caption_files import IMAGE_COLUMNS
from vit.data.captions.caption_lists import SPLIT, images_folder
from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.sources.dataset_spec import SPLIT_NAMES, DatasetSpec
from vit.data.sources.list_columns import (
    SPLIT_COLUMN,
    LabelColumns,
    cell_group,
    cell_labels,
    check_header,
    check_record,
    choose_columns,
    comma_notes,
    common_folders,
    no_label,
    split_cell,
    tidy_name,
    unlisted_notes,
    usual,
)
from vit.data.sources.row_errors import Fault, Faults, leave, nothing_left
from vit.data.sources.table_reader import (
    OnWrong,
    beginning,
    fields,
    json_records,
    read_table,
    stop,
    wrong,
)
from vit.errors import DataError, printable
from vit.paths import did_you_mean
from vit.text import join_names, plural


class Entry(NamedTuple):
    """What a list says of an image."""

    line: int
    labels: tuple[str, ...]
    split: str
    group: str


@dataclass
class ReadList:
    """One list, read."""

    path: str
    entries: dict[str, Entry] = field(default_factory=dict)
    """By name of the image, relative to the folder of the images or absolute."""
    columns: LabelColumns | None = None
    multilabel: int = 0
    """The first line with several classes, 0 where there is none."""
    empty: int = 0
    """The first line without a class."""
    merging: tuple[str, Entry, Entry] | None = None
    """The first image that has another class in another line, and both lines."""
    twice: int = 0
    """Lines that say again what is known."""
    faults: Faults = None
    """Lines that are wrong, with names of images as in `entries`; None: the first is raised."""
    merged: list[tuple[str, Entry, Entry]] = field(default_factory=list)
    """As `merging`, all of them, if all faults are wanted."""

    def add(self, name: str, entry: Entry) -> None:
        """Take a line; an image may be named again where that is no contradiction."""
        known = self.entries.setdefault(name, entry)
        if known is entry:
            return
        for what in ("split", "group"):
            one, other = getattr(known, what), getattr(entry, what)
            if one != other:
                both = f"{printable(one) or 'none'} (line {known.line}) and {printable(other)}"
                raise wrong(self.path, f"{name} is in two {what}s, {both}", entry.line)
        if {*known.labels} == {*entry.labels}:
            self._repeat(name, known, entry)
            return
        labels = tuple(dict.fromkeys((*known.labels, *entry.labels)))
        self.merging = self.merging or (name, known, entry)
        if self.faults is not None:
            self.merged.append((name, known, entry))
        self.entries[name] = known._replace(labels=labels)

    def _repeat(self, name: str, known: Entry, entry: Entry) -> None:
        self.twice += 1
        if self.faults is not None:
            again = wrong(self.path, f"{name} again, as in line {known.line}", entry.line)
            self.faults.append(Fault("repeated_line", again, (name,)))

    def check_single(self) -> None:
        """Refuse what an image of exactly one class cannot have.

        Raises:
            DataError: An image has several classes, or none.
        """
        if self.multilabel:
            raise self._multilabel(self.multilabel)
        if self.merging is not None:
            raise self._two(*self.merging)
        if self.empty:
            raise no_label(self.path, self.empty)

    def leave_unfit(self) -> None:
        """Leave out all that `check_single` refuses; of two labels the first stays.

        Raises:
            DataError: Not all faults are wanted.
        """
        first: dict[str, Entry] = {}
        for name, merged, entry in self.merged:
            known = first.setdefault(name, merged)
            if name in self.entries:
                self.entries[name] = known
            if {*known.labels} == {*entry.labels}:
                self._repeat(name, known, entry)
            else:
                leave(self.faults, "contradiction", self._two(name, known, entry), name)
        for name, entry in [*self.entries.items()]:
            if not entry.labels:
                leave(self.faults, "no_label", no_label(self.path, entry.line), name)
            elif len(entry.labels) > 1:
                leave(self.faults, "several_labels", self._multilabel(entry.line), name)
            if len(entry.labels) != 1:
                del self.entries[name]

    def _multilabel(self, line: int) -> DataError:
        advice = "--task multilabel learns several; a name that has a | or ; needs JSON lines"
        return wrong(self.path, f"several labels; {advice}", line)

    def _two(self, name: str, known: Entry, entry: Entry) -> DataError:
        both = " and ".join(printable("|".join(e.labels) or "none") for e in (known, entry))
        return wrong(
            self.path,
            f"{name} has two labels, {both}, the first in line {known.line}; correct one, or "
            "learn several with --task multilabel",
            entry.line,
        )


SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
DELIMITERS = ",\t;|"
INSIDE = "say which folder holds the images with --images, or take it with --allow-outside"


def is_list(data: str) -> bool:
    """Whether `data` names a list of images, or a folder with one for each split."""
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
            both = join_names([printable(found[split[1]]), printable(path)])
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
    """Whether the file begins like a list of images and classes."""
    try:
        header = next(_headers(path))
        return bool(choose_columns(header, path, 1, DatasetSpec(path)))
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
    """What is between two cells: the mark that gives a column of images, or the most cells."""
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


def rows(
    path: str, asked: DatasetSpec, notes: list[str], on_wrong: OnWrong = stop
) -> Iterator[Line]:
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
        raise wrong(path, f"two columns are called {join_names(doubled)}; rename one", table.line)
    for line, cells in table.rows:
        yield Line(line, table.names, table.line, dict(zip(table.names, cells, strict=True)))
    notes += table.blank_notes(path)


def read_list(path: str, asked: DatasetSpec, notes: list[str], *, labels: bool = True) -> ReadList:
    """What one list says of each image; names are tidy, and not yet looked for in a folder.

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
        raise wrong(path, "no images in it; expected a line for each")
    if read.columns is not None and read.columns.unused and labels:
        unused = join_names([printable(name) for name in read.columns.unused])
        label = printable(read.columns.label)
        notes.append(f"{printable(path)}: classes from {label}; not used: {unused}")
    if table:
        notes += comma_notes(path, (entry.labels for entry in read.entries.values()))
    if read.twice and read.faults is None:
        images = plural(read.twice, "line")
        notes.append(f"{printable(path)}: left out {images} that name an image again")
    return read


def _take(
    read: ReadList,
    row: Line,
    columns: LabelColumns,
    asked: DatasetSpec,
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
        read.multilabel = read.multilabel or (line if len(found) > 1 else 0)
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


class _Opened(NamedTuple):
    """A list whose images have their places."""

    read: ReadList
    base: str
    """Folder that its names are relative to."""
    entries: dict[str, Entry]
    """By path."""


def read_lists(asked: DatasetSpec) -> DatasetIndex:
    """The images of a list, or of the lists in a folder.

    Raises:
        DataError: A list is damaged, contradicts itself, or names an image outside of its folder.
    """
    notes: list[str] = []
    opened = _open(asked, notes)
    reads = [one.read for one in opened.values()]
    multilabel = asked.multilabel or (
        asked.multilabel is None and any(read.multilabel for read in reads)
    )
    named = {path for one in opened.values() for path in one.entries}
    if asked.faults is not None:
        opened = _without_faults(opened, asked.faults, notes, multilabel=bool(multilabel))
        named |= {path for fault in asked.faults for path in fault.images}
    elif not multilabel:
        for read in reads:
            read.check_single()
    bases = {one.base for one in opened.values()}
    root = Path(bases.pop() if len(bases) == 1 else asked.images or asked.data)
    if asked.split is None:
        folders = [
            folder
            for one in opened.values()
            for folder in common_folders(one.base, one.read.entries)
        ]
        notes += unlisted_notes(named, folders, str(root))
    splits: dict[str, list[ImageRecord]] = {}
    where: dict[str, str] = {}
    part = "list" if len(opened) > 1 else "split"
    for name, one in opened.items():
        for path, entry in one.entries.items():
            split = name or entry.split
            splits.setdefault(split, []).append(ImageRecord(path, entry.labels, entry.group))
            if split not in where:
                column = f" (split {split})" if entry.split and not name else ""
                where[split] = printable(one.read.path) + column
    grouped = [bool(read.columns and read.columns.group) for read in reads]
    if any(grouped) and not all(grouped):
        raise DataError(f"group={printable(asked.group)}: a column of some lists, not of all")
    return DatasetIndex(root, splits, where, notes, bool(multilabel), all(grouped), part)


def lines_of(asked: DatasetSpec, paths: Collection[str]) -> dict[str, str]:
    """Where lists name these images: the list and the line of each that is in one.

    They are read again: it is only asked for images that are missing.
    """
    wanted = set(paths)
    return {
        path: f"{one.read.path}, line {entry.line}"
        for one in _open(asked, []).values()
        for path, entry in one.entries.items()
        if path in wanted
    }


def images_in(path: str, notes: list[str] | None = None) -> list[str]:
    """The images that a list names, in its order; it needs no classes.

    Args:
        path: The list.
        notes: Receives what of it is left out.

    Raises:
        DataError: It is damaged, or no list of images.
    """
    asked = DatasetSpec(path, allow_outside=True)
    told = [] if notes is None else notes
    read = read_list(path, asked, told, labels=False)
    return [*_placed(read, asked, told).entries]


def _open(asked: DatasetSpec, notes: list[str]) -> dict[str, _Opened]:
    """The lists by split; a single one under the empty name."""
    if asked.images is not None and not os.path.isdir(asked.images):
        hint = did_you_mean(asked.images)
        raise DataError(f"{printable(asked.images)}: no such folder of images{hint}")
    if not os.path.isdir(asked.data):
        read = read_list(asked.data, asked, notes)
        return {"": _placed(read, asked, notes)}
    files = lists_in(asked.data)
    names = ", ".join(printable(os.path.basename(path)) for path in files.values())
    notes.append(f"read the lists {names} of {printable(asked.data)}")
    others = [
        printable(name)
        for name in sorted(os.listdir(asked.data))
        if name.lower().endswith(SUFFIXES) and os.path.join(asked.data, name) not in files.values()
    ]
    if others:
        notes.append(
            f"left out lists without a split in their name, or classes: {join_names(others)}"
        )
    # all of them where one trains: what none of them names is told
    wanted = files if asked.split is None else asked.select_splits(files)
    return {split: _placed(read_list(files[split], asked, notes), asked, notes) for split in wanted}


def _placed(read: ReadList, asked: DatasetSpec, notes: list[str]) -> _Opened:
    """The images of a list by path.

    Raises:
        DataError: One of them lies outside of the folder, and that was not asked for.
    """
    within = [name for name in read.entries if not os.path.isabs(name)]
    base = images_folder(read.path, within, asked.images, notes)
    if len(within) < len(read.entries):
        read = _made_relative(read, os.path.abspath(base), outside=asked.allow_outside)
    entries = {_path_of(name, base): entry for name, entry in read.entries.items()}
    return _Opened(read, base, entries)


def _path_of(name: str, base: str) -> str:
    return name if os.path.isabs(name) else os.path.normpath(os.path.join(base, name))


def _without_faults(
    opened: Mapping[str, _Opened], faults: list[Fault], notes: list[str], *, multilabel: bool
) -> dict[str, _Opened]:
    """The lists without lines that are wrong, which go to `faults`.

    Raises:
        DataError: No line is left.
    """
    kept: dict[str, _Opened] = {}
    for split, one in opened.items():
        read, base = one.read, one.base
        if not multilabel:
            read.leave_unfit()
        elif read.multilabel:
            advice = "so an image may have several, or none, as --task multilabel learns them"
            notes.append(
                f"{printable(read.path)}, line {read.multilabel}: several labels, {advice}"
            )
        faults += [
            fault._replace(images=tuple(_path_of(name, base) for name in fault.images))
            for fault in read.faults or ()
        ]
        entries = {_path_of(name, base): entry for name, entry in read.entries.items()}
        kept[split] = one._replace(entries=entries)
    if not any(one.entries for one in kept.values()):
        raise nothing_left(faults)
    return kept


def _made_relative(read: ReadList, base: str, *, outside: bool) -> ReadList:
    """`read` with absolute names that lie in `base` relative to it.

    Raises:
        DataError: One lies elsewhere, and `outside` is not set.
    """
    above = os.path.join(base, "")
    moved = dataclasses.replace(
        read,
        entries={},
        merged=[(name.removeprefix(above), one, other) for name, one, other in read.merged],
    )
    for name, entry in read.entries.items():
        kind = "bad_path"
        try:
            if os.path.isabs(name) and not name.startswith(above) and not outside:
                advice = f"lies outside of {base}; {INSIDE}"
                raise wrong(read.path, f"{name} {advice}", entry.line)
            kind = "contradiction"
            moved.add(name.removeprefix(above), entry)
        except DataError as error:
            leave(moved.faults, kind, error, name)
    return moved
