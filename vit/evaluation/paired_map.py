"""Whether one of two multi-label networks is better, by their mean average precision (mAP).

    difference = mAP of B - mAP of A, on the same images
    s²         = (g - 1) / g sum (d_i - mean d)²      d_i: the difference without group i of images,
                                                      in g groups      (the grouped jackknife)
    p          = P(|T| >= |difference| / s),  T: Student's, with the degrees of freedom of a mean
                 over classes, at most g - 1
    interval   = difference ± t_0.975 s
    needed     = images ((z_0.975 + z_0.8) s / difference)²

Images that both networks rank alike change neither, so the error of the difference is smaller than
those of the two scores.

Source: jackknife: Efron, "The Jackknife, the Bootstrap and Other Resampling Plans", 1982; degrees
of freedom: Satterthwaite, as in vit/evaluation/multilabel_metrics.py.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vit.evaluation.bootstrap_intervals import Interval, jackknife_weights
from vit.evaluation.image_groups import (
    FEWEST_DEGREES,
    MIN_GROUPS,
    ROUNDING,
    count_groups,
    student_quantile,
)
from vit.evaluation.multilabel_metrics import (
    MAX_WORK,
    average_precisions,
    degrees_of_mean,
    map_interval,
)
from vit.evaluation.paired_comparison import LEVEL, POWER, PairedComparison

STEPS = 4000
"""Intervals of the integral of Student's density."""


class MapScores(NamedTuple):
    """The mean average precision of one network, which all its comparisons share."""

    value: float
    interval: Interval
    """Its 95 % interval; None where there is none."""
    left_out: Tensor
    """Average precision without each part of the images, (classes, parts)."""

    @staticmethod
    def of(scores: Tensor, targets: Tensor, groups: Tensor | None = None) -> "MapScores":
        """From probabilities, (images, classes); as for `PairedMap.between`."""
        parts = jackknife_weights(len(scores), groups, most=MAX_WORK // scores.numel())
        return MapScores(
            float(average_precisions(scores, targets).nanmean()),
            map_interval(scores, targets, groups),
            torch.cat([average_precisions(scores, targets, weights) for weights in parts], dim=1),
        )


@dataclass(frozen=True)
class PairedMap(PairedComparison):
    """Two multi-label networks on the same images; an answer is right where each class of it is.

    Args:
        intervals: Their 95 % intervals; None where there is none.
        error: Standard error of the difference; NaN where it is not known: fewer than 5 parts or
            groups of images, one without which no class is left, or none that changes the
            difference.
    """

    maps: tuple[float, float]
    intervals: tuple[Interval, Interval]
    error: float
    degrees: float

    score: ClassVar[str] = "map"
    words: ClassVar[str] = "mAP"

    @staticmethod
    def between(
        a: MapScores,
        b: MapScores,
        targets: Tensor,
        right: tuple[Tensor, Tensor],
        groups: Tensor | None = None,
    ) -> "PairedMap":
        """From the scores of both on the same images.

        Args:
            targets: 1 where an image has a class, (images, classes).
            right: Whether each answer has all classes right, (images,) both.
            groups: The group of each image, (images,); None of independent ones.
        """
        counts = vars(PairedComparison.of(*right))
        if groups is not None:
            counts = {**counts, "groups": count_groups(groups)}
        left_out = b.left_out - a.left_out
        means, parts = left_out.nanmean(dim=0), left_out.shape[1]
        finite = parts >= MIN_GROUPS and bool(means.isfinite().all())
        known = finite and float(means.max() - means.min()) > ROUNDING
        squares = float((means - means.mean()).square().sum()) if known else math.nan
        return PairedMap(
            **counts,
            maps=(a.value, b.value),
            intervals=(a.interval, b.interval),
            error=math.sqrt(squares * (parts - 1) / parts),
            degrees=max(min(degrees_of_mean(left_out, targets), parts - 1), FEWEST_DEGREES),
        )

    @property
    def difference(self) -> float:
        """mAP of B minus that of A."""
        return self.maps[1] - self.maps[0]

    @property
    def p_value(self) -> float:
        """Probability of so large a difference where neither is better; 1 without an error."""
        if math.isnan(self.error):
            return 1.0
        return student_tails(abs(self.difference) / self.error, self.degrees)

    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference; [-1, 1] without an error."""
        if math.isnan(self.error):
            return -1.0, 1.0
        half = student_quantile(self.degrees) * self.error
        return max(self.difference - half, -1.0), min(self.difference + half, 1.0)

    def images_needed(self, level: float = LEVEL) -> int | None:
        """As of right answers; None without an error too."""
        return super().images_needed(level) if self.error > 0 else None  # not of NaN

    def expected_images(self, level: float) -> float:
        """`images_needed` of a difference, by the formula above."""
        quantiles = NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(POWER)
        return self.count * (quantiles * self.error / self.difference) ** 2

    def fewest_groups(self, _level: float) -> int:
        """Those from which on there is an error."""
        return MIN_GROUPS

    def side(self, place: int) -> dict[str, Any]:
        """The scores of A (0) or B (1)."""
        right = (self.a_right, self.b_right)[place]
        return {
            "map": self.maps[place],
            "map_interval": self.intervals[place],
            "subset_accuracy": right / self.count,
        }


def student_tails(t: float, degrees: float) -> float:
    """P(|T| >= t) of Student's distribution: with T = sqrt(degrees) tan x, x has the density
    cos(x)^(degrees - 1), which is integrated by Simpson's rule."""
    start = math.atan(t / math.sqrt(degrees))
    values = torch.linspace(start, math.pi / 2, STEPS + 1, dtype=torch.float64).cos()
    values = values.clamp(min=0.0).pow(degrees - 1)
    weights = torch.ones_like(values)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    tail = float((weights * values).sum()) * (math.pi / 2 - start) / STEPS / 3
    half = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(math.pi) / 2
    return min(2 * tail * math.exp(half), 1.0)
