"""`torchvision:NAME`: torchvision's own sets, downloaded into the user's cache by its own code.

Sets of files are used where they lie. Sets of arrays are written once as PNG files in tar shards,
without loss, whole or not at all.
"""

import difflib
import inspect
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vit.data.dataset_types import Item, Listed
from vit.data.sources.dataset_writer import ImageFile, whole_folder, write_shards
from vit.data.sources.tar_shards import read_shards
from vit.errors import DataError, printable
from vit.paths import user_cache

PREFIX = "torchvision:"
WORDS = {"train": ("train", "trainval"), "val": ("val", "valid"), "test": ("test",)}
"""What torchvision calls each split; the first that a set knows."""
LISTS = (
    ("samples", None), ("_samples", None), ("_image_files", "_labels"), ("_images", "_labels"),
)  # fmt: skip
"""Where sets of files keep paths and labels."""
SHARD_BYTES = 2**28


def is_named(data: str) -> bool:
    """Whether `data` is such a name."""
    return data.startswith(PREFIX)


def read_torchvision(data: str) -> Listed:
    """The images of a named set of torchvision.

    Raises:
        DataError: There is no such set, it cannot be downloaded, or has no single class an image.
    """
    name = data.removeprefix(PREFIX)
    kind = _class_of(name, data)
    cache = user_cache() / "torchvision"
    written = cache / "png" / f"{name}-v1"
    if written.is_dir():
        return read_shards(str(written))
    sets = dict(_built(kind, data, cache))
    if not sets:
        raise DataError(f"{printable(data)}: it has neither train nor test")
    listed = {split: _files(one) for split, one in sets.items()}
    if all(found is not None for found in listed.values()):
        names = {split: _names(one) for split, one in sets.items()}
        splits = {
            split: sorted(Item(path, (_name(label, names[split], data),)) for path, label in found)
            for split, found in listed.items()
            if found is not None
        }
        where = {split: printable(data) + (f" ({split})" if split else "") for split in splits}
        return Listed(cache, splits, where)
    with whole_folder(written) as fresh:
        for split, one in sets.items():
            write_shards(fresh, split, _images(one, data), SHARD_BYTES, foldered=False)
    return read_shards(str(written))


def _class_of(name: str, data: str) -> Any:
    from torchvision import datasets as sets

    kind = getattr(sets, name, None)
    known = [
        one for one in dir(sets)
        if inspect.isclass(getattr(sets, one)) and "download" in _settings(getattr(sets, one))
    ]  # fmt: skip
    if kind is None or not inspect.isclass(kind):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; is it {PREFIX}{near[0]}?" if near else f"; expected one such as {PREFIX}CIFAR10"
        raise DataError(f"{printable(data)}: torchvision has no set of that name{hint}")
    if name not in known:
        raise DataError(
            f"{printable(data)}: torchvision does not download this set; get its images, and "
            "give their folder"
        )
    return kind


def _settings(kind: Any) -> dict[str, Any]:
    try:
        return dict(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return {}


def _built(kind: Any, data: str, cache: Path) -> Iterator[tuple[str, Any]]:
    """Each split with its set."""
    settings = _settings(kind)
    if "train" in settings:
        yield "train", _build(kind, data, cache, train=True)
        yield "test", _build(kind, data, cache, train=False)
        return
    if "split" not in settings:
        yield "", _build(kind, data, cache)
        return
    for split, words in WORDS.items():
        for word in words:
            built = _build(kind, data, cache, split=word)
            if built is not None:
                yield split, built
                break


def _build(kind: Any, data: str, cache: Path, **settings: Any) -> Any:
    """The set, downloaded; None where it does not know a split of that name."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return kind(str(cache), download=True, **settings)
    except Exception as error:  # downloads fail in the ways of many libraries
        words = " ".join(str(error).split())[:200] or type(error).__name__
        if "split" in settings and isinstance(error, ValueError) and "split" in words:
            return None
        raise DataError(
            f"{printable(data)}: cannot be downloaded ({printable(words)}); bring it to "
            f"{printable(cache)}, or go online once"
        ) from None


def _files(one: Any) -> list[tuple[str, Any]] | None:
    """Paths and labels of a set of files; None of a set of arrays."""
    for paths, labels in LISTS:
        found = getattr(one, paths, None)
        if not isinstance(found, list | tuple) or not found:
            continue
        if labels is not None and hasattr(one, labels):
            found = list(zip(found, getattr(one, labels), strict=True))
        elif labels is not None:
            continue
        first = found[0]
        if isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], str | os.PathLike):
            return [(os.fspath(path), label) for path, label in found]
    return None


def _names(one: Any) -> list[str]:
    return [
        " / ".join(name) if isinstance(name, tuple | list) else str(name)
        for name in getattr(one, "classes", None) or []
    ]


def _name(label: Any, names: list[str], data: str) -> str:
    try:
        number = int(label)
    except (TypeError, ValueError):
        raise DataError(
            f"{printable(data)}: an image of this set has no single class ({label!r:.60})"
        ) from None
    if names and not 0 <= number < len(names):
        raise DataError(f"{printable(data)}: label {number} is none of its {len(names)} classes")
    return names[number] if names else str(number)


def _images(one: Any, data: str) -> Iterator[ImageFile]:
    names = _names(one)
    width = len(str(len(one)))
    for number in range(len(one)):
        image, label = one[number]
        content = io.BytesIO()
        image.save(content, "PNG")
        name = f"{number:0{width}}.png"
        yield ImageFile(name, (_name(label, names, data),), content.getvalue())
