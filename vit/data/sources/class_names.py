"""Finds the split folders and the class folders of a data set, and matches classes by name."""

import difflib
import unicodedata
from collections.abc import Collection, Sequence
from pathlib import Path

from vit.data.sources.file_walk import Walk
from vit.errors import DataError, printable
from vit.text import join_names, plural

VAL_NAMES = ("val", "valid", "validation", "test")
UNSEEN = "unseen"
"""Folder of images that are only for evaluation: of combinations that training lacks."""
SPLIT_NAMES = ("train", *VAL_NAMES, UNSEEN)
LAYOUT = "expected DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg, or DATA/CLASS/*.jpg"

SampleImages = dict[str, list[str]]
"""Paths by class name."""


def split_folders(root: Path, walk: Walk) -> tuple[dict[str, Path], list[str]]:
    """The split folders in `root` by name, and the other folders beside them.

    There are none where each folder is a class: without `train`, and with other folders.
    """
    for name in SPLIT_NAMES:
        if (root / name).is_file():
            raise DataError(f"{printable(root / name)} is a file, not a folder; {LAYOUT}")
    names = walk.subfolders(str(root))
    splits = {name: root / name for name in SPLIT_NAMES if name in names}
    beside = [name for name in names if name not in splits]
    return (splits, beside) if "train" in splits or not beside else ({}, [])


def read_classes(folder: Path, walk: Walk) -> SampleImages:
    """The images in each class folder in `folder`; classes sorted by name.

    Raises:
        DataError: There are no class folders.
    """
    names = walk.subfolders(str(folder))
    loose = walk.loose_images(str(folder))
    if not names:
        what = f"{plural(len(loose), 'image')} straight in it" if loose else "no folders in it"
        lists = lists_beside(folder)
        raise DataError(f"{printable(folder)} has no class folders ({what}); {LAYOUT}{lists}")
    return {name: walk.images(str(folder / name)) for name in names}


def lists_beside(folder: Path) -> str:
    """What to say where a folder has lists that may be what was meant; empty without any."""
    endings = (".csv", ".tsv", ".jsonl", ".ndjson")
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in endings)
    return f"; or give the list there: {printable(folder / names[0])}" if names else ""


def check_classes(images: SampleImages, where: Path) -> None:
    """Refuse training images that leave nothing to learn."""
    names = join_names([printable(name) for name in images])
    empty = [printable(name) for name, paths in images.items() if not paths]
    if len(empty) == len(images):
        raise DataError(f"{printable(where)}: no images in the class folders {names}; {LAYOUT}")
    if empty:
        raise DataError(
            f"{printable(where)}: no readable images in class {join_names(empty)}; "
            f"add some, or remove the folder"
        )
    if len(images) == 1:
        raise DataError(
            f"{printable(where)}: only one class ({names}), nothing to tell apart; "
            f"add a folder for each other class{lists_beside(where)}"
        )


def matched(
    images: SampleImages, classes: Sequence[str], *, where: str, owner: str
) -> tuple[SampleImages, list[str]]:
    """`images` under the names in `classes`, and notes for the user.

    Args:
        images: Of a split other than the training's.
        classes: The only names that count.
        where: The folder of `images`.
        owner: Whose names `classes` are, for messages.

    Raises:
        DataError: A class is not in `classes`.
    """
    there = [name for name, paths in images.items() if paths]
    targets, notes = matched_names(there, classes, where=where, owner=owner)
    found: SampleImages = {name: [] for name in classes}
    for name, target in targets.items():
        found[target] = found[target] + images[name]
    return found, notes + missing_notes(found, where)


def matched_names(
    names: Collection[str],
    classes: Sequence[str],
    *,
    where: str,
    owner: str,
    remedy: str = "rename or remove the folders",
) -> tuple[dict[str, str], list[str]]:
    """The class that each of `names` stands for, and notes for the user.

    Args:
        names: Of classes of a split other than the training's.
        classes: The only names that count.
        where: The split, for messages.
        owner: Whose names `classes` are.
        remedy: What to do about others.

    Raises:
        DataError: One of `names` is not in `classes`.
    """
    known = set(classes)
    equal = {unicodedata.normalize("NFC", name): name for name in classes}
    targets: dict[str, str] = {}
    notes, unknown = [], []
    for name in names:
        target = name if name in known else equal.get(unicodedata.normalize("NFC", name))
        if target is None:
            unknown.append(name)
            continue
        if target != name:
            notes.append(f"{where}/{printable(name)} is class {target!a}, in other Unicode")
        targets[name] = target
    if unknown:
        near = difflib.get_close_matches(unknown[0], classes, n=1)
        hint = f" (is {printable(unknown[0])} {printable(near[0])}?)" if near else ""
        names = join_names([printable(name) for name in unknown])
        raise DataError(f"{where} has classes that {owner} does not have: {names}{hint}; {remedy}")
    return targets, notes


def missing_notes(images: SampleImages, where: str) -> list[str]:
    """Which classes have no images, if any."""
    missing = [printable(name) for name, paths in images.items() if not paths]
    return [f"{where} has no images of class {join_names(missing)}"] if missing else []
