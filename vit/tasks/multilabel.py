"""Multi-label classification: binary cross-entropy for each class.

    loss        mean over classes of  - q log p - (1 - q) log(1 - p),   p = sigmoid(logit)
    q           (1 - smoothing) * target + smoothing / classes, as with one class an image
    val_loss    the same without smoothing
    val_map     mean over classes of the average precision, of classes with a validation image
    val_f1      mean over classes of F1, predicted where p >= 0.5

Without a validation image of any class, val_map is None and val_loss ranks the epochs.
Average precision ranks all images, so the logits of all processes are gathered: 4 bytes per image
and class on each process.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.data.dataset import Batch, MultiHot
from vit.data.dataset_types import Sample, Splits, labels_of, to_multilabel
from vit.data.sources.dataset_spec import DatasetSpec
from vit.evaluation.fit_calibration import describe_calibration, fit_calibration
from vit.evaluation.multilabel_metrics import (
    DEFAULT_THRESHOLD,
    MIN_IMAGES,
    average_precisions,
    choose_thresholds,
    f1_scores,
    multilabel_intervals,
    nanmean,
    summarize_multilabel,
)
from vit.output.prediction_results import ImageOutput
from vit.tasks.classification import preview_mixture
from vit.tasks.distillation import Distillation, classifier_loss
from vit.tasks.finished_run import FinishedRun
from vit.tasks.losses import smoothed_binary_cross_entropy
from vit.tasks.task import (
    Evaluation,
    Event,
    Task,
    TrainingRun,
    calibrated_activation,
    forward,
)
from vit.text import Notify, join_names, percent
from vit.weights.saved_model import store_calibration, update_run


class MultiLabel(Task):
    """Multi-label classification, with MixUp and CutMix."""

    metric = "val_map"
    activation_name = "sigmoid"

    def __init__(self, distillation: Distillation | None = None) -> None:
        self.distillation = distillation

    def dataset_spec(self, config: Config) -> DatasetSpec:
        """Any number of classes an image."""
        return DatasetSpec.from_config(config.data, multilabel=True)

    def check_data(
        self,
        config: Config,
        splits: Splits,
        notify: Notify,
    ) -> tuple[Config, Splits]:
        """Any data will do."""
        return config, to_multilabel(splits)

    def with_data(self, config: Config, splits: Splits | None) -> "MultiLabel":
        """The task with the teacher's answers, if there are any."""
        distillation = Distillation.of(config, splits)
        return self if distillation is None else MultiLabel(distillation)

    def summary(self, config: Config, splits: Splits) -> list[str]:
        """The numbers of images and classes."""
        return [f"{line}, several an image" for line in super().summary(config, splits)]

    def label_width(self, config: Config) -> int | None:
        return config.model.num_classes

    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        targets = batch.labels.to(images.device, non_blocking=True).to(images.dtype)
        label_loss = partial(smoothed_binary_cross_entropy, smoothing=run.config.training.smoothing)
        return classifier_loss(run, batch, images, targets, epoch, label_loss, self.distillation)

    def preview(
        self, run: TrainingRun, batch: Batch, images: Tensor, classes: Sequence[str]
    ) -> tuple[Tensor, list[list[str]]]:
        """Mixed images, with the share of each class."""
        return preview_mixture(run, batch, images, batch.labels, classes)

    def tally(self, samples: Sequence[Sample]) -> "MultiLabelTally":
        return MultiLabelTally(samples)

    def format_scores(self, event: Event) -> str:
        """Mean average precision and F1."""
        return f"val mAP {percent(event['val_map'])}  F1 {percent(event['val_f1'])}"

    def eval_spec(self, spec: DatasetSpec, outputs: Sequence[str]) -> DatasetSpec:
        """Any number of classes an image."""
        return replace(spec, multilabel=True)

    def evaluation(
        self, model: Any, samples: Sequence[Sample], notify: Notify
    ) -> "MultiLabelEvaluation":
        assert model.thresholds is not None, "a multi-label network has thresholds"
        return MultiLabelEvaluation(samples, model.classes, model.thresholds)

    def score(self, outputs: NDArray[Any], samples: Sequence[Sample]) -> float | None:
        """Mean average precision; None without an image of any class."""
        targets = MultiHot(map(labels_of, samples), outputs.shape[1])[torch.arange(len(samples))]
        return nanmean(average_precisions(torch.from_numpy(outputs), targets))

    def decisions(self, outputs: NDArray[Any], thresholds: Sequence[float] | None) -> NDArray[Any]:
        """Which classes each image has."""
        named: NDArray[Any] = outputs >= np.array(thresholds)
        return named

    def stored_fields(self, config: Config, outputs: Sequence[str]) -> dict[str, Any]:
        return {"thresholds": [DEFAULT_THRESHOLD] * len(outputs)}

    def finish(self, run: FinishedRun) -> None:
        """Calibrate the scores and choose a threshold of each class on the validation images."""
        found = run.validation_logits
        logits = found.logits.double()
        groups = found.calibration_groups(run.notify)
        fitted = fit_calibration(logits, found.labels, fitted=found.temperature, groups=groups)
        if fitted is not None:
            store_calibration(run.folder, fitted.calibration, error=fitted.error)
            logits = logits / fitted.calibration.temperature
            for line in describe_calibration(fitted):
                run.notify(line)
        thresholds, few = choose_thresholds(logits.sigmoid(), found.labels)
        update_run(run.folder, {"thresholds": thresholds})
        run.notify(
            f"thresholds of the classes: {min(thresholds):.3f} to {max(thresholds):.3f}, by F1 on "
            "the validation images"
        )
        if few:
            names = join_names([run.splits.classes[index] for index in few])
            run.notify(
                f"note: fewer than {MIN_IMAGES} validation images have, or lack, class {names}: "
                f"its threshold is {DEFAULT_THRESHOLD}"
            )

    def write_report(self, run: FinishedRun) -> None:
        """Scores of each class, calibration, and mistakes on the validation images."""
        from vit.evaluation.classification_page import MultilabelOutcomes, write_multilabel_report

        found, loaded = run.validation_logits, run.loaded
        assert loaded.thresholds is not None, "a multi-label run has thresholds"
        logits = found.logits.double()
        held_out = None
        if (own := loaded.calibration) and own.scales and (fitted := found.temperature):
            held_out = fitted.held_out.sigmoid()
        probabilities = calibrated_activation(loaded)(logits)
        limits = torch.tensor(loaded.thresholds, dtype=torch.float64)
        wrong = (probabilities >= limits) != found.labels.bool()
        write_multilabel_report(
            run.facts(found.failed),
            MultilabelOutcomes(
                probabilities=probabilities,
                targets=found.labels,
                thresholds=loaded.thresholds,
                paths=found.paths,
                raw=logits.sigmoid(),
                held_out=held_out,
                temperature=loaded.calibration.temperature if loaded.calibration else 1.0,
                groups=found.groups,
            ),
            found.slices((~wrong.any(dim=1)).tolist(), fast=run.config.run.report == "fast"),
        )


class MultiLabelEvaluation(Evaluation):
    """Metrics of `summarize_multilabel`; holds all probabilities, 8 bytes an image and class."""

    def __init__(
        self, samples: Sequence[Sample], classes: Sequence[str], thresholds: Sequence[float]
    ) -> None:
        super().__init__(samples)
        self.classes, self.thresholds = classes, thresholds
        self.limits = torch.tensor(thresholds, dtype=torch.float64)
        self.rows: list[Tensor] = []
        self.labels: list[tuple[int, ...]] = []
        self.right: list[bool | None] = []

    def add(self, outputs: Sequence[ImageOutput], first: int) -> None:
        """Add a batch; an answer is right where each of its classes is."""
        for sample, output in zip(self.samples[first:], outputs, strict=False):
            if output.probabilities is None:
                self.right.append(None)
                continue
            row = torch.as_tensor(output.probabilities)
            self.rows.append(row)
            self.labels.append(labels_of(sample))
            named = (row >= self.limits).nonzero().flatten().tolist()
            self.right.append(set(named) == set(labels_of(sample)))

    def scores(self) -> dict[str, Any]:
        """Mean average precision, F1 and scores of each class."""
        if not self.rows:
            return {}
        targets = MultiHot(self.labels, len(self.classes))[torch.arange(len(self.labels))]
        table = torch.stack(self.rows)
        groups = self.measured_groups()
        scores = summarize_multilabel(table, targets, self.classes, self.thresholds, groups)
        if self.brief:
            return scores
        return {**scores, **multilabel_intervals(table, targets, table >= self.limits, groups)}


class MultiLabelTally:
    """Loss, mean average precision and F1, from all logits."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def add(self, run: TrainingRun, batch: Batch, images: Tensor) -> None:
        logits = forward(run, images, batch.sizes).to(run.dtype).cpu()
        targets = batch.labels.to(logits)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)
        self.sums += torch.stack([losses.double().sum(), torch.tensor(len(logits)).double()])
        self.outputs.append((batch.indices, logits))

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Mean loss, mean average precision and F1."""
        loss, count = totals
        # one pair of tensors per process: gathering many small ones is slow
        mine = [tuple(torch.cat(parts) for parts in zip(*self.outputs, strict=True))]
        found = run.gather([one for one in mine if one])

        def score() -> dict[str, float | None]:
            indices, logits = (torch.cat(parts) for parts in zip(*found, strict=True))
            order = indices.argsort()  # independent of how images are split over processes
            indices, logits = indices[order], logits[order]
            targets = MultiHot(map(labels_of, self.samples), logits.shape[1])[indices]
            return {
                "val_map": nanmean(average_precisions(logits, targets)),
                "val_f1": nanmean(f1_scores(logits >= 0, targets)),
            }

        scores = run.on_main(score)
        chosen_by = "val_loss" if scores["val_map"] is None else "val_map"
        return {"val_loss": loss / count, **scores, "chosen_by": chosen_by}
