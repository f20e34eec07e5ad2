"""Threshold above which a stated share of the answers is right, with a bound for finite samples.

    threshold = the smallest t with  P(right | confidence >= t) >= target

A threshold passes if, were its share of wrong answers at the limit, so few of them would occur
among the images above it at most in the allowed share of cases (an exact binomial test, Clopper and
Pearson 1934). Thresholds are tested from the strictest on until one fails, beginning at several
places that share the allowed error (fixed-sequence testing).

Source: Angelopoulos et al., "Learn then Test", sections 2 and 4, arXiv:2110.01052; Geifman and
El-Yaniv, "Selective Classification for Deep Neural Networks", arXiv:1705.08500.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

TARGET_PRECISION = 0.98
ALLOWED_ERROR = 0.01
"""Probability that the promise does not hold, over draws of the images. The share that is then
measured on as many other images is itself uncertain; with 0.01 it reaches the target for about 96
of 100 halves of the predictions of docs/trust.md, with 0.05 for 93."""
STARTS = 2
GROWTH = 1.01
"""Ratio of the images above one tested threshold and above the one before."""
LOWER_TARGETS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
"""Shares that are tried where images do not prove the target."""


class PrecisionThreshold(NamedTuple):
    """A confidence from which on answers are given."""

    threshold: float
    answered: float
    """Share of the images that reach it."""


def precision_threshold(
    confidences: Tensor, right: Tensor, target: float, *, error: float = ALLOWED_ERROR
) -> PrecisionThreshold | None:
    """The lowest threshold at which a share of `target` of the answers is right.

    Args:
        confidences: Probability of each answer, (images,); negative for one that is never given.
        right: Whether each answer is right, (images,).
        target: The share, in (0, 1).
        error: Probability with which the share may be missed.

    Returns:
        None if these images prove no threshold: they are too few, or too many answers are wrong.
    """
    ordered, order = confidences.double().sort(descending=True, stable=True)
    errors = (~right.bool())[order].long().cumsum(0).tolist()
    counts = _counts(ordered[ordered >= 0], target, error / STARTS)
    best = 0
    for start in range(STARTS):
        first = start * len(counts) // STARTS
        for count in counts[first:]:
            if binomial_tail(errors[count - 1], count, 1 - target) > error / STARTS:
                break
            best = max(best, count)
    if not best:
        return None
    return PrecisionThreshold(float(ordered[best - 1]), best / len(ordered))


def highest_provable(confidences: Tensor, right: Tensor, target: float) -> float | None:
    """The highest of LOWER_TARGETS below `target` that has a threshold; None if none has.

    They divide the allowed error, so a threshold for the one that is found keeps its promise.

    Args:
        confidences, right: As for `precision_threshold`.
        target: The share that these images do not prove.
    """
    error = ALLOWED_ERROR / len(LOWER_TARGETS)
    lower = (each for each in LOWER_TARGETS if each < target)
    return next((t for t in lower if precision_threshold(confidences, right, t, error=error)), None)


def needed_images(target: float, *, error: float = ALLOWED_ERROR) -> int:
    """The fewest images that prove a threshold, if all answers are right."""
    return math.ceil(math.log(error / STARTS) / math.log(target))


def _counts(ordered: Tensor, target: float, error: float) -> list[int]:
    """Numbers of images above the thresholds that are tested, rising; ties are never cut."""
    images = len(ordered)
    if not images:
        return []
    count: float = math.ceil(math.log(error) / math.log(target))
    found = []
    while count < images:
        found.append(round(count))
        count = max(count + 1, count * GROWTH)
    found.append(images)
    ends = torch.searchsorted(-ordered, -ordered[torch.tensor(found) - 1], right=True)
    enough = math.ceil(math.log(error) / math.log(target))
    return sorted({end for end in ends.tolist() if end >= enough})


def binomial_tail(successes: int, trials: int, share: float) -> float:
    """P(X <= successes) of a binomial distribution with `share` in (0, 1)."""
    if successes >= trials:
        return 1.0
    logs = (math.log(share), math.log1p(-share), math.lgamma(trials + 1))
    terms = (
        logs[2] - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * logs[0]
        + (trials - k) * logs[1]
        for k in range(successes + 1)
    )  # fmt: skip
    return min(math.fsum(map(math.exp, terms)), 1.0)
