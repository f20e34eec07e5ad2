"""Image folder reader: the class of an image is the name of its folder.

    DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg      (or valid, validation, test; Training ...)
    DATA/CLASS/*.jpg

Built-in datasets are written as such folders. Without labels, all images under a folder are read.
"""

import contextlib
from pathlib import Path

from vit.data.dataset_types import DatasetIndex, ImageRecord, ImagesByClass
from vit.data.sources.dataset_spec import (
    LAYOUT,
    SPLIT_NAMES,
    VAL_NAMES,
    DatasetSpec,
    resolve_folder,
)
from vit.data.sources.file_walk import FolderWalker
from vit.errors import ConfigError, DataError
from vit.text import join_names, plural, printable

SPLIT_ALIASES = {
    **{name: name for name in SPLIT_NAMES},
    "training": "train",
    "dev": "val",
    "testing": "test",
    "evaluation": "test",
}
"""Names of splits in lower case -> ours, for folders that hold class folders."""
UNLABELLED = (
    "; if a list has the labels of these images, vit train --labels LIST; without labels, vit "
    "pretrain learns from them, and vit suggest names those to label first"
)
EMPTY_CLASS = (
    "has no images; add some, or remove the folder (vit train --on-bad-image skip leaves it out)"
)


def read_folder(spec: DatasetSpec) -> DatasetIndex:
    """Index an image folder.

    Raises:
        DataError: The layout is a different one, or a training class has no images.
        ConfigError: A setting of image lists is given.
    """
    for name in ("images", "image_column", "label_column"):
        if (value := getattr(spec, name)) is not None:
            raise ConfigError(
                f"{name}={value!r}: {printable(spec.data)} is a folder of class folders, not a "
                "list; leave it out, or give a list (.csv, .jsonl, .xlsx)"
            )
    root, notes = resolve_folder(spec.data)
    walker = FolderWalker(str(root))
    folders, others = split_folders(root, walker)
    if spec.split is None:
        if folders and "train" not in folders:
            names = join_names(folders)
            raise DataError(f"{printable(root)} has {names} but no train; {LAYOUT}")
        notes += renamed_splits(folders)
        if others:
            names = join_names(others)
            notes.append(f"left out folders beside train: {names}")
        if spec.labels and (without := without_classes(folders)):
            notes.append(without)
    folders = folders or {"": root}
    splits: dict[str, list[ImageRecord]] = {}
    selected = spec.select_splits(folders)
    if spec.labels and len(selected) > 1 and without_classes(folders):
        selected.remove("test")
    for name in selected:
        # One walker a split: a validation folder may be a link to another split.
        walker = FolderWalker(str(root)) if splits else walker
        if not spec.labels:
            splits[name] = read_unlabelled(folders[name], walker)
            notes += walker.notes()
            continue
        if others and name == "train" and not _class_folders(folders[name]):
            raise DataError(
                f"{printable(folders[name])} has no class folders, and {join_names(others)} beside "
                "it: the name train is that of the training images; if it is a class, rename it, "
                f"such as to train_; {LAYOUT}"
            )
        classes = read_classes(folders[name], walker)
        if spec.optional_labels and walker.unclassified:
            raise DataError(f"{printable(folders[name])} has images outside of class folders")
        if spec.split is None and name in ("train", ""):
            kept = {label: paths for label, paths in classes.items() if paths}
            classes = kept if spec.skip_empty and kept else classes
            check_classes(classes, folders[name])
        splits[name] = [
            ImageRecord(path, (label,)) for label, paths in classes.items() for path in paths
        ]
        notes += walker.notes()
    locations = {name: printable(folder) for name, folder in folders.items()}
    return DatasetIndex(root, splits, locations, notes)


def split_folders(root: Path, walker: FolderWalker) -> tuple[dict[str, Path], list[str]]:
    """The split folders in `root` by name, and the names of the other folders.

    Without `train` and with other folders, each folder is a class and there are no splits. Folders
    of other names for splits, such as Training and Testing, are splits where there is no `train`,
    as `_holds_splits` says.

    Raises:
        DataError: A file has the name of a split.
    """
    for name in SPLIT_NAMES:
        if (root / name).is_file():
            raise DataError(f"{printable(root / name)} is a file, not a folder; {LAYOUT}")
    names = walker.subfolders(str(root))
    found = {name: name for name in SPLIT_NAMES if name in names}
    if "train" not in names:
        aliases = dict(found)
        for name in names:
            if (split := SPLIT_ALIASES.get(name.casefold())) is not None:
                aliases.setdefault(split, name)
        if "train" in aliases and _holds_splits(root, names, aliases):
            found = aliases
    splits = {name: root / found[name] for name in SPLIT_NAMES if name in found}
    others = [name for name in names if name not in found.values()]
    return (splits, others) if "train" in splits or not others else ({}, [])


def _holds_splits(root: Path, names: list[str], splits: dict[str, str]) -> bool:
    """Whether folders such as Training and Testing are splits of `root` and no classes.

    Training has at least two class folders, and each other one has two of the same names, or none;
    and there are no folders beside them, or one has such class folders.
    """
    classes = _class_folders(root / splits["train"])
    others = [_class_folders(root / name) for split, name in splits.items() if split != "train"]
    if len(classes) < 2 or any(one and len(one & classes) < 2 for one in others):
        return False
    return {*names} == {*splits.values()} or any(others)


def renamed_splits(folders: dict[str, Path]) -> list[str]:
    """A note on folders that have other names than their splits, if there are any."""
    renamed = [f"{one.name} as {name}" for name, one in folders.items() if one.name != name]
    return [f"read {join_names(renamed)}"] if renamed else []


def without_classes(folders: dict[str, Path]) -> str:
    """A note on a `test` folder of images without labels; empty if there is none.

    It cannot be measured, and training goes on without it, as it does beside a `val`.
    """
    test = folders.get("test")
    own_validation = any(name in folders for name in VAL_NAMES)
    if "train" not in folders or test is None or own_validation or _class_folders(test):
        return ""
    images = FolderWalker(str(test)).loose_images(str(test))
    if not images:
        return ""
    found = plural(len(images), "image")
    return f"left out {printable(test.name)}: {found} straight in it, and no class folders"


def _class_folders(folder: Path) -> set[str]:
    """Names of the folders in `folder`; none of a folder that cannot be listed."""
    with contextlib.suppress(DataError):
        return {*FolderWalker(str(folder)).subfolders(str(folder))}
    return set()


def read_unlabelled(folder: Path, walker: FolderWalker) -> list[ImageRecord]:
    """All images under `folder`, whatever the folders in it are called.

    Raises:
        DataError: There are none.
    """
    paths = walker.images(str(folder))
    if not paths:
        raise DataError(f"{printable(folder)}: no images in this folder{_list_hint(folder)}")
    return [ImageRecord(path, ()) for path in paths]


def read_classes(folder: Path, walker: FolderWalker) -> ImagesByClass:
    """The images of each class folder in `folder`; classes are sorted by name.

    Raises:
        DataError: There are no class folders.
    """
    names = walker.subfolders(str(folder))
    loose = walker.loose_images(str(folder))
    if not names:
        found = f"{plural(len(loose), 'image')} straight in it" if loose else "no folders in it"
        hint = _list_hint(folder) or (UNLABELLED if loose else "")
        raise DataError(f"{printable(folder)} has no class folders ({found}); {LAYOUT}{hint}")
    return {name: walker.images(str(folder / name)) for name in names}


def check_classes(images: ImagesByClass, folder: Path) -> None:
    """Check that there are at least two training classes, each with images.

    Raises:
        DataError: A class has no images, or there is only one class.
    """
    names = join_names(images)
    empty = [printable(name) for name, paths in images.items() if not paths]
    if len(empty) == len(images):
        raise DataError(f"{printable(folder)}: no images in the class folders {names}; {LAYOUT}")
    if empty:
        raise DataError(f"{printable(folder)}: class {join_names(empty)} {EMPTY_CLASS}")
    if len(images) == 1:
        raise DataError(
            f"{printable(folder)}: only one class ({names}), nothing to classify; "
            f"add a folder for each other class{_list_hint(folder)}"
        )


def _list_hint(folder: Path) -> str:
    """The end of an error where `folder` holds an image list that may have been meant."""
    suffixes = (".csv", ".tsv", ".jsonl", ".ndjson")
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in suffixes)
    return f"; or give the list in it: {printable(folder / names[0])}" if names else ""
