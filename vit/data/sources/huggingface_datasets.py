"""Hugging Face datasets: `hf:NAME[:CONFIG]` from the Hub, `hf:PATH` from disk.

The library `datasets` keeps Arrow tables in its cache, and an image is read from its row in the
table; images of a folder stay files. Dataset scripts are never executed. Feature types are compared
by their class name, so that this module imports without the library.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vit.data import archives
from vit.data.dataset_types import DatasetIndex, ImageRecord
from vit.errors import DataError, printable
from vit.text import join_names, plural

PREFIX = "hf:"
PARQUET_SUFFIXES = (".parquet", ".pq")
SPLIT_ALIASES = {"valid": "val", "validation": "val", "dev": "val", "training": "train"}
"""Other names of splits -> ours."""
IMAGE_COLUMNS = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")
LABEL_COLUMNS = ("label", "labels", "class", "classes", "target", "category", "cls")
LIST_FEATURES = ("List", "LargeList", "Sequence")
TEXT_DTYPES = ("string", "large_string", "string_view")
BINARY_DTYPES = ("binary", "large_binary", "binary_view")


class ColumnSelection(NamedTuple):
    """The image and label columns of a table."""

    image: str
    label: str
    """Empty if labels are not read."""
    class_names: tuple[str, ...]
    """Class names by index; empty if the cells hold class names."""
    multilabel: bool
    """Whether a label cell is a list."""
    is_image: bool
    """Whether the image column has the feature type Image."""
    is_bytes: bool
    """Whether an image cell is bytes, without a path."""


@dataclass(frozen=True)
class StreamedRow:
    """An image of a dataset that is read once, in order."""

    labels: tuple[str, ...]
    name: str
    """File name of the image, or its row number."""
    content: bytes


@dataclass(frozen=True)
class StreamedSplit:
    """A split of a dataset that is read once, in order."""

    name: str
    """Empty if it is the only split."""
    classes: tuple[str, ...]
    """Class names, if the table declares them."""
    multilabel: bool
    rows: Iterator[StreamedRow]


def is_named(data: str) -> bool:
    """Whether `data` begins with `hf:`."""
    return data.startswith(PREFIX)


def read_dataset(
    data: str, image_column: str | None, label_column: str | None, *, labelled: bool = True
) -> DatasetIndex:
    """Index the images of all splits, downloading the dataset if it is not in the cache.

    Args:
        data: Name or path, with `hf:`.
        image_column: Column of the images; None: the only one.
        label_column: Column of the classes; None: the only one.
        labelled: Leave out splits without labels; otherwise labels are not read.

    Raises:
        DataError: The dataset cannot be loaded, or has no such columns.
    """
    splits: dict[str, list[ImageRecord]] = {}
    notes: list[str] = []
    multilabel = False
    for split, rows in _load(data, streaming=False).items():
        name = SPLIT_ALIASES.get(str(split), str(split))
        labels: list[tuple[str, ...]] | None
        if labelled:
            columns = find_columns(rows.features, image_column, label_column, data)
            labels = read_label_column(rows.data.column(columns.label).to_pylist(), columns, data)
        else:
            columns = find_image_column(rows.features, image_column, data)
            labels = [()] * len(rows)
        if labels is None:
            images = plural(len(rows), "image")
            notes.append(f"left out {images} of {name}: they have no labels")
            continue
        paths = _image_paths(rows, columns, labels, data)
        splits[name] = [ImageRecord(path, names) for path, names in zip(paths, labels, strict=True)]
        multilabel |= columns.multilabel
    if not any(splits.values()):
        raise DataError(f"{printable(data)}: no {'labelled ' if labelled else ''}images in it")
    if set(splits) == {"train"}:
        splits = {"": splits["train"]}
    locations = {name: printable(data) + (f" ({name})" if name else "") for name in splits}
    return DatasetIndex(_root(data, splits), splits, locations, notes, multilabel)


def stream_splits(
    data: str, image_column: str | None, label_column: str | None
) -> Iterator[StreamedSplit]:
    """Stream the splits in order, with one image in memory and nothing in the cache.

    Arguments and errors are those of `read_dataset`.
    """
    from datasets import Image

    splits = _load(data, streaming=True)
    for split, rows in splits.items():
        with readable_errors(data):
            features = rows.features or rows._resolve_features().features
        columns = find_columns(features, image_column, label_column, data)
        if columns.is_image:
            rows = rows.cast_column(columns.image, Image(decode=False))
        name = "" if set(splits) == {"train"} else SPLIT_ALIASES.get(str(split), str(split))
        streamed = _stream_rows(iter(rows), columns, data)
        yield StreamedSplit(name, columns.class_names, columns.multilabel, streamed)


def _stream_rows(
    source: Iterator[Any], columns: ColumnSelection, data: str
) -> Iterator[StreamedRow]:
    """The images of a split; none if no row has a label."""
    unlabelled = 0
    for number, row in _enumerate_rows(source, data):
        labels = read_label_column([row[columns.label]], columns, data)
        unlabelled += labels is None
        if labels is not None and not unlabelled:
            content, path = _image_bytes(row[columns.image], data, number)
            yield StreamedRow(labels[0], row_name(path, number), content)
        elif unlabelled <= number:
            raise DataError(f"{printable(data)}: some images have a label, and others have none")


def _enumerate_rows(source: Iterator[Any], data: str) -> Iterator[tuple[int, Any]]:
    number = 0
    while True:
        with readable_errors(data):
            row = next(source, None)
        if row is None:
            return
        yield number, row
        number += 1


def _image_bytes(cell: Any, data: str, number: int) -> tuple[bytes, str]:
    """The encoded image in a cell, and its path or an empty text."""
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    path = (cell.get("path") or "") if isinstance(cell, dict) else ""
    if content is None and path:
        content = Path(_resolve_file(path, data)).read_bytes()
    if not isinstance(content, bytes):
        raise DataError(f"{printable(data)}: row {number} has no image")
    return content, path


def find_columns(
    features: Mapping[str, Any], image: str | None, label: str | None, data: str
) -> ColumnSelection:
    """Find the image and label columns.

    Args:
        features: Feature type of each column.
        image: Name of the image column; None: the only one.
        label: Name of the label column; None: the only one.
        data: Name of the dataset in messages.

    Raises:
        DataError: There is no such column, or there are several candidates.
    """
    _check_column(features, label, "label_column", data)
    columns = find_image_column(features, image, data)
    label = label or _only_column(
        features, _is_class_label, LABEL_COLUMNS, data, "classes", "label_column"
    )
    feature = features[label]
    inner = _element_feature(feature)
    is_class_label = _type_name(inner) == "ClassLabel"
    dtype = str(getattr(inner, "dtype", ""))
    is_plain = _type_name(inner) == "Value" and (dtype in TEXT_DTYPES or "int" in dtype)
    if not (is_class_label or is_plain):
        raise DataError(f"{printable(data)}: column {printable(label)} has no classes ({inner!r})")
    return columns._replace(
        label=label,
        class_names=tuple(inner.names) if is_class_label else (),
        multilabel=_type_name(feature) in LIST_FEATURES or isinstance(feature, list),
    )


def find_image_column(features: Mapping[str, Any], image: str | None, data: str) -> ColumnSelection:
    """Find the image column only; arguments and errors are those of `find_columns`."""
    _check_column(features, image, "image_column", data)
    image = image or _only_column(
        features, _is_image_feature, IMAGE_COLUMNS, data, "images", "image_column"
    )
    feature = features[image]
    if not _is_image_feature(feature) or "/" in image:
        raise DataError(f"{printable(data)}: column {printable(image)} has no images ({feature!r})")
    is_bytes = getattr(feature, "dtype", "") in BINARY_DTYPES
    return ColumnSelection(image, "", (), False, _type_name(feature) == "Image", is_bytes)


def _check_column(features: Mapping[str, Any], column: str | None, setting: str, data: str) -> None:
    if column is not None and column not in features:
        names = join_names([printable(name) for name in features], 8)
        raise DataError(
            f"{printable(data)}: no column {printable(column)} ({setting}); it has {names}"
        )


def _type_name(feature: Any) -> str:
    return type(feature).__name__


def _element_feature(feature: Any) -> Any:
    """The feature type of the elements of a list; else `feature` itself."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)


def _is_image_feature(feature: Any) -> bool:
    if _type_name(feature) == "Image" or str(getattr(feature, "dtype", "")) in BINARY_DTYPES:
        return True
    return isinstance(feature, dict) and feature.keys() >= {"bytes", "path"}


def _is_class_label(feature: Any) -> bool:
    return _type_name(_element_feature(feature)) == "ClassLabel"


def _only_column(
    features: Mapping[str, Any],
    matches: Callable[[Any], bool],
    usual_names: Sequence[str],
    data: str,
    kind: str,
    setting: str,
) -> str:
    """The only column that matches, or the only one with a usual name."""
    matching = [name for name, feature in features.items() if matches(feature)]
    if len(matching) == 1:
        return matching[0]
    candidates = matching or list(features)
    usual = [name for name in usual_names if name in candidates]
    if len(usual) == 1 or (usual and not matching):
        return usual[0]
    names = join_names([printable(name) for name in candidates], 8)
    problem = f"several columns of {kind}" if matching else f"no column of {kind}"
    flag = "--" + setting.replace("_", "-")
    raise DataError(f"{printable(data)}: {problem} ({names}); choose one with {flag}")


def read_label_column(
    cells: Sequence[Any], columns: ColumnSelection, data: str
) -> list[tuple[str, ...]] | None:
    """Class names of each row; None if no row has a label.

    Raises:
        DataError: Only some rows have a label, or a label is not in the class names.
    """
    unlabelled = [cell is None or cell == -1 for cell in cells]
    if cells and all(unlabelled):
        return None
    labels = []
    for row, (cell, is_missing) in enumerate(zip(cells, unlabelled, strict=True)):
        if is_missing:
            raise DataError(f"{printable(data)}: row {row} has no label, and others have")
        values = cell if columns.multilabel else [cell]
        labels.append(tuple(dict.fromkeys(_class_name(one, columns, data, row) for one in values)))
    return labels


def _class_name(value: Any, columns: ColumnSelection, data: str, row: int) -> str:
    if not columns.class_names:
        if value is None or value == "":
            raise DataError(f"{printable(data)}: row {row} has an empty label")
        return str(value)
    if not isinstance(value, int) or not 0 <= value < len(columns.class_names):
        raise DataError(
            f"{printable(data)}: label {printable(value)} of row {row} is none of its "
            f"{len(columns.class_names)} classes"
        )
    return columns.class_names[value]


def row_names(paths: Sequence[str], labels: Sequence[tuple[str, ...]]) -> list[str]:
    """A unique name for each row: `CLASS/FILE` as in an image folder, else the row number."""
    names = []
    for row, (path, row_labels) in enumerate(zip(paths, labels, strict=True)):
        name = row_name(path, row)
        folder = row_labels[0] if len(row_labels) == 1 and _is_file_name(row_labels[0]) else ""
        names.append(f"{folder}/{name}" if folder else name)
    if len(set(names)) == len(names):
        return names
    return [f"{row:09d}" for row in range(len(paths))]


def row_name(path: str, row: int) -> str:
    """The file name of an image, or the row number if it has none."""
    name = os.path.basename(path)
    return name if _is_file_name(name) else f"{row:09d}"


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()


def _load(data: str, *, streaming: bool) -> dict[Any, Any]:
    """All splits, as `datasets.load_dataset` returns them."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f'{printable(data)} needs datasets: pip install "vit-toolkit[datasets]"'
        ) from None
    name = data.removeprefix(PREFIX)
    if not name:
        raise DataError("hf: without a name; expected hf:NAME, hf:NAME:CONFIG or hf:PATH")
    options: dict[str, Any] = {"streaming": streaming}
    if os.path.isfile(name):
        if not name.lower().endswith(PARQUET_SUFFIXES):
            raise DataError(f"{printable(data)}: a file that is no .parquet; give its folder")
        options |= {"path": "parquet", "data_files": name}
    elif os.path.isdir(name):
        options["path"] = name
    elif name.startswith(("/", ".", "~")) or name.endswith(PARQUET_SUFFIXES):
        raise DataError(f"{printable(data)}: no such file or folder")
    else:
        path, _, config = name.partition(":")
        options |= {"path": path, "name": config or None}
    with readable_errors(data):
        splits = datasets.load_dataset(**options)
    return dict(splits)


class readable_errors:  # noqa: N801
    """Context manager that turns any error of the library into a DataError of one line."""

    def __init__(self, data: str) -> None:
        self.data = data
        self.logger = logging.getLogger("datasets")
        self.level = self.logger.level

    def __enter__(self) -> None:
        self.logger.setLevel(logging.CRITICAL)  # the library logs an error and then raises it

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        self.logger.setLevel(self.level)
        if not isinstance(error, Exception) or isinstance(error, DataError):
            return
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        message = " ".join(str(cause).split())[:200] or type(cause).__name__
        remedy = "check its name, and that this machine reaches the hub or has it in its cache"
        if os.path.exists(self.data.removeprefix(PREFIX)):
            remedy = "repair its files, or give files that the library reads"
        raise DataError(
            f"{printable(self.data)}: cannot be loaded ({printable(message)}); {remedy}"
        ) from None


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
        raise DataError(f"{printable(data)}: its rows are a selection; save it as Parquet first")
    tables = [file["filename"] for file in rows.cache_files]
    table_rows = [
        (file, row) for file in tables for row in range(len(archives.open_arrow_table(file)))
    ]
    if len(table_rows) != len(rows):
        raise DataError(
            f"{printable(data)}: its tables do not have the declared number of rows; load it anew"
        )
    names = row_names(paths, labels)
    return [
        _resolve_file(paths[at], data)
        if is_file[at] and paths[at]
        else f"{file}/{columns.image}/{row}/{names[at]}"
        for at, (file, row) in enumerate(table_rows)
    ]


def _resolve_file(path: str, data: str) -> str:
    """The absolute path of an image file that a row refers to.

    Raises:
        DataError: It is outside of the dataset's folder and the library's cache: a table could
            otherwise make us read any file of this disk.
    """
    from datasets import config

    name = data.removeprefix(PREFIX)
    folders = [str(folder) for folder in (config.HF_CACHE_HOME, config.HF_DATASETS_CACHE)]
    if os.path.exists(name):
        folders = [name if os.path.isdir(name) else os.path.dirname(name) or "."]
    path = os.path.abspath(os.path.join(folders[0], path))
    real = os.path.realpath(path)
    if not any(real.startswith(os.path.realpath(folder) + os.sep) for folder in folders):
        raise DataError(f"{printable(data)}: a row names a file outside of it: {printable(path)}")
    return path


def _root(data: str, splits: dict[str, list[ImageRecord]]) -> Path:
    """The folder that contains all images if they are files; else the name of the dataset."""
    name = data.removeprefix(PREFIX)
    if os.path.isdir(name):
        return Path(os.path.abspath(name))
    paths = [record.path for records in splits.values() for record in records]
    if all(os.path.isfile(path) for path in paths[:1]):
        return Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    # No folder contains them: use a name that does not depend on the working directory.
    return Path(f"/{data}") if not os.path.isabs(name) else Path(name)
