"""Single-label classification: cross-entropy with label smoothing, MixUp and CutMix."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample, Splits
from vit.tasks.class_balance import ClassBalance
from vit.tasks.losses import smoothed_cross_entropy
from vit.tasks.task import Event, Task, TrainingRun, forward, mixed

NOTABLE_DIFFERENCE = 0.05
"""Difference of balanced accuracy and accuracy above which both are logged."""


class Classification(Task):
    """Single-label classification.

    Args:
        balance: Treatment of class imbalance; none if omitted.
    """

    metric = "val_top1"

    def __init__(self, balance: ClassBalance | None = None) -> None:
        self.balance = balance

    def with_data(self, config: Config, splits: Splits | None) -> "Classification":
        """The task with the frequencies of the classes, if its loss needs them."""
        if config.training.balance == "none" or splits is None:
            return self
        return Classification(ClassBalance.of(config, splits.train))

    def notes(self, config: Config, splits: Splits) -> list[str]:  # noqa: ARG002
        """How class imbalance is treated."""
        return [] if self.balance is None else self.balance.notes(splits.classes)

    def format_scores(self, event: Event) -> str:
        """Accuracy, and balanced accuracy if it differs or ranks epochs."""
        return format_accuracy(event)

    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch, (1,)."""
        config = run.config
        labels = batch.labels.to(images.device, non_blocking=True)
        targets = F.one_hot(labels, config.model.num_classes).to(images.dtype)
        images, targets = mixed(run, batch, images, targets, epoch)
        logits = forward(run, images)
        loss = smoothed_cross_entropy if self.balance is None else self.balance.loss
        return loss(logits, targets, smoothing=config.training.smoothing).view(1)

    def tally(self, samples: Sequence[Sample]) -> "ClassTally":
        """Start a validation."""
        return ClassTally(count_classes(samples))


class ClassTally:
    """Loss, accuracy and balanced accuracy.

    Args:
        classes: Number of classes.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.sums = torch.zeros(3 + 2 * classes, dtype=torch.float64)

    def add(self, run: TrainingRun, batch: Batch, images: Tensor) -> None:
        """Add one batch."""
        logits = forward(run, images).to(run.dtype).cpu()
        loss, correct, count = loss_and_correct(logits, batch.labels).unsqueeze(1)
        each = correct_per_class(logits, batch.labels, self.classes)
        self.sums += torch.cat([loss, correct, each, count])

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Mean loss, accuracy, and balanced accuracy over classes that have images."""
        loss, correct, *each, count = totals
        found: dict[str, Any] = {
            "val_loss": loss / count,
            "val_top1": correct / count,
            "val_balanced_accuracy": balanced_accuracy(each),
        }
        if run.config.training.balance != "none":
            found["chosen_by"] = "val_balanced_accuracy"
        return found


def loss_and_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed loss, number of correct predictions and number of images, float64, (3,)."""
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack([loss.double(), correct.double(), torch.tensor(len(logits)).double()])


def count_classes(samples: Sequence[Sample]) -> int:
    """One more than the largest label in `samples`."""
    return 1 + max((sample.label for sample in samples), default=-1)


def correct_per_class(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Correct predictions of each class, then images of each, float64, (2 * classes,)."""
    right = labels[logits.argmax(dim=1) == labels]
    counts = [torch.bincount(some, minlength=classes) for some in (right, labels)]
    return torch.cat(counts).double()


def balanced_accuracy(each: Sequence[float]) -> float:
    """Mean recall of the classes that have images, from `correct_per_class`."""
    half = len(each) // 2
    recalls = [right / seen for right, seen in zip(each[:half], each[half:], strict=True) if seen]
    return math.fsum(recalls) / len(recalls)


def format_accuracy(event: Event) -> str:
    """Accuracy for a log line, and balanced accuracy if it differs or ranks epochs."""
    accuracy = f"val top-1 {event['val_top1']:.2%}"
    balanced = event.get("val_balanced_accuracy", event["val_top1"])
    if "chosen_by" in event or abs(balanced - event["val_top1"]) >= NOTABLE_DIFFERENCE:
        return f"{accuracy}  balanced {balanced:.2%}"
    return accuracy
