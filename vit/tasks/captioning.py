"""Captioning: next-token cross-entropy, optionally with classification from the same encoder.

    loss = Σ cross-entropy of each next token / mean tokens of a caption
    val_loss           mean over all tokens of the validation captions
    val_loss_shuffled  the same captions, each with another image

The divisor is a constant of the data instead of the tokens of a batch, so the loss is a sum over
images, and every token has the same weight with any number of processes and micro-batches. The two
validation losses are equal for a decoder that ignores the image.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.data.captions.caption_ids import CaptionIds
from vit.data.captions.tokenizer import Tokenizer
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample, Splits
from vit.errors import DataError
from vit.evaluation.caption_metrics import caption_scores
from vit.generation.caption_likelihood import (
    caption_losses,
    ignores_image,
    matched_and_shuffled_losses,
)
from vit.generation.generate import generate_captions
from vit.generation.generation_config import Search
from vit.model.captioner import Captioner, CaptionerOutput
from vit.tasks.classification import (
    balanced_accuracy,
    correct_per_class,
    count_classes,
    format_accuracy,
    loss_and_correct,
)
from vit.tasks.losses import smoothed_cross_entropy
from vit.tasks.task import Event, Task, TrainingRun

MIN_CIDER_IMAGES = 100
"""Validation images below which CIDEr is too noisy to rank epochs."""
SCORES = ("bleu4", "rouge_l", "cider", "chrf", "distinct", "exact")


class Captioning(Task):
    """Captioning, optionally with classification.

    Args:
        tokenizer: Tokenizer of the captions; needed for the loss and metrics.
        mean_tokens: Mean number of tokens of a training caption, including the end token.
    """

    metric = "val_cider"
    classifies = False
    """Whether to add the classification loss, with the same weight."""

    def __init__(self, tokenizer: Tokenizer | None = None, *, mean_tokens: float = 1.0) -> None:
        self._tokenizer = tokenizer
        self.mean_tokens = mean_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the captions."""
        assert self._tokenizer is not None, "the data have a tokenizer"
        return self._tokenizer

    def with_data(self, config: Config, splits: Splits | None) -> "Captioning":
        """The task with the tokenizer and the mean length of the captions."""
        assert splits is not None, "captions are learned from data"
        assert splits.tokenizer is not None, "the data have no tokenizer"
        assert config.decoder.caption_tokens is not None, "the data completes it"
        captions = [sample.captions for sample in splits.train]
        ids = CaptionIds(captions, splits.tokenizer, config.decoder.caption_tokens)
        return type(self)(splits.tokenizer, mean_tokens=ids.mean_tokens)

    def loss(
        self,
        run: TrainingRun,
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

    def rank(self, event: Event) -> tuple[float, float]:
        """CIDEr, then negative loss; with few images for CIDEr, only the loss."""
        few = event.get("val_images", MIN_CIDER_IMAGES) < MIN_CIDER_IMAGES
        return self.rank_by_loss(event) if few else super().rank(event)

    @staticmethod
    def rank_by_loss(event: Event) -> tuple[float, float]:
        """Negative loss as the only criterion."""
        return -float(event["val_loss"]), 0.0

    def format_scores(self, event: Event) -> str:
        """Losses with matching and shuffled images, and caption metrics."""
        own = event.get("val_caption_loss")
        parts = [] if own is None else [f"captions {own:.3f}"]
        parts.append(
            f"with other images {event['val_loss_shuffled']:.3f}  BLEU-4 {event['val_bleu4']:.3f}"
            f"  CIDEr {event['val_cider']:.3f}"
        )
        if event.get("val_exact"):
            parts.append(f"exact {event['val_exact']:.2%}")
        return "  ".join(parts)

    def format_result(self, event: Event) -> str:
        """The loss and the scores."""
        return super().format_result(event).replace(" ", f" loss {event['val_loss']:.3f}, ", 1)

    def warning(self, event: Event) -> str | None:
        """A log line if captions fit shuffled images as well as their own; else None."""
        if event.get("val_images", 2) < 2:
            return None
        right = event.get("val_caption_loss", event["val_loss"])
        wrong = event["val_loss_shuffled"]
        if not ignores_image(right, wrong):
            return None
        return (
            f"note: the decoder ignores the images: its loss is {right:.3f}, and "
            f"{wrong:.3f} with other images; more epochs or --caption-dropout 0.3 may help"
        )


class CaptioningWithClasses(Captioning):
    """Captioning and classification from the same encoder; the sum of both losses."""

    classifies = True

    def rank(self, event: Event) -> tuple[float, float]:
        """The loss, which both tasks share."""
        return self.rank_by_loss(event)

    def format_scores(self, event: Event) -> str:
        """Accuracy, then the scores of captions."""
        return f"{format_accuracy(event)}  {super().format_scores(event)}"


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

    def add(self, run: TrainingRun, batch: Batch, images: Tensor) -> None:
        """Add one batch."""
        network, task = run.network, self.task
        assert isinstance(network, Captioner)
        if not len(images):
            return
        assert batch.mismatched_ids is not None
        words, others = target_words(batch, images.device), batch.mismatched_ids.to(images.device)
        with run.autocast():
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

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Mean losses per token, and caption metrics against all references."""
        right, words, wrong, others, class_loss, correct, *each, count = totals
        found = {"val_loss": right / words, "val_loss_shuffled": wrong / others}
        if self.task.classifies:
            found["val_caption_loss"] = found["val_loss"]
            found["val_loss"] += class_loss / count
            found["val_top1"] = correct / count
            found["val_balanced_accuracy"] = balanced_accuracy(each)
        captions = sorted(run.gather(self.written))
        if not captions:
            most = run.config.training.caption_samples
            raise DataError(f"not one of the {most} chosen validation images can be read")
        references = [self.samples[index].captions for index, _ in captions]

        def score() -> dict[str, float]:
            return caption_scores([text for _, text in captions], references)

        measured = run.on_main(score)
        return {**found, **{f"val_{name}": measured[name] for name in SCORES}}


def is_chosen(indices: Tensor, count: int, most: int) -> Tensor:
    """Mask of the images that are captioned: at most `most` of `count`, evenly spread; bool."""
    return indices * min(most, count) % count < min(most, count)


def target_words(batch: Batch, device: torch.device) -> Tensor:
    """Caption ids of a batch on `device`, (batch, tokens)."""
    assert batch.caption_ids is not None, "the loader was given no captions"
    return batch.caption_ids.to(device, non_blocking=True)


def forward(run: TrainingRun, images: Tensor, ids: Tensor) -> CaptionerOutput:
    """Answers to normalised `images`, of which there may be none; all processes must call it."""
    if len(images):
        said: CaptionerOutput = run.model(images, ids)
        return said
    with run.frozen_running_stats():
        alone: CaptionerOutput = run.model(
            images.new_zeros(1, *images.shape[1:]), ids.new_zeros(1, 1)
        )
    return CaptionerOutput(alone.class_logits[:0], alone.caption_logits[:0, :0])
