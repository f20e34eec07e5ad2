"""Metrics of predicted numbers with intervals, and half widths of conformal intervals.

    r2       = 1 - sum (true - predicted)² / sum (true - mean true)²
    spearman = correlation of the ranks; equal numbers share the mean of their ranks
    half width of a coverage = the ceil((n + 1) coverage)-th smallest |true - predicted|

predicted ± half width contains the number of an image that is drawn as these n with probability of
at least the coverage, and at most 1 / (n + 1) more where no two residuals are equal. Where images
come in groups, it is that of an image of a new group: an image of n_g counts 1 / n_g, and n is the
number of groups. All images are used, which a draw of one a group would not, and the bound holds
for few groups too, unlike that of pooled distributions (Dunn, Wasserman and Ramdas).

Source: Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", section 4.1, 2005; Lei
et al., "Distribution-Free Predictive Inference for Regression", section 2.2, arXiv:1604.04173;
groups: Lee, Barber and Willett, section 3, arXiv:2306.06342; Dunn et al., arXiv:1809.07441.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vit.evaluation.classification_metrics import Outcomes, summarize_classes
from vit.evaluation.fit_calibration import set_levels
from vit.evaluation.intervals import MIN_BOOTSTRAP_GROUPS, bootstrap, number_groups, weighted_mean
from vit.number_answers import COVERAGE, NumberAnswers

COVERAGES = (0.5, 0.8, 0.9, 0.95)
"""Coverages of conformal intervals that have a half width."""


def summarize_numbers(
    predicted: Tensor, true: Tensor, groups: Tensor | None = None, *, brief: bool = False
) -> dict[str, Any]:
    """Scores of predicted numbers, as plain numbers that JSON takes.

    An undefined score is None: `r2` and `spearman` of equal true numbers, as those of one image
    are, and `spearman` of equal predictions. Fewer than 20 images, or groups, have no intervals.

    Args:
        predicted: In units of the target, (images,) float64; none is NaN.
        true: As `predicted`.
        groups: The group of each image, (images,); None of independent images.
        brief: Without intervals.
    """
    errors, centred = predicted - true, true - true.mean()
    places = [  # of the first equal number in order
        torch.searchsorted(numbers.sort().values, numbers.contiguous())
        for numbers in (predicted, true)
    ]

    def statistics(weights: Tensor) -> dict[str, Tensor]:
        first, second = (_centred_ranks(place, weights) for place in places)
        spreads = [(weights * ranks.square()).sum(dim=1) for ranks in (first, second)]
        spearman = (weights * first * second).sum(dim=1) / (spreads[0] * spreads[1]).sqrt()
        squares = weighted_mean(errors.square(), weights)
        variance = weighted_mean(centred.square(), weights) - weighted_mean(centred, weights) ** 2
        return {
            "mae": weighted_mean(errors.abs(), weights),
            "rmse": squares.sqrt(),
            # the ranks of equal numbers are exactly 0 apart; their variance may be rounded
            "r2": torch.where(spreads[1] > 0, 1 - squares / variance, torch.nan),
            "spearman": spearman.clamp(-1, 1),
        }

    whole = statistics(torch.ones(1, len(true), dtype=torch.float64))
    scores = {name: float(value) for name, value in whole.items()}
    found: dict[str, Any] = {"count": len(true)}
    found |= {name: value if math.isfinite(value) else None for name, value in scores.items()}
    if brief:
        return found
    few = len(true) < MIN_BOOTSTRAP_GROUPS
    intervals = bootstrap(len(true), statistics, groups=groups, few=few)
    return found | {f"{name}_interval": limits for name, limits in intervals.items()}


def summarize_targets(
    answers: NumberAnswers,
    predicted: Tensor,
    true: Tensor,
    groups: Tensor | None = None,
    *,
    brief: bool = False,
) -> dict[str, Any]:
    """Scores of one target; of several the mean error by the standard deviations of the training
    images, and the scores of each under `questions`; with choices the mean `score` instead.

    `coverage` is the share of true numbers in the interval, `set_coverage` of true classes in the
    set, where the network has them. `score` is the `mean_score`.

    Args:
        predicted: Numbers in units, probabilities of classes, (images, outputs) float64.
        true: Numbers in units, indices of classes, (images, targets) float64; NaN where an image
            has none.
        groups, brief: As for `summarize_numbers`.
    """
    questions: dict[str, dict[str, Any]] = {}
    parts = zip(answers.names, answers.parts, answers.choices, strict=True)
    for target, (name, part, classes) in enumerate(parts):
        there = ~true[:, target].isnan()
        values, wanted = predicted[there, part], true[there, target]
        some = None if groups is None else number_groups([*map(str, groups[there].tolist())])
        level = answers.half_widths.get(COVERAGE, (None,) * (target + 1))[target]
        if classes:
            scores: dict[str, Any] = {"count": 0}
            if len(wanted):
                outcomes = Outcomes.of(values, wanted.long())
                scores = summarize_classes(outcomes, classes, some, brief=brief)
            held = values.gather(1, wanted.long()[:, None])[:, 0] >= 1 - (level or 0) - 1e-9
            held |= values.argmax(1) == wanted
        else:
            scores = summarize_numbers(values[:, 0], wanted, some, brief=brief)
            ends = [answers.interval(target, one, level or 0) for one in values[:, 0].tolist()]
            low, high = torch.tensor(ends, dtype=torch.float64).view(-1, 2).T
            held = (low <= wanted) & (wanted <= high)
        if level is not None and len(values):
            scores["set_coverage" if classes else "coverage"] = int(held.sum()) / len(values)
        questions[name] = scores
    if answers.classes:
        return {"count": len(true), "score": mean_score(questions), "questions": questions}
    if len(questions) == 1:
        return questions[answers.names[0]]
    standard = [torch.from_numpy(answers.standardise(one.numpy())) for one in (predicted, true)]
    mean = float((standard[0] - standard[1]).abs().nanmean(dim=0).nanmean())
    return {
        "count": len(true),
        "mae": mean if math.isfinite(mean) else None,
        "questions": questions,
    }


def mean_score(questions: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Mean over targets of the top-1 of a choice, and of the R2 of a number, at least 0; None where
    all are undefined."""
    known = [one["top1"] if "top1" in one else one.get("r2") for one in questions.values()]
    found = [max(one, 0.0) for one in known if one is not None]
    return sum(found) / len(found) if found else None


def _centred_ranks(places: Tensor, weights: Tensor) -> Tensor:
    """Ranks less their mean in draws, (draws, images), of numbers by their `places`, (images,)."""
    counts = torch.zeros_like(weights).index_add_(1, places, weights)
    ranks = (counts.cumsum(dim=1) - counts / 2)[:, places]
    return ranks - ((weights * ranks).sum(dim=1) / weights.sum(dim=1)).unsqueeze(1)


def conformal_half_widths(residuals: Tensor, groups: Tensor | None = None) -> dict[float, float]:
    """Half width of the interval of each of COVERAGES that the images, or groups, can prove.

    Args:
        residuals: |true - predicted| of images that the network has not learned from, (images,).
        groups: The group of each image, (images,); None of independent images.
    """
    levels = set_levels(residuals, COVERAGES, groups)
    pairs = zip(COVERAGES, levels, strict=True)
    return {coverage: level for coverage, level in pairs if level is not None}
