"""Accuracy by slices of the images, and which slices are really worse than the other images.

    p          = P(X <= right in the slice),  X ~ Hypergeometric(images, right, images of the slice)
    adjusted   = p, adjusted to the number of slices (vit/evaluation/exact_tests.py)
    flagged    = adjusted < 0.05 and the slice is less accurate than the rest

Without the adjustment one of twenty slices would be flagged by chance. Where images come in groups,
such as those of a patient, the slice and the rest count as the images that the groups are worth
(vit/evaluation/intervals.py), in the test as in the interval; fewer than 5 groups are worth
none, and are not tested.

Slices are by size, shape, file type, origin, and brightness and sharpness:

    grey       = (red + green + blue) / 3
    brightness = mean of grey / 255
    sharpness  = standard deviation of the Laplacian of grey

Both are those of the image as the network sees it, resized and cropped: blur that disappears in
resizing does not matter. Nothing is decoded for them.

Source: Fisher's exact test, one-sided; sharpness: Pech-Pacheco et al., "Diatom autofocusing in
brightfield microscopy: a comparative study", ICPR 2000 (variance of the Laplacian).
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.data.image_io import JPEG_FORMATS, read_header
from vit.errors import BadImage
from vit.evaluation.exact_tests import holm, lower_tail
from vit.evaluation.intervals import effective_images, share_interval
from vit.text import percent, plural, printable

OTHER = "other"
"""Slice of the less frequent words."""
LEVEL = 0.05
"""Probability that any slice is flagged where none is worse."""
MIN_IMAGES = 10
"""Images of a slice, and images beside it; smaller slices are left out."""
MAX_CATEGORIES = 30
"""Slices of a feature whose values are words; the largest ones."""
MAX_DISTINCT = 10
"""Different numbers up to which each of them is a slice of its own."""

Value = float | str | None
"""A number or a word; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A property of images."""

    key: str
    title: str
    values: Sequence[Value]
    edges: Sequence[float] | None = None
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class AccuracySlice:
    """Right answers in a slice, and in all other images whose value of the feature is known.

    Args:
        p_value: Of Fisher's exact test against a slice that is as accurate or more; None of too
            few groups.
    """

    feature: str
    title: str
    name: str
    count: int
    right: int
    rest: int
    rest_right: int
    interval: Sequence[float]
    p_value: float | None
    p_adjusted: float | None = None

    @property
    def flagged(self) -> bool:
        """Whether the slice is less accurate than the rest, beyond chance."""
        return self.p_adjusted is not None and self.p_adjusted < LEVEL

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "feature": self.feature,
            "slice": self.name,
            "count": self.count,
            "accuracy": self.right / self.count,
            "accuracy_interval": list(self.interval),
            "rest_count": self.rest,
            "rest_accuracy": self.rest_right / self.rest,
            "p_value": self.p_value,
            "p_adjusted": self.p_adjusted,
            "flagged": self.flagged,
            "sentence": self.sentence() if self.flagged else None,
        }

    def sentence(self) -> str:
        low, high = self.interval
        return (
            f"less accurate where {self.title} is {printable(self.name)}: "
            f"{percent(self.right / self.count, 1)} of {plural(self.count, 'image')} right "
            f"(95 % interval {percent(low, 1)} to {percent(high, 1)}), "
            f"{percent(self.rest_right / self.rest, 1)} of the other {self.rest:,} "
            f"(p = {self.p_adjusted:.2g} after correction)"
        )


def accuracy_slices(
    right: Sequence[bool | None], features: Iterable[Feature], groups: Tensor | None = None
) -> list[AccuracySlice]:
    """Slices of the images by each feature, with p-values corrected for all; images whose answer is
    None in `right` are left out."""
    found: list[AccuracySlice] = []
    for feature in features:
        found += slices_of(right, feature, groups)
    adjusted = iter(holm([one.p_value for one in found if one.p_value is not None]))
    return [
        one if one.p_value is None else replace(one, p_adjusted=next(adjusted)) for one in found
    ]


def slices_of(
    right: Sequence[bool | None], feature: Feature, groups: Tensor | None
) -> list[AccuracySlice]:
    known = [
        (value, bool(hit), place)
        for place, (value, hit) in enumerate(zip(feature.values, right, strict=True))
        if value is not None and hit is not None
    ]
    numbers, names = divide([value for value, *_ in known], feature.edges, feature.unit)
    hits = torch.tensor([hit for _, hit, _ in known], dtype=torch.bool)
    own = None if groups is None else groups[[place for *_, place in known]]
    found = []
    for number, name in enumerate(names):
        inside = torch.from_numpy(numbers == number)
        sides = [(hits[side], None if own is None else own[side]) for side in (inside, ~inside)]
        (count, right_inside), (rest, rest_right) = [
            (len(side), int(side.sum())) for side, _ in sides
        ]
        if count < MIN_IMAGES or rest < MIN_IMAGES:
            continue
        (worth, worth_right), (beside, beside_right) = (worth_images(*side) for side in sides)
        p_value = lower_tail(worth_right, worth + beside, worth_right + beside_right, worth)
        row = AccuracySlice(
            feature=feature.key,
            title=feature.title,
            name=name,
            count=count,
            right=right_inside,
            rest=rest,
            rest_right=rest_right,
            interval=share_interval(*sides[0]),
            p_value=p_value if worth and beside else None,
        )
        found.append(row)
    return found


def worth_images(hits: Tensor, groups: Tensor | None) -> tuple[int, int]:
    """How many independent images tell as much as these, (images,), and how many are right."""
    if groups is None:
        return len(hits), int(hits.sum())
    worth = round(effective_images(hits, groups))
    return worth, round(worth * float(hits.double().mean()))


def divide(
    values: Sequence[float | str], edges: Sequence[float] | None = None, unit: str = ""
) -> tuple[NDArray[np.int64], list[str]]:
    """The number of the slice of each value, and the names of the slices.

    Words are slices, the most frequent ones; the others share one. Numbers are divided at `edges`,
    or at their quartiles, and equal ones are never separated; a slice is named by its smallest and
    its largest number, with 4 digits.
    """
    if any(isinstance(value, str) for value in values):
        words = [word for word, _ in Counter(map(str, values)).most_common(MAX_CATEGORIES)]
        places = {word: place for place, word in enumerate(words)}
        return np.array([places.get(str(value), len(words)) for value in values]), [*words, OTHER]
    numbers = np.array(values, dtype=np.float64)
    limits = np.unique(numbers)[1:] if edges is None else np.array(edges)
    if edges is None and len(limits) >= MAX_DISTINCT:
        limits = np.quantile(numbers, [0.25, 0.5, 0.75])
    used, slices = np.unique(np.searchsorted(limits, numbers, side="right"), return_inverse=True)
    names = []
    for number in range(len(used)):
        inside = numbers[slices == number]
        ends = dict.fromkeys(
            f"{end:.0f}" if end.is_integer() else f"{end:.4g}"
            for end in (float(inside.min()), float(inside.max()))
        )
        names.append(" to ".join(ends) + unit)
    return slices, names


ASPECTS = (2 / 3, 9 / 10, 10 / 9, 3 / 2)
"""Limits between slices of width / height."""
CHUNK = 64
"""Images of a batch that are measured at a time."""
EMPTY = "(empty)"


class ImageProperties:
    """Collects the properties of images by their path; thread-safe."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int, str]] = {}
        """Width, height and file format, the two in pixels."""
        self.pixels: dict[str, tuple[float, float]] = {}
        """Brightness and sharpness."""

    def add(self, path: str, size: tuple[int, int], file_format: str, pixels: Tensor) -> None:
        """Add a decoded image of `size` (width, height); its `pixels` are as the network sees them,
        uint8 (3, height, width)."""
        self.files[path] = (*size, file_format)
        (self.pixels[path],) = pixel_statistics(pixels[None])

    def add_pixels(self, paths: Sequence[str], batch: Tensor) -> None:
        """Add images as the network sees them, uint8 (images, 3, height, width)."""
        for first in range(0, len(paths), CHUNK):
            found = pixel_statistics(batch[first : first + CHUNK])
            self.pixels.update(zip(paths[first : first + CHUNK], found, strict=True))

    def add_headers(self, paths: Sequence[str]) -> None:
        """Read size and format of files from their headers; unreadable ones are left out."""
        for path in paths:
            try:
                header = read_header(path)
            except BadImage:
                continue
            self.files[path] = (header.width, header.height, header.format)

    def features(
        self,
        paths: Sequence[str],
        *,
        classes: Sequence[str] | None = None,
        training_counts: Mapping[str, int] | None = None,
        columns: Mapping[str, Mapping[str, str]] | None = None,
    ) -> list[Feature]:
        """The features of the images of an evaluation; a multi-label network has no `classes`."""
        files = [self.files.get(path) for path in paths]
        pixels = [self.pixels.get(path, (None, None)) for path in paths]
        sides = [None if one is None else float(min(one[:2])) for one in files]
        aspects = [None if one is None else one[0] / one[1] for one in files]
        kinds = [None if one is None else one[2] or None for one in files]
        formats = ["JPEG" if kind in JPEG_FORMATS else kind for kind in kinds]
        found = [
            Feature(key="size", title="the short side", values=sides, unit=" px"),
            Feature(key="aspect", title="width / height", values=aspects, edges=ASPECTS),
            Feature(key="brightness", title="brightness", values=[one for one, _ in pixels]),
            Feature(key="sharpness", title="sharpness", values=[one for _, one in pixels]),
            Feature(key="file_type", title="the file type", values=formats),
        ]
        if classes is not None:
            where = "here" if training_counts is None else "in training"
            counts = Counter(classes) if training_counts is None else training_counts
            frequency = [float(counts.get(name, 0)) for name in classes]
            title = f"the number of images of the class {where}"
            found.append(Feature(key="class_frequency", title=title, values=frequency))
        folders = origin_folders(paths, classes)
        found.append(Feature(key="folder", title="the folder", values=folders))
        for column, cells in (columns or {}).items():
            values = column_values([cells.get(path, "") for path in paths])
            title = f"column {column}"
            found.append(Feature(key=f"column:{column}", title=title, values=values))
        return found


def pixel_statistics(images: Tensor) -> list[tuple[float, float]]:
    """Brightness in [0, 1] and sharpness in grey levels of uint8 images, (images, 3, height,
    width), of at least 3 pixels a side.

    In integers by numpy, since the calls cost more than the pixels of a small image.
    """
    red, green, blue = images.numpy().swapaxes(0, 1)
    sums = np.add(red, green, dtype=np.int16)  # three times the grey value
    sums += blue
    brightness = sums.mean(axis=(1, 2)) / (3 * 255)
    laplacian = sums[:, 1:-1, 1:-1] * np.int16(-4)
    laplacian += sums[:, :-2, 1:-1]
    laplacian += sums[:, 2:, 1:-1]
    laplacian += sums[:, 1:-1, :-2]
    laplacian += sums[:, 1:-1, 2:]
    spread = laplacian.reshape(len(sums), -1).astype(np.float32)
    squares = np.einsum("ij,ij->i", spread, spread) / spread.shape[1]
    variance = np.maximum(squares - spread.mean(axis=1) ** 2, 0)
    return list(zip(brightness.tolist(), (np.sqrt(variance) / 3).tolist(), strict=True))


def origin_folders(paths: Sequence[str], classes: Sequence[str] | None = None) -> list[str]:
    """The folder of each image below the one that all share, without that of its class."""
    parents = [os.path.dirname(path).split(os.sep) for path in paths]
    levels = zip(*parents, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
    names = [None] * len(paths) if classes is None else classes
    return [
        "/".join(part for part in parts[shared:] if part != name) or "."
        for parts, name in zip(parents, names, strict=True)
    ]


def column_values(cells: Sequence[str]) -> list[Value]:
    """Cells of a column as numbers where all of them are some, else as words."""
    try:
        numbers = [float(cell) if cell else None for cell in cells]
    except ValueError:
        return [cell or EMPTY for cell in cells]
    finite = all(one is None or abs(one) < float("inf") for one in numbers)
    return [*numbers] if finite else [cell or EMPTY for cell in cells]
