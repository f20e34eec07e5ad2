"""Threshold above which a stated share of the answers is right, with a bound for finite samples.

    threshold = the smallest t with  P(right | confidence >= t) >= target

A threshold passes if, were its share of wrong answers at the limit, so few of them would occur
among the images above it at most in the allowed share of cases (an exact binomial test, Clopper and
Pearson 1934). Thresholds are tested from the strictest on until one fails, beginning at several
places that share the allowed error (fixed-sequence testing).

The answer may change with the threshold, as a node of a tree does (vit/class_tree.py): an image is
answered at thresholds up to one, and wrong at those up to another, which is no higher.

Where images come in groups, such as those of a patient, the share is that of the answers of a new
group, each of which counts the same, and the test is of the mean of the groups' shares of wrong
answers, which are in [0, 1] and else unknown (the Hoeffding-Bentkus bound). So a group proves no
more than an image does, whatever its size.

Source: Angelopoulos et al., "Learn then Test", sections 2 and 4, arXiv:2110.01052; Geifman and
El-Yaniv, "Selective Classification for Deep Neural Networks", arXiv:1705.08500; the bound: Bates et
al., "Distribution-Free, Risk-Controlling Prediction Sets", section 3.1, arXiv:2101.02703.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vit.evaluation.exact_tests import binomial_tail
from vit.evaluation.intervals import count_present, group_means

TARGET_PRECISIONS = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8)
"""Shares of right answers that are tried; the highest that is proven is promised."""
ALLOWED_ERROR = 0.01
"""Probability that the promise does not hold, over draws of the images. The share that is then
measured on as many other images is itself uncertain; with 0.01 it reaches the target for about 96
of 100 halves of the predictions of docs/trust.md, with 0.05 for 93."""
STARTS = 2
GROWTH = 1.01
"""Ratio of the images above one tested threshold and above the one before."""


class PrecisionThreshold(NamedTuple):
    """A confidence from which on answers are given."""

    threshold: float
    answered: float
    """Share of the images that reach it."""


def precision_threshold(
    confidences: Tensor,
    right: Tensor,
    target: float,
    *,
    error: float = ALLOWED_ERROR,
    groups: Tensor | None = None,
    wrong_from: Tensor | None = None,
    tested: Tensor | None = None,
) -> PrecisionThreshold | None:
    """The lowest threshold at which a share of `target` of the answers is right.

    Args:
        confidences: Probability of each answer, (images,); negative for one that is never given.
        right: Whether it is right at every threshold, (images,).
        error: Probability with which the share may be missed.
        wrong_from: The highest threshold at which an answer that changes with it is wrong,
            (images,); the confidence of answers that do not.
        tested: Values among which thresholds are tested, (images,), each at most the confidence;
            the confidences without.

    Returns:
        None if these images prove none: they are too few, or too many answers are wrong.
    """
    ordered, order = confidences.double().sort(descending=True, stable=True)
    highest = (confidences if wrong_from is None else wrong_from).double()
    highest = torch.where(right.bool(), -1.0, torch.minimum(highest, confidences.double()))[order]
    rising = highest.sort().values
    fewest = needed_images(target, error=error)
    values = ordered if tested is None else tested.double().sort(descending=True).values
    places = _counts(values[values >= 0], fewest if tested is None else 1)
    levels = values[torch.tensor(places, dtype=torch.int64) - 1]
    counts = torch.searchsorted(-ordered, -levels, right=True).tolist()
    own = torch.arange(len(ordered)) if groups is None else groups[order]
    pairs = [
        (level, count)
        for level, count in zip(levels.tolist(), counts, strict=True)
        if (count if groups is None else count_present(own[:count])) >= fewest
    ]

    def chance(level: float, count: int) -> float:
        """Bound of the probability of so few errors among the `count` answers at a threshold."""
        if groups is None:
            errors = len(rising) - int(torch.searchsorted(rising, level))
            return binomial_tail(errors, count, 1 - target)
        return mean_tail(group_means(highest[:count] >= level, own[:count]), 1 - target)

    best: tuple[float, int] | None = None
    for start in range(STARTS):
        first = start * len(pairs) // STARTS
        for pair in pairs[first:]:
            if chance(*pair) > error / STARTS:
                break
            best = pair if best is None else min(best, pair)
    if best is None:
        return None
    level, count = best
    return PrecisionThreshold(level, count / len(ordered))


def needed_images(target: float, *, error: float = ALLOWED_ERROR) -> int:
    """The fewest images, or groups of them, that prove a threshold, if all answers are right."""
    return math.ceil(math.log(error / STARTS) / math.log(target))


def _counts(ordered: Tensor, count: float) -> list[int]:
    """Numbers of images above tested thresholds, from `count` on; ties are never cut."""
    images, fewest = len(ordered), count
    if not images:
        return []
    found = []
    while count < images:
        found.append(round(count))
        count = max(count + 1, count * GROWTH)
    found.append(images)
    ends = torch.searchsorted(-ordered, -ordered[torch.tensor(found) - 1], right=True)
    return sorted({end for end in ends.tolist() if end >= fewest})


def mean_tail(shares: Tensor, limit: float) -> float:
    """Bound of P(mean <= that of `shares`) of as many values in [0, 1] with the mean `limit`."""
    number, mean = len(shares), float(shares.mean())
    if mean >= limit:
        return 1.0
    above = (1 - mean) * math.log((1 - mean) / (1 - limit))
    hoeffding = math.exp(-number * (above + (mean * math.log(mean / limit) if mean else 0.0)))
    most = math.ceil(number * mean - 1e-9)
    return min(hoeffding, math.e * binomial_tail(most, number, limit))
