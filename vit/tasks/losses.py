"""Cross-entropy and binary cross-entropy with label smoothing, for soft targets.

    loss = - sum_k q_k log softmax(logits)_k,   q = (1 - smoothing) * target + smoothing / classes
    loss = - mean_k (q_k log p_k + (1 - q_k) log (1 - p_k)),       p = sigmoid(logits)

Class imbalance, of n training images, n_c of them of class c, K classes that have any:

    loss          an image of class c weighs w_c = n / (K n_c) in the loss
    sampler       an epoch has as many images of each class
    logit-adjust  the loss of logits + log(n_c / n)

The weights have mean 1 over the training images. Only the training loss changes: predictions are
the plain logits.

Source: Szegedy et al., "Rethinking the Inception Architecture", section 7, arXiv:1512.00567;
weights as in scikit-learn's class_weight="balanced"; logits: Menon et al., "Long-tail learning via
logit adjustment", section 5.2 with tau 1, arXiv:2007.07314.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.config.user_code import name_of
from vit.data.dataset_types import Sample
from vit.errors import ConfigError
from vit.precision import at_least_float32
from vit.text import plural, printable


def smoothed_cross_entropy(
    logits: Tensor, targets: Tensor, *, smoothing: float, reduction: str = "sum"
) -> Tensor:
    """Sum over the batch, in float32 or wider, so that micro-batches of any size add up to its
    loss; with reduction="none" the loss of each image, (batch,)."""
    logits = at_least_float32(logits)
    return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction=reduction)


def smoothed_binary_cross_entropy(
    logits: Tensor, targets: Tensor, *, smoothing: float, reduction: str = "sum"
) -> Tensor:
    """Sum over the batch of the mean over the classes, of multi-label targets."""
    logits = at_least_float32(logits)
    spread = (1 - smoothing) * targets.to(logits) + smoothing / logits.shape[1]
    losses = F.binary_cross_entropy_with_logits(logits, spread, reduction=reduction)
    return (losses if reduction == "sum" else losses.sum(dim=1)) / logits.shape[1]


def user_loss(
    function: Callable[..., Tensor], logits: Tensor, targets: Tensor, *, reduction: str = "sum"
) -> Tensor:
    """What a user's `function` of logits and targets returns, as of `smoothed_cross_entropy`."""
    logits = at_least_float32(logits)
    losses = function(logits, targets) if len(logits) else logits.sum(dim=1)
    if not isinstance(losses, Tensor) or losses.shape != logits.shape[:1]:
        found = f"a tensor {(*losses.shape,)}" if isinstance(losses, Tensor) else repr(losses)
        wanted = f"one number an image, a tensor {(*logits.shape[:1],)}"
        raise ConfigError(f"loss={name_of(function)} must return {wanted}, and returned {found}")
    return losses.sum() if reduction == "sum" else losses


@dataclass(frozen=True)
class ClassBalance:
    """How a loss treats classes that are not equally frequent in the training images."""

    kind: str
    counts: Tensor

    @staticmethod
    def of(config: Config, samples: Sequence[Sample]) -> "ClassBalance":
        labels = torch.tensor([sample.label for sample in samples])
        counts = torch.bincount(labels, minlength=config.model.num_classes)
        return ClassBalance(config.training.balance, counts)

    @cached_property
    def weights(self) -> Tensor:
        """Of an image of each class, (classes,) float64; 0 for a class without images."""
        counts = self.counts.double()
        weights = counts.sum() / (int((counts > 0).sum()) * counts.clamp(min=1))
        return torch.where(counts > 0, weights, 0.0)

    @cached_property
    def prior(self) -> Tensor:
        """Share of each class, (classes,) float64; one without an image counts as if it had one"""
        counts = self.counts.clamp(min=1).double()
        return counts / counts.sum()

    def loss(self, logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Summed loss; arguments as of `smoothed_cross_entropy`."""
        if self.kind == "loss":
            return weighted_cross_entropy(logits, targets, self.weights, **options)
        if self.kind == "logit-adjust":
            return logit_adjusted_cross_entropy(logits, targets, self.prior, **options)
        return smoothed_cross_entropy(logits, targets, **options)

    def notes(self, classes: Sequence[str]) -> list[str]:
        """A note for the log before the first step, safe on a terminal."""
        present = torch.where(self.counts > 0, self.counts, self.counts.max())
        ends = int(present.argmin()), int(self.counts.argmax())
        rare, often = (
            f"{printable(classes[end])} ({plural(int(self.counts[end]), 'image')})" for end in ends
        )
        if self.kind == "logit-adjust":
            shift = math.log(float(self.prior[ends[1]] / self.prior[ends[0]]))
            effect = f"while learning {often} is {shift:.2f} ahead of {rare} in the logits"
        else:
            few, many = (float(self.weights[end]) for end in ends)
            verb = "weighs" if self.kind == "loss" else "is in an epoch"
            effect = f"an image of {rare} {verb} {few:.2f} times, of {often} {many:.2f} times"
        return [f"note: balance={self.kind}: {effect}"]


def weighted_cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor, *, smoothing: float, reduction: str = "sum"
) -> Tensor:
    """Sum of cross-entropies in which the share of a class weighs by `weights`, (classes,)."""
    logits = at_least_float32(logits)
    shares = targets * weights.to(targets, non_blocking=targets.is_cuda)
    whole = shares.sum(dim=1)
    losses = F.cross_entropy(
        logits, shares / whole.unsqueeze(1), label_smoothing=smoothing, reduction="none"
    )
    return (losses * whole).sum() if reduction == "sum" else losses * whole


def logit_adjusted_cross_entropy(
    logits: Tensor, targets: Tensor, prior: Tensor, *, smoothing: float, reduction: str = "sum"
) -> Tensor:
    """Sum of cross-entropies of logits + log prior, (classes,), all above 0.

    Smoothing spreads by the prior: spread evenly, it would teach that rare classes are anywhere.
    """
    logits = at_least_float32(logits)
    on_device = prior.to(targets, non_blocking=targets.is_cuda)
    shift = prior.log().to(logits, non_blocking=logits.is_cuda)
    spread = (1 - smoothing) * targets + smoothing * on_device
    return smoothed_cross_entropy(logits + shift, spread, smoothing=0.0, reduction=reduction)
