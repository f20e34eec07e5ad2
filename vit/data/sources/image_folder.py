"""Image folder reader: the class of an image is the name of its folder.

    DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg      (or valid, validation, test)
    DATA/CLASS/*.jpg

Built-in datasets are written as such folders. Without labels, all images under a folder are read.
"""

from pathlib import Path

from vit.data.dataset_types import DatasetIndex, ImageRecord, ImagesByClass
from vit.data.sources.dataset_spec import LAYOUT, SPLIT_NAMES, DatasetSpec, resolve_folder
from vit.data.sources.file_walk import FolderWalker
from vit.errors import ConfigError, DataError
from vit.text import join_names, plural, printable

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
        if others:
            names = join_names(others)
            notes.append(f"left out folders beside train: {names}")
    folders = folders or {"": root}
    splits: dict[str, list[ImageRecord]] = {}
    for name in spec.select_splits(folders):
        # One walker a split: a validation folder may be a link to another split.
        walker = FolderWalker(str(root)) if splits else walker
        if not spec.labels:
            splits[name] = read_unlabelled(folders[name], walker)
            notes += walker.notes()
            continue
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

    Without `train` and with other folders, each folder is a class and there are no splits.

    Raises:
        DataError: A file has the name of a split.
    """
    for name in SPLIT_NAMES:
        if (root / name).is_file():
            raise DataError(f"{printable(root / name)} is a file, not a folder; {LAYOUT}")
    names = walker.subfolders(str(root))
    splits = {name: root / name for name in SPLIT_NAMES if name in names}
    others = [name for name in names if name not in splits]
    return (splits, others) if "train" in splits or not others else ({}, [])


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
