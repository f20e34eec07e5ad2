"""torchvision datasets: `torchvision:NAME`, downloaded by torchvision to the user's cache.

Datasets of image files are read in place. Datasets of arrays are written once as lossless PNG files
in tar shards, which appear complete or not at all.
"""

import inspect
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vit.atomic_files import atomic_folder
from vit.data.dataset_types import DatasetIndex, ImageFile, ImageRecord
from vit.data.sources.dataset_export import write_shards
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.tar_shards import read_shards
from vit.errors import DataError, error_text
from vit.paths import user_cache
from vit.text import nearest_names, printable

PREFIX = "torchvision:"
SPLIT_NAMES = {"train": ("train", "trainval"), "val": ("val", "valid"), "test": ("test",)}
"""Our split -> torchvision's names of it; the first one that a dataset accepts."""
FILE_ATTRIBUTES = (
    ("samples", None), ("_samples", None), ("_image_files", "_labels"), ("_images", "_labels"),
)  # fmt: skip
"""Attributes in which datasets of files keep paths and labels; None: pairs of both."""
SHARD_BYTES = 2**28


def is_named(data: str) -> bool:
    """Whether `data` begins with `torchvision:`."""
    return data.startswith(PREFIX)


def read_torchvision(spec: DatasetSpec) -> DatasetIndex:
    """Index the images of a torchvision dataset, a class of `torchvision.datasets`."""
    data = spec.data
    if spec.captions:
        expected = "give a list of captions, tar shards or hf:NAME"
        raise DataError(f"{data}: no captions, it has one class an image; {expected}")
    name = data.removeprefix(PREFIX)
    dataset_class = _find_class(name, data)
    cache = user_cache() / "torchvision"
    shards = cache / "png" / f"{name}-v1"
    if shards.is_dir():
        return read_shards(DatasetSpec(str(shards)))
    datasets = dict(_build_splits(dataset_class, data, cache))
    if not datasets:
        raise DataError(f"{data}: it has neither train nor test")
    files = {split: _image_files(dataset) for split, dataset in datasets.items()}
    if all(found is not None for found in files.values()):
        classes = {split: _class_names(dataset) for split, dataset in datasets.items()}
        splits = {
            split: sorted(
                ImageRecord(path, (_class_name(label, classes[split], data),))
                for path, label in found
            )
            for split, found in files.items()
            if found is not None
        }
        locations = {split: printable(data) + (f" ({split})" if split else "") for split in splits}
        return DatasetIndex(cache, splits, locations)
    with atomic_folder(shards) as folder:
        for split, dataset in datasets.items():
            images = _encoded_images(dataset, data)
            write_shards(folder, split, images, SHARD_BYTES, in_class_folders=False)
    return read_shards(DatasetSpec(str(shards)))


def _find_class(name: str, data: str) -> Any:
    from torchvision import datasets

    dataset_class = getattr(datasets, name, None)
    downloadable = [
        one for one in dir(datasets)
        if inspect.isclass(getattr(datasets, one))
        and "download" in _parameters(getattr(datasets, one))
    ]  # fmt: skip
    if dataset_class is None or not inspect.isclass(dataset_class):
        near = nearest_names(name, downloadable, cutoff=0.5)
        hint = f"; is it {PREFIX}{near[0]}?" if near else f"; expected one such as {PREFIX}CIFAR10"
        raise DataError(f"{data}: torchvision has no dataset of that name{hint}")
    if name not in downloadable:
        raise DataError(
            f"{data}: torchvision does not download this dataset; get its images, and "
            "give their folder"
        )
    return dataset_class


def _parameters(dataset_class: Any) -> dict[str, Any]:
    try:
        return dict(inspect.signature(dataset_class).parameters)
    except (TypeError, ValueError):
        return {}


def _build_splits(dataset_class: Any, data: str, cache: Path) -> Iterator[tuple[str, Any]]:
    """Each split with its dataset; the empty name if the dataset has no splits."""
    parameters = _parameters(dataset_class)
    if "train" in parameters:
        yield "train", _build(dataset_class, data, cache, train=True)
        yield "test", _build(dataset_class, data, cache, train=False)
        return
    if "split" not in parameters:
        yield "", _build(dataset_class, data, cache)
        return
    for split, names in SPLIT_NAMES.items():
        for name in names:
            dataset = _build(dataset_class, data, cache, split=name)
            if dataset is not None:
                yield split, dataset
                break


def _build(dataset_class: Any, data: str, cache: Path, **settings: Any) -> Any:
    """The downloaded dataset; None if it has no split of that name."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return dataset_class(str(cache), download=True, **settings)
    except Exception as error:  # downloads raise errors of many libraries
        message = error_text(error)
        if "split" in settings and isinstance(error, ValueError) and "split" in message:
            return None
        raise DataError(
            f"{data}: cannot be downloaded ({message}); copy it to {cache}, or go online once"
        ) from None


def _image_files(dataset: Any) -> list[tuple[str, Any]] | None:
    """Paths and labels of a dataset of files; None for a dataset of arrays."""
    for paths, labels in FILE_ATTRIBUTES:
        pairs = getattr(dataset, paths, None)
        if not isinstance(pairs, list | tuple) or not pairs:
            continue
        if labels is not None and hasattr(dataset, labels):
            pairs = list(zip(pairs, getattr(dataset, labels), strict=True))
        elif labels is not None:
            continue
        first = pairs[0]
        if isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], str | os.PathLike):
            return [(os.fspath(path), label) for path, label in pairs]
    return None


def _class_names(dataset: Any) -> list[str]:
    return [
        " / ".join(name) if isinstance(name, tuple | list) else str(name)
        for name in getattr(dataset, "classes", None) or []
    ]


def _class_name(label: Any, names: list[str], data: str) -> str:
    try:
        number = int(label)
    except (TypeError, ValueError):
        raise DataError(
            f"{data}: an image of this dataset has no single class ({label!r:.60})"
        ) from None
    if names and not 0 <= number < len(names):
        raise DataError(f"{data}: label {number} is none of its {len(names)} classes")
    return names[number] if names else str(number)


def _encoded_images(dataset: Any, data: str) -> Iterator[ImageFile]:
    names = _class_names(dataset)
    width = len(str(len(dataset)))
    for number in range(len(dataset)):
        image, label = dataset[number]
        content = io.BytesIO()
        image.save(content, "PNG")
        name = f"{number:0{width}}.png"
        yield ImageFile(name, (_class_name(label, names, data),), content.getvalue())
