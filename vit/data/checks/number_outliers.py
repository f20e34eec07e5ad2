"""Numbers of a list that may be wrong: far from all others, missing, or two of one image.

far    beyond 5 interquartile ranges from the quartiles; where all are above 0, and so may be
       learned as logarithms, their logarithms are beyond as well
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.data.checks.check_listing import DatasetListing
from vit.data.checks.image_stats import ImageStats
from vit.data.sources.dataset_problem import Problem, shared_property
from vit.data.sources.number_columns import constant_target
from vit.text import printable

RANGES = 5.0
"""Interquartile ranges from the quartiles from which on a number is far."""


def summarize_targets(listing: DatasetListing) -> list[dict[str, Any]]:
    """Name and count of each target, with unit and range or images by class; nothing without."""
    rows: list[dict[str, Any]] = []
    for name, unit, classes, values in zip(
        listing.targets, listing.units, listing.choices, columns_of(listing), strict=True
    ):
        known = values[~np.isnan(values)]
        if classes:
            counts = {one: int((known == place).sum()) for place, one in enumerate(classes)}
            rows.append({"name": name, "count": len(known), "classes": counts})
            continue
        ends = (known.min(), np.median(known), known.max()) if len(known) else (None,) * 3
        found = dict(zip(("min", "median", "max"), ends, strict=True))
        rows.append({"name": name, "unit": unit or "", "count": len(known), **found})
    return rows


def columns_of(listing: DatasetListing) -> NDArray[Any]:
    """The numbers of all images, (targets, images)."""
    rows = [one.numbers for one in listing.images]
    return np.array(rows, float).reshape(len(rows), len(listing.targets)).T


def text_of(value: float, classes: tuple[str, ...]) -> str:
    """A number of a target, or the class that it is the index of."""
    return classes[int(value)] if classes and not np.isnan(value) else f"{value:g}"


def number_problems(listing: DatasetListing, stats: Mapping[str, ImageStats]) -> list[Problem]:
    """Targets that are constant, and numbers that are missing or may be wrong."""
    paths, problems = [one.path for one in listing.images], list[Problem]()
    trained = np.array([one.split == listing.train_split for one in listing.images], bool)
    names = map(printable, listing.targets)
    for name, classes, values in zip(names, listing.choices, columns_of(listing), strict=True):
        missing, learned = np.isnan(values), values[trained & ~np.isnan(values)]
        empty = [paths[place] for place in missing.nonzero()[0]]
        problems += shared_property("no_number", empty, len(paths), f"have an empty cell in {name}")
        if text := constant_target(name, learned, classes):
            problems.append(Problem("one_number", text))
        elif not classes and (away := far(values)).any():
            low, high = np.quantile(values[~missing], [0.25, 0.75])
            problems += [
                Problem(
                    "far_number",
                    f"{name} is {values[place]:g}, far from the others: half of them are from "
                    f"{low:g} to {high:g}",
                    (paths[place],),
                )
                for place in away.nonzero()[0]
            ]
    copies: dict[bytes, dict[str, str]] = defaultdict(dict)
    for one in listing.images:
        if one.path in stats:
            texts = map(text_of, one.numbers, listing.choices)
            copies[stats[one.path].digest][one.path] = ", ".join(texts)
    for numbers in copies.values():
        if len({*numbers.values()}) > 1:
            text = f"the same file with {' and '.join(dict.fromkeys(numbers.values()))}; correct it"
            problems.append(Problem("two_numbers", text, (*numbers,), labels=(*numbers.values(),)))
    return problems


def far(values: NDArray[Any]) -> NDArray[Any]:
    """Which numbers are far from the others; NaN are not."""
    known = values[~np.isnan(values)]
    low, high = np.quantile(known, [0.25, 0.75])
    reach = RANGES * (high - low)
    beyond: NDArray[Any] = (values < low - reach) | (values > high + reach)
    if not reach:  # most are the same
        return np.zeros(len(values), bool)
    return beyond & far(np.log(values)) if known.min() > 0 and beyond.any() else beyond
