"""torch's loader, with processes that end when they should and failures told where they matter."""

import atexit
import contextlib
import os
import signal
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from vit.data.dataset import Batch, ImageDataset
from vit.data.processes import come_to_rest, quiet, start_worker
from vit.data.schedule import Key
from vit.data.slots import Carrying, Orders, Slots
from vit.errors import BadImage, DataError

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
        size: Bytes of the pictures of a micro-batch. Larger ones come too, but slower.
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
            BadImage: A picture cannot be read, and `on_bad_image` is `stop`.
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
    """The dataset stacks the pictures itself."""
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
