"""Which images make which batch: a pure function of (seed, epoch, step).

    order of an epoch        a permutation drawn from (seed, "order", epoch)
    batch of a step          order[step * batch_size :][:batch_size]; an incomplete last one is left
    micro-batch of a device  a fixed slice of the batch

An epoch is one pass over the images, or `epoch_steps` steps: passes then follow each other through
the epochs, and an epoch may hold a part of one, or several.

So a run resumes anywhere with nothing saved but the step, and a step sees the same images on any
number of devices.

Repeated augmentation: a batch has batch_size / repeats different images, all of them once, then
all of them again, so that devices and neighbours, which MixUp pairs, have different ones. An epoch
keeps its steps, and sees 1 / repeats of the images: Hoffer et al., arXiv:1901.09335; epochs as in
Berman et al., section 3.2, arXiv:1902.05509.

Balanced classes: an epoch has as many images of each class. Those of a class follow each other in
random order, all of them before one comes again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vit.data.random_seed import random_seed
from vit.errors import DataError


class Key(NamedTuple):
    """One image to load."""

    epoch: int
    sample: int
    position: int
    repetition: int = 0
    """How often the pass had the image before; each time it is augmented otherwise."""
    visit: int = 0
    """Pass over the images, from 0; with sample and repetition it seeds the augmentation."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which samples make which micro-batch of one device.

    Args:
        count: Number of training samples.
        seed: Seed of the run.
        batch_size: Images of one step, over all devices and micro-batches.
        accumulate: Micro-batches of one step on one device.
        rank: Number of this device, from 0.
        world_size: Number of devices.
        repeats: How often a batch has each of its images.
        balanced: Classes of the samples, (count,), where all are to come equally often.
        epoch_steps: Steps of an epoch; those of one pass over the samples where left out.

    Raises:
        DataError: The batch is larger than the data, or does not split evenly.
    """

    count: int
    seed: int
    batch_size: int
    accumulate: int = 1
    rank: int = 0
    world_size: int = 1
    repeats: int = 1
    balanced: Tensor | None = field(default=None, repr=False, compare=False)
    epoch_steps: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size % self.repeats:
            raise DataError(
                f"batch_size={self.batch_size} is no multiple of repeats={self.repeats}; choose one"
            )
        parts = self.accumulate * self.world_size
        if self.batch_size % parts:
            raise DataError(
                f"batch_size={self.batch_size} does not split into accumulate={self.accumulate} "
                f"x {self.world_size} devices; choose a multiple of {parts}, or another accumulate"
            )
        if self.batch_size > self.count:
            raise DataError(
                f"batch_size={self.batch_size} is more than the {self.count} training images; "
                f"choose a smaller one"
            )

    @property
    def steps_per_pass(self) -> int:
        """Whole batches in the training images."""
        return self.count // self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps between two validations."""
        return self.epoch_steps or self.steps_per_pass

    @property
    def micro_batch_size(self) -> int:
        """Images that a device takes at once."""
        return self.batch_size // (self.accumulate * self.world_size)

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[list[Key]]:
        """The micro-batches of one epoch on this device, from its `start`-th on.

        Those of micro-batch 0 over all devices come first in the batch of a step, then those of
        micro-batch 1.
        """
        size, loaded = self.micro_batch_size, -1
        for number in range(start, self.steps_per_epoch * self.accumulate):
            in_epoch, micro = divmod(number, self.accumulate)
            visit, step = divmod(epoch * self.steps_per_epoch + in_epoch, self.steps_per_pass)
            if visit != loaded:
                order = self.order(visit)
                again, loaded = repetitions(order), visit
            first = (micro * self.world_size + self.rank) * size
            here = slice(step * self.batch_size + first, step * self.batch_size + first + size)
            pairs = zip(order[here].tolist(), again[here].tolist(), strict=True)
            yield [Key(epoch, sample, first + at, n, visit) for at, (sample, n) in enumerate(pairs)]

    def order(self, visit: int) -> Tensor:
        """The samples of all batches of a pass, one batch after the other, int64."""
        generator = torch.Generator().manual_seed(random_seed(self.seed, "order", visit))
        if self.balanced is None:
            drawn = torch.randperm(self.count, generator=generator)
        else:
            drawn = balanced_order(self.balanced, generator)
        if self.repeats == 1:
            return drawn
        different = drawn[: self.steps_per_pass * (self.batch_size // self.repeats)]
        batches = different.view(self.steps_per_pass, 1, -1)
        return batches.expand(-1, self.repeats, -1).flatten()


def balanced_order(classes: Tensor, generator: torch.Generator) -> Tensor:
    """As many samples as there are, of each class that has some as many as of the others, mixed.

    Where that does not come out even, classes drawn at random have one more.

    Args:
        classes: Of the samples, (count,).
        generator: Draws.
    """
    present, places = torch.unique(classes, return_inverse=True)
    members = torch.split(places.argsort(stable=True), torch.bincount(places).tolist())
    each, more = divmod(len(classes), len(present))
    lucky = torch.randperm(len(present), generator=generator) < more
    drawn = []
    for own, one_more in zip(members, lucky.tolist(), strict=True):
        wanted = each + one_more
        rounds = -(-wanted // len(own))
        orders = [torch.randperm(len(own), generator=generator) for _ in range(rounds)]
        drawn.append(own[torch.cat(orders)[:wanted]])
    return torch.cat(drawn)[torch.randperm(len(classes), generator=generator)]


def repetitions(order: Tensor) -> Tensor:
    """How often each entry of `order`, (entries,), came before, int64."""
    by_sample = order.argsort(stable=True)
    _, counts = torch.unique_consecutive(order[by_sample], return_counts=True)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    again = torch.empty_like(order)
    again[by_sample] = torch.arange(len(order)) - starts
    return again


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
    """`batch_size`, or the largest that `count` images fill; a multiple of `parts`.

    Args:
        count: Number of training images.
        batch_size: Images of one step, as wanted.
        parts: Micro-batches of one step over all devices, or a multiple of it.

    Raises:
        DataError: There are fewer images than parts.
    """
    if count < parts:
        raise DataError(
            f"{count} training images are too few for {parts} micro-batches a step; "
            f"use fewer devices, a smaller accumulate or fewer repeats"
        )
    return batch_size if batch_size <= count else count // parts * parts
