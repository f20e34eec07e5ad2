"""Finds the lists of a dataset, one or more per split, and the folder of their images.

Lists of classes:

    DATA.csv                                               one list, maybe with a column `split`
    DATA/train.csv and DATA/val.csv                        one list per split

Lists of captions:

    DATA/train/metadata.jsonl and DATA/val/metadata.jsonl  Hugging Face's image folder
    DATA/annotations/captions_train*.json and _val*.json   COCO
    DATA/train.csv and DATA/val.csv                        any list, the split in its name
    DATA/captions.txt, or that file itself                 one list
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vit.data.image_archives import is_inside
from vit.data.sources.dataset_spec import (
    LIST_SUFFIXES,
    SPLIT_NAMES,
    DatasetSpec,
    named_source,
    refuse_run_folder,
    resolve_folder,
)
from vit.data.sources.file_walk import FolderWalker
from vit.data.sources.image_name_lookup import folder_names
from vit.data.sources.list_formats import has_captions, has_classes
from vit.errors import DataError
from vit.paths import did_you_mean
from vit.text import join_names, plural, printable

CAPTION_SUFFIXES = frozenset((*LIST_SUFFIXES, ".txt", ".json"))
METADATA = ("metadata.jsonl", "metadata.csv")
"""Names of lists of captions whatever is in them, whose reader says what is wrong."""
LAYOUT = (
    "expected DATA/train/metadata.jsonl and DATA/val/metadata.jsonl, COCO's annotations/, "
    "or one list of captions such as DATA/captions.csv"
)
COCO_NAME = re.compile(r"captions_(train|val|test)(\w*)\.json", re.IGNORECASE)
SPLIT = re.compile(rf"(?:.*[^a-z])?({'|'.join(SPLIT_NAMES)})(?:[^a-z].*)?")
SAMPLE = 100
"""Number of images of a list that are searched for to find the folder of all."""


@dataclass(frozen=True)
class ListFiles:
    """The lists of a dataset."""

    files: dict[str, str]
    """Path by split; under the empty name if there is one list without a split in its name."""
    notes: list[str]
    root: Path | None = None
    """Folder that names of images in a split are relative to; None: that of the images."""


def is_list(data: str, numbers: tuple[str, ...] = ()) -> bool:
    """Whether `data` is a list of images and classes or `numbers`, or a folder of one a split."""
    if os.path.isdir(data):
        return bool(_class_lists(data, numbers))
    return named_source(data) == "list" and os.path.lexists(data)


def has_caption_lists(folder: str) -> bool:
    places = [Path(folder), *(Path(folder, name) for name in SPLIT_NAMES)]
    return any(place.is_dir() and _candidates(place) for place in places)


def find_lists(spec: DatasetSpec) -> ListFiles:
    """Find the lists of classes or captions in DATA, a list, a folder or a built-in dataset."""
    if spec.images is not None and not os.path.isdir(spec.images):
        hint = did_you_mean(spec.images)
        raise DataError(f"{spec.images}: no such folder of images{hint}")
    if spec.captions:
        return _find_caption_lists(spec)
    if not os.path.isdir(spec.data):
        return ListFiles({"": spec.data}, [])
    files = _class_lists(spec.data, spec.numbers)
    notes = [
        f"read the lists {join_names(map(os.path.basename, files.values()), 9)} of {spec.data}"
    ]
    lists = [name for name in sorted(os.listdir(spec.data)) if name.lower().endswith(LIST_SUFFIXES)]
    others = [name for name in lists if os.path.join(spec.data, name) not in files.values()]
    if others:
        names = join_names(others)
        notes.append(f"left out lists without a split in their name, or classes: {names}")
    return ListFiles(files, notes)


def _class_lists(folder: str, numbers: tuple[str, ...]) -> dict[str, str]:
    """The lists of classes, or of `numbers`, directly in `folder`, by split.

    Empty without a list for train, or if `train` is a folder of class folders, which are read then.
    """
    found: dict[str, str] = {}
    # a folder may have a million images
    for name in sorted(name for name in _listed(folder) if name.lower().endswith(LIST_SUFFIXES)):
        split = SPLIT.fullmatch(os.path.splitext(name.lower())[0])
        path = os.path.join(folder, name)
        if not split or not has_classes(path, numbers):
            continue
        if split[1] in found:
            both = join_names([found[split[1]], path])
            raise DataError(f"several lists for {split[1]}, give one of them as DATA: {both}")
        found[split[1]] = path
    train = os.path.join(folder, "train")
    if "train" not in found or any(os.path.isdir(f"{train}/{name}") for name in _listed(train)):
        return {}
    return found


def _listed(folder: str) -> list[str]:
    """The names in a folder; none if it cannot be listed, which its reader reports."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _find_caption_lists(spec: DatasetSpec) -> ListFiles:
    data, images = spec.data, None if spec.images is None else Path(spec.images)
    refuse_run_folder(data)
    if os.path.isfile(data):
        return ListFiles({"": str(Path(data))}, [], images or Path(data).parent)
    root, notes = resolve_folder(data)
    folders = FolderWalker(str(root)).subfolders(str(root))
    lists = {name: _candidates(root / name, spec) for name in SPLIT_NAMES if name in folders}
    files = {name: paths[0] for name, paths in lists.items() if paths}
    if files:
        others = [name for name in folders if name not in files and name != "annotations"]
        if others:
            names = join_names(others)
            notes.append(f"left out folders without a list of captions of a split: {names}")
    here = _candidates(root, spec)
    if len(here) == 1 and not files:
        files = {"": here[0]}
    elif not files:
        named = [(SPLIT.fullmatch(Path(path).stem.lower()), path) for path in here]
        files = {split[1]: path for split, path in named if split}
    every = [*here, *(path for paths in lists.values() for path in paths)]
    if len(files) < len(every):
        names = join_names(every)
        raise DataError(f"several lists of captions, give one of them as DATA: {names}")
    if not files:
        tables = [x for x in _visible(root) if os.path.splitext(x)[1] in CAPTION_SUFFIXES]
        hint = f" ({join_names(tables)}: give one to see what is wrong with it)" if tables else ""
        raise DataError(f"{root}: no list of captions in it{hint}; {LAYOUT}")
    if not files.keys() & {"", "train"}:
        raise DataError(f"{root} has captions for {join_names(files)}, not for train")
    return ListFiles(files, notes, images or root)


def _candidates(folder: Path, spec: DatasetSpec | None = None) -> list[str]:
    """Lists of captions directly in `folder`, or in its annotations/, sorted.

    A file named as metadata is included whatever its content, so that its reader reports the error.
    """
    paths: list[str] = []
    for place in (folder, folder / "annotations"):
        if place.is_dir():
            paths += [
                str(place / name)
                for name in _visible(place)
                if os.path.splitext(name)[1].lower() in CAPTION_SUFFIXES
                and (place == folder or COCO_NAME.fullmatch(name))
            ]
    coco = [path for path in paths if COCO_NAME.fullmatch(os.path.basename(path))]
    return [
        path
        for path in paths
        if os.path.basename(path) in METADATA
        # Beside captions, COCO has files of boxes and outlines, which begin in the same way.
        or ((not coco or path in coco or not path.endswith(".json")) and has_captions(path, spec))
    ]


def _visible(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror})") from None


def images_folder(
    path: str, names: Iterable[str], images: str | None, notes: list[str], *, is_table: bool
) -> str:
    """Find the folder that the file names in a list are relative to.

    It is the first that has any of the images: that of the list, the folder of COCO's layout, or
    the only sibling folder, or the working folder.
    """
    relative_names = [name for name in names if not os.path.isabs(name)]
    sample = relative_names[:: max(len(relative_names) // SAMPLE, 1)]
    own = (os.path.dirname(path) or os.curdir) if images is None else images
    parent = os.path.dirname(own) if os.path.basename(own) == "annotations" else own
    coco = COCO_NAME.fullmatch(os.path.basename(path))
    tail = f"{coco[1]}{coco[2]}" if coco else ""
    coco_folders = [os.path.join(parent, "images", tail), os.path.join(parent, tail)]
    candidates = (own, *(coco_folders if tail else ()))
    found = [folder for folder in candidates if _has_any(folder, sample, is_table)][:1]
    if not found and images is None:
        parents = dict.fromkeys((own, parent or os.curdir))
        siblings = (os.path.join(at, n) for at in parents for n in FolderWalker(at).subfolders(at))
        found = [folder for folder in siblings if _has_any(folder, sample, is_table)]
        if len(found) > 1:
            folders = join_names(found)
            raise DataError(
                f"{path}: its images are in several folders: {folders}; write the "
                "folder before each name, or say which with --images"
            )
        if not found and _has_any(os.curdir, sample, is_table):  # as rows of vit predict
            found = [os.curdir]
        if sample and not found:
            notes.append(
                f"{printable(path)}: its images, such as {printable(sample[0])}, are neither "
                f"beside it nor in a folder beside it; say where with --images"
            )
    if found and found[0] != own:
        notes.append(f"{printable(path)}: its images are taken from {printable(found[0])}")
    return found[0] if found else own


def _has_any(folder: str, names: Sequence[str], is_table: bool) -> bool:
    """Whether any of these files exists in `folder`."""
    files = folder_names(folder)
    found = (os.path.join(folder, files.find(name, is_table) or name) for name in names)
    return any(os.path.lexists(path) or is_inside(path) for path in found)


def common_folders(base: str, names: Iterable[str]) -> list[str]:
    """The deepest folder that contains all images; none if a name is absolute."""
    folders = {os.path.dirname(name) for name in names}
    if any(os.path.isabs(folder) for folder in folders):
        return []
    common = os.path.commonpath(folders) if folders and "" not in folders else ""
    return [os.path.join(base, common) if common else base]


def unlisted_notes(named: Collection[str], folders: Iterable[str], root: str) -> list[str]:
    walk = FolderWalker(root)
    extra = []
    for folder in dict.fromkeys(folders):
        if os.path.isdir(folder):
            # only for a note, so that a folder beside the images need not be readable
            with contextlib.suppress(DataError):
                found = walk.images(folder)
                extra += [p for p in found if p not in named and os.path.normpath(p) not in named]
    if not extra:
        return []
    names = join_names([*map(walk.relative_name, extra[:3]), *extra[3:]], 3)
    return [f"left out {plural(len(extra), 'image')} that no line of a list names: {names}"]
