"""Losses of the tasks against torch's own."""

import torch
from torch import nn

from vit.tasks.losses import smoothed_cross_entropy


def test_loss_equals_torchs_on_labels():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 4), torch.tensor([0, 3, 1, 1, 2])
    targets = nn.functional.one_hot(labels, 4).float()
    expected = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, labels) * 5
    torch.testing.assert_close(smoothed_cross_entropy(logits, targets, smoothing=0.1), expected)
