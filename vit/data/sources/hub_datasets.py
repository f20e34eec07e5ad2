"""`hf:NAME[:CONFIG]` and `hf:PATH`: data sets of the library `datasets`, from a hub or a disk.

The library makes Arrow tables in its own cache, and a picture is read from the row where it lies;
pictures of a folder stay the files that they are. Files of code in a data set are never run.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.data import arrow_rows
from vit.data.samples import Item, Listed
from vit.data.sources import hub_columns
from vit.data.sources.folders import count
from vit.data.sources.hub_columns import Columns
from vit.errors import DataError, printable

PREFIX = "hf:"
PARQUET = (".parquet", ".pq")
NAMES = {"valid": "val", "validation": "val", "dev": "val", "training": "train"}
"""What other people call splits."""


@dataclass(frozen=True)
class Row:
    """A picture of a data set that is read once, in its order."""

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
    several: bool
    rows: Iterator[Row]


def is_named(data: str) -> bool:
    """Whether `data` is such a name."""
    return data.startswith(PREFIX)


def read_dataset(
    data: str, image_column: str | None, label_column: str | None, *, labelled: bool = True
) -> Listed:
    """The pictures of all splits, which are downloaded where they are not yet.

    Args:
        data: The name, with its `hf:`.
        image_column: Column of the pictures; the only one when left empty.
        label_column: Column of the classes; the only one when left empty.
        labelled: Whether only pictures with classes are wanted; else all, and none needs one.

    Raises:
        DataError: It cannot be found, or has no such columns.
    """
    found = _load(data, streaming=False)
    splits: dict[str, list[Item]] = {}
    notes: list[str] = []
    several = False
    for split, rows in found.items():
        name = NAMES.get(str(split), str(split))
        labels: list[tuple[str, ...]] | None
        if labelled:
            columns = hub_columns.find(rows.features, image_column, label_column, data)
            labels = hub_columns.labels(rows.data.column(columns.label).to_pylist(), columns, data)
        else:
            columns = hub_columns.pictures(rows.features, image_column, data)
            labels = [()] * len(rows)
        if labels is None:
            notes.append(f"left out {count(len(rows), 'picture')} of {name}: they have no labels")
            continue
        paths = _paths(rows, columns, labels, data)
        splits[name] = [Item(path, names) for path, names in zip(paths, labels, strict=True)]
        several |= columns.several
    if not any(splits.values()):
        raise DataError(f"{printable(data)}: no {'labelled ' if labelled else ''}pictures in it")
    if set(splits) == {"train"}:
        splits = {"": splits["train"]}
    where = {name: printable(data) + (f" ({name})" if name else "") for name in splits}
    return Listed(_root(data, splits), splits, where, notes, several)


def stream_splits(data: str, image_column: str | None, label_column: str | None) -> Iterator[Part]:
    """The splits one after the other, without keeping the source; a picture is in memory at a time.

    Arguments and errors are those of `read_dataset`.
    """
    from datasets import Image

    found = _load(data, streaming=True)
    for split, rows in found.items():
        with reaching(data):
            features = rows.features or rows._resolve_features().features
        columns = hub_columns.find(features, image_column, label_column, data)
        if columns.is_image:
            rows = rows.cast_column(columns.image, Image(decode=False))
        name = "" if set(found) == {"train"} else NAMES.get(str(split), str(split))
        yield Part(name, columns.names, columns.several, _rows(iter(rows), columns, data))


def _rows(source: Iterator[Any], columns: Columns, data: str) -> Iterator[Row]:
    """The pictures of a split; none where none has a label."""
    without = 0
    for number, row in _until_end(source, data):
        labels = hub_columns.labels([row[columns.label]], columns, data)
        without += labels is None
        if labels is not None and not without:
            content, path = _picture(row[columns.image], data, number)
            yield Row(labels[0], hub_columns.name_of(path, number), content)
        elif without <= number:
            raise DataError(f"{printable(data)}: some pictures have a label, and others have none")


def _until_end(source: Iterator[Any], data: str) -> Iterator[tuple[int, Any]]:
    number = 0
    while True:
        with reaching(data):
            row = next(source, None)
        if row is None:
            return
        yield number, row
        number += 1


def _picture(value: Any, data: str, number: int) -> tuple[bytes, str]:
    content = value.get("bytes") if isinstance(value, dict) else value
    path = (value.get("path") or "") if isinstance(value, dict) else ""
    if content is None and path:
        content = Path(_file_of(path, data)).read_bytes()
    if not isinstance(content, bytes):
        raise DataError(f"{printable(data)}: row {number} has no picture")
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
    """The address of the picture in each row."""
    import pyarrow.compute as pc

    pictures = rows.data.column(columns.image)
    names = [""] * len(rows)
    files = [False] * len(rows)
    if not columns.is_bytes:
        names = [path or "" for path in pc.struct_field(pictures, "path").to_pylist()]
        files = pc.is_null(pc.struct_field(pictures, "bytes")).to_pylist()
    if rows._indices is not None:
        raise DataError(f"{printable(data)}: its rows are a selection; save it as Parquet first")
    places = list(_places([one["filename"] for one in rows.cache_files]))
    if len(places) != len(rows):
        raise DataError(f"{printable(data)}: its tables have other rows than it says; load it anew")
    shown = hub_columns.distinct_names(names, labels)
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
        for row in range(len(arrow_rows.table(file))):
            yield file, row


def _root(data: str, splits: dict[str, list[Item]]) -> Path:
    """Where all pictures are, if they are files; else the name of the data itself."""
    name = data.removeprefix(PREFIX)
    if os.path.isdir(name):
        return Path(os.path.abspath(name))
    paths = [item.path for items in splits.values() for item in items]
    if all(os.path.isfile(path) for path in paths[:1]):
        return Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    # no folder holds them: a name that stays the same wherever the command runs
    return Path(f"/{data}") if not os.path.isabs(name) else Path(name)
