"""Opens a data set: whatever holds the images, they come out as samples with classes by name.

A reader lists the images and the names of their classes; what is done with them afterwards is
the same for all: classes are matched by name, and the training's list of them is the only one;
validation images are held out where there are none; what was left out or looks wrong is in the
notes.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vit.data.archives import relative
from vit.data.dataset_types import NO_LABEL, Item, Listed, Sample, Splits
from vit.data.sources.class_names import (
    LAYOUT,
    VAL_NAMES,
    SampleImages,
    matched_names,
    missing_notes,
)
from vit.data.sources.dataset_spec import DatasetSpec, resolve
from vit.data.sources.dataset_warnings import count_notes, equal_notes, name_notes
from vit.data.sources.image_folder import read_folder
from vit.data.sources.image_inputs import list_images
from vit.data.sources.image_list import is_list, lines_of, read_lists
from vit.data.sources.source_registry import PACKED
from vit.data.sources.train_val_split import Fold, divided, hold_out
from vit.errors import ConfigError, DataError, printable
from vit.text import join_names, plural

__all__ = [
    "DatasetSpec",
    "Fold",
    "Listing",
    "Sample",
    "Splits",
    "hold_out",
    "list_images",
    "named_at",
    "open_labelled",
    "open_splits",
    "read_source",
    "relative",
    "require",
    "resolve",
]

HeldOut = Callable[[Path, Collection[str]], Collection[str]]
"""Gives the names that training held out, asked with the folder that names are relative to and with
the names that there are."""
READERS: tuple[tuple[Callable[[str], bool], Callable[[DatasetSpec], Listed]], ...] = (
    *PACKED,
    (is_list, read_lists),
    (lambda _: True, read_folder),
)
"""Which data each reader takes, the first one that does; the last are folders and built-in sets."""


def read_source(asked: DatasetSpec) -> Listed:
    """The images of any source.

    Raises:
        DataError: There is no such source, or it cannot be read.
        ConfigError: A setting is not for this kind of source.
    """
    read = next(read for takes, read in READERS if takes(asked.data))
    if asked.allow_outside and read is not read_lists:
        raise ConfigError(f"allow_outside: {printable(asked.data)} is no list; leave it out")
    listed = read(asked)
    if listed.multilabel and asked.multilabel is False:
        raise DataError(
            f"{printable(asked.data)}: images with several classes, or none; "
            "--task multilabel learns them"
        )
    return dataclasses.replace(listed, multilabel=listed.multilabel or bool(asked.multilabel))


@dataclass(frozen=True)
class Listing:
    """What a source holds, listed once for several uses: the plan, and the training after it."""

    asked: DatasetSpec
    listed: Listed


def open_splits(
    data: str | DatasetSpec,
    *,
    val_share: float,
    seed: int,
    fold: Fold | None = None,
    listing: Listing | None = None,
    compare: bool = True,
) -> Splits:
    """Open `data` for training.

    Args:
        data: A folder, a list, the name of a built-in set; or that, and how it is to be read.
        val_share: Share of each class held out where the data have no validation images.
        seed: Decides which ones.
        fold: The part of a cross-validation that is held out instead.
        listing: What the source holds; used instead of listing it where the same was asked for.
        compare: Whether the notes are to name equal files, for which many files are read.

    Raises:
        DataError: It cannot be trained on as it is.
        ConfigError: A setting is not for this kind of data.
    """
    asked = DatasetSpec(data) if isinstance(data, str) else data
    known = listing is not None and listing.asked == asked
    listed = listing.listed if listing is not None and known else read_source(asked)
    images = listed.splits.get("train", listed.splits.get("", []))
    if not images:
        there = join_names([*listed.where]) or "nothing"
        raise DataError(f"{printable(asked.data)} has {there} but no images for train")
    classes = tuple(sorted({label for item in images for label in item.labels}))
    _check_classes(listed, classes)
    notes = [*listed.notes]
    train, val, more = divided(listed, asked, val_share=val_share, seed=seed, fold=fold)
    made = all(name not in listed.splits for name in VAL_NAMES) or fold is not None
    notes += more
    if not made:
        name = next(name for name in VAL_NAMES if name in listed.splits)
        val, more = _matched(val, classes, listed, listed.where[name], owner="train")
        notes += [*more, *_shared_notes(train, val, listed.root)]
        if name == "test":
            notes.append(
                f"no val {listed.part}: validates on test, so keep other images for the end"
            )
    if not val:
        why = ": each class has only one" if made else ""
        raise DataError(f"{printable(asked.data)}: no images left to validate on{why}; add some")
    total = len(train) if listed.multilabel else None
    notes += name_notes(classes) + count_notes(_by_class(train, classes), total)
    if compare:
        notes += equal_notes(_by_labels(train), _by_labels(val), str(listed.root))
    return Splits(
        classes=classes,
        train=_samples(train, classes, listed),
        val=_samples(val, classes, listed),
        notes=tuple(notes),
        made=made,
        root=listed.root,
        multilabel=listed.multilabel,
    )


def open_labelled(
    data: str | DatasetSpec,
    *,
    split: str,
    classes: Sequence[str],
    held_out: Collection[str] | HeldOut = (),
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """Open one split of `data` for evaluation; a label is an index into `classes`.

    Args:
        data: As in `open_splits`.
        split: `train`, `test`..., or `val` for the first validation images there are.
        classes: Names of the classes of the model.
        held_out: The validation images of a split that we made, as `relative` names, or what
            gives them. Where the data have no validation images but maybe `test`, only these are
            taken, if there are any of them.

    Returns:
        Samples, and notes for the user.

    Raises:
        DataError: There is no such split, or it has a class that the model does not have.
    """
    asked = DatasetSpec(data) if isinstance(data, str) else data
    listed = read_source(dataclasses.replace(asked, split=split))
    wanted = VAL_NAMES if split == "val" else (split,)
    name = next((name for name in wanted if name in listed.splits), None)
    names = _held_out_of(listed, held_out)
    if split == "val" and name == "test" and names:
        name = None
    ours = name is None
    there = listed.where.keys() - {""}
    if name is None and (split != "val" or there - {"train", "test"}):
        has = join_names([*listed.where]) if there else f"class {listed.part}s only"
        hint = "" if there else "; leave the split out for held-out images"
        raise DataError(
            f"{printable(listed.root)}: no {printable(split)} {listed.part}; it has {has}{hint}"
        )
    name = name or ("train" if "train" in listed.splits else "")
    notes = [*listed.notes]
    items: Sequence[Item] = listed.splits[name]
    if ours:
        items, note = _without_training(items, names, listed)
        notes = [note, *notes]
    elif name != split:
        notes.append(f"measured on {name}" + ("/" if listed.part == "folder" else ""))
    items, more = _matched(items, tuple(classes), listed, listed.where[name], owner="the model")
    if not items:
        raise DataError(f"{listed.where[name]}: no images; {LAYOUT}")
    return _samples(items, tuple(classes), listed), tuple(notes + more)


def _held_out_of(listed: Listed, held_out: Collection[str] | HeldOut) -> Collection[str]:
    """The names that training held out of what `listed` has of it, or might have."""
    items = listed.splits.get("train", listed.splits.get("", []))
    there = {relative(item.path, listed.root) for item in items}
    names = held_out(listed.root, there) if callable(held_out) else held_out
    return names if there & set(names) else ()


def _check_classes(listed: Listed, classes: Sequence[str]) -> None:
    """Refuse what leaves nothing to tell apart."""
    names = join_names([printable(name) for name in classes])
    if len(classes) < 1 + (not listed.multilabel):
        what = f"only one class ({names}), nothing to tell apart" if names else "no classes"
        raise DataError(f"{printable(listed.root)}: {what}; add images of others")


def _matched(
    items: Sequence[Item], classes: Sequence[str], listed: Listed, where: str, *, owner: str
) -> tuple[list[Item], list[str]]:
    """`items` under the names in `classes`, and notes for the user."""
    names = dict.fromkeys(label for item in items for label in item.labels)
    remedy = f"rename or remove {'the folders' if listed.part == 'folder' else 'them'}"
    targets, notes = matched_names([*names], classes, where=where, owner=owner, remedy=remedy)
    if any(name != target for name, target in targets.items()):
        items = [i._replace(labels=tuple(targets[label] for label in i.labels)) for i in items]
    return [*items], notes + missing_notes(_by_class(items, classes), where)


def _by_class(items: Iterable[Item], classes: Sequence[str]) -> SampleImages:
    """The images of each class; one of several is in each of them."""
    found: SampleImages = {name: [] for name in classes}
    for item in items:
        for label in item.labels:
            found[label].append(item.path)
    return found


def _by_labels(items: Iterable[Item]) -> SampleImages:
    """The images by all that is said of them."""
    found: SampleImages = {}
    for item in items:
        found.setdefault(" | ".join(sorted(item.labels)), []).append(item.path)
    return found


def _samples(items: Sequence[Item], classes: Sequence[str], listed: Listed) -> tuple[Sample, ...]:
    """Samples in the order of `classes`, then of their names; of names alone with several classes.

    So the same images make the same training, whatever brought them.
    """
    number = {name: label for label, name in enumerate(classes)}
    ordered = sorted(
        (
            NO_LABEL if listed.multilabel else number[item.labels[0]],
            relative(item.path, listed.root).split("/"),
            at,
        )
        for at, item in enumerate(items)
    )
    return tuple(
        Sample(
            items[at].path,
            label,
            labels=tuple(sorted(number[n] for n in items[at].labels)) if listed.multilabel else (),
        )
        for label, _, at in ordered
    )


def _shared_notes(train: Sequence[Item], val: Sequence[Item], root: Path) -> list[str]:
    """Images that are on both sides.

    Raises:
        DataError: All validation images are.
    """
    known = {item.path for item in train}
    shared = [item.path for item in val if item.path in known]
    if shared and len(shared) == len(val):
        raise DataError(
            f"all {plural(len(shared), 'validation image')} are training images too; give "
            "others, or leave them out and we hold some out"
        )
    names = join_names([printable(relative(path, root)) for path in shared], 3)
    images = plural(len(shared), "image")
    return [f"{images} in training and in validation (leak): {names}"] if shared else []


def _without_training(
    items: Sequence[Item], held_out: Collection[str], listed: Listed
) -> tuple[Sequence[Item], str]:
    """Only the images that training held out, where they are from this data set."""
    names = set(held_out)
    kept = [item for item in items if relative(item.path, listed.root) in names]
    lack = f"no validation {listed.part}"
    if kept:
        images = plural(len(kept), "image")
        some_of = f"{images} left of the {len(names):,}" if len(kept) < len(names) else images
        return kept, f"{lack}: took the {some_of} that training held out"
    return items, f"{lack}: took all {len(items):,} images"


def require(data: str) -> None:
    """Refuse what is no source, before anything costs time.

    Raises:
        DataError: It is not.
    """
    if next(read for takes, read in READERS if takes(data)) is read_folder:
        resolve(data)


def named_at(asked: DatasetSpec, paths: Collection[str]) -> dict[str, str]:
    """The list and the line that name each of these images, of those that a list names."""
    return lines_of(asked, paths) if is_list(asked.data) else {}
