"""Lists that people edit beside a dataset: labels, corrected labels, images that are left out.

    labels         a list of images and classes: the labelled images, and no other is used
    exclude        a list of images, each of which is left out
    corrections    a list of images and classes, each of which gets that class

The lists are those of `vit suggest` and `vit check --write-list`, or any other list
(vit/data/sources/image_list.py).
Names are relative to the folder of the data, or paths (vit/data/sources/image_name_lookup.py).
"""

import dataclasses
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.image_archives import relative
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.image_list import Entry, ImageList, read_list
from vit.data.sources.image_name_lookup import Find, index_finder
from vit.data.sources.table_reader import wrong
from vit.errors import ConfigError, DataError
from vit.text import nearest, plural, printable


def apply_review(index: DatasetIndex, spec: DatasetSpec) -> DatasetIndex:
    """`index` with the labels of the lists of `spec`, and without the images that one excludes.

    Each list may name any image of the source, also those that the others leave out.
    """
    if (spec.label_list, spec.exclude, spec.corrections) == (None, None, None):
        return index
    find = index_finder(index)
    index = dataclasses.replace(index, notes=[*index.notes])
    if spec.label_list is not None:
        index = _apply_labels(index, spec, find)
    if spec.exclude is not None:
        columns = DatasetSpec(spec.exclude, allow_outside=True, labels=False, reads_splits=False)
        gone, lacking = _placed_list(columns, find, index, "exclude", required=spec.split is None)
        index = dataclasses.replace(
            index,
            splits={
                split: [record for record in records if record.path not in gone.entries]
                for split, records in index.splits.items()
            },
            unlabelled=[one for one in index.unlabelled if one.path not in gone.entries],
        )
        images = _counted(gone.entries, "image", lacking)
        index.notes.append(f"{printable(spec.exclude)}: {images} left out")
    return index if spec.corrections is None else _correct(index, spec, find)


def _placed_list(
    columns: DatasetSpec, find: Find, index: DatasetIndex, setting: str, *, required: bool = True
) -> tuple[ImageList, list[str]]:
    """The list `columns.data` by the paths of its images, and the names that are not in the data.

    Notes about it are added to those of `index`.
    """
    contents = read_list(columns.data, columns, index.notes)

    def place(row: Entry) -> str | None:
        return find(row.name, contents.is_table)

    # of a list of labels, those that a person has filled in
    absent = (row.name for row in contents.place(place, index.notes) if row.labelled)
    lacking = [*dict.fromkeys(absent)]
    named = {row.name for row in contents.rows if row.labelled}
    if named and len(lacking) == len(named) and required:
        what = plural(len(named), "labelled image" if setting == "labels" else "image")
        raise DataError(
            f"{setting}={columns.data}: none of its {what}, such as "
            f"{lacking[0]}, is in the data; names are relative to the folder of the data"
        )
    return contents, lacking


def _counted(found: Collection[str], noun: str, lacking: Collection[str]) -> str:
    more = f" ({plural(len(lacking), 'other')} not in the data)" if lacking else ""
    return plural(len(found), noun) + more


def label_list_spec(spec: DatasetSpec) -> DatasetSpec:
    """How `spec.label_list` is read; the columns that `spec` names are those of the list."""
    assert spec.label_list is not None
    return DatasetSpec(
        spec.label_list,
        allow_outside=True,
        multilabel=spec.multilabel,
        image_column=spec.image_column,
        label_column=spec.label_column,
        group=spec.group,
    )


def _apply_labels(index: DatasetIndex, spec: DatasetSpec, find: Find) -> DatasetIndex:
    """The images of `index` that `spec.label_list` labels, with those labels.

    Images that it does not name, and rows without a label, are not used; with `spec.unlabelled`
    those of the training split are kept apart. A column `split` replaces the split of the source,
    and a column of the name `spec.group` its groups, of rows without a label too.
    """
    listed = label_list_spec(spec)
    name = printable(listed.data)
    contents, lacking = _placed_list(listed, find, index, "labels")
    rows = contents.entries
    contents.entries = {image: entry for image, entry in rows.items() if entry.labelled}
    # a row that was left empty does not contradict a later one with the label
    contents.relabelled = [
        found for found in contents.relabelled if found[1].labelled and found[2].labelled
    ]
    column = printable(contents.columns.label) if contents.columns else ""
    if not contents.entries:
        raise DataError(
            f"{name}: none of its {plural(len(rows), 'row')} has a label yet; fill in the column "
            f"{column}"
        )
    several = bool(contents.multilabel) if spec.multilabel is None else spec.multilabel
    if several:
        contents.report_merged(index.notes)
    else:
        contents.check_single()
    note = f"{name}: {_counted(contents.entries, 'labelled image', lacking)}"
    if left := len(rows) - len(contents.entries):
        none = f": not used ([] in {column} is not one of the classes)" if several else ""
        note += f"; {plural(left, 'row')} without a label{none}"
    splits: dict[str, list[ImageRecord]] = {}
    unlabelled: list[ImageRecord] = []
    others = 0
    for split, records in index.splits.items():
        for record in records:
            row = rows.get(record.path)
            part = (row and row.split) or split
            grouped = row and contents.columns and contents.columns.group
            record = record._replace(group=row.group) if row and grouped else record
            if record.path in contents.entries:
                labels = contents.entries[record.path].labels
                splits.setdefault(part, []).append(record._replace(labels=labels))
            elif spec.unlabelled and part in ("train", ""):
                unlabelled.append(record)
            else:
                others += 1
    notes = [*index.notes, note]
    if others:
        training = not (spec.split or spec.all_splits or spec.unlabelled)
        use = " (with --teacher RUN a training learns from those of train)" if training else ""
        notes.append(f"{plural(others, 'image')} without a label: not used{use}")
    assert contents.columns is not None  # a list with entries has rows
    return dataclasses.replace(
        index,
        splits=splits,
        locations={split: index.locations.get(split, name) for split in splits},
        notes=notes,
        multilabel=several,
        has_groups=index.has_groups or bool(contents.columns.group),
        columns=(*dict.fromkeys((*index.columns, *contents.columns.unused)),),
        unlabelled=unlabelled,
    )


def _correct(index: DatasetIndex, spec: DatasetSpec, find: Find) -> DatasetIndex:
    assert spec.corrections is not None
    if not spec.labels:
        raise ConfigError("corrections: these data have no labels; leave it out")
    columns = DatasetSpec(
        spec.corrections, allow_outside=True, multilabel=spec.multilabel, reads_splits=False
    )
    contents, lacking = _placed_list(
        columns, find, index, "corrections", required=spec.split is None
    )
    fixed = _checked_labels(contents, index, spec)
    changed = 0
    splits: dict[str, list[ImageRecord]] = {}
    for split, records in index.splits.items():
        labels = [fixed.get(record.path, record.labels) for record in records]
        splits[split] = [one._replace(labels=new) for one, new in zip(records, labels, strict=True)]
        changed += sum(one.labels != new for one, new in zip(records, labels, strict=True))
    images = _counted(fixed, "image", lacking)
    index.notes.append(
        f"{printable(spec.corrections)}: {images} read, {plural(changed, 'label')} corrected"
    )
    return dataclasses.replace(index, splits=splits)


def review_names(paths: Collection[str], root: Path) -> dict[str, str]:
    """The names of images in a list that a person edits: relative to `root` where that is unique.

    Images in shards of several splits may have equal names inside them, and then keep their paths.
    """
    names = {path: relative(path, root) for path in paths}
    counts = Counter(names.values())
    return {path: name if counts[name] == 1 else path for path, name in names.items()}


def _checked_labels(
    contents: ImageList, index: DatasetIndex, spec: DatasetSpec
) -> dict[str, tuple[str, ...]]:
    """The corrections of images by path, with names of classes as the data have them.

    One split may lack a class of the others: its corrections are those that a training checked.
    """
    records = (record for records in index.splits.values() for record in records)
    known = sorted({label for record in records for label in record.labels})
    checked = {}
    if contents.relabelled and not index.multilabel:
        raise contents.two_labels(*contents.relabelled[0][1:])
    for image, entry in contents.entries.items():
        labels = entry.labels
        if len(labels) != 1 and not index.multilabel:
            what = f"{len(labels)} classes; an image has one here"
            raise wrong(contents.path, what, entry.line)
        if not entry.labelled:
            what = "no label; write one, or [] for none of the classes"
            raise wrong(contents.path, what, entry.line)
        for label in labels:
            if label not in known and spec.split is None:
                what = f"no image of the data is labelled {label}{nearest(label, known)}"
                raise wrong(contents.path, what, entry.line)
        checked[image] = labels
    return checked
