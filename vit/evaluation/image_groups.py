"""Intervals where images of one group (a patient, a film) are alike and tell less than others.

    n' = p (1 - p) / v (z / t)²       v: variance of the share p by the sums of G groups,
                                         G / (G - 1) sum_g (hits_g - p images_g)² / images²
                                      t: Student's quantile of G - 1 degrees of freedom
    interval = Wilson's of the share p of n' images

n' is at most the number of images, and that of the groups where these do not differ.

Source: Franco, Little, Louis and Slud, "Comparative Study of Confidence Intervals for Proportions
in Complex Sample Surveys", Journal of Survey Statistics and Methodology 7, 2019.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vit.evaluation.wilson_interval import Z95, wilson_interval

FEWEST_DEGREES = 3.0
"""Degrees of freedom below which no interval is wider: of a class with three or four images."""
MIN_GROUPS = 5
"""Groups from which on there is an interval of a share: fewer tell nothing about others."""


def number_groups(names: Sequence[str]) -> Tensor:
    """The group of each image from 0, (images,), int64; images without a name are alone."""
    numbers: dict[str | int, int] = {}
    return torch.tensor(
        [numbers.setdefault(name or place, len(numbers)) for place, name in enumerate(names)]
    )


def count_groups(groups: Tensor) -> int:
    """Number of groups of `number_groups`."""
    return 1 + int(groups.max())


def share_interval(hits: Tensor, groups: Tensor | None) -> list[float]:
    """95 % interval of the share of `hits`, (images,); Wilson's of independent images.

    With fewer than 5 groups it is [0, 1].

    Args:
        hits: Whether each answer is right.
        groups: The group of each image; None of independent ones.
    """
    images, right = len(hits), int(hits.sum())
    if groups is None:
        return list(wilson_interval(right, images))
    number, share = count_groups(groups), right / images
    if number < MIN_GROUPS:
        return [0.0, 1.0]
    sums = torch.zeros(number, dtype=torch.float64)
    sums.index_add_(0, groups, hits.double() - share)
    variance = number / (number - 1) * float(sums.square().sum()) / images**2
    informative = share * (1 - share) / variance if variance else float(number)
    informative = min(informative, images) * (Z95 / student_quantile(number - 1)) ** 2
    return list(wilson_interval(share * informative, informative))


def student_quantile(degrees: float) -> float:
    """97.5 % quantile of Student's distribution, with at least FEWEST_DEGREES degrees of freedom.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", formula 26.7.5, 1964.
    """
    z, d = Z95, max(degrees, FEWEST_DEGREES)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / d + second / d**2 + third / d**3
