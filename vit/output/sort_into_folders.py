"""Sorts images into one folder per predicted class: copied or linked, nothing is overwritten.

Target paths depend only on the list of images, the classes and the prediction, so repeating the
sorting after a kill is idempotent.
"""

import fnmatch
import glob
import hashlib
import os
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from vit.class_tree import ROOT, ClassTree, last_name
from vit.data.image_archives import copy_out, is_inside, same_bytes
from vit.errors import ConfigError, RunError
from vit.output.output_file import check_folder
from vit.output.prediction_results import Prediction
from vit.paths import UniqueNames, casefold_name, cut_name, is_device_name
from vit.text import join_names

SortMethod = Literal["copy", "symlink"]
UNSURE = "_unsure"
PUNCTUATION = " -_.,+=@()[]&'!#"
ESCAPED = re.compile("%[0-9A-Fa-f]{2}")
MAX_NAME_BYTES = 200  # bytes of a name; file systems take 255


def folder_names(classes: Sequence[str]) -> list[str]:
    """A folder for each class: safe as a name everywhere, and no two alike.

    Letters, digits and plain punctuation stay, `%` too unless it would look like %XX; the bytes of
    all else are %XX. Names that differ in case or composition alone are one on some disks: the
    later ones end in ~2, ~3, ...; a long name is cut and ends in ~ and a digest.
    """
    taken: set[str] = set()
    names = []
    for label in classes:
        plain = _safe(label)
        name, number = plain, 1
        while casefold_name(name) in taken:
            number += 1
            name = f"{plain}~{number}"
        taken.add(casefold_name(name))
        names.append(name)
    return names


def tree_folders(tree: ClassTree) -> dict[str, str]:
    """Node -> its folder inside of those of the nodes above."""
    found = {ROOT: ""}
    for node, places in tree.children.items():
        children = [tree.nodes[place] for place in places]
        names = folder_names([*map(last_name, children)])
        inside = (os.path.join(found[node], name) for name in names)
        found |= zip(children, inside, strict=True)
    return found


def renamed_note(classes: Sequence[str]) -> str:
    """A note about classes whose folders have other names, or empty."""
    folders = dict(zip(classes, folder_names(classes), strict=True))
    renamed = [f"{name} (class {label})" for label, name in folders.items() if name != label]
    if not renamed:
        return ""
    return (
        f"names that some file systems refuse are changed: {join_names(renamed)}; before a "
        "training on these folders, rename them"
    )


def _safe(label: str) -> str:
    """One component of a path; never empty, `.`, `..`, `_unsure`, a device, or with a `~`."""
    last = len(label) - 1
    special = is_device_name(label) or casefold_name(label) == UNSURE
    parts = []
    for place, letter in enumerate(label):
        safe = unicodedata.category(letter)[0] in "LMN" or letter in PUNCTUATION
        safe = safe or (letter == "%" and not ESCAPED.match(label, place))
        edge = (place == 0 and (letter in ". " or special)) or (place == last and letter in ". ")
        parts.append(letter if safe and not edge else _percent(letter))
    name = "".join(parts) or "%"
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        name = f"{cut_name(name, MAX_NAME_BYTES - 17)}~{digest}"
    return name


def _percent(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode("utf-8", "surrogatepass"))


def image_names(images: Iterable[str]) -> list[str]:
    """Names of the images in their folders: their own, with -2, -3, ... where one comes again.

    Numbers follow the whole list and not the class, so they do not depend on answers.
    """
    own = [os.path.basename(image) or "-" for image in images]
    return [*map(UniqueNames(own).add, own)]


class ImageSorter:
    """Puts images into the folders of their classes."""

    def __init__(
        self,
        folder: str,
        method: SortMethod,
        classes: Sequence[str],
        images: Sequence[str],
        tree: ClassTree | None = None,
    ):
        self.folder, self.method = Path(folder), method
        self.folders = dict(zip(classes, folder_names(classes), strict=True))
        if tree is not None:
            self.folders = tree_folders(tree)
        self.names = image_names(images)

    def __call__(self, place: int, prediction: Prediction) -> None:
        """Put image number `place` of the list where it belongs; one that failed stays."""
        if prediction.error is not None:
            return
        best = prediction.best
        folder = self.folder / (UNSURE if best is None else self.folders[best])
        target = folder / self.names[place]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._put(prediction.image, target)
            except FileExistsError:
                self._check_identical(prediction.image, target)
        except OSError as error:
            what = f"{prediction.image} could not be put at {target}"
            raise RunError(f"{what}: {error.strerror}") from None

    def _put(self, image: str, target: Path) -> None:
        """Raises FileExistsError where something is there, which stays."""
        if self.method == "symlink":
            target.symlink_to(os.path.abspath(image))
        elif os.path.lexists(target):
            raise FileExistsError
        else:
            handle, beside = tempfile.mkstemp(prefix=".sorting-", dir=target.parent)
            os.close(handle)
            try:
                copy_out(image, beside)
                _publish(beside, target)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(beside)

    def _check_identical(self, image: str, target: Path) -> None:
        """Accept what an earlier, interrupted run has placed there, and nothing else."""
        if self.method == "symlink":
            same = target.is_symlink() and os.readlink(target) == os.path.abspath(image)
        else:
            same = target.is_file() and not target.is_symlink()
            same = same and same_bytes(image, target)
        if not same:
            raise RunError(
                f"{target} is there and is not {image}; nothing is overwritten: give another folder"
            )


def _publish(beside: str, target: Path) -> None:
    """Rename a complete file to `target`, which must not exist."""
    try:
        os.link(beside, target)
    except FileExistsError:
        raise
    except OSError:  # a disk without links
        if os.path.lexists(target):
            raise FileExistsError from None
        os.rename(beside, target)


def check_sorting(
    folder: str,
    inputs: Sequence[str],
    images: Sequence[str],
    *,
    filled: bool,
    method: SortMethod = "copy",
) -> None:
    """Refuse a folder below an input, or with the inputs; and images to which no link can lead."""
    here = os.path.realpath(folder)
    inside = None if method == "copy" else next(filter(is_inside, images), None)
    if inside is not None:
        raise ConfigError(
            f"sort_with={method}: {inside} is inside of a file, to which nothing can be "
            "linked; take copy"
        )
    for word in inputs:
        root = _searched_root(word, here)
        if root is not None and _inside(here, os.path.realpath(root)):
            raise ConfigError(
                f"sort_into={folder} lies in the input {word}: the next run would take "
                "the sorted images for new ones; give a folder outside"
            )
    for source in {os.path.dirname(os.path.abspath(image)) for image in images}:
        if _inside(os.path.realpath(source), here):
            raise ConfigError(
                f"sort_into={folder} holds the inputs in {source}; give a folder of its own"
            )
    check_folder(
        folder,
        overwrite=filled,
        content="sorted images",
        overwriting=" to sort into it all the same (no file of it is replaced)",
    )


def _searched_root(word: str, here: str) -> str | None:
    """The folder whose subfolders an input takes images from, now and in the next run; None if
    `here` would not be one of them."""
    if os.path.isdir(word):
        return word
    if os.path.lexists(word) or not glob.has_magic(word):
        return None
    root, last = os.path.split(word)
    if not glob.has_magic(root):
        first, *_ = os.path.relpath(here, os.path.realpath(root)).split(os.sep)
        return (root or os.curdir) if fnmatch.fnmatch(first, last) else None
    while glob.has_magic(root):
        root = os.path.dirname(root)
    return root or os.curdir


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
