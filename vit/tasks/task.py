"""The interface of a task: everything in which classification, captioning and others differ.

    training     config.training.task -> get_task -> Task: the data to read, names of the outputs
                 Task.with_data -> loss and tally; Task.rank chooses the best epoch
                 Task.finish, Task.write_report -> the run folder, with Task.stored_fields
    a saved run  LoadedRun.task_name -> get_task -> Task: activation, evaluation, score of an export
                 calibrated_activation: the same of scaled logits, where a run has a calibration
    X.onnx       has that activation inside; its metadata have Task.activation_name

A task is one subclass of Task, and one line in `TASKS` of vit/config/training_config.py.
"""

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vit.config import Config
from vit.config.training_config import TASKS
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample, Splits
from vit.data.mixup import mix, sample_mix_plan
from vit.data.preprocessing import Preprocessing
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.transforms import TrainingTransform, Transform
from vit.errors import ConfigError
from vit.evaluation.intervals import number_groups
from vit.evaluation.temperature_scaling import scale_logits
from vit.model.build import build_classifier
from vit.model.vision_transformer import VisionTransformer
from vit.number_answers import NumberAnswers
from vit.output.prediction_results import ImageOutput
from vit.text import Notify, plural

if TYPE_CHECKING:
    from vit.tasks.finished_run import FinishedRun
    from vit.weights.saved_model import LoadedRun

T = TypeVar("T")
Event = Mapping[str, Any]
"""An event of metrics.jsonl, or the validation scores in it."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: nn.Softmax(dim=1),
    "sigmoid": nn.Sigmoid,
    "identity": nn.Identity,
}
"""Name in the metadata of exported files -> module, where a task has no activation of its own."""


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

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Compute in the precision of the training."""

    def frozen_running_stats(self) -> contextlib.AbstractContextManager[object]:
        """Keep the network's running statistics as they are."""

    def teaching(self) -> contextlib.AbstractContextManager[object]:
        """Compute as in evaluation, with the moving average of the weights, which there must be."""

    def gather(self, mine: list[T]) -> list[T]:
        """Concatenate the lists of all processes."""

    def on_main(self, act: Callable[[], T]) -> T:
        """Call `act` on the main process, and return its result on all."""

    def sum_over_processes(self, mine: Tensor) -> Tensor:
        """Differentiable sum of `mine`, (n,), over all processes, which must all make this call."""


class Evaluation(ABC):
    """Accumulates the metrics of `vit evaluate`.

    Attributes:
        right: Whether the answer for each image that was added is right, None without an
            answer or no label; None of a task whose answers are not right or wrong.
        groups: Names of the groups of `samples`, such as patients; None of independent images.
        brief: Whether the only interval that is needed is that of the score that ranks epochs.
    """

    right: list[bool | None] | None = None
    groups: Sequence[str] | None = None
    brief: bool = False

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    @abstractmethod
    def add(self, outputs: Sequence[ImageOutput], first: int) -> None:
        """Add the outputs of a batch, whose first image is sample `first`."""

    @abstractmethod
    def scores(self) -> dict[str, Any]:
        """The metrics as JSON values, with `count`; empty if no image was read."""

    def notes(self, scores: Mapping[str, Any]) -> list[str]:
        """Warnings about the metrics."""
        return []

    def measured_groups(self) -> Tensor | None:
        """The group of each image in the metrics, (images,); None of independent images."""
        if self.right is None:
            return None
        return self.groups_at(n for n, right in enumerate(self.right) if right is not None)

    def groups_at(self, places: Iterable[int]) -> Tensor | None:
        """The group of each image at one of these places in `samples`, (images,), or None."""
        if self.groups is None:
            return None
        return number_groups([self.groups[place] for place in places])


class Tally(Protocol):
    """Accumulates validation metrics on one process, as float64 sums over batches; the last is the
    number of images."""

    @property
    def sums(self) -> Tensor: ...

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
    share: ClassVar[str] = ""
    """The metric that `score` is, where `metric` is no share."""
    planned_settings: ClassVar[Mapping[str, Any]] = {}
    """Settings that the plan takes as given, unless the user chose them."""
    planned_batch: ClassVar[int | None] = None
    """Images of a planned step on a CPU, where they are not those of a training with labels."""
    pass_cost: ClassVar[float] = 1.0
    """Cost of a pass over the images for the plan, as a multiple of that with labels."""
    passes_factor: ClassVar[float] = 1.0
    """Factor on the passes from which on the plan takes a larger network, for photographs."""
    tiny_passes_factor: ClassVar[float] = 1.0
    """The same for small images."""
    writes_captions: ClassVar[bool] = False
    """Whether it has a decoder, for which there are no listed weights and no search."""

    activation_name: ClassVar[str] = "identity"
    """A key of ACTIVATIONS or a name of its own, which exported files record."""
    measures_distance: ClassVar[bool] = False
    """Whether the distance of images from those of training is measured for its calibration."""
    compares_images: ClassVar[bool] = False
    """Whether the loss of an image depends on the others of its micro-batch."""
    trained_head: ClassVar[str] = "the head"
    """What is trained on a frozen encoder, for the log."""
    answers: NumberAnswers | None = None
    """Scale of the numbers that a network answers with, once it is known."""

    def dataset_spec(self, config: Config) -> DatasetSpec:
        return DatasetSpec.from_config(config.data)

    def check_data(
        self,
        config: Config,
        splits: Splits,
        notify: Notify,
    ) -> tuple[Config, Splits]:
        """Check that the task can learn `splits`, or change the task to one that can."""
        if splits.multilabel:
            raise one_class_needed(config, "give it data with one")
        return config, splits

    def output_names(self, splits: Splits) -> tuple[str, ...]:
        """Name of each output of the head: the classes."""
        return splits.classes

    def complete(self, config: Config) -> Config:
        """Complete the settings of the network that the task decides."""
        return config

    def build_network(self, config: Config) -> VisionTransformer:
        """The network with random weights, on the CPU."""
        return build_classifier(config.model)

    def summary(self, config: Config, splits: Splits) -> list[str]:
        """Log lines about the size of the data."""
        classes = f", {len(splits.classes)} classes" if splits.classes else ""
        return [
            f"{len(splits.train):,} training and {len(splits.val):,} validation images{classes}"
        ]

    def with_data(self, config: Config, splits: Splits | None) -> "Task":
        """The task with what its loss needs of the training data; None before there are any."""
        return self

    @abstractmethod
    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch, (1,), whose normalised `images` are on the device.

        Runs the forward pass, so all processes must make this call, also with an empty batch.
        """

    def view_size(self, config: Config, side: int) -> tuple[int, int]:
        """(height, width) of what the loader gives for a training image."""
        return side, side

    def training_transform(self, config: Config, preprocessing: Preprocessing) -> Transform:
        quick = config.data.decode == "fast"
        return TrainingTransform(
            config.augment,
            preprocessing,
            fast_crop=quick,
            tile_count=config.data.tile_count,
            user_transform=config.user_code.transform,
        )

    def preview(
        self, run: TrainingRun, batch: Batch, images: Tensor, classes: Sequence[str]
    ) -> tuple[Tensor, list[list[str]]]:
        """The normalised `images` of a training batch as the network sees them, and their lines."""
        return images, [[classes[label]] for label in batch.labels.tolist()]

    @abstractmethod
    def tally(self, samples: Sequence[Sample]) -> Tally:
        """Start a validation on `samples`, over all processes."""

    def label_width(self, config: Config) -> int | None:
        """Width of multi-hot label rows; None if an image has one class."""
        return None

    def notes(self, config: Config, splits: Splits) -> list[str]:
        """Log lines about the data before the first step, safe on a terminal."""
        return []

    def rank(self, event: Event) -> tuple[float, float]:
        """Sort key of epochs, higher is better: the metric, then negative loss."""
        metric = event.get("chosen_by", self.metric)
        higher = self.higher_is_better and metric != "val_loss"
        value = float(event[metric])
        return value if higher else -value, -float(event["val_loss"])

    def format_scores(self, event: Event) -> str:
        """The scores of an event for a log line, without the loss."""
        return f"{self.metric.replace('_', ' ')} {event[self.metric]:.4g}"

    def format_result(self, event: Event) -> str:
        """The scores of an event for the last log line."""
        return f"validation {self.format_scores(event).replace('val ', '')}"

    def format_test(self, event: Event) -> str:
        """The scores of an event of test images in words."""
        scores = {name.replace("test_", "val_", 1): score for name, score in event.items()}
        result = self.format_result(scores).replace("validation", "test", 1)
        return f"{result} of {plural(event['test_images'], 'image')}, measured once, at the end"

    def next_command(self, folder: str) -> str:
        """What to do with a finished run; `folder` is quoted."""
        return f"vit predict {folder} IMAGE..."

    def activation(self, run: "LoadedRun") -> nn.Module:
        """Outputs of the head -> what is returned for an image, (batch, outputs) -> the same."""
        return ACTIVATIONS[self.activation_name]()

    def eval_spec(self, spec: DatasetSpec, outputs: Sequence[str]) -> DatasetSpec:
        """What an evaluation reads of the data."""
        return spec

    def label_names(self, spec: DatasetSpec, outputs: tuple[str, ...]) -> tuple[str, ...]:
        """The class names that labels of the data are indices into: those of the network."""
        return outputs

    def check_samples(self, samples: Sequence[Sample], where: str) -> None:  # noqa: B027
        """Check that a network of this task can be evaluated on `samples` of the data `where`."""

    @abstractmethod
    def evaluation(self, model: Any, samples: Sequence[Sample], notify: Notify) -> "Evaluation":
        """Start an evaluation of a Predictor, which has classes and what else the task needs."""

    def score(self, outputs: NDArray[Any], samples: Sequence[Sample]) -> float | None:
        """Share in [0, 1] by which an export is compared with its run; None if it is undefined."""
        raise ConfigError(
            "validation: files of this task are compared with their run on noise only; leave it out"
        )

    def decisions(
        self, outputs: NDArray[Any], thresholds: Sequence[float] | None
    ) -> NDArray[Any] | None:
        """The best class of each image, (images, 1), or which it has, (images, classes)."""
        best: NDArray[Any] = outputs.argmax(1)[:, None]
        return best

    def stored_fields(self, config: Config, outputs: Sequence[str]) -> dict[str, Any]:
        """What config.json of the run folder has of the task, under the key "vit".

        The default is the task's name. Tasks that a folder shows by its other fields store none.
        """
        return {"task": config.training.task}

    def calibration_settings(self, classes: Sequence[str]) -> dict[str, Any]:
        """Arguments of `fit_calibration` that the task decides."""
        return {}

    def finish(self, run: "FinishedRun") -> None:  # noqa: B027
        """Complete the run folder after the last epoch; `vit train --resume` repeats it."""

    @abstractmethod
    def write_report(self, run: "FinishedRun") -> None:
        """Write report.html."""

    def warning(self, event: Event, config: Config) -> str | None:
        """A log line about suspicious scores of an epoch, written once in a run; else None."""
        return None


def get_task(name: str) -> Task:
    """The task called `name`, a value of the setting `task`."""
    module, _, kind = TASKS[name].partition(":")
    task: Task = getattr(importlib.import_module(module), kind)()
    return task


def task_of_run(run: "LoadedRun") -> Task:
    """The task that a saved network was trained for, with what it answers."""
    task = get_task(run.task_name)
    task.answers = run.answers
    return task


class ScaledLogits(nn.Module):
    """Logits by `vit.evaluation.temperature_scaling.scale_logits`."""

    def __init__(self, temperature: float, exponent: float) -> None:
        super().__init__()
        self.temperature, self.exponent = temperature, exponent

    def forward(self, logits: Tensor) -> Tensor:
        """(batch, outputs) -> the same"""
        return scale_logits(logits, self.temperature, self.exponent)


def calibrated_activation(run: "LoadedRun") -> nn.Module:
    """The activation of a saved network's task, of calibrated logits where it has a calibration."""
    activation = task_of_run(run).activation(run)
    if run.calibration is None:
        return activation
    scaled = ScaledLogits(run.calibration.temperature, run.calibration.exponent)
    return nn.Sequential(scaled, activation)


def one_class_needed(config: Config, remedy: str) -> ConfigError:
    """The error of a task that learns one class an image, for multi-label data."""
    return ConfigError(
        f"task={config.training.task}: the images have several classes, or none, and this task "
        f"learns one an image; {remedy}"
    )


def mixed(
    run: TrainingRun, batch: Batch, images: Tensor, targets: Tensor, epoch: int
) -> tuple[Tensor, Tensor]:
    """Apply the current step's MixUp and CutMix to normalised `images` and to class shares."""
    plan = sample_mix_plan(
        run.config.augment,
        seed=run.config.training.seed,
        epoch=epoch,
        step=run.step,
        batch_size=run.config.data.batch_size,
    )
    return mix(images, targets, batch.positions, plan)


@contextlib.contextmanager
def blank_if_empty(run: TrainingRun, images: Tensor) -> Iterator[Tensor]:
    """`images`, or one blank image without any, which changes no running statistics.

    All processes must take part in each forward pass, and some attention kernels refuse an empty
    batch.
    """
    if len(images):
        yield images
    else:
        with run.frozen_running_stats():
            yield images.new_zeros(1, *images.shape[1:])


def forward(
    run: TrainingRun, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None
) -> Tensor:
    """Logits of normalised `images`, of which there may be none."""
    with blank_if_empty(run, images) as shown:
        logits: Tensor = run.model(shown, sizes) if sizes else run.model(shown)
    return logits[: len(images)]
