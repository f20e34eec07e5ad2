"""`hf:NAME[:CONFIG]` and `hf:PATH`: data sets of the library `datasets`, from a hub or a disk.

The library makes Arrow tables in its own cache, and an image is read from the row where it lies;
images of a folder stay the files that they are. Files of code in a data set are never run.

Which columns of a table are the images and their classes, and what those classes are called.

Types are known by the name of their class in the library `datasets`, which is not needed here.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vit.data import archives
from vit.data.dataset_types import Item, Listed
from vit.errors import DataError, printable
from vit.text import join_names, plural

IMAGES = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")
LABELS = ("label", "labels", "class", "classes", "target", "category", "cls")
LISTS = ("List", "LargeList", "Sequence")
TEXT, BYTES = ("string", "large_string", "string_view"), ("binary", "large_binary", "binary_view")


class Columns(NamedTuple):
    """The columns that are used."""

    image: str
    label: str
    names: tuple[str, ...]
    """Of the classes by number; none where the cells say them."""
    multilabel: bool
    """Whether a cell is a list."""
    is_image: bool
    """Whether the column of images is declared as one."""
    is_bytes: bool
    """Whether it has bytes alone, without a path."""


def find_label_columns(
    features: Mapping[str, Any], image: str | None, label: str | None, data: str
) -> Columns:
    """The columns of the images and of the classes.

    Args:
        features: Type of each column.
        image: The column asked for, if one is.
        label: Likewise.
        data: What messages call the data.

    Raises:
        DataError: There is no such column, or several may be meant.
    """
    _check_there(features, label, "label_column", data)
    found = find_image_column(features, image, data)
    label = label or _only(features, _is_label, LABELS, data, "classes", "label_column")
    classes = features[label]
    multilabel = _kind(classes) in LISTS or isinstance(classes, list)
    inner = classes[0] if isinstance(classes, list) else getattr(classes, "feature", classes)
    if not (_kind(inner) == "ClassLabel" or _plain(inner)):
        raise DataError(f"{printable(data)}: column {printable(label)} has no classes ({inner!r})")
    names = tuple(inner.names) if _kind(inner) == "ClassLabel" else ()
    return found._replace(label=label, names=names, multilabel=multilabel)


def find_image_column(features: Mapping[str, Any], image: str | None, data: str) -> Columns:
    """The column of the images alone.

    Arguments and errors are those of `find`.
    """
    _check_there(features, image, "image_column", data)
    image = image or _only(features, _is_image, IMAGES, data, "images", "image_column")
    kind = features[image]
    if not _is_image(kind) or "/" in image:
        raise DataError(f"{printable(data)}: column {printable(image)} has no images ({kind!r})")
    is_bytes = getattr(kind, "dtype", "") in BYTES
    return Columns(image, "", (), False, _kind(kind) == "Image", is_bytes)


def _check_there(features: Mapping[str, Any], asked: str | None, setting: str, data: str) -> None:
    if asked is not None and asked not in features:
        there = join_names([printable(name) for name in features], 8)
        raise DataError(
            f"{printable(data)}: no column {printable(asked)} ({setting}); it has {there}"
        )


def _kind(feature: Any) -> str:
    return type(feature).__name__


def _plain(feature: Any) -> bool:
    dtype = str(getattr(feature, "dtype", ""))
    return _kind(feature) == "Value" and (dtype in TEXT or "int" in dtype)


def _is_image(feature: Any) -> bool:
    if _kind(feature) == "Image" or str(getattr(feature, "dtype", "")) in BYTES:
        return True
    return isinstance(feature, dict) and feature.keys() >= {"bytes", "path"}


def _is_label(feature: Any) -> bool:
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
    return _kind(inner) == "ClassLabel"


def _only(
    features: Mapping[str, Any], fits: Any, usual: Sequence[str], data: str, what: str, setting: str
) -> str:
    """The one column that fits, or else that of the first usual name."""
    found = [name for name, feature in features.items() if fits(feature)]
    if len(found) == 1:
        return found[0]
    among = found or list(features)
    named = [name for name in usual if name in among]
    if len(named) == 1 or (named and not found):
        return named[0]
    there = join_names([printable(name) for name in among], 8)
    problem = f"several columns of {what}" if found else f"no column of {what}"
    flag = "--" + setting.replace("_", "-")
    raise DataError(f"{printable(data)}: {problem} ({there}); say which with {flag}")


def labels_of_column(
    cells: Sequence[Any], columns: Columns, data: str
) -> list[tuple[str, ...]] | None:
    """Names of the classes of each row; None where no row has any.

    Raises:
        DataError: Some rows have none, or a number has no name.
    """
    unlabelled = [cell is None or cell == -1 for cell in cells]
    if cells and all(unlabelled):
        return None
    found = []
    for row, (cell, without) in enumerate(zip(cells, unlabelled, strict=True)):
        if without:
            raise DataError(f"{printable(data)}: row {row} has no label, and others have")
        words = cell if columns.multilabel else [cell]
        found.append(tuple(dict.fromkeys(_name(word, columns, data, row) for word in words)))
    return found


def _name(word: Any, columns: Columns, data: str, row: int) -> str:
    if not columns.names:
        if word is None or word == "":
            raise DataError(f"{printable(data)}: row {row} has an empty label")
        return str(word)
    if not isinstance(word, int) or not 0 <= word < len(columns.names):
        raise DataError(
            f"{printable(data)}: label {printable(word)} of row {row} is none of its "
            f"{len(columns.names)} classes"
        )
    return columns.names[word]


def distinct_names(paths: Sequence[str], classes: Sequence[tuple[str, ...]]) -> list[str]:
    """A name for each row, `CLASS/FILE` as in a folder, or the row's number where those clash."""
    names = []
    for row, (path, labels_of) in enumerate(zip(paths, classes, strict=True)):
        name = row_name(path, row)
        folder = labels_of[0] if len(labels_of) == 1 and _is_safe(labels_of[0]) else ""
        names.append(f"{folder}/{name}" if folder else name)
    if len(set(names)) == len(names):
        return names
    return [f"{row:09d}" for row in range(len(paths))]


def row_name(path: str, row: int) -> str:
    """The last part of an image's own name, or the row's number where that is no file name."""
    name = os.path.basename(path)
    return name if _is_safe(name) else f"{row:09d}"


def _is_safe(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()


PREFIX = "hf:"
PARQUET = (".parquet", ".pq")
NAMES = {"valid": "val", "validation": "val", "dev": "val", "training": "train"}
"""What other people call splits."""


@dataclass(frozen=True)
class Row:
    """An image of a data set that is read once, in its order."""

    labels: tuple[str, ...]
    name: str
    """Its own, where it has one."""
    content: bytes


@dataclass(frozen=True)
class Part:
    """One split of a data set that is read once."""

    name: str
    """Empty where there is no other."""
    classes: tuple[str, ...]
    """Where they are known before."""
    multilabel: bool
    rows: Iterator[Row]


def is_named(data: str) -> bool:
    """Whether `data` is such a name."""
    return data.startswith(PREFIX)


def read_dataset(
    data: str, image_column: str | None, label_column: str | None, *, labelled: bool = True
) -> Listed:
    """The images of all splits, which are downloaded where they are not yet.

    Args:
        data: The name, with its `hf:`.
        image_column: Column of the images; the only one when left empty.
        label_column: Column of the classes; the only one when left empty.
        labelled: Whether only images with classes are wanted; else all, and none needs one.

    Raises:
        DataError: It cannot be found, or has no such columns.
    """
    found = _load(data, streaming=False)
    splits: dict[str, list[Item]] = {}
    notes: list[str] = []
    multilabel = False
    for split, rows in found.items():
        name = NAMES.get(str(split), str(split))
        labels: list[tuple[str, ...]] | None
        if labelled:
            columns = find_label_columns(rows.features, image_column, label_column, data)
            labels = labels_of_column(rows.data.column(columns.label).to_pylist(), columns, data)
        else:
            columns = find_image_column(rows.features, image_column, data)
            labels = [()] * len(rows)
        if labels is None:
            notes.append(f"left out {plural(len(rows), 'image')} of {name}: they have no labels")
            continue
        paths = _paths(rows, columns, labels, data)
        splits[name] = [Item(path, names) for path, names in zip(paths, labels, strict=True)]
        multilabel |= columns.multilabel
    if not any(splits.values()):
        raise DataError(f"{printable(data)}: no {'labelled ' if labelled else ''}images in it")
    if set(splits) == {"train"}:
        splits = {"": splits["train"]}
    where = {name: printable(data) + (f" ({name})" if name else "") for name in splits}
    return Listed(_root(data, splits), splits, where, notes, multilabel)


def stream_splits(data: str, image_column: str | None, label_column: str | None) -> Iterator[Part]:
    """The splits one after the other, without keeping the source; an image is in memory at a time.

    Arguments and errors are those of `read_dataset`.
    """
    from datasets import Image

    found = _load(data, streaming=True)
    for split, rows in found.items():
        with reaching(data):
            features = rows.features or rows._resolve_features().features
        columns = find_label_columns(features, image_column, label_column, data)
        if columns.is_image:
            rows = rows.cast_column(columns.image, Image(decode=False))
        name = "" if set(found) == {"train"} else NAMES.get(str(split), str(split))
        yield Part(name, columns.names, columns.multilabel, _rows(iter(rows), columns, data))


def _rows(source: Iterator[Any], columns: Columns, data: str) -> Iterator[Row]:
    """The images of a split; none where none has a label."""
    without = 0
    for number, row in _until_end(source, data):
        labels = labels_of_column([row[columns.label]], columns, data)
        without += labels is None
        if labels is not None and not without:
            content, path = _image(row[columns.image], data, number)
            yield Row(labels[0], row_name(path, number), content)
        elif without <= number:
            raise DataError(f"{printable(data)}: some images have a label, and others have none")


def _until_end(source: Iterator[Any], data: str) -> Iterator[tuple[int, Any]]:
    number = 0
    while True:
        with reaching(data):
            row = next(source, None)
        if row is None:
            return
        yield number, row
        number += 1


def _image(value: Any, data: str, number: int) -> tuple[bytes, str]:
    content = value.get("bytes") if isinstance(value, dict) else value
    path = (value.get("path") or "") if isinstance(value, dict) else ""
    if content is None and path:
        content = Path(_file_of(path, data)).read_bytes()
    if not isinstance(content, bytes):
        raise DataError(f"{printable(data)}: row {number} has no image")
    return content, path


def _load(data: str, *, streaming: bool) -> dict[Any, Any]:
    """All splits by name, as the library loads them."""
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
        if not name.lower().endswith(PARQUET):
            raise DataError(f"{printable(data)}: a file that is no .parquet; give its folder")
        options |= {"path": "parquet", "data_files": name}
    elif os.path.isdir(name):
        options["path"] = name
    elif name.startswith(("/", ".", "~")) or name.endswith(PARQUET):
        raise DataError(f"{printable(data)}: no such file or folder")
    else:
        path, _, config = name.partition(":")
        options |= {"path": path, "name": config or None}
    with reaching(data):
        found = datasets.load_dataset(**options)
    return dict(found)


class reaching:  # noqa: N801
    """Turns whatever the library raises into one line."""

    def __init__(self, data: str) -> None:
        self.data = data
        self.log = logging.getLogger("datasets")
        self.level = self.log.level

    def __enter__(self) -> None:
        self.log.setLevel(logging.CRITICAL)  # it logs an error, and then raises it

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        self.log.setLevel(self.level)
        if not isinstance(error, Exception) or isinstance(error, DataError):
            return
        deepest: BaseException = error
        while deepest.__cause__ is not None:
            deepest = deepest.__cause__
        words = " ".join(str(deepest).split())[:200] or type(deepest).__name__
        remedy = "check its name, and that this machine reaches the hub or has it in its cache"
        if os.path.exists(self.data.removeprefix(PREFIX)):
            remedy = "mend its files, or give those that the library reads"
        raise DataError(
            f"{printable(self.data)}: cannot be loaded ({printable(words)}); {remedy}"
        ) from None


def _paths(rows: Any, columns: Columns, labels: list[tuple[str, ...]], data: str) -> list[str]:
    """The address of the image in each row."""
    import pyarrow.compute as pc

    images = rows.data.column(columns.image)
    names = [""] * len(rows)
    files = [False] * len(rows)
    if not columns.is_bytes:
        names = [path or "" for path in pc.struct_field(images, "path").to_pylist()]
        files = pc.is_null(pc.struct_field(images, "bytes")).to_pylist()
    if rows._indices is not None:
        raise DataError(f"{printable(data)}: its rows are a selection; save it as Parquet first")
    places = list(_places([one["filename"] for one in rows.cache_files]))
    if len(places) != len(rows):
        raise DataError(f"{printable(data)}: its tables have other rows than it says; load it anew")
    shown = distinct_names(names, labels)
    paths = []
    for at, (file, row) in enumerate(places):
        inside = f"{file}/{columns.image}/{row}/{shown[at]}"
        paths.append(_file_of(names[at], data) if files[at] and names[at] else inside)
    return paths


def _file_of(path: str, data: str) -> str:
    """The file that a row names instead of holding it: in the data's folder, or the library's own.

    Raises:
        DataError: It is elsewhere, so a table that somebody wrote would read files of this disk.
    """
    from datasets import config

    name = data.removeprefix(PREFIX)
    folders = [str(one) for one in (config.HF_CACHE_HOME, config.HF_DATASETS_CACHE)]
    if os.path.exists(name):
        folders = [name if os.path.isdir(name) else os.path.dirname(name) or "."]
    path = os.path.abspath(os.path.join(folders[0], path))
    real = os.path.realpath(path)
    if not any(real.startswith(os.path.realpath(folder) + os.sep) for folder in folders):
        raise DataError(f"{printable(data)}: a row names a file outside of it: {printable(path)}")
    return path


def _places(files: list[str]) -> Iterator[tuple[str, int]]:
    for file in files:
        for row in range(len(archives.open_arrow_table(file))):
            yield file, row


def _root(data: str, splits: dict[str, list[Item]]) -> Path:
    """Where all images are, if they are files; else the name of the data itself."""
    name = data.removeprefix(PREFIX)
    if os.path.isdir(name):
        return Path(os.path.abspath(name))
    paths = [item.path for items in splits.values() for item in items]
    if all(os.path.isfile(path) for path in paths[:1]):
        return Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    # no folder holds them: a name that stays the same wherever the command runs
    return Path(f"/{data}") if not os.path.isabs(name) else Path(name)
