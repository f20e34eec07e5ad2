"""Single-label classification: cross-entropy with label smoothing, MixUp and CutMix."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.config.stored_config import run_folder_of
from vit.data.dataset import Batch
from vit.data.dataset_types import NO_LABEL, Sample, Splits, has_multilabel
from vit.data.sources.open_dataset import GROUP
from vit.errors import ConfigError, DataError, VitError
from vit.evaluation.classification_metrics import (
    CalibratedOutcomes,
    ClassChange,
    Outcomes,
    RecallRow,
    compare_recall,
    recall_lines,
    summarize_classes,
)
from vit.evaluation.fit_calibration import (
    calibration_reference,
    describe_calibration,
    fit_calibration,
)
from vit.evaluation.temperature_scaling import scale_logits
from vit.output.prediction_results import ImageOutput
from vit.tasks.distillation import Distillation, classifier_loss
from vit.tasks.finished_run import FinishedRun
from vit.tasks.losses import ClassBalance, smoothed_cross_entropy
from vit.tasks.task import (
    Evaluation,
    Event,
    Task,
    TrainingRun,
    forward,
    mixed,
    one_class_needed,
)
from vit.text import Notify
from vit.weights.saved_model import CONFIG_FILE, load_run, store_calibration

MIN_SHARE = 0.005
"""Smallest share of a class that is named below an image."""
NOTABLE_DIFFERENCE = 0.05
"""Difference of balanced accuracy and accuracy above which both are logged."""


class Classification(Task):
    """Single-label classification."""

    metric = "val_top1"
    activation_name = "softmax"
    measures_distance = True

    def __init__(
        self, balance: ClassBalance | None = None, distillation: Distillation | None = None
    ) -> None:
        self.balance = balance
        self.distillation = distillation

    def check_data(self, config: Config, splits: Splits, notify: Notify) -> tuple[Config, Splits]:
        """Change to the multi-label task for such data, unless the user chose this one."""
        if not splits.multilabel:
            return config, splits
        if config.chosen("task"):
            raise one_class_needed(config, "use --task multilabel")
        notify("note: images have several labels: task=multilabel")
        training, finetune = replace(config.training, task="multilabel"), config.finetune
        if not config.chosen("probe_first") and finetune.method != "probe":
            finetune = replace(finetune, probe_first=False)
        return replace(config, training=training, finetune=finetune), splits

    def with_data(self, config: Config, splits: Splits | None) -> "Classification":
        """The task with the frequencies of the classes and the teacher's answers, if needed."""
        balance = None
        if config.training.balance != "none" and splits is not None:
            balance = ClassBalance.of(config, splits.train)
        distillation = Distillation.of(config, splits)
        return type(self)(balance, distillation) if balance or distillation else self

    def notes(self, config: Config, splits: Splits) -> list[str]:
        """How class imbalance is treated."""
        return [] if self.balance is None else self.balance.notes(splits.classes)

    def format_scores(self, event: Event) -> str:
        """Accuracy, and balanced accuracy if it differs or ranks epochs."""
        return format_accuracy(event)

    def check_samples(self, samples: Sequence[Sample], where: str) -> None:
        """Refuse multi-label images."""
        if has_multilabel(samples):
            raise ConfigError(
                f"{where}: images have several classes, or none, and this network gives "
                "each one; train it with --task multilabel, or give data with one class an image"
            )

    def evaluation(
        self, model: Any, samples: Sequence[Sample], notify: Notify
    ) -> "ClassEvaluation":
        return ClassEvaluation(samples, model.classes)

    def score(self, outputs: NDArray[Any], samples: Sequence[Sample]) -> float:
        labels = np.array([sample.label for sample in samples])
        return float((outputs.argmax(1) == labels).mean())

    def stored_fields(self, config: Config, outputs: Sequence[str]) -> dict[str, Any]:
        """The task, but for that of a network without other fields."""
        return {} if config.training.task == "classify" else super().stored_fields(config, outputs)

    def finish(self, run: FinishedRun) -> None:
        """Calibrate the scores on the validation images."""
        try:
            found = run.validation_logits
        except DataError:  # which the report says
            return
        groups = found.calibration_groups(run.notify)
        new = run.new_sources
        if new is not None and (not new.sources or new.by == GROUP):  # groups have their own levels
            new = None
        fitted = fit_calibration(
            found.logits,
            found.labels,
            fitted=found.temperature,
            distances=found.distances,
            groups=groups,
            new=new,
            **self.calibration_settings(run.splits.classes),
        )
        if fitted is not None:
            calibration = fitted.calibration
            kept = (found.logits, found.distances, run.splits.classes, calibration, groups)
            reference = calibration_reference(*kept)
            store_calibration(run.folder, calibration, found.distance, fitted.error, reference)
            for line in describe_calibration(fitted):
                run.notify(line)

    def write_report(self, run: FinishedRun) -> None:
        """Scores, confusions, calibration and mistakes on the validation images."""
        from vit.evaluation.classification_page import write_classification_report

        found = run.validation_logits
        logits, calibration = found.logits.double(), run.loaded.calibration
        outcomes = Outcomes.of(logits.softmax(dim=1), found.labels)
        calibrated = None
        if calibration is not None and calibration.scales and (fitted := found.temperature):
            scaled = (scale_logits(logits, *fitted.scaling), fitted.held_out)
            calibrated = CalibratedOutcomes(
                (calibration.temperature, calibration.exponent),
                *(Outcomes.of(each.softmax(dim=1), found.labels) for each in scaled),
            )
        recall = recall_after_increment(run, outcomes)
        for line in recall_lines(recall) if recall else []:
            run.notify(line)
        write_classification_report(
            run.facts(found.failed),
            outcomes,
            found.paths,
            calibrated=calibrated,
            groups=found.groups,
            recall=recall,
            nodes=self.node_rows(run),
            slices=found.slices(
                (outcomes.ranks == 0).tolist(),
                classes=[run.splits.classes[label] for label in found.labels.tolist()],
                training_counts=Counter(run.splits.classes[one.label] for one in run.splits.train),
                fast=run.config.run.report == "fast",
            ),
        )

    def node_rows(self, run: FinishedRun) -> list[dict[str, Any]]:
        """Rows of the report about the nodes of a tree; none without one."""
        return []

    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        config = run.config
        labels = batch.labels.to(images.device, non_blocking=True)
        targets = F.one_hot(labels, config.model.num_classes).to(images.dtype)
        loss = smoothed_cross_entropy if self.balance is None else self.balance.loss
        label_loss = partial(loss, smoothing=config.training.smoothing)
        return classifier_loss(run, batch, images, targets, epoch, label_loss, self.distillation)

    def preview(
        self, run: TrainingRun, batch: Batch, images: Tensor, classes: Sequence[str]
    ) -> tuple[Tensor, list[list[str]]]:
        """Mixed images, with the share of each class."""
        return preview_mixture(run, batch, images, F.one_hot(batch.labels, len(classes)), classes)

    def tally(self, samples: Sequence[Sample]) -> "ClassTally":
        return ClassTally(count_classes(samples))


def recall_after_increment(run: FinishedRun, outcomes: Outcomes) -> list[RecallRow]:
    """Recall of old and new classes; none if no class was added, or the other run is gone."""
    weights, classes = run.config.finetune.weights, run.splits.classes
    if weights is None or not (run_folder_of(weights) / CONFIG_FILE).is_file():
        return []
    try:
        old = load_run(run_folder_of(weights))
    except VitError:  # weights of another library
        return []
    change = ClassChange.between(old.classes, classes)
    if old.task_name != "classify" or not (change.kept and change.added):
        return []
    old.model.to(run.device)
    kept = set(change.kept)
    samples = [sample for sample in run.splits.val if classes[sample.label] in kept]
    right: Counter[str] = Counter()
    for batch, logits in run.logits(samples, {}, network=old) if samples else ():
        answers = [old.classes[answer] for answer in logits.argmax(dim=1).tolist()]
        labels = [classes[label] for label in batch.labels.tolist()]
        right.update(
            label for label, answer in zip(labels, answers, strict=True) if label == answer
        )
    return compare_recall(change, outcomes, classes, right)


class ClassEvaluation(Evaluation):
    """Accuracy, calibration and scores of each class."""

    def __init__(self, samples: Sequence[Sample], classes: Sequence[str]) -> None:
        super().__init__(samples)
        self.classes = classes
        self.outcomes: list[Outcomes] = []
        self.right: list[bool | None] = []

    def add(self, outputs: Sequence[ImageOutput], first: int) -> None:
        samples = self.samples[first : first + len(outputs)]
        rows = {
            place: (sample.label, output.probabilities)
            for place, (sample, output) in enumerate(zip(samples, outputs, strict=True))
            if output.probabilities is not None and sample.label != NO_LABEL
        }
        right: list[bool | None] = [None] * len(outputs)
        if rows:
            labels, probabilities = zip(*rows.values(), strict=True)
            outcomes = Outcomes.of(torch.from_numpy(np.stack(probabilities)), torch.tensor(labels))
            self.outcomes.append(outcomes)
            for place, hit in zip(rows, (outcomes.ranks == 0).tolist(), strict=True):
                right[place] = hit
        self.right += right

    def scores(self) -> dict[str, Any]:
        """The metrics of `summarize`, with intervals."""
        if not self.outcomes:
            return {}
        outcomes = Outcomes.cat(self.outcomes)
        return summarize_classes(outcomes, self.classes, self.measured_groups(), brief=self.brief)


class ClassTally:
    """Loss, accuracy and balanced accuracy."""

    extra: ClassVar[int] = 0
    """Sums of a subclass, before these."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.sums = torch.zeros(self.extra + 3 + 2 * classes, dtype=torch.float64)

    def add(self, run: TrainingRun, batch: Batch, images: Tensor) -> None:
        logits = forward(run, images, batch.sizes)
        self.count(logits.to(run.dtype).cpu(), batch.labels)

    def count(self, logits: Tensor, labels: Tensor) -> None:
        """Add answers, (images, classes), and labels, both on the CPU."""
        self.sums += self.row(logits, labels)

    def row(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What answers add to the sums; arguments as of `count`."""
        loss, correct, count = loss_and_correct(logits, labels).unsqueeze(1)
        right = labels[logits.argmax(dim=1) == labels]
        each = [torch.bincount(some, minlength=self.classes).double() for some in (right, labels)]
        return torch.cat([loss, correct, *each, count])

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Mean loss, accuracy, and balanced accuracy over classes that have images."""
        loss, correct, *each, count = totals
        pairs = zip(each[: self.classes], each[self.classes :], strict=True)
        recalls = [right / images for right, images in pairs if images]
        found: dict[str, Any] = {
            "val_loss": loss / count,
            "val_top1": correct / count,
            "val_balanced_accuracy": math.fsum(recalls) / len(recalls),
        }
        if run.config.training.balance != "none":
            found["chosen_by"] = "val_balanced_accuracy"
        return found


def preview_mixture(
    run: TrainingRun, batch: Batch, images: Tensor, targets: Tensor, classes: Sequence[str]
) -> tuple[Tensor, list[list[str]]]:
    """Mixed images, with the share of each class; arguments as for `mixed` and `Task.preview`."""
    images, targets = mixed(run, batch, images, targets.float(), epoch=0)
    return images, [class_lines(row, classes) for row in targets]


def class_lines(shares: Tensor, classes: Sequence[str]) -> list[str]:
    """Class names of a target (classes,), one a line with its share if images are mixed."""
    order = shares.sort(descending=True, stable=True).indices.tolist()
    named = [(classes[at], float(shares[at])) for at in order if shares[at] >= MIN_SHARE]
    if not named:
        return ["(no class)"]
    if all(share >= 1 - MIN_SHARE for _, share in named):
        return [", ".join(name for name, _ in named)]
    return [f"{name} {share:.0%}" for name, share in named]


def loss_and_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed loss, number of correct predictions and number of images, float64, (3,)."""
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack([loss.double(), correct.double(), torch.tensor(len(logits)).double()])


def count_classes(samples: Sequence[Sample]) -> int:
    """One more than the largest label in `samples`."""
    return 1 + max((sample.label for sample in samples), default=-1)


def format_accuracy(event: Event) -> str:
    """Accuracy for a log line, and balanced accuracy if it differs or ranks epochs."""
    accuracy = f"val top-1 {event['val_top1']:.2%}"
    balanced = event.get("val_balanced_accuracy", event["val_top1"])
    if "chosen_by" in event or abs(balanced - event["val_top1"]) >= NOTABLE_DIFFERENCE:
        return f"{accuracy}  balanced {balanced:.2%}"
    return accuracy
