"""Which tar files a word means: one, a pattern with braces or stars, or a folder of them."""

import glob
import os
import re
from collections.abc import Iterator

from vit.data.sources.classes import SPLIT_NAMES
from vit.data.sources.folders import some
from vit.errors import DataError, printable

MOST_SHARDS = 100_000
PACKED = re.compile(r"\.(tar\.(gz|bz2|xz|zst|lz4)|tgz|tbz2?|txz)$", re.IGNORECASE)
RANGE = re.compile(r"(\d+)\.\.(\d+)")


def is_shards(data: str) -> bool:
    """Whether `data` is meant as tar shards: by its ending, or a folder that has some."""
    if data.lower().endswith(".tar") or PACKED.search(data):
        return not os.path.isdir(data)
    return os.path.isdir(data) and bool(_in_folder(data))


def shard_files(data: str) -> list[str]:
    """The shards that `data` names, sorted.

    Raises:
        DataError: A pattern names none, or one that is missing.
    """
    if os.path.isdir(data):
        return _in_folder(data)
    if os.path.lexists(data):
        return [data]
    files: list[str] = []
    missing: list[str] = []
    for name in expand_braces(data):
        found = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        if not found or not os.path.isfile(found[0]):
            missing.append(name)
        files += found
    if missing:
        names = some([printable(name) for name in missing], 3)
        raise DataError(f"{printable(data)}: no such shard ({names}); give those that there are")
    if packed := [name for name in files if PACKED.search(name)]:
        return packed[:1]  # refused when it is read, with what unpacks it
    return sorted(set(files))


def _in_folder(folder: str) -> list[str]:
    """The tars straight in a folder without others in it, or those in its folders of splits.

    A tar that lies beside class folders is somebody's copy of them, and no shard.
    """
    names = _folders(folder)
    if not names:
        return _whole(folder, _tars(folder))
    places = [os.path.join(folder, name) for name in names if name in SPLIT_NAMES]
    if "train" not in names or any(_folders(place) for place in places):
        return []
    return _whole(folder, [path for place in places for path in _tars(place)])


def _whole(folder: str, paths: list[str]) -> list[str]:
    """These tars, none of which is compressed.

    Raises:
        DataError: Some are: they would be missing.
    """
    packed = [os.path.basename(path) for path in paths if PACKED.search(path)]
    if packed:
        names = some([printable(name) for name in sorted(packed)], 2)
        raise DataError(
            f"{printable(folder)}: compressed shards ({names}): unpack them (gunzip, zstd -d); "
            "pictures are compressed already"
        )
    return sorted(paths)


def _folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [one.name for one in entries if one.name[0] != "." and one.is_dir()]
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be listed ({error.strerror})") from None


def _is_tar(name: str) -> bool:
    return name.lower().endswith(".tar") or bool(PACKED.search(name))


def _tars(folder: str) -> list[str]:
    names = [name for name in os.listdir(folder) if not name.startswith(".")]
    paths = [os.path.join(folder, name) for name in names if _is_tar(name)]
    return [path for path in paths if os.path.isfile(path)]


def expand_braces(pattern: str) -> list[str]:
    """`{00..02}` and `{train,val}` written out, in every combination, as shells do it.

    Raises:
        DataError: A brace is not closed, or it would be too many names.
    """
    names = []
    for name in _expanded(pattern):
        names.append(name)
        if len(names) > MOST_SHARDS:
            raise DataError(f"{printable(pattern)}: more than {MOST_SHARDS:,} shards; use less")
    return names


def _expanded(pattern: str) -> Iterator[str]:
    start = pattern.find("{")
    if start < 0:
        yield pattern
        return
    end = _closing(pattern, start)
    for choice in _choices(pattern[start + 1 : end]):
        for middle in _expanded(choice):
            for rest in _expanded(pattern[end + 1 :]):
                yield pattern[:start] + middle + rest


def _closing(pattern: str, start: int) -> int:
    depth = 0
    for at in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[at], 0)
        if not depth:
            return at
    raise DataError(f"{printable(pattern)}: a brace is not closed; expected such as {{000..099}}")


def _choices(inside: str) -> Iterator[str]:
    """What may stand for a pair of braces: numbers of a range, or parts between commas."""
    if found := RANGE.fullmatch(inside):
        first, last = found.groups()
        width = max(len(first), len(last)) if first[0] == "0" or last[0] == "0" else 0
        step = 1 if int(first) <= int(last) else -1
        yield from (f"{number:0{width}}" for number in range(int(first), int(last) + step, step))
        return
    depth, begun = 0, 0
    for at, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            yield inside[begun:at]
            begun = at + 1
    yield inside[begun:]


def split_of(file: str) -> str:
    """The split that a shard's own name, or its folder, says; empty where neither does."""
    folder, name = os.path.split(file)
    words = re.split(r"[-_.]", name.lower())
    found = next((word for word in words if word in SPLIT_NAMES), "")
    above = os.path.basename(folder)
    return found or (above if above in SPLIT_NAMES else "")
