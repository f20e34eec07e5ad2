"""Data sets in tar shards: images in class folders, or with labels beside as WebDataset has them.

    cat/0001.jpg                                 the folder is the class
    0001.jpg 0001.cls                            a name or a number (of classes.json, where it is)
    0001.jpg 0001.json {"label": "cat"}          or {"labels": ["cat", "tabby"]}: several

The split is that of the shard's name (train-0000.tar), of its folder (train/0000.tar), or of the
first folder in it (train/cat/0001.jpg). Shards stay packed; see vit.data.archives.

Which tar files a word means: one, a pattern with braces or stars, or a folder of them.
Classes of the images in shards: from folders, or from what lies beside each image.
"""

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vit.data.archives import index_of, read_bytes
from vit.data.dataset_types import Item, Listed
from vit.data.sources.class_names import SPLIT_NAMES
from vit.data.sources.file_walk import FOREIGN, SUFFIXES, SYSTEM
from vit.data.sources.row_errors import Faults, leave, nothing_left
from vit.data.sources.table_reader import whole_text
from vit.data.tar_index import BadShard, Index
from vit.errors import DataError, printable
from vit.text import join_names, plural

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
        names = join_names([printable(name) for name in missing], 3)
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
        names = join_names([printable(name) for name in sorted(packed)], 2)
        raise DataError(
            f"{printable(folder)}: compressed shards ({names}): unpack them (gunzip, zstd -d); "
            "images are compressed already"
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


LAYOUT = "expected CLASS/NAME.jpg in it, or NAME.jpg with NAME.cls or NAME.json beside"
MOST_BYTES = 2**24
"""Of a label."""
Found = TypeVar("Found")
Labels = list[tuple[str, ...] | None]
"""The classes of each image; None where that is a fault."""


class Member(NamedTuple):
    """An image in a shard."""

    file: str
    member: str
    """Its whole name in the shard."""
    name: str
    """Its name without folders that hold everything, and without that of its split."""
    split: str
    front: str = ""
    """The folder of its split, where that is inside of the shard."""

    @property
    def path(self) -> str:
        """Its address."""
        return f"{self.file}/{self.member}"

    @property
    def after_root(self) -> str:
        """Its name without folders that hold everything."""
        return self.front + self.name


@dataclass
class Sidecars:
    """What lies beside images: by ending, the (shard, name) that have it."""

    found: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    tables: list[tuple[str, str]] = field(default_factory=list)
    """Files with the names of classes: (shard, member), or an empty word and a path."""

    def add(self, file: str, stem: str, suffix: str) -> None:
        """Note one."""
        self.found.setdefault(suffix, set()).add((file, stem))

    def of(self, suffix: str) -> set[tuple[str, str]]:
        """Those with this ending."""
        return self.found.get(suffix, set())


def labelled_by(
    images: Sequence[Member], sidecars: Sidecars, data: str, faults: Faults = None
) -> tuple[Labels, bool, list[str]]:
    """The classes of each image, whether there may be several, and notes.

    Args:
        images: All of them.
        sidecars: What lies beside them.
        data: What the user calls them.
        faults: Receives images that have none and labels that cannot be understood; those have
            None instead of classes.

    Raises:
        DataError: An image has none, or a label cannot be understood.
    """
    notes = []
    if captions := len(sidecars.of(".txt")):
        notes.append(f"left out {plural(captions, 'text')} (.txt): captions are no classes")
    table = _table(sidecars)
    kinds = (".cls", ".json")
    beside = {kind: [_beside(member, sidecars, kind) for member in images] for kind in kinds}
    kind = next((kind for kind in kinds if any(beside[kind])), None)
    notes += _alone(images, sidecars, beside, faults)
    if kind == ".json" and not _has_label(images, beside[kind], faults):
        notes.append("left out NAME.json beside images: they have neither label nor labels")
        kind = None
    if kind is None:
        return _by_folder(images, data, faults), False, notes
    lacking = [m.path for m, name in zip(images, beside[kind], strict=True) if not name]
    if lacking and faults is None:
        raise DataError(
            f"{printable(data)}: {plural(len(lacking), 'image')} without {kind} beside, "
            f"which others have: {join_names([*map(printable, lacking)], 3)}"
        )
    _lack(lacking, f"no {kind} beside, which others have", faults)
    read = _cls if kind == ".cls" else _json
    cells = [
        _tried(partial(read, m, name), m, faults) if name else None
        for m, name in zip(images, beside[kind], strict=True)
    ]
    multilabel = any(isinstance(cell, list) for cell in cells)
    named = [
        None if cell is None else _tried(partial(_named, cell, table, m), m, faults)
        for cell, m in zip(cells, images, strict=True)
    ]
    return named, multilabel, notes


def _tried(work: Callable[[], Found], member: Member, faults: Faults) -> Found | None:
    """What `work` says of an image, or None where that is a fault."""
    try:
        return work()
    except DataError as error:
        leave(faults, "bad_label", error, member.path)
        return None


def _lack(paths: Sequence[str], what: str, faults: Faults) -> None:
    for path in paths:
        leave(faults, "no_label", DataError(f"{printable(path)}: {what}"), path)


def _alone(
    images: Sequence[Member],
    sidecars: Sidecars,
    beside: Mapping[str, Sequence[str]],
    faults: Faults,
) -> list[str]:
    """What there is of labels beside no image: a note for each ending, or a fault for each."""
    notes = []
    for kind, names in beside.items():
        if faults is None:
            if alone := len(sidecars.of(kind)) - len(set(names) - {""}):
                notes.append(f"left out {plural(alone, 'file')} {kind} beside no image")
            continue
        known = {(m.file, name) for m, name in zip(images, names, strict=True) if name}
        for file, stem in sorted(sidecars.of(kind)):
            if (file, stem + kind) not in known:
                path = f"{file}/{stem}{kind}"
                error = DataError(f"{printable(path)}: no image beside, so it is left out")
                leave(faults, "lone_label", error, path)
    return notes


def _beside(member: Member, sidecars: Sidecars, suffix: str) -> str:
    """The name of what lies beside an image with this ending; empty where nothing does.

    WebDataset's key of a/b.left.jpg is a/b; here a/b.left goes first.
    """
    folder, slash, name = member.member.rpartition("/")
    for stem in (os.path.splitext(name)[0], name.split(".")[0]):
        if (member.file, folder + slash + stem) in sidecars.of(suffix):
            return folder + slash + stem + suffix
    return ""


def _has_label(images: Sequence[Member], names: Sequence[str], faults: Faults) -> bool:
    """Whether the first .json, of those that can be read if all faults are wanted, has a label."""
    for member, name in zip(images, names, strict=True):
        try:
            found = _object(member, name) if name else None
        except DataError:
            if faults is None:
                raise
            continue
        if found is not None:
            return "label" in found or "labels" in found
    return True


def _by_folder(images: Sequence[Member], data: str, faults: Faults) -> Labels:
    loose = [member.path for member in images if "/" not in member.name]
    if loose and faults is None:
        what = f"{plural(len(loose), 'image')} without a class, such as {printable(loose[0])}"
        raise DataError(f"{printable(data)}: {what}; {LAYOUT}")
    _lack(loose, f"without a class; {LAYOUT}", faults)
    return [(m.name.split("/")[0],) if "/" in m.name else None for m in images]


def _words(cell: object) -> list[object]:
    return cell if isinstance(cell, list) else [cell]


def _named(cell: object, table: dict[str, str], member: Member) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_name(word, table, member) for word in _words(cell)))


def _name(word: object, table: dict[str, str], member: Member) -> str:
    """The name of the class that a label means."""
    text = str(word)
    if not table:
        return text
    if text in table:
        return table[text]
    if text in table.values():
        return text
    known = plural(len(table), "class", "classes")
    raise _wrong(member, f"label {text!r} is none of the {known} in classes.json or classes.txt")


def _wrong(member: Member, what: str) -> DataError:
    return DataError(f"{printable(member.path)}: {printable(what)}")


def _text(file: str, name: str) -> str:
    content = read_bytes(file, name)
    try:
        if len(content) > MOST_BYTES:
            raise ValueError("too long")
        return content.decode("utf-8-sig")
    except ValueError as error:
        raise DataError(
            f"{printable(file)}/{printable(name)}: not UTF-8 text ({printable(error)})"
        ) from None


def _cls(member: Member, name: str) -> object:
    text = _text(member.file, name).strip()
    if not text or "\n" in text:
        raise _wrong(member, "its .cls is not the name or number of one class")
    return text


def _object(member: Member, name: str) -> dict[str, Any]:
    found = _parsed(_text(member.file, name), f"{member.file}/{name}")
    if not isinstance(found, dict):
        raise _wrong(member, 'its .json is no object such as {"label": "cat"}')
    return dict(found)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{printable(where)}: no JSON ({printable(error)})") from None


def _json(member: Member, name: str) -> object:
    found = _object(member, name)
    cell = found.get("labels", found.get("label"))
    words = _words(cell)
    fit = all(isinstance(word, str | int) and not isinstance(word, bool) for word in words)
    if not fit or "" in words or isinstance(cell, list) != ("labels" in found):
        raise _wrong(member, 'its .json has no "label" (a name or number) or "labels" (a list)')
    return cell


def _table(sidecars: Sidecars) -> dict[str, str]:
    """Names of classes by number, where a file says them; all such files must agree."""
    tables = []
    for file, name in sidecars.tables:
        text = _text(file, name) if file else whole_text(name)
        where = f"{file}/{name}" if file else name
        tables.append(_names(text, where))
    if any(table != tables[0] for table in tables):
        raise DataError("shards with different classes.json or classes.txt; keep one of them")
    return tables[0] if tables else {}


def _names(text: str, where: str) -> dict[str, str]:
    if where.endswith(".txt"):
        found: Any = text.splitlines()
    else:
        found = _parsed(text, where)
    if isinstance(found, list):
        found = {str(number): name for number, name in enumerate(found)}
    if isinstance(found, dict) and all(type(value) is int for value in found.values()):
        found = {str(number): name for name, number in found.items()}
    fit = isinstance(found, dict) and all(isinstance(name, str) and name for name in found.values())
    if not fit or len(set(found.values())) != len(found):
        shape = "expected a list of different names, or an object of them by number"
        raise DataError(f"{printable(where)}: not the names of classes; {shape}")
    return dict(found)


SIDECARS = (".cls", ".json", ".txt")
TABLES = ("classes.json", "classes.txt")


def read_shards(data: str, faults: Faults = None) -> Listed:
    """The images in the shards that `data` names: one, a pattern or a folder.

    Args:
        data: As the user calls them.
        faults: Receives shards that are damaged and images without a class, which are left out.

    Raises:
        DataError: One is missing, or all are damaged or packed; without `faults` one of them is,
            or an image has no class.
    """
    files = shard_files(data)
    return listed_shards(files, data, faults)


def listed_shards(files: Sequence[str], data: str, faults: Faults = None) -> Listed:
    """The images in these shards.

    Args:
        files: The shards, sorted.
        data: What the user calls them.
        faults: As for `read_shards`.
    """
    images, sidecars, notes = _members(files, faults=faults)
    if faults and not images:
        raise nothing_left(faults)
    if not images:
        raise DataError(f"{printable(data)}: no images in {plural(len(files), 'shard')}")
    images, inside = _unwrapped(images)
    if inside:
        notes.append(f"took {printable(inside)} in the shards for the folder of the data")
    images, more = _with_splits(images)
    notes += more
    found, multilabel, more = labelled_by(images, sidecars, data, faults)
    notes += more
    splits: dict[str, list[Item]] = {}
    for member, labels in zip(images, found, strict=True):
        if labels is not None:
            splits.setdefault(member.split, []).append(Item(member.path, labels))
    if faults and not splits:
        raise nothing_left(faults)
    root = _root(images, files, data, inside)
    _in_order(splits, images)
    where = {name: f"{printable(data)}" + (f" ({name})" if name else "") for name in splits}
    return Listed(root, splits, where, notes, multilabel)


def shard_images(files: Sequence[str], data: str) -> tuple[list[str], list[str]]:
    """Addresses of the images in these shards, which need no classes, and notes.

    They are in the order of the shards, and by name in each. Those of foreign formats are among
    them, as in folders, so that none is lost.

    Raises:
        DataError: A shard is damaged or packed, or there are no images.
    """
    images, _, notes = _members(files, SUFFIXES | FOREIGN)
    if not images:
        raise DataError(f"{printable(data)}: no images in {plural(len(files), 'shard')}")
    order = {file: number for number, file in enumerate(files)}
    images.sort(key=lambda member: (order[member.file], member.name.split("/")))
    return [member.path for member in images], notes


def _members(
    files: Sequence[str], suffixes: Collection[str] = SUFFIXES, faults: Faults = None
) -> tuple[list[Member], Sidecars, list[str]]:
    """All images, what lies beside them, and what was left out."""
    images: list[Member] = []
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
                images.append(Member(file, name, name, split_of(file)))
            elif suffix in SIDECARS:
                sidecars.add(file, stem, suffix)
            else:
                other[suffix or "no suffix"] += 1
    for folder in sorted({os.path.dirname(file) for file in files}):
        beside = (os.path.join(folder, name) for name in TABLES)
        sidecars.tables += [("", path) for path in beside if os.path.isfile(path)]
    return images, sidecars, _left_out(other, ignored, junk)


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
        files = plural(other.total(), "member")
        notes.append(f"left out {files} not taken for images: {join_names(endings)}{advice}")
    if ignored:
        kinds = ", ".join(plural(number, kind) for kind, number in sorted(ignored.items()))
        notes.append(f"left out what is no file in the shards: {kinds}")
    if junk:
        notes.append(
            f"left out hidden and system names: {join_names(sorted(map(printable, junk)))}"
        )
    return notes


def _unwrapped(images: list[Member]) -> tuple[list[Member], str]:
    """Without folders that hold everything, as `tar cf photos.tar photos` writes them."""
    inside = ""
    while True:
        parts = [member.name.split("/", 1) for member in images]
        first = parts[0][0]
        deep = all(len(two) == 2 and "/" in two[1] for two in parts)
        if not deep or any(two[0] != first for two in parts) or first in SPLIT_NAMES:
            return images, inside
        inside += f"{first}/"
        images = [member._replace(name=two[1]) for member, two in zip(images, parts, strict=True)]


def _with_splits(images: list[Member]) -> tuple[list[Member], list[str]]:
    """Images of the splits that there are, each with its split."""
    if not any(member.split for member in images):
        images = [_split_inside(member) for member in images]
        if "train" not in {member.split for member in images}:
            return [member._replace(name=member.after_root, split="") for member in images], []
    beside = sorted({os.path.basename(member.file) for member in images if not member.split})
    kept = [member for member in images if member.split]
    if not beside:
        return kept, []
    left = plural(len(images) - len(kept), "image")
    return kept, [
        f"left out {left} that belong to no split: {join_names([*map(printable, beside)])}"
    ]


def _split_inside(member: Member) -> Member:
    first, slash, rest = member.name.partition("/")
    if slash and "/" in rest and first in SPLIT_NAMES:
        return member._replace(name=rest, split=first, front=f"{first}/")
    return member


def _root(images: list[Member], files: Sequence[str], data: str, inside: str) -> Path:
    """What names are relative to: the inside of all shards, or their folder where names clash."""
    names = Counter((member.split, member.after_root) for member in images)
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


def _in_order(splits: dict[str, list[Item]], images: list[Member]) -> None:
    """Sort by the names inside of the shards, as folders are walked: that of a shard is last."""
    names = {member.path: (member.after_root.split("/"), member.file) for member in images}
    for items in splits.values():
        items.sort(key=lambda item: names[item.path])
