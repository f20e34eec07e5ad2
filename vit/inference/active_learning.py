"""Active learning: the order in which images are worth a label, by features of a network.

    typical      k-means into as many clusters as there will be labels; clusters with the fewest
                 labels come first, of these the largest, and of a cluster its densest image:
                 1 / mean distance from its nearest neighbours in the cluster
    uncertain    the images with the smallest margin between the two most probable classes, ten
                 times as many as labels; k-means of these, weighted by 1 - margin, into one cluster
                 a label; the image nearest to each centre

Typical images are best for the first labels, when no network knows the classes; uncertain and
different ones when one does.

Source: Hacohen et al., "Active Learning on a Budget: Opposite Strategies Suit High and Low
Budgets" (TypiClust), section 3, arXiv:2202.02794; Zhdanov, "Diverse mini-batch Active Learning",
section 3, arXiv:1901.05954; margin: Scheffer et al., 2001.
"""

import heapq
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vit.evaluation.feature_quality import NEIGHBOURS, TEMPERATURE, kmeans
from vit.inference.label_errors import BLOCK, SAME, neighbours

MAX_CLUSTERS = 500
LEAST_CLUSTER = 5
"""Images of a cluster below which it comes after all others: outliers."""
PRESELECTED = 10
"""Uncertain images that are clustered, for each that is chosen."""


def unit_directions(features: Tensor) -> Tensor:
    """Features less their mean, at length 1; (images, dim) float32, replaced in place.

    What all images have in common would make all of them alike.
    """
    features -= features.mean(dim=0)
    features /= features.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return features


def order_by_typicality(
    directions: Tensor, number: int, labelled: Tensor, *, seed: int
) -> Iterator[int]:
    """Iterate over all images without a label, the most typical ones of all clusters first.

    Args:
        directions: Unit features, (images, dim).
        labelled: Whether an image has a label, (images,) bool.
    """
    clusters = min(int(labelled.sum()) + number, MAX_CLUSTERS, len(directions))
    assigned = kmeans(directions, clusters, seed=seed).assigned
    sizes = torch.bincount(assigned, minlength=clusters).tolist()
    labels = torch.bincount(assigned[labelled], minlength=clusters).tolist()
    least = min(LEAST_CLUSTER, len(directions) / clusters / 2)
    heap = [(size < least, labels[one], -size, one) for one, size in enumerate(sizes) if size]
    heapq.heapify(heap)
    members: dict[int, Iterator[int]] = {}
    while heap:
        small, labels_before, size, cluster = heapq.heappop(heap)
        if cluster not in members:
            inside = (assigned == cluster).nonzero().squeeze(1)
            densest = inside[typicality(directions[inside]).argsort(descending=True, stable=True)]
            members[cluster] = iter(densest[~labelled[densest]].tolist())
        if (image := next(members[cluster], None)) is not None:
            yield image
            heapq.heappush(heap, (small, labels_before + 1, size, cluster))


def typicality(directions: Tensor) -> Tensor:
    """1 / mean distance from the nearest others, (images,); copies of an image do not count.

    An image with nothing but copies around it has 0.

    Args:
        directions: Unit features of a cluster, (images, dim).
    """
    if len(directions) == 1:
        return directions.new_zeros(1)
    cosines = neighbours(directions, min(NEIGHBOURS, max(len(directions) // 2, 1))).similarity
    counted = cosines <= SAME
    distances = (2 - 2 * cosines).clamp(min=0).sqrt() * counted
    number = counted.sum(dim=1)
    return torch.where(number > 0, number / distances.sum(dim=1).clamp(min=1e-12), 0.0)


def order_by_uncertainty(
    directions: Tensor, margins: Tensor, number: int, labelled: Tensor, *, seed: int
) -> Iterator[int]:
    """Iterate over all images without a label, uncertain and different ones first.

    Args:
        directions: Unit features, (images, dim).
        margins: Of each image, (images,) in [0, 1]; see `class_margins`.
        number, labelled, seed: As for `order_by_typicality`.
    """
    rest = (~labelled).nonzero().squeeze(1)
    rest = rest[margins[rest].argsort(stable=True)]
    pool = rest[: PRESELECTED * number]
    weights = (1 - margins[pool]).clamp(min=1e-3).float()
    found = kmeans(directions[pool], min(number, len(pool)), seed=seed, weights=weights)
    nearest: dict[int, int] = {}  # cluster -> place in the pool, which is sorted by margin
    squares, assigned = found.squares.tolist(), found.assigned.tolist()
    for place, cluster in enumerate(assigned):
        if cluster not in nearest or squares[place] < squares[nearest[cluster]]:
            nearest[cluster] = place
    chosen = sorted(nearest.values())
    yield from pool[chosen].tolist()
    kept = torch.ones(len(rest), dtype=torch.bool)
    kept[chosen] = False
    yield from rest[kept].tolist()


def class_margins(probabilities: Tensor, thresholds: Sequence[float] | None = None) -> Tensor:
    """How certain answers are: 0 between two classes, 1 at most.

    Args:
        probabilities: (images, classes), at least 2 of classes that exclude each other.
        thresholds: Of each class, where an image may have several; the margin is then the distance
            of the nearest probability from its threshold.

    Returns:
        (images,)
    """
    if thresholds is not None:
        limits = torch.tensor(thresholds, dtype=probabilities.dtype)
        return (probabilities - limits).abs().amin(dim=1)
    first, second = probabilities.topk(2, dim=1).values.unbind(dim=1)
    return first - second


def neighbour_shares(directions: Tensor, labelled: Tensor, targets: Tensor) -> Tensor:
    """Share of each class among the nearest labelled images, (images, classes).

    Args:
        directions: Unit features, (images, dim).
        targets: Their classes as 0 and 1, (labelled, classes).

    Source: k-NN of Wu et al., section 3.4, arXiv:1805.01978.
    """
    known, targets = directions[labelled], targets.float()
    found = []
    for part in torch.split(directions, max(BLOCK // len(known), 1)):
        best = (part @ known.T).topk(min(NEIGHBOURS, len(known)), dim=1)
        weights = ((best.values - best.values[:, :1]) / TEMPERATURE).exp()
        votes = part.new_zeros(len(part), len(known)).scatter_(1, best.indices, weights)
        found.append(votes @ targets / weights.sum(dim=1, keepdim=True))
    return torch.cat(found)
