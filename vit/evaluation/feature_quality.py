"""Quality of features without labels or with few: effective rank, spread, nearest neighbours.

    RankMe = exp(- sum_k p_k log p_k),   p_k = s_k / sum(s) + eps,   s the singular values

And k-means clusters of weighted points, by Lloyd's iterations from the greedy initialisation of
k-means++: each next centre is the best of some points drawn in proportion to weight * squared
distance.

    min over centres:  sum over points of weight * |point - nearest centre|^2

Source: Garrido et al., "RankMe", section 3.2, arXiv:2210.02885; k-NN as in Wu et al., "Unsupervised
Feature Learning via Non-Parametric Instance Discrimination", section 3.4, arXiv:1805.01978;
k-means: Lloyd, "Least squares quantization in PCM", 1982; Arthur and Vassilvitskii, "k-means++: The
Advantages of Careful Seeding", SODA 2007, section 5 for the greedy choice.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-7
NEIGHBOURS, TEMPERATURE = 20, 0.07
"""Neighbours that vote, and what their cosine similarity is divided by in the weight of a vote."""


def effective_rank(features: Tensor) -> float:
    """RankMe of `features`, (images, dim): from 1 to min(images, dim)."""
    values = torch.linalg.svdvals(features.double())
    total = values.sum()
    if not total > 0:
        return 1.0
    shares = values / total + EPS
    return float((-(shares * shares.log()).sum()).exp())


def feature_spread(features: Tensor) -> float:
    """Root mean square distance of `features`, (images, dim), from their mean, as a share of their
    norm; 0 if all are equal."""
    exact = features.double()
    distance = (exact - exact.mean(dim=0)).square().sum()
    return float((distance / exact.square().sum().clamp(min=1e-300)).sqrt())


def similarities(features: Tensor) -> Tensor:
    """Cosine similarity of each pair, (images, images) float64; -2 of an image with itself."""
    exact = F.normalize(features.double(), dim=1)
    return (exact @ exact.T).fill_diagonal_(-2.0)


def knn_accuracy(features: Tensor, labels: Tensor) -> float:
    """Share of images, (images, dim), whose nearest neighbours vote for their class."""
    nearest = similarities(features).topk(min(NEIGHBOURS, len(features) - 1), dim=1)
    votes = torch.zeros(len(features), int(labels.max()) + 1, dtype=torch.float64)
    votes.scatter_add_(1, labels[nearest.indices], (nearest.values / TEMPERATURE).exp())
    return float((votes.argmax(dim=1) == labels).double().mean())


def nearest_images(features: Tensor, count: int) -> Tensor:
    """Indices of the most similar other images, the nearest first, (images, count)."""
    return similarities(features).topk(min(count, len(features) - 1), dim=1).indices


MAX_ITERATIONS = 50
BLOCK = 2**24
"""Distances computed at a time."""


class Clusters(NamedTuple):
    """A clustering of points."""

    centres: Tensor
    """(clusters, dim)"""
    assigned: Tensor
    """Cluster of each point, (points,); a cluster may be empty where points are equal."""
    squares: Tensor
    """Squared distance of each point from the centre of its cluster, (points,)."""


def kmeans(points: Tensor, clusters: int, *, seed: int, weights: Tensor | None = None) -> Clusters:
    """Cluster `points`, (points, dim) float32 on the CPU; repeatable on the same machine."""
    weights = points.new_ones(len(points)) if weights is None else weights.to(points.dtype)
    centres = initial_centres(points, weights, clusters, seed=seed)
    assigned, squares = nearest_centres(points, centres)
    for _ in range(MAX_ITERATIONS):
        centres = _means(points, weights, assigned, squares, centres)
        before = assigned
        assigned, squares = nearest_centres(points, centres)
        if torch.equal(before, assigned):
            break
    return Clusters(centres, assigned, squares)


def initial_centres(points: Tensor, weights: Tensor, clusters: int, *, seed: int) -> Tensor:
    """Centres of the greedy k-means++, (clusters, dim)."""
    draw = torch.Generator().manual_seed(seed)
    trials = 2 + int(math.log(clusters))
    norms = points.square().sum(dim=1)
    centres = points.new_empty(clusters, points.shape[1])
    chances = weights
    squares = points.new_full((len(points),), math.inf)
    for number in range(clusters):
        total = chances.double().cumsum(0)
        at = torch.rand(trials, generator=draw, dtype=torch.float64) * total[-1]
        candidates = torch.searchsorted(total, at, right=True).clamp(max=len(points) - 1)
        distances = norms - 2 * (points[candidates] @ points.T) + norms[candidates, None]
        closer = torch.minimum(distances.clamp(min=0), squares)
        best = int((closer * weights).sum(dim=1).argmin())
        centres[number], squares = points[candidates[best]], closer[best]
        chances = squares * weights
    return centres


def nearest_centres(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the nearest centre of each point, and the squared distance from it."""
    norms = centres.square().sum(dim=1)
    found = [
        (norms - 2 * part @ centres.T).min(dim=1)
        for part in torch.split(points, max(BLOCK // len(centres), 1))
    ]
    squares = torch.cat([part.values for part in found]) + points.square().sum(dim=1)
    return torch.cat([part.indices for part in found]), squares.clamp(min=0)


def _means(
    points: Tensor, weights: Tensor, assigned: Tensor, squares: Tensor, centres: Tensor
) -> Tensor:
    """Weighted means of the clusters; an empty one moves to the point that is farthest off."""
    totals = weights.new_zeros(len(centres)).index_add_(0, assigned, weights)
    sums = torch.zeros_like(centres)
    for part, index, weight in zip(
        torch.split(points, 2**16),
        torch.split(assigned, 2**16),
        torch.split(weights, 2**16),
        strict=True,
    ):
        sums.index_add_(0, index, part * weight[:, None])
    empty = (totals == 0).nonzero().squeeze(1)
    means = sums / totals.clamp(min=1e-30)[:, None]
    means[empty] = points[(squares * weights).topk(len(empty)).indices]
    return means
