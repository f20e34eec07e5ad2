"""Preprocessing of images for evaluation, prediction and export.

    input = (centre_crop(resize(image)) / 255 - mean) / std

It is stored in the run folder, so that every later use equals the validation during training.
Resizing needs no torch, so that exported networks run without it. Equals timm's evaluation
transform (crop modes `center` and `squash`) bit for bit.
"""

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from einops import rearrange
from PIL import Image

from vit.config import DataConfig
from vit.config.data_config import check_intensity_range
from vit.config.settings import from_plain
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
IMAGENET_COLOURS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of the colours of ImageNet."""
CLIP_COLOURS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Those of CLIP's images."""
MAX_RESIZED_PIXELS = 2**24
"""Larger resized images are not computed, only their crops; 1 x 3000 would take 450 MB."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resizes and crops images to (3, height, width) uint8, and normalises batches of them.

    Args:
        image_size: (height, width) of the result, in pixels.
        crop_share: Share of the resized side that the centre crop keeps, in (0, 1].
        mean: Subtracted from each channel, in [0, 1].
        intensity_range: Values of images of more than 8 bits per channel that become 0 and 255, as
            in `read_image`; None is the whole range of their type.
    """

    image_size: tuple[int, int]
    resize: Resize = "crop"
    crop_share: float = 0.9
    interpolation: Interpolation = "bicubic"
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)
    intensity_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if min(self.image_size) < 1:
            raise ConfigError(f"image_size={self.image_size!r}: must be positive")
        if not 0 < self.crop_share <= 1:
            raise ConfigError(f"crop_share={self.crop_share!r}: must be in (0, 1]")
        if min(self.std) <= 0:
            raise ConfigError(f"std={self.std!r}: must be more than 0 in every channel")
        if self.intensity_range is not None:
            check_intensity_range(self.intensity_range)

    def __call__(self, image: Image.Image) -> "Tensor":
        """RGB image -> (3, height, width) uint8."""
        return to_tensor(self.resize_and_crop(image))

    def resize_and_crop(self, image: Image.Image) -> Image.Image:
        """Resize `image` and crop its centre."""
        height, width = self.image_size
        full = full_width, full_height = self.resized_size(*image.size)
        # round() as torchvision's centre crop does: half a pixel goes to the even side
        left, top = round((full_width - width) * 0.5), round((full_height - height) * 0.5)
        box = (left, top, left + width, top + height)
        resample = RESAMPLING[self.interpolation]
        if full_width * full_height <= MAX_RESIZED_PIXELS:
            return image.resize(full, resample).crop(box)
        x, y = image.width / full_width, image.height / full_height
        source = (box[0] * x, box[1] * y, box[2] * x, box[3] * y)
        return image.resize((width, height), resample, box=source)

    def keep_aspect(self, image: Image.Image, patch_size: int) -> "Tensor":
        """Resize without cropping, near the image's own aspect ratio, (3, height, width) uint8.

        The sides are multiples of `patch_size`, with at most as many patches as `image_size` has.
        """
        patches = math.prod(side // patch_size for side in self.image_size)
        rows, cols = grid_of_aspect(image.height / image.width, patches)
        size = (cols * patch_size, rows * patch_size)
        return to_tensor(image.resize(size, RESAMPLING[self.interpolation]))

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) to which an image is resized before it is cropped."""
        rows, cols = (math.floor(side / self.crop_share) for side in self.image_size)
        if self.resize == "squash":
            return cols, rows
        if rows == cols:
            long = int(rows * max(width, height) / min(width, height))
            return (rows, long) if width <= height else (long, rows)
        ratio = min(height / rows, width / cols)
        return round(width / ratio), round(height / ratio)

    def normalise(
        self,
        images: "Tensor",
        dtype: "torch.dtype | None" = None,
        constants: "tuple[Tensor, Tensor] | None" = None,
    ) -> "Tensor":
        """Normalise a batch on its device, (batch, 3, height, width) uint8 -> floats, by default
        float32."""
        import torch

        dtype = dtype or torch.float32
        mean, std = constants or self.constants(images.device, dtype)
        floats = images.to(dtype, memory_format=torch.contiguous_format)
        # bytes were copied just now, and a large batch is soon out of the cache
        scaled = floats.div_(255) if images.dtype == torch.uint8 else floats / 255
        return scaled.sub_(mean).div_(std)

    def constants(self, device: "torch.device", dtype: "torch.dtype") -> "tuple[Tensor, Tensor]":
        """Mean and standard deviation on a device, each (3, 1, 1)."""
        import torch

        mean, std = (
            torch.tensor(values, device=device, dtype=dtype)[:, None, None]
            for values in (self.mean, self.std)
        )
        return mean, std

    @property
    def mean_colour(self) -> tuple[int, int, int]:
        """The RGB colour that normalisation maps to (nearly) zero."""
        red, green, blue = (min(max(round(255 * share), 0), 255) for share in self.mean)
        return red, green, blue

    @classmethod
    def from_config(cls, data: DataConfig, side: int) -> "Preprocessing":
        """The preprocessing that `data` sets, for square images of `side` pixels."""
        return cls(
            image_size=(side, side),
            resize=data.resize,
            crop_share=data.crop_share,
            interpolation=data.interpolation,
            mean=data.mean,
            std=data.std,
            intensity_range=data.intensity_range,
        )

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; without an undefined `intensity_range`, as older versions wrote."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if (name, value) != ("intensity_range", None)
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocessing":
        """The inverse of `to_dict`; exactly its keys are accepted."""
        return from_plain(cls, values, "preprocessing", optional=["intensity_range"])


def grid_of_aspect(aspect: float, patches: int) -> tuple[int, int]:
    """(rows, cols) with rows / cols near `aspect` and rows * cols at most `patches`."""
    sides = math.sqrt(patches * aspect), math.sqrt(patches / aspect)

    def overlap(grid: tuple[int, int]) -> float:
        """Intersection over union of the ideal rectangle and `grid`, aligned at a corner."""
        return math.prod(min(x, y) / max(x, y) for x, y in zip(grid, sides, strict=True))

    near = [
        {min(max(rounded(side), 1), patches) for rounded in (math.floor, math.ceil)}
        for side in sides
    ]
    return max(((r, c) for r in near[0] for c in near[1] if r * c <= patches), key=overlap)


def to_tensor(image: Image.Image) -> "Tensor":
    """RGB image -> (3, height, width) uint8, contiguous."""
    return to_channels_last(image).contiguous()


def to_channels_last(image: Image.Image) -> "Tensor":
    """RGB image -> (3, height, width) uint8 in channels-last memory format."""
    import torch

    return rearrange(torch.from_numpy(np.array(image)), "height width rgb -> rgb height width")
