"""Opens images with captions, from a list of them or a folder that has one.

Formats are in caption_files.py, folder layouts in caption_lists.py. An image is one sample with all
of its captions, so that none is in training and in validation.
"""

import dataclasses
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from vit.data.archives import relative
from vit.data.captions.caption_lists import LAYOUT, Part, find_lists, read_part, unnamed_notes
from vit.data.dataset_types import NO_LABEL, ImagesByClass, Sample, Splits
from vit.data.sources.dataset_spec import SPLIT_NAMES, VAL_NAMES
from vit.data.sources.dataset_warnings import count_notes, equal_notes, name_notes
from vit.data.sources.image_folder import check_classes
from vit.data.sources.open_dataset import match_classes
from vit.data.sources.train_val_split import hold_out
from vit.errors import DataError, printable
from vit.paths import did_you_mean
from vit.text import join_names, plural

__all__ = ["open_captioned", "open_captions"]


def open_captions(
    data: str, *, images: str | None, val_share: float, seed: int, with_classes: bool
) -> Splits:
    """Open `data` for training.

    Args:
        data: A list of captions, a folder, or the name of a built-in set.
        images: Folder that the file names in the lists are relative to; where it is left out,
            the list's own, or the one beside it that has them.
        val_share: Share of the images held out where the data have no validation list, of each
            class where there are classes.
        seed: Decides which ones.
        with_classes: Whether the images have a class as well, from a column `label` or `class`,
            or from the folder each one lies in.

    Raises:
        DataError: It cannot be trained on as it is.
    """
    source = _Source(data, images)
    parts = source.training()
    train, val = parts[0], parts[-1]
    notes = [*source.notes, *(note for part in parts for note in part.notes)]
    trained = _by_class(train) if with_classes else {"": [*train.captions]}
    if with_classes:
        check_classes(trained, Path(train.where))
    classes = tuple(trained)
    if val is train:
        trained, held = hold_out(trained, val_share=val_share, seed=seed, root=source.root)
        notes.append(_held_note(held, val_share, with_classes=with_classes))
    else:
        held, more = _held(val, classes, with_classes=with_classes, owner="train")
        notes += more + _shared_notes(train, val)
    if not any(held.values()) or not any(trained.values()):
        raise DataError(f"{printable(source.root)}: no images left to validate on; add some")
    notes += unnamed_notes(parts, str(source.root))
    if with_classes:
        notes += name_notes(classes) + count_notes(trained)
    notes += equal_notes(trained, held, str(source.root))
    names = classes if with_classes else ()
    return Splits(
        classes=names,
        train=_samples(train, trained, names),
        val=_samples(val, held, names),
        notes=tuple(dict.fromkeys(notes)),
        made=val is train,
        root=source.root,
    )


def open_captioned(
    data: str,
    *,
    split: str,
    images: str | None = None,
    held_out: Collection[str] = (),
    classes: Sequence[str] | None = None,
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """Open one split of `data` for evaluation.

    Args:
        data: As in `open_captions`.
        split: `train`, `test`..., or `val` for the first validation list there is.
        images: As in `open_captions`.
        held_out: The validation images of a split that we made, as `relative` names. Where the
            data have no validation list, only these are taken, if there are any of them.
        classes: Names of the classes of the model; none where left out.

    Returns:
        Samples, and notes for the user.

    Raises:
        DataError: There is no such split, or it has a class that the model does not have.
    """
    source = _Source(data, images)
    wanted = VAL_NAMES if split == "val" else (split,)
    name = next((name for name in wanted if name in source.splits), None)
    if name is None and (split != "val" or source.splits != ["train"]):
        there = join_names(source.splits) if len(source.splits) > 1 else "one list of all images"
        raise DataError(
            f"{printable(source.root)}: no captions for {printable(split)}; it has {there}"
        )
    part = source.read(name or "train")
    notes = [*source.notes, *part.notes, *unnamed_notes([part], str(source.root))]
    if name is None:
        part, note = _without_training(part, held_out, source.root)
        notes.append(note)
    elif name != split:
        notes.append(f"measured on {name}")
    names = tuple(classes or ())
    found, more = _held(part, names, with_classes=bool(names), owner="the model")
    return _samples(part, found, names), tuple(dict.fromkeys(notes + more))


class _Source:
    """The lists of a data set, read when asked for.

    Args:
        data: As in `open_captions`.
        images: As in `open_captions`.

    Raises:
        DataError: There are none.
    """

    def __init__(self, data: str, images: str | None) -> None:
        if images is not None and not os.path.isdir(images):
            hint = did_you_mean(images)
            raise DataError(f"{printable(images)}: no such folder of images{hint}")
        lists = find_lists(data)
        self.notes = lists.notes
        self.root = lists.root if images is None else Path(images)
        self._images = images
        self._files = lists.files
        self._parts: dict[str, Part] = {}
        if "" in lists.files:
            self._parts = _by_folder(read_part(lists.files[""], images, above=str(self.root)))
        elif "train" not in lists.files:
            raise DataError(f"{printable(data)}: no captions for train; {LAYOUT}")
        self.splits = [name for name in SPLIT_NAMES if name in (self._parts or self._files)]

    def training(self) -> list[Part]:
        """What is said of the training images, and of validation where the data have any."""
        name = next((name for name in VAL_NAMES if name in self.splits), None)
        if name == "test":
            self.notes.append("no val list: validates on test, so keep other images for the end")
        return [self.read("train"), *([self.read(name)] if name else [])]

    def read(self, name: str) -> Part:
        """What the lists of the split `name` say."""
        if name not in self._parts:
            above = str(self.root / name)
            self._parts[name] = read_part(self._files[name], self._images, above=above)
        return self._parts[name]


def _by_folder(part: Part) -> dict[str, Part]:
    """`part` by the folders train, val... that its images lie in; all for train if not so."""
    below = {path: _first_folder(path, part.where) for path in part.captions}
    names = set(below.values())
    if not {"train"} < names <= set(SPLIT_NAMES):
        return {"train": part}
    part.notes.append(f"the split is that of the folders: {join_names(sorted(names))}")
    return {
        name: dataclasses.replace(
            part,
            where=os.path.join(part.where, name),
            captions={path: said for path, said in part.captions.items() if below[path] == name},
            folders=[os.path.join(part.where, name)],
        )
        for name in names
    }


def _first_folder(path: str, where: str) -> str:
    """The folder straight in `where` that `path` lies in, empty where there is none."""
    folder, slash, _ = path.removeprefix(os.path.join(where, "")).partition("/")
    return folder if slash else ""


def _by_class(part: Part) -> ImagesByClass:
    """The images of each class; classes sorted by name.

    Raises:
        DataError: An image has no class.
    """
    images: ImagesByClass = {}
    for path in part.captions:
        label = part.labels.get(path) if part.labels else _first_folder(path, part.where)
        if not label:
            lack = (
                "no label, but others have one" if part.labels else "no label and no class folder"
            )
            raise DataError(f"{printable(path)}: {lack}; expected a column label, or folders")
        images.setdefault(label, []).append(path)
    return dict(sorted(images.items()))


def _held(
    part: Part, classes: Sequence[str], *, with_classes: bool, owner: str
) -> tuple[ImagesByClass, list[str]]:
    """The images of `part` by the names in `classes`, or all under the empty name."""
    if not with_classes:
        return {"": [*part.captions]}, []
    where = printable(part.where)
    return match_classes(_by_class(part), classes, location=where, owner=owner)


def _samples(part: Part, images: ImagesByClass, classes: Sequence[str]) -> tuple[Sample, ...]:
    """Samples sorted by path."""
    number = {name: label for label, name in enumerate(classes)}
    labels = {path: number.get(name, NO_LABEL) for name, paths in images.items() for path in paths}
    return tuple(Sample(path, labels[path], part.captions[path]) for path in sorted(labels))


def _held_note(held: ImagesByClass, val_share: float, *, with_classes: bool) -> str:
    images = plural(sum(map(len, held.values())), "image")
    what = "each class" if with_classes else "all"
    return f"no validation list: held out {images}, {val_share:.0%} of {what}"


def _shared_notes(train: Part, val: Part) -> list[str]:
    """Images that are on both sides.

    Raises:
        DataError: All validation images are.
    """
    shared = [path for path in val.captions if path in train.captions]
    if len(shared) == len(val.captions):
        raise DataError(
            f"all {plural(len(shared), 'validation image')} are training images too; "
            f"give others, or leave the validation list out"
        )
    names = join_names([printable(path) for path in shared], 3)
    images = plural(len(shared), "image")
    return [f"{images} in training and in validation (leak): {names}"] if shared else []


def _without_training(part: Part, held_out: Collection[str], root: Path) -> tuple[Part, str]:
    """Only the images that training held out, where they are from this data set."""
    names = set(held_out)
    kept = {path: said for path, said in part.captions.items() if relative(path, root) in names}
    if kept:
        note = f"took the {plural(len(kept), 'image')} that training held out"
        return dataclasses.replace(part, captions=kept), f"no validation list: {note}"
    return part, f"no validation list: took all {plural(len(part.captions), 'image')}"
