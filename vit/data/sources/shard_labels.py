"""Classes of the pictures in shards: from folders, or from what lies beside each picture."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from vit.data.containers import read_bytes
from vit.data.sources.faults import Faults, leave
from vit.data.sources.folders import count, some
from vit.data.sources.text_files import whole_text
from vit.errors import DataError, printable

LAYOUT = "expected CLASS/NAME.jpg in it, or NAME.jpg with NAME.cls or NAME.json beside"
MOST_BYTES = 2**24
"""Of a label."""
Found = TypeVar("Found")
Labels = list[tuple[str, ...] | None]
"""The classes of each picture; None where that is a fault."""


class Member(NamedTuple):
    """A picture in a shard."""

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
    """What lies beside pictures: by ending, the (shard, name) that have it."""

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
    pictures: Sequence[Member], sidecars: Sidecars, data: str, faults: Faults = None
) -> tuple[Labels, bool, list[str]]:
    """The classes of each picture, whether there may be several, and notes.

    Args:
        pictures: All of them.
        sidecars: What lies beside them.
        data: What the user calls them.
        faults: Receives pictures that have none and labels that cannot be understood; those have
            None instead of classes.

    Raises:
        DataError: A picture has none, or a label cannot be understood.
    """
    notes = []
    if captions := len(sidecars.of(".txt")):
        notes.append(f"left out {count(captions, 'text')} (.txt): captions are no classes")
    table = _table(sidecars)
    kinds = (".cls", ".json")
    beside = {kind: [_beside(member, sidecars, kind) for member in pictures] for kind in kinds}
    kind = next((kind for kind in kinds if any(beside[kind])), None)
    notes += _alone(pictures, sidecars, beside, faults)
    if kind == ".json" and not _has_label(pictures, beside[kind], faults):
        notes.append("left out NAME.json beside pictures: they have neither label nor labels")
        kind = None
    if kind is None:
        return _by_folder(pictures, data, faults), False, notes
    lacking = [m.path for m, name in zip(pictures, beside[kind], strict=True) if not name]
    if lacking and faults is None:
        raise DataError(
            f"{printable(data)}: {count(len(lacking), 'picture')} without {kind} beside, "
            f"which others have: {some([*map(printable, lacking)], 3)}"
        )
    _lack(lacking, f"no {kind} beside, which others have", faults)
    read = _cls if kind == ".cls" else _json
    cells = [
        _tried(partial(read, m, name), m, faults) if name else None
        for m, name in zip(pictures, beside[kind], strict=True)
    ]
    several = any(isinstance(cell, list) for cell in cells)
    named = [
        None if cell is None else _tried(partial(_named, cell, table, m), m, faults)
        for cell, m in zip(cells, pictures, strict=True)
    ]
    return named, several, notes


def _tried(work: Callable[[], Found], member: Member, faults: Faults) -> Found | None:
    """What `work` says of a picture, or None where that is a fault."""
    try:
        return work()
    except DataError as error:
        leave(faults, "bad_label", error, member.path)
        return None


def _lack(paths: Sequence[str], what: str, faults: Faults) -> None:
    for path in paths:
        leave(faults, "no_label", DataError(f"{printable(path)}: {what}"), path)


def _alone(
    pictures: Sequence[Member],
    sidecars: Sidecars,
    beside: Mapping[str, Sequence[str]],
    faults: Faults,
) -> list[str]:
    """What there is of labels beside no picture: a note for each ending, or a fault for each."""
    notes = []
    for kind, names in beside.items():
        if faults is None:
            if alone := len(sidecars.of(kind)) - len(set(names) - {""}):
                notes.append(f"left out {count(alone, 'file')} {kind} beside no picture")
            continue
        known = {(m.file, name) for m, name in zip(pictures, names, strict=True) if name}
        for file, stem in sorted(sidecars.of(kind)):
            if (file, stem + kind) not in known:
                path = f"{file}/{stem}{kind}"
                error = DataError(f"{printable(path)}: no picture beside, so it is left out")
                leave(faults, "lone_label", error, path)
    return notes


def _beside(member: Member, sidecars: Sidecars, suffix: str) -> str:
    """The name of what lies beside a picture with this ending; empty where nothing does.

    WebDataset's key of a/b.left.jpg is a/b; here a/b.left goes first.
    """
    folder, slash, name = member.member.rpartition("/")
    for stem in (os.path.splitext(name)[0], name.split(".")[0]):
        if (member.file, folder + slash + stem) in sidecars.of(suffix):
            return folder + slash + stem + suffix
    return ""


def _has_label(pictures: Sequence[Member], names: Sequence[str], faults: Faults) -> bool:
    """Whether the first .json, of those that can be read if all faults are wanted, has a label."""
    for member, name in zip(pictures, names, strict=True):
        try:
            found = _object(member, name) if name else None
        except DataError:
            if faults is None:
                raise
            continue
        if found is not None:
            return "label" in found or "labels" in found
    return True


def _by_folder(pictures: Sequence[Member], data: str, faults: Faults) -> Labels:
    loose = [member.path for member in pictures if "/" not in member.name]
    if loose and faults is None:
        what = f"{count(len(loose), 'picture')} without a class, such as {printable(loose[0])}"
        raise DataError(f"{printable(data)}: {what}; {LAYOUT}")
    _lack(loose, f"without a class; {LAYOUT}", faults)
    return [(m.name.split("/")[0],) if "/" in m.name else None for m in pictures]


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
    known = f"{count(len(table), 'class')[:-1]}es" if len(table) != 1 else "1 class"
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
