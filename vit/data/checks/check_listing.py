"""Listing of a dataset for `vit check`: as `vit train` lists it, but collecting its errors."""

import dataclasses
import difflib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vit.data.archives import is_inside, relative
from vit.data.sources.dataset_spec import UNSEEN, DatasetSpec, RowError, validation_split
from vit.data.sources.list_files import has_caption_lists
from vit.data.sources.open_dataset import align_classes, locate_in_lists, read_source
from vit.text import join_names, plural, printable

Severity = Literal["error", "warning", "note"]
"""error: training stops; warning: its result may be wrong; note: worth knowing."""
SHOWN = 20
"""Number of images that one problem lists."""

KINDS: dict[str, Severity] = {
    # training stops
    "unreadable": "error",
    "truncated": "error",
    "empty_file": "error",
    "too_large": "error",
    "decoder_failed": "error",
    "split_is_file": "error",
    "no_train": "error",
    "unclear_layout": "error",
    "no_classes": "error",
    "no_pictures": "error",
    "one_class": "error",
    "empty_class": "error",
    "broken_class": "error",
    "unknown_class": "error",
    "no_val_pictures": "error",
    "folder_unreadable": "error",
    "bad_line": "error",
    "bad_path": "error",
    "no_label": "error",
    "several_labels": "error",
    "contradiction": "error",
    "bad_shard": "error",
    "bad_label": "error",
    "group_leak": "error",
    # training continues, and its result may be wrong
    "missing_class": "warning",
    "class_names": "warning",
    "similar_names": "warning",
    "imbalance": "warning",
    "few_pictures": "warning",
    "leak": "warning",
    "near_leak": "warning",
    "two_labels": "warning",
    "near_two_labels": "warning",
    "blank": "warning",
    "dark": "warning",
    "overexposed": "warning",
    "flat": "warning",
    "not_a_file": "warning",
    "link": "warning",
    "loose_picture": "warning",
    "foreign_format": "warning",
    "beside_train": "warning",
    "layout": "warning",
    "suspected_label": "warning",
    "weak_features": "warning",
    "lone_label": "warning",
    "merged_labels": "warning",
    "group_in_test": "warning",
    # worth knowing
    "no_val": "note",
    "source": "note",
    "repeated_line": "note",
    "ignored_file": "note",
    "hidden": "note",
    "output": "note",
    "empty_folder": "note",
    "outside_link": "note",
    "duplicate": "note",
    "near_duplicate": "note",
    "tiny": "note",
    "huge": "note",
    "extreme_aspect": "note",
    "frames": "note",
    "turned": "note",
    "alpha": "note",
    "mode": "note",
    "deep": "note",
    "greyscale": "note",
}
"""Severity of each kind."""
SKIPPABLE = ("unreadable", "empty_file", "truncated", "too_large", "decoder_failed", "empty_class")
"""Errors that `--on-bad-image skip` leaves out."""
LOCATED = (
    *("bad_line", "bad_path", "no_label", "several_labels", "contradiction", "repeated_line"),
    *("merged_labels", "bad_shard", "bad_label", "lone_label", "folder_unreadable"),
)
"""Kinds whose detail already names the location: a line of a list, a shard, a folder, or other
images."""
SINGULAR = {"are": "is", "have": "has"}
"""Verbs of `shared_property`, for one image."""


REASONS = {
    "empty_file": re.compile("an empty file"),
    "truncated": re.compile("(damaged or )?cut short"),
    "too_large": re.compile(
        r"[\d,]+ (x [\d,]+ is|(bytes|pixels) are) more than|declares more than|[\d,]+ scans of"
    ),
    "decoder_failed": re.compile("the decoder |not decoded within "),
}
"""Beginning of a BadImage's reason, by kind; every other reason is `unreadable`."""


@dataclass(frozen=True)
class Problem:
    """One problem of a dataset."""

    kind: str
    detail: str
    images: tuple[str, ...] = ()
    count: int = 0
    labels: tuple[str, ...] = ()

    @property
    def severity(self) -> Severity:
        """Severity of its kind."""
        return KINDS[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """The object in the JSON of `vit check`."""
        one = len(self.images) == 1
        named: dict[str, Any] = {"image": self.images[0]} if one else {"images": list(self.images)}
        more = {"count": self.count} if self.count else {}
        labels = {"labels": list(self.labels)} if self.labels else {}
        return {
            "kind": self.kind,
            **named,
            "detail": self.detail,
            "severity": self.severity,
            **more,
            **labels,
        }

    def terminal_line(self, root: Path) -> str:
        """One line for a terminal, with the first two paths."""
        images = () if self.kind in LOCATED else self.images[:2]
        shown = [display_name(image, root) for image in images]
        names = [printable(name) for name in shown if name != "."]  # the folder, which has a name
        more = max(self.count, len(self.images)) - len(names)
        rest = f" and {more:,} more" if more > 0 and names else ""
        return f"{printable(self.detail)}{': ' if names else ''}{', '.join(names)}{rest}"


def display_name(path: str, root: Path) -> str:
    """The path of an image relative to its dataset, or its name inside an archive."""
    return relative(path, root) if is_inside(path) else os.path.relpath(path, root)


def shared_property(kind: str, images: list[str], total: int, what: str) -> list[Problem]:
    """One problem for all images with a property; none if there are no such images.

    `what` begins with the verb, in the plural.
    """
    if not images:
        return []
    verb, rest = what.split(" ", 1)
    verb = SINGULAR.get(verb, verb) if len(images) == 1 else verb
    detail = f"{plural(len(images), 'image')} of {total:,} {verb} {rest}"
    return [Problem(kind, detail, tuple(images[:SHOWN]), len(images))]


def problem_kind(reason: str) -> str:
    """The kind of an unreadable image, by the reason of its BadImage."""
    return next((kind for kind, words in REASONS.items() if words.match(reason)), "unreadable")


LABELS = ("two_labels", "near_two_labels", "suspected_label")
"""Kinds of problems that may be fixed in an image list."""
NOT_CLASSES = ("no_classes", "no_pictures", "one_class")
"""Kinds of problems of a folder that was not meant for classification."""
ALL = "all"
"""The name of the split of a dataset without splits."""
MAX_HINTS = 20
"""Unknown classes of a split for which a similar name is searched for."""


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
        splits: Names, in the order found.
        classes: Names, sorted.
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
        return validation_split(self.splits)


def list_dataset(data: str | DatasetSpec) -> DatasetListing:
    """List the images of a source that `vit train` accepts."""
    errors: list[RowError] = []
    spec = DatasetSpec(data) if isinstance(data, str) else data
    spec = dataclasses.replace(spec, all_splits=True, row_errors=errors)
    opened = read_source(spec)
    listing = DatasetListing(opened.root, [name or ALL for name in opened.splits], spec=spec)
    listing.grouped, listing.columns = opened.has_groups, opened.columns
    for note in opened.notes:
        listing.report("source", note)
    hint = ""
    if not spec.captions and os.path.isdir(spec.data) and has_caption_lists(spec.data):
        hint = "; for the captions in it, add --task caption"
    for row in errors:
        end = hint if row.kind in NOT_CLASSES else ""
        listing.report(row.kind, f"{row.error}{end}", *row.images)
    listing.classes = sorted({label for one in opened.train for label in one.labels})
    for name, records in opened.splits.items():
        targets = align_classes({x for one in records for x in one.labels}, listing.classes)
        for one in records:
            labels = tuple(targets.get(label, label) for label in one.labels)
            listing.images.append(ListedImage(one.path, name or ALL, labels, one.group))
    if listing.train_split not in listing.splits:
        if not {"no_train", "unclear_layout"} & {row.kind for row in errors}:
            there = join_names(listing.splits) or "nothing"
            listing.report("no_train", f"there is {there} but no train", str(opened.root))
        return listing
    where = opened.locations.get(listing.train_split, spec.data)
    if any(row.kind in NOT_CLASSES for row in errors):
        pass  # said already
    elif not (listing.classes if spec.labels else opened.train):
        listing.report("no_pictures", f"{printable(where)}: no images", spec.data)
    elif len(listing.classes) == 1 and not opened.multilabel:
        only = printable(listing.classes[0])
        words = f"only one class ({only}), nothing to tell apart{hint}"
        listing.report("one_class", words, spec.data)
    for split in listing.splits:
        if split != listing.train_split:
            match_classes(listing, split)
    check_validation(listing)
    return listing


def match_classes(listing: DatasetListing, split: str) -> None:
    """Report classes that only this split or only the training split has."""
    paths: dict[str, list[str]] = defaultdict(list)
    for one in listing.images:
        for label in one.labels if one.split == split else ():
            paths[label].append(one.path)
    for number, name in enumerate(name for name in paths if name not in {*listing.classes}):
        near = []
        if number < MAX_HINTS:
            near = difflib.get_close_matches(name, listing.classes, n=1)
        hint = f" (is it {printable(near[0])}?)" if near else ""
        words = f"{split} has class {printable(name)}, which train does not have{hint}"
        listing.report("unknown_class", words, *paths[name])
    for name in listing.classes if split != UNSEEN else ():
        if name not in paths:
            words = f"{split} has no images of class {printable(name)}"
            listing.report("missing_class", words)


def check_validation(listing: DatasetListing) -> None:
    """Report a missing or empty validation split."""
    name = listing.val_split
    if name is None:
        listing.report("no_val", "no validation images: training holds out a share of each class")
        return
    if not any(one.split == name for one in listing.images):
        listing.report("no_val_pictures", f"{name} has no images", str(listing.root / name))
