"""Accuracy on sources of images (cameras, days, folders) that a network has not learned from.

Of the images of new sources (1), and of the validation images of sources that were trained on (0):

    p  = share of right answers on n images, n_g of source g
    v  = p (1 - p) / n + t² sum_g n_g² / n²        variance of p, if sources are drawn as these are
    t² = variance of the accuracy between sources

New sources are not easier than those that were trained on: the difference p0 - p1 that is expected
of others is exponential, MEAN_LOSS on average, and with d as the one that was seen, whose variance
is v0 + v1, the expectation is

    E  = mean of a normal distribution of mean d - (v0 + v1) / MEAN_LOSS above 0
    p* = p1 + v1 / (v0 + v1) (d - E), in [0, 1]

Of few sources much of d is chance: p* is nearer to what a set of other sources gives than p1
(benchmarks/new_sources.py). Its interval is Wilson's of n' = p* (1 - p*) / v* (z / q)² images, with
the variance v* of p* and of as many other sources, and Student's quantile q. The fewer sources, the
wider it is.

Of images that stand for new sources by their background, each is a source. In v, p is (hits + 1) /
(n + 2), since right answers alone are not certain. Of one source, with nothing known of others, n'
is 1. t² is pooled over both kinds of sources, numerators and denominators; sources of one image
each are independent images, and have none:

    t² = max(0, sum_g n_g (p_g - p)² - (G - 1) w)  /  (n - sum_g n_g² / n)
    w  = sum_g n_g p_g (1 - p_g) / (n - G)         variance within sources

Source: DerSimonian and Laird, "Meta-analysis in Clinical Trials", Controlled Clinical Trials 7,
1986; Higgins, Thompson and Spiegelhalter, "A Re-evaluation of Random-effects Meta-analysis",
Journal of the Royal Statistical Society A 172, 2009.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vit.data.sources.image_sources import BACKGROUND, MIN_NEW
from vit.evaluation.exact_tests import Z95, wilson_interval
from vit.evaluation.intervals import number_groups, student_quantile

MEAN_LOSS = 0.05
"""Mean loss of accuracy on new sources that is expected before any is seen."""
FAR = 6.0
"""Standard deviations from which on the tail of a normal distribution is taken as exponential."""


class NewSources(NamedTuple):
    """Answers for images of new sources."""

    images: Tensor
    """Which of the images they are, (images,), bool."""
    share: float
    """Share of right answers that is expected of new sources."""
    known: float | None
    """Share of right answers for the other images; None without."""
    effective: float
    """Number of independent images whose share is as certain."""
    sources: int
    """Number of new sources; 0 of images that stand for them by their background."""
    by: str
    """The property that tells sources apart."""

    def scores(self) -> dict[str, Any]:
        """Plain numbers that JSON takes."""
        return {
            "top1": self.share,
            "known_top1": self.known,
            "top1_interval": [*wilson_interval(self.share * self.effective, self.effective)],
            "images": int(self.images.sum()),
            "sources": self.sources,
            "by": self.by,
        }


def measure_new_sources(
    right: Sequence[bool | None], sources: Sequence[str], new: Sequence[bool]
) -> NewSources | None:
    """Accuracy on new sources; None of fewer than MIN_NEW images.

    Args:
        right: Whether the answer of each image is right; None without an answer or a label.
        sources: The source of each image, empty if it is not known, as of `find_sources`.
        new: Whether no training image is of its source.
    """
    hits = torch.tensor([bool(hit) for hit in right])
    answered = torch.tensor([hit is not None for hit in right])
    is_new = answered & torch.tensor(new, dtype=torch.bool)
    if int(is_new.sum()) < MIN_NEW:
        return None
    source = next(name for name, one in zip(sources, is_new.tolist(), strict=True) if one)
    by, rest = source.partition(":")[0], answered & ~is_new
    if by == BACKGROUND:  # both parts are independent images
        groups, known = torch.arange(len(hits)), rest
    else:
        groups = number_groups(sources)
        known = rest & torch.tensor([bool(name) for name in sources])
    parts = [part for part in (is_new, known) if bool(part.any())]
    found = torch.tensor([_spread(hits[part], groups[part]) for part in parts]).double().sum(dim=0)
    spread, weight, degrees = found.tolist()
    between = max(0.0, spread) / weight if weight > 0 else 0.0
    share, images = float(hits[is_new].double().mean()), int(is_new.sum())
    before = float(hits[rest].double().mean()) if bool(rest.any()) else None
    number = len({*groups[is_new].tolist()})
    others = between * _concentration(groups[is_new])  # of as many other sources
    variance = _noise(hits[is_new]) + others
    if bool(known.any()):
        certainty = _noise(hits[known]) + between * _concentration(groups[known])
        p0 = float(hits[known].double().mean())
        share, variance = _expected(p0, certainty, share, variance)
    noise = share * (1 - share)
    effective = float(images if noise else number)
    if not degrees:
        effective = float(number)
    elif noise:
        quantile = Z95 / student_quantile(degrees)
        effective = min(noise / (variance + others) * quantile**2, images)
    return NewSources(is_new, share, before, effective, 0 if by == BACKGROUND else number, by)


def _noise(hits: Tensor) -> float:
    """Variance of a share of right answers, of independent images."""
    share = (float(hits.sum()) + 1) / (len(hits) + 2)
    return share * (1 - share) / len(hits)


def _concentration(groups: Tensor) -> float:
    """sum_g n_g² / n², 1 over the number of sources if all have as many images."""
    return float(groups.bincount().double().square().sum()) / len(groups) ** 2


def _expected(p0: float, v0: float, p1: float, v1: float) -> tuple[float, float]:
    """p* and its variance; see the module."""
    total, seen = v0 + v1, p0 - p1
    normal, deviation = NormalDist(), math.sqrt(total)
    limit = (total / MEAN_LOSS - seen) / deviation
    if limit > FAR:  # of the tail, which is exponential there
        expected, spread = deviation / limit, total / limit**2
    else:
        slope = normal.pdf(limit) / normal.cdf(-limit)
        expected = deviation * (slope - limit)
        spread = total * (1 + limit * slope - slope**2)
    weight = v1 / total
    mean = min(max(p1 + weight * (seen - expected), 0.0), 1.0)
    return mean, v0 * weight + weight**2 * spread


def _spread(hits: Tensor, groups: Tensor) -> tuple[float, float, int]:
    """Of some sources: numerator and denominator of t², and their number less one."""
    counts = groups.bincount().double()
    present = counts > 0
    counts, means = counts[present], groups.bincount(hits.double())[present] / counts[present]
    images, degrees = len(hits), len(counts) - 1
    if images == len(counts):
        return 0.0, 0.0, degrees
    within = float((counts * means * (1 - means)).sum()) / (images - len(counts))
    squares = float((counts * (means - hits.double().mean()).square()).sum())
    return squares - degrees * within, images - float(counts.square().sum()) / images, degrees
