"""k-means clustering, of weighted points too.

    min over centres:  sum over points of weight * |point - nearest centre|^2

by Lloyd's iterations from the greedy initialisation of k-means++: each next centre is the best of
some points drawn in proportion to weight * squared distance.

Source: Lloyd, "Least squares quantization in PCM", 1982; Arthur and Vassilvitskii, "k-means++: The
Advantages of Careful Seeding", SODA 2007, section 5 for the greedy choice.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

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
    """Cluster `points`; the same arguments give the same clusters on the same machine.

    Args:
        points: (points, dim) float32 on the CPU.
        clusters: From 1 to the number of points.
        weights: Of the points, (points,), at least 0; 1 by default.
    """
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
