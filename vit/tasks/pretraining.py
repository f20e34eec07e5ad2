"""Pretraining without labels: what its methods share.

    images, with or without class folders  ->  views or masks (the method)  ->  loss
    after each epoch, of the validation images' features: effective rank, spread, and where the
    data have classes k-NN accuracy, which trains nothing
    RUN/model.safetensors        the encoder: vit train --weights RUN, vit convert, --embeddings
    RUN/pretraining.safetensors  what only pretraining uses

The last epoch is kept: a loss without labels does not say which one is best for another task.
"""

import contextlib
import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vit.config import Config
from vit.data.dataset import Batch
from vit.data.dataset_types import NO_LABEL, Sample, Splits
from vit.data.sources.dataset_spec import DatasetSpec
from vit.errors import ConfigError
from vit.evaluation.feature_quality import effective_rank, feature_spread, knn_accuracy
from vit.tasks.task import (
    EvaluatedModel,
    Evaluation,
    Event,
    FinishedRun,
    Task,
    TrainingRun,
    forward,
)
from vit.text import Notify

MOST_FEATURES = 2000
"""Most validation images whose features are compared."""
LEAST_RANK = 3.0
"""Effective rank of centred features below which they have collapsed to a few directions."""


class Pretraining(Task):
    """Base class of the methods."""

    metric = "val_loss"
    higher_is_better = False
    planned = True
    trained_head = "the encoder"
    least_spread: ClassVar[float]
    """Spread of the features below which they have collapsed: they hardly depend on the image."""
    remedy: ClassVar[str]
    """What to do about collapsed features."""
    measures_all = True
    """Whether the validation loss is of all images; else of those whose features are compared."""

    def dataset_spec(self, config: Config) -> DatasetSpec:
        """All images; classes only where every image has one."""
        return DatasetSpec.from_config(config.data, optional_labels=True)

    def check_data(
        self, config: Config, splits: Splits, given: Sequence[str], notify: Notify
    ) -> tuple[Config, Splits]:
        """Any images will do."""
        return config, splits

    def output_names(self, splits: Splits) -> tuple[str, ...]:
        """None: there is no head."""
        return ()

    def complete(self, config: Config, given: Sequence[str]) -> Config:
        """Check the network's settings; subclasses complete them."""
        if config.model.pooling == "none":
            raise ConfigError(
                f"pooling=none: task={config.training.task} measures one feature vector an image; "
                "use --pooling mean"
            )
        return config

    def summary(self, config: Config, splits: Splits) -> list[str]:
        """The numbers of images, and whether they have classes to measure k-NN accuracy with."""
        kind = "folders" if Path(config.data.data).is_dir() else "classes"
        found = f"{len(splits.classes)} {kind}, for k-NN alone" if splits.classes else "no classes"
        return [
            f"{len(splits.train):,} training and {len(splits.val):,} validation images, {found}"
        ]

    def rank(self, event: Event) -> tuple[float, float]:
        """Later epochs are better."""
        return float(event["epoch"]), 0.0

    def format_scores(self, event: Event) -> str:
        """Effective rank; where there are classes, k-NN accuracy and the share of the largest."""
        knn = f"  k-NN {event['val_knn']:.2%}" if "val_knn" in event else ""
        largest = f" (largest class {event['val_largest']:.2%})" if "val_largest" in event else ""
        return f"rank {event['val_rankme']:.1f}{knn}{largest}"

    def format_result(self, event: Event) -> str:
        """The loss and the scores."""
        return f"validation loss {event['val_loss']:.3f}, {self.format_scores(event)}"

    def next_command(self, folder: str) -> str:
        """Training with labels."""
        return (
            f"vit train DATA --weights {folder}; which images to label first: vit suggest IMAGES "
            f"--weights {folder} --out list.csv"
        )

    def preview(
        self, run: TrainingRun, batch: Batch, images: Tensor, classes: Sequence[str]
    ) -> tuple[Tensor, list[list[str]]]:
        """The images, without a line."""
        return images, [[] for _ in batch.indices]

    @abstractmethod
    def validation_loss(self, run: TrainingRun, batch: Batch, images: Tensor) -> tuple[Tensor, ...]:
        """Loss of each validation image, (images,), and other rows that `combined_loss` reads.

        Runs the forward pass, so all processes must make this call, also with an empty batch.

        Args:
            images: Its images; only the compared ones unless `measures_all`.
        """

    def combined_loss(self, run: TrainingRun, losses: Tensor, *rows: Tensor) -> float:
        """The validation loss, from `validation_loss` of the images that are compared.

        Args:
            losses: Of all validation images, the mean, (); no number unless `measures_all`.
            rows: Other rows of the compared images, (images, ...).
        """
        return float(losses)

    def tally(self, samples: Sequence[Sample]) -> "FeatureTally":
        """Start a validation on `samples`."""
        return FeatureTally(self, samples)

    def warning(self, event: Event, config: Config) -> str | None:
        """A log line if the features have collapsed; else None."""
        spread, rank = event["val_spread"], event["val_centred_rank"]
        if spread >= self.least_spread and rank >= min(LEAST_RANK, config.model.pooled_dim / 16):
            return None
        return (
            f"warning: the features have collapsed in epoch {event['epoch']}: their spread is "
            f"{spread:.3f} and their effective rank {rank:.1f}, so they hardly depend on the "
            f"image; {self.remedy}"
        )

    def evaluation(
        self, model: EvaluatedModel, samples: Sequence[Sample], notify: Notify
    ) -> Evaluation:
        """Refuse: there are no answers."""
        raise ConfigError(
            "the network was pretrained without classes, and has no answers to measure: add them "
            "with vit train DATA --weights RUN"
        )

    def write_report(self, run: FinishedRun) -> None:
        """Learning curves, rank of the features, and nearest neighbours."""
        from vit.evaluation.pretraining_report import write_pretraining_report

        failed: dict[str, str] = {}
        samples = compared(run.splits.val)
        features, labels, paths = [], [], list[str]()
        for batch, outputs in run.logits(samples, failed):
            features.append(outputs)
            labels += batch.labels.tolist()
            paths += [samples[index].path for index in batch.indices.tolist()]
        write_pretraining_report(
            run.folder,
            facts=run.facts(failed),
            events=run.events,
            features=torch.cat(features),
            classes=[run.splits.classes[n] if n != NO_LABEL else "" for n in labels],
            paths=paths,
            reconstructions=self.reconstructions(run),
            method=run.config.training.task,
        )

    def reconstructions(self, run: FinishedRun) -> Sequence[tuple[Tensor, ...]]:
        """Rows of images for the report, each (3, height, width) in [0, 1]; none by default."""
        return ()


def compared(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples whose features are compared, evenly from all of them."""
    return samples[:: stride_of(len(samples))]


def stride_of(count: int) -> int:
    """Of so many validation images, each which is compared."""
    return max(math.ceil(count / MOST_FEATURES), 1)


def blank_if_empty(images: Tensor) -> Tensor:
    """`images`, or one blank image if there are none: all processes take part in a forward pass."""
    return images if len(images) else images.new_zeros(1, *images.shape[1:])


def frozen_statistics(
    run: TrainingRun, *, empty: bool
) -> contextlib.AbstractContextManager[object]:
    """Freeze the running statistics of the network, if the batch is `empty`."""
    return run.frozen_running_stats() if empty else contextlib.nullcontext()


class FeatureTally:
    """Loss, and the features of some images, compared at the end."""

    def __init__(self, task: Pretraining, samples: Sequence[Sample]) -> None:
        self.task, self.stride = task, stride_of(len(samples))
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.kept: list[tuple[Tensor, ...]] = []

    def add(self, run: TrainingRun, batch: Batch, images: Tensor) -> None:
        """Add one batch."""
        chosen = batch.indices % self.stride == 0
        some = images[chosen.to(images.device)]
        features = forward(run, some).float().cpu()
        whole = self.task.measures_all
        losses, *rows = self.task.validation_loss(run, batch, images if whole else some)
        self.sums += torch.stack([losses.double().sum().cpu(), torch.tensor(len(images)).double()])
        kept = (row.float().cpu()[chosen] if whole else row.float().cpu() for row in rows)
        self.kept.append((batch.indices[chosen], batch.labels[chosen], features, *kept))

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Mean loss, effective rank, spread, and k-NN accuracy if the images have classes."""
        parts = run.gather(self.kept)
        indices, labels, features, *rows = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        order = indices.argsort()
        features = features[order]
        rows = [row[order] for row in rows]
        loss, count = totals
        found = {
            "val_loss": self.task.combined_loss(run, torch.tensor(loss / count), *rows),
            "val_rankme": effective_rank(features),
            "val_centred_rank": effective_rank(features - features.mean(dim=0)),
            "val_spread": feature_spread(features),
        }
        if (labels != NO_LABEL).all() and len(labels) > 1:
            found["val_knn"] = knn_accuracy(features, labels[order])
            found["val_largest"] = float(labels.bincount().max()) / len(labels)
        return found
