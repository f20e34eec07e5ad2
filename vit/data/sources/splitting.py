"""Divides pictures into those to train on and those to validate on: by class, by group, in folds.

Every choice depends on the seed and the names of the pictures or groups alone. Pictures of one
class each are drawn class by class. Groups, and pictures of several classes, are dealt out one by
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

from vit.data.containers import relative
from vit.data.samples import Item
from vit.data.seeding import random_seed
from vit.data.sources.classes import Pictures
from vit.data.sources.folders import count, some
from vit.errors import ConfigError, DataError, printable

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
    """Pictures that stay together: one of them, or a group."""

    name: str
    """Decides its place in a draw."""
    members: tuple[int, ...]
    """Numbers of its pictures."""
    labels: Counter[str]
    """How many of its pictures have each class; the empty name stands for none."""


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


def draw(items: Sequence[Item], units: Sequence[Unit], *, share: float, seed: int) -> list[bool]:
    """Which pictures are held out, where groups or several classes are to be heeded."""
    places = deal(units, (1 - share, share), seed=seed)
    held = [False] * len(items)
    for unit, place in zip(units, places, strict=True):
        for member in unit.members:
            held[member] = place == 1
    return held


def fold_of(units: Sequence[Unit], fold: Fold, *, seed: int) -> set[int]:
    """Numbers of the pictures that this fold validates on; every picture is in one fold's.

    Raises:
        DataError: A class is in one unit alone, so that a fold could not learn it.
    """
    lone = Counter(label for unit in units for label in unit.labels)
    alone = [printable(label) for label, number in lone.items() if number < 2 and label]
    if alone:
        raise DataError(
            f"folds={fold.of}: only one picture or group of class {some(alone)}, so one fold "
            "cannot learn it; add others, or leave the class out"
        )
    if len(units) < fold.of:
        raise DataError(f"folds={fold.of}: only {len(units)} pictures or groups; take fewer folds")
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
    pictures = sum(len(unit.members) for unit in units)
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
            lacks_all[place] -= len(units[at].members) / (shares[place] * pictures)
            for name, number in units[at].labels.items():
                lacks[place][name] -= number / (shares[place] * total[name])
                left[name] -= 1
                if name != label and left[name]:
                    heapq.heappush(rarest, (left[name], total[name], name))
    return places


def make_units(
    items: Sequence[Item], groups: Sequence[str] | None, names: Sequence[str]
) -> list[Unit]:
    """The pictures by group; those of the empty group, or all without groups, one by one.

    Args:
        items: The pictures.
        groups: Of each, where there are any.
        names: `relative` ones of the pictures.
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
            f"matches none of {count(len(names), 'path')} such as {printable(names[0])}"
        )
    bracket = 1 if expression.groups else 0
    return [(match[bracket] or "") if match else "" for match in found]


def group_notes(groups: Sequence[str], group: str, *, column: bool) -> list[str]:
    """How many groups there are and by what, and how many pictures are in none."""
    number = count(len({*groups} - {""}), "group")
    notes = [f"{number} by the {'column' if column else 'expression'} {printable(group)}"]
    if alone := sum(not name for name in groups):
        notes.append(
            f"{count(alone, 'picture')} without a group ({printable(group)}): each is alone"
        )
    return notes


def check_sides(train: Sequence[str], val: Sequence[str], group: str, where: str) -> None:
    """Refuse groups that are on both sides of a split that the data bring.

    Raises:
        DataError: There are some.
    """
    both = sorted({*train} & {*val} - {""})
    if both:
        names = some([printable(name) for name in both], 3)
        raise DataError(
            f"{where}: {count(len(both), 'group')} ({printable(group)}) in training too: {names}; "
            "move each to one side, or leave the validation pictures out and we hold some out"
        )


def uneven_notes(train: Sequence[Item], val: Sequence[Item], share: float) -> list[str]:
    """Classes whose share of validation pictures is far from what was asked for."""
    both = Counter(label for item in (*train, *val) for label in item.labels)
    held = Counter(label for item in val for label in item.labels)
    off = {label: held[label] / number - share for label, number in both.items()}
    far = sorted((label for label in off if _far(off[label], both[label], share)), key=str)
    told = [f"{printable(label)} {held[label] / both[label]:.0%}" for label in far]
    return [f"classes that are held out unevenly, not {share:.0%}: {some(told)}"] if far else []


def _far(off: float, number: int, share: float) -> bool:
    """Whether it is more than a third of the share, and more than one picture."""
    return abs(off) > UNEVEN * share and abs(off) * number > 1


def members_of(items: Sequence[Item], chosen: Mapping[int, bool] | Sequence[bool]) -> list[Item]:
    """The items that are chosen, in their order."""
    return [item for number, item in enumerate(items) if chosen[number]]
