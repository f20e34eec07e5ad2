"""Listing of a dataset for `vit check`: as `vit train` lists it, but collecting its errors."""

import dataclasses
import difflib
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from vit.data.checks.problems import LOCATED, SHOWN, Problem
from vit.data.sources.dataset_spec import (
    LAYOUT,
    SPLIT_NAMES,
    UNSEEN,
    DatasetSpec,
    RowError,
    resolve_folder,
)
from vit.data.sources.file_walk import UNSUPPORTED_SUFFIXES, FolderWalker, unsupported_advice
from vit.data.sources.image_folder import (
    EMPTY_CLASS,
    renamed_splits,
    split_folders,
    without_classes,
)
from vit.data.sources.list_files import has_caption_lists
from vit.data.sources.open_dataset import (
    is_folder_source,
    locate_in_lists,
    read_source,
    refuse_captions,
)
from vit.errors import DataError
from vit.text import join_names, plural, printable

LABELS = ("two_labels", "near_two_labels", "suspected_label")
"""Kinds of problems that may be fixed in an image list."""
NOT_CLASSES = ("no_classes", "no_pictures", "one_class")
"""Kinds of problems of a folder that was not meant for classification."""
ALL = "all"
"""The name of the split of a dataset without splits."""
MAX_HINTS = 20
"""Unknown classes of a split for which a similar name is searched for."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class ListedImage:
    """An image of the dataset, with its split and classes."""

    path: str
    split: str
    labels: tuple[str, ...]
    group: str = ""
    """Its group, if the source has groups and they were requested."""


@dataclass
class DatasetListing:
    """The images of a dataset, before any of them is opened.

    Args:
        root: Folder of the dataset.
        splits: Names, in the order found.
        classes: Names, sorted.
        images: The images of all splits.
        problems: Problems of paths and names.
        spec: How a source other than a folder is read.
        grouped: Whether the source provides the groups of its images.
        columns: Columns of its lists that are not read.
    """

    root: Path
    splits: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    images: list[ListedImage] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    spec: DatasetSpec | None = None
    grouped: bool = False
    columns: tuple[str, ...] = ()

    def report(self, kind: str, detail: str, *images: str) -> None:
        """Add a problem."""
        more = len(images) if len(images) > SHOWN else 0
        self.problems.append(Problem(kind, detail, images[:SHOWN], more))

    def counts(self, split: str) -> dict[str, int]:
        """Number of images per class in a split."""
        found = Counter(name for one in self.images if one.split == split for name in one.labels)
        return {name: found[name] for name in self.classes}

    def with_lines(self, problems: Sequence[Problem]) -> list[Problem]:
        """Add the line numbers of an image list to the problems that can be fixed there."""
        if self.spec is None:
            return [*problems]
        labels = LABELS if self.spec.label_list is None else ()  # which are of another list
        fixable = [
            one
            for one in problems
            if one.kind not in LOCATED and (one.severity == "error" or one.kind in labels)
        ]
        lines = locate_in_lists(self.spec, {path for one in fixable for path in one.images})
        located, fixed = [], {id(one) for one in fixable}
        for one in problems:
            where = [printable(lines[path]) for path in one.images[:4] if path in lines]
            if where and id(one) in fixed:
                one = dataclasses.replace(one, detail=f"{one.detail} ({'; '.join(where)})")
            located.append(one)
        return located

    @property
    def train_split(self) -> str:
        """Name of the training split."""
        return "train" if "train" in self.splits else ALL

    @property
    def val_split(self) -> str | None:
        """Name of the split that training validates on, if there is one."""
        return DatasetSpec("").validation_split(self.splits)


def list_dataset(data: str | DatasetSpec) -> DatasetListing:
    """List the images of a source that `vit train` accepts.

    Raises:
        DataError: It does not exist, or is a source other than a folder that cannot be opened.
        ConfigError: A setting does not apply to this kind of source.
    """
    spec = DatasetSpec(data) if isinstance(data, str) else data
    # a class folder has one label an image, as --task classify requires
    plain = spec if spec.multilabel else dataclasses.replace(spec, multilabel=None)
    if not is_folder_source(spec.data) or plain != DatasetSpec(spec.data, group=spec.group):
        return list_source(spec)
    refuse_captions(spec.data)
    root, _ = resolve_folder(spec.data)
    listing = list_folder(root)
    if has_caption_lists(str(root)):  # maybe meant for captions, and its folders are no classes
        hint = "; for the captions in it, add --task caption"
        listing.problems = [
            dataclasses.replace(one, detail=one.detail + hint) if one.kind in NOT_CLASSES else one
            for one in listing.problems
        ]
    return listing


def list_source(spec: DatasetSpec) -> DatasetListing:
    """List an image list, shards or a table."""
    errors: list[RowError] = []
    spec = dataclasses.replace(spec, all_splits=True, row_errors=errors)
    opened = read_source(spec)
    listing = DatasetListing(opened.root, [name or ALL for name in opened.splits], spec=spec)
    listing.grouped, listing.columns = opened.has_groups, opened.columns
    for note in opened.notes:
        listing.report("source", note)
    for row in errors:
        listing.report(row.kind, str(row.error), *row.images)
    paths: dict[str, dict[str, list[str]]] = {}  # by split and class
    for name, records in opened.splits.items():
        split = name or ALL
        paths[split] = defaultdict(list)
        for record in records:
            listing.images.append(ListedImage(record.path, split, record.labels, record.group))
            for label in record.labels:
                paths[split][label].append(record.path)
    if listing.train_split not in paths:
        there = join_names(paths) or "nothing"
        listing.report("no_train", f"there is {there} but no train", str(opened.root))
        return listing
    listing.classes = sorted(paths[listing.train_split])
    where = opened.locations.get(listing.train_split, spec.data)
    is_listed = any(one.split == listing.train_split for one in listing.images)
    if not (listing.classes if spec.labels else is_listed):
        listing.report("no_pictures", f"{printable(where)}: no images", spec.data)
    elif len(listing.classes) == 1 and not opened.multilabel:
        only = printable(listing.classes[0])
        listing.report("one_class", f"only one class ({only}), nothing to tell apart", spec.data)
    for split, by_class in paths.items():
        if split != listing.train_split:
            match_classes(listing, split, Path(spec.data), by_class)
    check_validation(listing)
    return listing


def list_folder(root: Path) -> DatasetListing:
    """List an image folder, whatever is wrong with it."""
    listing = DatasetListing(root)
    for name in SPLIT_NAMES:
        if (root / name).is_file():
            listing.report(
                "split_is_file", f"{name} is a file, not a folder; {LAYOUT}", str(root / name)
            )
    walk = FolderWalker(str(root))
    try:
        folders, beside = split_folders(root, walk)
    except DataError:  # a split is a file, or a folder cannot be listed
        folders = {name: root / name for name in SPLIT_NAMES if (root / name).is_dir()}
        beside = []
    for note in renamed_splits(folders):
        listing.report("source", note, str(root))
    if note := without_classes(folders):
        listing.report("source", note, str(folders.pop("test")))
    if beside:
        names = join_names(beside)
        places = (str(root / name) for name in beside)
        listing.report("beside_train", f"folders beside train are left out: {names}", *places)
    if not folders and not listing.problems:
        folders = {ALL: root}
    for name, folder in folders.items():
        list_split(listing, name, folder)
    if folders and "train" not in folders and ALL not in folders:
        there = join_names(folders)
        listing.report("no_train", f"there is {there} but no train; {LAYOUT}", str(root))
    elif folders:
        check_validation(listing)
    if folders and ALL not in folders:  # files beside the splits
        walk_or_report(listing, root, lambda: walk.loose_images(str(root)))
        listing.problems += skipped_files(walk)
    return listing


def list_split(listing: DatasetListing, name: str, folder: Path) -> None:
    """Add the images of one split; its classes must be those of the first split."""
    walk, first = FolderWalker(str(listing.root)), not listing.splits
    listing.splits.append(name)
    classes = walk_or_report(listing, folder, lambda: walk.subfolders(str(folder))) or []
    walk_or_report(listing, folder, lambda: walk.loose_images(str(folder)))
    found: dict[str, list[str]] = {}
    unlisted = set()
    for label in classes:
        images = walk_or_report(listing, folder / label, partial(walk.images, str(folder / label)))
        found[label] = images or []
        if images is None:
            unlisted.add(label)
    where = printable(folder)
    if not classes:
        loose = plural(len(walk.unclassified), "image")
        what = f"has no class folders ({loose} straight in it); {LAYOUT}"
        if walk.unclassified:
            what += "; --labels LIST checks those that a list labels, --task mae all without labels"
        listing.report("no_classes", f"{where} {what}", str(folder))
    elif first:
        listing.classes = classes
        check_training(listing, folder, found, unlisted)
    else:
        found = match_classes(listing, name, folder, found, unlisted)
    for label, paths in found.items():
        listing.images += [ListedImage(path, name, (label,)) for path in paths]
    reported = {
        os.path.relpath(path, listing.root)
        for one in listing.problems
        if one.kind in ("empty_class", "missing_class")
        for path in one.images
    }
    walk.empty_folders = [path for path in walk.empty_folders if path not in reported]
    listing.problems += skipped_files(walk)


def walk_or_report(
    listing: DatasetListing, folder: Path, walk: Callable[[], Found]
) -> Found | None:
    """Return what `walk` returns; report a problem and return None if it raises."""
    try:
        return walk()
    except (DataError, OSError) as error:
        words = str(error)
        if isinstance(error, OSError):
            words = f"{printable(error.filename or folder)}: {error.strerror}"
        listing.report("folder_unreadable", words, str(folder))
        return None


def check_training(
    listing: DatasetListing, folder: Path, found: dict[str, list[str]], unlisted: Collection[str]
) -> None:
    """Report empty training classes, and a training split with one class.

    A class in `unlisted` has a folder that cannot be listed, and may have images.
    """
    where = printable(folder)
    if not any(found.values()) and not unlisted:
        listing.report("no_pictures", f"{where}: no images in its class folders", str(folder))
        return
    for name, paths in found.items():
        if not paths and name not in unlisted:
            words = f"class {printable(name)} {EMPTY_CLASS}"
            listing.report("empty_class", words, str(folder / name))
    if len(found) == 1:
        only = printable(next(iter(found)))
        listing.report("one_class", f"only one class ({only}), nothing to tell apart", str(folder))


def match_classes(
    listing: DatasetListing,
    split: str,
    folder: Path,
    found: dict[str, list[str]],
    unlisted: Collection[str] = (),
) -> dict[str, list[str]]:
    """`found` by the names of the training classes; others stay, and are reported.

    A class in `unlisted` has a folder that cannot be listed, and is not reported as missing.
    """
    known = {*listing.classes}
    hints = 0
    equal = {unicodedata.normalize("NFC", name): name for name in listing.classes}
    matched: dict[str, list[str]] = {}
    unknown = set()
    for name, paths in found.items():
        matching = name if name in known else equal.get(unicodedata.normalize("NFC", name))
        if matching is None and paths:
            hints += 1
            near = []
            if hints <= MAX_HINTS:
                near = difflib.get_close_matches(name, listing.classes, n=1)
            hint = f" (is it {printable(near[0])}?)" if near else ""
            words = f"{split} has class {printable(name)}, which train does not have{hint}"
            listing.report("unknown_class", words, str(folder / name))
        matched.setdefault(matching or name, []).extend(paths)
        if name in unlisted:
            unknown.add(matching or name)
    if split != UNSEEN:
        for name in listing.classes:
            if not matched.get(name) and name not in unknown:
                words = f"{split} has no images of class {printable(name)}"
                listing.report("missing_class", words, str(folder / name))
    return matched


def check_validation(listing: DatasetListing) -> None:
    """Report a missing or empty validation split."""
    name = listing.val_split
    if name is None:
        listing.report("no_val", "no validation images: training holds out a share of each class")
        return
    if not any(one.split == name for one in listing.images):
        listing.report("no_val_pictures", f"{name} has no images", str(listing.root / name))


def skipped_files(walk: FolderWalker) -> list[Problem]:
    """The files and folders that a walk skipped, one problem per reason."""
    unsupported: list[str] = []
    other: list[str] = []
    for name in walk.ignored_files:
        suffix = f".{name.lower().split('.')[-1]}"
        (unsupported if suffix in UNSUPPORTED_SUFFIXES else other).append(name)
    suffixes = {os.path.splitext(name)[1].lower() for name in unsupported}
    convert = f"of a format that is not read{unsupported_advice(suffixes)}"
    kinds = {
        "foreign_format": (unsupported, "image", convert),
        "ignored_file": (other, "file", "not taken for images"),
        "hidden": (sorted(walk.hidden_paths), "hidden or system name", ""),
        "empty_folder": (walk.empty_folders, "folder", "without images"),
        "link": (
            walk.skipped_links,
            "link",
            "to a folder of this dataset or around it, not followed",
        ),
        "outside_link": (walk.followed_links, "link", "to a folder outside, followed"),
        "not_a_file": (walk.special_files, "special file", "(pipes, broken links), left out"),
        "loose_picture": (walk.unclassified, "image", "in no class folder, left out"),
    }
    return [
        Problem(
            kind,
            f"{plural(len(names), noun)} {words}".rstrip(),
            tuple(os.path.join(walk.root, name) for name in names[:SHOWN]),
            len(names) if len(names) > SHOWN else 0,
        )
        for kind, (names, noun, words) in kinds.items()
        if names
    ]
