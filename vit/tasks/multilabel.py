"""Multi-label classification: binary cross-entropy for each class.

    loss        mean over classes of  - q log p - (1 - q) log(1 - p),   p = sigmoid(logit)
    q           (1 - smoothing) * target + smoothing / classes, as with one class an image
    val_loss    the same without smoothing
    val_map     mean over classes of the average precision, of classes with a validation image
    val_f1      mean over classes of F1, predicted where p >= 0.5

Average precision ranks all images, so the logits of all processes are gathered: 4 bytes per image
and class on each process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample
from vit.data.multilabel_targets import MultiHot, labels_of
from vit.evaluation.multilabel_metrics import average_precisions, f1_scores, nanmean
from vit.tasks.losses import smoothed_binary_cross_entropy
from vit.tasks.task import Event, Task, TrainingRun, forward, mixed


class MultiLabel(Task):
    """Multi-label classification, with MixUp and CutMix."""

    metric = "val_map"

    def label_width(self, config: Config) -> int | None:
        """One column a class."""
        return config.model.num_classes

    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch, (1,)."""
        targets = batch.labels.to(images.device, non_blocking=True).to(images.dtype)
        images, targets = mixed(run, batch, images, targets, epoch)
        smoothing = run.config.training.smoothing
        logits = forward(run, images)
        return smoothed_binary_cross_entropy(logits, targets, smoothing=smoothing).view(1)

    def tally(self, samples: Sequence[Sample]) -> "MultiLabelTally":
        """Start a validation on `samples`."""
        return MultiLabelTally(samples)

    def format_scores(self, event: Event) -> str:
        """Mean average precision and F1."""
        return f"val mAP {event['val_map']:.2%}  F1 {event['val_f1']:.2%}"


class MultiLabelTally:
    """Loss, mean average precision and F1, from all logits.

    Args:
        samples: The validation images, over all processes.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def add(self, run: TrainingRun, batch: Batch, images: Tensor) -> None:
        """Add one batch."""
        logits = forward(run, images).to(run.dtype).cpu()
        self.sums += summed_loss(logits, batch.labels)
        self.outputs.append((batch.indices, logits))

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Mean loss, mean average precision and F1."""
        loss, count = totals
        # one pair of tensors per process: gathering many small ones is slow
        mine = [tuple(torch.cat(parts) for parts in zip(*self.outputs, strict=True))]
        found = run.gather([one for one in mine if one])

        def score() -> dict[str, float]:
            indices, logits = (torch.cat(parts) for parts in zip(*found, strict=True))
            order = indices.argsort()  # independent of how images are split over processes
            indices, logits = indices[order], logits[order]
            targets = MultiHot(map(labels_of, self.samples), logits.shape[1])[indices]
            return {
                "val_map": nanmean(average_precisions(logits, targets)),
                "val_f1": nanmean(f1_scores(logits >= 0, targets)),
            }

        scores = run.on_main(score)
        return {"val_loss": loss / count, **scores, "chosen_by": "val_map"}


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed loss and number of images, float64, (2,)."""
    losses = F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
    return torch.stack([losses.mean(dim=1).double().sum(), torch.tensor(len(logits)).double()])
