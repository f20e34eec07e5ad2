"""Collects what lists of captions say, picture by picture."""

import os
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vit.data.captioning.columns import Row
from vit.data.captioning.files import read_rows
from vit.data.captioning.lists import METADATA, pictures_folder
from vit.data.sources.folders import count, some
from vit.data.sources.list_names import check_text, common_folders, tidy_name, unlisted_notes
from vit.data.sources.text_files import wrong
from vit.errors import DataError, printable


@dataclass
class Part:
    """What the lists of one split say, or all lists of a data set without splits."""

    where: str
    """The folder that class folders are looked for in."""
    captions: dict[str, tuple[str, ...]]
    """Of each picture, by path, sorted; never none."""
    labels: dict[str, str]
    """Names of classes by path, of the pictures that the lists give one."""
    folders: list[str]
    """Folders that the pictures of each list lie in."""
    notes: list[str]
    silent: list[str] = field(default_factory=list)
    """Pictures that the lists name without a caption."""


@dataclass
class _OneList:
    """One list being read."""

    path: str
    captions: dict[str, list[str]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    empty: int = 0

    def add(self, row: Row, *, absolute: bool) -> None:
        name = self.names.get(row.name)
        if name is None:
            name = self.names[row.name] = tidy_name(
                row.name, self.path, row.line, absolute=absolute
            )
        said = self.captions.setdefault(name, [])
        for text in row.captions:
            caption = tidy_caption(text, self.path, row.line)
            if caption:
                said.append(caption)
            else:
                self.empty += 1
        if row.label and self.labels.setdefault(name, row.label) != row.label:
            both = f"{printable(self.labels[name])} and {printable(row.label)}"
            raise wrong(self.path, f"{name} has two labels, {both}", row.line)


def read_part(paths: Sequence[str], images: str | None, *, above: str) -> Part:
    """What the lists `paths` say of the same split.

    Args:
        paths: The lists.
        images: Folder that file names are relative to, where it is not the list's business.
        above: Folder that holds all of them.

    Raises:
        DataError: A list is damaged, or names a file outside the folder of its pictures.
    """
    captions: dict[str, list[str]] = {}
    labels: dict[str, str] = {}
    notes: list[str] = []
    folders = []
    empty = 0
    for path in paths:
        read = _OneList(path)
        for row in read_rows(path, notes):
            read.add(row, absolute=images is None)
        if not read.captions:
            raise wrong(path, "no captions in it")
        base = _base(path, read.captions, images, notes)
        folders += common_folders(base, read.captions)
        empty += read.empty
        for name, said in read.captions.items():
            captions.setdefault(os.path.join(base, name), []).extend(said)
        labels |= {os.path.join(base, name): label for name, label in read.labels.items()}
    metadata = all(os.path.basename(path) in METADATA for path in paths)
    where = above if metadata and images is None else base
    return _tidied(Part(where, {}, labels, folders, notes), captions, empty)


def _tidied(part: Part, captions: dict[str, list[str]], empty: int) -> Part:
    """`part` with these captions, each once a picture; what is left out is noted."""
    part.captions = {path: tuple(dict.fromkeys(captions[path])) for path in sorted(captions)}
    twice = sum(map(len, captions.values())) - sum(map(len, part.captions.values()))
    part.silent = silent = [path for path, said in part.captions.items() if not said]
    for path in silent:
        del part.captions[path]
    if empty:
        part.notes.append(f"left out {count(empty, 'empty caption')}")
    if twice:
        part.notes.append(f"left out {count(twice, 'caption')} that the same picture has already")
    if silent:
        names = some([printable(path) for path in silent])
        part.notes.append(f"left out {count(len(silent), 'picture')} without a caption: {names}")
    if not part.captions:
        raise DataError(f"{names}: no picture has a caption")
    return part


def tidy_caption(text: str, path: str, line: int) -> str:
    """`text` in normalised Unicode (NFC), with single spaces and none at its ends.

    Raises:
        DataError: It is no text that can be written as UTF-8, or has a NUL.
    """
    if not text.isascii():
        check_text(text, path, line)
        text = unicodedata.normalize("NFC", text)
    if "\0" in text:
        raise wrong(path, "a caption with a NUL character", line)
    return " ".join(text.split())


def _base(path: str, names: Iterable[str], images: str | None, notes: list[str]) -> str:
    within = [name for name in names if not os.path.isabs(name)]
    return pictures_folder(path, within, images, notes)


def unnamed_notes(parts: Sequence[Part], root: str) -> list[str]:
    """How many pictures lie beside those of `parts` that no list names."""
    named = {path for part in parts for path in (*part.captions, *part.silent)}
    return unlisted_notes(named, [folder for part in parts for folder in part.folders], root)
