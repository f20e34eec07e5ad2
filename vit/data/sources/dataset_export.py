"""From any source to a folder or to shards: which images, under which names."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vit.data.archives import open_binary, relative, split_address
from vit.data.dataset_types import Item, Listed
from vit.data.image_io import check_header
from vit.data.sources import huggingface_datasets
from vit.data.sources.class_names import SPLIT_NAMES
from vit.data.sources.dataset_writer import (
    MARK,
    ImageFile,
    Written,
    check_bytes,
    class_folders,
    whole_folder,
    write_folder,
    write_shards,
)
from vit.errors import BadImage, DataError, printable
from vit.text import join_names

Kind = Literal["folder", "shards"]


@dataclass
class Copied:
    """What was written, and what was not."""

    images: int = 0
    files: int = 0
    bad: list[BadImage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_target(out: Path, source: str, *, overwrite: bool) -> None:
    """Refuse a folder that must not be written, before any work is done.

    Raises:
        DataError: It is there, unless `overwrite` is on and it was written by us; or it holds the
            source.
    """
    name = printable(out)
    here, data = os.path.realpath(out), os.path.realpath(source)
    if os.path.lexists(source) and (data == here or data.startswith(here + os.sep)):
        raise DataError(f"{name} holds the data themselves; give another --out")
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise DataError(f"{name} is a file; give the name of a folder that is made")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise DataError(f"{name} has files; give another --out, or add --overwrite")
    if not (out / MARK).is_file():
        raise DataError(f"{name} was not written by vit data, so it is not replaced; empty it")


def _check_apart(listed: Listed, out: Path) -> None:
    """Refuse to replace a folder that holds images of `listed`, whatever its source is called."""
    if not os.path.lexists(out):
        return
    here = os.path.join(os.path.realpath(out), "")
    paths = (item.path for items in listed.splits.values() for item in items)
    files = (found[0] if (found := split_address(path)) else path for path in paths)
    for file in dict.fromkeys(files):
        folder, name = os.path.split(file)
        link = os.path.join(os.path.realpath(folder), name)
        if link.startswith(here) or os.path.realpath(file).startswith(here):
            raise DataError(
                f"{printable(out)} holds images of the data, such as {printable(file)}; "
                "give another --out"
            )


def copy(
    listed: Listed, source: str, out: Path, *, to: Kind, most: int, told: Callable[[int], object]
) -> Copied:
    """Write all images of `listed`, whole or not at all.

    Args:
        listed: What the source holds.
        source: What the user calls it.
        out: Folder that is made.
        to: A folder, or shards.
        most: Bytes of a shard.
        told: Of each image that is done.

    Raises:
        DataError: It cannot be written, no image can be read, or one lies in `out`.
    """
    _check_apart(listed, out)
    copied = Copied(notes=list(listed.notes))
    names = {label for items in listed.splits.values() for item in items for label in item.labels}
    split = set(listed.splits) != {""}
    folders = class_folders(names, split=split)
    changed = [name for name, folder in folders.items() if name != folder]
    foldered = not listed.multilabel and not changed
    if changed and to == "folder" and not listed.multilabel:
        renamed = [f"{printable(name)} is {printable(folders[name])}" for name in changed]
        copied.notes.append(f"classes whose name no folder can have: {join_names(renamed)}")
    with whole_folder(out) as fresh:
        for part, items in listed.splits.items():
            images = _images(items, part, listed.root, copied, told)
            if to == "folder":
                done = write_folder(fresh, part, images, None if listed.multilabel else folders)
            else:
                done = write_shards(
                    fresh, part, images, most, foldered=foldered, multilabel=listed.multilabel
                )
            _count(copied, done)
        _finish(fresh, source, copied)
    return copied


def stream(
    source: str,
    out: Path,
    *,
    most: int,
    told: Callable[[int], object],
    image_column: str | None = None,
    label_column: str | None = None,
) -> Copied:
    """Write shards of a hub's data set while it comes; the source itself is not kept.

    Arguments and errors are those of `copy` and of `read_dataset`.
    """
    copied = Copied()
    with whole_folder(out) as fresh:
        for part in huggingface_datasets.stream_splits(source, image_column, label_column):
            folders = class_folders(part.classes, split=bool(part.name))
            foldered = bool(folders) and all(name == folders[name] for name in folders)
            done = write_shards(
                fresh,
                part.name,
                _streamed(part, source, copied, told),
                most,
                foldered=foldered and not part.multilabel,
                multilabel=part.multilabel,
            )
            _count(copied, done)
        _finish(fresh, source, copied)
    return copied


def _count(copied: Copied, done: Written) -> None:
    copied.images += done.images
    copied.files += done.files


def _finish(fresh: Path, source: str, copied: Copied) -> None:
    """Leave the mark of what was written here.

    Raises:
        DataError: There is nothing.
    """
    if not copied.images:
        first = f", such as {copied.bad[0]}" if copied.bad else ""
        raise DataError(f"{printable(source)}: no image of it can be read{first}")
    mark = {"source": source, "pictures": copied.images, "left_out": len(copied.bad)}
    (fresh / MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")


def _streamed(
    part: huggingface_datasets.Part, source: str, copied: Copied, told: Callable[[int], object]
) -> Iterator[ImageFile]:
    for row in part.rows:
        told(1)
        try:
            check_bytes(row.content, f"{source}/{part.name or 'train'}/{row.name}")
        except BadImage as bad:
            copied.bad.append(bad)
            continue
        yield ImageFile(row.name, row.labels, row.content)


def _images(
    items: list[Item], split: str, root: Path, copied: Copied, told: Callable[[int], object]
) -> Iterator[ImageFile]:
    """Those whose header can be read, with their bytes."""
    for item in items:
        told(1)
        try:
            check_header(item.path)
            with open_binary(item.path) as file:
                content = file.read()
        except BadImage as bad:
            copied.bad.append(BadImage(bad.path, bad.reason))
            continue
        yield ImageFile(_name(item, split, root), item.labels, content)


def _name(item: Item, split: str, root: Path) -> str:
    """An image's name in its class."""
    name = relative(item.path, root)
    parts = name.split("/")
    if ".." in parts:
        return parts[-1]
    if split and len(parts) > 1 and parts[0] in SPLIT_NAMES:
        parts = parts[1:]
    if len(item.labels) == 1 and len(parts) > 1 and parts[0] == item.labels[0]:
        parts = parts[1:]
    return "/".join(parts)
