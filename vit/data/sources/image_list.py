"""Reads lists of images with classes, captions, or both.

    image,label            {"image": "1.jpg", "label": "cat"}
    1.jpg,cat              {"image": "2.jpg", "labels": ["cat", "dog"]}
    2.jpg,cat|dog          {"image": "3.jpg", "captions": ["a red bus", "a bus at a stop"]}

The data flow, the same for all:

    1. list_files     DATA -> the lists, by the split in their names
    2. list_formats   a list -> its format (table, JSON lines; for captions also COCO)
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
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vit.class_tree import SEPARATOR
from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.sources.dataset_problem import Problem, Problems, all_skipped_error, skip_or_raise
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.image_name_lookup import folder_names
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
from vit.data.sources.number_columns import NumberColumn, read_numbers, split_cell
from vit.data.sources.table_reader import BadLines, json_kind, wrong
from vit.errors import DataError
from vit.text import join_names, plural, printable, without_formula_guards

MOST_NUMBERS = 0.9
"""Share of numbers beyond which a text in their column is a mistake."""


class Entry(NamedTuple):
    """A row of a list, or the rows of one image."""

    name: str
    line: int
    """The first that names it."""
    labels: tuple[str, ...] = ()
    split: str = ""
    group: str = ""
    captions: tuple[str, ...] = ()
    """In the order of the list; they may be empty or repeated."""
    cells: tuple[str, ...] = ()
    """Of the columns `DatasetSpec.columns`, or empty."""
    numbers: tuple[Any, ...] = ()
    """Of the columns `DatasetSpec.numbers`, a text of `DatasetSpec.texts`; the cells themselves
    until all lines are read."""
    labelled: bool = True
    """Whether the line says which classes the image has, or that it has none of them."""


@dataclass
class ImageList:
    """The contents of one list: its `rows`, and once they are placed, one entry for each image."""

    path: str
    problems: Problems = None
    """Receives errors of rows; None: they are raised, up to ten lines in one error."""
    has_captions: bool = False
    """Whether it is a list of captions, where an image may have a line for each."""
    rows: list[Entry] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    columns: Columns | None = None
    """Of the first row."""
    is_table: bool = False
    multilabel: int = 0
    """The first line with several classes, or 0."""
    units: tuple[str | None, ...] = ()
    """Of the numbers; None of those that are all empty."""
    relabelled: list[tuple[str, Entry, Entry]] = field(default_factory=list)
    """Images that have another class in another line, and both lines."""
    bad: BadLines = field(default_factory=BadLines)

    def report(self, kind: str, error: DataError, *images: str) -> None:
        """Collect the error of a row, which is left out."""
        if self.problems is None:
            self.bad.add(error)
        else:
            self.problems.append(Problem(kind, str(error), images))

    def place(self, find: Callable[[Entry], str | None], notes: list[str]) -> list[Entry]:
        """Fill `entries` with the images that `find` returns; the rows of which it finds none."""
        places: dict[str, str | None] = {}
        lacking, repeats = [], 0
        for row in self.rows:
            try:
                if row.name not in places:
                    places[row.name] = find(row)
            except DataError as error:
                self.report("bad_path", error, row.name)
                continue
            image = places[row.name]
            if image is None:
                lacking.append(row)
            else:
                repeats += self._add(image, row)
        self.bad.raise_all()
        if repeats and self.problems is None:
            lines = plural(repeats, "line")
            notes.append(f"{printable(self.path)}: left out {lines} that name an image again")
        return lacking

    def _add(self, image: str, row: Entry) -> bool:
        """Add a row, unless it contradicts another; whether it only repeats one."""
        earlier = self.entries.setdefault(image, row)
        if earlier is row:
            return False
        for what in ("split", "group"):
            one, other = getattr(earlier, what), getattr(row, what)
            if one != other:
                both = f"{printable(one) or 'none'} (line {earlier.line}) and {printable(other)}"
                text = f"{row.name} is in two {what}s, {both}"
                self.report("contradiction", wrong(self.path, text, row.line), image)
                return False
        if earlier.numbers != row.numbers:
            text = f"{row.name} has other numbers in line {earlier.line}; correct one of them"
            self.report("contradiction", wrong(self.path, text, row.line), image)
            return False
        same = {*earlier.labels} == {*row.labels}
        if same and not self.has_captions:
            self._report_repeated(image, earlier, row)
            return True
        # each caption of an image has a line, and one of them may give its class
        if not same and (not self.has_captions or (earlier.labels and row.labels)):
            self.relabelled.append((image, earlier, row))
        self.entries[image] = earlier._replace(
            labels=tuple(dict.fromkeys((*earlier.labels, *row.labels))),
            captions=earlier.captions + row.captions,
            labelled=earlier.labelled or row.labelled,
        )
        return False

    def _report_repeated(self, image: str, earlier: Entry, row: Entry) -> None:
        """`vit check` lists each line that repeats another; a training has a note."""
        if self.problems is not None:
            again = wrong(self.path, f"{row.name} again, as in line {earlier.line}", row.line)
            self.report("repeated_line", again, image)

    def check_single(self) -> None:
        """Require one class an image; in a list of captions, at most one.

        Other images are left out; of two classes the first one stays.
        """
        first: dict[str, Entry] = {}
        for image, merged, row in self.relabelled:
            earlier = first.setdefault(image, merged)
            if image in self.entries:
                self.entries[image] = self.entries[image]._replace(labels=earlier.labels)
            if {*earlier.labels} == {*row.labels}:
                self._report_repeated(image, earlier, row)
            else:
                self.report("contradiction", self.two_labels(earlier, row), image)
        for image, entry in [*self.entries.items()]:
            if len(entry.labels) > 1:
                advice = (
                    "--task multilabel learns several; a name that has a | or ; needs JSON lines"
                )
                error = wrong(self.path, f"several labels; {advice}", entry.line)
                self.report("several_labels", error, image)
                del self.entries[image]
            elif not entry.labels and not self.has_captions:
                self.report("no_label", no_label(self.path, entry.line), image)
                del self.entries[image]
        self.bad.raise_all()

    def report_merged(self, notes: list[str]) -> None:
        """Report the images whose lines have other labels: an image has all of them.

        `vit check` gets each of them, where a cell can have several labels: such lines may be
        contradictions. Of a list with a line for each label there is a note.
        """
        merged = {image: (one, other) for image, one, other in reversed(self.relabelled)}
        if self.problems is not None and self.multilabel:
            for image, (one, other) in reversed(merged.items()):
                text = f"{self._both_labels(one, other)}: all of them are taken; correct one"
                self.report("merged_labels", wrong(self.path, text, other.line), image)
        elif merged:
            one, other = [*merged.values()][-1]
            notes.append(
                f"{printable(self.path)}: {plural(len(merged), 'image')} with other labels in "
                f"another line, such as {other.name} in lines {one.line} and {other.line}: all of "
                "them are taken"
            )

    @staticmethod
    def _both_labels(earlier: Entry, row: Entry) -> str:
        both = " and ".join(printable("|".join(e.labels) or "none") for e in (earlier, row))
        return f"{row.name} has two labels, {both}, the first in line {earlier.line}"

    def two_labels(self, earlier: Entry, row: Entry) -> DataError:
        """The error for an image that has another class in another line."""
        both = self._both_labels(earlier, row)
        return wrong(
            self.path, f"{both}; correct one, or learn several with --task multilabel", row.line
        )


def read_list(path: str, spec: DatasetSpec, notes: list[str]) -> ImageList:
    """The rows of one list; names of images are not yet looked up in a folder."""
    contents = ImageList(path, None if spec.problems is None else [], spec.captions)
    columns: dict[tuple[str, ...], Columns] = {}

    def on_error(error: DataError) -> None:
        contents.report("bad_line", error)

    for row in read_rows(path, spec, notes, on_error):
        if contents.columns is None:
            contents.columns = choose_columns(row.names, path, row.header, spec)
            contents.is_table = row.is_table
            columns[tuple(row.names)] = contents.columns
            notes += unused_notes(contents.columns, path, spec)
        try:
            _add_row(contents, row, _columns_of(row, contents, columns, spec), spec)
        except DataError as error:
            on_error(error)
    if spec.numbers and contents.columns:
        _read_numbers(contents, contents.columns.numbers, spec, notes)
    contents.bad.raise_all()
    if not contents.rows and not contents.problems:
        what = "no captions" if spec.captions else "no images"
        raise wrong(path, f"{what} in it; expected a line for each")
    if contents.is_table:
        notes += comma_notes(path, (entry.labels for entry in contents.rows))
    return contents


def _read_numbers(
    contents: ImageList, names: Sequence[str], spec: DatasetSpec, notes: list[str]
) -> None:
    """Replace the cells of columns of numbers by their numbers, or report their errors."""
    rows = contents.rows
    lines = [row.line for row in rows]
    cells = zip(spec.numbers, zip(*(row.numbers for row in rows), strict=True), strict=False)
    columns = [
        NumberColumn([*one], {}, None, decimal_commas=False)
        if target in (spec.texts or ())
        else read_numbers(one, lines, is_table=contents.is_table)
        for target, one in cells
    ]
    contents.units, contents.rows = tuple(column.unit for column in columns), []
    for name, column in zip(names, columns, strict=False):
        forms = [f"in {column.unit}"] if column.unit else []
        forms += ["with decimal commas"] if column.decimal_commas else []
        if forms and not column.errors:
            said = f"{printable(name.strip())}: {' and '.join(forms)}"
            notes.append(f"{printable(contents.path)}: numbers of {said}")
    for place, row in enumerate(rows):
        numbers = tuple(column.values[place] for column in columns)
        found = zip(names, columns, strict=True)
        errors = [
            f"{name.strip()}: {one.errors[place]}" for name, one in found if place in one.errors
        ]
        if not errors and all(one != one for one in numbers):  # NaN
            errors = [f"nothing in {join_names(names)}; fill it in, or leave the line out"]
        if errors:
            contents.report("bad_line", wrong(contents.path, errors[0], row.line), row.name)
        else:
            contents.rows.append(row._replace(numbers=numbers))


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
    path, line, values = contents.path, row.line, row.values
    written = values.get(columns.image)
    if not isinstance(written, str):
        kind = f"is {json_kind(written)}; expected a file name in each line"
        raise wrong(path, f"{columns.image} {kind}", line)
    try:
        name = written_name(written, path, line, outside=spec.allow_outside)
    except DataError as error:
        contents.report("bad_path", error)
        return
    try:
        captions: list[str] = []
        for column in columns.captions:
            value = values.get(column)
            captions += cell_captions(value, column, path, line, is_table=row.is_table)
        labels: tuple[str, ...] | None = ()
        if spec.labels:
            value = values.get(columns.label)
            if row.is_table and isinstance(value, str):
                value = without_formula_guards(value)
            labels = cell_labels(value, path, line, is_table=row.is_table and bool(columns.label))
        split = ""
        if columns.split and spec.reads_splits:
            split = cell_split(values.get(columns.split), path, line)
        group, *cells = (
            cell_group(values.get(column), path, line) if column else ""
            for column in (columns.group, *columns.more)
        )
        cells_of_targets = (values.get(column) for column in columns.numbers)
        numbers = tuple(
            _target_class(cell, path, line, is_table=row.is_table)
            if target in (spec.texts or ())
            else cell
            for target, cell in zip(spec.numbers, cells_of_targets, strict=True)
        )
    except DataError as error:
        contents.report("bad_line", error, name)
        return
    labelled, labels = labels is not None, labels or ()
    contents.multilabel = contents.multilabel or (line if len(labels) > 1 else 0)
    contents.rows.append(
        Entry(name, line, labels, split, group, (*captions,), (*cells,), numbers, labelled)
    )


def _target_class(value: Any, path: str, line: int, *, is_table: bool) -> str | float:
    """The class in a cell of a column of texts; NaN of an empty one."""
    if is_table and isinstance(value, str):
        value = without_formula_guards(value)
    labels = cell_labels(value, path, line, is_table=is_table)
    if labels is not None and len(labels) != 1:
        text = f"{join_names(labels) or 'an empty list'}: an image has one class of each column"
        raise wrong(path, f"{text}; write one, or leave the cell empty", line)
    return math.nan if labels is None else labels[0]


class PlacedList(NamedTuple):
    """A list whose images have paths."""

    split: str
    """In the name of the list, or empty."""
    contents: ImageList
    base: str
    """Folder that its names are relative to."""
    names: list[str]
    """Of its images, relative to that folder or absolute."""


def read_lists(spec: DatasetSpec) -> DatasetIndex:
    found = find_lists(spec)
    notes = [*found.notes]
    placed = _read_files(found, spec, notes)
    lists = [one.contents for one in placed]
    multilabel = spec.multilabel or (
        spec.multilabel is None and any(contents.multilabel for contents in lists)
    )
    named = {path for contents in lists for path in contents.entries}
    for contents in lists:
        if not multilabel and (spec.labels or spec.captions):
            contents.check_single()
            continue
        contents.report_merged(notes)
        if contents.multilabel and spec.problems is not None:
            advice = "so an image may have several, or none, as --task multilabel learns them"
            where = f"{printable(contents.path)}, line {contents.multilabel}"
            notes.append(f"{where}: several labels, {advice}")
    if spec.problems is not None:
        for contents in lists:
            spec.problems.extend(contents.problems or ())
        if not any(contents.entries for contents in lists):
            raise all_skipped_error(spec.problems)
        named |= {path for error in spec.problems for path in error.images}
    bases = {one.base for one in placed}
    root = found.root or Path(bases.pop() if len(bases) == 1 else spec.images or spec.data)
    if spec.split is None:
        folders = [folder for one in placed for folder in common_folders(one.base, one.names)]
        notes += unlisted_notes(named, folders, str(root))
    grouped = [bool(contents.columns and contents.columns.group) for contents in lists]
    if any(grouped) and not all(grouped):
        raise DataError(f"group={spec.group}: a column of some lists, not of all")
    splits: dict[str, list[ImageRecord]] = {}
    locations: dict[str, str] = {}
    cells = zip(*(one.numbers for each in lists for one in each.entries.values()), strict=True)
    texts = [sorted({one for one in column if isinstance(one, str)}) for column in cells]
    places = [{text: float(place) for place, text in enumerate(column)} for column in texts]
    for one in placed:
        for path, entry in one.contents.entries.items():
            split = one.split or entry.split
            numbers = tuple(
                places[target].get(value, value) for target, value in enumerate(entry.numbers)
            )
            record = ImageRecord(
                path, entry.labels, entry.group, entry.captions, entry.cells, numbers
            )
            splits.setdefault(split, []).append(record)
            column = f" (split {split})" if entry.split and not one.split else ""
            locations.setdefault(split, printable(one.contents.path) + column)
    locations |= {split: printable(path) for split, path in found.files.items() if split}
    if spec.captions:
        splits = drop_uncaptioned(splits, notes)
        if spec.labels:
            base_of = {one.split: one.base for one in placed}
            names = {os.path.basename(contents.path) for contents in lists}
            if names <= {*METADATA} and spec.images is None:
                base_of = {split: str(root / split) for split in base_of}
            for split, records in splits.items():
                base = base_of.get(split, base_of.get("", ""))
                splits[split] = _with_folder_labels(records, base, placed, spec)
    kind = "list" if len(placed) > 1 or spec.captions else "split"
    columns = dict.fromkeys(name for one in lists if one.columns for name in one.columns.unused)
    return DatasetIndex(
        root,
        splits,
        locations,
        notes,
        bool(multilabel),
        all(grouped),
        kind,
        (*columns,),
        units=_common_units(lists, spec),
        target_classes=tuple(map(tuple, texts)) if any(texts) else (),
    )


def _common_units(lists: Sequence[ImageList], spec: DatasetSpec) -> tuple[str, ...]:
    """The unit of each column of numbers, the same in all lists."""
    found = []
    for place, name in enumerate(spec.numbers):
        units = {one.units[place]: one.path for one in lists if one.units}
        units.pop(None, None)
        expected = spec.units[place] if spec.units else None
        if expected is not None and {*units} - {"", expected}:
            units[expected] = "the training"
        if len(units) > 1:
            both = join_names(f"{unit or 'no unit'} in {path}" for unit, path in units.items())
            raise DataError(f"target={name}: {both}; write all numbers in one unit, or none")
        found.append(next(iter(units), None) or "")
    return tuple(found)


def _with_folder_labels(
    records: Sequence[ImageRecord], base: str, placed: Sequence[PlacedList], spec: DatasetSpec
) -> list[ImageRecord]:
    """The images of a split with classes: those of the list, or the folders in `base`."""
    labelled = any(record.labels for record in records)
    above = os.path.join(os.path.normpath(base), "")
    found = []
    for record in records:
        folder, slash, _ = record.path.removeprefix(above).partition("/")
        if labelled and record.labels:
            found.append(record)
        elif slash and not labelled:
            found.append(record._replace(labels=(folder,)))
        else:
            lines = [
                f"{printable(one.contents.path)}, line {one.contents.entries[record.path].line}: "
                for one in placed
                if record.path in one.contents.entries
            ]
            lack = "no label, but others have one" if labelled else "no label and no class folder"
            where = f"{lines[0]}{printable(record.path)}"
            error = DataError(f"{where}: {lack}; expected a column label, or folders")
            skip_or_raise(spec.problems, "no_label", error, record.path)
    return found


def lines_of(spec: DatasetSpec, paths: Collection[str]) -> dict[str, str]:
    """Image path -> its list and line, for those that a list names; reads the lists again."""
    requested = set(paths)
    return {
        path: f"{contents.path}, line {entry.line}" if entry.line else contents.path
        for _, contents, *_ in _read_files(find_lists(spec), spec, [])
        for path, entry in contents.entries.items()
        if path in requested
    }


def images_in(path: str, notes: list[str] | None = None) -> list[str]:
    """The images that a list names, in its order; it needs no classes."""
    spec = DatasetSpec(path, allow_outside=True, labels=False, reads_splits=False)
    collected = [] if notes is None else notes
    contents = read_list(path, spec, collected)
    return [*_placed("", contents, spec, collected).contents.entries]


def list_rows(spec: DatasetSpec) -> dict[str, dict[str, Any]]:
    """Image path -> the cells of the first line that names it, by column, as the list has them."""
    found: dict[str, dict[str, Any]] = {}
    for _, contents, *_ in _read_files(find_lists(spec), spec, []):
        rows = {row.line: row.values for row in read_rows(contents.path, spec, [])}
        entries = contents.entries.items()
        found |= {path: rows[entry.line] for path, entry in entries if entry.line}
    return found


def text_columns(spec: DatasetSpec) -> dict[str, bool]:
    """The columns of `spec.numbers` of lists that have texts, by all cells of all splits, and
    whether each cell is a path.

    A text in a column of which more than 90 % are numbers is an error.
    """
    targets = spec.numbers
    numbers, errors = [0] * len(targets), [list[DataError]() for _ in targets]
    paths = [True] * len(targets)
    for path in find_lists(spec).files.values():
        columns: tuple[str, ...] = ()
        for row in read_rows(path, spec, []):
            columns = columns or choose_columns(row.names, path, row.header, spec).numbers
            for place, column in enumerate(columns):
                value = row.values.get(column)
                cell = split_cell(value, is_table=row.is_table)
                numbers[place] += cell.number is not None
                paths[place] &= not (cell.number or cell.error) or SEPARATOR in str(value)
                if cell.number is None and cell.error:
                    text = f"{targets[place]}: {cell.error}"
                    errors[place].append(wrong(path, text, row.line))
    for name, count, found in zip(targets, numbers, errors, strict=True):
        if not count and not found:
            raise DataError(f"target={name}: all cells of {spec.data} are empty; fill them in")
        if found and count > MOST_NUMBERS * (count + len(found)):
            raise found[0]
    found_in = zip(targets, paths, errors, strict=True)
    return {name: are_paths for name, are_paths, texts in found_in if texts}


def _read_files(found: ListFiles, spec: DatasetSpec, notes: list[str]) -> list[PlacedList]:
    """Read the lists, for evaluation only those of the split that is needed."""
    splits = [*found.files]
    if spec.texts is None:
        spec = dataclasses.replace(spec, texts=tuple(text_columns(spec)))
    if spec.split is not None and "" not in found.files:
        splits = spec.select_splits(splits)
    return [
        _placed(split, read_list(found.files[split], spec, notes), spec, notes) for split in splits
    ]


def _placed(split: str, contents: ImageList, spec: DatasetSpec, notes: list[str]) -> PlacedList:
    path = contents.path
    written = [row.name for row in contents.rows]
    base = images_folder(path, written, spec.images, notes, is_table=contents.is_table)
    # a list of captions may name images anywhere, unless their folder is given
    outside = spec.allow_outside or (spec.captions and spec.images is None)
    above = os.path.join(os.path.abspath(base), "")
    folder = folder_names(base)
    names: list[str] = []

    def path_of(name: str) -> str:
        return name if os.path.isabs(name) else os.path.normpath(os.path.join(base, name))

    def find(row: Entry) -> str:
        name = folder.find(row.name, contents.is_table) or tidy_path(row.name, path, row.line)
        check_inside(name, path, row.line, outside=spec.allow_outside)
        if os.path.isabs(name) and not name.startswith(above) and not outside:
            raise wrong(path, f"{name} lies outside of {above[:-1]}; {INSIDE}", row.line)
        names.append(name.removeprefix(above))
        return path_of(names[-1])

    earlier = len(contents.problems or ())
    contents.place(find, notes)
    if contents.problems is not None:  # those of rows that were not placed have a name
        for at, error in enumerate(contents.problems):
            if at < earlier or error.kind == "bad_path":
                images = tuple(map(path_of, error.images))
                contents.problems[at] = dataclasses.replace(error, images=images)
    return PlacedList(split, contents, base, names)
