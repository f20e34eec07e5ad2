"""95 % intervals of metrics, also where images of one group (a patient, a film) are alike.

Of a share, for images in groups, which tell less than others:

    n' = s² / v (z / t)²       s²: variance of the images' values, p (1 - p) of a share p
                               v: variance of their mean m by the sums of G groups,
                                  G / (G - 1) sum_g (sum_g values - m images_g)² / images²
                               t: Student's quantile of G - 1 degrees of freedom
    interval = Wilson's of the share p of n' images

n' is at most the number of images, that of the groups where these do not differ, and 0 of fewer
than 5 groups, which tell nothing about others.

Of other metrics, by the bootstrap, corrected for bias and skewness (BCa):

    draws    metrics m* of as many images, drawn from these with replacement
    z0       = Phi^-1(share of m* < m)                            m: of all images
    a        = sum d^3 / (6 (sum d^2)^(3/2)),  d: mean of the m_g minus m_g,
               m_g: of all images but those of part g             (the grouped jackknife)
    interval = quantiles Phi(z0 + (z0 + z) / (1 - a (z0 + z))) of m*,  z = -1.96 and 1.96

Groups are drawn and left out whole. docs/trust.md says how often the intervals hold the true value.
Four have none: those of fewer than 5 wrong answers, since most draws then lack what makes the true
value, and of scores that count right answers, of fewer than 5 of these; of scores that are means
over classes, with fewer than 20 images a class; of scores that are the same in all draws; and
calibration errors, sums of absolute values that are near 0 where scores are calibrated, which draws
cannot reach.

Source: Franco, Little, Louis and Slud, "Comparative Study of Confidence Intervals for Proportions
in Complex Sample Surveys", Journal of Survey Statistics and Methodology 7, 2019; Efron, "Better
Bootstrap Confidence Intervals", Journal of the American Statistical Association 82, 1987; Davison
and Hinkley, "Bootstrap Methods and their Application", section 5.3, 1997.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from vit.evaluation.exact_tests import Z95, wilson_interval

FEWEST_DEGREES = 3.0
"""Degrees of freedom below which no interval is wider: of a class with three or four images."""
ROUNDING = 1e-12
"""Variance of a mean, as a share of that of an image, up to which groups do not differ."""
MIN_GROUPS = 5
"""Groups from which on their images tell something about others."""
STUDENT_STEPS = 4000
"""Intervals of the integral of Student's density."""


def number_groups(names: Sequence[str]) -> Tensor:
    """The group of each image from 0, (images,), int64; images without a name are alone."""
    numbers: dict[str | int, int] = {}
    return torch.tensor(
        [numbers.setdefault(name or place, len(numbers)) for place, name in enumerate(names)]
    )


def count_groups(groups: Tensor) -> int:
    return 1 + int(groups.max())


def group_means(values: Tensor, groups: Tensor) -> Tensor:
    """Mean of the values, (images,), of each group that is there, (groups,), float64."""
    images = groups.bincount()
    return (groups.bincount(values.double()) / images)[images > 0]


def count_present(groups: Tensor) -> int:
    """Number of groups among some images of `number_groups`."""
    return int((groups.bincount() > 0).sum())


def share_interval(hits: Tensor, groups: Tensor | None) -> list[float]:
    """95 % interval of the share of `hits`, (images,); [0, 1] with fewer than 5 groups."""
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


def student_tails(t: float, degrees: float) -> float:
    """P(|T| >= t) of Student's distribution: with T = sqrt(degrees) tan x, x has the density
    cos(x)^(degrees - 1), which is integrated by Simpson's rule."""
    start = math.atan(t / math.sqrt(degrees))
    values = torch.linspace(start, math.pi / 2, STUDENT_STEPS + 1, dtype=torch.float64).cos()
    values = values.clamp(min=0.0).pow(degrees - 1)
    weights = torch.ones_like(values)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    tail = float((weights * values).sum()) * (math.pi / 2 - start) / STUDENT_STEPS / 3
    half = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(math.pi) / 2
    return min(2 * tail * math.exp(half), 1.0)


RESAMPLES, FEWEST_RESAMPLES = 1000, 200
MAX_DRAWN = 2 * 10**7
"""Images that all draws contain, from which on there are fewer draws."""
PARTS, FEWEST_PARTS = 200, 20
"""Parts of the images that the jackknife leaves out in turn; the smaller number of many images."""
CHUNK = 2 * 10**6
"""Images of the draws that are in memory at a time."""
MIN_ANSWERS = 5
"""Wrong answers from which on there are intervals, and right ones for scores that count these."""
MIN_BOOTSTRAP_GROUPS = 20
"""Groups of images from which on there are intervals by draws of groups."""
MIN_CLASS_IMAGES = 20
"""Mean number of images of a class from which on a mean over classes has an interval."""

Interval = list[float] | None
Statistics = Callable[[Tensor], Mapping[str, Tensor]]
"""Metrics of draws, (draws,) each, from the weights of their images, (draws, images)."""


def draw_weights(
    images: int, resamples: int, *, groups: Tensor | None = None, seed: int = 0
) -> Iterator[Tensor]:
    """How often each image is in each draw, in parts (resamples, images); `groups` are drawn
    whole."""
    generator = torch.Generator().manual_seed(seed)
    rows, units = max(1, CHUNK // images), images if groups is None else count_groups(groups)
    for first in range(0, resamples, rows):
        shape = (min(rows, resamples - first), units)
        drawn = torch.randint(units, shape, generator=generator)
        weights = torch.zeros(shape, dtype=torch.float64)
        weights.scatter_add_(1, drawn, torch.ones_like(weights))
        yield weights if groups is None else weights[:, groups]


def jackknife_weights(
    images: int, groups: Tensor | None = None, *, most: int = PARTS
) -> Iterator[Tensor]:
    """1 for all images but those of a part, of each part in turn, in pieces (parts, images).

    A part has whole `groups` of images. There are `most` parts, or 20 if that is more.
    """
    units = torch.arange(images) if groups is None else groups
    parts = min(count_groups(units), max(FEWEST_PARTS, min(most, PARTS, MAX_DRAWN // images)))
    rows = max(1, CHUNK // images)
    for first in range(0, parts, rows):
        left_out = torch.arange(first, min(first + rows, parts))
        yield (units % parts != left_out.unsqueeze(1)).double()


def jackknife_error(left_out: Tensor) -> float:
    """Standard error of a metric, from its values without each part of the images, (parts,)."""
    squares = float((left_out - left_out.mean()).square().sum())
    return math.sqrt(squares * (len(left_out) - 1) / len(left_out))


def bootstrap(
    images: int,
    statistics: Statistics,
    *,
    groups: Tensor | None = None,
    resamples: int = RESAMPLES,
    few: bool = False,
) -> dict[str, Interval]:
    """95 % intervals of metrics, the same for the same images; None if a draw has no value."""
    whole = statistics(torch.ones(1, images, dtype=torch.float64))
    if few or few_groups(groups):
        return dict.fromkeys(whole)
    resamples = max(FEWEST_RESAMPLES, min(resamples, MAX_DRAWN // images))
    draws, left_out = (
        [statistics(weights) for weights in parts]
        for parts in (
            draw_weights(images, resamples, groups=groups),
            jackknife_weights(images, groups),
        )
    )
    return {
        name: _bca(
            torch.cat([part[name] for part in draws]),
            value,
            torch.cat([part[name] for part in left_out]),
        )
        for name, value in whole.items()
    }


def _bca(draws: Tensor, whole: Tensor, left_out: Tensor) -> Interval:
    """The interval of one metric: of draws, of all images (1,), and without each group."""
    if not bool(draws.isfinite().all()) or float(draws.max() - draws.min()) < ROUNDING:
        return None
    normal, ends = NormalDist(), 1 / len(draws)
    below = float(((draws < whole).double() + (draws <= whole).double()).mean()) / 2
    bias = normal.inv_cdf(min(max(below, ends), 1 - ends))
    distances = left_out.mean() - left_out
    cubes, squares = float(distances.pow(3).sum()), float(distances.square().sum())
    skewness = cubes / (6 * squares**1.5) if squares > 0 else 0.0  # NaN > 0 is false
    shares = [
        normal.cdf(bias + (bias + z) / max(1 - skewness * (bias + z), ends)) for z in (-Z95, Z95)
    ]
    limits: list[float] = draws.quantile(torch.tensor(shares, dtype=torch.float64)).tolist()
    return limits


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Mean of the values of images, (images,), in each draw; `weights`, (draws, images)."""
    return weights @ values / weights.sum(dim=1)


def few_groups(groups: Tensor | None) -> bool:
    """Whether there are too few groups to draw from."""
    return groups is not None and count_groups(groups) < MIN_BOOTSTRAP_GROUPS
