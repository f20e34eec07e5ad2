"""Reads lists of images with classes, captions, or both.

    image,label            {"image": "1.jpg", "label": "cat"}
    1.jpg,cat              {"image": "2.jpg", "labels": ["cat", "dog"]}
    2.jpg,cat|dog          {"image": "3.jpg", "captions": ["a red bus", "a bus at a stop"]}

The data flow, the same for all:

    1. list_files     DATA -> the lists, by the split in their names
    2. list_formats   a list -> its format (table, JSON lines; for captions also COCO, token file)
    3. table_reader   text -> cells or JSON values, with line numbers
    4. list_formats   -> `Row`: named columns and their values
    5. list_columns   the names -> `Columns`: which one is the image, captions, class, split, group
    6. list_columns   a row's cells -> checked values
    7. `ImageList`    the rows of each image -> one `Entry`; contradictions are errors
    8. list_files     the names -> the folder of the images; names -> paths, `PlacedList`
    9. `read_lists`   paths -> images by split: by the list's name, the column `split`, or a folder
   10. open_dataset   images -> classes by name, held-out images, samples
"""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.sources.dataset_spec import SPLIT_NAMES, DatasetSpec
from vit.data.sources.list_columns import (
    INSIDE,
    Columns,
    cell_captions,
    cell_group,
    cell_labels,
    cell_split,
    check_record,
    choose_columns,
    clean_path,
    comma_notes,
    no_label,
    unused_notes,
)
from vit.data.sources.list_files import (
    METADATA,
    ListFiles,
    common_folders,
    find_lists,
    images_folder,
    unlisted_notes,
)
from vit.data.sources.list_formats import Row, read_rows
from vit.data.sources.row_errors import Fault, Faults, leave, nothing_left
from vit.data.sources.table_reader import json_kind, wrong
from vit.errors import DataError, printable
from vit.text import join_names, plural


class Entry(NamedTuple):
    """An image of a list."""

    line: int
    """The first that names it."""
    labels: tuple[str, ...]
    split: str
    group: str


@dataclass
class ImageList:
    """The contents of one list."""

    path: str
    entries: dict[str, Entry] = field(default_factory=dict)
    """By name of the image, relative to the folder of the images or absolute."""
    captions: dict[str, list[str]] | None = None
    """Of each image, in the order of the list, without empty ones; None in a list of classes."""
    empty_captions: int = 0
    columns: Columns | None = None
    """Of the first row."""
    is_table: bool = False
    multilabel: int = 0
    """The first line with several classes, 0 if there is none."""
    unlabelled: int = 0
    """The first line without a class."""
    relabelled: tuple[str, Entry, Entry] | None = None
    """The first image that has another class in another line, and both lines."""
    repeats: int = 0
    """Lines that repeat an earlier one."""
    faults: Faults = None
    """Lines that are wrong, with names of images as in `entries`; None: the first is raised."""
    all_relabelled: list[tuple[str, Entry, Entry]] = field(default_factory=list)
    """As `relabelled`, all of them, if `faults` are collected."""

    def add(self, name: str, entry: Entry, captions: Sequence[str] = ()) -> None:
        """Add a row; an image may occur again if the rows do not contradict each other.

        Raises:
            DataError: Its rows have two splits or two groups.
        """
        if self.captions is not None:
            self.captions.setdefault(name, []).extend(captions)
        known = self.entries.setdefault(name, entry)
        if known is entry:
            return
        for what in ("split", "group"):
            one, other = getattr(known, what), getattr(entry, what)
            if one != other:
                both = f"{printable(one) or 'none'} (line {known.line}) and {printable(other)}"
                raise wrong(self.path, f"{name} is in two {what}s, {both}", entry.line)
        labels = tuple(dict.fromkeys((*known.labels, *entry.labels)))
        if {*known.labels} == {*entry.labels}:
            if self.captions is None:
                self._repeat(name, known, entry)
            return
        # each caption of an image has a line, and one of them may give its class
        if self.captions is None or (known.labels and entry.labels):
            self.relabelled = self.relabelled or (name, known, entry)
            if self.faults is not None:
                self.all_relabelled.append((name, known, entry))
        self.entries[name] = known._replace(labels=labels)

    def _repeat(self, name: str, known: Entry, entry: Entry) -> None:
        self.repeats += 1
        if self.faults is not None:
            again = wrong(self.path, f"{name} again, as in line {known.line}", entry.line)
            self.faults.append(Fault("repeated_line", again, (name,)))

    def check_single(self) -> None:
        """Refuse what an image of exactly one class cannot have.

        Raises:
            DataError: An image has several classes, or, in a list of classes, none.
        """
        if self.multilabel:
            raise self._several_labels(self.multilabel)
        if self.relabelled is not None:
            raise self._two_labels(*self.relabelled)
        if self.unlabelled and self.captions is None:
            raise no_label(self.path, self.unlabelled)

    def drop_unfit(self) -> None:
        """Leave out all that `check_single` refuses; of two labels the first stays.

        Raises:
            DataError: Faults are not collected.
        """
        first: dict[str, Entry] = {}
        for name, merged, entry in self.all_relabelled:
            known = first.setdefault(name, merged)
            if name in self.entries:
                self.entries[name] = known
            if {*known.labels} == {*entry.labels}:
                self._repeat(name, known, entry)
            else:
                leave(self.faults, "contradiction", self._two_labels(name, known, entry), name)
        for name, entry in [*self.entries.items()]:
            if not entry.labels:
                leave(self.faults, "no_label", no_label(self.path, entry.line), name)
            elif len(entry.labels) > 1:
                leave(self.faults, "several_labels", self._several_labels(entry.line), name)
            if len(entry.labels) != 1:
                del self.entries[name]

    def _several_labels(self, line: int) -> DataError:
        advice = "--task multilabel learns several; a name that has a | or ; needs JSON lines"
        return wrong(self.path, f"several labels; {advice}", line)

    def _two_labels(self, name: str, known: Entry, entry: Entry) -> DataError:
        both = " and ".join(printable("|".join(e.labels) or "none") for e in (known, entry))
        return wrong(
            self.path,
            f"{name} has two labels, {both}, the first in line {known.line}; correct one, or "
            "learn several with --task multilabel",
            entry.line,
        )


def read_list(path: str, spec: DatasetSpec, notes: list[str]) -> ImageList:
    """The contents of one list; names of images are not yet looked up in a folder.

    Raises:
        DataError: It is damaged or contradicts itself.
    """
    faults: Faults = None if spec.faults is None else []
    contents = ImageList(path, captions={} if spec.captions else None, faults=faults)
    columns: dict[tuple[str, ...], Columns] = {}
    for row in read_rows(path, spec, notes, lambda error: leave(faults, "bad_line", error)):
        if contents.columns is None:
            contents.columns = choose_columns(row.names, path, row.header, spec)
            contents.is_table = row.is_table
            columns[tuple(row.names)] = contents.columns
            notes += unused_notes(contents.columns, path, spec)
        try:
            chosen = _columns_of(row, contents, columns, spec)
        except DataError as error:
            leave(faults, "bad_line", error)
        else:
            _add_row(contents, row, chosen, spec)
    if not contents.entries and not faults:
        what = "no captions" if spec.captions else "no images"
        raise wrong(path, f"{what} in it; expected a line for each")
    if contents.is_table:
        notes += comma_notes(path, (entry.labels for entry in contents.entries.values()))
    if contents.repeats and faults is None:
        lines = plural(contents.repeats, "line")
        notes.append(f"{printable(path)}: left out {lines} that name an image again")
    return contents


def _columns_of(
    row: Row, contents: ImageList, known: dict[tuple[str, ...], Columns], spec: DatasetSpec
) -> Columns:
    """The columns of a row; records of captions may have other keys than the first one.

    Raises:
        DataError: A key of the record would be ignored, or one is missing.
    """
    first = contents.columns
    assert first is not None
    if row.is_table:
        return first
    names = tuple(row.names)
    if names not in known:
        check_record(names, first, spec, contents.path, row.line)
        known[names] = first
        if spec.captions:
            own = choose_columns(names, contents.path, row.line, spec)
            known[names] = dataclasses.replace(own, split=first.split, group=first.group)
    return known[names]


def _add_row(contents: ImageList, row: Row, columns: Columns, spec: DatasetSpec) -> None:
    """Add a row to `contents`, or leave it out as a fault."""
    path, line, values = contents.path, row.line, row.values
    kind, name = "bad_line", ""
    try:
        written = values.get(columns.image)
        if not isinstance(written, str):
            kind_found = f"is {json_kind(written)}; expected a file name in each line"
            raise wrong(path, f"{columns.image} {kind_found}", line)
        kind = "bad_path"
        name = clean_path(written, path, line, outside=spec.allow_outside)
        kind = "bad_line"
        captions: list[str] = []
        for column in columns.captions:
            value = values.get(column)
            captions += cell_captions(value, column, path, line, is_table=row.is_table)
        labels: tuple[str, ...] = ()
        if spec.labels:
            value = values.get(columns.label)
            labels = cell_labels(value, path, line, is_table=row.is_table and bool(columns.label))
        contents.multilabel = contents.multilabel or (line if len(labels) > 1 else 0)
        contents.unlabelled = contents.unlabelled or (line if not labels else 0)
        split = cell_split(values.get(columns.split), path, line) if columns.split else ""
        group = cell_group(values.get(columns.group), path, line) if columns.group else ""
        kind = "contradiction"
        kept = [caption for caption in captions if caption]
        contents.empty_captions += len(captions) - len(kept)
        contents.add(name, Entry(line, labels, split, group), kept)
    except DataError as error:
        leave(contents.faults, kind, error, *filter(None, [name]))


class PlacedList(NamedTuple):
    """A list whose images have paths."""

    split: str
    """In the name of the list; empty if there is none."""
    contents: ImageList
    base: str
    """Folder that its names are relative to."""
    entries: dict[str, Entry]
    """By path."""


def read_lists(spec: DatasetSpec) -> DatasetIndex:
    """The images of a list, or of the lists in a folder.

    Raises:
        DataError: A list is damaged, contradicts itself, or names an image outside of its folder.
    """
    found = find_lists(spec)
    notes = [*found.notes]
    placed = _read_files(found, spec, notes)
    lists = [one.contents for one in placed]
    multilabel = spec.multilabel or (
        spec.multilabel is None and any(contents.multilabel for contents in lists)
    )
    named = {path for one in placed for path in one.entries}
    if spec.faults is not None:
        placed = _without_faults(placed, spec.faults, notes, multilabel=bool(multilabel))
        named |= {path for fault in spec.faults for path in fault.images}
    elif not multilabel:
        for contents in lists:
            contents.check_single()
    bases = {one.base for one in placed}
    root = found.root or Path(bases.pop() if len(bases) == 1 else spec.images or spec.data)
    if spec.split is None:
        folders = [
            folder for one in placed for folder in common_folders(one.base, one.contents.entries)
        ]
        notes += unlisted_notes(named, folders, str(root))
    grouped = [bool(contents.columns and contents.columns.group) for contents in lists]
    if any(grouped) and not all(grouped):
        raise DataError(f"group={printable(spec.group)}: a column of some lists, not of all")
    if spec.captions:
        splits, where = _captioned_splits(placed, found, spec, notes)
        return DatasetIndex(root, splits, where, notes, False, all(grouped), "list")
    splits = {}
    where = {}
    for one in placed:
        for path, entry in one.entries.items():
            split = one.split or entry.split
            splits.setdefault(split, []).append(ImageRecord(path, entry.labels, entry.group))
            if split not in where:
                column = f" (split {split})" if entry.split and not one.split else ""
                where[split] = printable(one.contents.path) + column
    part = "list" if len(placed) > 1 else "split"
    return DatasetIndex(root, splits, where, notes, bool(multilabel), all(grouped), part)


def _captioned_splits(
    placed: Sequence[PlacedList], found: ListFiles, spec: DatasetSpec, notes: list[str]
) -> tuple[dict[str, list[ImageRecord]], dict[str, str]]:
    """The images with captions by split, and what a message calls each split.

    A single list without a split is that of training.

    Raises:
        DataError: No image has a caption, or one has no class although classes are read.
    """
    by_split: dict[str, dict[str, ImageRecord]] = {}
    texts: dict[tuple[str, str], list[str]] = {}
    lines: dict[str, str] = {}
    for one in placed:
        contents = one.contents
        for name, captions in (contents.captions or {}).items():
            path = _path_of(name, one.base)
            entry = one.entries[path]
            split = one.split or entry.split or "train"
            items = by_split.setdefault(split, {})
            known = items.get(path)
            labels = known.labels if known and known.labels else entry.labels
            items[path] = ImageRecord(path, labels, entry.group)
            texts.setdefault((split, path), []).extend(captions)
            lines.setdefault(path, f"{contents.path}, line {entry.line}")
    empty = sum(one.contents.empty_captions for one in placed)
    _drop_uncaptioned(by_split, texts, empty, notes)
    where = {
        split: printable(files[0] if len(files) == 1 else os.path.join(str(found.root), split))
        for split, files in found.files.items()
        if split
    }
    metadata = all(os.path.basename(one.contents.path) in METADATA for one in placed)
    bases = {one.split: one.base for one in placed}
    if metadata and spec.images is None:
        bases = {split: os.path.join(str(found.root), split).rstrip("/") for split in bases}
    if "" in bases and [*by_split] == ["train"]:
        base = bases["train"] = bases.pop("")
        below = {path: _first_folder(path, base) for path in by_split["train"]}
        folders = {*below.values()}
        if {"train"} < folders <= {*SPLIT_NAMES}:
            notes.append(f"the split is that of the folders: {join_names(sorted(folders))}")
            items = by_split["train"]
            by_split = {
                name: {path: item for path, item in items.items() if below[path] == name}
                for name in folders
            }
            bases = {name: os.path.join(base, name) for name in folders}
            where = {name: printable(folder) for name, folder in bases.items()}
    for split in by_split:
        column = "" if [*by_split] == ["train"] else f" (split {split})"
        where.setdefault(split, printable(placed[0].contents.path) + column)
    if spec.labels:
        for split, items in by_split.items():
            base = bases.get(split, bases.get("", ""))
            by_split[split] = _with_folder_labels(items, base, lines)
    return {split: [items[p] for p in sorted(items)] for split, items in by_split.items()}, where


def _drop_uncaptioned(
    by_split: dict[str, dict[str, ImageRecord]],
    texts: Mapping[tuple[str, str], Sequence[str]],
    empty: int,
    notes: list[str],
) -> None:
    """Give each image its captions, each once, and leave out images without any."""
    repeats, silent = 0, []
    for split, items in by_split.items():
        for path, item in [*items.items()]:
            captions = tuple(dict.fromkeys(texts[split, path]))
            repeats += len(texts[split, path]) - len(captions)
            items[path] = item._replace(captions=captions)
            if not captions:
                silent.append(path)
                del items[path]
    names = join_names([printable(path) for path in sorted(silent)])
    if empty:
        notes.append(f"left out {plural(empty, 'empty caption')}")
    if repeats:
        notes.append(f"left out {plural(repeats, 'caption')} that the same image has already")
    if silent:
        notes.append(f"left out {plural(len(silent), 'image')} without a caption: {names}")
    if not all(by_split.values()):
        raise DataError(f"{names}: no image has a caption")


def _with_folder_labels(
    items: Mapping[str, ImageRecord], base: str, lines: Mapping[str, str]
) -> dict[str, ImageRecord]:
    """The images of a split with classes: those of the list, or the folders in `base`.

    Raises:
        DataError: An image has no class.
    """
    labelled = any(item.labels for item in items.values())
    found = {}
    for path, item in items.items():
        labels = item.labels if labelled else tuple(filter(None, [_first_folder(path, base)]))
        if not labels:
            lack = "no label, but others have one" if labelled else "no label and no class folder"
            where = f"{printable(path)} ({printable(lines[path])})" if labelled else printable(path)
            raise DataError(f"{where}: {lack}; expected a column label, or folders")
        found[path] = item._replace(labels=labels)
    return found


def _first_folder(path: str, base: str) -> str:
    """The folder directly in `base` that `path` lies in, empty if there is none."""
    above = os.path.join(os.path.normpath(base), "")
    folder, slash, _ = path.removeprefix(above).partition("/")
    return folder if slash else ""


def lines_of(spec: DatasetSpec, paths: Collection[str]) -> dict[str, str]:
    """The list and the line of each of these images that a list names.

    The lists are read again: only errors about images need this.
    """
    wanted = set(paths)
    return {
        path: f"{one.contents.path}, line {entry.line}" if entry.line else one.contents.path
        for one in _read_files(find_lists(spec), spec, [])
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
    spec = DatasetSpec(path, allow_outside=True, labels=False)
    collected = [] if notes is None else notes
    contents = read_list(path, spec, collected)
    return [*_placed("", contents, spec, collected).entries]


def _read_files(found: ListFiles, spec: DatasetSpec, notes: list[str]) -> list[PlacedList]:
    """The lists, read; of those with a split in their name only the ones that are needed."""
    splits = [*found.files]
    # all of them for training: images that none of them names are reported
    if spec.split is not None and "" not in found.files:
        splits = spec.select_splits(splits)
    return [
        _placed(split, read_list(path, spec, notes), spec, notes)
        for split in splits
        for path in found.files[split]
    ]


def _placed(split: str, contents: ImageList, spec: DatasetSpec, notes: list[str]) -> PlacedList:
    """The images of a list by path.

    Raises:
        DataError: One of them lies outside of the folder, and `allow_outside` is not set.
    """
    base = images_folder(contents.path, contents.entries, spec.images, notes)
    # a list of captions may name images anywhere, unless their folder is given
    outside = spec.allow_outside or (spec.captions and spec.images is None)
    if any(os.path.isabs(name) for name in contents.entries):
        contents = _relative_to(contents, os.path.abspath(base), outside=outside)
    entries = {_path_of(name, base): entry for name, entry in contents.entries.items()}
    return PlacedList(split, contents, base, entries)


def _path_of(name: str, base: str) -> str:
    return name if os.path.isabs(name) else os.path.normpath(os.path.join(base, name))


def _without_faults(
    placed: Sequence[PlacedList], faults: list[Fault], notes: list[str], *, multilabel: bool
) -> list[PlacedList]:
    """The lists without lines that are wrong, which are added to `faults`.

    Raises:
        DataError: No line is left.
    """
    kept: list[PlacedList] = []
    for one in placed:
        contents, base = one.contents, one.base
        if not multilabel:
            contents.drop_unfit()
        elif contents.multilabel:
            advice = "so an image may have several, or none, as --task multilabel learns them"
            where = f"{printable(contents.path)}, line {contents.multilabel}"
            notes.append(f"{where}: several labels, {advice}")
        faults += [
            fault._replace(images=tuple(_path_of(name, base) for name in fault.images))
            for fault in contents.faults or ()
        ]
        entries = {_path_of(name, base): entry for name, entry in contents.entries.items()}
        kept.append(one._replace(entries=entries))
    if not any(one.entries for one in kept):
        raise nothing_left(faults)
    return kept


def _relative_to(contents: ImageList, base: str, *, outside: bool) -> ImageList:
    """`contents` with absolute names that lie in `base` relative to it.

    Raises:
        DataError: One lies elsewhere, and `outside` is not set.
    """
    above = os.path.join(base, "")
    captions = contents.captions
    moved = dataclasses.replace(
        contents,
        entries={},
        captions=None if captions is None else {},
        all_relabelled=[
            (name.removeprefix(above), one, other) for name, one, other in contents.all_relabelled
        ],
    )
    for name, entry in contents.entries.items():
        kind = "bad_path"
        try:
            if os.path.isabs(name) and not name.startswith(above) and not outside:
                advice = f"lies outside of {base}; {INSIDE}"
                raise wrong(contents.path, f"{name} {advice}", entry.line)
            kind = "contradiction"
            moved.add(name.removeprefix(above), entry, captions[name] if captions else ())
        except DataError as error:
            leave(moved.faults, kind, error, name)
    return moved
