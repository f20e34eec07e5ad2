"""Training transforms: random resized crop, flips, rotation, colour operations, random erasing.

All random numbers come from torch's global generator, which the dataset seeds for each image.

The fast crop (`decode: fast`) resizes with torch instead of Pillow: both widen their bicubic and
bilinear filters when an image shrinks, torch's are several times as fast, and the results differ by
rounding (64 dB). A JPEG of which the network sees a small version is decoded
at reduced size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vit.config import AugmentConfig
from vit.config.user_code import name_of
from vit.data.auto_augment import build_operations
from vit.data.image_tiles import TiledImage
from vit.data.instrument_images import Array, ChannelImage
from vit.data.preprocessing import (
    MAX_RESIZED_PIXELS,
    RESAMPLING,
    AnyImage,
    Box,
    Interpolation,
    Preprocessing,
    to_channels_last,
)
from vit.errors import BadImage

if TYPE_CHECKING:
    from vit.data.image_io import MinSize, Pixels


MIN_INTEGER_BOX = 64
"""Smallest side of a box that is rounded to whole pixels: edges move by less than 1% of it."""
DECODE_MARGIN = 2
"""How many times larger than the result a crop of a reduced decode must be."""
MAX_ATTEMPTS = 10
ERASE_AREA = (0.02, 1 / 3)
"""Smallest and largest share of an image that random erasing covers."""
ERASE_RATIO = 10 / 3
CROP_PADDING = 4
"""Pixels by which a simple random crop may extend beyond the image, which is reflected there."""


UserTransform = Callable[[Tensor, torch.Generator], Tensor]


class Transform(Protocol):
    """RGB image of any size -> uint8 tensor (3, height, width) of fixed size."""

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of every result, of a `native` one the most pixels."""

    @property
    def native(self) -> bool:
        """Whether each result has a size of its own."""

    def read(self, path: str) -> Any:
        """Read an image as `__call__` takes it."""

    def blank(self) -> Tensor:
        """A black image as `__call__` returns it."""

    def __call__(self, image: Any) -> Tensor:
        """RGB image -> (3, height, width) uint8; a ChannelImage -> its channels and type."""


@dataclass(frozen=True)
class TileFeatures:
    """A transform to known features of tiles: all of an image, (tiles, dim), or `tile_count` random
    ones, and 0 in place of missing ones; `failed` has why images have none."""

    by_path: Mapping[str, Tensor]
    failed: Mapping[str, str]
    tile_count: int | None = None
    image_size: tuple[int, int] = (1, 1)
    native: bool = False

    def read(self, path: str) -> Tensor:
        """The features of an image."""
        if path not in self.by_path:
            raise BadImage(path, self.failed[path])
        return self.by_path[path]

    def blank(self) -> Tensor:
        """A bag of padding."""
        one = next(iter(self.by_path.values()))
        return one.new_zeros(self.tile_count or 1, one.shape[1])

    def __call__(self, image: Tensor) -> Tensor:
        """Features of all tiles, (tiles, dim) -> those of the bag"""
        if self.tile_count is None:
            return image
        some = image[torch.randperm(len(image))[: self.tile_count].sort().values]
        return F.pad(some, (0, 0, 0, self.tile_count - len(some)))


class PixelSource(Protocol):
    """Provides the pixels of one image, from a file or a cache."""

    def __call__(self, min_size: "MinSize") -> Array:
        """Upright RGB, (height, width, 3) uint8, or channels; may be smaller than the original."""


@dataclass(frozen=True)
class FastCrop:
    """Crops the `sample_box` of an image and resizes it, from a reduced decode where possible."""

    size_of: Callable[[Box], tuple[int, int]]
    """(height, width) of the result."""
    interpolation: Interpolation
    sample_box: Callable[[int, int], Box]

    def __call__(self, source: PixelSource) -> Tensor:
        """The crop, (3, height, width) uint8 in channels-last memory format."""
        sampled: list[tuple[Box, int, int]] = []

        def min_size(width: int, height: int) -> tuple[int, int]:
            left, top, right, bottom = box = self.sample_box(width, height)
            sampled.append((box, width, height))
            rows, cols = self.size_of(box)
            return (
                min(math.ceil(DECODE_MARGIN * width * cols / (right - left)), width),
                min(math.ceil(DECODE_MARGIN * height * rows / (bottom - top)), height),
            )

        pixels = source(min_size)
        if not sampled:
            min_size(pixels.shape[1], pixels.shape[0])
        box, width, height = sampled[0]
        x, y = pixels.shape[1] / width, pixels.shape[0] / height
        scaled = box[0] * x, box[1] * y, box[2] * x, box[3] * y
        return self.crop_and_resize(pixels, scaled, self.size_of(box))

    def crop_and_resize(self, pixels: "Pixels", box: Box, size: tuple[int, int]) -> Tensor:
        """`box` of (height, width, 3) uint8 pixels, resized to (3, *size)."""
        left, top, right, bottom = map(round, box)
        if min(right - left, bottom - top) < MIN_INTEGER_BOX:
            resample, (rows, cols) = RESAMPLING[self.interpolation], size
            return to_channels_last(Image.fromarray(pixels).resize((cols, rows), resample, box=box))
        # torch resizes this memory format as it is, and converts any other before and after
        part = torch.from_numpy(np.ascontiguousarray(pixels[top:bottom, left:right]))
        channels_last = part[None].permute(0, 3, 1, 2)
        resized = F.interpolate(channels_last, size, mode=self.interpolation, antialias=True)
        return resized[0]


class TrainingTransform:
    """The random counterpart of `preprocessing`: same size, interpolation and mean colour.

    Random crop, flips, rotation and translation, colour operations, random erasing, what the user
    gives, in this order; without random crops (`min_crop` 1) also its geometry.
    """

    def __init__(
        self,
        config: AugmentConfig,
        preprocessing: Preprocessing,
        *,
        fast_crop: bool = False,
        tile_count: int = 1,
        user_transform: UserTransform | None = None,
    ) -> None:
        self.user_transform = user_transform
        rgb = preprocessing.channels is None
        self.fast_crop = (
            fast_crop and rgb and config.min_crop < 1 and config.random_crop == "resized"
        )
        self.config = config
        self.preprocessing, self.tile_count = preprocessing, tile_count
        self.image_size, self.native = preprocessing.image_size, preprocessing.native
        self.operations = build_operations(
            config, preprocessing.mean_colour, preprocessing.channels
        )
        whole = config.min_crop == 1 and config.random_crop == "resized"
        self.moves_pixels = whole and not config.rotate and not self.operations
        """Whether images of RGB are resized, mirrored and shifted only."""

    def read(self, path: str) -> Any:
        """Read an image as `__call__` takes it, or its tiles."""
        return self.preprocessing.read(path)

    def blank(self) -> Tensor:
        """A black image as `__call__` returns it."""
        blank = self.preprocessing.blank(self.image_size)
        return blank if self.preprocessing.tiles is None else blank.repeat(self.tile_count, 1, 1, 1)

    def __call__(self, image: Any) -> Tensor:
        """RGB image -> (3, height, width) uint8; a ChannelImage -> its channels and type; of tiles
        `tile_count` random ones, each augmented by itself, and 0 in place of missing ones."""
        if isinstance(image, TiledImage):
            numbers, bag = torch.from_numpy(image.numbers()), self.blank()
            some = numbers[torch.randperm(len(numbers))[: self.tile_count]].sort().values
            for place, (_, tile) in enumerate(image.read(some.tolist())):
                bag[place] = self(tile)
            return bag
        image = self._distort(self._flip(self._crop(image)))
        return self._erase(to_channels_last(image))

    def apply(self, source: PixelSource) -> Tensor:
        """`__call__` of the pixels of `source`, with the same random numbers."""
        if not self.fast_crop:
            whole = source(lambda width, height: (width, height))
            if self.preprocessing.channels is not None:
                return self(ChannelImage(whole))
            return self._move(whole) if self.moves_pixels else self(Image.fromarray(whole))
        config = self.config
        crop = FastCrop(self._size_of, self.preprocessing.interpolation, self._sample_box)
        pixels = crop(source)
        if pixels.shape[1:] != self.image_size and not self.native:  # resize=pad
            resized = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            pixels = to_channels_last(self.preprocessing.add_borders(resized))
        horizontally, vertically = self._sample_flips()
        if horizontally:
            pixels = pixels.flip(2)
        if vertically:
            pixels = pixels.flip(1)
        if config.rotate or config.translate or self.operations:
            image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
            pixels = to_channels_last(self._distort(image))
        return self._erase(pixels)

    def _move(self, pixels: "Pixels") -> Tensor:
        """`__call__` of an image with `moves_pixels`: the same result, in a third of the time."""
        config, size = self.config, (pixels.shape[1], pixels.shape[0])
        if size != self.image_size[::-1] or self.preprocessing.resized_size(*size) != size:
            pixels = np.asarray(self.preprocessing.resize_and_crop(Image.fromarray(pixels)))
        horizontally, vertically = self._sample_flips()
        if horizontally:
            pixels = pixels[:, ::-1]
        if vertically:
            pixels = pixels[::-1]
        if config.translate:
            _, right, down = self._sample_shift(*pixels.shape[1::-1])
            moved = translated(pixels, right, down, self.preprocessing.mean_colour)
        else:
            moved = np.array(pixels)  # a copy: the pixels may be those of the cache
        return self._erase(torch.from_numpy(moved).permute(2, 0, 1))

    def _distort(self, image: AnyImage) -> AnyImage:
        if self.config.rotate or self.config.translate:
            image = self._rotate_and_translate(image)
        for operation in self.operations:
            image = operation(image)
        return image

    def _erase(self, pixels: Tensor) -> Tensor:
        if self.config.erase and uniform(1)[0] < self.config.erase:
            random_erasing(pixels, self.preprocessing.mean_colour)
        return pixels if self.user_transform is None else user_image(self.user_transform, pixels)

    def _size_of(self, box: Box) -> tuple[int, int]:
        if not self.preprocessing.whole:
            return self.image_size
        return self.preprocessing.resized_size(box[2] - box[0], box[3] - box[1])[::-1]

    def _sample_box(self, width: int, height: int) -> Box:
        least, ratio = self.config.min_crop, self.config.crop_ratio
        if not self.preprocessing.whole:
            return random_crop_box(width, height, least, ratio)
        left, top, right, bottom = random_crop_box(1, 1, least, ratio)  # of the image's own shape
        return left * width, top * height, right * width, bottom * height

    def _crop(self, image: AnyImage) -> AnyImage:
        height, width = self.image_size
        resample = RESAMPLING[self.preprocessing.interpolation]
        if self.config.random_crop == "simple":
            return simple_random_crop(image, width, height, resample)
        if self.config.min_crop == 1:
            return self.preprocessing.resize_and_crop(image)
        box = self._sample_box(*image.size)
        part = image.resize(self._size_of(box)[::-1], resample, box=box)
        return self.preprocessing.add_borders(part)

    def _flip(self, image: AnyImage) -> AnyImage:
        horizontally, vertically = self._sample_flips()
        if horizontally:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if vertically:
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        return image

    def _sample_flips(self) -> tuple[bool, bool]:
        """Whether to mirror an image horizontally, and vertically."""
        config = self.config
        horizontally = bool(config.hflip) and uniform(1)[0] < config.hflip
        return horizontally, bool(config.vflip) and uniform(1)[0] < config.vflip

    def _rotate_and_translate(self, image: AnyImage) -> AnyImage:
        angle, right, down = self._sample_shift(*image.size)
        return image.rotate(
            angle * self.config.rotate,
            resample=RESAMPLING[self.preprocessing.interpolation],
            translate=(right, down),
            fillcolor=self.preprocessing.mean_colour,
        )

    def _sample_shift(self, width: int, height: int) -> tuple[float, int, int]:
        """An angle in [-1, 1), and pixels to the right and down."""
        angle, right, down = (2 * number - 1 for number in uniform(3))
        shift = self.config.translate
        return angle, round(right * shift * width), round(down * shift * height)


def translated(pixels: "Pixels", right: int, down: int, colour: Sequence[float]) -> "Pixels":
    """A copy of `pixels` moved by whole pixels; what is uncovered is `colour`."""
    height, width = pixels.shape[:2]
    moved = np.empty(pixels.shape, pixels.dtype)
    if right or down:
        moved[...] = colour

    def overlap(shift: int, size: int) -> slice:
        return slice(max(shift, 0), size + min(shift, 0))

    moved[overlap(down, height), overlap(right, width)] = pixels[
        overlap(-down, height), overlap(-right, width)
    ]
    return moved


def random_crop_box(
    width: int, height: int, min_area: float, max_ratio: float, *, max_area: float = 1.0
) -> Box:
    """The box of a random resized crop.

    Its area is uniform in [min_area, max_area] of the image's, and the logarithm of its aspect
    ratio is uniform. If ten samples do not fit, the largest centred box of an allowed ratio.

    Source: Szegedy et al., "Going Deeper with Convolutions", section 6, arXiv:1409.4842.
    """
    log_ratio = math.log(max_ratio)
    for _ in range(MAX_ATTEMPTS):
        size, shape, right, down = uniform(4)
        area = width * height * (min_area + (max_area - min_area) * size)
        ratio = math.exp((2 * shape - 1) * log_ratio)
        box_width, box_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if box_width <= width and box_height <= height:
            left, top = right * (width - box_width), down * (height - box_height)
            return left, top, min(left + box_width, width), min(top + box_height, height)
    box_width, box_height = min(width, height * max_ratio), min(height, width * max_ratio)
    left, top = (width - box_width) / 2, (height - box_height) / 2
    return left, top, left + box_width, top + box_height


def simple_random_crop(
    image: AnyImage, width: int, height: int, resample: Image.Resampling
) -> AnyImage:
    """Resize the image to just cover `width` x `height`, and crop at a random position.

    The crop may extend up to 4 pixels beyond the image, which is reflected there.

    Source: "simple random crop" of Touvron et al., DeiT III, section 4.1, arXiv:2204.07118.
    """
    if width * image.height > height * image.width:
        full = width, int(image.height * width / image.width)
    else:
        full = int(image.width * height / image.height), height
    right, down = uniform(2)
    left = int(right * (full[0] - width + 2 * CROP_PADDING + 1)) - CROP_PADDING
    top = int(down * (full[1] - height + 2 * CROP_PADDING + 1)) - CROP_PADDING
    box = (max(left, 0), max(top, 0), min(left + width, full[0]), min(top + height, full[1]))
    size = box[2] - box[0], box[3] - box[1]
    if full[0] * full[1] <= MAX_RESIZED_PIXELS:
        inside = image.resize(full, resample).crop(box)
    else:
        x, y = image.width / full[0], image.height / full[1]
        inside = image.resize(size, resample, box=(box[0] * x, box[1] * y, box[2] * x, box[3] * y))
    rows, cols = (box[1] - top, top + height - box[3]), (box[0] - left, left + width - box[2])
    if isinstance(inside, ChannelImage):
        return ChannelImage(np.pad(inside.to_array(), (rows, cols, (0, 0)), mode="reflect"))
    return Image.fromarray(np.pad(np.asarray(inside), (rows, cols, (0, 0)), mode="reflect"))


def random_erasing(pixels: Tensor, colour: Sequence[float]) -> None:
    """Fill one random rectangle of `pixels`, (3, height, width), in place.

    Source: Zhong et al., "Random Erasing Data Augmentation", algorithm 1, arXiv:1708.04896.
    """
    _, height, width = pixels.shape
    for _ in range(MAX_ATTEMPTS):
        size, shape, down, right = uniform(4)
        area = height * width * (ERASE_AREA[0] + (ERASE_AREA[1] - ERASE_AREA[0]) * size)
        ratio = math.exp((2 * shape - 1) * math.log(ERASE_RATIO))
        rows, cols = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < rows < height and 0 < cols < width:
            top, left = int(down * (height - rows + 1)), int(right * (width - cols + 1))
            fill = torch.tensor(colour, dtype=pixels.dtype)[:, None, None]
            pixels[:, top : top + rows, left : left + cols] = fill
            return


def user_image(transform: UserTransform, image: Tensor) -> Tensor:
    """What a user's transform makes of an augmented image, with the generator that is its own."""
    changed = transform(image, torch.default_generator)
    same = isinstance(changed, Tensor) and changed.shape == image.shape
    if not same or changed.dtype != image.dtype:
        wanted = f"a tensor {tuple(image.shape)} of {image.dtype}, as it is given"
        raise TypeError(f"{name_of(transform)} must return {wanted}")
    return torch.empty_like(image).copy_(changed)


def uniform(count: int) -> list[float]:
    """Random numbers in [0, 1) from torch's global generator."""
    return torch.rand(count).tolist()
