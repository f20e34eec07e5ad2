"""Quality of features without labels or with few: effective rank, spread, nearest neighbours.

    RankMe = exp(- sum_k p_k log p_k),   p_k = s_k / sum(s) + eps,   s the singular values

Source: Garrido et al., "RankMe", section 3.2, arXiv:2210.02885; k-NN as in Wu et al., "Unsupervised
Feature Learning via Non-Parametric Instance Discrimination", section 3.4, arXiv:1805.01978.
"""

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
    """Distance of features from their mean, as a share of their norm; 0 if all are equal.

    Root mean squares over the images, of `features`, (images, dim).
    """
    exact = features.double()
    distance = (exact - exact.mean(dim=0)).square().sum()
    return float((distance / exact.square().sum().clamp(min=1e-300)).sqrt())


def similarities(features: Tensor) -> Tensor:
    """Cosine similarity of each pair, (images, images) float64; -2 of an image with itself."""
    exact = F.normalize(features.double(), dim=1)
    return (exact @ exact.T).fill_diagonal_(-2.0)


def knn_accuracy(features: Tensor, labels: Tensor) -> float:
    """Share of images whose nearest neighbours among the others vote for their class.

    Args:
        features: (images, dim), of at least two images.
        labels: Classes, (images,).
    """
    nearest = similarities(features).topk(min(NEIGHBOURS, len(features) - 1), dim=1)
    votes = torch.zeros(len(features), int(labels.max()) + 1, dtype=torch.float64)
    votes.scatter_add_(1, labels[nearest.indices], (nearest.values / TEMPERATURE).exp())
    return float((votes.argmax(dim=1) == labels).double().mean())


def nearest_images(features: Tensor, count: int) -> Tensor:
    """Indices of the most similar other images, the nearest first, (images, count)."""
    return similarities(features).topk(min(count, len(features) - 1), dim=1).indices
