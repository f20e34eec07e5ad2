"""Batches of images, loaded by processes that stay alive over all epochs.

What a batch holds is decided in schedule.py and dataset.py; here it is only brought.

Loader processes: how many, how they start, what they leave alone.
torch's loader, with processes that end when they should and failures told where they matter.
"""

import atexit
import contextlib
import gc
import math
import os
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader

from vit.data.dataset import Always, Batch, ImageDataset
from vit.data.dataset_types import Sample
from vit.data.random_seed import random_seed
from vit.data.sampler import Key, Schedule, Stream
from vit.data.shared_memory import Carrying, Orders, Slots
from vit.data.transforms import Transform
from vit.errors import BadImage, DataError

if TYPE_CHECKING:
    from vit.data.captions.caption_ids import CaptionIds
    from vit.data.image_cache import Cache


MOST_WORKERS = 8
REST_SECONDS = 0.05


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of more processes than cores, or of a fork beside threads such as torch's own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        yield


def default_workers(world_size: int) -> int:
    """Loader processes of one device: its share of the cores, at most 8."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(max(cores // world_size, 1), MOST_WORKERS)


def come_to_rest() -> None:
    """Let threads of torch.distributed leave Python before processes are forked.

    One that is just leaving holds a lock that would stay closed in the new process, for ever:
    python/cpython#112275, mended in Python 3.12.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and sys.version_info < (3, 12):
        time.sleep(REST_SECONDS)


def start_worker(_worker: int) -> None:
    """Called first in each loader process."""
    # The main process decides what a signal means, and may want one more step before it stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A scheduler may signal the whole group: a dead loader would break the step in progress.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What was inherited stays untouched: no finaliser of the main process's objects runs here, and
    # no page is copied for it.
    gc.freeze()


OnBadImage = Literal["stop", "skip"]
AHEAD = 2
"""Batches that each loader process is asked for beforehand."""


class Feed:
    """torch's loader over given micro-batches, with failures told in the main process.

    Args:
        dataset: Makes a micro-batch of a list of keys.
        keys: The lists.
        workers: Loader processes; 0 to load in this one.
        on_bad_image: As in `TrainingLoader`.
        pin_memory: As in `TrainingLoader`.
        size: Bytes of the images of a micro-batch. Larger ones come too, but slower.
        held: Micro-batches that whoever takes them still has when it takes the next, likewise.
        persistent: Keep the processes from one pass over `keys` to the next.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        keys: Iterable[list[Key]],
        *,
        workers: int,
        on_bad_image: OnBadImage,
        pin_memory: bool,
        size: int,
        held: int = 1,
        persistent: bool = False,
    ) -> None:
        self.on_bad_image = on_bad_image
        # Forked processes start in milliseconds and share the list of files; they never touch the
        # accelerator.
        fork = workers > 0 and sys.platform == "linux"
        self.slots = Slots(AHEAD * workers + held + 1, size) if fork else None
        batches: Any = keys if self.slots is None else Orders(keys, self.slots)
        with quiet():
            self.loader = DataLoader(
                dataset if self.slots is None else Carrying(dataset, self.slots),
                batch_sampler=batches,
                num_workers=workers,
                prefetch_factor=AHEAD if workers else None,
                collate_fn=as_it_is,
                pin_memory=pin_memory,
                persistent_workers=persistent and workers > 0,
                worker_init_fn=start_worker,
                multiprocessing_context="fork" if fork else None,
                # Its own generator: an iterator draws a base seed, from the global one by default.
                generator=torch.Generator(),
            )
        self.batches: Iterator[Batch] = iter(())
        self.process = 0
        """In which the processes were started."""
        LIVING.add(self)

    def start(self) -> None:
        """Begin a pass."""
        if self.loader.num_workers:
            come_to_rest()
        if self.slots is not None:
            self.slots.map()
        self.process = os.getpid()
        with quiet():
            self.batches = iter(self.loader)

    def take(self) -> Batch:
        """The next micro-batch.

        Raises:
            BadImage: An image cannot be read, and `on_bad_image` is `stop`.
            DataError: A loader process died.
        """
        try:
            batch = next(self.batches)
            if batch.failed and self.on_bad_image == "stop":
                raise BadImage(batch.failed[0].path, batch.failed[0].reason)
        except RuntimeError as error:
            self.stop()
            if "DataLoader worker (pid" not in str(error):
                raise
            killed = DataError(
                "a loader process was killed, most likely for lack of memory or of shared memory "
                "(/dev/shm); use fewer workers (-j) or a smaller batch_size"
            )
            killed.everywhere = False
            raise killed from error
        except BaseException:
            self.stop()
            raise
        return batch

    def rest(self) -> None:
        """Use no memory for batches, until the next pass."""
        if self.slots is not None:
            self.slots.give_back()

    def stop(self) -> None:
        """End the processes now."""
        # Not when the iterator is collected: a traceback may keep it, and processes forked in the
        # meantime inherit it.
        shutdown = getattr(self.batches, "_shutdown_workers", None)
        self.batches = iter(())
        self.loader._iterator = None
        if shutdown is not None:
            shutdown()
        if self.slots is not None:
            self.slots.drop()  # what was lent to those processes never comes back

    def end(self) -> None:
        """End the processes for good, whatever torch says to it."""
        workers = [*getattr(self.batches, "_workers", [])]
        # Python 3.12 starts no thread any more while it ends, which torch's way needs at times.
        with contextlib.suppress(BaseException):
            self.stop()
        if any(worker.is_alive() for worker in workers):
            if sys.platform != "win32":
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where torch would complain of it
            for worker in workers:
                worker.kill()


def as_it_is(batch: Any) -> Any:
    """The dataset stacks the images itself."""
    return batch


LIVING: "weakref.WeakSet[Feed]" = weakref.WeakSet()


@atexit.register
def end_all() -> None:
    """End all processes before Python does, which waits for them when it has sent a signal.

    They do not listen to signals (processes.py), so it would wait for ever.
    """
    for feed in list(LIVING):
        if feed.process == os.getpid():  # not where a process was forked that is ending by itself
            feed.end()


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
        cache: Decoded images of the same samples.
        classes: How many there are, where an image may have several; as for `ImageDataset`.
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
            BadImage: An image cannot be read, and `on_bad_image` is `stop`.
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
        batch_size: Images of one batch on one device.
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
        """A batch without images, for a device that has run out of them."""
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
    """Bytes of so many images."""
    return 3 * count * math.prod(image_size)
