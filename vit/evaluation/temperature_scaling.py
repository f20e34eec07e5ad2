"""Temperature scaling of logits, with an exponent, by maximum likelihood on validation images.

    p = softmax(-((max z - z) / T)^b)                z: logits;  b = 1 is temperature scaling
    min over T, b    mean over images of  - sum_k t_k log p_k  +  (log b)² / (2 w² images)
                     t: the label, of which 1/(images + 2) is spread over all classes
                     w: PRIOR_WIDTH

Both keep the order of the classes. Label smoothing bounds the gap between the best logit and the
others, so that the scores of sure answers are all too low while those of unsure ones are right,
which no temperature mends; b > 1 does. The second term is the prior that log b is normal around 0,
without which few images give exponents that other images contradict. At each exponent the loss is
convex in T^-b, so the best T is the root of its slope. The spread share keeps T above 0 where every
answer is right (Platt, "Probabilistic Outputs for Support Vector Machines", section 2.2, 1999). The
error on other images is measured by cross-fitting: each fifth of the images, or of their groups, is
scaled by a fit to the other four.

Source: temperature: Guo et al., section 4.2, arXiv:1706.04599; functions that keep the order:
Rahimi et al., arXiv:2003.06820.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.evaluation.intervals import count_present

FOLDS = 5
MIN_IMAGES = 50
"""Images from which on a scaling is fitted."""
LARGEST_SCALE = 100.0
EXPONENTS = (0.5, 3.0)
PRIOR_WIDTH = 0.5
"""Standard deviation of the logarithm of the exponent before any image is seen."""
EXPONENT_STEPS = 14
"""Steps of the search between EXPONENTS, each of which shrinks the interval to 0.62."""
STEPS = 100
TOLERANCE = 1e-10
MAX_LOGITS = 1 << 22
"""Logits that a fit reads; of more images, evenly spread ones are read."""
CHUNK = 1 << 21
"""Logits of one pass, 16 MB in float64."""


class Scaling(NamedTuple):
    """Divisor of the gaps between logits, and the power that they are raised to."""

    temperature: float = 1.0
    exponent: float = 1.0


class FittedTemperature(NamedTuple):
    """The scaling of a network's logits, and what is expected of it on other images."""

    scaling: Scaling
    """Fitted on all images; without effect if that is not better."""
    held_out: Tensor
    """Logits of each image at the scaling that the other folds give, (images, classes) float64."""
    loss_before: float
    """Negative log likelihood of the raw scores."""
    loss_after: float
    """The same of `held_out`."""


def scale_logits(logits: Tensor, temperature: float, exponent: float = 1.0) -> Tensor:
    """-((max z - z) / T)^b, and z / T where b is 1; (images, classes) -> the same"""
    if exponent == 1:
        return logits / temperature
    gaps = logits.amax(dim=1, keepdim=True) - logits
    return -((gaps / temperature) ** exponent)


def fit_temperature(
    logits: Tensor, targets: Tensor, groups: Tensor | None = None
) -> FittedTemperature | None:
    """Fit a scaling, and measure by cross-fitting whether it is worth having.

    Args:
        targets: Labels, (images,); or of a multi-label network multi-hot rows, (images, classes),
            whose sigmoids have no exponent.
        groups: The group of each image, (images,), such as a patient, all of whose images are in
            one fold; None of independent images.

    Returns:
        None without images, of one class, or if a logit is not finite. The temperature is 1 of
        fewer than 50 images and where the likelihood of held-out images does not improve, and so is
        the exponent.
    """
    images = len(logits)
    one_class = targets.ndim == 1 and logits.shape[1] < 2
    if not images or one_class or not bool(logits.isfinite().all()):
        return None
    before = mean_loss(logits, targets)
    unscaled = FittedTemperature(Scaling(), logits.double(), before, before)
    if images < MIN_IMAGES:
        return unscaled
    folds = fold_numbers(images, groups)
    fit = best_temperature if targets.ndim == 2 else best_scaling
    held_out = torch.empty_like(logits, dtype=torch.float64)
    for fold in range(FOLDS):
        rest = folds != fold
        found = fit(logits[rest], targets[rest])
        held_out[~rest] = scale_logits(logits[~rest].double(), *found)
    after = mean_loss(held_out, targets)
    if after < before:
        return FittedTemperature(fit(logits, targets), held_out, before, after)
    return unscaled


def fold_numbers(images: int, groups: Tensor | None = None) -> Tensor:
    """The fold of each image, (images,); the same at every call."""
    if groups is None or count_present(groups) < 2:
        groups = torch.arange(images)
    number = 1 + int(groups.max())
    return (torch.randperm(number, generator=torch.Generator().manual_seed(0)) % FOLDS)[groups]


def best_temperature(logits: Tensor, targets: Tensor) -> Scaling:
    """The temperature of the smallest loss; arguments as for `fit_temperature`."""
    logits, targets = _subset(logits, targets)
    slope = _sigmoid_slope if targets.ndim == 2 else _softmax_slope
    return Scaling(1 / _root(lambda scale: slope(logits, targets, scale)[:2]))


def best_scaling(logits: Tensor, labels: Tensor) -> Scaling:
    """Temperature and exponent of the smallest loss, which includes the prior of the exponent."""
    logits, labels = _subset(logits, labels)
    weight = 1 / (2 * PRIOR_WIDTH**2 * len(labels))
    scale = 1.0

    def loss(power: float) -> float:
        nonlocal scale
        scaled = scale_logits(logits.double(), 1.0, math.exp(power))
        scale = _root(lambda at: _softmax_slope(scaled, labels, at)[:2], start=scale)
        return _softmax_slope(scaled, labels, scale)[2] + weight * power**2

    ratio = (math.sqrt(5) - 1) / 2
    low, high = (math.log(end) for end in EXPONENTS)
    first, second = high - ratio * (high - low), low + ratio * (high - low)
    losses = loss(first), loss(second)
    for _ in range(EXPONENT_STEPS):
        if losses[0] < losses[1]:
            high, second = second, first
            first = high - ratio * (high - low)
            losses = loss(first), losses[0]
        else:
            low, first = first, second
            second = low + ratio * (high - low)
            losses = losses[1], loss(second)
    middle = (low + high) / 2
    loss(middle)
    exponent = math.exp(middle)
    return Scaling(scale ** (-1 / exponent), exponent)


def mean_loss(logits: Tensor, targets: Tensor) -> float:
    """Mean negative log likelihood; arguments as for `fit_temperature`."""
    total = 0.0
    for part in _chunks(logits):
        if targets.ndim == 1:
            total += float(
                F.cross_entropy(logits[part].double(), targets[part].long(), reduction="sum")
            )
        else:
            truth = targets[part].double()
            loss = F.binary_cross_entropy_with_logits(
                logits[part].double(), truth, reduction="none"
            )
            total += float(loss.mean(dim=1).sum())
    return total / len(logits)


def _root(slope: Callable[[float], tuple[float, ...]], *, start: float = 1.0) -> float:
    """The scale where a rising `slope`, given with its derivative, is 0; Newton's method."""
    low, high, scale = 1 / LARGEST_SCALE, LARGEST_SCALE, start
    for _ in range(STEPS):
        value, rise = slope(scale)
        low, high = (low, scale) if value > 0 else (scale, high)
        guess = scale - value / rise if rise > 0 else math.inf
        following = guess if low < guess < high else math.sqrt(low * high)
        if abs(following - scale) <= TOLERANCE * scale:
            break
        scale = following
    return scale


def _softmax_slope(logits: Tensor, labels: Tensor, scale: float) -> tuple[float, float, float]:
    """Derivatives of the loss by the scale: E_p[z] - E_t[z], and the variance of z; and the loss.

    z are the logits minus the largest of their image.
    """
    spread = 1 / (len(logits) + 2)
    first = second = loss = 0.0
    for part in _chunks(logits):
        z = logits[part].double()
        z = z - z.amax(dim=1, keepdim=True)
        logs = (scale * z).log_softmax(dim=1)
        p, own = logs.exp(), labels[part, None].long()
        mean = (p * z).sum(dim=1)
        expected, log_likelihood = (
            (1 - spread) * values.gather(1, own).squeeze(1) + spread * values.mean(dim=1)
            for values in (z, logs)
        )
        first += float((mean - expected).sum())
        loss -= float(log_likelihood.sum())
        second += float((p * z * z).sum() - (mean * mean).sum())
    return first / len(logits), second / len(logits), loss / len(logits)


def _sigmoid_slope(logits: Tensor, targets: Tensor, scale: float) -> tuple[float, float]:
    """The same derivatives for independent classes, with Platt's targets."""
    positives = float(targets.sum())
    yes, no = (positives + 1) / (positives + 2), 1 / (targets.numel() - positives + 2)
    first = second = 0.0
    for part in _chunks(logits):
        z = logits[part].double()
        p = (scale * z).sigmoid()
        t = torch.where(targets[part].bool(), yes, no).double()
        first += float(((p - t) * z).sum())
        second += float((p * (1 - p) * z * z).sum())
    return first / logits.numel(), second / logits.numel()


def _subset(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """At most MAX_LOGITS logits, and their targets."""
    step = max(1, math.ceil(logits.numel() / MAX_LOGITS))
    return logits[::step], targets[::step]


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of the images that need little memory."""
    size = max(1, CHUNK // max(1, logits.shape[1]))
    return [slice(first, first + size) for first in range(0, len(logits), size)]
