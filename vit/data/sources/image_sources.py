"""Sources of images: the cameras, days, folders or file formats that they come from.

A network is better on images of a source that it has learned from than on those of others, so an
accuracy on images that were drawn at random is too good for new sources. Part of the held-out
images are therefore all images of some sources, and the accuracy on these is that on new sources.

Where nothing in the files tells sources apart, the quarter of the validation images whose
background is least like that of any training image stands for them.

Everything is by the path of an image here: its source, its set of copies or scene, its origin, its
background.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from vit.data.dataset_types import ImageRecord
from vit.data.image_archives import relative, split_address
from vit.data.random_seed import random_seed
from vit.data.sources.dataset_spec import SPLIT_NAMES
from vit.text import plural

if TYPE_CHECKING:
    from vit.data.image_io import Origin

MIN_SOURCES = 4
"""Sources of MIN_IMAGES or more from which on a property of files tells sources apart."""
MIN_IMAGES = 5
COVERED = 0.8
"""Share of the images that are of such sources."""
MIXED = 0.5
"""Share of the images whose source has images of another class."""
MIN_NEW = 30
"""Validation images from which on an accuracy on new sources is measured."""
UNLIKE = 0.25
"""Share of the validation images that stand for new sources by their background."""
LARGEST = 1.5
"""Largest size of a source, in folds."""
BACKGROUND = "background"
"""The source of these images."""
SHADES = 6
"""Of each channel, in the histogram of a background."""
BORDER = 12
"""The border of an image is one part in so many of its shorter side."""
CHUNK = 256
"""Images that are compared with all others at a time."""


def find_sources(
    records: Sequence[ImageRecord], root: Path, origins: Mapping[str, "Origin"]
) -> dict[str, str]:
    """The source of each image by its path, from the first property that tells sources apart;
    `origins` are those of readable images."""

    def day(record: ImageRecord) -> str:
        origin = origins[record.path]
        if not origin.camera or origin.seconds is None:
            return ""
        taken = datetime.fromtimestamp(origin.seconds, UTC)
        return f"{origin.camera} {taken:%Y-%m-%d}"

    def folder(record: ImageRecord) -> str:
        if split_address(record.path) is not None:  # shards are no sources
            return ""
        parts = PurePath(relative(record.path, root)).parent.parts
        parts = parts[parts[:1] in [(name,) for name in SPLIT_NAMES] :]
        classes = {unicodedata.normalize("NFC", label) for label in record.labels}
        return "/".join(part for part in parts if unicodedata.normalize("NFC", part) not in classes)

    def file_name(record: ImageRecord) -> str:
        match = re.fullmatch(r"(.*?)\d+\D*", PurePath(record.path).stem)
        return match[1] if match else ""

    kinds: dict[str, Callable[[ImageRecord], str]] = {
        "camera": lambda record: origins[record.path].camera,
        "camera and day": day,
        "folder": folder,
        "file name": file_name,
        "file format": lambda record: origins[record.path].format,
    }
    readable = [record for record in records if record.path in origins]
    for kind, value in kinds.items():
        found = {one.path: f"{kind}: {name}" for one in readable if (name := value(one))}
        if _are_sources(found, readable):
            return found
    return {}


def _are_sources(found: Mapping[str, str], records: Sequence[ImageRecord]) -> bool:
    images = Counter(found.values())
    classes = defaultdict[str, set[str]](set)
    for record in records:
        if record.path in found:
            own = (unicodedata.normalize("NFC", label) for label in record.labels)
            classes[found[record.path]].update(own)
    large = {name: number for name, number in images.items() if number >= MIN_IMAGES}
    mixed = sum(number for name, number in large.items() if len(classes[name]) > 1)
    return (
        len(large) >= MIN_SOURCES
        and sum(large.values()) >= COVERED * len(records)
        and mixed >= MIXED * len(records)
    )


def with_copies(sources: Mapping[str, str], copies: Mapping[str, str]) -> dict[str, str]:
    """The source of each image; `copies`, the sets or scenes of images that stay together, are of
    the source of the first of them."""
    first: dict[str, str] = {}
    for path in sorted(copies):
        first.setdefault(copies[path], sources.get(path, ""))
    found = {**sources, **{path: first[name] for path, name in copies.items()}}
    return {path: own for path, own in found.items() if own}


def hold_out_sources(
    records: Sequence[ImageRecord], sources: Mapping[str, str], *, share: float, seed: int
) -> set[str]:
    """Paths of all images of some sources, about `share` of the images; empty if none fit.

    Sources are taken in a random order while they fit. At least half of the images of each class
    stay. If these have fewer than MIN_NEW images, the smallest source that has as many is taken
    in their place, of up to twice the share.
    """
    members = defaultdict[str, list[ImageRecord]](list)
    for record in records:
        if record.path in sources:
            members[sources[record.path]].append(record)
    total = Counter(label for record in records for label in record.labels)

    def fitting(names: Sequence[str], most: float) -> set[str]:
        held, found = Counter[str](), set[str]()
        for name in names:
            labels = held + Counter(label for one in members[name] for label in one.labels)
            learned = all(2 * number <= total[label] for label, number in labels.items())
            if learned and len(found) + len(members[name]) <= most * len(records):
                held = labels
                found.update(one.path for one in members[name])
        return found if len(found) >= MIN_NEW else set()

    order = sorted(members, key=lambda name: random_seed(seed, "source", name))
    large = sorted((len(members[name]), name) for name in order if len(members[name]) >= MIN_NEW)
    return fitting(order, share) or fitting([name for _, name in large[:1]], 2 * share)


def fit_folds(records: Sequence[ImageRecord], sources: Mapping[str, str], folds: int) -> bool:
    """Whether folds can have whole sources: each class is of as many, and none is too large."""
    images = Counter(sources.get(record.path, "") for record in records)
    by_class = defaultdict[str, set[str]](set)
    for record in records:
        for label in record.labels:
            by_class[label].add(sources.get(record.path, ""))
    largest = max(images.values(), default=0)
    few = any(len(names - {""}) < folds for names in by_class.values())
    return not few and largest <= LARGEST * len(records) / folds


def new_images(
    train: Collection[str],
    val: Collection[str],
    sources: Mapping[str, str],
    backgrounds: Mapping[str, Any],
) -> dict[str, str]:
    """The validation images of sources that no training image is of, with their source.

    If there are too few, those with the backgrounds that are least like those of training images;
    empty if there are too few of these too.
    """
    known = {sources[path] for path in train if path in sources}
    found = {path: sources[path] for path in val if path in sources}
    found = {path: name for path, name in found.items() if name not in known}
    if len(found) >= MIN_NEW:
        return found
    seen, measured = ([path for path in paths if path in backgrounds] for paths in (train, val))
    count = round(UNLIKE * len(measured))
    if count < MIN_NEW or not seen:
        return {}
    learned, others = (
        np.stack([backgrounds[path] for path in paths]).astype(np.float32)
        for paths in (seen, measured)
    )
    nearest = np.concatenate(
        [(others[at : at + CHUNK] @ learned.T).max(axis=1) for at in range(0, len(others), CHUNK)]
    ).tolist()
    order = sorted(range(len(measured)), key=lambda at: (nearest[at], measured[at]))
    return {measured[at]: BACKGROUND for at in sorted(order[:count])}


def shared_notes(
    train: Collection[str], val: Collection[str], sources: Mapping[str, str]
) -> list[str]:
    """A note about validation images of the data that are of sources that were trained on."""
    known = {sources[path] for path in train if path in sources}
    shared = sum(sources.get(path) in known for path in val)
    if not shared:
        return []
    by = next(iter(known)).partition(":")[0]
    return [
        f"{shared:,} of {plural(len(val), 'validation image')} are of sources of the training "
        f"images (by {by}): top-1 is for more images of these; give the training images alone, and "
        "some sources are held out"
    ]


def background(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float16]]:
    """Square roots of the shares of colours at the border of an image, (height, width, 3) uint8 ->
    (216,) float16.

    The product of two is the Bhattacharyya coefficient of their histograms, 1 if they are equal.
    """
    height, width = pixels.shape[:2]
    edge = max(min(height, width) // BORDER, 1)
    sides = (pixels[:edge], pixels[-edge:], pixels[edge:-edge, :edge], pixels[edge:-edge, -edge:])
    border = np.concatenate([side.reshape(-1, 3) for side in sides]).astype(np.int64)
    shades = border * SHADES // 256
    counts = np.bincount(shades @ (SHADES**2, SHADES, 1), minlength=SHADES**3)
    return np.sqrt(counts / len(border)).astype(np.float16)
