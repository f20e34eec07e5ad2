"""Collects what lists of captions say, image by image.

Finds the lists of captions in a folder, and the images that a list names.

DATA/train/metadata.jsonl and DATA/val/metadata.jsonl      Hugging Face's image folder
DATA/annotations/captions_train*.json and _val*.json       COCO
DATA/train.csv and DATA/val.csv                            any list, the split in its name
DATA/captions.txt                                          one list, no split of its own
"""

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from vit.data.captions.caption_files import Row, is_list, read_rows
from vit.data.sources.dataset_spec import SPLIT_NAMES, resolve_folder
from vit.data.sources.file_walk import FolderWalker
from vit.data.sources.input_hints import refuse_mistaken, refuse_single_images
from vit.data.sources.list_columns import check_text, common_folders, tidy_name, unlisted_notes
from vit.data.sources.table_reader import wrong
from vit.errors import DataError, printable
from vit.text import join_names, plural

LIST_SUFFIXES = frozenset((".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson", ".token"))
METADATA = ("metadata.jsonl", "metadata.csv")
"""Names of lists that also count in deeper folders; file names in them are relative to theirs."""
LAYOUT = (
    "expected DATA/train/metadata.jsonl and DATA/val/metadata.jsonl, COCO's annotations/, "
    "or one list of captions such as DATA/captions.csv"
)
TAIL = re.compile(r"captions_(train|val|test)(\w*)\.json", re.IGNORECASE)
SPLIT = re.compile(rf"(?:.*[^a-z])?({'|'.join(SPLIT_NAMES)})(?:[^a-z].*)?")
SAMPLE = 100
"""Images of a list that are looked for to find the folder of all."""


@dataclass(frozen=True)
class Lists:
    """The lists of captions of a data set."""

    root: Path
    """Its folder."""
    files: dict[str, list[str]]
    """Paths by split, under the empty name where there is none."""
    notes: list[str]


def find_lists(data: str) -> Lists:
    """The lists of captions in `data`.

    Args:
        data: A list, a folder, or the name of a built-in set.

    Raises:
        DataError: There is none, or it is not clear which one is meant.
    """
    refuse_mistaken(data)
    refuse_single_images(data)
    if os.path.isfile(data):
        return Lists(Path(data).parent, {"": [str(Path(data))]}, [])
    root, notes = resolve_folder(data)
    walk = FolderWalker(str(root))
    folders = walk.subfolders(str(root))
    files = {name: _lists_in(root / name) for name in SPLIT_NAMES if name in folders}
    files = {name: found for name, found in files.items() if found}
    here = _candidates(root)
    if not files:
        files = _without_folders(root, here)
    elif here:
        raise _unclear([*here, *(path for found in files.values() for path in found)])
    elif "train" not in files:
        raise DataError(f"{printable(root)} has captions for {join_names([*files])}, not for train")
    else:
        beside = [name for name in folders if name not in files and name != "annotations"]
        if beside:
            names = join_names([printable(name) for name in beside])
            notes.append(f"left out folders without a list of captions of a split: {names}")
    return Lists(root, files, notes)


def _without_folders(root: Path, here: list[str]) -> dict[str, list[str]]:
    """The lists by split where no split has a folder with a list of its own."""
    metadata = [path for path in here if os.path.basename(path) in METADATA]
    if len(here) == len(metadata) < 2:
        here = _metadata_under(root)
        if here:
            return {"": here}
        raise _no_list(root)
    if len(here) == 1:
        return {"": here}
    named = [(SPLIT.fullmatch(Path(path).stem.lower()), path) for path in here]
    files = {found[1]: [path] for found, path in named if found}
    if len(files) < len(here) or "train" not in files:
        raise _unclear(here)
    return files


def _lists_in(folder: Path) -> list[str]:
    """The lists of one split."""
    here = _candidates(folder)
    metadata = [path for path in here if os.path.basename(path) in METADATA]
    if len(here) > 1:
        raise _unclear(here)
    return here if len(here) > len(metadata) else _metadata_under(folder)


def _candidates(folder: Path) -> list[str]:
    """Files straight in `folder`, or in its annotations/, that are lists of captions, sorted.

    A file with the name of metadata counts whatever it holds: it is read, and its fault told.
    """
    paths: list[str] = []
    for place in (folder, folder / "annotations"):
        if place.is_dir():
            paths += [
                str(place / name)
                for name in _listed(place)
                if os.path.splitext(name)[1].lower() in LIST_SUFFIXES
                and (place == folder or TAIL.fullmatch(name))
            ]
    coco = [path for path in paths if TAIL.fullmatch(os.path.basename(path))]
    return [
        path
        for path in paths
        if os.path.basename(path) in METADATA
        # Beside captions, COCO has files of boxes and outlines, which begin alike.
        or ((not coco or path in coco or not path.endswith(".json")) and is_list(path))
    ]


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be listed ({error.strerror})") from None


def _metadata_under(folder: Path) -> list[str]:
    suffixes = frozenset(os.path.splitext(name)[1] for name in METADATA)
    found = FolderWalker(str(folder), suffixes=suffixes).images(str(folder))
    paths = [path for path in found if os.path.basename(path) in METADATA]
    for one, other in pairwise(paths):
        if os.path.dirname(one) == os.path.dirname(other):
            raise _unclear([one, other])
    return paths


def _unclear(paths: Sequence[str]) -> DataError:
    names = join_names([printable(path) for path in paths])
    return DataError(f"several lists of captions, give one of them as DATA: {names}")


def _no_list(root: Path) -> DataError:
    tables = [name for name in _listed(root) if os.path.splitext(name)[1] in LIST_SUFFIXES]
    if len(tables) == 1:
        next(read_rows(str(root / tables[0]), []), None)  # says what is wrong with it
    there = join_names([printable(name) for name in tables])
    hint = f" (none of {there} is one)" if tables else ""
    return DataError(f"{printable(root)}: no list of captions in it{hint}; {LAYOUT}")


def images_folder(path: str, names: Sequence[str], images: str | None, notes: list[str]) -> str:
    """The folder that the file names in a list are relative to.

    The first that has any of the images: a folder named like a list of COCO's, the list's own,
    or the only one beside it.

    Args:
        path: The list.
        names: Some or all of the relative file names in it.
        images: The folder that the user gave, if any.
        notes: Receives which folder was taken, unless it is the one given or the list's own.

    Raises:
        DataError: Several folders beside the list have such images.
    """
    step = max(len(names) // SAMPLE, 1)
    sample = names[::step]
    own = (os.path.dirname(path) or os.curdir) if images is None else images
    above = os.path.dirname(own) if os.path.basename(own) == "annotations" else own
    coco = TAIL.fullmatch(os.path.basename(path))
    tail = f"{coco[1]}{coco[2]}" if coco else ""
    near = [os.path.join(above, "images", tail), os.path.join(above, tail)] if tail else []
    for folder in (own, *near):
        if _has(folder, sample):
            return _taken(folder, own, path, notes)
    if images is not None:
        return images
    places = dict.fromkeys((own, above or os.curdir))
    beside = [os.path.join(at, name) for at in places for name in FolderWalker(at).subfolders(at)]
    holding = [folder for folder in beside if _has(folder, sample)]
    if len(holding) > 1:
        folders = join_names([printable(folder) for folder in holding])
        raise DataError(
            f"{printable(path)}: its images are in several folders: {folders}; say which with "
            f"images"
        )
    if holding:
        return _taken(holding[0], own, path, notes)
    if sample:
        notes.append(
            f"{printable(path)}: its images, such as {printable(sample[0])}, are neither beside "
            f"it nor in a folder beside it; say where with images"
        )
    return own


def _has(folder: str, names: Sequence[str]) -> bool:
    """Whether any of these files is there."""
    return os.path.isdir(folder) and any(
        os.path.lexists(os.path.join(folder, name)) for name in names
    )


def _taken(folder: str, own: str, path: str, notes: list[str]) -> str:
    if folder != own:
        notes.append(f"{printable(path)}: its images are taken from {printable(folder)}")
    return folder


@dataclass
class Part:
    """What the lists of one split say, or all lists of a data set without splits."""

    where: str
    """The folder that class folders are looked for in."""
    captions: dict[str, tuple[str, ...]]
    """Of each image, by path, sorted; never none."""
    labels: dict[str, str]
    """Names of classes by path, of the images that the lists give one."""
    folders: list[str]
    """Folders that the images of each list lie in."""
    notes: list[str]
    silent: list[str] = field(default_factory=list)
    """Images that the lists name without a caption."""


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
        DataError: A list is damaged, or names a file outside the folder of its images.
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
    """`part` with these captions, each once an image; what is left out is noted."""
    part.captions = {path: tuple(dict.fromkeys(captions[path])) for path in sorted(captions)}
    twice = sum(map(len, captions.values())) - sum(map(len, part.captions.values()))
    part.silent = silent = [path for path, said in part.captions.items() if not said]
    for path in silent:
        del part.captions[path]
    if empty:
        part.notes.append(f"left out {plural(empty, 'empty caption')}")
    if twice:
        part.notes.append(f"left out {plural(twice, 'caption')} that the same image has already")
    if silent:
        names = join_names([printable(path) for path in silent])
        part.notes.append(f"left out {plural(len(silent), 'image')} without a caption: {names}")
    if not part.captions:
        raise DataError(f"{names}: no image has a caption")
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
    return images_folder(path, within, images, notes)


def unnamed_notes(parts: Sequence[Part], root: str) -> list[str]:
    """How many images lie beside those of `parts` that no list names."""
    named = {path for part in parts for path in (*part.captions, *part.silent)}
    return unlisted_notes(named, [folder for part in parts for folder in part.folders], root)
