"""Cross-entropy and binary cross-entropy with label smoothing, for soft targets.

    loss = - sum_k q_k log softmax(logits)_k,   q = (1 - smoothing) * target + smoothing / classes
    loss = - mean_k (q_k log p_k + (1 - q_k) log (1 - p_k)),       p = sigmoid(logits)

Source: Szegedy et al., "Rethinking the Inception Architecture", section 7, arXiv:1512.00567.
"""

from torch import Tensor
from torch.nn import functional as F

from vit.precision import at_least_float32


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, *, smoothing: float) -> Tensor:
    """Sum over the batch, so that micro-batches of any size add up to the whole batch's loss.

    Args:
        logits: (batch, classes).
        targets: Probability of each class, (batch, classes).

    Returns:
        A scalar, in float32 or wider.
    """
    logits = at_least_float32(logits)
    return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")


def smoothed_binary_cross_entropy(logits: Tensor, targets: Tensor, *, smoothing: float) -> Tensor:
    """Sum over the batch of the mean over the classes, for multi-label targets.

    Args:
        logits: (batch, classes).
        targets: Probability of each class, (batch, classes); they need not sum to 1.

    Returns:
        A scalar, in float32 or wider.
    """
    logits = at_least_float32(logits)
    spread = (1 - smoothing) * targets.to(logits) + smoothing / logits.shape[1]
    losses = F.binary_cross_entropy_with_logits(logits, spread, reduction="sum")
    return losses / logits.shape[1]
