"""Expands image arguments: files, folders, glob patterns, and a list on standard input."""

import os
import sys
from collections.abc import Sequence

from vit.commands.command_output import notify
from vit.errors import DataError, printable
from vit.paths import did_you_mean


def find_images(
    inputs: Sequence[str], *, lists: bool = False, command: str = "predict"
) -> list[str]:
    """Paths of all `inputs` in their order, `-` replaced by the list on standard input.

    With `lists`, a .parquet, .jsonl or .csv file is replaced by its column `image`.

    Raises:
        DataError: There are no images.
    """
    images: list[str] = []
    notes: list[str] = []
    for word in inputs:
        if word == "-":
            images += read_path_list()
        elif lists and is_list(word):
            from vit.inference.remote_files import read_list

            images += read_list(word)
        else:
            images += expand(word, notes, alone=len(inputs) == 1)
    for note in notes:
        notify(f"vit {command}: {note}")
    if not images:
        raise DataError("the list on standard input is empty; give one path a line")
    return images


def is_list(word: str) -> bool:
    """Whether it is a list file that Ray's workers read."""
    from vit.inference.remote_files import LISTS

    return word.lower().endswith(LISTS)


def expand(word: str, notes: list[str], *, alone: bool) -> list[str]:
    """Paths that one input means; a folder without images is an error of its own among others.

    Raises:
        DataError: A pattern matches nothing, or the only input is a folder without images.
    """
    from vit.data.sources.image_inputs import list_images
    from vit.data.sources.input_hints import refuse_mistaken

    if alone:  # among others it has its row
        refuse_mistaken(word)
    try:
        found = list_images([word], notes=notes)
        if alone and found == [word] and (hint := did_you_mean(word)):
            notes.append(f"{printable(word)} is not there{hint}")
        return found
    except DataError:
        if alone or not os.path.isdir(word):
            raise
        return [word]


def read_path_list() -> list[str]:
    """Paths on standard input, one a line, or with NUL between them as `find -print0` writes."""
    raw = sys.stdin.buffer.read()
    if b"\0" in raw:
        names = raw.split(b"\0")
    else:
        names = [line.removesuffix(b"\r") for line in raw.split(b"\n")]
    return [os.fsdecode(name) for name in names if name]
