"""Distributed, resumable sampler: a batch is a pure function of (seed, epoch, step).

    order of a pass          a permutation seeded by (seed, "order", pass)
    batch of a step          order[step * batch_size :][:batch_size]
    micro-batch of a device  a fixed slice of the batch

A run resumes at any step with nothing saved but the step, and a step sees the same images on any
number of devices. An epoch is one pass over the images, or `epoch_steps` steps: passes then run on
through the epochs, and an epoch may hold a part of a pass or several passes.

Repeated augmentation: a batch has batch_size / repeats different images, all of them once, then
all of them again, so that devices and neighbours, which MixUp pairs, get different images. An epoch
keeps its number of steps and sees 1 / repeats of the images. Source: Hoffer et al.,
arXiv:1901.09335; epochs as in Berman et al., section 3.2, arXiv:1902.05509.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vit.data.random_seed import random_seed
from vit.errors import DataError


class SampleKey(NamedTuple):
    """One image to load, with the counters that seed its augmentation."""

    epoch: int
    sample: int
    position: int
    repetition: int = 0
    """How often the pass has used the image before; each time it is augmented differently."""
    pass_index: int = 0
    """Number of the pass over the images, from 0."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchSampler:
    """The samples of each micro-batch of one device.

    Args:
        batch_size: Images per optimiser step, over all devices and micro-batches.
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
                f"batch_size={self.batch_size} is not a multiple of repeats={self.repeats}, the "
                "copies of an image in a batch; change one of them"
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
        """Full batches in one pass over the images."""
        return self.count // self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        return self.epoch_steps or self.steps_per_pass

    @property
    def micro_batch_size(self) -> int:
        """Images per forward pass of one device."""
        return self.batch_size // (self.accumulate * self.world_size)

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[list[SampleKey]]:
        """The micro-batches of one epoch on this device, beginning with number `start`.

        A step's batch consists of micro-batch 0 of all devices, then micro-batch 1 of all, etc.
        """
        size, ordered_pass = self.micro_batch_size, -1
        for number in range(start, self.steps_per_epoch * self.accumulate):
            epoch_step, micro = divmod(number, self.accumulate)
            pass_index, step = divmod(
                epoch * self.steps_per_epoch + epoch_step, self.steps_per_pass
            )
            if pass_index != ordered_pass:
                order = self.order(pass_index)
                repetitions, ordered_pass = count_repetitions(order), pass_index
            first = (micro * self.world_size + self.rank) * size
            window = slice(step * self.batch_size + first, step * self.batch_size + first + size)
            pairs = zip(order[window].tolist(), repetitions[window].tolist(), strict=True)
            yield [
                SampleKey(epoch, sample, first + offset, repetition, pass_index)
                for offset, (sample, repetition) in enumerate(pairs)
            ]

    def order(self, pass_index: int) -> Tensor:
        """The samples of a pass, batch after batch, int64."""
        generator = torch.Generator().manual_seed(random_seed(self.seed, "order", pass_index))
        if self.balanced is None:
            order = torch.randperm(self.count, generator=generator)
        else:
            order = balanced_order(self.balanced, generator)
        if self.repeats == 1:
            return order
        different = order[: self.steps_per_pass * (self.batch_size // self.repeats)]
        batches = different.view(self.steps_per_pass, 1, -1)
        return batches.expand(-1, self.repeats, -1).flatten()


def balanced_order(classes: Tensor, generator: torch.Generator) -> Tensor:
    """A shuffled order of as many entries as samples, with equally many of each non-empty class.

    If the number of samples is not a multiple of the number of classes, random classes have one
    entry more. (count,) class indices of the samples -> (count,) sample indices, both int64.
    """
    present, inverse = torch.unique(classes, return_inverse=True)
    members = torch.split(inverse.argsort(stable=True), torch.bincount(inverse).tolist())
    per_class, remainder = divmod(len(classes), len(present))
    has_extra = torch.randperm(len(present), generator=generator) < remainder
    chosen = []
    for samples, extra in zip(members, has_extra.tolist(), strict=True):
        number = per_class + extra
        rounds = -(-number // len(samples))
        orders = [torch.randperm(len(samples), generator=generator) for _ in range(rounds)]
        chosen.append(samples[torch.cat(orders)[:number]])
    return torch.cat(chosen)[torch.randperm(len(classes), generator=generator)]


def count_repetitions(order: Tensor) -> Tensor:
    """How often each entry of `order`, (entries,), occurred before, int64."""
    by_sample = order.argsort(stable=True)
    _, counts = torch.unique_consecutive(order[by_sample], return_counts=True)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    repetitions = torch.empty_like(order)
    repetitions[by_sample] = torch.arange(len(order)) - starts
    return repetitions


class MultiEpochSampler:
    """Micro-batches of all epochs in a row, so that loader processes never wait between epochs.

    `start` is the (epoch, micro-batch) at which the next iteration begins.
    """

    def __init__(self, sampler: MicroBatchSampler, epochs: int) -> None:
        self.sampler = sampler
        self.epochs = epochs
        self.start = (0, 0)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        first, number = self.start
        for epoch in range(first, self.epochs):
            yield from self.sampler.micro_batches(epoch, number if epoch == first else 0)


def fitting_batch_size(count: int, batch_size: int, parts: int) -> int:
    """`batch_size`, or the largest multiple of `parts`, the number of micro-batches of a step over
    all devices, that `count` images fill."""
    if count < parts:
        raise DataError(
            f"{count} training images are too few for {parts} micro-batches a step; "
            f"use fewer devices, a smaller accumulate or fewer repeats"
        )
    return batch_size if batch_size <= count else count // parts * parts
