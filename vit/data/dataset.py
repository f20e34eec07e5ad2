"""Map-style dataset that reads, augments and stacks the images of one micro-batch.

The augmentation of an image is seeded by (seed, "augment", pass, index), and where a pass repeats
the image by its repetition too: it depends neither on the loader process nor on what was loaded
before.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vit.data.dataset_types import Sample, labels_of
from vit.data.image_io import read_pixels
from vit.data.random_seed import random_seed
from vit.data.sampler import SampleKey
from vit.data.transforms import TrainingTransform, Transform
from vit.errors import BadImage
from vit.text import printable

if TYPE_CHECKING:
    from vit.data.captions.caption_ids import CaptionIds
    from vit.data.image_cache import ImageCache


AllocateBatch = Callable[[int, Tensor], Tensor]
"""(count, image) -> an uninitialised tensor for `count` such images, (count, *image.shape)."""


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Batch(NamedTuple):
    """One micro-batch; images that could not be read are missing from the tensors."""

    images: Tensor
    """As their transform returns them, (batch, channels, height, width); on the device where they
    are cached there. With `sizes` each channel begins with the pixels of its image, row by row."""
    labels: Tensor
    """Class indices, (batch,); for multi-label data 0 and 1 as uint8, (batch, classes); numbers as
    float32, (batch, targets), NaN where an image has none."""
    indices: Tensor
    """Indices of the samples, (batch,)."""
    positions: Tensor
    """Positions in the batch of the whole step, (batch,); MixUp pairs neighbours by them."""
    failed: list[BadImage]
    caption_ids: Tensor | None = None
    """One caption of each image, (batch, tokens), padded at the end; None without captions."""
    mismatched_ids: Tensor | None = None
    """A caption of another image for each, in the same form; only in evaluation."""
    sizes: list[tuple[int, int]] | None = None
    """(height, width) of each image of resize=native; None where all have that of the tensor."""
    weights: Tensor | None = None
    """Weights of the images in the loss, (batch,), with a mean of 1 over all; None without any."""


class ImageDataset(Dataset[Batch]):
    """Reads, augments and stacks the images of one micro-batch."""

    def __init__(
        self,
        samples: Sequence[Sample],
        transform_for: Callable[[int], Transform],
        *,
        seed: int | None = None,
        caption_ids: "CaptionIds | None" = None,
        cache: "ImageCache | None" = None,
        classes: int | None = None,
    ) -> None:
        self.cache = cache
        self.weights: Tensor | None = None
        if seed is not None and any(sample.weight != 1 for sample in samples):
            weights = torch.tensor([sample.weight for sample in samples], dtype=torch.float64)
            self.weights = (weights / weights.mean()).float()
        # One block of bytes: a list of strings would be copied, page by page, into each process.
        names = [os.fsencode(sample.path) for sample in samples]
        self.names = b"".join(names)
        self.ends = np.cumsum([0, *map(len, names)])
        self.labels: Tensor | MultiHot
        if classes is not None:
            self.labels = MultiHot(map(labels_of, samples), classes)
        elif any(sample.numbers for sample in samples):
            self.labels = torch.tensor([sample.numbers for sample in samples], dtype=torch.float32)
        else:
            self.labels = torch.tensor([sample.label for sample in samples])
        self.transform_for = transform_for
        self.seed = seed
        self.caption_ids = caption_ids
        self.epoch_transform: tuple[int, Transform] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        return os.fsdecode(self.names[self.ends[index] : self.ends[index + 1]])

    def __getitem__(self, key: SampleKey) -> Batch:
        return self.__getitems__([key])

    def __getitems__(self, keys: list[SampleKey]) -> Batch:
        """Load the micro-batch of `keys`, all of one epoch."""
        return self.load_batch(keys, allocate_batch)

    def load_batch(self, keys: list[SampleKey], allocate: AllocateBatch) -> Batch:
        """Load a micro-batch into a given place."""
        # Only the CPU's generator: torch.manual_seed would also reset the accelerator's.
        state = torch.default_generator.get_state()
        try:
            return self._load_batch(keys, allocate)
        finally:
            torch.default_generator.set_state(state)

    def _load_batch(self, keys: list[SampleKey], allocate: AllocateBatch) -> Batch:
        transform = self._transform(keys[0].epoch)
        loaded: list[SampleKey] = []
        failed: list[BadImage] = []
        sizes: list[tuple[int, int]] = []
        images = None
        for key in keys:
            image = self._read(key, transform)
            if isinstance(image, BadImage):
                failed.append(image)
                continue
            if images is None:
                images = allocate(len(keys), transform.blank() if transform.native else image)
            if transform.native:
                sizes.append((image.shape[1], image.shape[2]))
                images[len(loaded)].flatten(1)[:, : math.prod(sizes[-1])] = image.flatten(1)
            else:
                images[len(loaded)] = image
            loaded.append(key)
        if images is None:
            return self.empty_batch(transform)._replace(failed=failed)
        indices = torch.tensor([key.sample for key in loaded], dtype=torch.int64)
        positions = torch.tensor([key.position for key in loaded], dtype=torch.int64)
        batch = Batch(images[: len(loaded)], self.labels[indices], indices, positions, failed)
        if transform.native:
            batch = batch._replace(sizes=sizes)
        return self._annotated(batch, loaded)

    def empty_batch(self, transform: Transform) -> Batch:
        """A batch of 0 images, with the image size of `transform`."""
        none = torch.empty(0, dtype=torch.int64)
        images = transform.blank()[None][:0]
        return self._annotated(Batch(images, self.labels[none], none, none, []), [])

    def _annotated(self, batch: Batch, keys: list[SampleKey]) -> Batch:
        """`batch` with the weights and captions of its images."""
        if self.weights is not None:
            batch = batch._replace(weights=self.weights[batch.indices])
        captions, seed = self.caption_ids, self.seed
        if captions is None:
            return batch
        if seed is not None:
            numbers = (random_seed(seed, "caption", *seed_counters(key)) for key in keys)
            pairs = zip([key.sample for key in keys], numbers, strict=True)
            chosen = [(sample, number % captions.count(sample)) for sample, number in pairs]
            return batch._replace(caption_ids=captions.padded(chosen))
        own = captions.padded([(key.sample, 0) for key in keys])
        shift = captions.mismatch_shift
        mismatched = captions.padded([((key.sample + shift) % len(self), 0) for key in keys])
        return batch._replace(caption_ids=own, mismatched_ids=mismatched)

    def _transform(self, epoch: int) -> Transform:
        if self.epoch_transform is None or self.epoch_transform[0] != epoch:
            self.epoch_transform = epoch, self.transform_for(epoch)
        return self.epoch_transform[1]

    def _read(self, key: SampleKey, transform: Transform) -> Tensor | BadImage:
        path = self.path(key.sample)
        try:
            if self.seed is not None:
                seed = random_seed(self.seed, "augment", *seed_counters(key))
                torch.default_generator.manual_seed(seed)
            return self._transformed(key.sample, path, transform)
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)  # without the traceback, which holds memory
        except Exception as error:  # loader processes report no file names by themselves
            raise RuntimeError(f"{printable(path)}: the transform failed: {error}") from error

    def _transformed(self, sample: int, path: str, transform: Transform) -> Tensor:
        if not isinstance(transform, TrainingTransform):
            return transform(transform.read(path))
        cached = None if self.cache is None else self.cache.pixels(sample)
        if cached is not None:
            return transform.apply(lambda _min_size: cached)
        if transform.fast_crop:
            deep = transform.preprocessing.intensity_range
            return transform.apply(partial(read_pixels, path, intensity_range=deep))
        return transform(transform.read(path))


class MultiHot:
    """Sparse multi-label targets; indexing returns dense multi-hot rows.

    1,000,000 images with 3 of 1,000 classes take 20 MB as indices, and 1 GB as a table of uint8.
    """

    def __init__(self, rows: Iterable[Sequence[int]], classes: int) -> None:
        kept = [np.asarray(row, dtype=np.int32) for row in rows]
        self.classes = classes
        self.flat = np.concatenate([np.empty(0, np.int32), *kept])
        self.ends = np.cumsum([0, *map(len, kept)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Multi-hot rows of the images `indices`, (batch,) -> (batch, classes) uint8."""
        chosen = indices.numpy()
        counts = self.ends[chosen + 1] - self.ends[chosen]
        parts = [self.flat[self.ends[at] : self.ends[at + 1]] for at in chosen]
        table = np.zeros((len(chosen), self.classes), np.uint8)
        columns = np.concatenate([np.empty(0, np.int32), *parts])
        table[np.repeat(np.arange(len(chosen)), counts), columns] = 1
        return torch.from_numpy(table)


def seed_counters(key: SampleKey) -> tuple[int, ...]:
    """The counters of an image's random numbers, besides the seed of the run and their purpose."""
    return (key.pass_index, key.sample, *([key.repetition] if key.repetition else []))


def allocate_batch(count: int, image: Tensor) -> Tensor:
    """An uninitialised tensor for `count` images in the memory format of `image`."""
    shape, stride, dtype = batch_layout(count, image)
    return torch.empty_strided(shape, stride, dtype=dtype, device=image.device)


def batch_layout(count: int, image: Tensor) -> Layout:
    """Layout of `count` contiguous images, each in the memory format of `image`."""
    one = torch.empty_like(image)
    return Layout((count, *one.shape), (one.numel(), *one.stride()), image.dtype)


@dataclass(frozen=True)
class ConstantTransform:
    """The same transform in every epoch."""

    transform: Transform

    def __call__(self, epoch: int) -> Transform:  # noqa: ARG002
        return self.transform
