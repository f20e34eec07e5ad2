"""Opens a data set: an image folder, with or without a split of its own, shards, a named set...

    DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg      (or valid, validation, test)
    DATA/CLASS/*.jpg                                     we hold out a share of each class

Classes are matched by name, and the training's list is the only one. What was left out or looks
wrong is in the notes.
"""

import glob
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from vit.data import builtin
from vit.data.classes import (
    LAYOUT,
    VAL_NAMES,
    Pictures,
    check_classes,
    labelled,
    matched,
    read_classes,
    split_folders,
)
from vit.data.containers import relative
from vit.data.folders import FOREIGN, SUFFIXES, Walk, count, some
from vit.data.listed import labelled_listed, splits_of
from vit.data.oddities import count_notes, equal_notes, name_notes
from vit.data.opened import open_listed
from vit.data.samples import Item, Listed, Sample, Splits
from vit.data.seeding import random_seed
from vit.errors import DataError, printable

__all__ = ["Sample", "Splits", "list_images", "open_labelled", "open_splits", "relative"]


def open_source(
    data: str, *, image_column: str | None = None, label_column: str | None = None
) -> Listed:
    """All pictures of any source, by split.

    Raises:
        DataError: It cannot be read.
    """
    listed = open_listed(data, image_column=image_column, label_column=label_column)
    if listed is not None:
        return listed
    root, notes = resolve(data)
    walk = Walk(str(root))
    folders, _ = split_folders(root, walk)
    splits = {
        name: [Item(path, (label,)) for label, paths in read.items() for path in paths]
        for name, place in (folders or {"": root}).items()
        for read in [read_classes(place, walk)]
    }
    where = {name: printable(folders.get(name, root)) for name in splits}
    return Listed(root, splits, where, notes + walk.notes())


def open_splits(
    data: str,
    *,
    val_share: float,
    seed: int,
    image_column: str | None = None,
    label_column: str | None = None,
) -> Splits:
    """Open `data` for training.

    Args:
        data: A folder, shards, or the name of a set.
        val_share: Share of each class held out where the data have no validation folder.
        seed: Decides which ones.
        image_column: Column of the pictures in a table; found when left empty.
        label_column: Column of the classes in a table; found when left empty.

    Raises:
        DataError: It cannot be trained on as it is.
    """
    listed = open_listed(data, image_column=image_column, label_column=label_column)
    if listed is not None:
        return splits_of(listed, data, val_share=val_share, seed=seed, hold_out=hold_out)
    return _open_folder(data, val_share=val_share, seed=seed)


def _open_folder(data: str, *, val_share: float, seed: int) -> Splits:
    root, notes = resolve(data)
    walk = Walk(str(root))
    folders, beside = split_folders(root, walk)
    if folders and "train" not in folders:
        raise DataError(f"{printable(root)} has {some(list(folders))} but no train; {LAYOUT}")
    if beside:
        names = some([printable(name) for name in beside])
        notes.append(f"left out folders beside train: {names}")
    train = read_classes(folders.get("train", root), walk)
    check_classes(train, folders.get("train", root))
    notes += walk.notes()
    val_name = next((name for name in VAL_NAMES if name in folders), None)
    if val_name is None:
        train, val = hold_out(train, val_share=val_share, seed=seed, root=root)
        notes += _hold_out_notes(val, val_share)
    else:
        val, more = _read_val(folders[val_name], root, tuple(train))
        notes += more
        if val_name == "test":
            notes.append("no val folder: validates on test, so keep other pictures for the end")
    if not any(val.values()):
        raise DataError(f"{printable(root)}: no pictures left to validate on; add some")
    notes += name_notes(tuple(train)) + count_notes(train) + equal_notes(train, val, str(root))
    return Splits(
        classes=tuple(train),
        train=labelled(train, tuple(train)),
        val=labelled(val, tuple(train)),
        notes=tuple(notes),
        made=val_name is None,
        root=root,
    )


def _hold_out_notes(val: Pictures, val_share: float) -> list[str]:
    pictures = count(sum(map(len, val.values())), "picture")
    notes = [f"no validation folder: held out {pictures}, {val_share:.0%} of each class"]
    single = [printable(name) for name, paths in val.items() if not paths]
    if single:
        notes.append(f"held out none of class {some(single)}, which has only one picture")
    return notes


def _read_val(folder: Path, root: Path, classes: tuple[str, ...]) -> tuple[Pictures, list[str]]:
    walk = Walk(str(root))  # its own: a validation folder may well be a link to another one
    found = read_classes(folder, walk)
    val, notes = matched(found, classes, where=printable(folder), owner="train")
    return val, walk.notes() + notes


def open_labelled(
    data: str, *, split: str, classes: Sequence[str], held_out: Collection[str] = ()
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """Open one split of `data` for evaluation; a label is an index into `classes`.

    Args:
        data: A folder, or the name of a built-in set.
        split: `train`, `test`..., or `val` for the first validation folder there is.
        classes: Names of the classes of the model.
        held_out: The validation pictures of a split that we made, as `relative` names. Where the
            data have no validation folder, only these are taken, if there are any of them.

    Returns:
        Samples, and notes for the user.

    Raises:
        DataError: There is no such split, or it has a class that the model does not have.
    """
    if (listed := open_listed(data)) is not None:
        return labelled_listed(listed, data, split, classes, held_out)
    root, notes = resolve(data)
    walk = Walk(str(root))
    folders, _ = split_folders(root, walk)
    wanted = VAL_NAMES if split == "val" else (split,)
    name = next((name for name in wanted if name in folders), None)
    if name is None and (split != "val" or folders.keys() - {"train"}):
        there = some(list(folders)) or "class folders only"
        hint = "; leave the split out for held-out pictures" if not folders else ""
        raise DataError(f"{printable(root)}: no {printable(split)} folder; it has {there}{hint}")
    place = folders[name] if name else folders.get("train", root)
    found = read_classes(place, walk)
    if name is None:
        found, note = _without_training(found, held_out, root)
        notes.append(note)
    elif name != split:
        notes.append(f"measured on {name}/")
    found, more = matched(found, tuple(classes), where=printable(place), owner="the model")
    samples = labelled(found, tuple(classes))
    if not samples:
        raise DataError(f"{printable(place)}: no pictures; {LAYOUT}")
    return samples, tuple(notes + more + walk.notes())


def _without_training(
    pictures: Pictures, held_out: Collection[str], root: Path
) -> tuple[Pictures, str]:
    """Only the pictures that training held out, where they are from this folder."""
    names = set(held_out)
    kept = {
        label: [path for path in paths if relative(path, root) in names]
        for label, paths in pictures.items()
    }
    if any(kept.values()):
        held = count(sum(map(len, kept.values())), "picture")
        return kept, f"no validation folder: took the {held} that training held out"
    return pictures, f"no validation folder: took all {sum(map(len, pictures.values())):,} pictures"


def list_images(inputs: Iterable[str], *, notes: list[str] | None = None) -> list[str]:
    """Files to predict: each input is a file, a folder (walked) or a glob; their order is kept.

    The name of a built-in set stands for its validation pictures, where no file has that name.

    A file that is missing or no picture stays in the list, so that it is reported at its place.

    Args:
        inputs: What the user gave.
        notes: Receives what was left out of folders.

    Raises:
        DataError: A folder has no pictures, or a glob matches nothing.
    """
    found: list[str] = []
    for given in inputs:
        is_glob = glob.has_magic(given) and not os.path.lexists(given)
        paths = sorted(glob.glob(given, recursive=True)) if is_glob else [given]
        if not paths:
            raise DataError(f"{printable(given)}: matches no file")
        if given in builtin.SETS and not os.path.lexists(given):
            paths = [str(builtin.SETS[given]() / "val")]
        listed: list[str] = []
        for path in paths:
            listed += _pictures_of(path, notes)
        # ** matches folders, and what is in them
        found += {os.path.normpath(path): path for path in listed}.values() if is_glob else listed
    return found


def _pictures_of(path: str, notes: list[str] | None) -> list[str]:
    if not os.path.isdir(path) and (listed := open_listed(path)) is not None:
        if notes is not None:
            notes += [f"{printable(path)}: {note}" for note in listed.notes]
        return [item.path for items in listed.splits.values() for item in items]
    return _walked(path, notes) if os.path.isdir(path) else [path]


def _walked(folder: str, notes: list[str] | None) -> list[str]:
    # Pictures of foreign formats are listed too: each gets its error record, and none is lost.
    walk = Walk(folder, suffixes=SUFFIXES | FOREIGN)
    pictures = walk.pictures(folder)
    if not pictures:
        raise DataError(f"{printable(folder)}: no pictures in this folder")
    if notes is not None:
        notes += [f"{printable(folder)}: {note}" for note in walk.notes()]
    return pictures


def resolve(data: str) -> tuple[Path, list[str]]:
    """The folder that `data` names, and a note where it is also the name of a built-in set.

    Raises:
        DataError: There is neither.
    """
    if not data:
        raise DataError(f"no data given; {LAYOUT}")
    listed = open_listed(data)
    if listed is not None:
        return listed.root, listed.notes
    root = Path(data)
    if root.is_dir():
        here = f"{data} is the folder ./{data} here, not the built-in set of that name"
        return root, [here] if data in builtin.SETS else []
    if data in builtin.SETS:
        return builtin.SETS[data](), []
    if root.exists():
        raise DataError(
            f"{printable(data)} is a file, not a folder; {LAYOUT}; or, for a list of captions, "
            "--task caption"
        )
    names = ", ".join(builtin.SETS)
    raise DataError(f"{printable(data)}: no such folder, and no built-in set ({names})")


def hold_out(
    train: Pictures, *, val_share: float, seed: int, root: Path
) -> tuple[Pictures, Pictures]:
    """Split each class in training and validation pictures, at least one each where it has two.

    Each picture's place in the draw depends on the seed and its own name only, so that a few more
    pictures change the split of the others little.
    """
    kept: Pictures = {}
    held: Pictures = {}
    for name, paths in train.items():
        share = min(max(round(len(paths) * val_share), 1), len(paths) - 1)
        drawn = sorted(paths, key=lambda path: random_seed(seed, "split", relative(path, root)))
        chosen = set(drawn[:share])
        kept[name] = [path for path in paths if path not in chosen]
        held[name] = [path for path in paths if path in chosen]
    return kept, held
