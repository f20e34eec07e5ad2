"""Lists that people edit beside a dataset: labels, corrected labels, images that are left out.

    labels         a list of images and classes: the labelled images, and no other is used
    exclude        a list of images, each of which is left out
    corrections    a list of images and classes, each of which gets that class

The lists are those of `vit suggest` and `vit check --write-list`, or any other list
(vit/data/sources/image_list.py).
Names are relative to the folder of the data, or paths. CSV files for spreadsheets have an
apostrophe before names that would be formulas, and escapes for control characters: `'=a/1.jpg` is
`=a/1.jpg`.
"""

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from vit.config.parser import nearest
from vit.data.archives import relative
from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.file_walk import IMAGE_SUFFIXES
from vit.data.sources.image_list import Entry, read_list
from vit.data.sources.list_columns import SEPARATORS, Columns
from vit.errors import ConfigError, DataError
from vit.text import csv_text, plural, printable


def apply_labels(index: DatasetIndex, spec: DatasetSpec) -> DatasetIndex:
    """The images of `index` that `spec.label_list` labels, with those labels.

    Images that it does not name, and rows without a label, are not used; with `spec.unlabelled`
    those of the training split are kept apart. A column `split` replaces the split of the source,
    and a column of the name `spec.group` its groups, of rows without a label too. The columns of
    images and labels that `spec` names are those of the list.

    Raises:
        DataError: The list cannot be read, has no label, names no image of the data, or has several
            labels of an image where it has one.
    """
    assert spec.label_list is not None
    labels = read_labels(
        spec.label_list,
        index,
        multilabel=spec.multilabel,
        image_column=spec.image_column,
        label_column=spec.label_column,
        group=spec.group,
    )
    columns = labels.columns
    splits: dict[str, list[ImageRecord]] = {}
    unlabelled: list[ImageRecord] = []
    for split, records in index.splits.items():
        for record in records:
            entry = labels.entries.get(record.path)
            row = entry or labels.unlabelled.get(record.path)
            part = (row and row.split) or split
            group = row.group if row and columns.group else record.group
            if entry is not None:
                labelled = record._replace(labels=entry.labels, group=group)
                splits.setdefault(part, []).append(labelled)
            elif spec.unlabelled and part in ("train", ""):
                unlabelled.append(record._replace(group=group))
    others = sum(map(len, index.splits.values())) - sum(map(len, splits.values()))
    notes = [*index.notes, *labels.notes]
    if others := others - len(unlabelled):
        training = not (spec.split or spec.all_splits or spec.unlabelled)
        use = " (with --teacher RUN a training learns from those of train)" if training else ""
        notes.append(f"{plural(others, 'image')} without a label: not used{use}")
    lists = dict.fromkeys(splits, printable(spec.label_list))
    locations = {name: index.locations.get(name, lists[name]) for name in splits}
    return dataclasses.replace(
        index,
        splits=splits,
        locations=locations,
        notes=notes,
        multilabel=labels.multilabel,
        has_groups=index.has_groups or bool(columns.group),
        columns=(*dict.fromkeys((*index.columns, *columns.unused)),),
        unlabelled=unlabelled,
    )


@dataclass(frozen=True)
class LabelList:
    """The labelled images of a list that a person fills in."""

    entries: dict[str, Entry]
    """Those with labels, by the path of the image."""
    unlabelled: dict[str, Entry]
    """Rows without a label, by the path of the image."""
    multilabel: bool
    """Whether an image may have several labels."""
    columns: Columns
    notes: list[str]
    """About the list; the last has the numbers of labelled images, and of rows without a label."""


def read_labels(
    path: str,
    index: DatasetIndex,
    *,
    multilabel: bool | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    group: str | None = None,
) -> LabelList:
    """The labelled images of a list that a person fills in.

    Args:
        path: The list. Rows without a label are not labelled yet.
        index: The images that it may name.
        multilabel: Whether an image may have several labels; None: whether one has in the list.
        image_column, label_column: Its columns; None: found by their usual names.
        group: Column of groups, if the list has it.

    Raises:
        DataError: As for `apply_labels`.
    """
    spec = DatasetSpec(
        path,
        allow_outside=True,
        multilabel=multilabel,
        image_column=image_column,
        label_column=label_column,
        group=group,
    )
    notes: list[str] = []
    contents = read_list(path, spec, notes)
    name, rows = printable(path), contents.entries
    contents.entries = {image: one for image, one in rows.items() if one.labels}
    # a row that was left empty does not contradict a later one with the label
    contents.relabelled = [
        found for found in contents.relabelled if found[1].labels and found[2].labels
    ]
    if not contents.entries:
        column = printable(label_column or "label")
        raise DataError(
            f"{name}: none of its {plural(len(rows), 'row')} has a label yet; fill in the column "
            f"{column}"
        )
    several = bool(contents.multilabel) if multilabel is None else multilabel
    if several:
        contents.report_merged(notes)
    else:
        contents.check_single()
    find = _finder(index)
    places = {image: find(image) for image in contents.entries}
    found = _by_place(places, contents.entries, path)
    lacking = [image for image, place in places.items() if place is None]
    if not found:
        raise DataError(
            f"labels={name}: none of its {plural(len(places), 'labelled image')}, such as "
            f"{printable(lacking[0])}, is in the data; names are relative to the folder of the data"
        )
    note = f"{name}: {plural(len(found), 'labelled image')}"
    if lacking:
        note += f" ({plural(len(lacking), 'other')} not in the data)"
    files = {image: relative(place, index.root) for image, place in places.items() if place}
    stems = {
        image: file
        for image, file in files.items()
        if file != image and os.path.splitext(file)[0] == image
    }
    if stems:
        pair = " is read as ".join(map(printable, next(iter(stems.items()))))
        notes.append(f"{name}: {plural(len(stems), 'name')} without a suffix: {pair}")
    left = [image for image in rows if image not in places]
    if left:
        note += f"; {plural(len(left), 'row')} without a label"
    unlabelled = {place: rows[image] for image in left if (place := find(image)) is not None}
    assert contents.columns is not None  # a list with entries has rows
    return LabelList(found, unlabelled, several, contents.columns, [*notes, note])


def apply_review(index: DatasetIndex, spec: DatasetSpec) -> DatasetIndex:
    """`index` without the images of `spec.exclude`, and with the labels of `spec.corrections`.

    Raises:
        DataError: A list cannot be read, names no image of the data, or has a class that is not in
            the data, or several where an image has one.
        ConfigError: Labels are corrected where none are read.
    """
    notes, splits, unlabelled = [*index.notes], index.splits, index.unlabelled
    find = _finder(index)
    if spec.exclude is not None:
        gone, note = _matched(spec.exclude, spec, find, "exclude", notes, labels=False)
        notes.append(f"{note} left out")
        splits = {
            split: [record for record in records if record.path not in gone]
            for split, records in splits.items()
        }
        unlabelled = [record for record in unlabelled if record.path not in gone]
    if spec.corrections is not None:
        if not spec.labels:
            raise ConfigError("corrections: these data have no labels; leave it out")
        fixed, note = _matched(spec.corrections, spec, find, "corrections", notes, labels=True)
        fixed = _checked_labels(fixed, index, spec)
        changed = 0

        def correct(record: ImageRecord) -> ImageRecord:
            nonlocal changed
            entry = fixed.get(record.path)
            if entry is None or entry.labels == record.labels:
                return record
            changed += 1
            return record._replace(labels=entry.labels)

        splits = {split: [*map(correct, records)] for split, records in splits.items()}
        notes.append(f"{note} read, {plural(changed, 'label')} corrected")
    return dataclasses.replace(index, splits=splits, notes=notes, unlabelled=unlabelled)


def _matched(
    path: str,
    spec: DatasetSpec,
    find: Callable[[str], str | None],
    setting: str,
    notes: list[str],
    *,
    labels: bool,
) -> tuple[dict[str, Entry], str]:
    """The entries of a list by the path of the image, and the beginning of a note.

    `notes` receives those about the list itself.
    """
    columns = DatasetSpec(
        path,
        allow_outside=True,
        labels=labels,
        multilabel=spec.multilabel,
        reads_splits=False,
    )
    entries = read_list(path, columns, notes).entries
    places = {name: find(name) for name in entries}
    found = _by_place(places, entries, path)
    lacking = [name for name, place in places.items() if place is None]
    if not found and spec.split is None:
        raise DataError(
            f"{setting}={printable(path)}: none of its {plural(len(entries), 'image')}, such as "
            f"{printable(lacking[0])}, is in the data; names are relative to the folder of the data"
        )
    more = f" ({plural(len(lacking), 'other')} not in the data)" if lacking else ""
    return found, f"{printable(path)}: {plural(len(found), 'image')}{more}"


def _by_place(
    places: Mapping[str, str | None], entries: Mapping[str, Entry], path: str
) -> dict[str, Entry]:
    """The entries of a list by the path of the image, which may have several names.

    Raises:
        DataError: Two lines name an image differently and contradict each other.
    """
    found: dict[str, tuple[str, Entry]] = {}
    for name, place in places.items():
        if place is None:
            continue
        entry = entries[name]
        other, earlier = found.setdefault(place, (name, entry))
        one, two = ((set(e.labels), e.split, e.group) for e in (earlier, entry))
        if one != two:
            raise DataError(
                f"{printable(path)}, lines {earlier.line} and {entry.line}: {printable(other)} and "
                f"{printable(name)} are one image, with other values; leave one of the lines out"
            )
    return {place: entry for place, (_, entry) in found.items()}


def review_names(paths: Collection[str], root: Path) -> dict[str, str]:
    """The names of images in a list that a person edits: relative to `root` where that is unique.

    Images in shards of several splits may have equal names inside them, and then keep their paths.
    """
    names = {path: relative(path, root) for path in paths}
    counts = Counter(names.values())
    return {path: name if counts[name] == 1 else path for path, name in names.items()}


def _finder(index: DatasetIndex) -> Callable[[str], str | None]:
    """The path of the image that a name in a list means, which may lack its suffix.

    Raises:
        DataError: When called with a name that several images have.
    """
    every = itertools.chain(*index.splits.values(), index.unlabelled)
    paths = [record.path for record in every]
    by_name: dict[str, str] = {}
    ambiguous: dict[str, tuple[str, str]] = {}
    for path in paths:
        name = relative(path, index.root)
        if (other := by_name.setdefault(name, path)) != path:
            ambiguous.setdefault(name, (other, path))
    real: dict[str, str] = {}
    by_cell: dict[str, str] = {}

    def add_spellings() -> None:
        """Fill `by_cell` and `real`, which cost time and are needed for unusual names only."""
        # a list is read with slashes for backslashes, those of escapes too
        for name, path in (*by_name.items(), *zip(paths, paths, strict=True)):
            by_cell[csv_text(name).replace("\\", "/")] = path
        real.update((os.path.realpath(path), path) for path in paths)

    root = index.root.resolve()
    by_stem: dict[str, set[str]] | None = None

    def without_suffix(name: str) -> str | None:
        """The path of the only image of this name with a suffix."""
        if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
            return None
        nonlocal by_stem
        if by_stem is None:
            by_stem = {}
            for one, path in by_name.items():
                stem, suffix = os.path.splitext(one)
                if suffix.lower() in IMAGE_SUFFIXES:
                    by_stem.setdefault(stem, set()).update((path, *ambiguous.get(one, ())))
        found = by_stem.get(name, ())
        return next(iter(found)) if len(found) == 1 else None

    def find(name: str) -> str | None:
        if name in ambiguous:
            one, two = map(printable, ambiguous[name])
            raise DataError(
                f"{printable(name)} is the name of several images, such as {one} and {two}: give "
                "their whole paths"
            )
        if name in by_name:
            return by_name[name]
        if (found := without_suffix(name)) is not None:
            return found
        # begins in a folder above the data, such as the working folder of vit predict then
        above, _, rest = f"/{name}".partition(f"/{root.name}/")
        if rest in by_name and str(root.parent).endswith(above.replace("/..", "")):
            return by_name[rest]
        if not real:
            add_spellings()
        found = real.get(os.path.realpath(name)) or real.get(os.path.realpath(index.root / name))
        return found or by_cell.get(name)

    return find


def _checked_labels(
    fixed: dict[str, Entry], index: DatasetIndex, spec: DatasetSpec
) -> dict[str, Entry]:
    """The corrections with names of classes as the data have them.

    One split may lack a class of the others: its corrections are those that a training checked.

    Raises:
        DataError: A correction has a class that is not in the data, or several.
    """
    records = (record for records in index.splits.values() for record in records)
    known = sorted({label for record in records for label in record.labels})
    by_cell = {csv_text(label): label for label in known} | {label: label for label in known}
    checked = {}
    for image, entry in fixed.items():
        where = f"{printable(spec.corrections or '')}, line {entry.line}"
        labels = entry.labels
        if len(labels) != 1 and not index.multilabel:
            # a class whose name has the separator of several
            whole = [mark.join(labels) for mark in SEPARATORS if mark.join(labels) in by_cell]
            if not whole:
                raise DataError(f"{where}: {len(labels)} classes; an image has one here")
            labels = (whole[0],)
        for label in labels:
            if label not in by_cell and spec.split is None:
                raise DataError(
                    f"{where}: no image of the data is labelled {printable(label)}"
                    f"{nearest(label, known)}"
                )
        checked[image] = entry._replace(labels=tuple(by_cell.get(label, label) for label in labels))
    return checked
