"""Sources whose pictures are inside of files, or come from elsewhere, by what their name says."""

import dataclasses
from collections.abc import Callable

from vit.data.samples import Listed
from vit.data.sources import hub_datasets, torchvision_sets
from vit.data.sources.asked import Asked
from vit.data.sources.faults import Faults
from vit.data.sources.remote_shards import is_remote, read_remote, remote_pictures
from vit.data.sources.shard_names import is_shards, shard_files
from vit.data.sources.shards import read_shards, shard_pictures
from vit.errors import ConfigError, printable

Reader = Callable[[Asked], Listed]
COLUMNS = ("image_column", "label_column")


def _reading(read: Callable[[str, Faults], Listed]) -> Reader:
    """A reader of what has no columns."""

    def reader(asked: Asked) -> Listed:
        _refuse(asked, "images", *COLUMNS)
        return _wanted(read(asked.data, asked.faults), asked)

    return reader


def _read_dataset(asked: Asked) -> Listed:
    _refuse(asked, "images")
    listed = hub_datasets.read_dataset(asked.data, asked.image_column, asked.label_column)
    return _wanted(listed, asked)


def _read_torchvision(data: str, _: Faults) -> Listed:
    return torchvision_sets.read_torchvision(data)


def _wanted(listed: Listed, asked: Asked) -> Listed:
    splits = {name: listed.splits[name] for name in asked.needed(listed.splits)}
    return dataclasses.replace(listed, splits=splits, part="split")


def _refuse(asked: Asked, *names: str) -> None:
    for name in names:
        if (value := getattr(asked, name)) is not None:
            raise ConfigError(
                f"{name}={value!r}: {printable(asked.data)} is no list; leave it out, or give a "
                "list (.csv, .jsonl)"
            )


PACKED: tuple[tuple[Callable[[str], bool], Reader], ...] = (
    (hub_datasets.is_named, _read_dataset),
    (torchvision_sets.is_named, _reading(_read_torchvision)),
    (is_remote, _reading(read_remote)),
    (is_shards, _reading(read_shards)),
)
"""Which data each reader takes, the first one that does."""


def pictures_inside(data: str) -> tuple[list[str], list[str]] | None:
    """All pictures that `data` packs, which need no classes, and notes; None where it is no such.

    Raises:
        DataError: It cannot be read, or has no pictures.
    """
    if hub_datasets.is_named(data):
        listed = hub_datasets.read_dataset(data, None, None, labelled=False)
    elif torchvision_sets.is_named(data):
        listed = torchvision_sets.read_torchvision(data)
    elif is_remote(data):
        return remote_pictures(data)
    elif is_shards(data):
        return shard_pictures(shard_files(data), data)
    else:
        return None
    return [item.path for items in listed.splits.values() for item in items], listed.notes
