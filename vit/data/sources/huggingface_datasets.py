"""Hugging Face datasets: `hf:NAME[:CONFIG]` from the Hub, `hf:PATH` (also Parquet) from disk.

The library `datasets` keeps Arrow tables in its cache, and an image is read from its row in the
table; images of a folder stay files. Dataset scripts are never executed. Feature types are compared
by their class name, so that this module imports without the library.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit.data import image_archives
from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.data.sources.dataset_spec import HUB, SPLIT_NAMES, DatasetSpec
from vit.data.sources.list_columns import (
    CAPTIONS,
    CLASSES,
    IMAGES,
    Role,
    caption_columns,
    cell_captions,
    cell_group,
    cell_labels,
    drop_uncaptioned,
    find_column,
    pick_column,
)
from vit.errors import DataError
from vit.text import plural, printable

SAVED_FILES = ("dataset_dict.json", "state.json")
"""Files in folders that `save_to_disk` of the library wrote."""
SPLIT_ALIASES = {"validation": "val", "valid": "val", "dev": "val", "training": "train"}
"""Other names of splits -> ours, the first one that a dataset has."""
IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")
LABEL_NAMES = ("label", "labels", "class", "classes", "target", "category", "cls")
TEXT_DTYPES = ("string", "large_string", "string_view")
BINARY_DTYPES = ("binary", "large_binary", "binary_view")


class ColumnSelection(NamedTuple):
    """The columns of a table that are read."""

    image: str
    is_bytes: bool
    """Whether an image cell is bytes, without a path."""
    label: str = ""
    """Empty if labels are not read."""
    class_names: tuple[str, ...] = ()
    """Class names by index; empty if the cells hold class names."""
    multilabel: bool = False
    """Whether a label cell is a list."""
    captions: tuple[str, ...] = ()
    group: str = ""


def read_dataset(spec: DatasetSpec) -> DatasetIndex:
    """Index the images of all splits, downloading the dataset if it is not in the cache.

    Splits without labels, or without captions where those are read, are left out.
    """
    data = spec.data
    splits: dict[str, list[ImageRecord]] = {}
    notes: list[str] = []
    multilabel, has_groups = False, []
    loaded = _load(data)
    names = split_names([*map(str, loaded)])
    for split, rows in loaded.items():
        name = names[str(split)]
        if name in SPLIT_ALIASES or name not in SPLIT_NAMES:
            images = plural(len(rows), "image")
            notes.append(f"the split {printable(name)}, {images}, is not read by a training")
        columns = find_columns(rows.features, spec)
        annotations = read_annotations(rows.data, columns, data)
        lack = "" if annotations else "labels"
        if columns.captions and annotations and not any(any(row[2]) for row in annotations):
            lack = "captions"
        if lack:
            notes.append(f"left out {plural(len(rows), 'image')} of {name}: they have no {lack}")
            continue
        paths = _image_paths(rows, columns, [labels for labels, *_ in annotations], data)
        splits[name] = [
            ImageRecord(path, *row) for path, row in zip(paths, annotations, strict=True)
        ]
        multilabel |= columns.multilabel
        has_groups.append(bool(columns.group))
    if not any(splits.values()):
        kind = "captioned " if spec.captions else "labelled " if spec.labels else ""
        raise DataError(f"{data}: no {kind}images in it")
    if any(has_groups) and not all(has_groups):
        raise DataError(f"group={spec.group}: a column of some splits, not of all")
    if spec.captions:
        splits = drop_uncaptioned(splits, notes)
    if set(splits) == {"train"}:
        splits = {"": splits["train"]}
    locations = {name: printable(data) + (f" ({name})" if name else "") for name in splits}
    root = _root(data, splits)
    return DatasetIndex(root, splits, locations, notes, multilabel, any(has_groups))


def split_names(splits: Sequence[str]) -> dict[str, str]:
    """Our names of the splits of a dataset; of two with one name, the second keeps its own."""
    names = {split: split for split in splits}
    for split, name in SPLIT_ALIASES.items():
        if split in names and name not in names.values():
            names[split] = name
    return names


def find_columns(features: Mapping[str, Any], spec: DatasetSpec) -> ColumnSelection:
    """Find the columns that `spec` names, or by types and usual names if it has None."""
    data = spec.data
    image = _pick_column(IMAGES._replace(usual=IMAGE_NAMES), features, _is_image_feature, spec)
    feature = features[image]
    if not _is_image_feature(feature) or "/" in image:
        raise DataError(f"{data}: column {image} has no images ({feature!r})")
    columns = ColumnSelection(image, getattr(feature, "dtype", "") in BINARY_DTYPES)
    if spec.labels:
        label = _pick_column(CLASSES._replace(usual=LABEL_NAMES), features, _is_class_label, spec)
        inner = _element_feature(features[label])
        is_class_label = _is_class_label(inner)
        is_number = "int" in str(getattr(inner, "dtype", ""))
        if not (is_class_label or is_number or _is_text(inner)):
            name = printable(label)
            raise DataError(f"{data}: column {name} has no classes ({inner!r})")
        columns = columns._replace(
            label=label,
            class_names=tuple(inner.names) if is_class_label else (),
            multilabel=inner is not features[label],
        )
    captions: tuple[str, ...] = ()
    if spec.captions:
        texts = [name for name in features if _is_text(_element_feature(features[name]))]
        captions = () if spec.caption_column else caption_columns(texts)
        captions = captions or (pick_column(CAPTIONS, [*features], spec, data, 0, free=texts),)
    group = find_column([*features], spec.group) if spec.group else ""
    return columns._replace(captions=captions, group=group)


def _element_feature(feature: Any) -> Any:
    """The feature type of the elements of a list; else `feature` itself."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)


def _is_image_feature(feature: Any) -> bool:
    if type(feature).__name__ == "Image" or str(getattr(feature, "dtype", "")) in BINARY_DTYPES:
        return True
    return isinstance(feature, dict) and feature.keys() >= {"bytes", "path"}


def _is_text(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")) in TEXT_DTYPES


def _is_class_label(feature: Any) -> bool:
    return type(_element_feature(feature)).__name__ == "ClassLabel"


def _pick_column(
    role: Role, features: Mapping[str, Any], matches: Callable[[Any], bool], spec: DatasetSpec
) -> str:
    """The given column, the only one of its type, or one with a usual name."""
    matching = [name for name, feature in features.items() if matches(feature)]
    given = getattr(spec, role.setting)
    if len(matching) == 1 and not given:
        return matching[0]
    names = matching if matching and not given else [*features]
    return pick_column(role, names, spec, spec.data, 0)


def read_annotations(
    table: Any, columns: ColumnSelection, data: str
) -> list[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    """Classes, group and captions of each row; none if no row has a label."""
    names = (columns.label, columns.group, *columns.captions)
    cells = [table.column(name).to_pylist() if name else None for name in names]
    labels = cells[0]
    if labels and all(cell is None or cell == -1 for cell in labels):
        return []
    found = []
    for row in range(len(table)):
        label, group, *captions = (column and column[row] for column in cells)
        where = f"{data}, row {row}"
        texts: list[str] = []
        for name, cell in zip(columns.captions, captions, strict=True):
            texts += cell_captions(cell, name, where, 0, is_table=False)
        classes = _classes(label, columns, where) if columns.label else ()
        found.append((classes, cell_group(group, where, 0), (*texts,)))
    return found


def _classes(cell: Any, columns: ColumnSelection, where: str) -> tuple[str, ...]:
    known = columns.class_names
    if known:
        numbers = cell if isinstance(cell, list) else [cell]
        if wrong := [x for x in numbers if not isinstance(x, int) or not 0 <= x < len(known)]:
            what = "has no label" if wrong[0] in (None, -1) else f"has the label {wrong[0]}"
            raise DataError(f"{where} {what}, none of its {len(known)} classes")
        cell = [known[number] for number in numbers]
    labels = cell_labels(cell, where, 0)
    if labels is None:
        raise DataError(f"{where} has no label, and others have")
    return labels


def row_names(paths: Sequence[str], labels: Sequence[tuple[str, ...]]) -> list[str]:
    """A unique name for each row: `CLASS/FILE` as in an image folder, else the row number."""
    names = []
    for row, (path, row_labels) in enumerate(zip(paths, labels, strict=True)):
        file = os.path.basename(path)
        name = file if _is_file_name(file) else f"{row:09d}"
        is_class = len(row_labels) == 1 and _is_file_name(row_labels[0])
        names.append(f"{row_labels[0]}/{name}" if is_class else name)
    if len(set(names)) == len(names):
        return names
    return [f"{row:09d}" for row in range(len(paths))]


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()


def _load(data: str) -> dict[Any, Any]:
    """All splits, as `datasets.load_dataset` returns them."""
    try:
        import datasets
    except ImportError:
        raise DataError(f'{data} needs datasets: pip install "vit-toolkit[datasets]"') from None
    name = data.removeprefix(HUB)
    if not name:
        raise DataError("hf: without a name; expected hf:NAME, hf:NAME:CONFIG or hf:PATH")
    with readable_errors(data):
        if any(os.path.isfile(os.path.join(name, file)) for file in SAVED_FILES):
            saved = datasets.load_from_disk(name)
            return dict(saved) if isinstance(saved, dict) else {"train": saved}
        if os.path.isfile(name):
            return dict(datasets.load_dataset("parquet", data_files=name))
        if os.path.exists(name):
            return dict(datasets.load_dataset(name))
        path, _, config = name.partition(":")
        return dict(datasets.load_dataset(path, config or None))


@contextlib.contextmanager
def readable_errors(data: str) -> Iterator[None]:
    """Turn any error of the library into a DataError of one line, which it does not log."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        message = " ".join(str(cause).split())[:200] or type(cause).__name__
        remedy = "check its name, and that this machine reaches the hub or has it in its cache"
        if os.path.exists(data.removeprefix(HUB)):
            remedy = "repair its files, or give files that the library reads"
        raise DataError(f"{data}: cannot be loaded ({message}); {remedy}") from None
    finally:
        logger.setLevel(level)


def _image_paths(
    rows: Any, columns: ColumnSelection, labels: list[tuple[str, ...]], data: str
) -> list[str]:
    """The path of each row's image: a file, or an address in an Arrow table."""
    import pyarrow.compute as pc

    images = rows.data.column(columns.image)
    paths = [""] * len(rows)
    is_file = [False] * len(rows)
    if not columns.is_bytes:
        paths = [path or "" for path in pc.struct_field(images, "path").to_pylist()]
        is_file = pc.is_null(pc.struct_field(images, "bytes")).to_pylist()
    if rows._indices is not None:
        raise DataError(f"{data}: its rows are a selection; save it as Parquet first")
    tables = [file["filename"] for file in rows.cache_files]
    table_rows = [
        (file, row) for file in tables for row in range(len(image_archives.open_arrow_table(file)))
    ]
    if len(table_rows) != len(rows):
        raise DataError(f"{data}: its tables do not have the declared number of rows; load it anew")
    names = row_names(paths, labels)
    return [
        _resolve_file(paths[at], data)
        if is_file[at] and paths[at]
        else f"{file}/{columns.image}/{row}/{names[at]}"
        for at, (file, row) in enumerate(table_rows)
    ]


def _resolve_file(path: str, data: str) -> str:
    """The absolute path of an image file that a row refers to.

    It must be in the dataset's folder or the library's cache: a table could otherwise make us read
    any file of this disk.
    """
    from datasets import config

    name = data.removeprefix(HUB)
    folders = [str(folder) for folder in (config.HF_CACHE_HOME, config.HF_DATASETS_CACHE)]
    if os.path.exists(name):
        folders = [name if os.path.isdir(name) else os.path.dirname(name) or "."]
    path = os.path.abspath(os.path.join(folders[0], path))
    real = os.path.realpath(path)
    if not any(real.startswith(os.path.realpath(folder) + os.sep) for folder in folders):
        raise DataError(f"{data}: a row names a file outside of it: {path}")
    return path


def _root(data: str, splits: dict[str, list[ImageRecord]]) -> Path:
    """The folder that contains all images if they are files; else the name of the dataset."""
    name = data.removeprefix(HUB)
    if os.path.isdir(name):
        return Path(os.path.abspath(name))
    paths = [record.path for records in splits.values() for record in records]
    if all(os.path.isfile(path) for path in paths[:1]):
        return Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    # No folder contains them: use a name that does not depend on the working directory.
    return Path(f"/{data}") if not os.path.isabs(name) else Path(name)
