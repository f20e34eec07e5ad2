"""Which columns of a table are the pictures and their classes, and what those classes are called.

Types are known by the name of their class in the library `datasets`, which is not needed here.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit.data.sources.folders import some
from vit.errors import DataError, printable

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
    several: bool
    """Whether a cell is a list."""
    is_image: bool
    """Whether the column of pictures is declared as one."""
    is_bytes: bool
    """Whether it has bytes alone, without a path."""


def find(features: Mapping[str, Any], image: str | None, label: str | None, data: str) -> Columns:
    """The columns of the pictures and of the classes.

    Args:
        features: Type of each column.
        image: The column asked for, if one is.
        label: Likewise.
        data: What messages call the data.

    Raises:
        DataError: There is no such column, or several may be meant.
    """
    _check_there(features, label, "label_column", data)
    found = pictures(features, image, data)
    label = label or _only(features, _is_label, LABELS, data, "classes", "label_column")
    classes = features[label]
    several = _kind(classes) in LISTS or isinstance(classes, list)
    inner = classes[0] if isinstance(classes, list) else getattr(classes, "feature", classes)
    if not (_kind(inner) == "ClassLabel" or _plain(inner)):
        raise DataError(f"{printable(data)}: column {printable(label)} has no classes ({inner!r})")
    names = tuple(inner.names) if _kind(inner) == "ClassLabel" else ()
    return found._replace(label=label, names=names, several=several)


def pictures(features: Mapping[str, Any], image: str | None, data: str) -> Columns:
    """The column of the pictures alone.

    Arguments and errors are those of `find`.
    """
    _check_there(features, image, "image_column", data)
    image = image or _only(features, _is_picture, IMAGES, data, "pictures", "image_column")
    kind = features[image]
    if not _is_picture(kind) or "/" in image:
        raise DataError(f"{printable(data)}: column {printable(image)} has no pictures ({kind!r})")
    is_bytes = getattr(kind, "dtype", "") in BYTES
    return Columns(image, "", (), False, _kind(kind) == "Image", is_bytes)


def _check_there(features: Mapping[str, Any], asked: str | None, setting: str, data: str) -> None:
    if asked is not None and asked not in features:
        there = some([printable(name) for name in features], 8)
        raise DataError(
            f"{printable(data)}: no column {printable(asked)} ({setting}); it has {there}"
        )


def _kind(feature: Any) -> str:
    return type(feature).__name__


def _plain(feature: Any) -> bool:
    dtype = str(getattr(feature, "dtype", ""))
    return _kind(feature) == "Value" and (dtype in TEXT or "int" in dtype)


def _is_picture(feature: Any) -> bool:
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
    there = some([printable(name) for name in among], 8)
    problem = f"several columns of {what}" if found else f"no column of {what}"
    flag = "--" + setting.replace("_", "-")
    raise DataError(f"{printable(data)}: {problem} ({there}); say which with {flag}")


def labels(cells: Sequence[Any], columns: Columns, data: str) -> list[tuple[str, ...]] | None:
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
        words = cell if columns.several else [cell]
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
        name = name_of(path, row)
        folder = labels_of[0] if len(labels_of) == 1 and _is_safe(labels_of[0]) else ""
        names.append(f"{folder}/{name}" if folder else name)
    if len(set(names)) == len(names):
        return names
    return [f"{row:09d}" for row in range(len(paths))]


def name_of(path: str, row: int) -> str:
    """The last part of a picture's own name, or the row's number where that is no file name."""
    name = os.path.basename(path)
    return name if _is_safe(name) else f"{row:09d}"


def _is_safe(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()
