"""Confident learning: labels that out-of-sample probabilities contradict.

    threshold of class j    mean of p(j | x) over the images x labelled j; without one, none
                            suspects of j
    suspected               p(j | x) >= threshold of j, and p(j | x) > p(label | x), for a class j
    margin                  p(j | x) - p(label | x), of the most probable such class j
    order                   by p(label | x), the least probable label first

The probabilities of an image must come from a model that was not trained on its label, such as
that of another fold of a cross-validation, or from its nearest neighbours.

Source: Northcutt et al., "Confident Learning: Estimating Uncertainty in Dataset Labels", section 3,
arXiv:1911.00068.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vit.errors import DataError

Row = TypeVar("Row")
MIN_AGREEMENT = 0.4
"""Agreement of labels and answers beyond chance, 0 to 1, below which suspicions mean little."""


class Disagreement(NamedTuple):
    """Where probabilities contradict labels; tensors of shape (images,)."""

    suspected: Tensor
    likely: Tensor
    """The most probable class that reaches its threshold, of suspected images."""
    margin: Tensor
    """Its probability less that of the label."""


def find_disagreement(probabilities: Tensor, labels: Tensor) -> Disagreement:
    """Compare out-of-sample `probabilities`, (images, classes), with `labels`, (images,)."""
    own = probabilities.gather(1, labels[:, None]).squeeze(1)
    threshold = class_thresholds(own, labels, probabilities.shape[1])
    best, likely = probabilities.masked_fill(probabilities < threshold, -1.0).max(1)
    suspected = (best > own) & (likely != labels) & (best > 0)
    return Disagreement(suspected, likely, best - own)


def class_thresholds(own: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Probability from which on a label of each class is suspected, (classes,); infinity of classes
    that no image is labelled with."""
    count = torch.bincount(labels, minlength=classes)
    means = own.new_zeros(classes).scatter_add_(0, labels, own) / count.clamp(min=1)
    return means.masked_fill(count == 0, torch.inf)


@dataclass(frozen=True)
class LabeledRow:
    """A row of `vit evaluate --out FILE.jsonl`."""

    image: str
    label: str
    label_score: float
    predictions: tuple[tuple[str, float], ...]
    """The most probable classes with their probabilities."""


class SuspectRow(NamedTuple):
    """A row whose label may be wrong."""

    row: LabeledRow
    likely: str
    likely_score: float

    @property
    def margin(self) -> float:
        """Probability of the likely class less that of the label."""
        return self.likely_score - self.row.label_score


def find_suspect_rows(rows: Sequence[LabeledRow]) -> list[SuspectRow]:
    """Rows whose labels are probably wrong, the least probable label first.

    An image whose other classes share the probability has a small margin, and yet a wrong label. A
    class that is not among the predictions of a row counts as improbable.
    """
    index = {name: place for place, name in enumerate(dict.fromkeys(row.label for row in rows))}
    labels = torch.tensor([index[row.label] for row in rows])
    own = torch.tensor([row.label_score for row in rows], dtype=torch.float64)
    thresholds = dict(zip(index, class_thresholds(own, labels, len(index)).tolist(), strict=True))
    found = []
    for row in rows:
        likely = [
            (-score, name)
            for name, score in row.predictions
            if name != row.label
            and score > row.label_score
            and score >= thresholds.get(name, math.inf)
        ]
        if likely:
            score, name = min(likely)  # of equal scores, the first name
            found.append(SuspectRow(row, name, -score))
    return sorted(found, key=lambda one: one.row.label_score)


def weak_predictions(rows: Sequence[LabeledRow]) -> str | None:
    """What `rows` say if their predictions hardly tell the classes apart, else None."""
    right = sum(name == row.label for row in rows for name, _ in row.predictions[:1])
    largest = max(Counter(row.label for row in rows).values()) / len(rows)
    if right / len(rows) - largest >= MIN_AGREEMENT * (1 - largest):
        return None
    return (
        f"the predictions agree with {right / len(rows):.0%} of the labels, and {largest:.0%} are "
        "of one class: predictions as weak as these suspect many right labels"
    )


def read_labeled_rows(path: str | Path) -> list[LabeledRow]:
    """Read rows of `vit evaluate --out FILE.jsonl`; those of unreadable images are left out."""

    def labeled(record: Any) -> LabeledRow:
        pairs = [(str(one["label"]), float(one["score"])) for one in record["predictions"]]
        score = float(record["label_score"])
        return LabeledRow(record["image"], str(record["label"]), score, tuple(pairs))

    return read_rows(path, labeled, "one class an image")


def read_rows(path: str | Path, parse: Callable[[Any], Row], kind: str) -> list[Row]:
    """The same as `parse` returns them of each JSON object; `kind` is what they must have."""
    rows, number = [], 0
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                number += 1
                record = json.loads(line)
                if "error" in record:
                    continue
                rows.append(parse(record))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            f"{path}, line {number}: not a row of `vit evaluate --out FILE.jsonl` with "
            f"{kind}; give the rows.jsonl of `vit train --folds`, or such a file"
        ) from None
    if not rows:
        raise DataError(f"{path} has no rows of readable images; give another file")
    return rows
