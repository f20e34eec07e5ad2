"""Grades: classes in an order, such as poor, fair and good.

loss       cross-entropy as of classes; docs/lab-notebook.md has losses of the order beside it
val_kappa  quadratic weighted kappa of the most probable grades
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.config import Config
from vit.data.dataset_types import Sample, Splits
from vit.data.sources.dataset_spec import DatasetSpec
from vit.errors import ConfigError, DataError
from vit.evaluation.classification_metrics import (
    Outcomes,
    grade_moments,
    kappa_with_interval,
    quadratic_weighted_kappa,
)
from vit.tasks.classification import ClassEvaluation, Classification, ClassTally, count_classes
from vit.tasks.task import Event, Task, TrainingRun
from vit.text import Notify


class Ordinal(Classification):
    """Single-label classification whose classes have an order."""

    metric = "val_kappa"

    def dataset_spec(self, config: Config) -> DatasetSpec:
        """Images with classes in the order of the setting `order`."""
        if not config.data.order:
            raise ConfigError("task=ordinal: give the grades in their order: --order LOW,...,HIGH")
        return super().dataset_spec(config)

    def check_data(self, config: Config, splits: Splits, notify: Notify) -> tuple[Config, Splits]:
        """Refuse several grades an image, and validation images that all have one grade."""
        Task.check_data(self, config, splits, notify)
        if len({sample.label for sample in splits.val}) < 2:
            raise DataError(
                "the validation images all have one grade, which ranks nothing; add some"
            )
        return config, splits

    def format_scores(self, event: Event) -> str:
        return f"{Task.format_scores(self, event)}  top-1 {event['val_top1']:.2%}"

    def evaluation(
        self, model: Any, samples: Sequence[Sample], notify: Notify
    ) -> "GradeEvaluation":
        return GradeEvaluation(samples, model.classes)

    def score(self, outputs: NDArray[Any], samples: Sequence[Sample]) -> float:
        labels = torch.tensor([sample.label for sample in samples])
        moments = grade_moments(labels, torch.from_numpy(outputs.argmax(1)))
        return float(quadratic_weighted_kappa(moments.mean(dim=0)))

    def tally(self, samples: Sequence[Sample]) -> "GradeTally":
        return GradeTally(count_classes(samples))


class GradeEvaluation(ClassEvaluation):
    """Scores of classes, and kappa."""

    def scores(self) -> dict[str, Any]:
        """The metrics of classes, with kappa and its interval first."""
        scores = super().scores()
        if not scores:
            return {}
        outcomes = Outcomes.cat(self.outcomes)
        return {**kappa_with_interval(outcomes, self.measured_groups()), **scores}


class GradeTally(ClassTally):
    """The scores of classes, and kappa."""

    extra = 5

    def row(self, logits: Tensor, labels: Tensor) -> Tensor:
        moments = grade_moments(labels, logits.argmax(dim=1)).sum(dim=0)
        return torch.cat([moments, super().row(logits, labels)])

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Those of classes, and kappa, which ranks epochs."""
        means = torch.tensor(totals[: self.extra], dtype=torch.float64) / totals[-1]
        kappa = float(quadratic_weighted_kappa(means))
        scores = super().scores(run, totals[self.extra :])
        return {**scores, "val_kappa": kappa, "chosen_by": Ordinal.metric}
