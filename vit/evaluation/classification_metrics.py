"""Classification metrics: accuracy with intervals, calibration, and scores of each class.

Everything is computed in float64 from six numbers an image (`Outcomes`): a large dataset needs no
table of images x classes.

Source: the error of calibrated scores by chance: Vaicenavicius et al., arXiv:1902.06977, and
Roelofs et al., arXiv:2012.08668, which measure it by simulation; Brier, "Verification of Forecasts
Expressed in Terms of Probability", Monthly Weather Review 78, 1950.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vit.evaluation.exact_tests import wilson_interval
from vit.evaluation.intervals import (
    MIN_ANSWERS,
    MIN_CLASS_IMAGES,
    Interval,
    bootstrap,
    share_interval,
    weighted_mean,
)
from vit.text import align_columns, plural, printable

BINS = 15
LEAST = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Outcomes:
    """What all scores are computed from, (images,) each; `ranks` of the true class, from 0."""

    labels: Tensor
    answers: Tensor
    confidences: Tensor
    ranks: Tensor
    likelihoods: Tensor
    squares: Tensor

    @staticmethod
    def of(probabilities: Tensor, labels: Tensor) -> "Outcomes":
        """Outcomes of `probabilities`, (images, classes), under the true `labels`, (images,)."""
        probabilities, labels = probabilities.double(), labels.long()
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
        names = [field.name for field in fields(Outcomes)]
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
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


def summarize(
    outcomes: Outcomes, classes: Sequence[str], groups: Tensor | None = None
) -> dict[str, Any]:
    """Scores of at least one image, as plain numbers that JSON takes; shares are in [0, 1].

    Classes that the data lacks follow scikit-learn's defaults: `macro_f1` is the mean over the
    classes that occur among labels or answers, `balanced_accuracy` over those among labels; an
    undefined precision, recall or f1 is 0. `per_class` lists every class of the model; one
    without an image has count 0.
    """
    count = len(outcomes)
    hit = outcomes.ranks == 0
    right = int(hit.sum())
    hits, labelled, answered = (
        part.bincount(minlength=len(classes)).tolist()
        for part in (outcomes.labels[hit], outcomes.labels, outcomes.answers)
    )
    per_class = [*map(class_scores, classes, hits, labelled, answered)]
    seen = [row for row, times in zip(per_class, answered, strict=True) if row["count"] or times]
    recalls = [row["recall"] for row in per_class if row["count"]]
    loss = float(-outcomes.likelihoods.clamp(min=LEAST).log().mean())
    error = calibration_error(outcomes.confidences, hit)
    by_chance = chance_calibration_error(outcomes.confidences)
    return {
        "count": count,
        "top1": right / count,
        "top5": int((outcomes.ranks < 5).sum()) / count,
        "top1_interval": share_interval(hit, groups),
        "loss": loss,
        "nll": loss,
        "brier": float((outcomes.squares - 2 * outcomes.likelihoods).mean()) + 1,
        "macro_f1": math.fsum(row["f1"] for row in seen) / len(seen),
        "balanced_accuracy": math.fsum(recalls) / len(recalls),
        "ece": error,
        "ece_chance": by_chance,
        "ece_debiased": debiased_error(error, by_chance),
        "per_class": per_class,
    }


def summarize_classes(
    outcomes: Outcomes, classes: Sequence[str], groups: Tensor | None = None, *, brief: bool = False
) -> dict[str, Any]:
    """The scores of `summarize`, and unless `brief` the confusions and all intervals."""
    scores = summarize(outcomes, classes, groups)
    if brief:
        return scores
    confusion = outcomes.confusion(classes)
    return {**scores, "confusion": confusion, **class_intervals(outcomes, groups)}


def class_intervals(outcomes: Outcomes, groups: Tensor | None = None) -> dict[str, Interval]:
    """Intervals of scores that `summarize` returns of `outcomes`, as NAME_interval."""
    labels, answers, images = outcomes.labels, outcomes.answers, len(outcomes)
    right = (outcomes.ranks == 0).double()
    loss = -outcomes.likelihoods.clamp(min=LEAST).log()
    brier = outcomes.squares - 2 * outcomes.likelihoods + 1
    width = 1 + int(torch.maximum(labels.max(), answers.max()))

    def statistics(weights: Tensor) -> dict[str, Tensor]:
        def sums(index: Tensor, size: int, values: Tensor) -> Tensor:
            return weights.new_zeros(len(weights), size).index_add_(1, index, values)

        labelled, answered = sums(labels, width, weights), sums(answers, width, weights)
        hits = sums(labels, width, weights * right)
        return {
            "nll": weighted_mean(loss, weights),
            "brier": weighted_mean(brier, weights),
            "balanced_accuracy": (hits / labelled).nanmean(dim=1),
            "macro_f1": (2 * hits / (labelled + answered)).nanmean(dim=1),
        }

    few = images - int(right.sum()) < MIN_ANSWERS
    found = bootstrap(images, statistics, groups=groups, few=few)
    if int(right.sum()) < MIN_ANSWERS or images < MIN_CLASS_IMAGES * len({*labels.tolist()}):
        found |= {"balanced_accuracy": None, "macro_f1": None}
    return {f"{name}_interval": limits for name, limits in found.items()}


def class_scores(label: str, hits: float, count: float, answered: float) -> dict[str, Any]:
    """Scores of one class; undefined ones are 0."""
    return {
        "label": label,
        "count": int(count),
        "precision": hits / answered if answered else 0.0,
        "recall": hits / count if count else 0.0,
        "f1": 2 * hits / (count + answered) if count + answered else 0.0,
    }


def grade_moments(grades: Tensor, answers: Tensor) -> Tensor:
    """What `quadratic_weighted_kappa` needs the means of, (images, 5), of grades from 0 in their
    order, (images,) each."""
    true, found = grades.double(), answers.double()
    squares = (true.square(), found.square(), (true - found).square())
    return torch.stack([true, found, *squares], dim=1)


def quadratic_weighted_kappa(means: Tensor) -> Tensor:
    """Agreement of grades beyond chance, 1 at most; NaN if all images have one grade and answer.

        1 - E (true - answer)² / E (true - answer of any other image)²

    Args:
        means: Of `grade_moments` over images, (..., 5); the result has the shape of the rest.

    Source: Cohen, "Weighted Kappa", Psychological Bulletin 70, 1968.
    """
    true, found, true_square, found_square, apart = means.unbind(dim=-1)
    return 1 - apart / (true_square + found_square - 2 * true * found)


def kappa_with_interval(outcomes: Outcomes, groups: Tensor | None = None) -> dict[str, Any]:
    """`kappa`, None where it is undefined, and `kappa_interval`."""
    moments = grade_moments(outcomes.labels, outcomes.answers)

    def statistics(weights: Tensor) -> dict[str, Tensor]:
        means = weights @ moments / weights.sum(dim=1, keepdim=True)
        return {"kappa": quadratic_weighted_kappa(means)}

    kappa = float(quadratic_weighted_kappa(moments.mean(dim=0)))
    few = int((outcomes.ranks > 0).sum()) < MIN_ANSWERS
    limits = bootstrap(len(outcomes), statistics, groups=groups, few=few)["kappa"]
    return {"kappa": None if math.isnan(kappa) else kappa, "kappa_interval": limits}


def calibration_error(confidences: Tensor, right: Tensor) -> float:
    """Mean distance between confidence and accuracy, over equally wide bins of confidence.

    A bin contains its upper edge. Bins weigh by their images.

    Source: Guo et al., "On Calibration of Modern Neural Networks", section 2, arXiv:1706.04599.
    """
    gaps = right.double() - confidences.double()
    sums = torch.zeros(BINS, dtype=torch.float64).index_add(0, bin_of(confidences), gaps)
    return float(sums.abs().sum()) / len(confidences)


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


def reliability(
    confidences: Tensor, right: Tensor
) -> list[tuple[int, float, float, tuple[float, float]]]:
    """Of each bin of confidence with an image: count, mean confidence, accuracy, its interval."""
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


MAX_TABLE = 20
"""Classes that a table of recall names, those that lost most first."""


@dataclass(frozen=True)
class ClassChange:
    """The classes of a network and of the data that it is trained on further (class increment).

    Source: van de Ven et al., "Three types of incremental learning", Nature Machine Intelligence 4,
    2022, https://doi.org/10.1038/s42256-022-00568-3.
    """

    kept: tuple[str, ...]
    added: tuple[str, ...]
    lost: tuple[str, ...]

    @staticmethod
    def between(network: Sequence[str] | None, data: Sequence[str]) -> "ClassChange":
        """Compare names; a network without known names has no class of the data."""
        known, present = set(network or ()), set(data)
        return ClassChange(
            kept=tuple(name for name in data if name in known),
            added=tuple(name for name in data if name not in known),
            lost=tuple(name for name in network or () if name not in present),
        )


class RecallRow(NamedTuple):
    """Recall of one class or of some classes.

    `before` is that of the network whose weights the training began with, which has fewer classes
    to choose from: some loss is expected where old and new classes look alike.
    """

    name: str
    images: int
    before: float | None
    """In [0, 1]; None for new classes."""
    now: float
    summary: bool

    @property
    def gain(self) -> float | None:
        """Recall now less that before, None for new classes."""
        return None if self.before is None else self.now - self.before


def compare_recall(
    change: ClassChange, outcomes: Outcomes, classes: Sequence[str], before: Mapping[str, int]
) -> list[RecallRow]:
    """Recall of the old, the new and all classes, then of each class with images."""
    images = Counter(classes[label] for label in outcomes.labels.tolist())
    right = Counter(classes[label] for label in outcomes.labels[outcomes.ranks == 0].tolist())
    kept = set(change.kept)

    def row(names: Sequence[str], title: str, *, summary: bool = False) -> RecallRow:
        count = sum(images[name] for name in names)
        old = None
        if kept.issuperset(names):
            old = sum(before.get(name, 0) for name in names) / count
        return RecallRow(title, count, old, sum(right[name] for name in names) / count, summary)

    each = [row([name], name) for name in classes if images[name]]
    each.sort(key=lambda one: (one.gain is None, one.gain or 0.0))
    groups = [
        (change.kept, plural(len(change.kept), "old class", "old classes")),
        (change.added, plural(len(change.added), "new class", "new classes")),
        (classes, "all classes"),
    ]
    present = [(names, title) for names, title in groups if any(images[name] for name in names)]
    return [*(row(*group, summary=True) for group in present), *each]


def recall_lines(rows: Sequence[RecallRow]) -> list[str]:
    """`rows` as a table for a terminal."""
    each = [row for row in rows if not row.summary]
    shown = [row for row in rows if row.summary] + each[:MAX_TABLE]
    table = [["recall", "images", "before", "now"]]
    for row in shown:
        before = "-" if row.before is None else f"{row.before:.1%}"
        name = ("" if row.summary else "  ") + printable(row.name)
        table.append([name, f"{row.images:,}", before, f"{row.now:.1%}"])
    hidden = len(rows) - len(shown)
    more = [f"and {plural(hidden, 'other class', 'other classes')}"] if hidden else []
    return [*align_columns(table, left={0}), *more]
