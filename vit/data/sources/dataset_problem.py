"""Problems of a dataset: `vit check` lists them all, a training raises the first error."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vit.data.image_archives import is_inside, relative
from vit.errors import DataError
from vit.text import plural, printable

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
    "channels": "error",
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
    "one_number": "error",
    # training continues, and its result may be wrong
    "missing_class": "warning",
    "class_names": "warning",
    "similar_names": "warning",
    "imbalance": "warning",
    "few_pictures": "warning",
    "leak": "warning",
    "near_leak": "warning",
    "scene_leak": "warning",
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
    "suspected_number": "warning",
    "weak_features": "warning",
    "lone_label": "warning",
    "merged_labels": "warning",
    "group_in_test": "warning",
    "far_number": "warning",
    "two_numbers": "warning",
    # worth knowing
    "no_val": "note",
    "source": "note",
    "source_leak": "note",
    "repeated_line": "note",
    "no_number": "note",
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


Problems = list[Problem] | None
"""Collects what is wrong with the parts of a dataset, which are skipped; None: the first error is
raised."""


def skip_or_raise(problems: Problems, kind: str, error: DataError, *images: str) -> None:
    """Collect `error`, or raise it if problems are not collected."""
    if problems is None:
        raise error
    problems.append(Problem(kind, str(error), images))


def all_skipped_error(problems: list[Problem]) -> DataError:
    """The error if every row was skipped: the first reason, and the number of others."""
    first, *others = [one for one in problems if one.severity == "error"] or problems
    more = f" (and {len(others):,} more such faults: nothing else can be read)" if others else ""
    return DataError(f"{first.detail}{more}")
