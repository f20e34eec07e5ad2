"""Expands image arguments: files, folders, glob patterns, and a list on standard input."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from vit.errors import DataError
from vit.paths import did_you_mean, path_argument
from vit.text import Notify, printable


def input_paths(inputs: Any) -> list[str]:
    """One input or a list of them, of a Python call, as text."""
    listed = inputs if isinstance(inputs, list | tuple) else [inputs]
    wanted = "files, folders, patterns or lists; images in memory are for vit.Predictor"
    return [path_argument("inputs", one, wanted) for one in listed]


def find_images(inputs: Sequence[str], *, notify: Notify, lists: bool = False) -> list[str]:
    """Paths of all `inputs` in their order, `-` replaced by the list on standard input.

    With `lists`, those that only Ray's workers read are replaced by their images: see
    `read_column`.
    """
    images: list[str] = []
    notes: list[str] = []
    for word in inputs:
        if word == "-":
            images += read_path_list()
        elif lists and (listed := read_column(word)) is not None:
            images += listed
        else:
            images += expand(word, notes, alone=len(inputs) == 1)
    for note in notes:
        notify(note)
    if not images:
        raise DataError("the list on standard input is empty; give one path a line")
    return images


def read_column(word: str) -> list[str] | None:
    """Images of a list at a URL, in Parquet, or with URLs in its column `image`; None of others.

    Names in a list of URLs that are none are relative to its folder, as in all local lists.
    """
    from vit.inference.ray_inference import LISTS, is_url, read_list

    if not word.lower().endswith(LISTS):
        return None
    if is_url(word) or word.lower().endswith(".parquet"):
        return read_list(word)
    try:
        names = read_list(word)
    except DataError:  # it is missing, or has other columns: `expand` reads it, or says why not
        return None
    folder = os.path.dirname(word)
    urls = any(is_url(name) for name in names)
    return (
        [name if is_url(name) else os.path.join(folder, name) for name in names] if urls else None
    )


def expand(word: str, notes: list[str], *, alone: bool) -> list[str]:
    """Paths that one input means; a folder without images is an error of its own among others."""
    from vit.data.sources.dataset_spec import refuse_run_folder
    from vit.data.sources.open_dataset import list_images

    if alone:  # among others it has its row
        refuse_run_folder(word)
    try:
        found = list_images([word], notes=notes)
        if alone and found == [word] and (hint := did_you_mean(word)):
            notes.append(f"{printable(word)} is not there{hint}")
        return found
    except DataError:
        if alone or not os.path.isdir(word):
            raise
        return [word]


def input_rows(inputs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The rows of the image lists among `inputs`; see `list_rows`."""
    from vit.data.sources.dataset_spec import DatasetSpec, named_source
    from vit.data.sources.image_list import list_rows

    spec = partial(DatasetSpec, allow_outside=True, labels=False, reads_splits=False)
    found: dict[str, dict[str, Any]] = {}
    for word in inputs:
        rows = (
            list_rows(spec(word)) if named_source(word) == "list" and os.path.isfile(word) else {}
        )
        found |= {path: {**row, **found.get(path, {})} for path, row in rows.items()}
    return found


def read_path_list() -> list[str]:
    """Paths on standard input, one a line, or with NUL between them as `find -print0` writes."""
    raw = sys.stdin.buffer.read()
    if b"\0" in raw:
        names = raw.split(b"\0")
    else:
        names = [line.removesuffix(b"\r") for line in raw.split(b"\n")]
    return [os.fsdecode(name) for name in names if name]
