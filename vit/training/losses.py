"""Cross-entropy with smoothed labels, over one label or a mixture of two.

    loss = - sum_k q_k log softmax(logits)_k,   q = (1 - smoothing) * target + smoothing / classes

Source: Szegedy et al., "Rethinking the Inception Architecture", section 7, arXiv:1512.00567.
"""

from torch import Tensor
from torch.nn import functional as F


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, *, smoothing: float) -> Tensor:
    """Sum over the batch, so that micro-batches of any size add up to the whole batch's loss.

    Args:
        logits: (batch, classes).
        targets: Probability of each class, (batch, classes).
        smoothing: Share of the target spread over all classes.

    Returns:
        A scalar, in float32 or wider.
    """
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")
