"""Training/validation split: held-out shares, cross-validation folds, groups.

A split depends only on the seed and the names of the images or groups. Without groups,
single-label images are held out class by class. Otherwise groups, or multi-label images, are
assigned by iterative stratification. Copies of an image, and images of one scene, stay together in
either case.

Source: Sechidis, Tsoumakas and Vlahavas, "On the Stratification of Multi-Label Data", ECML PKDD
2011, with groups in the place of examples.
"""

import heapq
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from vit.data.dataset_types import DatasetIndex, ImageRecord, ImagesByClass
from vit.data.image_archives import relative
from vit.data.random_seed import random_seed
from vit.data.sources.dataset_spec import TEST, DatasetSpec, validation_split
from vit.data.sources.image_sources import fit_folds, hold_out_sources
from vit.errors import ConfigError, DataError
from vit.text import join_names, nearest, plural, printable

Node = TypeVar("Node")
TrainValSplit = tuple[list[ImageRecord], list[ImageRecord], list[str]]
"""Training images, validation images, and notes for the user."""

MAX_STRATA = 10
"""Parts of the range of a number, of which each has its share of validation images."""
Copies = Mapping[str, str]
"""Path -> name of the set of identical images, or of one scene, that it belongs to."""


class Fold(NamedTuple):
    """One fold of a cross-validation."""

    number: int
    """From 1."""
    total: int


@dataclass(frozen=True)
class SplitUnit:
    """Images that stay in one part of a split: a single image, or a group."""

    name: str
    """Determines its place in the random order."""
    members: tuple[int, ...]
    """Indices of its images."""
    labels: Counter[str]
    """Number of its images of each class; the empty name counts images without a class."""


def split_train_val(
    index: DatasetIndex,
    spec: DatasetSpec,
    *,
    val_share: float,
    seed: int,
    fold: Fold | None,
    copies: Copies = MappingProxyType({}),
    sources: Mapping[str, str] = MappingProxyType({}),
    grouped: bool = False,
) -> TrainValSplit:
    """Split by the validation split of the data, a fold, or the share `val_share`, in (0, 1).

    `sources`, by path, are those of which some are held out whole; where `copies` are `grouped`,
    a set of them may be of many classes.
    """
    train = index.train
    own = validation_split(index.splits)
    if fold is not None and own is not None:
        raise ConfigError(
            f"folds={fold.total}: the data have validation images "
            f"({index.locations[own]}), so there is nothing to divide; give the training "
            "images alone as DATA"
        )
    if fold is not None:
        fitting = sources if fit_folds(train, sources, fold.total) else {}
        return _split_units(
            train, index, spec, copies, fitting, val_share=val_share, seed=seed, fold=fold
        )
    other = own or TEST
    val, notes = index.splits.get(other, []), []
    if val and spec.group is not None:
        groups = groups_of_records([*train, *val], index, spec.group)
        train_groups, val_groups = groups[: len(train)], groups[len(train) :]
        check_group_leakage(train_groups, val_groups, spec.group, index.locations[other])
        notes = group_notes(groups, spec.group, column=index.has_groups)
    if own is None:
        return _split_share(
            train, index, spec, copies, sources, val_share=val_share, seed=seed, grouped=grouped
        )
    return train, val, notes


def hold_out(
    images: ImagesByClass,
    *,
    val_share: float,
    seed: int,
    root: Path,
    copies: Copies = MappingProxyType({}),
) -> tuple[ImagesByClass, ImagesByClass]:
    """Training and validation images of each class; both get at least one if the class has two.

    The place of an image in the random order depends only on the seed and its own name, so a few
    more images hardly change the split of the others. Copies of an image take one place. If they
    are in several classes, they are held out if each of these classes holds them out.
    """
    held_out: set[str] = set()
    for paths in images.values():
        number = min(max(round(len(paths) * val_share), 1), len(paths) - 1)
        units: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            units[copies.get(path) or relative(path, root)].append(path)
        order = sorted(units, key=lambda name: random_seed(seed, "split", name))
        chosen: list[str] = []
        for name in order:
            if len(chosen) + len(units[name]) <= number:
                chosen += units[name]
        if not chosen and len(units) > 1:  # each image has more copies than are to be held out
            chosen = min((units[name] for name in order), key=len)
        held_out.update(chosen)
    trained = {
        copies[path]
        for paths in images.values()
        for path in paths
        if path in copies and path not in held_out
    }
    held_out = {path for path in held_out if copies.get(path) not in trained}
    train = {name: [p for p in paths if p not in held_out] for name, paths in images.items()}
    val = {name: [p for p in paths if p in held_out] for name, paths in images.items()}
    return train, val


def name_copies(alike: Iterable[Sequence[str]], root: Path) -> Copies:
    """The sets of images by path, each named like the first of its images; those with an image in
    common are one."""
    links = [pair for group in alike for pair in itertools.pairwise(group)]
    copies: dict[str, str] = {}
    for group in connected(links):
        copies |= dict.fromkeys(group, min(relative(one, root) for one in group))
    return copies


def connected(links: Iterable[tuple[Node, Node]]) -> list[list[Node]]:
    """The connected components of a graph."""
    parents: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while (above := parents.setdefault(node, node)) != node:
            parents[node] = node = parents[above]
        return node

    for first, second in links:
        parents[root(second)] = root(first)
    groups: dict[Node, list[Node]] = defaultdict(list)
    for node in [*parents]:
        groups[root(node)].append(node)
    return [*groups.values()]


def make_units(
    records: Sequence[ImageRecord],
    groups: Sequence[str] | None,
    names: Sequence[str],
    copies: Copies = MappingProxyType({}),
    *,
    share: float = 1.0,
    choices: Sequence[int] = (),
) -> list[SplitUnit]:
    """One unit for each group; images of the empty group, or without groups, are single units.

    Groups and images with copies of an image in common are one unit. `share` is that of the
    smallest part, for the strata of images with numbers; `choices` are the places of those numbers
    that are classes, all of which are strata.
    """
    strata = _strata(records, share, choices)
    members: dict[tuple[bool, str], list[int]] = defaultdict(list)
    unit_of: dict[str, tuple[bool, str]] = {}  # by set of copies
    moved: dict[tuple[bool, str], tuple[bool, str]] = {}
    for number, name in enumerate(names):
        group = groups[number] if groups is not None else ""
        unit = (bool(group), group or name)
        while unit in moved:
            unit = moved[unit]
        members[unit].append(number)
        copy = copies.get(records[number].path)
        if copy is None:
            continue
        first = unit_of.setdefault(copy, unit)
        while first in moved:
            first = moved[first]
        if first != unit:
            kept, gone = sorted((first, unit))
            members[kept] += members.pop(gone)
            moved[gone] = kept
    return [
        SplitUnit(
            name,
            tuple(sorted(numbers)),
            Counter(label for number in numbers for label in strata[number]),
        )
        for (_, name), numbers in members.items()
    ]


def stratify(units: Sequence[SplitUnit], shares: Sequence[float], *, seed: int) -> list[int]:
    """The part of each unit, by iterative stratification; `shares` of the parts sum to 1.

    The class with the fewest unassigned units goes first, its largest units before others. A unit
    goes to the part that lacks the largest share of its images of the class; then to the part with
    the larger share, so that a class of one unit is trained on; then to the part that lacks the
    most images.
    """
    order = sorted(range(len(units)), key=lambda at: random_seed(seed, "split", units[at].name))
    total: Counter[str] = Counter()
    units_of: dict[str, list[int]] = defaultdict(list)
    for at in order:
        total.update(units[at].labels)
        for label in units[at].labels:
            units_of[label].append(at)
    images = sum(len(unit.members) for unit in units)
    missing = [dict.fromkeys(total, 1.0) for _ in shares]  # of each class, as a share
    missing_images = [1.0] * len(shares)
    remaining = {label: len(numbers) for label, numbers in units_of.items()}
    rarest = [(number, total[label], label) for label, number in remaining.items()]
    heapq.heapify(rarest)
    parts = [-1] * len(units)
    while rarest:
        number, _, label = heapq.heappop(rarest)
        if number != remaining[label]:
            continue  # an outdated entry: the class is in the heap again with its new number
        numbers = [at for at in units_of[label] if parts[at] < 0]
        for at in sorted(numbers, key=lambda at: -units[at].labels[label]):
            part = max(
                range(len(shares)),
                key=lambda p: (
                    round(missing[p][label], 9),
                    shares[p],
                    round(missing_images[p], 9),
                    -p,
                ),
            )
            parts[at] = part
            missing_images[part] -= len(units[at].members) / (shares[part] * images)
            for name, number in units[at].labels.items():
                missing[part][name] -= number / (shares[part] * total[name])
                remaining[name] -= 1
                if name != label and remaining[name]:
                    heapq.heappush(rarest, (remaining[name], total[name], name))
    return parts


def find_groups(names: Sequence[str], pattern: str, columns: Sequence[str] = ()) -> list[str]:
    """The group of each name: the match of the first bracket of `pattern`, or of all of it; empty
    for a name that does not match."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"group={pattern!r}: no column of the data, and no regular expression ({error})"
        ) from None
    found = [expression.search(name) for name in names]
    if names and not any(found):
        others = f" (columns that are not read: {join_names(columns, 8)})" if columns else ""
        raise DataError(
            f"group={pattern}: no column of that name{others}, and as a regular "
            f"expression it matches none of {plural(len(names), 'path')} such as "
            f"{names[0]}{nearest(pattern, columns)}"
        )
    bracket = 1 if expression.groups else 0
    return [(match[bracket] or "") if match else "" for match in found]


def group_notes(groups: Sequence[str], group: str, *, column: bool) -> list[str]:
    """Notes about the number of groups, and of images without a group."""
    number = plural(len({*groups} - {""}), "group")
    notes = [f"{number} by the {'column' if column else 'expression'} {printable(group)}"]
    if single := sum(not name for name in groups):
        images = plural(single, "image")
        notes.append(f"{images} without a group ({printable(group)}): each is a group of its own")
    return notes


def check_group_leakage(
    train: Sequence[str], val: Sequence[str], group: str, location: str
) -> None:
    """Check that no group is in both splits of a dataset with its own validation split."""
    shared = sorted({*train} & {*val} - {""})
    if shared:
        names = join_names(shared, 3)
        raise DataError(
            f"{location}: {plural(len(shared), 'group')} ({group}) in training too: "
            f"{names}; move each to one side, or leave the validation images out and we hold "
            "some out"
        )


def groups_of_records(records: Sequence[ImageRecord], index: DatasetIndex, group: str) -> list[str]:
    """The group of each image, from the source or its name; empty if it has none."""
    if index.has_groups:
        return [record.group for record in records]
    names = [relative(record.path, index.root) for record in records]
    return find_groups(names, group, index.columns)


def _split_share(
    records: list[ImageRecord],
    index: DatasetIndex,
    spec: DatasetSpec,
    copies: Copies,
    sources: Mapping[str, str],
    *,
    val_share: float,
    seed: int,
    grouped: bool,
) -> TrainValSplit:
    whole = hold_out_sources(records, sources, share=val_share / 2, seed=seed)
    others = [record for record in records if record.path not in whole]
    share = max(val_share - len(whole) / len(records), val_share / 2)
    if not (spec.group is not None or index.multilabel or index.target_classes or grouped):
        classes = _labels(records)
        strata = "each class" if classes else "all"
        images: ImagesByClass = {}
        pairs = zip(others, _strata(others, share), strict=True)
        for record, (stratum, *_) in sorted(pairs, key=lambda pair: pair[1]):
            images.setdefault(stratum, []).append(record.path)
        _, val_images = hold_out(images, val_share=share, seed=seed, root=index.root, copies=copies)
        drawn = {path for paths in val_images.values() for path in paths}
        held_out = whole | drawn
        train, val = _partition(records, [record.path in held_out for record in records])
        rounded = any(name and len(paths) * share < 0.5 for name, paths in images.items())
        note = f"no validation {index.split_kind}: held out {plural(len(held_out), 'image')}, "
        if whole:
            names = sorted({sources[path] for path in whole})
            kind, _, first = names[0].partition(": ")
            note += (
                f"all {len(whole):,} of {plural(len(names), 'source')} (by {kind}, such as "
                f"{printable(first)}) to measure new sources by, and {share:.0%} of {strata} of "
                "the others"
            )
        else:
            note += f"{share:.0%} of {strata}"
        notes = [note + (", and one where that rounds to none" if rounded else "")]
        absent = [name for name, paths in val_images.items() if name in classes and not paths]
        single = [printable(name) for name in absent if name not in _labels(val)]
        if single:
            notes.append(
                f"held out none of class {join_names(single)}, which has only one image, or copies"
            )
        return train, val, notes
    train, val, notes = _split_units(
        others, index, spec, copies, {}, val_share=share, seed=seed, fold=None
    )
    if whole:
        sets = plural(len({sources[path] for path in whole}), "source")
        notes.append(f"all {len(whole):,} images of {sets} are held out to measure new sources by")
        val = _partition(records, [record.path in whole for record in records])[1] + val
    return train, val, notes


def _split_units(
    records: list[ImageRecord],
    index: DatasetIndex,
    spec: DatasetSpec,
    copies: Copies,
    sources: Mapping[str, str],
    *,
    val_share: float,
    seed: int,
    fold: Fold | None,
) -> TrainValSplit:
    groups = None
    if spec.group is not None:
        groups = groups_of_records(records, index, spec.group)
    elif sources:
        groups = [sources.get(record.path, "") for record in records]
    names = [relative(record.path, index.root) for record in records]
    shares: tuple[float, ...] = (1 - val_share, val_share)
    val_part = 1
    if fold is not None:
        shares, val_part = (1 / fold.total,) * fold.total, fold.number - 1
    choices = [place for place, texts in enumerate(index.target_classes) if texts]
    units = make_units(records, groups, names, copies, share=min(shares), choices=choices)
    if fold is not None:
        _check_folds(units, fold, _labels(records))
    parts = stratify(units, shares, seed=seed)
    val_units = [unit for unit, part in zip(units, parts, strict=True) if part == val_part]
    members = {member for unit in val_units for member in unit.members}
    train, val = _partition(records, [number in members for number in range(len(records))])
    groups_note = f" ({plural(len(val_units), 'group')})" if groups is not None else ""
    images = plural(len(val), "image") + groups_note
    if fold is None:
        strata = "each class" if _labels(records) else "all"
        reason = f"no validation {index.split_kind}"
        notes = [f"{reason}: held out {images}, {val_share:.0%} of {strata}"]
        absent_note = "held out none of class {}, which is in one image or group"
    else:
        notes = [f"fold {fold.number} of {fold.total}: validates on {images}"]
        absent_note = "this fold has no validation images of class {}"
        if TEST in index.splits:
            notes.append("left out test: no fold sees it; measure on it at the end")
    if groups is not None and spec.group is not None:
        notes += group_notes(groups, spec.group, column=index.has_groups)
    elif groups is not None:
        number = plural(len({*groups} - {""}), "source")
        notes.append(f"{number}, each in one fold: the folds measure new sources")
    _check_learnable(train, val, spec)
    if absent := [printable(label) for label in sorted(_labels(records) - _labels(val))]:
        notes.append(absent_note.format(join_names(absent)))
    return train, val, notes


def _check_folds(units: Sequence[SplitUnit], fold: Fold, classes: Container[str]) -> None:
    units_of = Counter(label for unit in units for label in unit.labels)
    single = [
        printable(name) for name, number in units_of.items() if number < 2 and name in classes
    ]
    if single:
        raise DataError(
            f"folds={fold.total}: only one image or group of class {join_names(single)}, so one "
            "fold cannot learn it; add others, or leave the class out"
        )
    if len(units) < fold.total:
        raise DataError(f"folds={fold.total}: only {len(units)} images or groups; take fewer folds")


def _check_learnable(
    train: Sequence[ImageRecord], val: Sequence[ImageRecord], spec: DatasetSpec
) -> None:
    """Refuse a split that leaves a class without training images."""
    lost = sorted(_labels(val) - _labels(train))
    if lost:
        names = join_names(lost)
        by = "" if spec.group is None else f" when groups ({printable(spec.group)}) stay together"
        raise DataError(
            f"no training images left of class {names}{by}; another --seed, a smaller "
            "--val-share or more --folds may help"
        )


def _partition(
    records: Sequence[ImageRecord], is_val: Sequence[bool]
) -> tuple[list[ImageRecord], list[ImageRecord]]:
    pairs = list(zip(records, is_val, strict=True))
    return [r for r, held_out in pairs if not held_out], [r for r, held_out in pairs if held_out]


def _strata(
    records: Sequence[ImageRecord], share: float, choices: Sequence[int] = ()
) -> list[tuple[str, ...]]:
    """The classes of each image; of those with numbers, the part of the range of the first one, or
    the class of each of the `choices`.

    There are at most ten parts of equally many images, of each of which `share` is one or more.
    """
    strata: list[tuple[str, ...]] = [record.labels or ("",) for record in records]
    if choices:
        return [tuple(f"{place}={one.numbers[place]:g}" for place in choices) for one in records]
    if any(record.numbers for record in records):
        keys = [(math.isnan(one.numbers[0]), one.numbers[0], one.path) for one in records]
        parts = min(max(int(len(records) * share), 1), MAX_STRATA)
        for rank, place in enumerate(sorted(range(len(records)), key=keys.__getitem__)):
            strata[place] = (str(rank * parts // len(records)),)
    return strata


def _labels(records: Sequence[ImageRecord]) -> set[str]:
    return {label for record in records for label in record.labels}
