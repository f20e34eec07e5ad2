"""What a network learns: the loss of a micro-batch, and what validation counts.

The loop, checkpoints and processes know nothing of it: they ask `Training.task`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.data.loading import Batch
from vit.data.mixing import draw_plan, mix
from vit.data.samples import Sample
from vit.training.losses import smoothed_cross_entropy

if TYPE_CHECKING:
    from vit.training.loop import Training


class Tally(Protocol):
    """Adds up what validation sees, on one process.

    Args:
        sums: Whatever is summed over batches and processes, float64; the last entry is the number
            of pictures.
    """

    sums: Tensor

    def add(self, run: "Training", batch: Batch, images: Tensor) -> None:
        """Count one batch, whose normalised `images` are on the device."""

    def scores(self, run: "Training", totals: Sequence[float]) -> dict[str, Any]:
        """What an epoch's event says; `totals` are the sums over all processes, which call this."""


class Task(Protocol):
    """What a network learns."""

    def loss(self, run: "Training", batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch, (1,), whose normalised `images` are on the device.

        All processes must take part in the pass that it makes, also with an empty batch.
        """

    def tally(self, samples: Sequence[Sample]) -> Tally:
        """Begins a validation on `samples`, of which each process sees some."""


class Classification:
    """Classes, maybe of mixed pictures: cross-entropy with smoothed labels."""

    def loss(self, run: "Training", batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch, (1,)."""
        config = run.config
        labels = batch.labels.to(images.device, non_blocking=True)
        targets = F.one_hot(labels, config.model.num_classes).to(images.dtype)
        plan = draw_plan(
            config.augment,
            seed=config.training.seed,
            epoch=epoch,
            step=run.step,
            batch_size=config.data.batch_size,
        )
        images, targets = mix(images, targets, batch.positions, plan)
        logits = forward(run, images)
        smoothing = config.training.smoothing
        return smoothed_cross_entropy(logits, targets, smoothing=smoothing).view(1)

    def tally(self, samples: Sequence[Sample]) -> Tally:  # noqa: ARG002
        """Begins a validation."""
        return ClassTally()


class ClassTally:
    """Loss, right answers and pictures."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, run: "Training", batch: Batch, images: Tensor) -> None:
        """Count one batch."""
        self.sums += judged(forward(run, images).to(run.dtype).cpu(), batch.labels)

    def scores(self, run: "Training", totals: Sequence[float]) -> dict[str, Any]:  # noqa: ARG002
        """Mean loss and share of right answers."""
        loss, correct, count = totals
        return {"val_loss": loss / count, "val_top1": correct / count}


def judged(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed loss, number of right answers and number of pictures, float64, (3,)."""
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack([loss.double(), correct.double(), torch.tensor(len(logits)).double()])


def forward(run: "Training", images: Tensor) -> Tensor:
    """Logits of normalised `images`, of which there may be none.

    All processes must take part in each pass, and some attention kernels refuse an empty batch.
    """
    given = images if len(images) else images.new_zeros(1, *images.shape[1:])
    logits: Tensor = run.model(given)[: len(images)]
    return logits
