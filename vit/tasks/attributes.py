"""Attributes: several questions of an image in one network, choices and numbers.

    loss       mean over targets of the cross-entropy of a choice, and of Huber(output, z) / delta
               of a number as in regression; an image lacks a target whose cell is empty
    val_score  mean over targets of the top-1 of a choice, and of the R2 of a number, at least 0

The head is one matrix whose outputs are those of all targets side by side.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.data.dataset_types import Sample, Splits
from vit.data.sources.dataset_spec import DatasetSpec
from vit.precision import at_least_float32
from vit.tasks.regression import DELTA, NumberTally, Regression, scale_of
from vit.tasks.task import Event, TrainingRun
from vit.text import printable

VAL_TOP1, VAL_R2 = "val_top1_", "val_r2_"
"""Begin the names of the scores of a choice and of a number in an event."""


class Attributes(Regression):
    """Choices and numbers, each a part of the outputs."""

    metric = "val_score"
    higher_is_better = True
    share = ""

    def dataset_spec(self, config: Config) -> DatasetSpec:
        """Images with the columns `target`, whose cells decide which are choices."""
        return replace(super().dataset_spec(config), texts=None)

    def output_names(self, splits: Splits) -> tuple[str, ...]:
        """TARGET=CLASS of each class, and the names of numbers."""
        return scale_of(splits).outputs

    def losses(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        return super().losses(at_least_float32(outputs), labels, smoothing)

    def target_losses(self, outputs: Tensor, wanted: Tensor, smoothing: float) -> Tensor:
        assert self.answers is not None
        parts = zip(self.answers.parts, self.answers.choices, wanted.unbind(1), strict=True)
        losses = [
            F.cross_entropy(
                outputs[:, part], true.long(), reduction="none", label_smoothing=smoothing
            )
            if classes
            else F.smooth_l1_loss(outputs[:, part.start], true, reduction="none", beta=DELTA)
            for part, classes, true in parts
        ]
        return torch.stack(losses, dim=1)

    def tally(self, samples: Sequence[Sample]) -> "AttributeTally":
        return AttributeTally(self)

    def format_scores(self, event: Event) -> str:
        lines = [f"val score {event['val_score']:.4f}"]
        for prefix, form in ((VAL_TOP1, "top-1 {:.2%}"), (VAL_R2, "R2 {:.3f}")):
            lines += [
                f"{printable(name.removeprefix(prefix))} {form.format(value)}"
                for name, value in event.items()
                if name.startswith(prefix) and value is not None
            ]
        return "  ".join(lines)


class AttributeTally(NumberTally):
    """Loss, and the score of each target."""

    width = 4

    def __init__(self, task: Attributes) -> None:
        super().__init__(task)
        self.middle = self.units(torch.zeros(1, len(self.answers.outputs))).double()[0]

    def target_sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        values = self.units(outputs)
        return torch.cat([self.moments(n, values, one) for n, one in enumerate(labels.unbind(1))])

    def moments(self, target: int, values: Tensor, labels: Tensor) -> Tensor:
        """Of images that have an answer: their number, right ones or squared errors, and of numbers
        the sum and squares, which give their variance, (4,)."""
        part, there = self.answers.parts[target], ~labels.isnan()
        values, labels = values[there, part], labels[there]
        count = torch.tensor(float(len(labels))).double()
        if self.answers.choices[target]:
            right = (values.argmax(1) == labels).double().sum()
            return torch.stack([count, right, right * 0, right * 0])
        centred = labels - self.middle[part.start]
        squares = (values[:, 0] - labels).square().sum()
        return torch.stack([count, squares, centred.sum(), centred.square().sum()])

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Mean loss, the score of each target, None where it is undefined, and their mean."""
        found: dict[str, Any] = {}
        for target, name in enumerate(self.answers.names):
            count, total, first, second = totals[1 + 4 * target : 5 + 4 * target]
            if self.answers.choices[target]:
                found[f"{VAL_TOP1}{name}"] = total / count if count else None
                continue
            variance = second - first**2 / count if count else 0.0
            found[f"{VAL_R2}{name}"] = 1 - total / variance if variance > 0 else None
        known = [max(one, 0.0) for one in found.values() if one is not None]
        score = sum(known) / len(known) if known else 0.0
        return {"val_loss": totals[0] / totals[-1], "val_score": score, **found}
