"""The interface of a task: everything in which classification, captioning and others differ.

    config.training.task -> get_task -> Task           the data that it reads, the network's outputs
    Task.with_data(config, splits) -> Task             loss and validation of a training
    metrics.jsonl -> Task.rank, Task.format_scores     the best epoch, and log lines

A task is one subclass of Task, and one line in `TASKS` of vit/config/training_config.py.
"""

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vit.config import Config
from vit.config.training_config import TASKS
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample, Splits
from vit.data.mixup import mix, sample_mix_plan
from vit.model.vision_transformer import VisionTransformer

T = TypeVar("T")
Event = Mapping[str, Any]
"""An event of metrics.jsonl, or the validation scores in it."""


class TrainingRun(Protocol):
    """What a task uses of a training."""

    config: Config
    network: VisionTransformer
    """The network without wrappers."""
    model: nn.Module
    """The same network as it is trained: distributed, in mixed precision."""
    step: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of images, weights and losses."""

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Compute in the precision of the training."""

    def frozen_running_stats(self) -> contextlib.AbstractContextManager[None]:
        """Keep the network's running statistics as they are."""

    def gather(self, mine: list[T]) -> list[T]:
        """Concatenate the lists of all processes."""

    def on_main(self, act: Callable[[], T]) -> T:
        """Call `act` on the main process, and return its result on all."""


class Tally(Protocol):
    """Accumulates validation metrics on one process.

    Args:
        sums: Sums over batches, to be summed over processes, float64; the last entry is the number
            of images.
    """

    sums: Tensor

    def add(self, run: TrainingRun, batch: Batch, images: Tensor) -> None:
        """Add one batch, whose normalised `images` are on the device."""

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Scores for the epoch's event, from the sums over all processes; all make this call.

        `val_loss` and the task's metrics; `chosen_by` names the metric that ranks epochs if it is
        not `Task.metric`.
        """


class Task(ABC):
    """What a network learns from its images."""

    metric: ClassVar[str]
    """The score that ranks epochs, such as `val_top1`."""
    higher_is_better: ClassVar[bool] = True

    def with_data(self, config: Config, splits: Splits | None) -> "Task":  # noqa: ARG002
        """The task with what its loss needs of the training data; None if there are none yet."""
        return self

    @abstractmethod
    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch, (1,), whose normalised `images` are on the device.

        Runs the forward pass, so all processes must make this call, also with an empty batch.
        """

    @abstractmethod
    def tally(self, samples: Sequence[Sample]) -> Tally:
        """Start a validation on `samples`, over all processes."""

    def label_width(self, config: Config) -> int | None:  # noqa: ARG002
        """Width of multi-hot label rows; None if an image has one class."""
        return None

    def notes(self, config: Config, splits: Splits) -> list[str]:  # noqa: ARG002
        """Log lines about the data before the first step, safe on a terminal."""
        return []

    def rank(self, event: Event) -> tuple[float, float]:
        """Sort key of epochs, higher is better: the metric, then negative loss."""
        value = float(event[event.get("chosen_by", self.metric)])
        return value if self.higher_is_better else -value, -float(event["val_loss"])

    def format_scores(self, event: Event) -> str:
        """The scores of an event for a log line, without the loss."""
        return f"{self.metric.replace('_', ' ')} {event[self.metric]:.4g}"

    def format_result(self, event: Event) -> str:
        """The scores of an event for the last log line."""
        return f"validation {self.format_scores(event).replace('val ', '')}"

    def warning(self, event: Event) -> str | None:  # noqa: ARG002
        """A log line about suspicious scores of an epoch; else None."""
        return None


def get_task(name: str) -> Task:
    """The task called `name`, a value of the setting `task`."""
    module, _, kind = TASKS[name].partition(":")
    task: Task = getattr(importlib.import_module(module), kind)()
    return task


def mixed(
    run: TrainingRun, batch: Batch, images: Tensor, targets: Tensor, epoch: int
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


def forward(run: TrainingRun, images: Tensor) -> Tensor:
    """Logits of normalised `images`; with an empty batch, of one blank image that is dropped.

    All processes must take part in each forward pass, and some attention kernels refuse an empty
    batch.
    """
    if len(images):
        logits: Tensor = run.model(images)
        return logits
    with run.frozen_running_stats():
        blank: Tensor = run.model(images.new_zeros(1, *images.shape[1:]))
    return blank[:0]
