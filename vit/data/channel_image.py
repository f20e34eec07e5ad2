"""Images of any number of channels and any depth, with the operations of a PIL image.

Each channel is a PIL image of 32-bit floats, so resizing, cropping and rotating are Pillow's, with
its filters, and need no torch. The values come back in the type of the image: integers are rounded
and clipped to its range, as Pillow does with bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from vit.errors import ConfigError

ValueType = Literal["uint8", "uint16", "float32"]
"""Type of the values that a network takes."""
VALUE_TYPES: tuple[ValueType, ...] = ("uint8", "uint16", "float32")
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """Which values of a file a network takes, and how they are normalised.

        input = (clip(value, low, high) - low) / (high - low), less mean, by std

    Args:
        value_type: Type of the values; files of narrower types are read too.
        count: Channels of a file.
        order: Those that the network takes, by their number in the file.
        low: Value of each that becomes 0; lower ones do too.
        high: Value of each that becomes 1.
        mean: Subtracted from each, in [0, 1].
    """

    value_type: ValueType
    count: int
    order: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        numbers = (self.low, self.high, self.mean, self.std)
        if not self.order or any(len(values) != len(self.order) for values in numbers):
            raise ConfigError(f"channels={self}: needs one range, mean and deviation for each")

    @property
    def fill(self) -> tuple[float, ...]:
        """The value of each channel that normalisation maps to zero."""
        ends = zip(self.low, self.high, self.mean, strict=True)
        return tuple(low + mean * (high - low) for low, high, mean in ends)


class ChannelImage:
    """Channels of one size.

    Args:
        values: (height, width, channels).
        dtype: Type of the image, if it is not that of `values`.
    """

    def __init__(
        self, values: Array, *, dtype: np.dtype[Any] | None = None, file_format: str = ""
    ) -> None:
        self.dtype = dtype or values.dtype
        self.bands: Sequence[Image.Image] = [
            Image.fromarray(np.ascontiguousarray(values[..., n], dtype=np.float32))
            for n in range(values.shape[2])
        ]
        self.format = file_format

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.bands[0].size

    @property
    def width(self) -> int:
        """In pixels."""
        return self.size[0]

    @property
    def height(self) -> int:
        """In pixels."""
        return self.size[1]

    def _each(self, operation: Callable[[int, Image.Image], Image.Image]) -> "ChannelImage":
        made = object.__new__(ChannelImage)
        made.dtype, made.format = self.dtype, self.format
        made.bands = [operation(number, band) for number, band in enumerate(self.bands)]
        return made

    def resize(self, size: tuple[int, int], resample: Any, box: Any = None) -> "ChannelImage":
        """As `PIL.Image.Image.resize`."""
        return self._each(lambda _, band: band.resize(size, resample, box=box))

    def crop(self, box: tuple[int, int, int, int]) -> "ChannelImage":
        """As `PIL.Image.Image.crop`."""
        return self._each(lambda _, band: band.crop(box))

    def transpose(self, method: Image.Transpose) -> "ChannelImage":
        """As `PIL.Image.Image.transpose`."""
        return self._each(lambda _, band: band.transpose(method))

    def rotate(self, angle: float, *, fillcolor: Sequence[float], **options: Any) -> "ChannelImage":
        """As `PIL.Image.Image.rotate`."""
        return self._each(lambda n, band: band.rotate(angle, fillcolor=fillcolor[n], **options))

    def to_array(self) -> Array:
        """(height, width, channels), in the type of the image."""
        values = np.dstack([np.asarray(band) for band in self.bands])
        if self.dtype.kind == "u":
            np.rint(values, out=values)
            values = values.clip(0, np.iinfo(self.dtype).max)
        return values.astype(self.dtype)
