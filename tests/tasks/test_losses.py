"""Losses of the tasks against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vit.tasks.losses import corn_loss, corn_probabilities, smoothed_cross_entropy

GRADE_LOGITS = torch.tensor(
    [[0.5, -1.0, 2.0], [3.0, 0.25, -0.5], [-2.0, 1.5, 0.0], [0.1, 0.2, 0.3], [4.0, 4.0, 4.0]],
    dtype=torch.float64,
)


def test_loss_equals_torchs_on_labels():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 4), torch.tensor([0, 3, 1, 1, 2])
    targets = nn.functional.one_hot(labels, 4).float()
    expected = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, labels) * 5
    torch.testing.assert_close(smoothed_cross_entropy(logits, targets, smoothing=0.1), expected)


@pytest.mark.parametrize(
    ("grades", "published", "terms"),
    [
        ([0, 1, 2, 3, 3], 0.5601193985746235, 12),
        ([2, 0, 1, 3, 0], 1.660623602518227, 10),
        ([0, 0, 0, 0, 0], 1.7824277869576401, 5),
        ([3, 3, 3, 3, 3], 0.5590466310424522, 15),
    ],
)
def test_corn_equals_coral_pytorch(grades, published, terms):
    """Values of coral_pytorch.losses.corn_loss 1.4.0, a mean over the `terms` of the loss."""
    loss = corn_loss(GRADE_LOGITS, torch.tensor(grades), 4)
    assert float(loss) == pytest.approx(published * terms, rel=1e-12)


def test_corn_is_the_cross_entropy_of_its_probabilities():
    """Of the paper's products of conditional probabilities, whose classes add up to 1."""
    torch.manual_seed(0)
    logits, grades = torch.randn(64, 4, dtype=torch.float64) * 3, torch.arange(64) % 5
    found = corn_probabilities(logits)
    exceeded = logits.sigmoid().cumprod(dim=1)  # P(grade > k)
    torch.testing.assert_close(found, -torch.diff(F.pad(F.pad(exceeded, (1, 0), value=1), (0, 1))))
    expected = F.nll_loss(found.log(), grades, reduction="sum")
    torch.testing.assert_close(corn_loss(logits, grades, 5), expected)
    extreme = torch.tensor([[1e4, 1e4], [-1e4, 1e4], [1e4, -1e4]])
    assert corn_probabilities(extreme).tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert corn_loss(extreme, torch.tensor([2, 0, 1]), 3) == 0
    assert corn_loss(extreme[:1], torch.tensor([0]), 3) == 1e4
    two = torch.randn(8, 1)  # binary cross-entropy
    torch.testing.assert_close(corn_probabilities(two)[:, 1:], two.sigmoid())
    with pytest.raises(ValueError, match="size"):
        corn_loss(extreme, torch.tensor([2, 0, 1]), 4)
