"""Preprocessing of images for evaluation, prediction and export.

    input = (centre_crop(resize(image)) / 255 - mean) / std

It is stored in the run folder, so that every later use equals the validation during training.
Resizing needs no torch, so that exported networks run without it. Equals timm's evaluation
transform (crop modes `center`, `squash` and `border`, which is pad) bit for bit.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from einops import rearrange
from PIL import Image, ImageOps

from vit.config import DataConfig
from vit.config.data_config import WHOLE, check_intensity_range
from vit.config.settings import from_plain
from vit.data.image_io import read_channels, read_image
from vit.data.image_objects import to_channels, to_rgb_image
from vit.data.image_tiles import TiledImage, TileGrid, open_tiles, tiles_in_memory
from vit.data.instrument_images import Array, ChannelImage, ChannelSpec, ValueType
from vit.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vit.data.image_io import EncodedImage, PathLike

AnyImage = Image.Image | ChannelImage
"""RGB of 8 bits, or the channels of an instrument."""
OPTIONAL = ("intensity_range", "channels", "tiles", "axes", "names", "patch_size")
"""Left out of JSON where they are None or empty; axes and names are of channels."""
Triple = tuple[float, float, float]
Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels, not rounded."""
Resize = Literal["crop", "squash", "pad", "native"]
Interpolation = Literal["bilinear", "bicubic"]

RESAMPLING: dict[str, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
IMAGENET_COLOURS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of the colours of ImageNet."""
CLIP_COLOURS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
TILE_CHUNK = 64
MAX_RESIZED_PIXELS = 2**24
"""Larger resized images are not computed, only their crops; 1 x 3000 would take 450 MB."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resizes and crops images to (3, height, width) uint8, and normalises batches of them.

    Args:
        image_size: (height, width) of the result, in pixels; with `native` its most patches.
        resize: crop and squash as the setting; pad: the long side is resized to `image_size`, and
            the mean colour is added around; native: near its own aspect ratio, in whole patches.
        crop_share: Share of the resized side that the centre crop keeps, in (0, 1].
        patch_size: Of native, in pixels.
        mean: Subtracted from each channel, in [0, 1].
        intensity_range: Values of images of more than 8 bits per channel that become 0 and 255, as
            in `read_image`; None is the whole range of their type.
        channels: Of a network that takes the values of instruments, which ones, instead of `mean`,
            `std` and `intensity_range`; None: RGB of 8 bits.
        tiles: The tiles of an image, each of which is resized to `image_size`; None: the image.
    """

    image_size: tuple[int, int]
    resize: Resize = "crop"
    crop_share: float = 0.9
    interpolation: Interpolation = "bicubic"
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)
    intensity_range: tuple[float, float] | None = None
    channels: ChannelSpec | None = None
    patch_size: int | None = None
    tiles: TileGrid | None = None

    def __post_init__(self) -> None:
        if min(self.image_size) < 1:
            raise ConfigError(f"image_size={self.image_size!r}: must be positive")
        if not 0 < self.crop_share <= 1:
            raise ConfigError(f"crop_share={self.crop_share!r}: must be in (0, 1]")
        if min(self.std) <= 0:
            raise ConfigError(f"std={self.std!r}: must be more than 0 in every channel")
        if self.intensity_range is not None:
            check_intensity_range(self.intensity_range)
        if self.native != bool(self.patch_size):
            raise ConfigError(f"patch_size={self.patch_size!r}: resize=native has one, no other")

    @property
    def native(self) -> bool:
        """Whether results have sizes of their own, with at most the pixels of `image_size`."""
        return self.resize == "native"

    @property
    def in_graph(self) -> bool:
        """Whether exported graphs resize images themselves."""
        return self.channels is None and self.tiles is None and not self.native

    @property
    def whole(self) -> bool:
        """Whether all of an image is kept, in its shape."""
        return self.resize in WHOLE

    def to_native(self, patch_size: int) -> "Preprocessing":
        """The same, resized by `native` in patches of this size."""
        return replace(self, resize="native", crop_share=1.0, patch_size=patch_size)

    def with_range(self, intensity_range: tuple[float, float]) -> "Preprocessing":
        """The same with another range of the values of images of instruments."""
        if self.channels is None:
            return replace(self, intensity_range=intensity_range)
        check_intensity_range(intensity_range)
        number = len(self.channels.order)
        low, high = ((end,) * number for end in intensity_range)
        return replace(self, channels=replace(self.channels, low=low, high=high))

    @property
    def num_channels(self) -> int:
        """Channels of the result."""
        return 3 if self.channels is None else len(self.channels.order)

    @property
    def value_type(self) -> ValueType:
        """Type of the values of the result."""
        return "uint8" if self.channels is None else self.channels.value_type

    def read(
        self,
        path: "PathLike | EncodedImage",
        *,
        before_decode: Callable[[int], object] = lambda _pixels: None,
        on_dark: Callable[[int], object] | None = None,
    ) -> AnyImage | TiledImage:
        """Read an image as the network takes it, upright; arguments as for `read_image`."""
        if self.tiles is not None:
            return open_tiles(path, self.tiles)
        if self.channels is not None:
            return read_channels(path, self.channels, before_decode=before_decode)
        return read_image(
            path,
            intensity_range=self.intensity_range,
            before_decode=before_decode,
            on_dark=on_dark,
        )

    def from_memory(
        self, source: Any, name: str, on_dark: Callable[[int], object] | None = None
    ) -> AnyImage | TiledImage:
        """The image of a PIL image, an array or a tensor, as the network takes it."""
        if self.channels is not None:
            return to_channels(source, name, self.channels)
        image = to_rgb_image(source, name, intensity_range=self.intensity_range, on_dark=on_dark)
        return image if self.tiles is None else tiles_in_memory(image, name, self.tiles)

    def to_display(self, images: "Tensor") -> "Tensor":
        """Images as `__call__` returns them as RGB, (..., 3, height, width) uint8.

        Of more than three channels the first three, of two the first, in their ranges.
        """
        return images if self.channels is None else self.to_pixels(self.normalise(images))

    def to_pixels(self, normalised: "Tensor") -> "Tensor":
        """The inverse of `normalise`, for looking at: RGB, (..., 3, height, width) uint8."""
        import torch

        mean, std, *_ = self.constants(normalised.device, torch.float32)
        pixels = ((normalised * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        if self.num_channels >= 3:
            return pixels[..., :3, :, :]
        return pixels[..., :1, :, :].expand(*pixels.shape[:-3], 3, -1, -1)

    def __call__(self, image: AnyImage | TiledImage) -> "Tensor":
        """RGB image -> (3, height, width) uint8; a ChannelImage -> its channels and type; tiles ->
        those that are no background, (tiles, 3, height, width)"""
        if isinstance(image, TiledImage):
            import torch

            return torch.cat([tiles for _, tiles in self.tile_chunks(image)])
        return to_tensor(self.resize_and_crop(image))

    def tile_chunks(self, image: TiledImage) -> "Iterator[tuple[list[int], Tensor]]":
        """Tiles that are no background, up to TILE_CHUNK at a time: their numbers, and (tiles, 3,
        height, width)."""
        import torch

        tiles = ((n, to_tensor(self.resize_and_crop(tile))) for n, tile in image.foreground())
        while some := [*islice(tiles, TILE_CHUNK)]:
            numbers, chunk = zip(*some, strict=True)
            yield [*numbers], torch.stack(chunk)

    def to_graph_input(self, image: AnyImage | TiledImage) -> Array:
        """What an exported graph takes of an image: all of it with `in_graph`, else what the
        network sees, (height, width, channels), or of tiles (tiles, height, width, 3)."""
        if isinstance(image, TiledImage):
            tiles = (self.resize_and_crop(tile) for _, tile in image.foreground())
            return np.stack([np.asarray(tile) for tile in tiles])
        fitted = image if self.in_graph else self.resize_and_crop(image)
        return np.asarray(fitted) if isinstance(fitted, Image.Image) else fitted.to_array()

    def random_input(self, seed: int, *shape: int) -> Array:
        """Random values of an exported graph's input, `shape` and channels."""
        random = np.random.default_rng(seed)
        if self.channels is None:
            return random.integers(0, 256, (*shape, 3), dtype=np.uint8)
        shares = random.random((*shape, self.num_channels))
        low, high = np.array(self.channels.low), np.array(self.channels.high)
        values: Array = low + shares * (high - low)
        return values.astype(self.value_type)

    def blank(self, image_size: tuple[int, int] | None = None) -> "Tensor":
        """A black image as `__call__` returns it, of `image_size` if given."""
        import torch

        size = image_size or self.image_size
        bag = () if self.tiles is None else (1,)
        return torch.zeros(*bag, self.num_channels, *size, dtype=getattr(torch, self.value_type))

    def resize_and_crop(self, image: AnyImage) -> AnyImage:
        """Resize `image`, and crop its centre or add borders."""
        resample = RESAMPLING[self.interpolation]
        full = full_width, full_height = self.resized_size(*image.size)
        if self.whole:
            return self.add_borders(image.resize(full, resample))
        height, width = self.image_size
        # round() as torchvision's centre crop does: half a pixel goes to the even side
        left, top = round((full_width - width) * 0.5), round((full_height - height) * 0.5)
        box = (left, top, left + width, top + height)
        if full_width * full_height <= MAX_RESIZED_PIXELS:
            return image.resize(full, resample).crop(box)
        x, y = image.width / full_width, image.height / full_height
        source = (box[0] * x, box[1] * y, box[2] * x, box[3] * y)
        return image.resize((width, height), resample, box=source)

    def add_borders(self, image: AnyImage) -> AnyImage:
        """With `pad` a resized image with the mean colour around it, or its centre; else all."""
        if self.resize != "pad":
            return image
        spare = self.image_size[1] - image.width, self.image_size[0] - image.height
        left, top = (gap // 2 if gap > 0 else -round(-gap / 2) for gap in spare)
        border, colour = (left, top, spare[0] - left, spare[1] - top), self.mean_colour
        if isinstance(image, ChannelImage):
            return image.expand(border, colour)
        return ImageOps.expand(image, border, (int(colour[0]), int(colour[1]), int(colour[2])))

    def resized_size(self, width: float, height: float) -> tuple[int, int]:
        """(width, height) to which an image is resized before it is cropped."""
        if self.patch_size is not None:
            patches = math.prod(side // self.patch_size for side in self.image_size)
            grid = grid_of_aspect(height / width, patches)
            return grid[1] * self.patch_size, grid[0] * self.patch_size
        rows, cols = (math.floor(side / self.crop_share) for side in self.image_size)
        if self.resize == "squash":
            return cols, rows
        if self.resize == "pad":
            ratio = max(height / rows, width / cols)
            return max(round(width / ratio), 1), max(round(height / ratio), 1)
        if rows == cols:
            long = int(rows * max(width, height) / min(width, height))
            return (rows, long) if width <= height else (long, rows)
        ratio = min(height / rows, width / cols)
        return round(width / ratio), round(height / ratio)

    def normalise(
        self,
        images: "Tensor",
        dtype: "torch.dtype | None" = None,
        constants: "tuple[Tensor, ...] | None" = None,
    ) -> "Tensor":
        """Normalise a batch on its device, (batch, 3, height, width) uint8 -> floats, by default
        float32."""
        import torch

        dtype = dtype or torch.float32
        mean, std, *ends = constants or self.constants(images.device, dtype)
        if ends:  # in float32, since half precision has no 16-bit integers
            low, high = ends
            floats = images.to(torch.float32, memory_format=torch.contiguous_format)
            # first less `low`, also in engines that join products and sums: both ends may be near
            scaled = (floats - low).clamp(torch.zeros_like(low), high - low).div_(high - low)
            return scaled.to(dtype).sub_(mean).div_(std)
        floats = images.to(dtype, memory_format=torch.contiguous_format)
        # bytes were copied just now, and a large batch is soon out of the cache
        scaled = floats.div_(255) if images.dtype == torch.uint8 else floats / 255
        return scaled.sub_(mean).div_(std)

    def constants(self, device: "torch.device", dtype: "torch.dtype") -> "tuple[Tensor, ...]":
        """Mean and standard deviation on a device, each (channels, 1, 1), and of the channels of
        instruments both ends of their range in float32."""
        import torch

        moments, spec = self.channels or self, self.channels
        ends = () if spec is None else ((spec.low, torch.float32), (spec.high, torch.float32))
        return tuple(
            torch.tensor(values, device=device, dtype=kind)[:, None, None]
            for values, kind in ((moments.mean, dtype), (moments.std, dtype), *ends)
        )

    @property
    def mean_colour(self) -> tuple[float, ...]:
        """The colour that normalisation maps to (nearly) zero."""
        if self.channels is not None:
            return self.channels.fill
        red, green, blue = (min(max(round(255 * share), 0), 255) for share in self.mean)
        return red, green, blue

    @classmethod
    def from_config(
        cls, data: DataConfig, side: int, patch_size: int | None = None
    ) -> "Preprocessing":
        """The preprocessing that `data` sets, for square images of `side` pixels."""
        return cls(
            image_size=(side, side),
            resize=data.resize,
            patch_size=patch_size if data.resize == "native" else None,
            crop_share=1.0 if data.resize in WHOLE else data.crop_share,
            interpolation=data.interpolation,
            mean=data.mean,
            std=data.std,
            intensity_range=data.intensity_range,
            channels=spec_from_config(data),
            tiles=TileGrid.from_config(data),
        )

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; without what is not defined, as older versions wrote."""

        def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
            defined = [(name, value) for name, value in items if value or name not in OPTIONAL]
            return {name: [*v] if isinstance(v, tuple) else v for name, v in defined}

        return asdict(self, dict_factory=plain)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocessing":
        """The inverse of `to_dict`; exactly its keys are accepted."""
        plain = {**values} if isinstance(values, dict) else values
        parts: dict[str, Any] = {}
        for name, kind in (("channels", ChannelSpec), ("tiles", TileGrid)):
            if isinstance(plain, dict) and (given := plain.pop(name, None)) is not None:
                parts[name] = from_plain(kind, given, f"preprocessing.{name}", optional=OPTIONAL)
        return replace(from_plain(cls, plain, "preprocessing", optional=OPTIONAL), **parts)


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


def spec_from_config(data: DataConfig) -> ChannelSpec | None:
    """The channels that settings set; None for RGB images of 8 bits."""
    if data.value_type is None or data.file_channels is None:
        return None
    return ChannelSpec(
        value_type=data.value_type,
        count=data.file_channels,
        order=tuple(map(int, data.channel_order)),
        low=data.channel_ranges[::2],
        high=data.channel_ranges[1::2],
        mean=data.channel_mean,
        std=data.channel_std,
        axes=data.axes,
        names=data.channel_names,
    )


def to_tensor(image: AnyImage) -> "Tensor":
    """RGB image -> (3, height, width) uint8, contiguous."""
    return to_channels_last(image).contiguous()


def to_channels_last(image: AnyImage) -> "Tensor":
    """RGB image -> (3, height, width) uint8 in channels-last memory format."""
    import torch

    values = np.array(image) if isinstance(image, Image.Image) else image.to_array()
    return rearrange(torch.from_numpy(values), "height width channels -> channels height width")
