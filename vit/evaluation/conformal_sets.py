"""Prediction sets that contain the true class with a stated probability: split conformal, RAPS.

    s(x, k) = sum of the probabilities of the classes before k  +  penalty max(0, rank of k - 5)
            = 1 - p(k)                                              of a multi-label network
    set     = the classes of s(x, k) <= q,   q = the ceil((n + 1) coverage)-th smallest s(x, true)
            = the classes of s(x, k) <= q_k  with q_k of the n_k images of class k

For images that are drawn as those of the calibration, the set contains the true class with
probability of at least the coverage. The best class has s = 0 and is in every set, so a network
that is right more often than the coverage has sets of one class. Nothing is drawn at random: the
same image has the same set.

The second rule holds for the images of each class on its own, the first for all together. A level
of few images overshoots, by up to 1 / (n_k + 1), so each class needs 100 of them, and as many as
its coverage takes. A multi-label set has to contain all true classes of an image: s(x, true) is the
largest of theirs, and 0 where there is none.

Where images come in groups, the probability is that of an image of a new group: in q, an image of a
group of n_g counts 1 / n_g, and n is the number of groups.

Source: Angelopoulos et al., "Uncertainty Sets for Image Classifiers using Conformal Prediction",
section 2, arXiv:2009.14193; Romano et al., arXiv:2006.02544; by class: Vovk, "Conditional Validity
of Inductive Conformal Predictors", section 4, arXiv:1209.2673; Ding et al., section 2,
arXiv:2306.09335; multi-label: Cauchois et al., section 3, arXiv:2004.10181; groups: Lee, Barber and
Willett, "Distribution-Free Inference with Hierarchical Data", section 3, arXiv:2306.06342.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vit.evaluation.classification_metrics import ranking
from vit.evaluation.image_groups import count_present
from vit.score_calibration import FREE_CLASSES, SET_PENALTY

MIN_CLASS_IMAGES = 100
"""Images of each class from which on sets cover each class on its own."""
LEVEL_DIGITS = 6
"""Decimal digits of the levels of classes, which are rounded up."""


def set_scores(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Score s of the true class of each image, or of its true classes, (images,) float64.

    Args:
        probabilities: (images, classes).
        labels: (images,); or multi-hot rows of a multi-label network, (images, classes).
    """
    table = probabilities.double()
    if labels.ndim == 2:
        return torch.where(labels.bool(), 1 - table, 0.0).amax(dim=1)
    order = ranking(table)
    rank = order.argsort(dim=1).gather(1, labels.unsqueeze(1)).squeeze(1)
    sums = table.gather(1, order).cumsum(dim=1)
    before = torch.cat([torch.zeros(len(sums), 1, dtype=torch.float64), sums], dim=1)
    own = before.gather(1, rank.unsqueeze(1)).squeeze(1)
    return own + SET_PENALTY * (rank - FREE_CLASSES).clamp(min=0).double()


def set_levels(
    scores: Tensor, coverages: Sequence[float], groups: Tensor | None = None
) -> list[float | None]:
    """The level q of each coverage; None where so few images allow the set of all classes only."""
    if groups is not None:
        return _group_levels(scores, coverages, groups)
    ordered, count = scores.sort().values.tolist(), len(scores)
    ranks = [math.ceil((count + 1) * coverage - 1e-9) for coverage in coverages]
    return [ordered[rank - 1] if rank <= count else None for rank in ranks]


def _group_levels(scores: Tensor, coverages: Sequence[float], groups: Tensor) -> list[float | None]:
    """As `set_levels`: the smallest score below which are groups enough, counted by parts."""
    ordered, order = scores.sort()
    reached = groups.bincount().double().reciprocal()[groups[order]].cumsum(0)
    needed = (count_present(groups) + 1) * torch.tensor(coverages, dtype=torch.float64) - 1e-9
    found = torch.searchsorted(reached, needed).tolist()
    return [float(ordered[place]) if place < len(ordered) else None for place in found]


def class_set_levels(
    scores: Tensor,
    labels: Tensor,
    classes: int,
    coverages: Sequence[float],
    groups: Tensor | None = None,
) -> list[tuple[float | None, ...] | None]:
    """Level of each class, for each coverage; None where a class has too few images for it.

    Args:
        scores: Of `set_scores`, (images,).
        labels: (images,).
    """
    of_class = [labels == index for index in range(classes)]
    fewest = count_rarest(labels, classes, groups)
    enough = [
        fewest >= MIN_CLASS_IMAGES and math.ceil((fewest + 1) * coverage - 1e-9) <= fewest
        for coverage in coverages
    ]
    chosen = [coverage for coverage, one in zip(coverages, enough, strict=True) if one]
    columns = [
        set_levels(scores[one], chosen, None if groups is None else groups[one])
        for one in of_class
        if chosen
    ]
    rows = iter(zip(*([*map(_round_up, column)] for column in columns), strict=True))
    found = [next(rows) if one else None for one in enough]
    return found if chosen else []


def count_rarest(labels: Tensor, classes: int, groups: Tensor | None = None) -> int:
    """Images of the rarest class, or groups that have an image of it."""
    if groups is None:
        return int(labels.bincount(minlength=classes).min())
    return min(count_present(groups[labels == index]) for index in range(classes))


def _round_up(level: float | None) -> float | None:
    scale = 10**LEVEL_DIGITS
    return None if level is None else math.ceil(level * scale) / scale
