"""Intervals where images of one group (a patient, a film) are alike and tell less than others.

    n' = s² / v (z / t)²       s²: variance of the images' values, p (1 - p) of a share p
                               v: variance of their mean m by the sums of G groups,
                                  G / (G - 1) sum_g (sum_g values - m images_g)² / images²
                               t: Student's quantile of G - 1 degrees of freedom
    interval = Wilson's of the share p of n' images

n' is at most the number of images, that of the groups where these do not differ, and 0 of fewer
than 5 groups, which tell nothing about others.

Source: Franco, Little, Louis and Slud, "Comparative Study of Confidence Intervals for Proportions
in Complex Sample Surveys", Journal of Survey Statistics and Methodology 7, 2019.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vit.evaluation.wilson_interval import Z95, wilson_interval

FEWEST_DEGREES = 3.0
"""Degrees of freedom below which no interval is wider: of a class with three or four images."""
ROUNDING = 1e-12
"""Variance of a mean, as a share of that of an image, up to which groups do not differ."""
MIN_GROUPS = 5
"""Groups from which on their images tell something about others."""


def number_groups(names: Sequence[str]) -> Tensor:
    """The group of each image from 0, (images,), int64; images without a name are alone."""
    numbers: dict[str | int, int] = {}
    return torch.tensor(
        [numbers.setdefault(name or place, len(numbers)) for place, name in enumerate(names)]
    )


def count_groups(groups: Tensor) -> int:
    """Number of groups of `number_groups`."""
    return 1 + int(groups.max())


def group_means(values: Tensor, groups: Tensor) -> Tensor:
    """Mean of the values, (images,), of each group that is there, (groups,), float64."""
    images = groups.bincount()
    return (groups.bincount(values.double()) / images)[images > 0]


def count_present(groups: Tensor) -> int:
    """Number of groups among some images of `number_groups`."""
    return int((groups.bincount() > 0).sum())


def share_interval(hits: Tensor, groups: Tensor | None) -> list[float]:
    """95 % interval of the share of `hits`, (images,); Wilson's of independent images.

    With fewer than 5 groups it is [0, 1].

    Args:
        groups: The group of each image; None of independent ones.
    """
    images, right = len(hits), int(hits.sum())
    if groups is None:
        return list(wilson_interval(right, images))
    effective = effective_images(hits, groups)
    if not effective:
        return [0.0, 1.0]
    return list(wilson_interval(right / images * effective, effective))


def effective_images(values: Tensor, groups: Tensor) -> float:
    """Number of independent images whose mean value is as certain as that of these, (images,)."""
    number, images = count_present(groups), len(values)
    if number < MIN_GROUPS:
        return 0.0
    residuals = values.double() - values.double().mean()
    sums = groups.bincount(residuals)
    variance = number / (number - 1) * float(sums.square().sum()) / images**2
    spread = float(residuals.square().mean())
    effective = spread / variance if variance > ROUNDING * spread else float(number)
    return min(effective, images) * (Z95 / student_quantile(number - 1)) ** 2


def student_quantile(degrees: float) -> float:
    """97.5 % quantile of Student's distribution, with at least FEWEST_DEGREES degrees of freedom.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", formula 26.7.5, 1964.
    """
    z, d = Z95, max(degrees, FEWEST_DEGREES)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / d + second / d**2 + third / d**3
