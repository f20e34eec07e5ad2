"""Regression: numbers of an image, such as an age, a length or a share.

    z         (value - mean) / std of the training images, or the same of the logarithm
    loss      mean over targets of Huber(output, z), delta = 0.25
    val_mae   mean absolute error in units; over several targets the mean of that by std

A target is learned as a logarithm where all its values are above 0 and the logarithm is less
skewed. An image lacks a target whose cell is empty, which counts for nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit.config import Config
from vit.config.presets import task_defaults
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample, Splits
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.number_columns import constant_target
from vit.errors import ConfigError, DataError
from vit.evaluation.number_metrics import (
    conformal_half_widths,
    mean_score,
    summarize_targets,
)
from vit.evaluation.temperature_scaling import MIN_IMAGES, Scaling, fit_temperature, scale_logits
from vit.number_answers import COVERAGE, NumberAnswers
from vit.output.prediction_results import ImageOutput
from vit.tasks.losses import user_loss
from vit.tasks.task import Evaluation, Event, Tally, Task, TrainingRun, forward
from vit.text import Notify, join_names, printable
from vit.weights.saved_model import ANSWERS, INTERVALS, SCALING, update_run

if TYPE_CHECKING:
    from vit.tasks.finished_run import FinishedRun
    from vit.weights.saved_model import LoadedRun

DELTA = 0.25
"""Error in standard deviations from which on the loss is linear."""
SKEWED = 1.0
"""Skewness from which on the logarithm is tried."""


class Regression(Task):
    """Numbers, each standardised by the training images."""

    metric = "val_mae"
    higher_is_better = False
    share = "r2"
    planned_settings: ClassVar[Mapping[str, Any]] = {
        **task_defaults("regression"),
        "auto_augment": "none",
        "color_jitter": 0.0,
        "erase": 0.0,
        "mixup": 0.0,
        "cutmix": 0.0,
        "smoothing": 0.0,
    }
    activation_name = "units"

    def __init__(self, answers: NumberAnswers | None = None) -> None:
        self.answers = answers

    def dataset_spec(self, config: Config) -> DatasetSpec:
        """Images with the columns `target`, without classes."""
        if not config.data.target:
            task = config.training.task
            raise ConfigError(f"task={task}: say which column of the list with --target COLUMN")
        return DatasetSpec.from_config(config.data, labels=False)

    def output_names(self, splits: Splits) -> tuple[str, ...]:
        return splits.targets

    def check_data(self, config: Config, splits: Splits, notify: Notify) -> tuple[Config, Splits]:
        """Refuse a target that is the same for all training images."""
        scale_of(splits)
        return config, splits

    def with_data(self, config: Config, splits: Splits | None) -> "Regression":
        """The task with the scale of the targets."""
        return self if splits is None else type(self)(scale_of(splits))

    def summary(self, config: Config, splits: Splits) -> list[str]:
        """The number of images, and the range of each target."""
        lines = super().summary(config, splits)
        rows = torch.tensor([sample.numbers for sample in splits.train]).double()
        answers = scale_of(splits)
        for name, unit, log, classes, values in zip(
            answers.names, answers.units, answers.log, answers.choices, rows.T, strict=True
        ):
            if classes:
                lines.append(f"{printable(name)}: {len(classes)} classes, {join_names(classes)}")
                continue
            low, high = (f"{one:.5g}" for one in values[~values.isnan()].aminmax())
            learned = ", learned as its logarithm" if log else ""
            lines.append(f"{printable(name)}: {low} to {high} {printable(unit)}".rstrip() + learned)
        return lines

    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        outputs = forward(run, images, batch.sizes)
        if (own := run.config.user_code.loss) is not None:
            wanted = self.standardised(batch.labels).to(outputs, non_blocking=True)
            losses = user_loss(own, outputs, wanted, reduction="none")
        else:
            losses = self.losses(outputs, batch.labels, run.config.training.smoothing)
        if batch.weights is not None:
            losses = losses * batch.weights.to(losses, non_blocking=True)
        return losses.sum().view(1)

    def losses(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Loss of each image, (images,), of values in units (images, targets)."""
        wanted = self.standardised(labels).to(outputs, non_blocking=True)
        losses = self.target_losses(outputs, wanted.nan_to_num(), smoothing)
        return (losses * ~wanted.isnan()).mean(1)

    def target_losses(self, outputs: Tensor, wanted: Tensor, smoothing: float) -> Tensor:
        """Loss of each target, (images, targets), of what the network should compute of it."""
        return F.huber_loss(outputs, wanted, reduction="none", delta=DELTA)

    def standardised(self, labels: Tensor) -> Tensor:
        """Values in units (images, targets) -> what the network computes of them, on the CPU."""
        assert self.answers is not None
        return torch.from_numpy(self.answers.standardise(labels.double().numpy()))

    def preview(
        self, run: TrainingRun, batch: Batch, images: Tensor, classes: Sequence[str]
    ) -> tuple[Tensor, list[list[str]]]:
        answers = self.answers
        assert answers is not None

        def line(target: int, value: float) -> str:
            text = answers.truth(target, value)
            return f"{answers.names[target]} {text if isinstance(text, str) else f'{value:.5g}'}"

        return images, [[*starmap(line, enumerate(row))] for row in batch.labels.tolist()]

    def tally(self, samples: Sequence[Sample]) -> Tally:
        assert self.answers is not None
        return NumberTally(self)

    def format_scores(self, event: Event) -> str:
        """Mean absolute error, in units."""
        unit = self.answers.units[0] if self.answers and len(self.answers.names) == 1 else "std"
        return f"val MAE {event['val_mae']:.4g} {printable(unit)}".rstrip()

    def activation(self, run: "LoadedRun") -> nn.Module:
        """Standardised values to units."""
        assert run.answers is not None, "a network of numbers has its scale"
        return Units(run.answers)

    def eval_spec(self, spec: DatasetSpec, outputs: Sequence[str]) -> DatasetSpec:
        """The columns that the network was trained on."""
        if spec.label_column == ",".join(spec.target):  # of classes, in a training's settings
            spec = replace(spec, label_column=None)
        answers = self.answers
        assert answers is not None
        pairs = zip(answers.names, answers.choices, strict=True)
        return replace(
            spec,
            target=answers.names,
            units=answers.units,
            texts=tuple(name for name, classes in pairs if classes),
            choices=answers.classes,
            labels=False,
        )

    def label_names(self, spec: DatasetSpec, outputs: tuple[str, ...]) -> tuple[str, ...]:
        """None: labels are numbers."""
        return ()

    def evaluation(
        self, model: Any, samples: Sequence[Sample], notify: Notify
    ) -> "NumberEvaluation":
        return NumberEvaluation(samples, model.answers)

    def score(self, outputs: Any, samples: Sequence[Sample]) -> float | None:
        assert self.answers is not None
        wanted = torch.tensor([one.numbers for one in samples], dtype=torch.float64)
        values = torch.as_tensor(outputs).double()
        scores = summarize_targets(self.answers, values, wanted, brief=True)
        return mean_score(scores.get("questions", {"": scores}))

    def decisions(self, outputs: Any, thresholds: Sequence[float] | None) -> None:
        """None: numbers differ in size."""

    def stored_fields(self, config: Config, outputs: Sequence[str]) -> dict[str, Any]:
        """The task, and the scale of the targets."""
        assert self.answers is not None
        return {**super().stored_fields(config, outputs), ANSWERS: self.answers.to_dict()}

    def finish(self, run: "FinishedRun") -> None:
        """Measure intervals on the validation images."""
        try:
            found = run.validation_logits
        except DataError:  # which the report says
            return
        answers = run.loaded.answers
        assert answers is not None
        groups = found.calibration_groups(run.notify)
        logits, labels = found.logits.double(), found.labels.double()
        apart, scaling = residuals(answers, logits, labels, groups, run.notify)
        widths = [conformal_half_widths(*present(column, groups)) for column in apart.T]
        shared = {
            coverage: [one[coverage] for one in widths]
            for coverage in widths[0]
            if all(coverage in one for one in widths)
        }
        measured = {INTERVALS: shared, SCALING: scaling}
        if any(measured.values()):
            update_run(run.folder, {name: value or None for name, value in measured.items()})
            del run.loaded  # which is read again with them
        if COVERAGE not in shared:
            run.notify(
                f"note: {len(found.paths)} validation images are too few for intervals that hold "
                f"{COVERAGE:.0%} of the values"
            )

    def write_report(self, run: "FinishedRun") -> None:
        """Errors, and the images with the largest ones, of the validation images."""
        from vit.evaluation.number_page import write_number_report

        found, answers = run.validation_logits, run.loaded.answers
        assert answers is not None
        values = Units(answers)(found.logits.double())
        facts, true = run.facts(found.failed), found.labels.double()
        write_number_report(facts, answers, values, true, found.paths, found.groups)


class Units(nn.Module):
    """Outputs of a network (batch, outputs) -> numbers in units, and probabilities of classes."""

    mean: Tensor
    std: Tensor
    log: Tensor

    def __init__(self, answers: NumberAnswers) -> None:
        super().__init__()
        counts = torch.tensor([len(classes) or 1 for classes in answers.choices])
        for name in ("mean", "std", "log"):
            values = torch.tensor(getattr(answers, name))
            self.register_buffer(name, values.repeat_interleave(counts))
        self.logs = any(answers.log)  # torch.export does not branch on a tensor
        self.parts, self.choices = answers.parts, answers.classes
        self.scaling = answers.scaling or ((1.0, 1.0),) * len(self.parts)

    def forward(self, outputs: Tensor) -> Tensor:
        values = outputs * self.std.to(outputs) + self.mean.to(outputs)
        values = torch.where(self.log, values.exp(), values) if self.logs else values
        if not self.choices:
            return values
        parts = zip(self.parts, self.choices, self.scaling, strict=True)
        found = [
            scale_logits(outputs[:, part], *scaling).softmax(1) if classes else values[:, part]
            for part, classes, scaling in parts
        ]
        return torch.cat(found, dim=1)


class NumberEvaluation(Evaluation):
    """Errors of each target."""

    def __init__(self, samples: Sequence[Sample], answers: NumberAnswers) -> None:
        super().__init__(samples)
        self.answers = answers
        self.values: list[Tensor | None] = []

    def add(self, outputs: Sequence[ImageOutput], first: int) -> None:
        self.values += [
            None if output.probabilities is None else torch.as_tensor(output.probabilities)
            for output in outputs
        ]

    def measured_groups(self) -> Tensor | None:
        """The group of each image that was read, (images,); None of independent images."""
        return self.groups_at(n for n, value in enumerate(self.values) if value is not None)

    def scores(self) -> dict[str, Any]:
        """Errors, and how often an interval holds the value; of several targets `questions`."""
        rows = [
            (value, sample.numbers)
            for value, sample in zip(self.values, self.samples, strict=False)
            if value is not None
        ]
        if not rows:
            return {}
        values = torch.stack([value for value, _ in rows]).double()
        wanted = torch.tensor([numbers for _, numbers in rows], dtype=torch.float64)
        return summarize_targets(
            self.answers, values, wanted, self.measured_groups(), brief=self.brief
        )


class NumberTally:
    """Loss and mean absolute error."""

    width: ClassVar[int] = 2
    """Sums of a target."""

    def __init__(self, task: Regression) -> None:
        assert task.answers is not None
        self.task, self.answers = task, task.answers
        self.units = Units(self.answers)
        self.sums = torch.zeros(2 + self.width * len(self.answers.names), dtype=torch.float64)

    def add(self, run: TrainingRun, batch: Batch, images: Tensor) -> None:
        outputs = forward(run, images, batch.sizes).to(run.dtype).cpu()
        loss = self.task.losses(outputs, batch.labels).double().sum()[None]
        sums = self.target_sums(outputs.double(), batch.labels.double())
        self.sums += torch.cat([loss, sums, torch.tensor([len(outputs)]).double()])

    def target_sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Absolute errors, of several targets as they are standardised, and numbers of images."""
        if len(self.answers.names) == 1:
            outputs, wanted = self.units(outputs), labels
        else:
            wanted = self.task.standardised(labels)
        apart = (outputs - wanted).abs()
        return torch.cat([apart.nansum(0), (~apart.isnan()).sum(0).double()])

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Mean loss and mean absolute error."""
        loss, *each, count = totals
        targets = len(self.answers.names)
        pairs = zip(each[:targets], each[targets:], strict=True)
        errors = [error / images for error, images in pairs if images]
        return {"val_loss": loss / count, "val_mae": sum(errors) / len(errors)}


def scale_of(splits: Splits) -> NumberAnswers:
    """The scale, or the classes, of the targets by the training images; DataError for one that is
    constant."""
    scales = []
    classes = splits.target_classes
    for name, texts, values in zip(
        splits.targets,
        classes or ((),) * len(splits.targets),
        np.array([sample.numbers for sample in splits.train]).T,
        strict=True,
    ):
        values = values[~np.isnan(values)]
        if problem := constant_target(printable(name), values, texts):
            raise DataError(problem)
        if texts:
            scales.append((0.0, 1.0, False))
            continue
        skew = skewness(values)
        log = bool(values.min() > 0 and skew > SKEWED and abs(skewness(np.log(values))) < skew)
        scaled = np.log(values) if log else values
        scales.append((float(scaled.mean()), float(scaled.std()), log))
    mean, std, logs = zip(*scales, strict=True)
    return NumberAnswers(splits.targets, splits.units, mean, std, logs, classes=classes)


def residuals(
    answers: NumberAnswers, outputs: Tensor, labels: Tensor, groups: Tensor | None, notify: Notify
) -> tuple[Tensor, list[Scaling]]:
    """Errors of each target, (images, targets), as intervals have them, and the scaling of each.

    A number is off by its standardised error in deviations, a class by 1 less its probability,
    which the other images calibrated. The scaling is that of all images, none without choices.
    """
    standard = torch.from_numpy(answers.standardise(labels.numpy()))
    apart, scaling = torch.full_like(labels, torch.nan), list[Scaling]()
    for n, (part, classes) in enumerate(zip(answers.parts, answers.choices, strict=True)):
        there, own = ~labels[:, n].isnan(), outputs[:, part]
        if not classes:
            apart[:, n] = (own[:, 0] - standard[:, n]).abs() * torch.tensor(answers.std)[n]
            scaling.append(Scaling())
            continue
        logits, true = own[there], labels[there, n].long()
        fitted = fit_temperature(logits, true, None if groups is None else groups[there])
        if len(true) < MIN_IMAGES:
            notify(
                f"note: scores of {printable(answers.names[n])} are not calibrated, and may be far "
                f"from the share that is right: that needs {MIN_IMAGES} validation images with one"
            )
        shares = (logits if fitted is None else fitted.held_out).softmax(1)
        apart[there, n] = 1 - shares.gather(1, true[:, None])[:, 0]
        scaling.append(Scaling() if fitted is None else fitted.scaling)
    return apart, scaling if answers.classes else []


def skewness(values: Any) -> float:
    """Third standardised moment."""
    apart = values - values.mean()
    return float((apart**3).mean() / (apart**2).mean() ** 1.5)


def present(values: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The values that are numbers, and their groups."""
    there = ~values.isnan()
    return values[there], None if groups is None else groups[there]
