"""Prediction sets that contain the true class with a stated probability: split conformal, RAPS.

    s(x, k) = sum of the probabilities of the classes before k  +  penalty max(0, rank of k - 5)
    set     = the classes of s(x, k) <= q,   q = the ceil((n + 1) coverage)-th smallest s(x, true)

For images that are drawn as those of the calibration, the set contains the true class with
probability of at least the coverage. The best class has s = 0 and is in every set, so a network
that is right more often than the coverage has sets of one class. Nothing is drawn at random: the
same image has the same set.

Source: Angelopoulos et al., "Uncertainty Sets for Image Classifiers using Conformal Prediction",
section 2, arXiv:2009.14193; Romano et al., arXiv:2006.02544.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vit.evaluation.classification_metrics import ranking
from vit.score_calibration import FREE_CLASSES, SET_PENALTY


def set_scores(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Score s of the true class of each image, (images,) float64.

    Args:
        probabilities: (images, classes).
        labels: (images,).
    """
    table = probabilities.double()
    order = ranking(table)
    rank = order.argsort(dim=1).gather(1, labels.unsqueeze(1)).squeeze(1)
    sums = table.gather(1, order).cumsum(dim=1)
    before = torch.cat([torch.zeros(len(sums), 1, dtype=torch.float64), sums], dim=1)
    own = before.gather(1, rank.unsqueeze(1)).squeeze(1)
    return own + SET_PENALTY * (rank - FREE_CLASSES).clamp(min=0).double()


def set_levels(scores: Tensor, coverages: Sequence[float]) -> list[float | None]:
    """The level q of each coverage; None where so few images allow the set of all classes only."""
    ordered, count = scores.sort().values.tolist(), len(scores)
    ranks = [math.ceil((count + 1) * coverage - 1e-9) for coverage in coverages]
    return [ordered[rank - 1] if rank <= count else None for rank in ranks]
