"""Which pictures make which batch: a pure function of (seed, epoch, step).

    order of an epoch        a permutation drawn from (seed, "order", epoch)
    batch of a step          order[step * batch_size :][:batch_size]; an incomplete last one is left
    micro-batch of a device  a fixed slice of the batch

So a run resumes anywhere with nothing saved but the step, and a step sees the same pictures on any
number of devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vit.data.seeding import random_seed
from vit.errors import DataError


class Key(NamedTuple):
    """One picture to load."""

    epoch: int
    sample: int
    position: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which samples make which micro-batch of one device.

    Args:
        count: Number of training samples.
        seed: Seed of the run.
        batch_size: Pictures of one step, over all devices and micro-batches.
        accumulate: Micro-batches of one step on one device.
        rank: Number of this device, from 0.
        world_size: Number of devices.

    Raises:
        DataError: The batch is larger than the data, or does not split evenly.
    """

    count: int
    seed: int
    batch_size: int
    accumulate: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        parts = self.accumulate * self.world_size
        if self.batch_size % parts:
            raise DataError(
                f"batch_size={self.batch_size} does not split into accumulate={self.accumulate} "
                f"x {self.world_size} devices; choose a multiple of {parts}, or another accumulate"
            )
        if self.batch_size > self.count:
            raise DataError(
                f"batch_size={self.batch_size} is more than the {self.count} training pictures; "
                f"choose a smaller one"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the training pictures."""
        return self.count // self.batch_size

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[list[Key]]:
        """The micro-batches of one epoch on this device, from its `start`-th on.

        Those of micro-batch 0 over all devices come first in the batch of a step, then those of
        micro-batch 1.
        """
        generator = torch.Generator().manual_seed(random_seed(self.seed, "order", epoch))
        order = torch.randperm(self.count, generator=generator)
        size = self.batch_size // (self.accumulate * self.world_size)
        for number in range(start, self.steps_per_epoch * self.accumulate):
            step, micro = divmod(number, self.accumulate)
            first = (micro * self.world_size + self.rank) * size
            samples = order[step * self.batch_size + first :][:size].tolist()
            yield [Key(epoch, sample, first + place) for place, sample in enumerate(samples)]


class Stream:
    """Micro-batches of epoch after epoch, so that loader processes never pause between epochs."""

    def __init__(self, schedule: Schedule, epochs: int) -> None:
        self.schedule = schedule
        self.epochs = epochs
        self.start = (0, 0)

    def __iter__(self) -> Iterator[list[Key]]:
        first, number = self.start
        for epoch in range(first, self.epochs):
            yield from self.schedule.micro_batches(epoch, number if epoch == first else 0)


def fitting_batch_size(count: int, batch_size: int, parts: int) -> int:
    """`batch_size`, or the largest that `count` pictures fill; a multiple of `parts`.

    Args:
        count: Number of training pictures.
        batch_size: Pictures of one step, as wanted.
        parts: Micro-batches of one step over all devices.

    Raises:
        DataError: There are fewer pictures than parts.
    """
    if count < parts:
        raise DataError(
            f"{count} training pictures are too few for {parts} micro-batches a step; "
            f"use fewer devices or a smaller accumulate"
        )
    return batch_size if batch_size <= count else count // parts * parts
