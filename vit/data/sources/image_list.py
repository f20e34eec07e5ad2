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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.sources.dataset_spec import (
    SPLIT_NAMES,
    DatasetSpec,
    RowError,
    RowErrors,
    all_skipped_error,
    skip_or_raise,
)
from vit.data.sources.image_names import folder_names, suffix_notes
from vit.data.sources.list_columns import (
    INSIDE,
    Columns,
    cell_captions,
    cell_group,
    cell_labels,
    cell_split,
    check_inside,
    check_record,
    choose_columns,
    comma_notes,
    drop_uncaptioned,
    no_label,
    tidy_path,
    unused_notes,
    written_name,
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
from vit.data.sources.table_reader import BadLines, json_kind, wrong
from vit.errors import DataError
from vit.text import join_names, plural, printable, without_formula_guards


class Entry(NamedTuple):
    """An image of a list."""

    line: int
    """The first that names it."""
    labels: tuple[str, ...]
    split: str
    group: str
    captions: tuple[str, ...] = ()
    """In the order of the list; they may be empty or repeated."""
    cells: tuple[str, ...] = ()
    """Of the columns `DatasetSpec.columns`; empty where there is none."""
    labelled: bool = True
    """Whether the line says which classes the image has, or that it has none of them."""


@dataclass
class ImageList:
    """The contents of one list."""

    path: str
    entries: dict[str, Entry] = field(default_factory=dict)
    """By name of the image, as written until `placed` has found the image."""
    has_captions: bool = False
    """Whether it is a list of captions, where an image may have a line for each."""
    columns: Columns | None = None
    """Of the first row."""
    is_table: bool = False
    multilabel: int = 0
    """The first line with several classes, 0 if there is none."""
    repeats: int = 0
    """Lines that repeat an earlier one."""
    errors: RowErrors = None
    """Receives errors of lines, with names of images as in `entries`; None: the first is raised."""
    relabelled: list[tuple[str, Entry, Entry]] = field(default_factory=list)
    """Images that have another class in another line, and both lines."""
    guarded_labels: int = 0
    """Lines whose label had an apostrophe of `csv_text`, which is not part of it."""

    def add(self, name: str, entry: Entry) -> None:
        """Add a row; an image may occur again if the rows do not contradict each other."""
        earlier = self.entries.setdefault(name, entry)
        if earlier is entry:
            return
        for what in ("split", "group"):
            one, other = getattr(earlier, what), getattr(entry, what)
            if one != other:
                both = f"{printable(one) or 'none'} (line {earlier.line}) and {printable(other)}"
                raise wrong(self.path, f"{name} is in two {what}s, {both}", entry.line)
        same = {*earlier.labels} == {*entry.labels}
        if same and not self.has_captions:
            self._repeat(name, earlier, entry)
            return
        # each caption of an image has a line, and one of them may give its class
        if not same and (not self.has_captions or (earlier.labels and entry.labels)):
            self.relabelled.append((name, earlier, entry))
        self.entries[name] = earlier._replace(
            labels=tuple(dict.fromkeys((*earlier.labels, *entry.labels))),
            captions=earlier.captions + entry.captions,
            labelled=earlier.labelled or entry.labelled,
        )

    def _repeat(self, name: str, earlier: Entry, entry: Entry) -> None:
        self.repeats += 1
        if self.errors is not None:
            again = wrong(self.path, f"{name} again, as in line {earlier.line}", entry.line)
            self.errors.append(RowError("repeated_line", again, (name,)))

    def check_single(self) -> None:
        """Require one class an image; in a list of captions, at most one.

        If errors are collected, other images are removed, and of two classes the first one stays.
        """
        if self.multilabel and self.errors is None:
            raise self._several_labels(self.multilabel)
        first: dict[str, Entry] = {}
        for name, merged, entry in self.relabelled:
            earlier = first.setdefault(name, merged)
            if name in self.entries:
                self.entries[name] = self.entries[name]._replace(labels=earlier.labels)
            if {*earlier.labels} == {*entry.labels}:
                self._repeat(name, earlier, entry)
            else:
                error = self.two_labels(name, earlier, entry)
                skip_or_raise(self.errors, "contradiction", error, name)
        for name, entry in [*self.entries.items()]:
            if not entry.labels and not self.has_captions:
                skip_or_raise(self.errors, "no_label", no_label(self.path, entry.line), name)
                del self.entries[name]
            elif len(entry.labels) > 1:
                skip_or_raise(self.errors, "several_labels", self._several_labels(entry.line), name)
                del self.entries[name]

    def placed(self, find: Callable[[str, Entry], str | None]) -> tuple["ImageList", list[str]]:
        """The list by the images that its names mean, and the names that mean none."""
        found: dict[str, str | None] = {}
        moved = dataclasses.replace(self, entries={}, relabelled=[])
        bad = BadLines()
        for name, entry in self.entries.items():
            kind = "bad_path"
            try:
                found[name] = place = find(name, entry)
                kind = "contradiction"
                if place is not None:
                    moved.add(place, entry)
            except DataError as error:
                if self.errors is None:
                    bad.add(error)
                else:
                    skip_or_raise(self.errors, kind, error, name)
        bad.raise_all()
        images = {name: place for name, place in found.items() if place is not None}
        moved.relabelled = [
            *((images[name], one, two) for name, one, two in self.relabelled if name in images),
            *moved.relabelled,
        ]
        if self.errors is not None:
            errors = [
                one._replace(images=tuple(images.get(name, name) for name in one.images))
                for one in self.errors
            ]
            moved.errors = sorted(errors, key=lambda one: getattr(one.error, "line", 0))
        return moved, [name for name, place in found.items() if place is None]

    def report_merged(self, notes: list[str]) -> None:
        """Report the images whose lines have other labels: an image has all of them.

        `vit check` gets each of them, where a cell can have several labels: such lines may be
        contradictions. Of a list with a line for each label there is a note.
        """
        merged = {name: (one, other) for name, one, other in reversed(self.relabelled)}
        if not merged:
            return
        if self.errors is not None and self.multilabel:
            self.errors += [
                RowError("merged_labels", self._merged(name, *entries), (name,))
                for name, entries in reversed(merged.items())
            ]
            return
        name, (one, other) = [*merged.items()][-1]
        notes.append(
            f"{printable(self.path)}: {plural(len(merged), 'image')} with other labels in another "
            f"line, such as {name} in lines {one.line} and {other.line}: all of them are taken"
        )

    def _merged(self, name: str, one: Entry, other: Entry) -> DataError:
        own, others = (printable("|".join(entry.labels)) or "none" for entry in (one, other))
        return wrong(
            self.path,
            f"{name} is labelled {others}, and {own} in line {one.line}: all of them are taken; "
            "correct one, or keep both lines",
            other.line,
        )

    def _several_labels(self, line: int) -> DataError:
        advice = "--task multilabel learns several; a name that has a | or ; needs JSON lines"
        return wrong(self.path, f"several labels; {advice}", line)

    def two_labels(self, name: str, earlier: Entry, entry: Entry) -> DataError:
        """The error for an image that has another class in another line."""
        both = " and ".join(printable("|".join(e.labels) or "none") for e in (earlier, entry))
        return wrong(
            self.path,
            f"{name} has two labels, {both}, the first in line {earlier.line}; correct one, or "
            "learn several with --task multilabel",
            entry.line,
        )


def read_list(path: str, spec: DatasetSpec, notes: list[str]) -> ImageList:
    """The contents of one list; names of images are not yet looked up in a folder."""
    errors: RowErrors = None if spec.row_errors is None else []
    contents = ImageList(path, has_captions=spec.captions, errors=errors)
    columns: dict[tuple[str, ...], Columns] = {}
    bad = BadLines()

    def on_error(error: DataError) -> None:
        if errors is None:
            bad.add(error)
        else:
            skip_or_raise(errors, "bad_line", error)

    for row in read_rows(path, spec, notes, on_error):
        if contents.columns is None:
            contents.columns = choose_columns(row.names, path, row.header, spec)
            contents.is_table = row.is_table
            columns[tuple(row.names)] = contents.columns
            notes += unused_notes(contents.columns, path, spec)
        try:
            chosen = _columns_of(row, contents, columns, spec)
        except DataError as error:
            on_error(error)
            continue
        try:
            _add_row(contents, row, chosen, spec)
        except DataError as error:  # errors are not collected for `vit check`
            bad.add(error)
    bad.raise_all()
    if not contents.entries and not errors:
        what = "no captions" if spec.captions else "no images"
        raise wrong(path, f"{what} in it; expected a line for each")
    if contents.is_table:
        notes += comma_notes(path, (entry.labels for entry in contents.entries.values()))
    if contents.guarded_labels:
        lines = plural(contents.guarded_labels, "line")
        notes.append(
            f"{printable(path)}: {lines} with an apostrophe before =, +, - or @ in the label, as "
            "CSV files of vit have it against formulas: read without it"
        )
    if contents.repeats and errors is None:
        lines = plural(contents.repeats, "line")
        notes.append(f"{printable(path)}: left out {lines} that name an image again")
    return contents


def _columns_of(
    row: Row,
    contents: ImageList,
    columns_by_keys: dict[tuple[str, ...], Columns],
    spec: DatasetSpec,
) -> Columns:
    """The columns of a row; records of captions may have other keys than the first one."""
    first = contents.columns
    assert first is not None
    if row.is_table:
        return first
    names = tuple(row.names)
    if names not in columns_by_keys:
        check_record(names, first, spec, contents.path, row.line)
        columns_by_keys[names] = first
        if spec.captions:
            own = choose_columns(names, contents.path, row.line, spec)
            columns_by_keys[names] = dataclasses.replace(own, split=first.split, group=first.group)
    return columns_by_keys[names]


def _add_row(contents: ImageList, row: Row, columns: Columns, spec: DatasetSpec) -> None:
    """Add a row to `contents`, or skip it and collect its error."""
    path, line, values = contents.path, row.line, row.values
    kind, name = "bad_line", ""
    try:
        written = values.get(columns.image)
        if not isinstance(written, str):
            kind_found = f"is {json_kind(written)}; expected a file name in each line"
            raise wrong(path, f"{columns.image} {kind_found}", line)
        kind = "bad_path"
        name = written_name(written, path, line, outside=spec.allow_outside)
        kind = "bad_line"
        captions: list[str] = []
        for column in columns.captions:
            value = values.get(column)
            captions += cell_captions(value, column, path, line, is_table=row.is_table)
        labels: tuple[str, ...] | None = ()
        if spec.labels:
            value = values.get(columns.label)
            if row.is_table and isinstance(value, str):
                plain = without_formula_guards(value)
                contents.guarded_labels += plain != value
                value = plain
            labels = cell_labels(value, path, line, is_table=row.is_table and bool(columns.label))
        labelled, labels = labels is not None, labels or ()
        contents.multilabel = contents.multilabel or (line if len(labels) > 1 else 0)
        split = ""
        if columns.split and spec.reads_splits:
            split = cell_split(values.get(columns.split), path, line)
        group = cell_group(values.get(columns.group), path, line) if columns.group else ""
        kind = "contradiction"
        cells = tuple(
            cell_group(values.get(column), path, line) if column else "" for column in columns.more
        )
        contents.add(name, Entry(line, labels, split, group, tuple(captions), cells, labelled))
    except DataError as error:
        skip_or_raise(contents.errors, kind, error, *filter(None, [name]))


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
    """The images of a list, or of the lists in a folder."""
    found = find_lists(spec)
    notes = [*found.notes]
    placed = _read_files(found, spec, notes)
    lists = [one.contents for one in placed]
    multilabel = spec.multilabel or (
        spec.multilabel is None and any(contents.multilabel for contents in lists)
    )
    named = {path for one in placed for path in one.entries}
    for contents in lists:
        if not multilabel and (spec.labels or spec.captions):
            contents.check_single()
            continue
        contents.report_merged(notes)
        if contents.multilabel and spec.row_errors is not None:
            advice = "so an image may have several, or none, as --task multilabel learns them"
            where = f"{printable(contents.path)}, line {contents.multilabel}"
            notes.append(f"{where}: several labels, {advice}")
    if spec.row_errors is not None:
        placed = _without_errors(placed, spec.row_errors)
        named |= {path for error in spec.row_errors for path in error.images}
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
    splits: dict[str, dict[str, ImageRecord]] = {}
    locations: dict[str, str] = {}
    for one in placed:
        for path, entry in one.entries.items():
            split = one.split or entry.split
            record = ImageRecord(path, entry.labels, entry.group, entry.captions, entry.cells)
            if earlier := splits.setdefault(split, {}).get(path):  # in another list of captions
                captions = earlier.captions + record.captions
                record = record._replace(labels=earlier.labels or record.labels, captions=captions)
            splits[split][path] = record
            column = f" (split {split})" if entry.split and not one.split else ""
            locations.setdefault(split, printable(one.contents.path) + column)
    for split, files in found.files.items():
        if split:
            path = files[0] if len(files) == 1 else os.path.join(str(found.root), split)
            locations[split] = printable(path)
    records = {split: [*images.values()] for split, images in splits.items()}
    if spec.captions:
        records = drop_uncaptioned(records, notes)
        records, locations, folders_of = _split_by_folders(
            placed, found, records, locations, spec, notes
        )
        if spec.labels:
            records = {
                split: _with_folder_labels(
                    images, folders_of.get(split, folders_of.get("", "")), placed, spec
                )
                for split, images in records.items()
            }
    kind = "list" if len(placed) > 1 or spec.captions else "split"
    columns = dict.fromkeys(name for one in lists if one.columns for name in one.columns.unused)
    return DatasetIndex(
        root, records, locations, notes, bool(multilabel), all(grouped), kind, (*columns,)
    )


def _split_by_folders(
    placed: Sequence[PlacedList],
    found: ListFiles,
    splits: dict[str, list[ImageRecord]],
    locations: dict[str, str],
    spec: DatasetSpec,
    notes: list[str],
) -> tuple[dict[str, list[ImageRecord]], dict[str, str], dict[str, str]]:
    """The captioned images by the split folders that they lie in, if one list names them all.

    Returns:
        Images, location and folder of each split.
    """
    metadata = all(os.path.basename(one.contents.path) in METADATA for one in placed)
    bases = {one.split: one.base for one in placed}
    if metadata and spec.images is None:
        bases = {split: os.path.join(str(found.root), split).rstrip("/") for split in bases}
    if [*splits] != [""]:
        return splits, locations, bases
    base = bases[""]
    folders = {_first_folder(record.path, base) for record in splits[""]}
    if not {"train"} < folders <= {*SPLIT_NAMES}:
        return splits, locations, bases
    notes.append(f"the split is that of the folders: {join_names(sorted(folders))}")
    divided: dict[str, list[ImageRecord]] = {name: [] for name in folders}
    for record in splits[""]:
        divided[_first_folder(record.path, base)].append(record)
    bases = {name: os.path.join(base, name) for name in folders}
    return divided, {name: printable(folder) for name, folder in bases.items()}, bases


def _with_folder_labels(
    records: Sequence[ImageRecord], base: str, placed: Sequence[PlacedList], spec: DatasetSpec
) -> list[ImageRecord]:
    """The images of a split with classes: those of the list, or the folders in `base`."""
    labelled = any(record.labels for record in records)
    found = []
    for record in records:
        folder = _first_folder(record.path, base)
        labels = record.labels if labelled else (folder,) if folder else ()
        if labels:
            found.append(record._replace(labels=labels))
            continue
        lack = "no label, but others have one" if labelled else "no label and no class folder"
        where = printable(record.path)
        if labelled:
            one = next(one for one in placed if record.path in one.entries)
            line = f"{one.contents.path}, line {one.entries[record.path].line}"
            where += f" ({printable(line)})"
        error = DataError(f"{where}: {lack}; expected a column label, or folders")
        skip_or_raise(spec.row_errors, "no_label", error, record.path)
    return found


def _first_folder(path: str, base: str) -> str:
    """The folder directly in `base` that `path` lies in, empty if there is none."""
    above = os.path.join(os.path.normpath(base), "")
    folder, slash, _ = path.removeprefix(above).partition("/")
    return folder if slash else ""


def lines_of(spec: DatasetSpec, paths: Collection[str]) -> dict[str, str]:
    """Image path -> its list and line, for those that a list names; reads the lists again."""
    requested = set(paths)
    return {
        path: f"{one.contents.path}, line {entry.line}" if entry.line else one.contents.path
        for one in _read_files(find_lists(spec), spec, [])
        for path, entry in one.entries.items()
        if path in requested
    }


def images_in(path: str, notes: list[str] | None = None) -> list[str]:
    """The images that a list names, in its order; it needs no classes."""
    spec = DatasetSpec(path, allow_outside=True, labels=False, reads_splits=False)
    collected = [] if notes is None else notes
    contents = read_list(path, spec, collected)
    return [*_placed("", contents, spec, collected).entries]


def list_rows(spec: DatasetSpec) -> dict[str, dict[str, Any]]:
    """Image path -> the cells of the first line that names it, by column, as the list has them."""
    found: dict[str, dict[str, Any]] = {}
    for one in _read_files(find_lists(spec), spec, []):
        rows = {row.line: row.values for row in read_rows(one.contents.path, spec, [])}
        found |= {path: rows[entry.line] for path, entry in one.entries.items() if entry.line}
    return found


def _read_files(found: ListFiles, spec: DatasetSpec, notes: list[str]) -> list[PlacedList]:
    """Read the lists, for evaluation only those of the split that is needed."""
    splits = [*found.files]
    if spec.split is not None and "" not in found.files:
        splits = spec.select_splits(splits)
    return [
        _placed(split, read_list(path, spec, notes), spec, notes)
        for split in splits
        for path in found.files[split]
    ]


def _placed(split: str, contents: ImageList, spec: DatasetSpec, notes: list[str]) -> PlacedList:
    """The images of a list by path."""
    path = contents.path
    base = images_folder(path, contents.entries, spec.images, notes, is_table=contents.is_table)
    # a list of captions may name images anywhere, unless their folder is given
    outside = spec.allow_outside or (spec.captions and spec.images is None)
    above = os.path.join(os.path.abspath(base), "")
    names = folder_names(base)
    renamed: list[tuple[str, str]] = []

    def find(written: str, entry: Entry) -> str:
        name = names.find(written, contents.is_table) or tidy_path(written, path, entry.line)
        check_inside(name, path, entry.line, outside=spec.allow_outside)
        if os.path.isabs(name) and not name.startswith(above) and not outside:
            raise wrong(path, f"{name} lies outside of {above[:-1]}; {INSIDE}", entry.line)
        renamed.append((written, name))
        return name.removeprefix(above)

    contents, _ = contents.placed(find)
    notes += suffix_notes(path, renamed)
    entries = {_path_of(name, base): entry for name, entry in contents.entries.items()}
    return PlacedList(split, contents, base, entries)


def _path_of(name: str, base: str) -> str:
    return name if os.path.isabs(name) else os.path.normpath(os.path.join(base, name))


def _without_errors(placed: Sequence[PlacedList], errors: list[RowError]) -> list[PlacedList]:
    """The lists without their invalid lines; the errors of those are added to `errors`."""
    kept: list[PlacedList] = []
    for one in placed:
        errors += [
            error._replace(images=tuple(_path_of(name, one.base) for name in error.images))
            for error in one.contents.errors or ()
        ]
        names = one.contents.entries
        kept.append(one._replace(entries={_path_of(n, one.base): e for n, e in names.items()}))
    if not any(one.entries for one in kept):
        raise all_skipped_error(errors)
    return kept
