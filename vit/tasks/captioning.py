"""Captioning: next-token cross-entropy, optionally with classification from the same encoder.

    loss = Σ cross-entropy of each next token / mean tokens of a caption
    val_loss           mean over all tokens of the validation captions
    val_loss_shuffled  the same captions, each with another image

The divisor is a constant of the data instead of the tokens of a batch, so the loss is a sum over
images, and every token has the same weight with any number of processes and micro-batches. The two
validation losses are equal for a decoder that ignores the image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.data.captions.caption_ids import CaptionIds
from vit.data.captions.tokenizer import Tokenizer
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample, Splits
from vit.data.sources.dataset_spec import DatasetSpec
from vit.errors import ConfigError, DataError
from vit.evaluation.caption_metrics import caption_scores, ignores_image
from vit.evaluation.classification_metrics import Outcomes
from vit.event_log import ranking_metric
from vit.generation.generate import generate_captions
from vit.generation.generation_config import Caption, Search
from vit.model.build import build_captioner
from vit.model.captioner import (
    Captioner,
    CaptionerOutput,
    caption_losses,
    matched_and_shuffled_losses,
)
from vit.output.prediction_results import ImageOutput, unended_note
from vit.tasks.classification import (
    ClassEvaluation,
    ClassTally,
    count_classes,
    format_accuracy,
)
from vit.tasks.finished_run import FinishedRun
from vit.tasks.losses import smoothed_cross_entropy
from vit.tasks.task import (
    Evaluation,
    Event,
    Task,
    TrainingRun,
)
from vit.text import Notify, plural

EXAMPLES = 5
SCORES = ("bleu4", "rouge_l", "cider", "chrf", "distinct", "exact")
IGNORING_SHARE = 1 / 3
"""Share of a run before which a decoder that ignores the images is not reported."""
CAPTION_DROPOUT = 0.3
"""Share of hidden words that is suggested where a decoder ignores the images."""


class Captioning(Task):
    """Captioning, optionally with classification."""

    metric = "val_cider"
    writes_captions = True
    activation_name = "softmax"
    trained_head = "the decoder"
    classifies = False
    """Whether to add the classification loss, with the same weight."""

    def __init__(self, tokenizer: Tokenizer | None = None, *, mean_tokens: float = 1.0) -> None:
        self._tokenizer = tokenizer
        self.mean_tokens = mean_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "the data have a tokenizer"
        return self._tokenizer

    def dataset_spec(self, config: Config) -> DatasetSpec:
        """Captions, and classes if they are learned too."""
        data = config.data
        if data.label_column is not None and not self.classifies:
            raise ConfigError(
                f"label_column={data.label_column!r}: task={config.training.task} learns no "
                "classes; leave it out, or learn them too with --task classify,caption"
            )
        return DatasetSpec.from_config(
            data, multilabel=False, captions=True, labels=self.classifies
        )

    def complete(self, config: Config) -> Config:
        """Without classes, the network has no head."""
        if self.classifies:
            return config
        headless = {"num_classes": (0,), "pooling": ("none",)}
        for name, usual in (*headless.items(), ("final_norm", ("auto", "tokens", "none"))):
            if config.chosen(name) and (value := getattr(config.model, name)) not in usual:
                raise ConfigError(
                    f"{name}={value}: task=caption alone has no head; leave it out, or learn "
                    "classes too with --task classify,caption"
                )
        return replace(config, model=replace(config.model, num_classes=0, pooling="none"))

    def build_network(self, config: Config) -> Captioner:
        """A Vision Transformer with a decoder."""
        return build_captioner(config.model, config.decoder)

    def summary(self, config: Config, splits: Splits) -> list[str]:
        """The numbers of images, classes and captions."""
        captions = sum(len(sample.captions) for sample in splits.train)
        return [
            *super().summary(config, splits),
            f"{captions:,} captions of at most {config.decoder.caption_tokens} tokens, out of "
            f"{config.decoder.vocab_size:,} tokens",
        ]

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
        epoch: int,
    ) -> Tensor:
        config = run.config
        smoothing = config.training.smoothing
        words = target_words(batch, images.device)
        counted = words[:, 1:] != self.tokenizer.pad
        said = forward(run, images, words[:, :-1], counted)
        losses, _ = caption_losses(
            said.caption_logits, words, self.tokenizer.pad, smoothing=smoothing
        )
        loss = losses.sum() / self.mean_tokens
        if self.classifies:
            labels = batch.labels.to(images.device, non_blocking=True)
            targets = F.one_hot(labels, config.model.num_classes).to(images.dtype)
            loss = loss + smoothed_cross_entropy(said.class_logits, targets, smoothing=smoothing)
        return loss.view(1)

    def preview(
        self, run: TrainingRun, batch: Batch, images: Tensor, classes: Sequence[str]
    ) -> tuple[Tensor, list[list[str]]]:
        """The caption of each image, below its class if classes are learned too."""
        assert batch.caption_ids is not None, "the loader was given captions"
        texts = [self.tokenizer.decode(row) for row in batch.caption_ids.tolist()]
        if not self.classifies:
            return images, [[text] for text in texts]
        labels = batch.labels.tolist()
        return images, [[classes[at], text] for at, text in zip(labels, texts, strict=True)]

    def tally(self, samples: Sequence[Sample]) -> "CaptionTally":
        return CaptionTally(self, samples)

    def rank(self, event: Event) -> tuple[float, float]:
        """CIDEr, then negative loss; with few images for CIDEr, or classes too, only the loss."""
        by_loss = ranking_metric(event) == "val_loss"
        return (-float(event["val_loss"]), 0.0) if by_loss else super().rank(event)

    def format_scores(self, event: Event) -> str:
        """Losses with matching and shuffled images, and caption metrics."""
        own = event.get("val_caption_loss")
        parts = [] if own is None else [f"captions {own:.3f}"]
        parts.append(
            f"with other images {event['val_loss_shuffled']:.3f}  BLEU-4 {event['val_bleu4']:.2%}"
            f"  CIDEr {event['val_cider']:.3f}"
        )
        if event.get("val_exact"):
            parts.append(f"exact {event['val_exact']:.2%}")
        return "  ".join(parts)

    def format_result(self, event: Event) -> str:
        return super().format_result(event).replace(" ", f" loss {event['val_loss']:.3f}, ", 1)

    def eval_spec(self, spec: DatasetSpec, outputs: Sequence[str]) -> DatasetSpec:
        """Captions, and classes if the network has a head."""
        if spec.label_column is not None and not outputs:
            raise ConfigError(
                f"label_column={spec.label_column!r}: the model has no classes; leave it out"
            )
        return replace(spec, multilabel=False, captions=True, labels=bool(outputs))

    def evaluation(
        self, model: Any, samples: Sequence[Sample], notify: Notify
    ) -> "CaptionEvaluation":
        """Start an evaluation on the samples with a caption that fits into the decoder."""
        generator, most = model.caption_generator, model.caption_generator.decoder.max_length
        ids = CaptionIds([sample.captions for sample in samples], generator.tokenizer, most)
        kept = tuple(sample for place, sample in enumerate(samples) if ids.count(place))
        if not kept:
            raise DataError(f"no caption has at most {most} tokens, the length of this decoder")
        if ids.too_long:
            lost = len(samples) - len(kept)
            others = f", and {plural(lost, 'image')} with no other" if lost else ""
            long = plural(ids.too_long, "caption")
            notify(f"left {long} of more than {most} tokens out of the loss{others}")
            ids = CaptionIds([sample.captions for sample in kept], generator.tokenizer, most)
        return CaptionEvaluation(generator, kept, ids, model.classes)

    def stored_fields(self, config: Config, outputs: Sequence[str]) -> dict[str, Any]:
        """None: the decoder, which every captioner stores, shows the task."""
        return {}

    def write_report(self, run: FinishedRun) -> None:
        """Captions beside their images, scores, and those of the classes if there is a head."""
        from vit.evaluation.caption_page import (
            CaptionedImage,
            CaptionFacts,
            CaptionOutcomes,
            write_caption_report,
        )

        count, failed = len(run.splits.val), dict[str, str]()
        chosen = is_chosen(torch.arange(count), count, run.config.training.caption_samples)
        samples = [
            sample for sample, taken in zip(run.splits.val, chosen.tolist(), strict=True) if taken
        ]
        model, tokenizer = run.loaded.model, run.loaded.tokenizer
        assert isinstance(model, Captioner)
        assert tokenizer is not None
        captioned: list[CaptionedImage] = []
        class_outcomes: list[Outcomes] = []
        sums = torch.zeros(4, dtype=torch.float64)
        for batch, images in run.batches(samples, failed):
            every = torch.ones(len(images), dtype=torch.bool)
            with torch.inference_mode(), run.autocast():
                classes, captions, losses = describe(model, batch, images, tokenizer, every)
            sums += losses.sum(dim=1)
            means = (losses[0] / losses[1]).tolist()
            rows = zip(batch.indices.tolist(), captions, means, strict=True)
            captioned += [
                CaptionedImage(
                    path=samples[index].path,
                    caption=best.text,
                    score=best.score,
                    ended=best.ended,
                    references=samples[index].captions,
                    loss=loss,
                )
                for index, (best, *_), loss in rows
            ]
            if run.loaded.classes:
                probabilities = classes.float().cpu().double().softmax(dim=1)
                class_outcomes.append(Outcomes.of(probabilities, batch.labels))
        loss, tokens, other_loss, other_tokens = sums.tolist()
        write_caption_report(
            run.facts(failed),
            CaptionFacts(
                captions=sum(len(sample.captions) for sample in run.splits.train),
                mean_tokens=self.mean_tokens,
                val_images=count,
                advice=image_use_advice(run.config),
            ),
            CaptionOutcomes(
                images=captioned, loss=loss / tokens, shuffled_loss=other_loss / other_tokens
            ),
            Outcomes.cat(class_outcomes) if class_outcomes else None,
        )

    def warning(self, event: Event, config: Config) -> str | None:
        """A log line if captions fit shuffled images as well as their own; else None.

        In the first third of a run a decoder learns the language, and rarely looks at the images.
        """
        early = IGNORING_SHARE * config.training.epochs
        if event.get("val_images", 2) < 2 or event["epoch"] < early:
            return None
        right = event.get("val_caption_loss", event["val_loss"])
        wrong = event["val_loss_shuffled"]
        if not ignores_image(right, wrong, event.get("val_exact", 0.0)):
            return None
        return (
            f"note: the decoder ignores the images: its loss is {right:.3f}, and "
            f"{wrong:.3f} with other images; {image_use_advice(config)}"
        )


def image_use_advice(config: Config) -> str:
    """What may make a decoder use the images, without what the settings do already."""
    ways = []
    if config.finetune.weights is None:
        ways.append("start from a trained encoder with --weights SOURCE")
    if config.decoder.caption_dropout < CAPTION_DROPOUT:
        ways.append(f"hide words with --caption-dropout {CAPTION_DROPOUT}")
    if config.training.time is None and config.training.steps is None:
        ways.append(f"train longer with --epochs {2 * config.training.epochs}")
    else:
        ways.append("train longer")
    return "; ".join(ways)


class CaptioningWithClasses(Captioning):
    """Captioning and classification from the same encoder; the sum of both losses."""

    classifies = True
    trained_head = "head and decoder"

    def format_scores(self, event: Event) -> str:
        return f"{format_accuracy(event)}  {super().format_scores(event)}"


class CaptionEvaluation(Evaluation):
    """Metrics of generated captions, losses of the references, and metrics of the classes."""

    def __init__(
        self,
        caption_generator: Any,
        samples: Sequence[Sample],
        ids: CaptionIds,
        classes: Sequence[str],
    ) -> None:
        super().__init__(samples)
        self.caption_generator, self.ids = caption_generator, ids
        self.classes = ClassEvaluation(samples, classes)
        self.right = self.classes.right if classes else None
        self.sums = {"loss": 0.0, "loss_shuffled": 0.0}
        self.tokens = dict.fromkeys(self.sums, 0)
        self.indices: list[int] = []
        self.texts: list[str] = []
        self.unended = 0

    def add(self, outputs: Sequence[ImageOutput], first: int) -> None:
        pairs = [(first + n, output) for n, output in enumerate(outputs) if output.captions]
        memories = [output.memory for _, output in pairs if output.memory is not None]
        indices = [index for index, _ in pairs]
        for name, shift in (("loss", 0), ("loss_shuffled", self.ids.mismatch_shift)):
            chosen = [((index + shift) % len(self.samples), 0) for index in indices]
            loss, tokens = self.caption_generator.loss(memories, self.ids.padded(chosen))
            self.sums[name] += loss
            self.tokens[name] += tokens
        self.indices += indices
        self.texts += [output.captions[0].text for _, output in pairs]
        self.unended += sum(not output.captions[0].ended for _, output in pairs)
        self.classes.add(outputs, first)

    def scores(self) -> dict[str, Any]:
        """`count`, `loss`, `loss_shuffled`, the metrics of `caption_scores`, and `examples`.

        With classes also the metrics of `summarize`, whose loss becomes `class_loss`.
        """
        if not self.texts:
            return {}
        references = [self.samples[index].captions for index in self.indices]
        scores: dict[str, Any] = {"count": len(self.texts)}
        self.classes.groups = self.groups
        if class_scores := self.classes.scores():
            scores |= class_scores
            scores["class_loss"] = scores.pop("loss")
        scores |= {name: total / self.tokens[name] for name, total in self.sums.items()}
        scores |= caption_scores(self.texts, references)
        shown = min(EXAMPLES, len(self.texts))
        numbers = [index * len(self.texts) // shown for index in range(shown)]
        scores["examples"] = [
            {
                "image": self.samples[self.indices[number]].path,
                "caption": self.texts[number],
                "reference": references[number][0],
            }
            for number in numbers
        ]
        return {**scores, "count": len(self.texts)}

    def notes(self, scores: Mapping[str, Any]) -> list[str]:
        """Warnings about the metrics."""
        notes, (right, wrong) = [], (scores["loss"], scores["loss_shuffled"])
        if scores["count"] > 1 and ignores_image(right, wrong, scores["exact"]):
            notes.append(
                f"warning: the decoder hardly uses the images: its loss is {right:.3f}, and "
                f"{wrong:.3f} with other images"
            )
        if self.unended:
            notes.append(unended_note(self.unended, scores["count"]))
        return notes


class CaptionTally:
    """Losses with matching and with shuffled images, and generated captions."""

    def __init__(self, task: Captioning, samples: Sequence[Sample]) -> None:
        self.task, self.samples = task, samples
        self.classes = ClassTally(count_classes(samples) if task.classifies else 0)
        # losses and tokens with the matching image and with another one
        self.losses = torch.zeros(4, dtype=torch.float64)
        self.written: list[tuple[int, str]] = []

    @property
    def sums(self) -> Tensor:
        """Those of the captions, then those of the classes."""
        return torch.cat([self.losses, self.classes.sums])

    def add(self, run: TrainingRun, batch: Batch, images: Tensor) -> None:
        network, task = run.network, self.task
        assert isinstance(network, Captioner)
        if not len(images):
            return
        few = is_chosen(batch.indices, len(self.samples), run.config.training.caption_samples)
        with run.autocast():
            classes, sentences, losses = describe(network, batch, images, task.tokenizer, few)
        if task.classifies:
            self.classes.count(classes.to(run.dtype).cpu(), batch.labels)
        else:
            self.classes.sums[-1] += len(images)
        self.losses += losses.sum(dim=1)
        texts = [best[0].text for best in sentences]
        self.written += zip(batch.indices[few].tolist(), texts, strict=True)

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Mean losses per token, caption metrics against all references, and of how many images."""
        right, words, wrong, others, *class_totals = totals
        found = {"val_loss": right / words, "val_loss_shuffled": wrong / others}
        if self.task.classifies:
            own = self.classes.scores(run, class_totals)
            loss = found["val_loss"] + own["val_loss"]
            found |= {"val_caption_loss": found["val_loss"], **own, "val_loss": loss}
        captions = sorted(run.gather(self.written))
        if not captions:
            most = run.config.training.caption_samples
            raise DataError(f"not one of the {most} chosen validation images can be read")
        references = [self.samples[index].captions for index, _ in captions]

        def score() -> dict[str, float]:
            return caption_scores([text for _, text in captions], references)

        measured = run.on_main(score)
        found["val_captioned"] = len(captions)
        return {**found, **{f"val_{name}": measured[name] for name in SCORES}}


def describe(
    network: Captioner, batch: Batch, images: Tensor, tokenizer: Tokenizer, captioned: Tensor
) -> tuple[Tensor, list[list[Caption]], Tensor]:
    """Class logits, captions of the images `captioned`, and losses with own and other captions."""
    assert batch.mismatched_ids is not None
    words, others = target_words(batch, images.device), batch.mismatched_ids.to(images.device)
    classes, memory = network.encode_images(images)
    seen = memory[captioned.to(images.device)]
    captions = generate_captions(network.decoder, seen, tokenizer, Search())
    losses = matched_and_shuffled_losses(network.decoder, memory, words, others, tokenizer.pad)
    return classes, captions, losses


def is_chosen(indices: Tensor, count: int, most: int) -> Tensor:
    """Mask of the images that are captioned: at most `most` of `count`, evenly spread; bool."""
    return indices * min(most, count) % count < min(most, count)


def target_words(batch: Batch, device: torch.device) -> Tensor:
    """Caption ids of a batch on `device`, (batch, tokens)."""
    assert batch.caption_ids is not None, "the loader was given no captions"
    return batch.caption_ids.to(device, non_blocking=True)


def forward(run: TrainingRun, images: Tensor, ids: Tensor, counted: Tensor) -> CaptionerOutput:
    """Answers to normalised `images`, of which there may be none; all processes must call it."""
    if len(images):
        said: CaptionerOutput = run.model(images, ids, counted)
        return said
    with run.frozen_running_stats():
        alone: CaptionerOutput = run.model(
            images.new_zeros(1, *images.shape[1:]), ids.new_zeros(1, 1)
        )
    return CaptionerOutput(alone.class_logits[:0], alone.caption_logits[:0, :0])
