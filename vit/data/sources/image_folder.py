"""Reads an image folder, with or without a split of its own, or a built-in set written as one.

DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg      (or valid, validation, test)
DATA/CLASS/*.jpg
"""

from vit.data.dataset_types import Item, Listed
from vit.data.sources.class_names import LAYOUT, check_classes, read_classes, split_folders
from vit.data.sources.dataset_spec import DatasetSpec, resolve
from vit.data.sources.file_walk import Walk
from vit.errors import ConfigError, DataError, printable
from vit.text import join_names


def read_folder(asked: DatasetSpec) -> Listed:
    """The images of an image folder; an image's class is the folder that it lies in.

    Raises:
        DataError: It is laid out otherwise, or a training class has no images.
        ConfigError: A setting is one of lists.
    """
    for name in ("images", "image_column", "label_column"):
        if (value := getattr(asked, name)) is not None:
            raise ConfigError(
                f"{name}={value!r}: {printable(asked.data)} is a folder of class folders, not a "
                "list; leave it out, or give a list (.csv, .jsonl)"
            )
    root, notes = resolve(asked.data)
    walk = Walk(str(root))
    folders, beside = split_folders(root, walk)
    if asked.split is None:
        if folders and "train" not in folders:
            raise DataError(
                f"{printable(root)} has {join_names(list(folders))} but no train; {LAYOUT}"
            )
        if beside:
            names = join_names([printable(name) for name in beside])
            notes.append(f"left out folders beside train: {names}")
    places = folders or {"": root}
    splits: dict[str, list[Item]] = {}
    for name in asked.needed(places):
        # a walk of its own: a validation folder may well be a link to another one
        walk = Walk(str(root)) if splits else walk
        classes = read_classes(places[name], walk)
        if asked.split is None and name in ("train", ""):
            check_classes(classes, places[name])
        splits[name] = [Item(path, (label,)) for label, paths in classes.items() for path in paths]
        notes += walk.notes()
    where = {name: printable(place) for name, place in places.items()}
    return Listed(root, splits, where, notes)
