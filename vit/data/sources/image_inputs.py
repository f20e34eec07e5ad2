"""Lists the images to predict: files, folders, patterns, and lists of images."""

import glob
import os
from collections.abc import Iterable

from vit.data.sources import builtin_datasets
from vit.data.sources.file_walk import FOREIGN, SUFFIXES, Walk
from vit.data.sources.image_list import SUFFIXES as LISTS
from vit.data.sources.image_list import images_in
from vit.data.sources.input_hints import no_match
from vit.data.sources.remote_shards import is_remote
from vit.data.sources.source_registry import images_inside
from vit.errors import DataError, printable


def list_images(inputs: Iterable[str], *, notes: list[str] | None = None) -> list[str]:
    """Files to predict: each input is a file, a folder (walked) or a glob; their order is kept.

    The name of a built-in set stands for its validation images, where no file has that name; a
    list (.csv, .jsonl...) for the images that it names.

    Shards, a folder of them, addresses of them and `hf:` data sets stand for all their images.

    A file that is missing or no image stays in the list, so that it is reported at its place.

    Args:
        inputs: What the user gave.
        notes: Receives what was left out of folders.

    Raises:
        DataError: A folder has no images, a glob matches nothing, or a list is damaged.
    """
    found: list[str] = []
    for given in inputs:
        is_glob = glob.has_magic(given) and not os.path.lexists(given) and not is_remote(given)
        paths = sorted(glob.glob(given, recursive=True)) if is_glob else [given]
        if not paths:
            raise DataError(no_match(given))
        if given in builtin_datasets.SETS and not os.path.lexists(given):
            paths = [str(builtin_datasets.SETS[given]() / "val")]
        listed: list[str] = []
        for path in paths:
            listed += _images_of(path, notes)
        # ** matches folders, and what is in them
        found += {os.path.normpath(path): path for path in listed}.values() if is_glob else listed
    return found


def _images_of(path: str, notes: list[str] | None) -> list[str]:
    """The images in a list, a folder, or shards; else the path itself; none needs a class."""
    if os.path.isdir(path):
        return _walked(path, notes)
    if path.lower().endswith(LISTS) and os.path.isfile(path):
        return images_in(path, notes)
    return _packed(path, notes) or [path]


def _packed(path: str, notes: list[str] | None) -> list[str]:
    """The images inside of files or from elsewhere that `path` means; none if it means none."""
    images, more = images_inside(path) or ([], [])
    if notes is not None:
        notes += [f"{printable(path)}: {note}" for note in more]
    return images


def _walked(folder: str, notes: list[str] | None) -> list[str]:
    # Images of foreign formats are listed too: each gets its error record, and none is lost.
    walk = Walk(folder, suffixes=SUFFIXES | FOREIGN)
    images = walk.images(folder)
    if not images and (packed := _packed(folder, notes)):
        return packed
    if not images:
        raise DataError(f"{printable(folder)}: no images in this folder")
    if notes is not None:
        notes += [f"{printable(folder)}: {note}" for note in walk.notes()]
    return images
