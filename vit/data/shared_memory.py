"""Memory that loader processes fill with images, and this process reads where it is.

    this process                                    a loader process
    lend() a slot          -- keys, slot -->        room() in it is filled
    a tensor over it       <-- slot, shape --       Carried, which pickles no image
    lend() it again, when that tensor is no more

It is mapped before the processes are forked: no image is copied on its way, no file descriptor
travels, and /dev/shm, which containers keep small, holds nothing of it. Where no slot is free, or a
batch does not fit, the images go as torch sends tensors.
"""

import contextlib
import itertools
import mmap
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vit.data.dataset import Batch, ImageDataset, Lie, lie_of, room_for
from vit.data.sampler import Key
from vit.errors import DataError


class Slots:
    """Equal parts of memory that forked processes share.

    Args:
        count: How many.
        size: Bytes of each.
    """

    numbers: ClassVar = itertools.count()

    def __init__(self, count: int, size: int) -> None:
        self.number = next(self.numbers)
        self.count = count
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory: mmap.mmap | None = None
        self.free: list[int] = []
        KNOWN[self.number] = self

    def map(self) -> None:
        """Take memory, all of it free, before processes are forked; nothing where there is some.

        Raises:
            DataError: There is not as much.
        """
        if self.memory is not None:
            return
        try:
            self.memory = mmap.mmap(-1, self.count * self.size)
        except OSError as error:
            raise DataError(
                f"{self.count} batches of {self.size / 2**20:,.0f} MiB that loader processes make "
                f"ahead do not fit in memory ({error.strerror}); use fewer workers (-j) or a "
                "smaller batch_size"
            ) from None
        self.free = [*range(self.count)]

    def drop(self) -> None:
        """Let go of the memory, of which the processes are gone; tensors over it keep it."""
        self.give_back()  # other processes may have been forked meanwhile, which map it too
        self.memory, self.free = None, []

    def lend(self) -> int | None:
        """A slot that nobody uses, for a loader process; None where there is none."""
        return self.free.pop() if self.free else None  # the last one used is warm, the others cold

    def room(self, slot: int, count: int, image: Tensor) -> Tensor | None:
        """As `room_for`, in a slot that was lent; None where it does not fit."""
        if image.dtype != torch.uint8 or count * image.numel() > self.size:
            return None
        return torch.from_numpy(self._bytes(slot)).as_strided(*lie_of(count, image))

    def filled(self, slot: int, lie: Lie) -> Tensor:
        """The tensor of bytes in `slot`, which is free again when nothing looks at it any more."""
        array = self._bytes(slot)
        weakref.finalize(array, self.free.append, slot)
        return torch.from_numpy(array).as_strided(*lie)

    def give_back(self) -> None:
        """Let the system have the memory of free slots, until they are filled again."""
        for slot in list(self.free):
            assert self.memory is not None
            with contextlib.suppress(OSError):  # not every kernel can, and it only saves memory
                self.memory.madvise(mmap.MADV_REMOVE, slot * self.size, self.size)

    def _bytes(self, slot: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        assert self.memory is not None
        return np.frombuffer(self.memory, np.uint8, self.size, slot * self.size)


KNOWN: "weakref.WeakValueDictionary[int, Slots]" = weakref.WeakValueDictionary()
"""Those of this process, which a batch that arrives looks up."""


class DatasetSpec(NamedTuple):
    """What a loader process is to make."""

    keys: list[Key]
    slot: int | None


class Orders:
    """Micro-batches to make, each with a slot where one is free.

    Args:
        keys: The micro-batches.
        slots: Whose.
    """

    def __init__(self, keys: Iterable[list[Key]], slots: Slots) -> None:
        self.keys = keys
        self.slots = slots

    def __iter__(self) -> Iterator[DatasetSpec]:
        for keys in self.keys:
            yield DatasetSpec(keys, self.slots.lend())


class Carrying(Dataset[Batch]):
    """`dataset` in loader processes, which leave its images in `slots`."""

    def __init__(self, dataset: ImageDataset, slots: Slots) -> None:
        self.dataset = dataset
        self.slots = slots

    def __getitems__(self, asked: DatasetSpec) -> "Carried":
        """The micro-batch that was asked for."""
        rooms: list[Tensor | None] = []

        def room(count: int, image: Tensor) -> Tensor:
            slot = asked.slot
            rooms.append(None if slot is None else self.slots.room(slot, count, image))
            return room_for(count, image) if rooms[0] is None else rooms[0]

        batch = self.dataset.batch(asked.keys, room)
        here = bool(rooms) and rooms[0] is not None
        return Carried(batch, self.slots.number, asked.slot, here=here)


class Carried:
    """A batch that becomes itself again in the process that reads it.

    Args:
        batch: What was made.
        number: Of the slots.
        slot: Which of them was lent.
        here: Whether the images are there.
    """

    def __init__(self, batch: Batch, number: int, slot: int | None, *, here: bool) -> None:
        self.batch = batch
        self.number = number
        self.slot = slot
        self.here = here

    def __reduce__(self) -> tuple[Any, ...]:
        images, *rest = self.batch
        carried = (images.shape, images.stride()) if self.here else images
        # arrays go by value: torch would send a file descriptor for each of these small tensors
        values = [one.numpy() if isinstance(one, Tensor) else one for one in rest]
        return arrived, (self.number, self.slot, carried, values)


def arrived(number: int, slot: int | None, images: Tensor | Lie, values: list[Any]) -> Batch:
    """The batch that was carried."""
    slots = KNOWN.get(number)
    if slots is None:  # its loader is gone, and nobody will look at it
        images = torch.empty(0)
    elif not isinstance(images, Tensor):
        assert slot is not None
        images = slots.filled(slot, images)
    elif slot is not None:
        slots.free.append(slot)
    rest: list[Any] = [
        torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in values
    ]
    return Batch(images, *rest)
