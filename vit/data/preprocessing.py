"""The one way an image becomes network input in evaluation, prediction and export.

    input = (resize, centre crop, bytes / 255 - mean) / std

It is saved in the run, so that no later use can differ from the validation of the training.
Resizing needs no torch, so that an exported network runs without it.
Equals timm's evaluation transform (crop modes `center` and `squash`) bit by bit.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from einops import rearrange
from PIL import Image

from vit.config import DataConfig
from vit.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Triple = tuple[float, float, float]
Resize = Literal["crop", "squash"]
Interpolation = Literal["bilinear", "bicubic"]

RESAMPLING: dict[str, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
PLACES = ((0.5, 0.5), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
"""Where a crop lies in the resized image: its share of what is left over, across and down."""
WHOLE_LIMIT = 2**24
"""Pixels of a resized image above which only its crop is computed; 1 x 3000 would take 450 MB."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """An image of any size becomes (3, height, width) bytes; a batch of bytes becomes floats.

    Args:
        image_size: (height, width) of the result, in pixels.
        resize: `crop` keeps the aspect ratio and cuts the centre out; `squash` does not keep it.
        crop_share: Share of the resized side that the centre crop keeps, in (0, 1].
        interpolation: How pixels are resampled.
        mean: Subtracted from each channel, as a share of full brightness.
        std: Divides each channel afterwards.

    Raises:
        ConfigError: A value is impossible.
    """

    image_size: tuple[int, int]
    resize: Resize = "crop"
    crop_share: float = 0.9
    interpolation: Interpolation = "bicubic"
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        size = self.image_size
        if len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
            raise ConfigError(f"image_size={size!r}: must be a height and a width in pixels")
        for name, names in (("resize", Resize), ("interpolation", Interpolation)):
            value, allowed = getattr(self, name), get_args(names)
            if value not in allowed:
                raise ConfigError(f"{name}={value!r}: choose one of {', '.join(allowed)}")
        if not 0 < self.crop_share <= 1:
            raise ConfigError(f"crop_share={self.crop_share!r}: must be in (0, 1]")
        for name in ("mean", "std"):
            value = getattr(self, name)
            if len(value) != 3 or not all(math.isfinite(number) for number in value):
                raise ConfigError(f"{name}={value!r}: must be three finite numbers")
        if min(self.std) <= 0:
            raise ConfigError(f"std={self.std!r}: must be more than 0 in every channel")

    def __call__(self, image: Image.Image) -> "Tensor":
        """RGB image -> its bytes, (3, height, width)."""
        return to_bytes(self.fit(image))

    def crops(self, image: Image.Image) -> "Tensor":
        """RGB image -> the bytes of five crops, (5, 3, height, width).

        The usual one comes first, then those in the corners of the resized image.
        """
        import torch

        return torch.stack([to_bytes(crop) for crop in self._cut(image, PLACES)])

    def fit(self, image: Image.Image) -> Image.Image:
        """Resize `image` and cut the centre out of it."""
        return self._cut(image, PLACES[:1])[0]

    def _cut(self, image: Image.Image, places: Sequence[tuple[float, float]]) -> list[Image.Image]:
        """Resize `image` and cut a crop out of it at each of `places`."""
        height, width = self.image_size
        full = full_width, full_height = self._resized(*image.size)
        # int(round()) as torchvision's centre crop rounds: half a pixel goes to the even side.
        corners = [
            (round((full_width - width) * x), round((full_height - height) * y)) for x, y in places
        ]
        boxes = [(left, top, left + width, top + height) for left, top in corners]
        resample = RESAMPLING[self.interpolation]
        if full_width * full_height <= WHOLE_LIMIT:
            resized = image.resize(full, resample)
            return [resized.crop(box) for box in boxes]
        x, y = image.width / full_width, image.height / full_height
        sources = [(box[0] * x, box[1] * y, box[2] * x, box[3] * y) for box in boxes]
        return [image.resize((width, height), resample, box=source) for source in sources]

    @property
    def cuts(self) -> bool:
        """Whether something of an image is cut off, be it only of an oblong one."""
        return self.resize == "crop" or self.crop_share < 1

    def whole(self, image: Image.Image, patch_size: int) -> "Tensor":
        """All of an RGB image in its own aspect -> its bytes, (3, height, width).

        The sides are whole patches, as near to the aspect as they come with no more patches than
        `image_size` has; nothing is cut off.
        """
        patches = math.prod(side // patch_size for side in self.image_size)
        rows, cols = grid_of_aspect(image.height / image.width, patches)
        size = (cols * patch_size, rows * patch_size)
        return to_bytes(image.resize(size, RESAMPLING[self.interpolation]))

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of the whole image before the centre is cut out."""
        rows, cols = (math.floor(side / self.crop_share) for side in self.image_size)
        if self.resize == "squash":
            return cols, rows
        if rows == cols:
            long = int(rows * max(width, height) / min(width, height))
            return (rows, long) if width <= height else (long, rows)
        ratio = min(height / rows, width / cols)
        return round(width / ratio), round(height / ratio)

    def normalise(self, images: "Tensor", dtype: "torch.dtype | None" = None) -> "Tensor":
        """Bytes (batch, 3, height, width) -> floats of the same shape, on the same device.

        However the bytes lie in memory, the floats are contiguous.

        Args:
            images: The bytes.
            dtype: Of the result; float32 when left out.
        """
        import torch

        dtype = dtype or torch.float32
        mean, std = (
            torch.tensor(values, device=images.device, dtype=dtype)[:, None, None]
            for values in (self.mean, self.std)
        )
        floats = images.to(dtype, memory_format=torch.contiguous_format)
        return (floats / 255).sub_(mean).div_(std)

    @property
    def mean_colour(self) -> tuple[int, int, int]:
        """The colour that is (nearly) zero after normalisation, as bytes."""
        red, green, blue = (min(max(round(255 * share), 0), 255) for share in self.mean)
        return red, green, blue

    @classmethod
    def of(cls, data: DataConfig, side: int) -> "Preprocessing":
        """What the settings in `data` say, for square images of `side` pixels."""
        return cls(
            image_size=(side, side),
            resize=data.resize,
            crop_share=data.crop_share,
            interpolation=data.interpolation,
            mean=data.mean,
            std=data.std,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocessing":
        """The inverse of `to_dict`; every key must be there, and no other.

        Raises:
            ConfigError: A key is missing or unknown, or a value has the wrong type.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            found = sorted(values) if isinstance(values, dict) else values
            raise ConfigError(f"preprocessing has {found!r}; expected exactly {sorted(names)}")
        for name in ("image_size", "mean", "std"):
            if not isinstance(values[name], list | tuple) or not all(map(_number, values[name])):
                raise ConfigError(f"preprocessing.{name}={values[name]!r}: expected numbers")
        if not _number(values["crop_share"]):
            raise ConfigError(f"preprocessing.crop_share={values['crop_share']!r}: not a number")
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**plain)


def grid_of_aspect(aspect: float, patches: int) -> tuple[int, int]:
    """(rows, cols) with rows / cols near `aspect`, and at most `patches` in all."""
    sides = math.sqrt(patches * aspect), math.sqrt(patches / aspect)

    def overlap(grid: tuple[int, int]) -> float:
        """Share of the wanted shape and of `grid` together that both cover."""
        return math.prod(min(x, y) / max(x, y) for x, y in zip(grid, sides, strict=True))

    near = [
        {min(max(whole(side), 1), patches) for whole in (math.floor, math.ceil)} for side in sides
    ]
    return max(((r, c) for r in near[0] for c in near[1] if r * c <= patches), key=overlap)


def to_bytes(image: Image.Image) -> "Tensor":
    """RGB image -> its bytes, (3, height, width)."""
    return pixels_of(image).contiguous()


def pixels_of(image: Image.Image) -> "Tensor":
    """RGB image -> its bytes, (3, height, width); those of a pixel lie together in memory."""
    import torch

    return rearrange(torch.from_numpy(np.array(image)), "height width rgb -> rgb height width")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
