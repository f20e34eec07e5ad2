"""Reads, varies and stacks the images of one micro-batch.

The augmentation of an image is drawn from (seed, "augment", epoch, index), and where an epoch has
it again from (..., repetition) too: it depends neither on the loader process nor on what was loaded
before.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vit.data.dataset_types import Sample
from vit.data.image_io import read_image, read_pixels
from vit.data.multilabel_targets import MultiHot, labels_of
from vit.data.random_seed import random_seed
from vit.data.sampler import Key
from vit.data.transforms import TrainingTransform, Transform
from vit.errors import BadImage, printable

if TYPE_CHECKING:
    from vit.data.captions.caption_ids import CaptionIds
    from vit.data.image_cache import Cache


Room = Callable[[int, Tensor], Tensor]
"""(count, image) -> where so many images like that one go, (count, *image.shape)."""


Lie = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor."""


class Batch(NamedTuple):
    """Images of one micro-batch; those that could not be read are missing from the tensors."""

    images: Tensor
    """Bytes, (batch, 3, height, width)."""
    labels: Tensor
    """Classes, (batch,); where an image may have several, bytes of 0 and 1, (batch, classes)."""
    indices: Tensor
    """Which samples, (batch,)."""
    positions: Tensor
    """Places in the batch of the whole step, (batch,); MixUp pairs neighbours by them."""
    failed: list[BadImage]
    """Images that could not be read."""
    words: Tensor | None = None
    """Tokens of a caption of each, (batch, tokens), filled up behind the end; None without any."""
    others: Tensor | None = None
    """Tokens of a caption of another image, likewise; in evaluation alone."""


class ImageDataset(Dataset[Batch]):
    """Reads, varies and stacks the images of one micro-batch.

    Args:
        samples: Files and their classes.
        transform_for: The transform of an epoch; images of all epochs may have one size or not.
        seed: Seed of the run; None where the transform draws nothing.
        words: Tokens of the samples' captions, where they are wanted. In training each epoch draws
            one of an image's captions; else it is the first.
        cache: Decoded images of the same samples, for a TrainingTransform.
        classes: How many there are, where an image may have several or none; labels are then rows
            of 0 and 1.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        transform_for: Callable[[int], Transform],
        *,
        seed: int | None = None,
        words: "CaptionIds | None" = None,
        cache: "Cache | None" = None,
        classes: int | None = None,
    ) -> None:
        self.cache = cache
        # One block of bytes: a list of strings would be copied, page by page, into each process.
        names = [os.fsencode(sample.path) for sample in samples]
        self.names = b"".join(names)
        self.ends = np.cumsum([0, *map(len, names)])
        self.labels: Tensor | MultiHot = (
            torch.tensor([sample.label for sample in samples])
            if classes is None
            else MultiHot(map(labels_of, samples), classes)
        )
        self.transform_for = transform_for
        self.seed = seed
        self.words = words
        self.current: tuple[int, Transform] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """The file of one sample."""
        return os.fsdecode(self.names[self.ends[index] : self.ends[index + 1]])

    def __getitem__(self, key: Key) -> Batch:
        return self.__getitems__([key])

    def __getitems__(self, keys: list[Key]) -> Batch:
        """The micro-batch of `keys`, all of one epoch."""
        return self.batch(keys, room_for)

    def batch(self, keys: list[Key], room: Room) -> Batch:
        """The micro-batch of `keys`, all of one epoch.

        Args:
            keys: Which images.
            room: Where they go.
        """
        transform = self._transform(keys[0].epoch)
        good: list[Key] = []
        failed: list[BadImage] = []
        images = None
        for key in keys:
            image = self._read(key, transform)
            if isinstance(image, BadImage):
                failed.append(image)
                continue
            if images is None:
                images = room(len(keys), image)
            if image.shape != images.shape[1:] or image.dtype != images.dtype:
                path = printable(self.path(key.sample))
                raise RuntimeError(
                    f"{path}: the transform gave {tuple(image.shape)} {image.dtype} after "
                    f"{tuple(images.shape[1:])} {images.dtype} in the same batch"
                )
            images[len(good)] = image
            good.append(key)
        if images is None:
            return self.empty(transform)._replace(failed=failed)
        indices = torch.tensor([key.sample for key in good], dtype=torch.int64)
        positions = torch.tensor([key.position for key in good], dtype=torch.int64)
        batch = Batch(images[: len(good)], self.labels[indices], indices, positions, failed)
        return self._with_words(batch, good)

    def empty(self, transform: Transform) -> Batch:
        """A batch without images, of the shapes that `transform` gives."""
        none = torch.empty(0, dtype=torch.int64)
        images = torch.empty(0, 3, *transform.image_size, dtype=torch.uint8)
        return self._with_words(Batch(images, self.labels[none], none, none, []), [])

    def _with_words(self, batch: Batch, keys: list[Key]) -> Batch:
        words = self.words
        if words is None:
            return batch
        own = words.padded([(key.sample, self._which(key)) for key in keys])
        if self.seed is not None:
            return batch._replace(words=own)
        # half the set further on: each image is looked at once with a caption not its own
        away = len(self) // 2
        others = words.padded([((key.sample + away) % len(self), 0) for key in keys])
        return batch._replace(words=own, others=others)

    def _which(self, key: Key) -> int:
        """Which caption of an image an epoch takes."""
        if self.seed is None:
            return 0
        assert self.words is not None
        drawn = random_seed(self.seed, "caption", *counters(key))
        return drawn % self.words.count(key.sample)

    def _transform(self, epoch: int) -> Transform:
        if self.current is None or self.current[0] != epoch:
            self.current = epoch, self.transform_for(epoch)
        return self.current[1]

    def _read(self, key: Key, transform: Transform) -> Tensor | BadImage:
        path = self.path(key.sample)
        # Only the CPU's generator: torch.manual_seed would also reset the accelerator's.
        generator = torch.default_generator
        state = generator.get_state()
        try:
            if self.seed is not None:
                generator.manual_seed(random_seed(self.seed, "augment", *counters(key)))
            return self._varied(key.sample, path, transform)
        except BadImage as bad:
            return BadImage(bad.path, bad.reason)  # without the traceback, which holds memory
        except Exception as error:  # loader processes report no file names by themselves
            raise RuntimeError(f"{printable(path)}: the transform failed: {error}") from error
        finally:
            generator.set_state(state)

    def _varied(self, sample: int, path: str, transform: Transform) -> Tensor:
        if not isinstance(transform, TrainingTransform):
            return transform(read_image(path))
        kept = None if self.cache is None else self.cache.pixels(sample)
        if kept is not None:
            return transform.of(lambda _least: kept)
        if transform.quick:
            return transform.of(partial(read_pixels, path))
        return transform(read_image(path))


def counters(key: Key) -> tuple[int, ...]:
    """What the draws of an image depend on, besides the seed of the run and their name."""
    return (key.visit, key.sample, *([key.repetition] if key.repetition else []))


def room_for(count: int, image: Tensor) -> Tensor:
    """Room for `count` images such as `image`, each with its order in memory."""
    lie = lie_of(count, image)
    return torch.empty_strided(*lie, dtype=image.dtype, device=image.device)


def lie_of(count: int, image: Tensor) -> Lie:
    """How `count` images lie behind each other without gaps, each with its order in memory."""
    one = torch.empty_like(image)
    return (count, *one.shape), (one.numel(), *one.stride())


@dataclass(frozen=True)
class Always:
    """The same transform in every epoch."""

    transform: Transform

    def __call__(self, epoch: int) -> Transform:  # noqa: ARG002
        return self.transform
