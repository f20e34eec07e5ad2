"""Multi-label targets: sparse class indices of all images, dense multi-hot rows per batch.

1,000,000 images with 3 of 1,000 classes take 20 MB as indices, and 1 GB as a table of uint8.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vit.data.dataset_types import NO_LABEL, Sample, Splits


class MultiHot:
    """Sparse multi-label targets; indexing returns dense multi-hot rows."""

    def __init__(self, rows: Iterable[Sequence[int]], classes: int) -> None:
        kept = [np.asarray(row, dtype=np.int32) for row in rows]
        self.classes = classes
        self.flat = np.concatenate([np.empty(0, np.int32), *kept])
        self.ends = np.cumsum([0, *map(len, kept)])
        if len(self.flat) and not 0 <= self.flat.min() <= self.flat.max() < classes:
            raise ValueError(f"labels must be from 0 to {classes - 1}, one of {classes} classes")

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Multi-hot rows of the images `indices`, (batch,) -> (batch, classes) uint8."""
        chosen = indices.numpy()
        counts = self.ends[chosen + 1] - self.ends[chosen]
        parts = [self.flat[self.ends[at] : self.ends[at + 1]] for at in chosen]
        table = np.zeros((len(chosen), self.classes), np.uint8)
        columns = np.concatenate([np.empty(0, np.int32), *parts])
        table[np.repeat(np.arange(len(chosen)), counts), columns] = 1
        return torch.from_numpy(table)


def labels_of(sample: Sample) -> tuple[int, ...]:
    """Class indices of an image, whether single-label or multi-label."""
    return sample.labels if sample.label == NO_LABEL else (sample.label,)


def has_multilabel(samples: Sequence[Sample]) -> bool:
    """Whether the samples are multi-label."""
    return any(sample.label == NO_LABEL for sample in samples)


def to_multilabel(splits: Splits) -> Splits:
    """Convert a single-label dataset to a multi-label one."""
    if splits.multilabel:
        return splits
    train, val = (
        tuple(replace(one, label=NO_LABEL, labels=labels_of(one)) for one in samples)
        for samples in (splits.train, splits.val)
    )
    return replace(splits, train=train, val=val, multilabel=True)
