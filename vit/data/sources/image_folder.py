"""Image folder reader: the class of an image is the name of its folder.

    DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg
    DATA/CLASS/*.jpg

The other layouts are those of vit.data.sources.image_folder. Built-in datasets are written as such
folders. Without labels, all images under a folder are read.
"""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vit.data.dataset_types import DatasetIndex, ImageRecord, ImagesByClass
from vit.data.sources.dataset_problem import Problem, skip_or_raise
from vit.data.sources.dataset_spec import (
    LAYOUT,
    SPLIT_NAMES,
    VAL_NAMES,
    DatasetSpec,
    resolve_folder,
)
from vit.data.sources.file_walk import FolderWalker, has_image
from vit.errors import DataError
from vit.text import join_names, plural, printable

SPLIT_ALIASES = dict(zip(SPLIT_NAMES, SPLIT_NAMES, strict=True)) | {
    "training": "train",
    "dev": "val",
    "testing": "test",
    "evaluation": "test",
}
"""Words for splits in lower case -> ours."""
UNSORTED = ("test", "val", "validation")
"""Folders of these names, in any case, are no classes if they hold images beside class folders."""
NOTES = ("source", "layout", "beside_train", "loose_picture")
"""Kinds of findings that do not refuse a layout."""
OF_CLASSES = ("layout", "loose_picture", "no_classes")
"""Kinds of findings that only matter if folders are classes."""


class SplitFolders(NamedTuple):
    """The class folders of one split."""

    parent: Path
    classes: tuple[tuple[str, Path], ...] = ()
    """Classes and their folders; a class may have several."""
    is_unsorted: bool = False
    """Whether it holds images and no class folders, and is left out."""


@dataclass
class FolderLayout:
    """The splits of an image folder, one of an empty name if it is not divided."""

    splits: dict[str, SplitFolders]
    findings: list[Problem] = field(default_factory=list)
    """What is to be said about it."""

    def say(self, kind: str, text: str, *folders: Path) -> None:
        self.findings.append(Problem(kind, text, (*map(str, folders),)))


def find_layout(
    root: Path, *, group: str | None = None, labels: bool = True, nested: bool = False
) -> FolderLayout:
    """The layout of an image folder; without `labels`, its folders are splits or nothing.

    `group` is that of `DatasetSpec`: folders that it tells apart are groups, and no classes.
    `nested` folders that are no splits are levels of classes.
    """
    FolderWalker(str(root)).subfolders(str(root))
    for cached in (_names, _names_only):
        cached.cache_clear()
    if nested:
        names = _names(root)
        layout = _split_folders(root, names, nested=True) or FolderLayout({"": _split(root, names)})
    else:
        layout = _find(root, root, group, labels=labels)
    for path in (root / name for name in SPLIT_NAMES if (root / name).is_file()):
        layout.say("split_is_file", f"{printable(path)} is a file, not a folder; {LAYOUT}", path)
    return layout


def _find(folder: Path, root: Path, group: str | None, *, labels: bool = True) -> FolderLayout:
    names = _names(folder)
    rows = LAYOUTS.values() if labels else [_split_folders]
    found = (row(folder, names, root, group) for row in rows)
    return next((one for one in found if one), FolderLayout({"": _split(folder, names)}))


def _split_folders(
    folder: Path, names: Sequence[str], *_: object, nested: bool = False
) -> FolderLayout | None:
    """Splits of the usual names; or of others, or beside the class folders of training.

    Each of the latter holds at least two classes of training, or no folders; and folders beside
    Training are left out only if another split has classes.
    """
    pairs = [(name, name) for name in SPLIT_NAMES if name in names]
    is_usual = "train" in names or len(pairs) == len(names)
    if not is_usual:
        pairs = [(split, name) for name in names if (split := split_name(name))]
        pairs.sort(key=lambda pair: SPLIT_NAMES.index(pair[0]))
    paths = {split: folder / name for split, name in pairs}
    if not paths or len(paths) < len(pairs):
        return None
    inner = {split: path if nested else _only_folder(path) for split, path in paths.items()}
    train_folder = inner.get("train", folder)
    if train_folder != paths.get("train", folder) and len(_names_only(train_folder)) > 1:
        paths = inner  # such as train/train/CLASS
    layout = FolderLayout({split: _split(path, _names(path)) for split, path in paths.items()})
    beside = [name for name in names if name not in dict(pairs).values()]
    classes = {split: {name for name, _ in one.classes} for split, one in layout.splits.items()}
    train = classes.pop("train", {*beside})
    loose = {split: has_image(paths[split]) for split, found in classes.items() if not found}
    if not is_usual and (
        len(names) == 1  # around all others, as train_data/{train,val}
        or len(train) < 2
        or any(len(found) > 0 and len(found & train) < 2 for found in classes.values())
        or ("train" in paths and beside and not any(classes.values()))
        or ("train" not in paths and any(paths[x].name.casefold() not in UNSORTED for x in loose))
        or ("train" not in paths and not all(loose.values()))
    ):
        return None
    if "train" in paths:
        _check_train(layout, paths["train"], beside)
        loose = {} if paths.keys() & {*VAL_NAMES} else loose  # val needs classes
    elif is_usual:
        text = f"{printable(folder)} has {join_names(paths)} but no train; {LAYOUT}"
        layout.say("no_train", text, folder)
        loose = {}
    else:
        is_divided = len(loose) < len(classes)
        if is_divided:
            text = f"read the folders beside {join_names(dict(pairs).values())} as train"
            layout.say("source", text)
        layout.splits = {"train" if is_divided else "": _split(folder, beside), **layout.splits}
    renamed = []
    for split, path in paths.items():
        name = printable(path.relative_to(folder))
        if loose.get(split):
            layout.splits[split] = layout.splits[split]._replace(is_unsorted=True)
            hint = "" if "train" in paths else "; if it is a class, move all classes to DATA/train"
            layout.say("loose_picture", f"left out {name}, which has no class folders{hint}")
        elif name != split:
            renamed.append(f"{name} as {split}")
    if renamed:
        layout.say("source", f"read {join_names(renamed)}")
    return layout


def split_name(folder: str) -> str | None:
    """Our name of the split that a folder name has one word for: `seg_train` is train."""
    words = re.findall(r"[^\W\d_]+", folder.casefold())
    found = {SPLIT_ALIASES[word] for word in words if word in SPLIT_ALIASES}
    return found.pop() if len(found) == 1 else None


def _check_train(layout: FolderLayout, folder: Path, beside: Sequence[str]) -> None:
    """Say what is strange about `train` and the folders beside it."""
    if beside:
        places = (folder.parent / name for name in beside)
        layout.say("beside_train", f"left out folders beside train: {join_names(beside)}", *places)
    if beside and not layout.splits["train"].classes:
        text = (
            f"{printable(folder)} has no class folders, and {join_names(beside)} beside it: the "
            "name train is that of the training images; if it is a class, rename it, such as to "
            f"train_; {LAYOUT}"
        )
        layout.say("no_classes", text, folder)


def _wrapper(
    folder: Path, names: Sequence[str], root: Path, group: str | None
) -> FolderLayout | None:
    """One folder around all others, as a zip file has it; maybe several, one in the other."""
    inner = folder
    while len(names) == 1 and names[0] != "train" and (deeper := _names_only(inner / names[0])):
        inner, names = inner / names[0], deeper
    if inner == folder or (len(names) == 1 and names[0] != "train"):
        return None
    layout = _find(inner, root, group)
    text = f"read {printable(inner.relative_to(folder))}, the only folder in {printable(folder)}"
    layout.say("source", text)
    return layout


def _splits_in_classes(folder: Path, names: Sequence[str], *_: object) -> FolderLayout | None:
    """Folders such as train and val in a class folder, or several datasets."""
    for name in names:
        inner = _names_only(folder / name)
        splits = [split for one in inner if (split := split_name(one))]
        if len({*splits}) == len(inner) > 1 and "train" in splits:
            layout = FolderLayout({"": _split(folder, names)})
            text = (
                f"{printable(folder)}: {printable(name)} has the folders {join_names(inner)}, "
                f"which are splits; {LAYOUT}; of several datasets, give one, such as "
                f"{printable(folder / name)}"
            )
            layout.say("unclear_layout", text, folder / name)
            return layout
    return None


def _sets_of_classes(
    folder: Path, names: Sequence[str], root: Path, group: str | None
) -> FolderLayout | None:
    """Folds, sites or years with the same class folders: groups by `group`, or refused."""
    shared = _shared_folders(folder, names)
    if not shared:
        return None
    layout = FolderLayout({"": _split(folder, names)})
    with contextlib.suppress(re.error):
        starts = [f"{(folder / name).relative_to(root).as_posix()}/" for name in names]
        found = [re.search(group, start) for start in starts] if group else []
        if len({one[one.re.groups > 0] for one in found if one}) > 1:
            inside = [_set_folder(folder / name) for name in names]
            classes = tuple((x, one / x) for one in inside for x in _names(one))
            layout.splits = {"": SplitFolders(folder, classes)}
            text = f"read the folders in {join_names(names)} as classes: {join_names(shared)}"
            layout.say("source", text)
            return layout
    if not _is_series(names):
        return None
    expression = "/".join(["[^/]+"] * (len(folder.relative_to(root).parts) + 1))
    text = (
        f"{printable(folder)}: {join_names(names)} hold folders of the same names "
        f"({join_names(shared)}); if these are the classes, add --group '^{expression}', which "
        f"keeps the images of each in one split, or give a list (.csv); if {join_names(names)} are "
        f"the classes, move them to {printable(folder / 'train')}"
    )
    layout.say("unclear_layout", text, folder)
    return layout


def _shared_folders(folder: Path, names: Sequence[str]) -> list[str]:
    """The names of folders in several of `names`, if those are at least half of them."""
    counts: Counter[str] = Counter()
    for name in names:
        inner = _names_only(_set_folder(folder / name))
        if not inner:  # mostly the first class folder
            return []
        counts.update(inner)
    shared = sorted(name for name, count in counts.items() if count > 1)
    return shared if len(shared) > 1 and 2 * len(shared) >= len(counts) else []


def _set_folder(folder: Path) -> Path:
    """Where the class folders of a set are: in it, or in its only folder, as in site1/images."""
    only = _only_folder(folder)
    return only if _names_only(only) else folder


def _is_series(names: Collection[str]) -> bool:
    """Whether names differ by numbers or the last letter only: fold1, fold2; siteA, siteB; 2023."""
    stems = {re.sub(r"\d+|(?<=[a-z])[A-Z]$|(?<=[ ._-])[A-Za-z]$", "#", name) for name in names}
    return len(stems) == 1 and "#" in stems.pop()


def _class_folders(folder: Path, names: Sequence[str], *_: object) -> FolderLayout | None:
    """Each folder is a class."""
    layout = FolderLayout({"": _split(folder, names)})
    if named := [name for name in names if name.casefold() in SPLIT_ALIASES]:
        text = f"read {join_names(named)} as a class, though it is a name of a split"
        layout.say("layout", text, *(folder / name for name in named))
    return layout


Row = Callable[[Path, Sequence[str], Path, str | None], FolderLayout | None]
LAYOUTS: dict[str, Row] = {
    "split folders": _split_folders,
    "one folder around all": _wrapper,
    "splits in class folders": _splits_in_classes,
    "sets of class folders": _sets_of_classes,
    "class folders": _class_folders,
}


@functools.cache
def _names(folder: Path) -> Sequence[str]:
    """Names of the folders in `folder`; none of one that cannot be listed."""
    with contextlib.suppress(DataError):
        return FolderWalker(str(folder)).class_folders(str(folder))
    return ()


@functools.cache
def _names_only(folder: Path) -> Sequence[str]:
    """As `_names`, but none of a folder with images straight in it."""
    return () if has_image(folder) else _names(folder)


def _split(folder: Path, names: Sequence[str]) -> SplitFolders:
    return SplitFolders(folder, tuple((name, folder / name) for name in names))


def _only_folder(folder: Path) -> Path:
    """The folder in `folder`, if it is the only one and there are no images; else `folder`."""
    names = _names_only(folder)
    return folder / names[0] if len(names) == 1 else folder


UNLABELLED = (
    "; if a list has the labels of these images, add --labels LIST; without labels, vit "
    "pretrain learns from them, and vit suggest names those to label first"
)


def read_folder(spec: DatasetSpec) -> DatasetIndex:
    root, notes = resolve_folder(spec.data)
    nested = spec.nested and spec.labels and spec.taxonomy is None
    layout = find_layout(root, group=spec.group, labels=spec.labels, nested=nested)
    if not spec.labels and any(one.parent == root for one in layout.splits.values()):
        layout = FolderLayout({"": SplitFolders(root)})
    for one in layout.findings:
        if not spec.labels and one.kind in OF_CLASSES:
            continue
        if one.kind in NOTES and spec.problems is None:
            notes.append(one.detail)
        elif one.kind != "no_train" or spec.split is None:  # else a split is read by its name
            skip_or_raise(spec.problems, one.kind, DataError(one.detail), *one.images)
    splits: dict[str, list[ImageRecord]] = {}
    selected = spec.select_splits(layout.splits)
    if spec.labels:
        selected = [x for x in selected if not layout.splits[x].is_unsorted] or selected
    walker = FolderWalker(str(root))
    for name in selected:
        folders = layout.splits[name]
        walker.visited.clear()  # a validation folder may be a link to another split
        if not spec.labels:
            splits[name] = read_unlabelled(folders.parent, walker)
            continue
        classes = read_classes(folders, walker, spec, nested=nested)
        if spec.optional_labels and walker.left_out["loose_picture"]:
            raise DataError(f"{folders.parent} has images outside of class folders")
        if spec.split is None and name in ("train", ""):
            kept = {label: paths for label, paths in classes.items() if paths}
            classes = kept if spec.skip_empty and kept else classes
            check_classes(classes, folders, walker, spec)
        splits[name] = [
            ImageRecord(path, (label,)) for label, paths in classes.items() for path in paths
        ]
    if spec.labels and all(one.parent != root for one in layout.splits.values()):
        walker.class_folders(str(root))
        walker.loose_images(str(root))
    if spec.problems is None:
        notes += walker.notes()
    else:
        spec.problems.extend(walker.problems())
    locations = {
        name: printable(one.parent)
        for name, one in layout.splits.items()
        if name in selected or not one.is_unsorted
    }
    return DatasetIndex(root, splits, locations, notes)


def read_unlabelled(folder: Path, walker: FolderWalker) -> list[ImageRecord]:
    """All images under `folder`, whatever the folders in it are called."""
    paths = walker.images(str(folder))
    if not paths:
        hint = walker.other_files(str(folder)) + _list_hint(folder)
        raise DataError(f"{folder}: no images in this folder{hint}")
    return [ImageRecord(path, ()) for path in paths]


def read_classes(
    folders: SplitFolders, walker: FolderWalker, spec: DatasetSpec, *, nested: bool = False
) -> ImagesByClass:
    """The images of each class of a split, sorted by name; of `nested` folders, by path."""
    parent = folders.parent
    walker.class_folders(str(parent), {label for label, _ in folders.classes})
    loose = walker.loose_images(str(parent))
    if not folders.classes:
        found = f"{plural(len(loose), 'image')} straight in it" if loose else "no folders in it"
        hint = UNLABELLED if loose else walker.other_files(str(parent))
        text = f"{printable(parent)} has no class folders ({found}); {LAYOUT}"
        error = DataError(f"{text}{_list_hint(parent) or hint}")
        skip_or_raise(spec.problems, "no_classes", error, str(parent))
    images: ImagesByClass = {}
    for label, folder in sorted(folders.classes):
        try:
            paths = walker.images(str(folder))
        except DataError as error:
            skip_or_raise(spec.problems, "folder_unreadable", error, str(folder))
            continue
        if not (nested and paths):
            images.setdefault(label, []).extend(paths)
            continue
        for path in paths:
            inside = Path(path).parent.relative_to(parent).as_posix()
            images.setdefault(inside, []).append(path)
    return images


def check_classes(
    images: ImagesByClass, folders: SplitFolders, walker: FolderWalker, spec: DatasetSpec
) -> None:
    """Check that there are at least two training classes, each with images."""
    names, where = join_names(images), folders.parent
    empty = [name for name, paths in images.items() if not paths]
    if empty and len(empty) == len(images):
        there = walker.other_files(str(where)) or f"; {LAYOUT}"
        text = f"{printable(where)}: no images in the class folders {names}{there}"
        skip_or_raise(spec.problems, "no_pictures", DataError(text), str(where))
        return
    if empty:
        places = [str(folder) for label, folder in folders.classes if label in empty]
        text = (
            f"{printable(where)}: class {join_names(empty)} has no images"
            f"{walker.other_files(places[0])}; add some, or remove the folder (vit train "
            "--on-bad-image skip leaves it out)"
        )
        skip_or_raise(spec.problems, "empty_class", DataError(text), *places)
        said = {*map(walker.relative_name, places)}
        unsaid = [name for name in walker.left_out["empty_folder"] if name not in said]
        walker.left_out["empty_folder"] = unsaid
    if len(images) == 1 and spec.problems is None:
        raise DataError(
            f"{where}: only one class ({names}), nothing to classify; "
            f"add a folder for each other class{_list_hint(where)}"
        )


def _list_hint(folder: Path) -> str:
    """The end of an error where `folder` holds an image list that may have been meant."""
    suffixes = (".csv", ".tsv", ".jsonl", ".ndjson")
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in suffixes)
    return f"; or give the list in it: {printable(folder / names[0])}" if names else ""
