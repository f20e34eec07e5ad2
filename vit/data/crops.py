"""A random crop of a picture at the network's size, by the quickest way that shows the same.

Pillow's bicubic and bilinear filters widen where a picture is made smaller, and so do torch's,
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

from vit.data.preprocessing import RESAMPLING, Interpolation, pixels_of

if TYPE_CHECKING:
    from vit.data.decoding import Least
    from vit.data.jpeg import Pixels

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in fractions of pixels."""
LEAST_SIDE = 64
"""Of a box that is cut at whole pixels, which moves its edges by less than a hundredth of it."""
MARGIN = 2
"""How much larger than the result a crop decoded at reduced size must at least be."""


class Source(Protocol):
    """Where the pixels of one picture come from: a file, or a cache."""

    def __call__(self, least: "Least") -> "Pixels":
        """Upright RGB bytes, (height, width, 3), maybe smaller than the original."""


@dataclass(frozen=True)
class Crop:
    """A random part of a picture at a given size.

    Args:
        image_size: (height, width) of the result.
        interpolation: How pixels are resampled.
        draw: Called once with (width, height) of the picture: which part of it.
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
        """`box` of a picture, (height, width, 3), as bytes, (3, rows, cols)."""
        left, top, right, bottom = map(round, box)
        if min(right - left, bottom - top) < LEAST_SIDE:
            resample, (rows, cols) = RESAMPLING[self.interpolation], self.image_size
            return pixels_of(Image.fromarray(pixels).resize((cols, rows), resample, box=box))
        # In this order in memory torch neither splits colours before it resizes, nor after.
        part = torch.from_numpy(np.ascontiguousarray(pixels[top:bottom, left:right]))
        last = part[None].permute(0, 3, 1, 2)
        return F.interpolate(last, self.image_size, mode=self.interpolation, antialias=True)[0]
