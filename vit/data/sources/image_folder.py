"""Image folder reader: the class of an image is the name of its folder.

    DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg
    DATA/CLASS/*.jpg

The other layouts are those of vit.data.sources.folder_layout. Built-in datasets are written as such
folders. Without labels, all images under a folder are read.
"""

from pathlib import Path

from vit.data.dataset_types import DatasetIndex, ImageRecord, ImagesByClass
from vit.data.sources.dataset_spec import (
    LAYOUT,
    DatasetSpec,
    RowError,
    resolve_folder,
    skip_or_raise,
)
from vit.data.sources.file_walk import FolderWalker
from vit.data.sources.folder_layout import (
    NOTES,
    OF_CLASSES,
    FolderLayout,
    SplitFolders,
    find_layout,
)
from vit.errors import ConfigError, DataError
from vit.text import join_names, plural, printable

UNLABELLED = (
    "; if a list has the labels of these images, add --labels LIST; without labels, vit "
    "pretrain learns from them, and vit suggest names those to label first"
)


def read_folder(spec: DatasetSpec) -> DatasetIndex:
    """Index an image folder."""
    for name in ("images", "image_column", "label_column"):
        if (value := getattr(spec, name)) is not None:
            raise ConfigError(
                f"{name}={value!r}: {printable(spec.data)} is a folder of class folders, not a "
                "list; leave it out, or give a list (.csv, .jsonl, .xlsx)"
            )
    root, notes = resolve_folder(spec.data)
    layout = find_layout(root, group=spec.group, labels=spec.labels)
    if not spec.labels and any(one.parent == root for one in layout.splits.values()):
        layout = FolderLayout({"": SplitFolders(root)})
    for kind, error, places in layout.findings:
        if not spec.labels and kind in OF_CLASSES:
            continue
        if kind in NOTES and spec.row_errors is None:
            notes.append(str(error))
        elif kind != "no_train" or spec.split is None:  # else a split is read by its name
            skip_or_raise(spec.row_errors, kind, error, *places)
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
        classes = read_classes(folders, walker, spec)
        if spec.optional_labels and walker.left_out["loose_picture"]:
            raise DataError(f"{printable(folders.parent)} has images outside of class folders")
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
    if spec.row_errors is None:
        notes += walker.notes()
    else:
        problems = ((kind, DataError(text), (*paths,)) for kind, text, paths in walker.problems())
        spec.row_errors.extend(RowError(*one) for one in problems)
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
        raise DataError(f"{printable(folder)}: no images in this folder{hint}")
    return [ImageRecord(path, ()) for path in paths]


def read_classes(folders: SplitFolders, walker: FolderWalker, spec: DatasetSpec) -> ImagesByClass:
    """The images of each class of a split, which are sorted by name."""
    parent = folders.parent
    walker.class_folders(str(parent), {label for label, _ in folders.classes})
    loose = walker.loose_images(str(parent))
    if not folders.classes:
        found = f"{plural(len(loose), 'image')} straight in it" if loose else "no folders in it"
        hint = UNLABELLED if loose else walker.other_files(str(parent))
        text = f"{printable(parent)} has no class folders ({found}); {LAYOUT}"
        error = DataError(f"{text}{_list_hint(parent) or hint}")
        skip_or_raise(spec.row_errors, "no_classes", error, str(parent))
    images: ImagesByClass = {}
    for label, folder in sorted(folders.classes):
        try:
            paths = walker.images(str(folder))
        except DataError as error:
            skip_or_raise(spec.row_errors, "folder_unreadable", error, str(folder))
            continue
        images.setdefault(label, []).extend(paths)
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
        skip_or_raise(spec.row_errors, "no_pictures", DataError(text), str(where))
        return
    if empty:
        places = [str(folder) for label, folder in folders.classes if label in empty]
        text = (
            f"{printable(where)}: class {join_names(empty)} has no images"
            f"{walker.other_files(places[0])}; add some, or remove the folder (vit train "
            "--on-bad-image skip leaves it out)"
        )
        skip_or_raise(spec.row_errors, "empty_class", DataError(text), *places)
        said = {*map(walker.relative_name, places)}
        unsaid = [name for name in walker.left_out["empty_folder"] if name not in said]
        walker.left_out["empty_folder"] = unsaid
    if len(images) == 1 and spec.row_errors is None:
        raise DataError(
            f"{printable(where)}: only one class ({names}), nothing to classify; "
            f"add a folder for each other class{_list_hint(where)}"
        )


def _list_hint(folder: Path) -> str:
    """The end of an error where `folder` holds an image list that may have been meant."""
    suffixes = (".csv", ".tsv", ".jsonl", ".ndjson")
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in suffixes)
    return f"; or give the list in it: {printable(folder / names[0])}" if names else ""
