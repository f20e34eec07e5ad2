"""Data sets in tar shards: pictures in class folders, or with labels beside as WebDataset has them.

    cat/0001.jpg                                 the folder is the class
    0001.jpg 0001.cls                            a name or a number (of classes.json, where it is)
    0001.jpg 0001.json {"label": "cat"}          or {"labels": ["cat", "tabby"]}: several

The split is that of the shard's name (train-0000.tar), of its folder (train/0000.tar), or of the
first folder in it (train/cat/0001.jpg). Shards stay packed; see vit.data.containers.
"""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from vit.data.containers import index_of
from vit.data.samples import Item, Listed
from vit.data.sources.classes import SPLIT_NAMES
from vit.data.sources.faults import Faults, leave, nothing_left
from vit.data.sources.folders import FOREIGN, SUFFIXES, SYSTEM, count, some
from vit.data.sources.shard_labels import Member, Sidecars, labelled_by
from vit.data.sources.shard_names import shard_files, split_of
from vit.data.tar_index import BadShard, Index
from vit.errors import DataError, printable

SIDECARS = (".cls", ".json", ".txt")
TABLES = ("classes.json", "classes.txt")


def read_shards(data: str, faults: Faults = None) -> Listed:
    """The pictures in the shards that `data` names: one, a pattern or a folder.

    Args:
        data: As the user calls them.
        faults: Receives shards that are damaged and pictures without a class, which are left out.

    Raises:
        DataError: One is missing, or all are damaged or packed; without `faults` one of them is,
            or a picture has no class.
    """
    files = shard_files(data)
    return listed_shards(files, data, faults)


def listed_shards(files: Sequence[str], data: str, faults: Faults = None) -> Listed:
    """The pictures in these shards.

    Args:
        files: The shards, sorted.
        data: What the user calls them.
        faults: As for `read_shards`.
    """
    pictures, sidecars, notes = _members(files, faults=faults)
    if faults and not pictures:
        raise nothing_left(faults)
    if not pictures:
        raise DataError(f"{printable(data)}: no pictures in {count(len(files), 'shard')}")
    pictures, inside = _unwrapped(pictures)
    if inside:
        notes.append(f"took {printable(inside)} in the shards for the folder of the data")
    pictures, more = _with_splits(pictures)
    notes += more
    found, several, more = labelled_by(pictures, sidecars, data, faults)
    notes += more
    splits: dict[str, list[Item]] = {}
    for member, labels in zip(pictures, found, strict=True):
        if labels is not None:
            splits.setdefault(member.split, []).append(Item(member.path, labels))
    if faults and not splits:
        raise nothing_left(faults)
    root = _root(pictures, files, data, inside)
    _in_order(splits, pictures)
    where = {name: f"{printable(data)}" + (f" ({name})" if name else "") for name in splits}
    return Listed(root, splits, where, notes, several)


def shard_pictures(files: Sequence[str], data: str) -> tuple[list[str], list[str]]:
    """Addresses of the pictures in these shards, which need no classes, and notes.

    They are in the order of the shards, and by name in each. Those of foreign formats are among
    them, as in folders, so that none is lost.

    Raises:
        DataError: A shard is damaged or packed, or there are no pictures.
    """
    pictures, _, notes = _members(files, SUFFIXES | FOREIGN)
    if not pictures:
        raise DataError(f"{printable(data)}: no pictures in {count(len(files), 'shard')}")
    order = {file: number for number, file in enumerate(files)}
    pictures.sort(key=lambda member: (order[member.file], member.name.split("/")))
    return [member.path for member in pictures], notes


def _members(
    files: Sequence[str], suffixes: Collection[str] = SUFFIXES, faults: Faults = None
) -> tuple[list[Member], Sidecars, list[str]]:
    """All pictures, what lies beside them, and what was left out."""
    pictures: list[Member] = []
    sidecars = Sidecars()
    other, ignored, junk = Counter[str](), Counter[str](), set[str]()
    for file in files:
        index = _index(file, faults)
        if index is None:
            continue
        ignored += index.ignored
        for name in index:
            parts = name.split("/")
            stem, suffix = os.path.splitext(name)
            suffix = suffix.lower()
            if hidden := [part for part in parts if part.startswith(".") or part in SYSTEM]:
                junk.update(hidden)
            elif parts[-1] in TABLES:
                sidecars.tables.append((file, name))
            elif suffix in suffixes:
                pictures.append(Member(file, name, name, split_of(file)))
            elif suffix in SIDECARS:
                sidecars.add(file, stem, suffix)
            else:
                other[suffix or "no suffix"] += 1
    for folder in sorted({os.path.dirname(file) for file in files}):
        beside = (os.path.join(folder, name) for name in TABLES)
        sidecars.tables += [("", path) for path in beside if os.path.isfile(path)]
    return pictures, sidecars, _left_out(other, ignored, junk)


def _index(file: str, faults: Faults) -> Index | None:
    try:
        return index_of(file)
    except DataError as error:
        last = printable(error.last) if isinstance(error, BadShard) else ""
        if faults is not None and last not in str(error):
            error = DataError(f"{error}; the last good member is {last}")
        leave(faults, "bad_shard", error, file)
        return None


def _left_out(other: Counter[str], ignored: Counter[str], junk: set[str]) -> list[str]:
    notes = []
    if other:
        endings = [f"{printable(suffix)} {number}" for suffix, number in other.most_common()]
        advice = "; convert them to JPEG or PNG" if FOREIGN & other.keys() else ""
        files = count(other.total(), "member")
        notes.append(f"left out {files} not taken for pictures: {some(endings)}{advice}")
    if ignored:
        kinds = ", ".join(count(number, kind) for kind, number in sorted(ignored.items()))
        notes.append(f"left out what is no file in the shards: {kinds}")
    if junk:
        notes.append(f"left out hidden and system names: {some(sorted(map(printable, junk)))}")
    return notes


def _unwrapped(pictures: list[Member]) -> tuple[list[Member], str]:
    """Without folders that hold everything, as `tar cf photos.tar photos` writes them."""
    inside = ""
    while True:
        parts = [member.name.split("/", 1) for member in pictures]
        first = parts[0][0]
        deep = all(len(two) == 2 and "/" in two[1] for two in parts)
        if not deep or any(two[0] != first for two in parts) or first in SPLIT_NAMES:
            return pictures, inside
        inside += f"{first}/"
        pictures = [
            member._replace(name=two[1]) for member, two in zip(pictures, parts, strict=True)
        ]


def _with_splits(pictures: list[Member]) -> tuple[list[Member], list[str]]:
    """Pictures of the splits that there are, each with its split."""
    if not any(member.split for member in pictures):
        pictures = [_split_inside(member) for member in pictures]
        if "train" not in {member.split for member in pictures}:
            return [member._replace(name=member.after_root, split="") for member in pictures], []
    beside = sorted({os.path.basename(member.file) for member in pictures if not member.split})
    kept = [member for member in pictures if member.split]
    if not beside:
        return kept, []
    left = count(len(pictures) - len(kept), "picture")
    return kept, [f"left out {left} that belong to no split: {some([*map(printable, beside)])}"]


def _split_inside(member: Member) -> Member:
    first, slash, rest = member.name.partition("/")
    if slash and "/" in rest and first in SPLIT_NAMES:
        return member._replace(name=rest, split=first, front=f"{first}/")
    return member


def _root(pictures: list[Member], files: Sequence[str], data: str, inside: str) -> Path:
    """What names are relative to: the inside of all shards, or their folder where names clash."""
    names = Counter((member.split, member.after_root) for member in pictures)
    folder = (
        os.path.abspath(data)
        if os.path.isdir(data)
        else os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
    )
    if max(names.values()) > 1:
        return Path(folder)
    if len(files) == 1:
        return Path(os.path.abspath(files[0])) / inside
    return Path(folder) / "shards.tar" / inside


def _in_order(splits: dict[str, list[Item]], pictures: list[Member]) -> None:
    """Sort by the names inside of the shards, as folders are walked: that of a shard is last."""
    names = {member.path: (member.after_root.split("/"), member.file) for member in pictures}
    for items in splits.values():
        items.sort(key=lambda item: names[item.path])
