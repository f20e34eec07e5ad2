"""What looks wrong in a data set although it can be trained on: told before time is spent on it."""

import contextlib
import hashlib
import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from vit.data.archives import MAX_BYTES, open_binary, relative, size_of
from vit.data.sources.class_names import SampleImages
from vit.errors import BadImage, printable
from vit.text import join_names, plural

IMBALANCE = 10
"""Times the smallest class from which on the largest one is worth a note."""
FEW = 10
"""Images a class below which training is a poor idea."""
MOST_COMPARED = 50_000
"""Images up to which equal files are looked for."""
TAIL = 4096


def alike_names(classes: Sequence[str]) -> dict[str, list[str]]:
    """Classes whose names look the same, by their common form."""
    by_form: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        by_form[unicodedata.normalize("NFC", name)].append(name)
    return {form: names for form, names in by_form.items() if len(names) > 1}


def similar_names(classes: Sequence[str]) -> list[list[str]]:
    """Classes whose names differ in case or white space alone."""
    by_form: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        by_form[" ".join(unicodedata.normalize("NFC", name).casefold().split())].append(name)
    found = [names for names in by_form.values() if len(names) > 1]
    return [names for names in found if names not in alike_names(classes).values()]


def name_notes(classes: Sequence[str]) -> list[str]:
    """Classes whose names look the same, or nearly so."""
    nearly = [
        f"classes that differ in case or spaces alone: {', '.join(map(ascii, names))}; give them "
        "one name if they are one class"
        for names in similar_names(classes)
    ]
    return nearly + [
        f"classes that look the same, equal in normalised Unicode: {', '.join(map(ascii, names))} "
        f"({printable(form)})"
        for form, names in alike_names(classes).items()
    ]


def few_note(counts: Mapping[str, int], total: int | None = None) -> str:
    """Too few images of so many a class to learn from; empty where there are enough.

    `total` is their number where some have several classes.
    """
    total = sum(counts.values()) if total is None else total
    if total >= FEW * len(counts):
        return ""
    return f"only {plural(total, 'training image')} for {len(counts)} classes: very few"


def imbalance_note(counts: Mapping[str, int]) -> str:
    """Very unequal classes; empty where they are not."""
    least, most = min(counts, key=lambda c: counts[c]), max(counts, key=lambda c: counts[c])
    if counts[most] < IMBALANCE * counts[least]:
        return ""
    return (
        f"imbalanced classes: {printable(least)} has the fewest, "
        f"{plural(counts[least], 'image')}; {printable(most)} has {counts[most]:,}"
    )


def count_notes(train: SampleImages, total: int | None = None) -> list[str]:
    """Too few images, or very unequal classes; `total` of them where some have several."""
    counts = {name: len(paths) for name, paths in train.items()}
    return [note for note in (few_note(counts, total), imbalance_note(counts)) if note]


def equal_notes(train: SampleImages, val: SampleImages, root: str) -> list[str]:
    """Files of the same content in training and validation, or under two classes."""
    where = {path: ("train", name) for name, paths in train.items() for path in paths}
    where |= {path: ("val", name) for name, paths in val.items() for path in paths}
    if len(where) > MOST_COMPARED:
        return [f"equal files were not looked for: more than {MOST_COMPARED:,} images"]
    leaks: list[str] = []
    twins: list[str] = []
    for group in equal_files(where):
        first, other, kinds = apart(group, where)
        if not kinds:
            continue
        pair = " = ".join(printable(relative(path, Path(root))) for path in (first, other))
        (leaks if "split" in kinds else twins).append(pair)
    notes = []
    if leaks:
        images = plural(len(leaks), "image")
        notes.append(f"{images} in training and in validation (leak): {join_names(leaks, 3)}")
    if twins:
        notes.append(
            f"{plural(len(twins), 'image')} in more than one class: {join_names(twins, 3)}"
        )
    return notes


Place = TypeVar("Place")


def apart(
    group: Sequence[Place], where: Mapping[Place, tuple[str, object]]
) -> tuple[Place, Place, set[str]]:
    """What is wrong with a group of images that are the same.

    Args:
        group: At least two of them.
        where: Split and class of each.

    Returns:
        The first image, one whose place differs most from its place (or the second), and by
        what any of them differ: `split`, `class`, both or none.
    """
    first = group[0]
    names = ("split", "class")
    kinds = {name for at, name in enumerate(names) if len({where[one][at] for one in group}) > 1}
    split, label = where[first]
    by_difference = sorted(
        group[1:], key=lambda one: (where[one][0] == split, where[one][1] == label)
    )
    return first, by_difference[0], kinds


def equal_files(paths: Iterable[str]) -> list[list[str]]:
    """Groups of files with the same bytes; unreadable ones are in none."""
    groups = [list(paths)]
    for kind in (_size, _tail, _digest):  # each reads more of fewer files
        groups = [part for group in groups for part in _grouped(group, kind)]
    return groups


def _grouped(paths: list[str], kind: Callable[[str], object]) -> list[list[str]]:
    by_kind: dict[object, list[str]] = defaultdict(list)
    for path in paths:
        with contextlib.suppress(OSError, BadImage):  # reported when its header is checked
            by_kind[kind(path)].append(path)
    return [group for group in by_kind.values() if len(group) > 1]


def _size(path: str) -> int:
    """Bytes of a file that the reader would look into: no other is read, which may never end."""
    size = size_of(path)
    if not 0 < size <= MAX_BYTES:
        raise BadImage(path, f"an image of {size:,} bytes")
    return size


def _tail(path: str) -> bytes:
    with open_binary(path) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
        return hashlib.blake2b(file.read(TAIL)).digest()


def _digest(path: str) -> bytes:
    digest = hashlib.blake2b()
    with open_binary(path) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.digest()
