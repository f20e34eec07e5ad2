"""What a network learns: the loss of a micro-batch, and what validation counts.

The loop, checkpoints and processes know nothing of it: they ask `TrainingState.task`.
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
    """Adds up what validation sees, on one process.

    Args:
        sums: Whatever is summed over batches and processes, float64; the last entry is the number
            of images.
    """

    sums: Tensor

    def add(self, run: "TrainingState", batch: Batch, images: Tensor) -> None:
        """Count one batch, whose normalised `images` are on the device."""

    def scores(self, run: "TrainingState", totals: Sequence[float]) -> dict[str, Any]:
        """What an epoch's event says; `totals` are the sums over all processes, which call this."""


class Task(Protocol):
    """What a network learns."""

    def loss(self, run: "TrainingState", batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch, (1,), whose normalised `images` are on the device.

        All processes must take part in the pass that it makes, also with an empty batch.
        """

    def tally(self, samples: Sequence[Sample]) -> Tally:
        """Begins a validation on `samples`, of which each process sees some."""


class Classification:
    """Classes, maybe of mixed images: cross-entropy with smoothed labels.

    Args:
        balance: How unequal classes are treated; as they are where left out.
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
        """Begins a validation."""
        return ClassTally(classes_of(samples))


class ClassTally:
    """Loss, right answers and images; right answers and images of each class.

    Args:
        classes: Number of the classes.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.sums = torch.zeros(3 + 2 * classes, dtype=torch.float64)

    def add(self, run: "TrainingState", batch: Batch, images: Tensor) -> None:
        """Count one batch."""
        logits = forward(run, images).to(run.dtype).cpu()
        loss, correct, count = judged(logits, batch.labels).unsqueeze(1)
        each = judged_by_class(logits, batch.labels, self.classes)
        self.sums += torch.cat([loss, correct, each, count])

    def scores(self, run: "TrainingState", totals: Sequence[float]) -> dict[str, Any]:
        """Mean loss, share of right answers, and its mean over classes that have images."""
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
    """Normalised `images` and their `targets` after MixUp and CutMix, as the step of `run` has it.

    Args:
        run: What is trained.
        batch: The micro-batch.
        images: Its images.
        targets: Shares of the classes, (batch, classes).
        epoch: Number of the epoch, from 0.
    """
    plan = sample_mix_plan(
        run.config.augment,
        seed=run.config.training.seed,
        epoch=epoch,
        step=run.step,
        batch_size=run.config.data.batch_size,
    )
    return mix(images, targets, batch.positions, plan)


def judged(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed loss, number of right answers and number of images, float64, (3,)."""
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack([loss.double(), correct.double(), torch.tensor(len(logits)).double()])


def classes_of(samples: Sequence[Sample]) -> int:
    """Number of the classes up to the last that one of `samples` has."""
    return 1 + max((sample.label for sample in samples), default=-1)


def judged_by_class(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Right answers of each class, then images of each, float64, (2 * classes,)."""
    right = labels[logits.argmax(dim=1) == labels]
    counts = [torch.bincount(some, minlength=classes) for some in (right, labels)]
    return torch.cat(counts).double()


def balanced_accuracy(each: Sequence[float]) -> float:
    """Mean share of right answers of the classes that have images, from `judged_by_class`."""
    half = len(each) // 2
    recalls = [right / seen for right, seen in zip(each[:half], each[half:], strict=True) if seen]
    return math.fsum(recalls) / len(recalls)


def forward(run: "TrainingState", images: Tensor) -> Tensor:
    """Logits of normalised `images`, of which there may be none.

    All processes must take part in each pass, and some attention kernels refuse an empty batch.
    """
    if len(images):
        logits: Tensor = run.model(images)
        return logits
    with frozen_running_stats(run.network):
        return cast(Tensor, run.model(images.new_zeros(1, *images.shape[1:])))[:0]
