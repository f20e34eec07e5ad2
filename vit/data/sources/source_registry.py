"""Sources whose images are inside of files, or come from elsewhere, by what their name says."""

import dataclasses
from collections.abc import Callable

from vit.data.dataset_types import Listed
from vit.data.sources import huggingface_datasets, torchvision_datasets
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.remote_shards import is_remote, read_remote, remote_images
from vit.data.sources.row_errors import Faults
from vit.data.sources.tar_shards import is_shards, read_shards, shard_files, shard_images
from vit.errors import ConfigError, printable

Reader = Callable[[DatasetSpec], Listed]
COLUMNS = ("image_column", "label_column")


def _reading(read: Callable[[str, Faults], Listed]) -> Reader:
    """A reader of what has no columns."""

    def reader(asked: DatasetSpec) -> Listed:
        _refuse(asked, "images", *COLUMNS)
        return _wanted(read(asked.data, asked.faults), asked)

    return reader


def _read_dataset(asked: DatasetSpec) -> Listed:
    _refuse(asked, "images")
    listed = huggingface_datasets.read_dataset(asked.data, asked.image_column, asked.label_column)
    return _wanted(listed, asked)


def _read_torchvision(data: str, _: Faults) -> Listed:
    return torchvision_datasets.read_torchvision(data)


def _wanted(listed: Listed, asked: DatasetSpec) -> Listed:
    splits = {name: listed.splits[name] for name in asked.needed(listed.splits)}
    return dataclasses.replace(listed, splits=splits, part="split")


def _refuse(asked: DatasetSpec, *names: str) -> None:
    for name in names:
        if (value := getattr(asked, name)) is not None:
            raise ConfigError(
                f"{name}={value!r}: {printable(asked.data)} is no list; leave it out, or give a "
                "list (.csv, .jsonl)"
            )


PACKED: tuple[tuple[Callable[[str], bool], Reader], ...] = (
    (huggingface_datasets.is_named, _read_dataset),
    (torchvision_datasets.is_named, _reading(_read_torchvision)),
    (is_remote, _reading(read_remote)),
    (is_shards, _reading(read_shards)),
)
"""Which data each reader takes, the first one that does."""


def images_inside(data: str) -> tuple[list[str], list[str]] | None:
    """All images that `data` packs, which need no classes, and notes; None where it is no such.

    Raises:
        DataError: It cannot be read, or has no images.
    """
    if huggingface_datasets.is_named(data):
        listed = huggingface_datasets.read_dataset(data, None, None, labelled=False)
    elif torchvision_datasets.is_named(data):
        listed = torchvision_datasets.read_torchvision(data)
    elif is_remote(data):
        return remote_images(data)
    elif is_shards(data):
        return shard_images(shard_files(data), data)
    else:
        return None
    return [item.path for items in listed.splits.values() for item in items], listed.notes
