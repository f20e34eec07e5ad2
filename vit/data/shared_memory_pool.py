"""Image batches in memory that the loader processes and the main process share.

    main process                                   loader process
    slot = pool.acquire()
    LoadRequest(keys, slot)    -- index queue -->  images are written into pool.view(slot)
    rebuild_batch()            <-- data queue --   SharedBatch: the slot and its layout, no pixels
    tensor over the slot
    the slot is free when the last tensor over it is garbage collected

torch opens a file descriptor, or a file in /dev/shm, for every tensor of every batch. Here one
anonymous mapping is made before the processes are forked: no pixel is copied or pickled on its way
to the main process, no descriptor travels, and /dev/shm, which containers keep small, stays empty.
Where no slot is free, or a batch is larger than a slot, the images travel as torch sends tensors.
"""

import contextlib
import itertools
import mmap
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vit.data.dataset import Batch, ImageDataset, Layout, allocate_batch, batch_layout
from vit.data.sampler import SampleKey
from vit.errors import DataError


class SharedMemoryPool:
    """Slots of equal size in one anonymous memory mapping; made before processes are forked."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.memory = mmap.mmap(-1, num_slots * self.slot_bytes)
        except OSError as error:
            raise DataError(
                f"{num_slots} prefetched batches of {self.slot_bytes / 2**20:,.0f} MiB do not "
                f"fit in memory ({error.strerror}); use fewer workers (-j) or a smaller batch_size"
            ) from None
        self.free_slots = [*range(num_slots)]
        self.id = next(POOL_IDS)
        POOLS[self.id] = self

    def acquire(self) -> int | None:
        """Reserve a slot for a loader process; None if all are in use."""
        # the slot released last is still in the processor's caches
        return self.free_slots.pop() if self.free_slots else None

    def empty_batch(self, slot: int, count: int, image: Tensor) -> Tensor | None:
        """As `allocate_batch`, in a slot (loader process); None if the images do not fit."""
        if count * image.nbytes > self.slot_bytes:
            return None
        return _tensor(self._bytes(slot), batch_layout(count, image))

    def read_batch(self, slot: int, layout: Layout) -> Tensor:
        """A tensor over `slot`, released when the last view of it is gone (main process)."""
        array = self._bytes(slot)
        weakref.finalize(array, self.free_slots.append, slot)
        return _tensor(array, layout)

    def release_pages(self) -> None:
        """Return the memory of free slots to the system; it comes back when they are written."""
        for slot in list(self.free_slots):
            with contextlib.suppress(OSError):  # not every kernel can, and it only saves memory
                self.memory.madvise(mmap.MADV_REMOVE, slot * self.slot_bytes, self.slot_bytes)

    def _bytes(self, slot: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        return np.frombuffer(self.memory, np.uint8, self.slot_bytes, slot * self.slot_bytes)


def _tensor(memory: "np.ndarray[Any, np.dtype[np.uint8]]", layout: Layout) -> Tensor:
    return torch.from_numpy(memory).view(layout.dtype).as_strided(layout.shape, layout.stride)


POOL_IDS = itertools.count()
POOLS: "weakref.WeakValueDictionary[int, SharedMemoryPool]" = weakref.WeakValueDictionary()
"""The pools of this process by id, for batches that arrive from a loader process."""


class LoadRequest(NamedTuple):
    """A micro-batch to load, and the slot for its images."""

    keys: list[SampleKey]
    slot: int | None


class SlotSampler:
    """Batch sampler of the main process that adds a slot of `pool` to each micro-batch."""

    def __init__(self, micro_batches: Iterable[list[SampleKey]], pool: SharedMemoryPool) -> None:
        self.micro_batches, self.pool = micro_batches, pool

    def __iter__(self) -> Iterator[LoadRequest]:
        for keys in self.micro_batches:
            yield LoadRequest(keys, self.pool.acquire())


class SharedMemoryDataset(Dataset["SharedBatch"]):
    """`dataset` in a loader process, with the images of each batch written into its slot."""

    def __init__(self, dataset: ImageDataset, pool: SharedMemoryPool) -> None:
        self.dataset, self.pool = dataset, pool

    def __getitems__(self, request: LoadRequest) -> "SharedBatch":
        in_slot: Tensor | None = None

        def allocate(count: int, image: Tensor) -> Tensor:
            nonlocal in_slot
            if request.slot is not None:
                in_slot = self.pool.empty_batch(request.slot, count, image)
            return allocate_batch(count, image) if in_slot is None else in_slot

        batch = self.dataset.load_batch(request.keys, allocate)
        return SharedBatch(batch, self.pool.id, request.slot, in_slot is not None)


class SharedBatch(NamedTuple):
    """A batch that is pickled without its pixels, and unpickled as a `Batch` over its slot.

    Unpickling is the one moment at which the main process sees every batch, also those of a pass
    that is abandoned, so it is where slots are taken back; and the thread that pins memory sees a
    tensor.
    """

    batch: Batch
    pool_id: int
    slot: int | None
    in_slot: bool

    def __reduce__(self) -> tuple[Any, ...]:
        images, *rest = self.batch
        layout = Layout(images.shape, images.stride(), images.dtype)
        payload = layout if self.in_slot else images
        # arrays go by value: torch would send a file descriptor for each of these small tensors
        fields = [field.numpy() if isinstance(field, Tensor) else field for field in rest]
        return rebuild_batch, (self.pool_id, self.slot, payload, fields)


def rebuild_batch(
    pool_id: int, slot: int | None, payload: Tensor | Layout, fields: list[Any]
) -> Batch:
    """The `Batch` of a pickled `SharedBatch`, in the main process."""
    pool = POOLS.get(pool_id)
    if pool is None:  # its loader is gone, and nobody will read the batch
        images = torch.empty(0)
    elif isinstance(payload, Layout):
        assert slot is not None
        images = pool.read_batch(slot, payload)
    else:
        images = payload
        if slot is not None:
            pool.free_slots.append(slot)
    tensors: list[Any] = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in fields]
    return Batch(images, *tensors)
