"""Whether one of two classifiers is better, where images of a group (a patient, a film) are alike.

    D_g = images of group g that only B gets right - those that only A gets right
    p   = P(|sum_g ± D_g| >= |sum_g D_g|), each sign with probability 1/2

The exact test of sign flips: without a difference, A and B may be exchanged within each group. With
groups of one image it is McNemar's test. The interval of the difference is that of
vit/evaluation/paired_comparison.py for the effective number of images (image_groups.py).

The smallest p of G groups is 2^(1 - G), so fewer than 6 show no difference at 5 %.

Source: Fisher, "The Design of Experiments", section 21, 1935.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.evaluation.image_groups import count_groups, effective_images, share_interval
from vit.evaluation.paired_comparison import PairedComparison


@dataclass(frozen=True)
class PairedGroups(PairedComparison):
    """Counts of two classifiers on the same images, of which those of a group are alike.

    Args:
        intervals: 95 % intervals of the accuracy of A and of B.
    """

    probability: float
    effective: float
    intervals: tuple[list[float], list[float]]

    @staticmethod
    def of_groups(a_right: Tensor, b_right: Tensor, groups: Tensor) -> "PairedGroups":
        """From whether each answer is right, and the group of each image, (images,) all."""
        gains = b_right.long() - a_right.long()
        number = count_groups(groups)
        sums = torch.zeros(number, dtype=torch.int64).index_add_(0, groups, gains)
        return PairedGroups(
            **{**vars(PairedComparison.of(a_right, b_right)), "groups": number},
            probability=sign_flip_test(sums.tolist()),
            effective=effective_images(gains, groups),
            intervals=(share_interval(a_right, groups), share_interval(b_right, groups)),
        )

    @property
    def p_value(self) -> float:
        """Probability of so large a difference where neither is better."""
        return self.probability

    @property
    def informative(self) -> float:
        """Number of independent images that say as much."""
        return self.effective

    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference; [-1, 1] of too few groups."""
        return (-1.0, 1.0) if self.few_groups() else super().interval()

    def expected_images(self, level: float) -> float:
        """As of independent images, times the images that tell as much as one of these."""
        return super().expected_images(level) * self.count / self.effective

    def fewest_groups(self, level: float) -> int:
        """The smallest number G with 2^(1 - G) < `level`."""
        return math.floor(2 - math.log2(level))

    def side(self, place: int) -> dict[str, Any]:
        """The scores of A (0) or B (1)."""
        return {**super().side(place), "top1_interval": self.intervals[place]}


def sign_flip_test(sums: list[int]) -> float:
    """P(|sum of ± s| >= |sum of s|) over all signs of `sums`, exact but for rounding."""
    sizes = Counter(abs(one) for one in sums if one)
    total, observed = sum(size * times for size, times in sizes.items()), abs(sum(sums))
    chances = np.ones(1)  # of the values -total, -total + 1, ..., total
    for size, times in sizes.items():
        spread = np.zeros(2 * size * times + 1)
        spread[:: 2 * size] = fair_coins(times)
        chances = np.convolve(chances, spread)
    values = np.abs(np.arange(-total, total + 1))
    return min(float(chances[values >= observed].sum()), 1.0)


def fair_coins(times: int) -> NDArray[np.float64]:
    """The probability of each number of heads from 0 to `times`."""
    logs = [math.lgamma(heads + 1) for heads in range(times + 1)]
    pairs = zip(logs, reversed(logs), strict=True)
    found = [logs[-1] - one - other - times * math.log(2) for one, other in pairs]
    chances: NDArray[np.float64] = np.exp(np.array(found))
    return chances
