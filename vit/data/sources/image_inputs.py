"""Inputs of prediction: files, folders, globs, image lists and shards, as a list of images."""

import glob
import os
from collections.abc import Iterable

from vit.data.sources import builtin_datasets, huggingface_datasets, torchvision_datasets
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.file_walk import IMAGE_SUFFIXES, UNSUPPORTED_SUFFIXES, FolderWalker
from vit.data.sources.image_list import images_in
from vit.data.sources.input_hints import no_match_message
from vit.data.sources.list_files import SUFFIXES as LIST_SUFFIXES
from vit.data.sources.open_dataset import read_source
from vit.data.sources.remote_shards import download_shards, is_remote
from vit.data.sources.tar_shards import is_shards, list_shard_images, shard_files
from vit.errors import DataError
from vit.text import printable


def list_images(inputs: Iterable[str], *, notes: list[str] | None = None) -> list[str]:
    """The images to predict, in the order of the inputs.

    A folder stands for all images under it; an image list (.csv, .jsonl...), shards and an `hf:`
    dataset for the images they hold; the name of a built-in dataset, unless a file has that name,
    for its validation images. A missing file or one that is no image stays in the result, so that
    its error is reported in its place.
    """
    images: list[str] = []
    for name in inputs:
        is_glob = glob.has_magic(name) and not os.path.lexists(name) and not is_remote(name)
        paths = sorted(glob.glob(name, recursive=True)) if is_glob else [name]
        if not paths:
            raise DataError(no_match_message(name))
        if name in builtin_datasets.DATASETS and not os.path.lexists(name):
            paths = [str(builtin_datasets.DATASETS[name]() / "val")]
        found = [image for path in paths for image in _expand(path, notes)]
        # `**` matches folders and the files in them: keep one of each.
        images += {os.path.normpath(path): path for path in found}.values() if is_glob else found
    return images


def _expand(path: str, notes: list[str] | None) -> list[str]:
    """The images of a folder, a list or shards; else the path itself."""
    if os.path.isdir(path):
        return _list_folder(path, notes)
    if path.lower().endswith(LIST_SUFFIXES) and os.path.isfile(path):
        return images_in(path, notes)
    return _list_packed(path, notes) or [path]


def _list_packed(path: str, notes: list[str] | None) -> list[str]:
    """The images in shards or a named dataset, without their classes; none of other sources."""
    if is_remote(path) or is_shards(path):
        files, downloaded = download_shards(path) if is_remote(path) else (shard_files(path), [])
        images, more = list_shard_images(files, path)
        more = downloaded + more
    elif huggingface_datasets.is_named(path) or torchvision_datasets.is_named(path):
        index = read_source(DatasetSpec(path, labels=False, all_splits=True))
        images = [record.path for records in index.splits.values() for record in records]
        more = index.notes
    else:
        return []
    if notes is not None:
        notes += [f"{printable(path)}: {note}" for note in more]
    return images


def _list_folder(folder: str, notes: list[str] | None) -> list[str]:
    # Images of unsupported formats are listed too, so that each gets its error.
    walker = FolderWalker(folder, suffixes=IMAGE_SUFFIXES | UNSUPPORTED_SUFFIXES)
    images = walker.images(folder)
    if not images and (packed := _list_packed(folder, notes)):
        return packed
    if not images:
        there = walker.other_files(folder)
        raise DataError(f"{printable(folder)}: no images in this folder{there}")
    if notes is not None:
        notes += [f"{printable(folder)}: {note}" for note in walker.notes()]
    return images
