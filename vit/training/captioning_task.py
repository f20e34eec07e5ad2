"""Captioning: next-token cross-entropy, optionally with classification from the same encoder.

    loss = Σ cross-entropy of each next token / mean tokens of a caption
    val_loss           mean over all tokens of the validation captions
    val_loss_shuffled  the same captions, each with another image

The divisor is a constant of the data instead of the tokens of a batch, so the loss is a sum over
images, and every token has the same weight with any number of processes and micro-batches. The two
validation losses are equal for a decoder that ignores the image.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.data.captions.tokenizer import Tokenizer
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample
from vit.errors import DataError
from vit.evaluation.caption_metrics import caption_scores
from vit.generation.caption_likelihood import caption_losses, matched_and_shuffled_losses
from vit.generation.generate import generate_captions
from vit.generation.generation_config import Search
from vit.model.captioner import Captioner, CaptionerOutput
from vit.training.batch_norm_statistics import frozen_running_stats
from vit.training.classification_task import (
    balanced_accuracy,
    correct_per_class,
    count_classes,
    loss_and_correct,
)
from vit.training.collectives import everyones, on_main
from vit.training.losses import smoothed_cross_entropy

if TYPE_CHECKING:
    from vit.training.training_loop import TrainingState

SCORES = ("bleu4", "rouge_l", "cider", "chrf", "distinct", "exact")


class Captioning:
    """Captioning, optionally with classification.

    Args:
        tokenizer: Tokenizer of the captions.
        mean_tokens: Mean number of tokens of a training caption, including the end token.
        classifies: Whether to add the classification loss, with the same weight.
    """

    def __init__(self, tokenizer: Tokenizer, *, mean_tokens: float, classifies: bool) -> None:
        self.tokenizer = tokenizer
        self.mean_tokens = mean_tokens
        self.classifies = classifies

    def loss(
        self,
        run: "TrainingState",
        batch: Batch,
        images: Tensor,
        epoch: int,  # noqa: ARG002
    ) -> Tensor:
        """Summed loss of one micro-batch, (1,)."""
        config = run.config
        smoothing = config.training.smoothing
        words = target_words(batch, images.device)
        said = forward(run, images, words[:, :-1])
        losses, _ = caption_losses(
            said.caption_logits, words, self.tokenizer.pad, smoothing=smoothing
        )
        loss = losses.sum() / self.mean_tokens
        if self.classifies:
            labels = batch.labels.to(images.device, non_blocking=True)
            targets = F.one_hot(labels, config.model.num_classes).to(images.dtype)
            loss = loss + smoothed_cross_entropy(said.class_logits, targets, smoothing=smoothing)
        return loss.view(1)

    def tally(self, samples: Sequence[Sample]) -> "CaptionTally":
        """Start a validation on `samples`."""
        return CaptionTally(self, samples)


class CaptionTally:
    """Losses with matching and with shuffled images, and generated captions.

    Args:
        task: The task.
        samples: The validation images, over all processes.
    """

    def __init__(self, task: Captioning, samples: Sequence[Sample]) -> None:
        self.task, self.samples = task, samples
        self.classes = count_classes(samples) if task.classifies else 0
        # losses and tokens with the matching image and with another one, class loss, correct
        # predictions, correct predictions and images of each class, count
        self.sums = torch.zeros(7 + 2 * self.classes, dtype=torch.float64)
        self.written: list[tuple[int, str]] = []

    def add(self, run: "TrainingState", batch: Batch, images: Tensor) -> None:
        """Add one batch."""
        network, task = run.network, self.task
        assert isinstance(network, Captioner)
        if not len(images):
            return
        assert batch.mismatched_ids is not None
        words, others = target_words(batch, images.device), batch.mismatched_ids.to(images.device)
        with run.accelerator.autocast():
            classes, memory = network.encode_images(images)
            few = is_chosen(batch.indices, len(self.samples), run.config.training.caption_samples)
            seen = memory[few.to(images.device)]
            sentences = generate_captions(network.decoder, seen, task.tokenizer, Search())
            losses = matched_and_shuffled_losses(
                network.decoder, memory, words, others, task.tokenizer.pad
            )
        class_sums = torch.zeros(3 + 2 * self.classes, dtype=torch.float64)
        if task.classifies:
            logits = classes.to(run.dtype).cpu()
            class_sums[:2] = loss_and_correct(logits, batch.labels)[:2]
            class_sums[2:-1] = correct_per_class(logits, batch.labels, self.classes)
        class_sums[-1] = len(images)
        self.sums += torch.cat([losses.sum(dim=1), class_sums])
        texts = [best[0].text for best in sentences]
        self.written += zip(batch.indices[few].tolist(), texts, strict=True)

    def scores(self, run: "TrainingState", totals: Sequence[float]) -> dict[str, Any]:
        """Mean losses per token, and caption metrics against all references."""
        right, words, wrong, others, class_loss, correct, *each, count = totals
        found = {"val_loss": right / words, "val_loss_shuffled": wrong / others}
        if self.task.classifies:
            found["val_caption_loss"] = found["val_loss"]
            found["val_loss"] += class_loss / count
            found["val_top1"] = correct / count
            found["val_balanced_accuracy"] = balanced_accuracy(each)
        captions = sorted(everyones(self.written))
        if not captions:
            most = run.config.training.caption_samples
            raise DataError(f"not one of the {most} chosen validation images can be read")
        references = [self.samples[index].captions for index, _ in captions]

        def score() -> dict[str, float]:
            return caption_scores([text for _, text in captions], references)

        format_count = on_main(run.accelerator, score)
        return {**found, **{f"val_{name}": format_count[name] for name in SCORES}}


def is_chosen(indices: Tensor, count: int, most: int) -> Tensor:
    """Mask of the images that are captioned: at most `most` of `count`, evenly spread; bool."""
    return indices * min(most, count) % count < min(most, count)


def target_words(batch: Batch, device: torch.device) -> Tensor:
    """Caption ids of a batch on `device`, (batch, tokens)."""
    assert batch.caption_ids is not None, "the loader was given no captions"
    return batch.caption_ids.to(device, non_blocking=True)


def forward(run: "TrainingState", images: Tensor, ids: Tensor) -> CaptionerOutput:
    """Answers to normalised `images`, of which there may be none; all processes must call it."""
    if len(images):
        said: CaptionerOutput = run.model(images, ids)
        return said
    with frozen_running_stats(run.network):
        alone: CaptionerOutput = run.model(
            images.new_zeros(1, *images.shape[1:]), ids.new_zeros(1, 1)
        )
    return CaptionerOutput(alone.class_logits[:0], alone.caption_logits[:0, :0])
