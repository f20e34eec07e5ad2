"""Listing of a dataset for `vit check`: as `vit train` lists it, with all problems."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vit.data.sources.dataset_problem import LOCATED, SHOWN, Problem
from vit.data.sources.dataset_spec import UNSEEN, DatasetSpec, validation_split
from vit.data.sources.open_dataset import align_classes, locate_in_lists, read_source
from vit.text import join_names, printable

LABELS = (
    *("two_labels", "near_two_labels", "suspected_label"),
    *("two_numbers", "far_number", "suspected_number"),
)
"""Kinds of problems that may be fixed in an image list."""
NOT_CLASSES = ("no_classes", "no_pictures", "one_class")
"""Kinds of problems of a folder that was not meant for classification."""
ALL = "all"
"""The name of the split of a dataset without splits."""


@dataclass(frozen=True)
class ListedImage:
    """An image of the dataset, with its split and classes."""

    path: str
    split: str
    labels: tuple[str, ...]
    group: str = ""
    """Its group, if the source has groups and they were requested."""
    numbers: tuple[float, ...] = ()
    """As `ImageRecord.numbers`."""


@dataclass
class DatasetListing:
    """The images of a dataset, before any of them is opened; `splits` are in the order found."""

    root: Path
    splits: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    images: list[ListedImage] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    spec: DatasetSpec | None = None
    grouped: bool = False
    columns: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    """Columns that are read as numbers."""
    units: tuple[str, ...] = ()
    choices: tuple[tuple[str, ...], ...] = ()
    """Classes of each of `targets`; none of numbers."""

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
    found: list[Problem] = []
    spec = DatasetSpec(data) if isinstance(data, str) else data
    spec = dataclasses.replace(spec, all_splits=True, problems=found)
    opened = read_source(spec)
    listing = DatasetListing(opened.root, [name or ALL for name in opened.splits], spec=spec)
    listing.grouped, listing.columns = opened.has_groups, opened.columns
    listing.targets, listing.units = spec.numbers, opened.units
    listing.choices = opened.target_classes or ((),) * len(spec.numbers)
    for note in opened.notes:
        listing.report("source", note)
    for problem in found:
        listing.report(problem.kind, problem.detail, *problem.images)
    listing.classes = sorted({label for one in opened.train for label in one.labels})
    for name, records in opened.splits.items():
        targets = align_classes({x for one in records for x in one.labels}, listing.classes)
        for one in records:
            labels = tuple(targets.get(label, label) for label in one.labels)
            image = ListedImage(one.path, name or ALL, labels, one.group, one.numbers)
            listing.images.append(image)
    if listing.train_split not in listing.splits:
        if not {"no_train", "unclear_layout"} & {one.kind for one in found}:
            there = join_names(listing.splits) or "nothing"
            listing.report("no_train", f"there is {there} but no train", str(opened.root))
        return listing
    where = opened.locations.get(listing.train_split, spec.data)
    if any(one.kind in NOT_CLASSES for one in found):
        pass  # said already
    elif not (listing.classes if spec.labels else opened.train):
        listing.report("no_pictures", f"{printable(where)}: no images", spec.data)
    elif len(listing.classes) == 1 and not opened.multilabel:
        only = printable(listing.classes[0])
        listing.report("one_class", f"only one class ({only}), nothing to tell apart", spec.data)
    for split in listing.splits:
        if split != listing.train_split:
            match_classes(listing, split)
    val = listing.val_split
    if val is None:
        share = "a share" if spec.numbers else "a share of each class"
        listing.report("no_val", f"no validation images: training holds out {share}")
    elif not any(one.split == val for one in listing.images):
        listing.report("no_val_pictures", f"{val} has no images", str(listing.root / val))
    return listing


def match_classes(listing: DatasetListing, split: str) -> None:
    """Report classes that only this split or only the training split has."""
    paths: dict[str, list[str]] = defaultdict(list)
    for one in listing.images:
        for label in one.labels if one.split == split else ():
            paths[label].append(one.path)
    known = {*listing.classes}
    for name in paths:
        if name not in known:
            words = f"{split} has class {printable(name)}, which train does not have"
            listing.report("unknown_class", words, *paths[name])
    for name in listing.classes if split != UNSEEN else ():
        if name not in paths:
            words = f"{split} has no images of class {printable(name)}"
            listing.report("missing_class", words)
