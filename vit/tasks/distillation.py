"""Knowledge distillation: a student learns the answers of a teacher beside the labels.

    soft   (1 - alpha) L(y, z) + alpha tau^2 KL(softmax(t / tau) || softmax(z / tau))
    hard   (1 - alpha) L(y, z) + alpha CE(argmax t, z)

z are the logits of the student, t those of the teacher (up to a constant of each image), y the
label, L the loss without a teacher, with its label smoothing and class weights. Of images with
several classes the soft term is the mean over the classes of KL(sigmoid(t / tau) ||
sigmoid(z / tau)).

t belongs to the whole image and to its mirror image, not to the crop that the student sees: it is
computed once, before the first step (vit/training/teacher.py). MixUp and CutMix mix the teacher's
distributions with the share that they give the labels.

Source: soft: Hinton et al., "Distilling the Knowledge in a Neural Network", section 2,
arXiv:1503.02531; hard: Touvron et al. (DeiT), section 4, arXiv:2012.12877. That a teacher which
sees the student's crop teaches better, at the price of a pass of the teacher in each epoch:
Beyer et al., arXiv:2106.05237.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.config.training_config import DistillationConfig
from vit.data.dataset import Batch
from vit.data.dataset_types import Splits
from vit.precision import at_least_float32
from vit.tasks.losses import user_loss
from vit.tasks.task import TrainingRun, forward, mixed

LabelLoss = Callable[..., Tensor]
"""Logits and targets, (batch, classes) -> the summed loss; reduction="none": of each image."""


@dataclass(frozen=True)
class Distillation:
    """The teacher's answers for the training images, and their part of the loss.

    Args:
        answers: Logits of the teacher, up to a constant of each image, (images, classes) on the
            CPU; of images with several classes log-odds.
    """

    answers: Tensor
    settings: DistillationConfig
    multilabel: bool = False

    @staticmethod
    def of(config: Config, splits: Splits | None) -> "Distillation | None":
        """That of a run on `splits`; None without a teacher."""
        if splits is None or splits.teacher_answers is None:
            return None
        return Distillation(
            splits.teacher_answers, config.distillation, multilabel=config.training.multilabel
        )

    def targets(self, indices: Tensor) -> Tensor:
        """What the student learns of the teacher, (batch, classes) float32 on the CPU."""
        scores = self.answers[indices].float()
        if self.settings.distillation_type == "hard":
            return F.one_hot(scores.argmax(dim=1), scores.shape[1]).float()
        scores = scores / self.settings.distillation_tau
        return scores.sigmoid() if self.multilabel else scores.softmax(dim=1)

    def teacher_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum over the batch of the teacher's term, in float32 or wider, before its weight
        alpha."""
        logits = at_least_float32(logits)
        targets = targets.to(logits)
        if self.settings.distillation_type == "hard":
            return F.cross_entropy(logits, targets, reduction="sum")
        tau = self.settings.distillation_tau
        scaled = logits / tau
        if self.multilabel:
            with_and_without = torch.stack([F.logsigmoid(scaled), F.logsigmoid(-scaled)])
            both = torch.stack([targets, 1 - targets])
            divergence = F.kl_div(with_and_without, both, reduction="sum") / logits.shape[1]
        else:
            divergence = F.kl_div(scaled.log_softmax(dim=1), targets, reduction="sum")
        return tau**2 * divergence

    def loss(self, label_loss: Tensor, teacher_loss: Tensor) -> Tensor:
        """Weighted sum of the two terms."""
        alpha = self.settings.distillation_alpha
        return (1 - alpha) * label_loss + alpha * teacher_loss


def classifier_loss(
    run: TrainingRun,
    batch: Batch,
    images: Tensor,
    targets: Tensor,
    epoch: int,
    label_loss: LabelLoss,
    distillation: Distillation | None,
) -> Tensor:
    """Summed loss of one micro-batch of a classifier, (1,), with the forward pass; `targets` are
    shares, (batch, classes), on the device."""
    if (own := run.config.user_code.loss) is not None:
        label_loss = partial(user_loss, own)
    if distillation is None:
        if batch.weights is not None:
            return weighted_loss(run, batch, images, targets, epoch, label_loss)
        images, targets = mixed(run, batch, images, targets, epoch)
        return label_loss(forward(run, images, batch.sizes), targets).view(1)
    taught = distillation.targets(batch.indices).to(targets, non_blocking=True)
    images, both = mixed(run, batch, images, torch.cat([targets, taught], dim=1), epoch)
    targets, taught = both.chunk(2, dim=1)
    logits = forward(run, images)
    terms = label_loss(logits, targets), distillation.teacher_loss(logits, taught)
    return distillation.loss(*terms).view(1)


def weighted_loss(
    run: TrainingRun, batch: Batch, images: Tensor, targets: Tensor, epoch: int, loss: LabelLoss
) -> Tensor:
    """`classifier_loss` by the weights of images: each share of a mixture has its image's."""
    assert batch.weights is not None
    weights = batch.weights.to(targets, non_blocking=True).unsqueeze(1)
    images, both = mixed(run, batch, images, torch.cat([targets * weights, weights], dim=1), epoch)
    targets, weights = both[:, :-1], both[:, -1:]
    targets = torch.where(weights > 0, targets / weights, 1 / targets.shape[1])
    losses = loss(forward(run, images, batch.sizes), targets, reduction="none")
    return (losses * weights.squeeze(1)).sum().view(1)
