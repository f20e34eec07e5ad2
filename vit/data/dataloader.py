"""Data loaders for training and evaluation, over torch's DataLoader.

What a batch contains is decided in sampler.py and dataset.py. This module adds loader processes
that live through all epochs, share memory with the main process (shared_memory_pool.py), end when
the main process does, and raise their errors in the main process.
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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from vit.data.dataset import Batch, ConstantTransform, ImageDataset
from vit.data.dataset_types import Sample
from vit.data.device_cache import DeviceCache, DeviceDataset
from vit.data.image_io import max_pixels, set_max_pixels
from vit.data.sampler import MicroBatchSampler, MultiEpochSampler, SampleKey
from vit.data.shared_memory_pool import SharedMemoryDataset, SharedMemoryPool, SlotSampler
from vit.data.transforms import Transform
from vit.errors import DataError
from vit.process_resources import usable_cores

if TYPE_CHECKING:
    from vit.data.captions.caption_ids import CaptionIds
    from vit.data.image_cache import ImageCache

MAX_WORKERS = 8
PREFETCH_FACTOR = 2
"""Batches that each loader process prepares in advance."""
THREAD_EXIT_SECONDS = 0.05
IGNORED_BY_WORKERS = signal.SIGINT, signal.SIGTERM


@contextmanager
def ignore_worker_warnings() -> Iterator[None]:
    """Suppress warnings of more processes than cores, and of forking a process with threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        yield


@contextmanager
def block_signals() -> Iterator[None]:
    """Let processes that are forked here start with the signals blocked that they will ignore.

    One that comes before `start_worker` would kill them. This process gets its own afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_BY_WORKERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def default_workers(world_size: int) -> int:
    """Number of loader processes of one device: its share of the cores, at most 8."""
    return min(max(usable_cores() // world_size, 1), MAX_WORKERS)


def wait_for_exiting_threads() -> None:
    """Let threads of torch.distributed exit before processes are forked.

    An exiting thread holds a lock that would stay locked in the forked process:
    python/cpython#112275, fixed in Python 3.12.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and sys.version_info < (3, 12):
        time.sleep(THREAD_EXIT_SECONDS)


def _identity(batch: Any) -> Any:
    return batch


def start_worker(limit: int, _worker: int) -> None:
    set_max_pixels(limit)  # a spawned process has the default
    # The main process handles signals, and may finish a step before it stops. A scheduler may
    # signal the whole group: a dead loader would break the step in progress.
    for ignored in IGNORED_BY_WORKERS:
        signal.signal(ignored, signal.SIG_IGN)
    # Inherited objects are never collected here: no finaliser of the main process runs, and no
    # page of theirs is copied.
    gc.freeze()


class MicroBatchLoader:
    """torch's DataLoader over given micro-batches; errors are raised in the main process.

    Images that cannot be read are left out of a batch, and listed in `Batch.failed`: the caller
    decides on them, on all processes alike.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        micro_batches: Iterable[list[SampleKey]],
        *,
        workers: int,
        pin_memory: bool,
        batch_bytes: int,
        batches_held: int = 1,
    ) -> None:
        self.dataset, self.micro_batches = dataset, micro_batches
        self.workers, self.pin_memory = workers, pin_memory
        self.batch_bytes = batch_bytes
        self.num_slots = PREFETCH_FACTOR * workers + batches_held + 1
        self.pool: SharedMemoryPool | None = None
        self.loader: DataLoader[Batch] | None = None
        self.batches: Iterator[Batch] = iter(())
        self.owner_pid = 0
        """The process that started the loader processes."""
        OPEN_LOADERS.add(self)

    def start_pass(self) -> None:
        if self.workers:
            wait_for_exiting_threads()
        self.owner_pid = os.getpid()
        with ignore_worker_warnings(), block_signals():
            if self.loader is None:
                self.loader = self._open_loader()
            self.batches = iter(self.loader)

    def _open_loader(self) -> "DataLoader[Batch]":
        dataset: Any = self.dataset
        batch_sampler: Any = self.micro_batches
        # Forked processes start in milliseconds and share the list of files; they never use the
        # accelerator.
        fork = self.workers > 0 and sys.platform == "linux"
        if fork:
            self.pool = SharedMemoryPool(self.num_slots, self.batch_bytes)
            dataset = SharedMemoryDataset(dataset, self.pool)
            batch_sampler = SlotSampler(batch_sampler, self.pool)
        return DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            num_workers=self.workers,
            prefetch_factor=PREFETCH_FACTOR if self.workers else None,
            collate_fn=_identity,  # the dataset stacks the images
            pin_memory=self.pin_memory,
            persistent_workers=self.workers > 0,
            worker_init_fn=partial(start_worker, max_pixels()),
            multiprocessing_context="fork" if fork else None,
            # An iterator draws a base seed, by default from the global generator.
            generator=torch.Generator(),
        )

    def next_batch(self) -> Batch:
        try:
            return next(self.batches)
        except RuntimeError as error:
            self.stop_workers()
            if "DataLoader worker (pid" not in str(error):
                raise
            killed = DataError(
                "a loader process was killed, most likely for lack of memory or of shared memory "
                "(/dev/shm); use fewer workers (-j) or a smaller batch_size"
            )
            killed.on_all_processes = False
            raise killed from error
        except BaseException:
            self.stop_workers()
            raise

    def release_memory(self) -> None:
        """Return the memory of batches to the system until the next pass."""
        if self.pool is not None:
            self.pool.release_pages()

    def stop_workers(self) -> None:
        """Stop the loader processes now; the next pass starts new ones."""
        # Not when the iterator is collected: a traceback may hold it, and processes forked in the
        # meantime inherit it.
        shutdown = getattr(self.batches, "_shutdown_workers", None)
        self.batches, self.loader = iter(()), None
        if shutdown is not None:
            shutdown()
        self.release_memory()  # other processes forked meanwhile may map it too
        self.pool = None  # slots of those processes never come back

    def kill_workers(self) -> None:
        """Kill the loader processes if they do not stop."""
        workers = [*getattr(self.batches, "_workers", [])]
        # While Python 3.12 shuts down it starts no threads, which torch's shutdown may need.
        with contextlib.suppress(BaseException):
            self.stop_workers()
        if any(worker.is_alive() for worker in workers):
            if sys.platform != "win32":
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises
            for worker in workers:
                worker.kill()


OPEN_LOADERS: "weakref.WeakSet[MicroBatchLoader]" = weakref.WeakSet()


@atexit.register
def kill_all_workers() -> None:
    """Kill all loader processes at exit.

    multiprocessing would send them a signal, which they ignore (`start_worker`), and wait forever.
    """
    for loader in list(OPEN_LOADERS):
        if loader.owner_pid == os.getpid():  # not in a forked process that exits
            loader.kill_workers()


class TrainingLoader:
    """Training micro-batches of this device, beginning at any (epoch, step).

    While epochs are requested in order, the same loader processes serve all of them, and prefetch
    the next epoch's first batches during validation.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        transform_for: Callable[[int], Transform],
        sampler: MicroBatchSampler,
        *,
        epochs: int,
        workers: int | None = None,
        pin_memory: bool = False,
        caption_ids: "CaptionIds | None" = None,
        cache: "ImageCache | DeviceCache | None" = None,
        classes: int | None = None,
    ) -> None:
        self.sampler = sampler
        self.all_epochs = MultiEpochSampler(sampler, epochs)
        image_bytes = max(transform_for(epoch).blank().nbytes for epoch in (0, epochs - 1))
        on_device = isinstance(cache, DeviceCache)
        make = (
            partial(DeviceDataset, cache)
            if isinstance(cache, DeviceCache)
            else partial(ImageDataset, cache=cache)
        )
        workers = default_workers(sampler.world_size) if workers is None else workers
        self.loader = MicroBatchLoader(
            make(
                samples, transform_for, seed=sampler.seed, caption_ids=caption_ids, classes=classes
            ),
            self.all_epochs,
            workers=0 if on_device else workers,
            pin_memory=pin_memory and not on_device,
            batch_bytes=sampler.micro_batch_size * image_bytes,
            batches_held=2 * sampler.accumulate,  # of a step, while those of the next are taken
        )
        self.position: tuple[int, int] | None = None
        """The (epoch, micro-batch) that is loaded next; None if unknown."""

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The micro-batches of `epoch`, beginning at `start_step`; skipped ones are not read.

        Loading begins with the call, not with the first batch.
        """
        start = epoch, start_step * self.sampler.accumulate
        if self.position != start:
            self.close()
            self.all_epochs.start = start
            self.loader.start_pass()
        return self._batches(*start)

    def close(self) -> None:
        """Stop the loader processes; the next epoch starts new ones."""
        self.position = None
        self.loader.stop_workers()

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        end = self.steps_per_epoch * self.sampler.accumulate
        for number in range(first, end):
            self.position = None  # unknown if the next line raises
            batch = self.loader.next_batch()
            self.position = (epoch + 1, 0) if number + 1 == end else (epoch, number + 1)
            yield batch


class EvaluationLoader:
    """Every sample exactly once over all devices, in order; may be iterated repeatedly."""

    def __init__(
        self,
        samples: Sequence[Sample],
        preprocessing: Transform,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int | None = None,
        pin_memory: bool = False,
        caption_ids: "CaptionIds | None" = None,
        classes: int | None = None,
    ) -> None:
        self.samples = samples
        self.max_batches = math.ceil(len(range(0, len(samples), world_size)) / batch_size)
        """Number of batches of the device that has most."""
        own_samples = range(rank, len(samples), world_size)
        keys = [SampleKey(0, sample, position) for position, sample in enumerate(own_samples)]
        self.batches = [keys[at : at + batch_size] for at in range(0, len(keys), batch_size)]
        workers = default_workers(world_size) if workers is None else workers
        dataset = ImageDataset(
            samples, ConstantTransform(preprocessing), caption_ids=caption_ids, classes=classes
        )
        self.empty_batch = dataset.empty_batch(preprocessing)
        """A batch of 0 images, for a device that has fewer batches than another."""
        self.loader = MicroBatchLoader(
            dataset,
            self.batches,
            workers=min(workers, len(self.batches)),
            pin_memory=pin_memory,
            batch_bytes=max(map(len, self.batches), default=0) * preprocessing.blank().nbytes,
        )

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        self.loader.start_pass()
        for number in range(len(self.batches)):
            batch = self.loader.next_batch()
            if number + 1 == len(self.batches):  # not after it: nobody may ask for more
                self.loader.release_memory()
            yield batch

    def close(self) -> None:
        """Stop the loader processes; the next iteration starts new ones."""
        self.loader.stop_workers()
