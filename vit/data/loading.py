"""Batches of pictures, loaded by processes that stay alive over all epochs.

What a batch holds is decided in schedule.py and dataset.py; here it is only brought.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vit.data.dataset import Always, Batch, ImageDataset
from vit.data.feed import Feed, OnBadImage
from vit.data.processes import default_workers
from vit.data.samples import Sample
from vit.data.schedule import Key, Schedule, Stream
from vit.data.seeding import random_seed
from vit.data.transforms import Transform

if TYPE_CHECKING:
    from vit.data.cache import Cache
    from vit.data.captioning.ids import CaptionIds

__all__ = ["Batch", "EvaluationLoader", "Schedule", "TrainingLoader", "random_seed"]


class TrainingLoader:
    """Micro-batches of this device, from any (epoch, step) on.

    One set of loader processes lives through all epochs as long as they are asked for in order,
    and loads the next epoch's first batches while the caller validates.

    Args:
        samples: Files and their classes.
        transform_for: The transform of an epoch.
        schedule: Which samples make which micro-batch.
        epochs: Number of epochs of the run.
        workers: Loader processes, 0 to load in this one; None to choose by the number of cores.
        on_bad_image: `stop` raises a BadImage; `skip` leaves it out and names it in `failed`.
        pin_memory: Put batches where a GPU can fetch them by itself.
        words: Tokens of the samples' captions, where they are wanted.
        cache: Decoded pictures of the same samples.
        classes: How many there are, where a picture may have several; as for `ImageDataset`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        transform_for: Callable[[int], Transform],
        schedule: Schedule,
        *,
        epochs: int,
        workers: int | None = None,
        on_bad_image: OnBadImage = "stop",
        pin_memory: bool = False,
        words: "CaptionIds | None" = None,
        cache: "Cache | None" = None,
        classes: int | None = None,
    ) -> None:
        self.schedule = schedule
        self.stream = Stream(schedule, epochs)
        largest = max((transform_for(epoch).image_size for epoch in (0, epochs - 1)), key=math.prod)
        self.feed = Feed(
            ImageDataset(
                samples,
                transform_for,
                seed=schedule.seed,
                words=words,
                cache=cache,
                classes=classes,
            ),
            self.stream,
            workers=default_workers(schedule.world_size) if workers is None else workers,
            on_bad_image=on_bad_image,
            pin_memory=pin_memory,
            size=bytes_of(schedule.micro_batch_size, largest),
            held=2 * schedule.accumulate,  # those of a step, while those of the next are taken
        )
        self.next: tuple[int, int] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one epoch."""
        return self.schedule.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The micro-batches of `epoch` from `start_step` on; skipped ones are not read.

        Loading starts with the call, not with the first batch.

        Raises:
            BadImage: A picture cannot be read, and `on_bad_image` is `stop`.
        """
        first = epoch, start_step * self.schedule.accumulate
        if self.next != first:
            self.close()
            self.stream.start = first
            self.feed.start()
        return self._take(*first)

    def close(self) -> None:
        """Stop the loader processes; the next epoch starts new ones."""
        self.next = None
        self.feed.stop()

    def _take(self, epoch: int, first: int) -> Iterator[Batch]:
        end = self.steps_per_epoch * self.schedule.accumulate
        for number in range(first, end):
            self.next = None  # until this batch is here, the place in the stream is unknown
            batch = self.feed.take()
            self.next = (epoch + 1, 0) if number + 1 == end else (epoch, number + 1)
            yield batch


class EvaluationLoader:
    """Every sample exactly once over all devices, in order, none twice; may be iterated again.

    Args:
        samples: Files and their classes.
        preprocessing: The transform.
        batch_size: Pictures of one batch on one device.
        rank: Number of this device, from 0; it reads each `world_size`-th sample.
        world_size: Number of devices.
        workers: As in `TrainingLoader`; they live as long as this object.
        on_bad_image: As in `TrainingLoader`.
        pin_memory: As in `TrainingLoader`.
        words: As in `TrainingLoader`.
        classes: As in `TrainingLoader`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        preprocessing: Transform,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int | None = None,
        on_bad_image: OnBadImage = "skip",
        pin_memory: bool = False,
        words: "CaptionIds | None" = None,
        classes: int | None = None,
    ) -> None:
        self.samples = samples
        self.rounds = math.ceil(len(range(0, len(samples), world_size)) / batch_size)
        """Batches of the device that has most of them."""
        samples_here = range(rank, len(samples), world_size)
        keys = [Key(0, sample, place) for place, sample in enumerate(samples_here)]
        self.keys = [keys[at : at + batch_size] for at in range(0, len(keys), batch_size)]
        workers = default_workers(world_size) if workers is None else workers
        dataset = ImageDataset(samples, Always(preprocessing), words=words, classes=classes)
        self.empty = dataset.empty(preprocessing)
        """A batch without pictures, for a device that has run out of them."""
        self.feed = Feed(
            dataset,
            self.keys,
            workers=min(workers, len(self.keys)),
            on_bad_image=on_bad_image,
            pin_memory=pin_memory,
            size=bytes_of(max(map(len, self.keys), default=0), preprocessing.image_size),
            persistent=True,
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Batch]:
        self.feed.start()
        for _ in self.keys:
            yield self.feed.take()
        self.feed.rest()

    def close(self) -> None:
        """Stop the loader processes; the next iteration starts new ones."""
        self.feed.stop()


def bytes_of(count: int, image_size: tuple[int, int]) -> int:
    """Bytes of so many pictures."""
    return 3 * count * math.prod(image_size)
