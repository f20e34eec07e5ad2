"""Training images are cropped, flipped, moved and recoloured at random.

Every draw comes from torch's global generator, which the dataset seeds for each image.

A random crop of an image at the network's size, by the quickest way that shows the same.

Pillow's bicubic and bilinear filters widen where an image is made smaller, and so do torch's,
several times as fast: their results differ by rounding (64 dB; benchmarks/loading.py). A JPEG of
which the network will see a small version is not even decoded in full.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vit.config import AugmentConfig
from vit.data.auto_augment import operations
from vit.data.preprocessing import RESAMPLING, WHOLE_LIMIT, Interpolation, Preprocessing, pixels_of

if TYPE_CHECKING:
    from vit.data.image_io import Least, Pixels


Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in fractions of pixels."""
LEAST_SIDE = 64
"""Of a box that is cut at whole pixels, which moves its edges by less than a hundredth of it."""
MARGIN = 2
"""How much larger than the result a crop decoded at reduced size must at least be."""


class Source(Protocol):
    """Where the pixels of one image come from: a file, or a cache."""

    def __call__(self, least: "Least") -> "Pixels":
        """Upright RGB bytes, (height, width, 3), maybe smaller than the original."""


@dataclass(frozen=True)
class Crop:
    """A random part of an image at a given size.

    Args:
        image_size: (height, width) of the result.
        interpolation: How pixels are resampled.
        draw: Called once with (width, height) of the image: which part of it.
    """

    image_size: tuple[int, int]
    interpolation: Interpolation
    draw: Callable[[int, int], Box]

    def __call__(self, source: Source) -> Tensor:
        """The part as bytes, (3, height, width), of which pixels lie together."""
        drawn: list[tuple[Box, int, int]] = []

        def least(width: int, height: int) -> tuple[int, int]:
            left, top, right, bottom = box = self.draw(width, height)
            drawn.append((box, width, height))
            rows, cols = self.image_size
            return (
                min(math.ceil(MARGIN * width * cols / (right - left)), width),
                min(math.ceil(MARGIN * height * rows / (bottom - top)), height),
            )

        pixels = source(least)
        if not drawn:
            least(pixels.shape[1], pixels.shape[0])
        box, width, height = drawn[0]
        x, y = pixels.shape[1] / width, pixels.shape[0] / height
        return self.resized(pixels, (box[0] * x, box[1] * y, box[2] * x, box[3] * y))

    def resized(self, pixels: "Pixels", box: Box) -> Tensor:
        """`box` of an image, (height, width, 3), as bytes, (3, rows, cols)."""
        left, top, right, bottom = map(round, box)
        if min(right - left, bottom - top) < LEAST_SIDE:
            resample, (rows, cols) = RESAMPLING[self.interpolation], self.image_size
            return pixels_of(Image.fromarray(pixels).resize((cols, rows), resample, box=box))
        # In this order in memory torch neither splits colours before it resizes, nor after.
        part = torch.from_numpy(np.ascontiguousarray(pixels[top:bottom, left:right]))
        last = part[None].permute(0, 3, 1, 2)
        return F.interpolate(last, self.image_size, mode=self.interpolation, antialias=True)[0]


TRIES = 10
ERASED = (0.02, 1 / 3)
"""Smallest and largest share of an image that is erased."""
ERASED_RATIO = 10 / 3
PADDED = 4
"""Pixels that a simple random crop may lie outside, where the image is reflected."""


class Transform(Protocol):
    """An RGB image of any size becomes (3, height, width) bytes."""

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of every result."""

    def __call__(self, image: Image.Image) -> Tensor:
        """RGB image -> its bytes, (3, height, width)."""


def training_transform(
    config: AugmentConfig, preprocessing: Preprocessing, *, quick: bool = False
) -> "TrainingTransform":
    """The random version of `preprocessing`: same size, same interpolation, same mean colour."""
    return TrainingTransform(config, preprocessing, quick=quick)


class TrainingTransform:
    """Random crop, flips, rotation and shift, operations on colour, random erasing, in this order.

    Args:
        config: Which of them, and how strong.
        preprocessing: Gives the size, the interpolation, the fill colour, and the geometry where
            crops are off (`min_crop` 1).
        quick: Crop the quick way, which rounds otherwise; see vit.data.transforms.
    """

    def __init__(
        self, config: AugmentConfig, preprocessing: Preprocessing, *, quick: bool = False
    ) -> None:
        self.quick = quick and config.min_crop < 1 and config.random_crop == "resized"
        self.config = config
        self.preprocessing = preprocessing
        self.image_size = preprocessing.image_size
        self.operations = operations(config, preprocessing.mean_colour)

    def __call__(self, image: Image.Image) -> Tensor:
        """RGB image -> its bytes, (3, height, width)."""
        image = self._varied(self._flipped(self._cropped(image)))
        return self._erased(pixels_of(image))

    def of(self, source: Source) -> Tensor:
        """The same draws on the image of `source` -> its bytes, (3, height, width).

        Args:
            source: Gives the pixels, once it knows how many of them are needed.
        """
        if not self.quick:
            return self(Image.fromarray(source(lambda width, height: (width, height))))
        config, size = self.config, self.preprocessing
        pixels = Crop(self.image_size, size.interpolation, self._box)(source)
        if config.hflip and _draw(1)[0] < config.hflip:
            pixels = pixels.flip(2)
        if config.vflip and _draw(1)[0] < config.vflip:
            pixels = pixels.flip(1)
        if config.rotate or config.translate or self.operations:
            image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            pixels = pixels_of(self._varied(image))
        return self._erased(pixels)

    def _varied(self, image: Image.Image) -> Image.Image:
        if self.config.rotate or self.config.translate:
            image = self._moved(image)
        for operation in self.operations:
            image = operation(image)
        return image

    def _erased(self, pixels: Tensor) -> Tensor:
        if self.config.erase and _draw(1)[0] < self.config.erase:
            erase(pixels, self.preprocessing.mean_colour)
        return pixels

    def _box(self, width: int, height: int) -> Box:
        return random_box(width, height, self.config.min_crop, self.config.crop_ratio)

    def _cropped(self, image: Image.Image) -> Image.Image:
        height, width = self.image_size
        if self.config.random_crop == "simple":
            return simple_crop(image, width, height, RESAMPLING[self.preprocessing.interpolation])
        if self.config.min_crop == 1:
            return self.preprocessing.fit(image)
        resample = RESAMPLING[self.preprocessing.interpolation]
        return image.resize((width, height), resample, box=self._box(*image.size))

    def _flipped(self, image: Image.Image) -> Image.Image:
        if self.config.hflip and _draw(1)[0] < self.config.hflip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.config.vflip and _draw(1)[0] < self.config.vflip:
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        return image

    def _moved(self, image: Image.Image) -> Image.Image:
        turn, right, down = (2 * draw - 1 for draw in _draw(3))
        shift = self.config.translate
        return image.rotate(
            turn * self.config.rotate,
            resample=RESAMPLING[self.preprocessing.interpolation],
            translate=(round(right * shift * image.width), round(down * shift * image.height)),
            fillcolor=self.preprocessing.mean_colour,
        )


def random_box(width: int, height: int, min_area: float, max_ratio: float) -> Box:
    """A part of an image, as (left, top, right, bottom) in fractions of pixels.

    Its area is uniform in [min_area, 1] of the image's, the logarithm of its aspect ratio
    uniform too. Where ten draws do not fit, the largest centred box of an allowed ratio.

    Source: Szegedy et al., "Going Deeper with Convolutions", section 6, arXiv:1409.4842.
    """
    log_ratio = math.log(max_ratio)
    for _ in range(TRIES):
        size, shape, right, down = _draw(4)
        area = width * height * (min_area + (1 - min_area) * size)
        ratio = math.exp((2 * shape - 1) * log_ratio)
        box_width, box_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if box_width <= width and box_height <= height:
            left, top = right * (width - box_width), down * (height - box_height)
            return left, top, min(left + box_width, width), min(top + box_height, height)
    box_width, box_height = min(width, height * max_ratio), min(height, width * max_ratio)
    left, top = (width - box_width) / 2, (height - box_height) / 2
    return left, top, left + box_width, top + box_height


def simple_crop(
    image: Image.Image, width: int, height: int, resample: Image.Resampling
) -> Image.Image:
    """A crop of `width` x `height` anywhere in the image, resized to just cover that.

    It may lie up to 4 pixels outside, where the image is reflected.

    Source: "simple random crop" of Touvron et al., DeiT III, section 4.1, arXiv:2204.07118.
    """
    if width * image.height > height * image.width:
        full = width, int(image.height * width / image.width)
    else:
        full = int(image.width * height / image.height), height
    right, down = _draw(2)
    left = int(right * (full[0] - width + 2 * PADDED + 1)) - PADDED
    top = int(down * (full[1] - height + 2 * PADDED + 1)) - PADDED
    box = (max(left, 0), max(top, 0), min(left + width, full[0]), min(top + height, full[1]))
    size = box[2] - box[0], box[3] - box[1]
    if full[0] * full[1] <= WHOLE_LIMIT:
        inside = image.resize(full, resample).crop(box)
    else:
        x, y = image.width / full[0], image.height / full[1]
        inside = image.resize(size, resample, box=(box[0] * x, box[1] * y, box[2] * x, box[3] * y))
    missing = (
        (box[1] - top, top + height - box[3]),
        (box[0] - left, left + width - box[2]),
        (0, 0),
    )
    return Image.fromarray(np.pad(np.asarray(inside), missing, mode="reflect"))


def erase(pixels: Tensor, colour: tuple[int, int, int]) -> None:
    """Paint one random rectangle of `pixels`, (3, height, width), in place.

    Source: Zhong et al., "Random Erasing Data Augmentation", algorithm 1, arXiv:1708.04896.
    """
    _, height, width = pixels.shape
    for _ in range(TRIES):
        size, shape, down, right = _draw(4)
        area = height * width * (ERASED[0] + (ERASED[1] - ERASED[0]) * size)
        ratio = math.exp((2 * shape - 1) * math.log(ERASED_RATIO))
        rows, cols = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < rows < height and 0 < cols < width:
            top, left = int(down * (height - rows + 1)), int(right * (width - cols + 1))
            fill = torch.tensor(colour, dtype=pixels.dtype)[:, None, None]
            pixels[:, top : top + rows, left : left + cols] = fill
            return


def _draw(count: int) -> list[float]:
    """Numbers from 0 to 1 from torch's global generator."""
    return torch.rand(count).tolist()
