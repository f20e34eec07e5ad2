"""Chooses the training and the validation images of what a source lists, and says how.

Divides images into those to train on and those to validate on: by class, by group, in folds.

Every choice depends on the seed and the names of the images or groups alone. Images of one
class each are drawn class by class. Groups, and images of several classes, are dealt out one by
one to the part that lacks their rarest class most: the iterative stratification of Sechidis,
Tsoumakas and Vlahavas (ECML PKDD 2011), with groups in the place of examples.
"""

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vit.data.archives import relative
from vit.data.dataset_types import Item, Listed
from vit.data.random_seed import random_seed
from vit.data.sources.class_names import VAL_NAMES, SampleImages
from vit.data.sources.dataset_spec import DatasetSpec
from vit.errors import ConfigError, DataError, printable
from vit.text import join_names, plural

UNEVEN = 1 / 3
"""Of the share of a class that was asked for: a share further off it has its note."""


class Fold(NamedTuple):
    """One part of a cross-validation."""

    number: int
    """From 1."""
    of: int
    """How many there are."""


@dataclass(frozen=True)
class Unit:
    """Images that stay together: one of them, or a group."""

    name: str
    """Decides its place in a draw."""
    members: tuple[int, ...]
    """Numbers of its images."""
    labels: Counter[str]
    """How many of its images have each class; the empty name stands for none."""


def hold_out(
    train: SampleImages, *, val_share: float, seed: int, root: Path
) -> tuple[SampleImages, SampleImages]:
    """Split each class in training and validation images, at least one each where it has two.

    Each image's place in the draw depends on the seed and its own name only, so that a few more
    images change the split of the others little.
    """
    kept: SampleImages = {}
    held: SampleImages = {}
    for name, paths in train.items():
        share = min(max(round(len(paths) * val_share), 1), len(paths) - 1)
        drawn = sorted(paths, key=lambda path: random_seed(seed, "split", relative(path, root)))
        chosen = set(drawn[:share])
        kept[name] = [path for path in paths if path not in chosen]
        held[name] = [path for path in paths if path in chosen]
    return kept, held


def draw(items: Sequence[Item], units: Sequence[Unit], *, share: float, seed: int) -> list[bool]:
    """Which images are held out, where groups or several classes are to be heeded."""
    places = deal(units, (1 - share, share), seed=seed)
    held = [False] * len(items)
    for unit, place in zip(units, places, strict=True):
        for member in unit.members:
            held[member] = place == 1
    return held


def fold_of(units: Sequence[Unit], fold: Fold, *, seed: int) -> set[int]:
    """Numbers of the images that this fold validates on; every image is in one fold's.

    Raises:
        DataError: A class is in one unit alone, so that a fold could not learn it.
    """
    lone = Counter(label for unit in units for label in unit.labels)
    alone = [printable(label) for label, number in lone.items() if number < 2 and label]
    if alone:
        raise DataError(
            f"folds={fold.of}: only one image or group of class {join_names(alone)}, so one fold "
            "cannot learn it; add others, or leave the class out"
        )
    if len(units) < fold.of:
        raise DataError(f"folds={fold.of}: only {len(units)} images or groups; take fewer folds")
    places = deal(units, (1 / fold.of,) * fold.of, seed=seed)
    chosen = [u for u, place in zip(units, places, strict=True) if place == fold.number - 1]
    return {member for unit in chosen for member in unit.members}


def deal(units: Sequence[Unit], shares: Sequence[float], *, seed: int) -> list[int]:
    """The part that each unit goes to, by its number.

    The class that is left in the fewest units is dealt out first, its largest units before others.
    Each goes to the part that lacks the largest share of what it is to have of the class; then to
    the larger part, so that what is there once is learned; then to the one that lacks most in all.

    Args:
        units: What is dealt out.
        shares: Of each part; their sum is 1.
        seed: Decides the order of units that are alike.
    """
    order = sorted(range(len(units)), key=lambda at: random_seed(seed, "split", units[at].name))
    total: Counter[str] = Counter()
    waiting: dict[str, list[int]] = defaultdict(list)
    for at in order:
        total.update(units[at].labels)
        for label in units[at].labels:
            waiting[label].append(at)
    images = sum(len(unit.members) for unit in units)
    lacks = [dict.fromkeys(total, 1.0) for _ in shares]  # of each class, as a share
    lacks_all = [1.0] * len(shares)
    left = {label: len(numbers) for label, numbers in waiting.items()}
    rarest = [(number, total[label], label) for label, number in left.items()]
    heapq.heapify(rarest)
    places = [-1] * len(units)
    while rarest:
        number, _, label = heapq.heappop(rarest)
        if number != left[label]:
            continue  # it was put there again, with the number that is left
        numbers = [at for at in waiting[label] if places[at] < 0]
        for at in sorted(numbers, key=lambda at: -units[at].labels[label]):
            place = max(
                range(len(shares)),
                key=lambda p: (round(lacks[p][label], 9), shares[p], round(lacks_all[p], 9), -p),
            )
            places[at] = place
            lacks_all[place] -= len(units[at].members) / (shares[place] * images)
            for name, number in units[at].labels.items():
                lacks[place][name] -= number / (shares[place] * total[name])
                left[name] -= 1
                if name != label and left[name]:
                    heapq.heappush(rarest, (left[name], total[name], name))
    return places


def make_units(
    items: Sequence[Item], groups: Sequence[str] | None, names: Sequence[str]
) -> list[Unit]:
    """The images by group; those of the empty group, or all without groups, one by one.

    Args:
        items: The images.
        groups: Of each, where there are any.
        names: `relative` ones of the images.
    """
    members: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for number, name in enumerate(names):
        group = groups[number] if groups is not None else ""
        members[bool(group), group or name].append(number)
    return [
        Unit(
            name,
            tuple(numbers),
            Counter(label for number in numbers for label in items[number].labels or ("",)),
        )
        for (_, name), numbers in members.items()
    ]


def find_groups(names: Sequence[str], pattern: str) -> list[str]:
    """The group of each name: what the first bracket of `pattern` matches in it, or all of it.

    Raises:
        ConfigError: It is no regular expression.
        DataError: It matches nowhere.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"group={pattern!r}: no column of the data, and no regular expression ({error})"
        ) from None
    found = [expression.search(name) for name in names]
    if names and not any(found):
        raise DataError(
            f"group={printable(pattern)}: no column of that name, and as a regular expression it "
            f"matches none of {plural(len(names), 'path')} such as {printable(names[0])}"
        )
    bracket = 1 if expression.groups else 0
    return [(match[bracket] or "") if match else "" for match in found]


def group_notes(groups: Sequence[str], group: str, *, column: bool) -> list[str]:
    """How many groups there are and by what, and how many images are in none."""
    number = plural(len({*groups} - {""}), "group")
    notes = [f"{number} by the {'column' if column else 'expression'} {printable(group)}"]
    if alone := sum(not name for name in groups):
        notes.append(
            f"{plural(alone, 'image')} without a group ({printable(group)}): each is alone"
        )
    return notes


def check_sides(train: Sequence[str], val: Sequence[str], group: str, where: str) -> None:
    """Refuse groups that are on both sides of a split that the data bring.

    Raises:
        DataError: There are some.
    """
    both = sorted({*train} & {*val} - {""})
    if both:
        names = join_names([printable(name) for name in both], 3)
        raise DataError(
            f"{where}: {plural(len(both), 'group')} ({printable(group)}) in training too: {names}; "
            "move each to one side, or leave the validation images out and we hold some out"
        )


def uneven_notes(train: Sequence[Item], val: Sequence[Item], share: float) -> list[str]:
    """Classes whose share of validation images is far from what was asked for."""
    both = Counter(label for item in (*train, *val) for label in item.labels)
    held = Counter(label for item in val for label in item.labels)
    off = {label: held[label] / number - share for label, number in both.items()}
    far = sorted((label for label in off if _far(off[label], both[label], share)), key=str)
    told = [f"{printable(label)} {held[label] / both[label]:.0%}" for label in far]
    return (
        [f"classes that are held out unevenly, not {share:.0%}: {join_names(told)}"] if far else []
    )


def _far(off: float, number: int, share: float) -> bool:
    """Whether it is more than a third of the share, and more than one image."""
    return abs(off) > UNEVEN * share and abs(off) * number > 1


def members_of(items: Sequence[Item], chosen: Mapping[int, bool] | Sequence[bool]) -> list[Item]:
    """The items that are chosen, in their order."""
    return [item for number, item in enumerate(items) if chosen[number]]


Sides = tuple[list[Item], list[Item], list[str]]
"""Training images, validation images, and notes for the user."""


def divided(
    listed: Listed, asked: DatasetSpec, *, val_share: float, seed: int, fold: Fold | None
) -> Sides:
    """The two sides: the data's own, or a fold, or a share that is held out.

    Raises:
        DataError: A group is on both sides, or a fold is left without a class.
        ConfigError: A fold is asked for, and the data have validation images; or `group` is
            neither a column nor a regular expression.
    """
    train = listed.splits.get("train", listed.splits.get("", []))
    own = next((name for name in VAL_NAMES if name in listed.splits), None)
    if fold is not None and own not in (None, "test"):
        raise ConfigError(
            f"folds={fold.of}: the data have validation images ({listed.where[own or '']}), so "
            "there is nothing to divide; give the training images alone as DATA"
        )
    if fold is not None:
        return _folded(train, listed, asked, fold, seed=seed, tested=own is not None)
    if own is not None:
        val = listed.splits[own]
        if asked.group is None:
            return train, val, []
        groups = _groups([*train, *val], listed, asked.group)
        check_sides(groups[: len(train)], groups[len(train) :], asked.group, listed.where[own])
        return train, val, group_notes(groups, asked.group, column=listed.grouped)
    return _held_out(train, listed, asked, val_share=val_share, seed=seed)


def _groups(items: Sequence[Item], listed: Listed, group: str) -> list[str]:
    """The group of each image, from the source or from its name; empty where it is alone."""
    if listed.grouped:
        return [item.group for item in items]
    return find_groups([relative(item.path, listed.root) for item in items], group)


def _held_out(
    items: list[Item], listed: Listed, asked: DatasetSpec, *, val_share: float, seed: int
) -> Sides:
    lack = f"no validation {listed.part}"
    if asked.group is None and not listed.multilabel:
        images: SampleImages = {}
        for item in sorted(items, key=lambda item: item.labels):
            images.setdefault(item.labels[0], []).append(item.path)
        _, held = hold_out(images, val_share=val_share, seed=seed, root=listed.root)
        chosen = {path for paths in held.values() for path in paths}
        sides = [item.path in chosen for item in items]
        least = any(len(paths) * val_share < 0.5 for paths in images.values())
        notes = [
            f"{lack}: held out {plural(len(chosen), 'image')}, {val_share:.0%} of each class"
            + (", and one where that is none" if least else "")
        ]
        single = [printable(name) for name, paths in held.items() if not paths]
        if single:
            notes.append(f"held out none of class {join_names(single)}, which has only one image")
        return _kept(items, sides), members_of(items, sides), notes
    groups = None if asked.group is None else _groups(items, listed, asked.group)
    units = make_units(items, groups, [relative(item.path, listed.root) for item in items])
    sides = draw(items, units, share=val_share, seed=seed)
    train, val = _kept(items, sides), members_of(items, sides)
    number = sum(sides[unit.members[0]] for unit in units)
    what = f" ({plural(number, 'group')})" if groups is not None else ""
    notes = [f"{lack}: held out {plural(len(val), 'image')}{what}, {val_share:.0%} of each class"]
    if groups is not None:
        notes += group_notes(groups, asked.group or "", column=listed.grouped)
    _check_learned(train, val, asked)
    held_labels, all_labels = _labels(val), _labels(items)
    if none := [printable(label) for label in sorted(all_labels - held_labels)]:
        notes.append(f"held out none of class {join_names(none)}, which is in one image or group")
    return train, val, notes + uneven_notes(train, val, val_share)


def _folded(
    items: list[Item], listed: Listed, asked: DatasetSpec, fold: Fold, *, seed: int, tested: bool
) -> Sides:
    groups = None if asked.group is None else _groups(items, listed, asked.group)
    units = make_units(items, groups, [relative(item.path, listed.root) for item in items])
    chosen = fold_of(units, fold, seed=seed)
    sides = [number in chosen for number in range(len(items))]
    train, val = _kept(items, sides), members_of(items, sides)
    number = sum(sides[unit.members[0]] for unit in units)
    what = f" ({plural(number, 'group')})" if groups is not None else ""
    notes = [f"fold {fold.number} of {fold.of}: validates on {plural(len(val), 'image')}{what}"]
    if tested:
        notes.append("left out test: no fold sees it; measure on it at the end")
    if groups is not None:
        notes += group_notes(groups, asked.group or "", column=listed.grouped)
    _check_learned(train, val, asked)
    if none := [printable(label) for label in sorted(_labels(items) - _labels(val))]:
        notes.append(f"this fold has no validation images of class {join_names(none)}")
    return train, val, notes + uneven_notes(train, val, 1 / fold.of)


def _kept(items: Sequence[Item], held: Sequence[bool]) -> list[Item]:
    return members_of(items, [not side for side in held])


def _labels(items: Sequence[Item]) -> set[str]:
    return {label for item in items for label in item.labels}


def _check_learned(train: Sequence[Item], val: Sequence[Item], asked: DatasetSpec) -> None:
    """Refuse a split that leaves a class without training images."""
    lost = sorted(_labels(val) - _labels(train))
    if lost:
        names = join_names([printable(label) for label in lost])
        by = "" if asked.group is None else f" when groups ({printable(asked.group)}) stay together"
        raise DataError(
            f"no training images left of class {names}{by}; another --seed, a smaller "
            "--val-share or more --folds may do"
        )
