"""Opens lists of pictures and their classes: finds the pictures' folder, and the splits."""

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from vit.data.captioning.lists import pictures_folder
from vit.data.samples import Item, Listed
from vit.data.sources.asked import Asked
from vit.data.sources.faults import Fault, leave, nothing_left
from vit.data.sources.folders import some
from vit.data.sources.label_lists import INSIDE, SUFFIXES, lists_in, read_list
from vit.data.sources.list_entries import Entry, ReadList
from vit.data.sources.list_names import common_folders, unlisted_notes
from vit.data.sources.text_files import wrong
from vit.errors import DataError, printable
from vit.nearby import did_you_mean


class _Opened(NamedTuple):
    """A list whose pictures have their places."""

    read: ReadList
    base: str
    """Folder that its names are relative to."""
    entries: dict[str, Entry]
    """By path."""


def read_lists(asked: Asked) -> Listed:
    """The pictures of a list, or of the lists in a folder.

    Raises:
        DataError: A list is damaged, contradicts itself, or names a picture outside of its folder.
    """
    notes: list[str] = []
    opened = _open(asked, notes)
    reads = [one.read for one in opened.values()]
    several = asked.several or (asked.several is None and any(read.several for read in reads))
    named = {path for one in opened.values() for path in one.entries}
    if asked.faults is not None:
        opened = _without_faults(opened, asked.faults, notes, several=bool(several))
        named |= {path for fault in asked.faults for path in fault.images}
    elif not several:
        for read in reads:
            read.check_single()
    bases = {one.base for one in opened.values()}
    root = Path(bases.pop() if len(bases) == 1 else asked.images or asked.data)
    if asked.split is None:
        folders = [
            folder
            for one in opened.values()
            for folder in common_folders(one.base, one.read.entries)
        ]
        notes += unlisted_notes(named, folders, str(root))
    splits: dict[str, list[Item]] = {}
    where: dict[str, str] = {}
    part = "list" if len(opened) > 1 else "split"
    for name, one in opened.items():
        for path, entry in one.entries.items():
            split = name or entry.split
            splits.setdefault(split, []).append(Item(path, entry.labels, entry.group))
            if split not in where:
                column = f" (split {split})" if entry.split and not name else ""
                where[split] = printable(one.read.path) + column
    grouped = [bool(read.columns and read.columns.group) for read in reads]
    if any(grouped) and not all(grouped):
        raise DataError(f"group={printable(asked.group)}: a column of some lists, not of all")
    return Listed(root, splits, where, notes, bool(several), all(grouped), part)


def lines_of(asked: Asked, paths: Collection[str]) -> dict[str, str]:
    """Where lists name these pictures: the list and the line of each that is in one.

    They are read again: it is only asked for pictures that are missing.
    """
    wanted = set(paths)
    return {
        path: f"{one.read.path}, line {entry.line}"
        for one in _open(asked, []).values()
        for path, entry in one.entries.items()
        if path in wanted
    }


def pictures_in(path: str, notes: list[str] | None = None) -> list[str]:
    """The pictures that a list names, in its order; it needs no classes.

    Args:
        path: The list.
        notes: Receives what of it is left out.

    Raises:
        DataError: It is damaged, or no list of pictures.
    """
    asked = Asked(path, allow_outside=True)
    told = [] if notes is None else notes
    read = read_list(path, asked, told, labels=False)
    return [*_placed(read, asked, told).entries]


def _open(asked: Asked, notes: list[str]) -> dict[str, _Opened]:
    """The lists by split; a single one under the empty name."""
    if asked.images is not None and not os.path.isdir(asked.images):
        hint = did_you_mean(asked.images)
        raise DataError(f"{printable(asked.images)}: no such folder of images{hint}")
    if not os.path.isdir(asked.data):
        read = read_list(asked.data, asked, notes)
        return {"": _placed(read, asked, notes)}
    files = lists_in(asked.data)
    names = ", ".join(printable(os.path.basename(path)) for path in files.values())
    notes.append(f"read the lists {names} of {printable(asked.data)}")
    others = [
        printable(name)
        for name in sorted(os.listdir(asked.data))
        if name.lower().endswith(SUFFIXES) and os.path.join(asked.data, name) not in files.values()
    ]
    if others:
        notes.append(f"left out lists without a split in their name, or classes: {some(others)}")
    # all of them where one trains: what none of them names is told
    wanted = files if asked.split is None else asked.needed(files)
    return {split: _placed(read_list(files[split], asked, notes), asked, notes) for split in wanted}


def _placed(read: ReadList, asked: Asked, notes: list[str]) -> _Opened:
    """The pictures of a list by path.

    Raises:
        DataError: One of them lies outside of the folder, and that was not asked for.
    """
    within = [name for name in read.entries if not os.path.isabs(name)]
    base = pictures_folder(read.path, within, asked.images, notes)
    if len(within) < len(read.entries):
        read = _made_relative(read, os.path.abspath(base), outside=asked.allow_outside)
    entries = {_path_of(name, base): entry for name, entry in read.entries.items()}
    return _Opened(read, base, entries)


def _path_of(name: str, base: str) -> str:
    return name if os.path.isabs(name) else os.path.normpath(os.path.join(base, name))


def _without_faults(
    opened: Mapping[str, _Opened], faults: list[Fault], notes: list[str], *, several: bool
) -> dict[str, _Opened]:
    """The lists without lines that are wrong, which go to `faults`.

    Raises:
        DataError: No line is left.
    """
    kept: dict[str, _Opened] = {}
    for split, one in opened.items():
        read, base = one.read, one.base
        if not several:
            read.leave_unfit()
        elif read.several:
            advice = "so a picture may have several, or none, as --task multilabel learns them"
            notes.append(f"{printable(read.path)}, line {read.several}: several labels, {advice}")
        faults += [
            fault._replace(images=tuple(_path_of(name, base) for name in fault.images))
            for fault in read.faults or ()
        ]
        entries = {_path_of(name, base): entry for name, entry in read.entries.items()}
        kept[split] = one._replace(entries=entries)
    if not any(one.entries for one in kept.values()):
        raise nothing_left(faults)
    return kept


def _made_relative(read: ReadList, base: str, *, outside: bool) -> ReadList:
    """`read` with absolute names that lie in `base` relative to it.

    Raises:
        DataError: One lies elsewhere, and `outside` is not set.
    """
    above = os.path.join(base, "")
    moved = dataclasses.replace(
        read,
        entries={},
        merged=[(name.removeprefix(above), one, other) for name, one, other in read.merged],
    )
    for name, entry in read.entries.items():
        kind = "bad_path"
        try:
            if os.path.isabs(name) and not name.startswith(above) and not outside:
                advice = f"lies outside of {base}; {INSIDE}"
                raise wrong(read.path, f"{name} {advice}", entry.line)
            kind = "contradiction"
            moved.add(name.removeprefix(above), entry)
        except DataError as error:
            leave(moved.faults, kind, error, name)
    return moved
