"""Training tasks: the protocol of loss and validation metrics, and single-label classification.

Loop, checkpoints and processes are independent of the task and use `TrainingState.task`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.data.dataset import Batch
from vit.data.dataset_types import Sample
from vit.data.mixup import mix, sample_mix_plan
from vit.training.batch_norm_statistics import frozen_running_stats
from vit.training.class_balance import ClassBalance
from vit.training.losses import smoothed_cross_entropy

if TYPE_CHECKING:
    from vit.training.training_loop import TrainingState


class Tally(Protocol):
    """Accumulates validation metrics on one process.

    Args:
        sums: Sums over batches, to be summed over processes, float64; the last entry is the number
            of images.
    """

    sums: Tensor

    def add(self, run: "TrainingState", batch: Batch, images: Tensor) -> None:
        """Add one batch, whose normalised `images` are on the device."""

    def scores(self, run: "TrainingState", totals: Sequence[float]) -> dict[str, Any]:
        """Scores for the epoch's event, from the sums over all processes; all make this call."""


class Task(Protocol):
    """A training task."""

    def loss(self, run: "TrainingState", batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch, (1,), whose normalised `images` are on the device.

        Runs the forward pass, so all processes must make this call, also with an empty batch.
        """

    def tally(self, samples: Sequence[Sample]) -> Tally:
        """Start a validation on `samples`, over all processes."""


class Classification:
    """Single-label classification: cross-entropy with label smoothing, MixUp and CutMix.

    Args:
        balance: Treatment of class imbalance; none if omitted.
    """

    def __init__(self, balance: ClassBalance | None = None) -> None:
        self.balance = balance

    def loss(self, run: "TrainingState", batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch, (1,)."""
        config = run.config
        labels = batch.labels.to(images.device, non_blocking=True)
        targets = F.one_hot(labels, config.model.num_classes).to(images.dtype)
        images, targets = mixed(run, batch, images, targets, epoch)
        logits = forward(run, images)
        loss = smoothed_cross_entropy if self.balance is None else self.balance.loss
        return loss(logits, targets, smoothing=config.training.smoothing).view(1)

    def tally(self, samples: Sequence[Sample]) -> Tally:
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

    def add(self, run: "TrainingState", batch: Batch, images: Tensor) -> None:
        """Add one batch."""
        logits = forward(run, images).to(run.dtype).cpu()
        loss, correct, count = loss_and_correct(logits, batch.labels).unsqueeze(1)
        each = correct_per_class(logits, batch.labels, self.classes)
        self.sums += torch.cat([loss, correct, each, count])

    def scores(self, run: "TrainingState", totals: Sequence[float]) -> dict[str, Any]:
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


def mixed(
    run: "TrainingState", batch: Batch, images: Tensor, targets: Tensor, epoch: int
) -> tuple[Tensor, Tensor]:
    """Apply the MixUp and CutMix of the current step to normalised `images` and `targets`.

    Args:
        run: The training.
        batch: The micro-batch.
        images: Its images, (batch, channels, height, width).
        targets: Class distributions, (batch, classes).
        epoch: The epoch, from 0.
    """
    plan = sample_mix_plan(
        run.config.augment,
        seed=run.config.training.seed,
        epoch=epoch,
        step=run.step,
        batch_size=run.config.data.batch_size,
    )
    return mix(images, targets, batch.positions, plan)


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


def forward(run: "TrainingState", images: Tensor) -> Tensor:
    """Logits of normalised `images`; with an empty batch, of one blank image that is dropped.

    All processes must take part in each forward pass, and some attention kernels refuse an empty
    batch.
    """
    if len(images):
        logits: Tensor = run.model(images)
        return logits
    with frozen_running_stats(run.network):
        return cast(Tensor, run.model(images.new_zeros(1, *images.shape[1:])))[:0]
