"""Multi-label metrics: average precision, F1, and thresholds of each class.

Holds a table of images x classes: 8 bytes a score and 1 a label, 450 MB for 50,000 x 1,000.
Undefined values (the average precision of a class without images; F1 of a class in no label and no
prediction) are NaN in tensors, null in JSON, and left out of means.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.evaluation.classification_metrics import (
    LEAST,
    calibration_error,
    chance_calibration_error,
    class_scores,
    debiased_error,
)
from vit.evaluation.intervals import (
    FEWEST_RESAMPLES,
    MAX_DRAWN,
    MIN_ANSWERS,
    Interval,
    bootstrap,
    count_groups,
    draw_weights,
    few_groups,
    jackknife_error,
    jackknife_weights,
    share_interval,
    student_quantile,
    weighted_mean,
)

DEFAULT_THRESHOLD = 0.5
"""Threshold of a class with too few images to choose one."""
MIN_IMAGES = 5
"""Images with a class, and without it, from which on a threshold is chosen."""
MAX_WORK = 10**9
"""Image scores that all resamples may read; about ten seconds."""
MAP_RESAMPLES = 300
"""Draws that the bias of the mean average precision is measured on."""
SMALLEST_SHARE = 1e-6
"""The centre of an interval is as far from 0 and from 1."""


class RankedImages(NamedTuple):
    """The images by the score of one class, from high to low; equal scores are one step."""

    scores: Tensor
    ends: Tensor
    """Index of the last image of each step, (steps,)."""
    order: Tensor
    """The images by score, (images,)."""
    hits: Tensor
    """Whether each of them has the class, float64, (images,)."""


def rank_images(scores: Tensor, targets: Tensor) -> RankedImages:
    """Rank images by `scores` of one class, (images,); `targets`, (images,), is 1 for the class."""
    ordered, order = scores.sort(descending=True, stable=True)
    last = torch.ones(len(ordered), dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    ends = last.nonzero().squeeze(1)
    return RankedImages(ordered[ends], ends, order, targets[order].double())


def average_precisions(scores: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Average precision of each class, sum of (R_n - R_(n-1)) P_n, as in scikit-learn, (classes,)
    float64.

    Precision P and recall R are those of the images down to score n; nothing is interpolated. With
    `weights`, (resamples, images), how often an image counts, it is (classes, resamples).
    """
    counts = torch.ones(1, len(scores), dtype=torch.float64) if weights is None else weights
    rows = []
    for column in zip(scores.unbind(1), targets.unbind(1), strict=True):
        ranked = rank_images(*column)
        ordered = counts[:, ranked.order]
        right = (ordered * ranked.hits).cumsum(1)[:, ranked.ends]
        predicted = ordered.cumsum(1)[:, ranked.ends]
        gains = right.diff(dim=1, prepend=right.new_zeros(len(right), 1))
        total = (gains * right / predicted.clamp(min=1)).sum(1)
        rows.append(total / right[:, -1])  # 0 / 0 is NaN
    found = torch.stack(rows)
    return found.squeeze(1) if weights is None else found


def map_interval(scores: Tensor, targets: Tensor, groups: Tensor | None = None) -> Interval:
    """95 % interval of the mean average precision m, on the scale of log(m / (1 - m)).

        log(c / (1 - c)) +- t s / (c (1 - c))
            c: m minus its bias, which is that of bootstrap draws against m
            s: standard error by the jackknife over parts of the images
            t: 97.5 % quantile of Student's distribution of (sum v)² / sum (v² / (n - 1)) degrees
               of freedom      v: variance of the average precision of a class over the draws,
                               n: images with the class

    docs/trust.md has its coverage, and that of the BCa interval, which is too narrow. None if it
    would take long (images x classes above 5,000,000), where a draw or a part has no class at all,
    where all of them have the same value, and with fewer than 20 groups of images; t has one degree
    of freedom less than `groups` at most.

    Source: logit intervals of average precision: Boyd, Eng and Page, "Area under the
    Precision-Recall Curve: Point Estimates and Confidence Intervals", ECML PKDD 2013; degrees of
    freedom: Satterthwaite, "An Approximate Distribution of Estimates of Variance Components",
    Biometrics Bulletin 2, 1946.
    """
    images = len(scores)
    resamples = min(MAX_WORK // scores.numel(), MAP_RESAMPLES)
    if resamples < FEWEST_RESAMPLES or images * FEWEST_RESAMPLES > MAX_DRAWN or few_groups(groups):
        return None
    both = draw_weights(images, resamples, groups=groups), jackknife_weights(images, groups)
    draws, parts = (
        torch.cat([average_precisions(scores, targets, weights) for weights in each], dim=1)
        for each in both
    )
    means, left_out = draws.nanmean(dim=0), parts.nanmean(dim=0)
    error = jackknife_error(left_out)
    if not bool(means.isfinite().all() and left_out.isfinite().all()) or error == 0:
        return None
    value = float(average_precisions(scores, targets).nanmean())
    centre = min(max(2 * value - float(means.mean()), SMALLEST_SHARE), 1 - SMALLEST_SHARE)
    middle = math.log(centre / (1 - centre))
    degrees = degrees_of_mean(draws, targets)
    if groups is not None:
        degrees = min(degrees, count_groups(groups) - 1)
    width = student_quantile(degrees) * error / (centre * (1 - centre))
    ends = torch.tensor([middle - width, middle + width], dtype=torch.float64)
    limits: list[float] = ends.sigmoid().tolist()
    return limits


def degrees_of_mean(draws: Tensor, targets: Tensor) -> float:
    """Degrees of freedom of the variance of a mean over classes; `draws`, (classes, draws).

    Only the ratios of the variances over the draws of the classes matter.
    """
    count = targets.double().sum(dim=0)
    several = (count > 1) & draws.isfinite().all(dim=1)
    if not several.any():
        return 1.0
    variances = draws[several].var(dim=1)
    squares = float((variances.square() / (count[several] - 1)).sum())
    return float(variances.sum()) ** 2 / squares if squares else 1.0


def f1_scores(answers: Tensor, targets: Tensor) -> Tensor:
    """2 right / (labelled + predicted) of each class, (classes,) float64."""
    right, labelled, predicted = _counts(answers, targets)
    return 2 * right / (labelled + predicted)


def _counts(answers: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each class: right predictions, images with the class, predictions; (classes,) float64."""
    answers, targets = answers.bool(), targets.bool()
    return (answers & targets).sum(0).double(), targets.sum(0).double(), answers.sum(0).double()


def nanmean(values: Tensor) -> float | None:
    """Mean of the values that are not NaN, or None."""
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else None


def choose_thresholds(probabilities: Tensor, targets: Tensor) -> tuple[list[float], list[int]]:
    """For each class the probability from which on it is predicted, so that F1 is the highest, and
    the numbers of the classes that keep 0.5.

    Half-way between the lowest score that is accepted and the next one, so that rounding changes no
    answer; of several the one nearest to 0.5. A class that fewer than 5 images have, or lack, keeps
    0.5.
    """
    thresholds, few = [], []
    for index, (scores, own) in enumerate(
        zip(probabilities.unbind(1), targets.unbind(1), strict=True)
    ):
        positives = int(own.sum())
        if min(positives, len(own) - positives) < MIN_IMAGES:
            few.append(index)
            thresholds.append(DEFAULT_THRESHOLD)
        else:
            ranked = rank_images(scores.double(), own)
            f1 = 2 * ranked.hits.cumsum(0)[ranked.ends] / (positives + ranked.ends + 1)
            below = torch.cat([ranked.scores[1:], ranked.scores.new_zeros(1)])
            cuts = ((ranked.scores + below) / 2)[f1 == f1.max()]
            thresholds.append(float(cuts[(cuts - DEFAULT_THRESHOLD).abs().argmin()]))
    return thresholds, few


def summarize_multilabel(
    probabilities: Tensor,
    targets: Tensor,
    classes: Sequence[str],
    thresholds: Sequence[float],
    groups: Tensor | None = None,
) -> dict[str, Any]:
    """Scores of at least one image, as plain numbers that JSON takes.

    `map` is over classes with an image; `macro_f1` over those that a label or an answer names, as
    scikit-learn's with zero_division=nan; both are None without any; `micro_f1` counts all
    decisions together; `subset_accuracy` is the share of images with every class right, `hamming`
    the share of wrong decisions, `loss` (also `nll`) the mean of binary cross-entropy over images
    and classes, `brier` that of the squared error, `ece` the distance between probability and share
    of yes over all decisions (`ece_chance` and `ece_debiased` as in `classification_metrics`).
    In `per_class`, undefined precision, recall and F1 are 0, and an undefined average precision is
    None. `map_interval` takes `groups` of images as independent, if given.
    """
    if not bool(probabilities.isfinite().all()):
        raise ValueError("a probability is not a finite number")
    probabilities = probabilities.double()
    answers = probabilities >= torch.tensor(thresholds, dtype=torch.float64)
    right, labelled, predicted = _counts(answers, targets)
    wrong = answers != targets.bool()
    decisions = float(labelled.sum() + predicted.sum())
    precisions = average_precisions(probabilities, targets)
    calibration = calibration_scores(probabilities, targets)
    columns = (right, labelled, predicted, precisions)
    return {
        "count": len(probabilities),
        "map": nanmean(precisions),
        "map_interval": map_interval(probabilities, targets, groups),
        "macro_f1": nanmean(f1_scores(answers, targets)),
        "micro_f1": 2 * float(right.sum()) / decisions if decisions else 0.0,
        "subset_accuracy": float((~wrong.any(dim=1)).double().mean()),
        "hamming": float(wrong.double().mean()),
        "loss": calibration["nll"],
        **calibration,
        "per_class": [
            {
                **class_scores(label, hits, count, answered),
                "average_precision": None if math.isnan(precision) else precision,
                "threshold": threshold,
            }
            for label, threshold, hits, count, answered, precision in zip(
                classes, thresholds, *(column.tolist() for column in columns), strict=True
            )
        ],
    }


def multilabel_intervals(
    probabilities: Tensor, targets: Tensor, decisions: Tensor, groups: Tensor | None = None
) -> dict[str, Interval]:
    """Intervals of scores that `summarize_multilabel` returns, as NAME_interval."""
    probabilities, truth = probabilities.double(), targets.double()
    inside = probabilities.clamp(LEAST, 1 - 2**-53)
    loss = F.binary_cross_entropy(inside, truth, reduction="none").mean(dim=1)
    brier = (probabilities - truth).square().mean(dim=1)
    wrong = (decisions.bool() != targets.bool()).double().mean(dim=1)
    right = (decisions.bool() & targets.bool()).double().sum(dim=1)
    named = decisions.double().sum(dim=1) + truth.sum(dim=1)

    def statistics(weights: Tensor) -> dict[str, Tensor]:
        return {
            "nll": weighted_mean(loss, weights),
            "brier": weighted_mean(brier, weights),
            "hamming": weighted_mean(wrong, weights),
            "micro_f1": 2 * (weights @ right) / (weights @ named).clamp(min=1),
        }

    few = int((wrong > 0).sum()) < MIN_ANSWERS
    found = bootstrap(len(probabilities), statistics, groups=groups, few=few)
    if int((right > 0).sum()) < MIN_ANSWERS:
        found["micro_f1"] = None
    found["subset_accuracy"] = share_interval(wrong == 0, groups)
    return {f"{name}_interval": limits for name, limits in found.items()}


def calibration_scores(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    """Log loss, Brier score and calibration errors over all decisions, (images, classes) each."""
    probabilities, truth = probabilities.double(), targets.double()
    loss = F.binary_cross_entropy(probabilities.clamp(LEAST, 1 - 2**-53), truth)
    error = calibration_error(probabilities.flatten(), truth.flatten())
    by_chance = chance_calibration_error(probabilities.flatten())
    return {
        "nll": float(loss),
        "brier": float((probabilities - truth).square().mean()),
        "ece": error,
        "ece_chance": by_chance,
        "ece_debiased": debiased_error(error, by_chance),
    }
