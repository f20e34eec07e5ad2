"""Chooses the training and the validation pictures of what a source lists, and says how."""

from collections.abc import Sequence

from vit.data.containers import relative
from vit.data.samples import Item, Listed
from vit.data.sources.asked import Asked
from vit.data.sources.classes import VAL_NAMES, Pictures
from vit.data.sources.folders import count, some
from vit.data.sources.splitting import (
    Fold,
    check_sides,
    draw,
    find_groups,
    fold_of,
    group_notes,
    hold_out,
    make_units,
    members_of,
    uneven_notes,
)
from vit.errors import ConfigError, DataError, printable

Sides = tuple[list[Item], list[Item], list[str]]
"""Training pictures, validation pictures, and notes for the user."""


def divided(
    listed: Listed, asked: Asked, *, val_share: float, seed: int, fold: Fold | None
) -> Sides:
    """The two sides: the data's own, or a fold, or a share that is held out.

    Raises:
        DataError: A group is on both sides, or a fold is left without a class.
        ConfigError: A fold is asked for, and the data have validation pictures; or `group` is
            neither a column nor a regular expression.
    """
    train = listed.splits.get("train", listed.splits.get("", []))
    own = next((name for name in VAL_NAMES if name in listed.splits), None)
    if fold is not None and own not in (None, "test"):
        raise ConfigError(
            f"folds={fold.of}: the data have validation pictures ({listed.where[own or '']}), so "
            "there is nothing to divide; give the training pictures alone as DATA"
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
    """The group of each picture, from the source or from its name; empty where it is alone."""
    if listed.grouped:
        return [item.group for item in items]
    return find_groups([relative(item.path, listed.root) for item in items], group)


def _held_out(
    items: list[Item], listed: Listed, asked: Asked, *, val_share: float, seed: int
) -> Sides:
    lack = f"no validation {listed.part}"
    if asked.group is None and not listed.several:
        pictures: Pictures = {}
        for item in sorted(items, key=lambda item: item.labels):
            pictures.setdefault(item.labels[0], []).append(item.path)
        _, held = hold_out(pictures, val_share=val_share, seed=seed, root=listed.root)
        chosen = {path for paths in held.values() for path in paths}
        sides = [item.path in chosen for item in items]
        least = any(len(paths) * val_share < 0.5 for paths in pictures.values())
        notes = [
            f"{lack}: held out {count(len(chosen), 'image')}, {val_share:.0%} of each class"
            + (", and one where that is none" if least else "")
        ]
        single = [printable(name) for name, paths in held.items() if not paths]
        if single:
            notes.append(f"held out none of class {some(single)}, which has only one image")
        return _kept(items, sides), members_of(items, sides), notes
    groups = None if asked.group is None else _groups(items, listed, asked.group)
    units = make_units(items, groups, [relative(item.path, listed.root) for item in items])
    sides = draw(items, units, share=val_share, seed=seed)
    train, val = _kept(items, sides), members_of(items, sides)
    number = sum(sides[unit.members[0]] for unit in units)
    what = f" ({count(number, 'group')})" if groups is not None else ""
    notes = [f"{lack}: held out {count(len(val), 'image')}{what}, {val_share:.0%} of each class"]
    if groups is not None:
        notes += group_notes(groups, asked.group or "", column=listed.grouped)
    _check_learned(train, val, asked)
    held_labels, all_labels = _labels(val), _labels(items)
    if none := [printable(label) for label in sorted(all_labels - held_labels)]:
        notes.append(f"held out none of class {some(none)}, which is in one image or group")
    return train, val, notes + uneven_notes(train, val, val_share)


def _folded(
    items: list[Item], listed: Listed, asked: Asked, fold: Fold, *, seed: int, tested: bool
) -> Sides:
    groups = None if asked.group is None else _groups(items, listed, asked.group)
    units = make_units(items, groups, [relative(item.path, listed.root) for item in items])
    chosen = fold_of(units, fold, seed=seed)
    sides = [number in chosen for number in range(len(items))]
    train, val = _kept(items, sides), members_of(items, sides)
    number = sum(sides[unit.members[0]] for unit in units)
    what = f" ({count(number, 'group')})" if groups is not None else ""
    notes = [f"fold {fold.number} of {fold.of}: validates on {count(len(val), 'image')}{what}"]
    if tested:
        notes.append("left out test: no fold sees it; measure on it at the end")
    if groups is not None:
        notes += group_notes(groups, asked.group or "", column=listed.grouped)
    _check_learned(train, val, asked)
    if none := [printable(label) for label in sorted(_labels(items) - _labels(val))]:
        notes.append(f"this fold has no validation images of class {some(none)}")
    return train, val, notes + uneven_notes(train, val, 1 / fold.of)


def _kept(items: Sequence[Item], held: Sequence[bool]) -> list[Item]:
    return members_of(items, [not side for side in held])


def _labels(items: Sequence[Item]) -> set[str]:
    return {label for item in items for label in item.labels}


def _check_learned(train: Sequence[Item], val: Sequence[Item], asked: Asked) -> None:
    """Refuse a split that leaves a class without training pictures."""
    lost = sorted(_labels(val) - _labels(train))
    if lost:
        names = some([printable(label) for label in lost])
        by = "" if asked.group is None else f" when groups ({printable(asked.group)}) stay together"
        raise DataError(
            f"no training pictures left of class {names}{by}; another --seed, a smaller "
            "--val-share or more --folds may do"
        )
