"""Classification metrics: accuracy with intervals, calibration, and scores of each class.

Everything is computed in float64 from six numbers an image and sums over bins (`Outcomes`): a large
dataset needs no table of images x classes.

Source: classwise calibration error: Kull et al., section 2, arXiv:1910.12656; adaptive: Nguyen and
O'Connor, section 3, arXiv:1508.05154; the error of calibrated scores by chance: Vaicenavicius et
al., arXiv:1902.06977, and Roelofs et al., arXiv:2012.08668, which measure it by simulation; Brier,
"Verification of Forecasts Expressed in Terms of Probability", Monthly Weather Review 78, 1950.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vit.evaluation.statistical_tests import wilson_interval

BINS = 15
LEAST = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Outcomes:
    """What all scores are computed from; tensors of shape (images,) but the last.

    Args:
        ranks: Rank of the true class by probability, from 0.
        class_gaps: Sums over images of (has the class) - (its probability), by bins of that
            probability, (bins, classes).
    """

    labels: Tensor
    answers: Tensor
    confidences: Tensor
    ranks: Tensor
    likelihoods: Tensor
    squares: Tensor
    class_gaps: Tensor

    @staticmethod
    def of(probabilities: Tensor, labels: Tensor) -> "Outcomes":
        """Outcomes of `probabilities`, (images, classes), under the true `labels`, (images,)."""
        if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
            raise ValueError(
                f"probabilities {tuple(probabilities.shape)} and labels {tuple(labels.shape)}: "
                "need (images, classes) and (images,)"
            )
        probabilities, labels = probabilities.double(), labels.long()
        classes = probabilities.shape[1]
        if bool(((labels < 0) | (labels >= classes)).any()):
            raise ValueError(f"labels must be from 0 to {classes - 1}, one of {classes} classes")
        if not bool(probabilities.isfinite().all()):
            raise ValueError("a probability is not a finite number")
        order = ranking(probabilities)
        places = order.argsort(dim=1)
        own = labels.unsqueeze(1)
        answers = order[:, 0].clone()  # a view would keep the whole ranking in memory
        return Outcomes(
            labels=labels,
            answers=answers,
            confidences=probabilities.gather(1, answers.unsqueeze(1)).squeeze(1),
            ranks=places.gather(1, own).squeeze(1),
            likelihoods=probabilities.gather(1, own).squeeze(1),
            squares=probabilities.square().sum(dim=1),
            class_gaps=class_gaps(probabilities, labels),
        )

    def confusion(self, classes: Sequence[str]) -> dict[str, dict[str, int]]:
        """Number of images by class and answer; pairs without an image are left out."""
        found: dict[str, dict[str, int]] = {}
        pairs = Counter(zip(self.labels.tolist(), self.answers.tolist(), strict=True))
        for (label, answer), count in sorted(pairs.items()):
            found.setdefault(classes[label], {})[classes[answer]] = count
        return found

    @staticmethod
    def cat(parts: Sequence["Outcomes"]) -> "Outcomes":
        """All images of `parts`, in order; `parts` is not empty."""
        *names, sums = [field.name for field in fields(Outcomes)]
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        columns[sums] = torch.stack([getattr(part, sums) for part in parts]).sum(dim=0)
        return Outcomes(**columns)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class CalibratedOutcomes:
    """Outcomes of calibrated scores."""

    scaling: tuple[float, float]
    outcomes: Outcomes
    held_out: Outcomes


def ranking(probabilities: Tensor) -> Tensor:
    """Classes from the most to the least probable, (images, classes); of equal ones the first.

    The one rule for ties, which bf16 logits have, so that metrics and shown labels agree.
    """
    return probabilities.sort(dim=1, descending=True, stable=True).indices


def summarize(outcomes: Outcomes, classes: Sequence[str]) -> dict[str, Any]:
    """Scores of at least one image, as plain numbers that JSON takes; shares are in [0, 1].

    Classes that the data lacks follow scikit-learn's defaults: `macro_f1` is the mean over the
    classes that occur among labels or answers, `balanced_accuracy` over those among labels; an
    undefined precision, recall or f1 is 0. `per_class` lists every class of the model; one
    without an image has count 0.
    """
    count = len(outcomes)
    if count == 0:
        raise ValueError("no image to score")
    right = int((outcomes.ranks == 0).sum())
    hits, labelled, answered = (
        part.bincount(minlength=len(classes)).tolist()
        for part in (outcomes.labels[outcomes.ranks == 0], outcomes.labels, outcomes.answers)
    )
    per_class = [*map(class_scores, classes, hits, labelled, answered)]
    seen = [row for row, times in zip(per_class, answered, strict=True) if row["count"] or times]
    recalls = [row["recall"] for row in per_class if row["count"]]
    loss = float(-outcomes.likelihoods.clamp(min=LEAST).log().mean())
    hit = outcomes.ranks == 0
    error = calibration_error(outcomes.confidences, hit)
    by_chance = chance_calibration_error(outcomes.confidences)
    return {
        "count": count,
        "top1": right / count,
        "top5": int((outcomes.ranks < 5).sum()) / count,
        "top1_interval": list(wilson_interval(right, count)),
        "loss": loss,
        "nll": loss,
        "brier": float((outcomes.squares - 2 * outcomes.likelihoods).mean()) + 1,
        "macro_f1": math.fsum(row["f1"] for row in seen) / len(seen),
        "balanced_accuracy": math.fsum(recalls) / len(recalls),
        "ece": error,
        "ece_chance": by_chance,
        "ece_debiased": debiased_error(error, by_chance),
        "ece_adaptive": adaptive_calibration_error(outcomes.confidences, hit),
        "ece_classwise": float(outcomes.class_gaps.abs().sum()) / (count * len(classes)),
        "per_class": per_class,
    }


def class_scores(label: str, hits: float, count: float, answered: float) -> dict[str, Any]:
    """Scores of one class; undefined ones are 0."""
    return {
        "label": label,
        "count": int(count),
        "precision": hits / answered if answered else 0.0,
        "recall": hits / count if count else 0.0,
        "f1": 2 * hits / (count + answered) if count + answered else 0.0,
    }


def calibration_error(confidences: Tensor, right: Tensor) -> float:
    """Mean distance between confidence and accuracy, over equally wide bins of confidence.

    A bin contains its upper edge. Bins weigh by their images.

    Args:
        confidences: Probability of each answer, (images,).
        right: Whether each answer is right, (images,).

    Source: Guo et al., "On Calibration of Modern Neural Networks", section 2, arXiv:1706.04599.
    """
    return _mean_gap(confidences, right, bin_of(confidences))


def chance_calibration_error(probabilities: Tensor) -> float:
    """`calibration_error` that scores have by chance on average if they are perfectly calibrated.

        sum over bins of sqrt(2/pi v) / images          v: sum of p (1 - p) in the bin

    The sum of right minus p over a bin then is nearly normal with variance v, and sqrt(2/pi v) the
    mean of its absolute value. Arguments as for `calibration_error`.
    """
    p = probabilities.double()
    variances = torch.zeros(BINS, dtype=torch.float64)
    variances.index_add_(0, bin_of(p), p * (1 - p))
    return float((2 / math.pi * variances).clamp(min=0).sqrt().sum()) / len(p)


def debiased_error(error: float, by_chance: float) -> float:
    """A calibration error without its part by chance, at least 0.

    The mean of |N(g, v)| is nearly sqrt(g² + 2/pi v), so that the true error is about
    sqrt(error² - chance²). docs/trust.md has its bias in simulations.
    """
    return math.sqrt(max(0.0, error**2 - by_chance**2))


def adaptive_calibration_error(confidences: Tensor, right: Tensor) -> float:
    """The same over bins of equally many images, whose edges are quantiles of confidence.

    Equal confidences share a bin, so few different ones make fewer bins.
    """
    confidences = confidences.double().contiguous()
    ordered = confidences.sort().values
    ends = torch.arange(1, BINS) * len(ordered) // BINS - 1
    edges = ordered[ends.clamp(min=0)]
    return _mean_gap(confidences, right, torch.bucketize(confidences, edges))


def reliability(
    confidences: Tensor, right: Tensor
) -> list[tuple[int, float, float, tuple[float, float]]]:
    """Of each bin of confidence with an image: count, mean confidence, accuracy and its interval.

    Arguments as for `calibration_error`.
    """
    place = bin_of(confidences)
    rows = []
    for number in sorted(set(place.tolist())):
        inside = place == number
        count, hits = int(inside.sum()), int(right[inside].sum())
        confidence = float(confidences[inside].double().mean())
        rows.append((count, confidence, hits / count, wilson_interval(hits, count)))
    return rows


def bin_of(probabilities: Tensor) -> Tensor:
    """Index of the equally wide bin of each probability; a bin contains its upper edge."""
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
    return torch.bucketize(probabilities.double().contiguous(), edges[1:-1])


def class_gaps(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Sums of label minus probability for each bin and class, (BINS, classes) float64.

    Args:
        probabilities: (images, classes), float64.
        labels: (images,).
    """
    gaps = -probabilities
    gaps[torch.arange(len(labels)), labels] += 1
    sums = torch.zeros(BINS, probabilities.shape[1], dtype=torch.float64)
    return sums.scatter_add(0, bin_of(probabilities), gaps)


def _mean_gap(confidences: Tensor, right: Tensor, place: Tensor) -> float:
    gaps = right.double() - confidences.double()
    sums = torch.zeros(BINS, dtype=torch.float64).index_add(0, place, gaps)
    return float(sums.abs().sum()) / len(confidences)
