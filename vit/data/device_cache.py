"""Decoded training images in the memory of the device, where batches are augmented at once.

    image cache (image_cache.py) -> flat bytes on the device, copied once
    keys of a batch -> its pixels, gathered -> BatchedTransform -> batch on the device

No loader process is needed, and no image is copied in a step.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.data.batched_transform import BatchedTransform
from vit.data.dataset import AllocateBatch, Batch, ImageDataset
from vit.data.image_cache import UNREADABLE, ImageCache
from vit.data.random_seed import random_seed
from vit.data.sampler import SampleKey
from vit.data.transforms import Transform
from vit.errors import BadImage, DataError
from vit.text import format_bytes

CHUNK_BYTES = 2**28
"""Of the largest tensor of images that are transformed together; several are alive at once."""
COPIED_BYTES = 3 * 2**24
"""That are copied to the device at a time."""
MOST_OF_FREE_MEMORY = 0.5
"""Most of the free memory of a GPU that the images may take."""


class DeviceCache:
    """Decoded images on a device."""

    def __init__(self, images: ImageCache, device: torch.device) -> None:
        index = images.index
        sizes = np.stack([index["height"], index["width"]], 1)
        sizes[index["offset"] == UNREADABLE] = 0
        counts = sizes.prod(1)
        ends = counts.cumsum()
        self.sizes = torch.from_numpy(sizes)
        """(height, width) of each, on the CPU; 0 of those that cannot be read."""
        total = int(ends[-1])
        size = images.pixel_bytes
        self.pixels = torch.empty(total, size, dtype=torch.uint8, device=device)
        """Bytes of any type: a GPU indexes no 16-bit integers without a sign."""
        self.dtype: torch.dtype = getattr(torch, images.dtype.name)
        self.starts = torch.from_numpy(ends - counts).to(device)
        self.device_sizes = self.sizes.to(device)
        first = 0
        while first < len(index):  # whole images, about COPIED_BYTES of them
            most = ends[first] - counts[first] + COPIED_BYTES // size
            last = max(int(np.searchsorted(ends, most, side="right")), first + 1)
            found = [images.pixels(number) for number in range(first, last)]
            flat = [one.view(np.uint8).reshape(-1, size) for one in found if one is not None]
            if flat:
                begin = int(ends[first] - counts[first])
                block = torch.from_numpy(np.concatenate(flat))
                self.pixels[begin : begin + len(block)] = block.to(device)
            first = last

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    def gather(self, samples: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The pixels of images, and their sizes (height, width), (images, 2) int64.

        Pixels are (images, height, width, channels) of the largest size, undefined beyond each
        image.
        """
        height, width = self.sizes[samples].amax(0).tolist()
        sizes = self.device_sizes[chosen]
        rows, cols = (torch.arange(side, device=self.device) for side in (height, width))
        places = self.starts[chosen][:, None, None] + rows[:, None] * sizes[:, 1, None, None] + cols
        pixels = self.pixels[places.clamp_(max=len(self.pixels) - 1)]
        return pixels.view(self.dtype), sizes


def free_device_memory(device: torch.device) -> int | None:
    """Free bytes of a GPU, with those that torch keeps for itself; None of other devices."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def check_device_memory(images: ImageCache, free: int) -> None:
    """Check that `images` leave enough of the `free` bytes of a device to the training."""
    readable = images.index["offset"] != UNREADABLE
    pixels = int((images.index["height"] * images.index["width"])[readable].sum())
    needed = images.pixel_bytes * pixels
    if needed > MOST_OF_FREE_MEMORY * free:
        most = format_bytes(MOST_OF_FREE_MEMORY * free)
        raise DataError(
            f"cache=device: the images take {format_bytes(needed)}, and {most}, half of the free "
            "memory of the GPU, are the most for them; end what else uses it, or train with "
            "--cache ram"
        )


class DeviceDataset(ImageDataset):
    """Batches of the images of a DeviceCache, augmented on its device."""

    def __init__(self, cache: DeviceCache, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.device_cache = cache
        assert self.seed is not None
        self.augment_seed = random_seed(self.seed, "device augment")
        self.batched: tuple[Transform, BatchedTransform] | None = None

    def _load_batch(self, keys: list[SampleKey], allocate: AllocateBatch) -> Batch:  # noqa: ARG002
        transform = self._transform(keys[0].epoch)
        if self.batched is None or self.batched[0] is not transform:
            self.batched = transform, BatchedTransform(transform, self.augment_seed)
        unread = (self.device_cache.sizes[[key.sample for key in keys]] == 0).any(1).tolist()
        failed = [self._error(key) for key, wrong in zip(keys, unread, strict=True) if wrong]
        loaded = [key for key, wrong in zip(keys, unread, strict=True) if not wrong]
        if not loaded:
            return self.empty_batch(transform)._replace(failed=failed)
        samples = torch.tensor([key.sample for key in loaded], dtype=torch.int64)
        counters = torch.tensor([(k.pass_index, k.sample, k.repetition) for k in loaded])
        transform_all = self.batched[1]
        chunks = similar_chunks(self.device_cache.sizes[samples], transform_all.floats_of)
        order = torch.cat(chunks)
        numbers = torch.cat([samples[:, None], transform_all.seeds(counters)], 1)[order]
        numbers = torch.cat([numbers, order.argsort()[:, None]], 1)
        if self.device_cache.device.type == "cuda":
            numbers = numbers.pin_memory()
        numbers = numbers.to(self.device_cache.device, non_blocking=True)
        parts, first = [], 0
        for chunk in chunks:  # slices: an index on the CPU would wait for the device
            some, first = numbers[first : first + len(chunk)], first + len(chunk)
            pixels, sizes = self.device_cache.gather(samples[chunk], some[:, 0])
            parts.append(transform_all(pixels, sizes, some[:, 1:-1]))
        images = parts[0]
        if len(parts) > 1:
            signed = torch.int16 if images.dtype == torch.uint16 else images.dtype
            together = torch.cat([part.view(signed) for part in parts])
            images = together[numbers[:, -1]].view(images.dtype)
        positions = torch.tensor([key.position for key in loaded], dtype=torch.int64)
        batch = Batch(images, self.labels[samples], samples, positions, failed)
        return self._annotated(batch, loaded)

    def _error(self, key: SampleKey) -> BadImage:
        """Why an image is not in the cache."""
        path = self.path(key.sample)
        try:
            self._transform(key.epoch).read(path)
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)
        return BadImage(path, "it could not be read when the training began")


def similar_chunks(sizes: Tensor, floats_of: Callable[[int, int], int]) -> list[Tensor]:
    """Divide images into chunks of CHUNK_BYTES at most, long images apart from others.

    `sizes` are (height, width), (images, 2), on the CPU. Returns places of the images of each
    chunk, (images,) int64; in order if there is one.
    """

    def fits(height: int, width: int, count: int) -> bool:
        return 4 * count * floats_of(height, width) <= CHUNK_BYTES

    height, width = sizes.amax(0).tolist()
    if fits(height, width, len(sizes)):
        return [torch.arange(len(sizes))]
    chunks: list[list[int]] = []
    height = width = 0
    for place in (sizes[:, 1] - sizes[:, 0]).argsort(stable=True).tolist():
        rows, cols = sizes[place].tolist()
        height, width = max(height, rows), max(width, cols)
        if not chunks or not fits(height, width, len(chunks[-1]) + 1):
            chunks.append([])
            height, width = rows, cols
        chunks[-1].append(place)
    return [torch.tensor(chunk) for chunk in chunks]
