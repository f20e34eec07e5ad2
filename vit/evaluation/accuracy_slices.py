"""Accuracy by slices of the images, and which slices are really worse than the other images.

    p          = P(X <= right in the slice),  X ~ Hypergeometric(images, right, images of the slice)
    adjusted   = p, adjusted to the number of slices (vit/evaluation/multiple_testing.py)
    flagged    = adjusted < 0.05 and the slice is less accurate than the rest

Without the adjustment one of twenty slices would be flagged by chance. Where images come in groups,
such as those of a patient, the slice and the rest count as so many images as the groups are worth
(vit/evaluation/image_groups.py), in the test as in the interval; fewer than 5 groups are worth
none, and are not tested.

Source: Fisher's exact test, one-sided.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.evaluation.image_groups import effective_images, share_interval
from vit.evaluation.multiple_testing import holm
from vit.text import percent, plural, printable

OTHER = "other"
"""Slice of the words that have none of their own."""
LEVEL = 0.05
"""Probability that any slice is flagged where none is worse."""
MIN_IMAGES = 10
"""Images of a slice, and images beside it; smaller slices are left out."""
MAX_CATEGORIES = 30
"""Slices of a feature whose values are words; the largest ones."""
MAX_DISTINCT = 10
"""Different numbers up to which each of them is a slice of its own."""

Value = float | str | None
"""A number or a word; None where it is not known."""


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
        interval: 95 % interval of the share that is right in the slice.
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
        """The result in words."""
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
    """Slices of the images by each feature, with p-values corrected for all of them.

    Args:
        right: Whether each answer is right; None for an image that is left out.
        groups: The group of each image, (images,); None of independent images.
    """
    rows = (_slices_of(right, one, groups) for one in features)
    found = list(itertools.chain.from_iterable(rows))
    adjusted = iter(holm([one.p_value for one in found if one.p_value is not None]))
    return [
        one if one.p_value is None else replace(one, p_adjusted=next(adjusted)) for one in found
    ]


def _slices_of(
    right: Sequence[bool | None], feature: Feature, groups: Tensor | None
) -> list[AccuracySlice]:
    known = [
        (value, bool(hit), place)
        for place, (value, hit) in enumerate(zip(feature.values, right, strict=True))
        if value is not None and hit is not None
    ]
    names, order = slice_names([value for value, *_ in known], feature.edges, feature.unit)
    hits = torch.tensor([hit for _, hit, _ in known], dtype=torch.bool)
    own = None if groups is None else groups[[place for *_, place in known]]
    named = np.array(names)
    found = []
    for name in order:
        inside = torch.from_numpy(named == name)
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
    """Number of independent images that tell as much as these, and of right ones among them.

    Args:
        hits: Whether each answer is right, (images,).
        groups: The group of each, (images,); None of independent images.
    """
    if groups is None:
        return len(hits), int(hits.sum())
    worth = round(effective_images(hits, groups))
    return worth, round(worth * float(hits.double().mean()))


def slice_names(
    values: Sequence[float | str], edges: Sequence[float] | None = None, unit: str = ""
) -> tuple[list[str], list[str]]:
    """The slice of each value, and the slices in their order.

    Words are slices, the most frequent ones; the others share `other`, or `(other)` if that is one
    of the words. Numbers are divided at
    `edges`, or at their quartiles, and equal ones are never separated; a slice is named by its
    smallest and its largest number.
    """
    if any(isinstance(value, str) for value in values):
        words = list(map(str, values))
        frequent = [word for word, _ in Counter(words).most_common(MAX_CATEGORIES)]
        kept = set(frequent)
        rest, distinct_words = OTHER, set(words)
        while rest in distinct_words:
            rest = f"({rest})"
        names = [word if word in kept else rest for word in words]
        return names, list(dict.fromkeys([*frequent, *names]))
    if not values:
        return [], []
    numbers = np.array(values, dtype=np.float64)
    distinct = np.unique(numbers)
    if edges is None and len(distinct) <= MAX_DISTINCT:
        places = np.searchsorted(distinct, numbers)
    else:
        limits = np.quantile(numbers, [0.25, 0.5, 0.75]) if edges is None else np.array(edges)
        places = np.searchsorted(limits, numbers, side="right")
    own = np.unique(places).tolist()
    inside = [numbers[places == place] for place in own]
    limits_of = [(float(one.min()), float(one.max())) for one in inside]
    texts = dict(zip(own, range_names(limits_of, unit), strict=True))
    return [texts[place] for place in places.tolist()], [*texts.values()]


def range_names(ranges: Sequence[tuple[float, float]], unit: str = "") -> list[str]:
    """A name for each of several ranges of numbers, which do not overlap; no two are equal.

    Integers are written in full, other numbers with 4 digits or as many as tell them apart.
    """
    names: list[str] = []
    for digits in (4, 6, 9, 12, 17):
        texts = [[number_text(limit, digits) for limit in one] for one in ranges]
        names = [(low if low == high else f"{low} to {high}") + unit for low, high in texts]
        if len({*names}) == len(names):
            break
    return names


def number_text(number: float, digits: int) -> str:
    """An integer in full, another number with so many significant digits."""
    return f"{number:.0f}" if number.is_integer() and abs(number) < 1e15 else f"{number:.{digits}g}"


def lower_tail(right: int, images: int, hits: int, count: int) -> float:
    """P(X <= right) of the right answers among `count` of `images`, `hits` of which are right."""
    wrong = images - hits
    lowest = max(0, count - wrong)
    if right < lowest:
        return 0.0
    if right * images >= hits * count:  # above the mean: the sum of the other side is the small one
        return 1.0 - lower_tail(count - right - 1, images, wrong, count)
    term = math.exp(
        _log_choose(hits, right) + _log_choose(wrong, count - right) - _log_choose(images, count)
    )
    total = 0.0
    for k in range(right, lowest - 1, -1):
        total += term
        if term <= 1e-18 * total:
            break
        term *= k * (wrong - count + k) / ((hits - k + 1) * (count - k + 1))
    return min(total, 1.0)


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
