"""Images in memory: PIL images, arrays and tensors, read as files of the same content are.

    PIL image       upright by its EXIF orientation, transparency over white
    numpy array     (height, width), (height, width, 1), (height, width, 3 or 4)
    torch tensor    (1, height, width), (3 or 4, height, width)

Arrays and tensors are RGB or RGBA: uint8 in [0, 255], floating point in [0, 1], or uint16, which
the range of the network scales. If only the other end of a shape can be the channels, they are
there. Nothing else is guessed: a normalised tensor, a float image in [0, 255] or a batch in a list
is an error.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np
from PIL import Image

from vit.data.image_io import ROUNDING, IntensityRange, pillow_array, upright_rgb
from vit.data.instrument_images import Array, ArrayImage, ChannelImage, ChannelSpec
from vit.errors import BadImage, ConfigError, error_text
from vit.text import printable

if TYPE_CHECKING:
    from torch import Tensor

ImageInput = Union[str, os.PathLike[str], Image.Image, Array, "Tensor"]
"""Types of images that a predictor accepts."""
CHANNELS = (1, 3, 4)
WANTED = "paths, PIL images, numpy arrays or torch tensors"
_LOAD = threading.Lock()  # two threads may load the same PIL image


class NamedImage(NamedTuple):
    """An image of a list and its name in the results."""

    name: str
    """The path, of a PIL image that of its file; `images[N]` without one."""
    source: Any
    """A path as str, or an image in memory."""


def named_images(
    images: Iterable[ImageInput | NamedImage], *, first: int = 0
) -> Iterator[NamedImage]:
    """Yield the images of a list, or an array or tensor (batch, ...), with their names, lazily."""
    if isinstance(images, str | bytes | os.PathLike):
        raise ConfigError(f"images={images!r} is one path; give a list of paths")
    dimensions = len(getattr(images, "shape", ())) if is_array(images) else 4
    if isinstance(images, Image.Image) or dimensions < 4:
        raise ConfigError(f"images is one image ({describe(images)}); give a list: [image]")
    if not isinstance(images, Iterable) or isinstance(images, dict):
        raise ConfigError(f"images={describe(images)}; give a list of {WANTED}")
    return (named_image(image, index) for index, image in enumerate(images, first))


def named_image(image: ImageInput | NamedImage, index: int) -> NamedImage:
    if isinstance(image, NamedImage):
        return image
    if isinstance(image, str):
        return NamedImage(image, image)
    if isinstance(image, os.PathLike):
        path = os.fspath(image)
        return NamedImage(path, path)
    name = f"images[{index}]"
    if isinstance(image, Image.Image):
        file = getattr(image, "filename", "")
        return NamedImage(os.fspath(file) if isinstance(file, str) and file else name, image)
    if not is_array(image):
        encoded = type(image).__name__ == "bytes"
        hint = "; open it with PIL.Image.open(io.BytesIO(...))" if encoded else ""
        raise ConfigError(f"{name} is {describe(image)}; give {WANTED}{hint}")
    return NamedImage(name, image)


def to_rgb_image(
    source: Any,
    name: str,
    *,
    intensity_range: IntensityRange | None = None,
    on_dark: Callable[[int], object] | None = None,
) -> Image.Image:
    """Upright RGB image of a PIL image, an array or a tensor."""
    image = source if isinstance(source, Image.Image) else to_array_image(source, name)
    try:
        with _LOAD if getattr(image, "tile", None) else nullcontext():
            if isinstance(image, Image.Image):
                image = pillow_array(image) or image
            return upright_rgb(image, intensity_range, on_dark)
    except BadImage:
        raise
    except Exception as error:  # any parser, any exception: one image must not end a list
        raise BadImage(name, f"cannot be read: {error_text(error, 120)}") from None


def to_channels(source: Any, name: str, spec: ChannelSpec) -> ChannelImage:
    """The channels of an array or tensor, of any type that `spec` takes.

    Arrays are (height, width, channels), tensors (channels, height, width); of one channel also
    (height, width).
    """
    if isinstance(source, Image.Image):
        array = np.asarray(source)
    elif isinstance(source, np.ndarray):
        array = source
    else:
        array = source.detach().cpu().numpy()
        array = np.moveaxis(array, 0, 2) if array.ndim == 3 else array
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] != spec.count or 0 in array.shape:
        raise ConfigError(
            f"{name} is {describe(source)}; the network takes images of {spec.count} channels"
        )
    if spec.value_type != "float32" and not np.can_cast(array.dtype, spec.value_type):
        raise ConfigError(f"{name} is {describe(source)}; the network takes {spec.value_type}")
    if not np.isfinite(array).all():
        raise BadImage(name, "values that are not finite")
    return ChannelImage(array[..., list(spec.order)].astype(spec.value_type))


def to_array_image(source: Any, name: str) -> ArrayImage:
    what, tensor = f"{name} is {describe(source)}", not isinstance(source, np.ndarray)
    if tensor:  # numpy has no bfloat16
        source = source.detach().cpu()
        source = source.float() if source.is_floating_point() else source
    array: Array = source.numpy() if tensor else source
    if array.ndim == 3:
        order = (0, 2) if tensor else (2, 0)
        axis = next((axis for axis in order if array.shape[axis] in CHANNELS), None)
        if axis is None:
            raise ConfigError(f"{what}: no side of 1, 3 or 4 is the channels")
        array = np.moveaxis(array, axis, 2)
    if array.ndim not in (2, 3) or 0 in array.shape:
        shape = "(channels, height, width)" if tensor else "(height, width, channels)"
        raise ConfigError(f"{what}; give one image of {shape} or (height, width)")
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not -ROUNDING <= low <= high <= 1 + ROUNDING:  # also false for NaN
            raise ConfigError(
                f"{what} from {low:.4g} to {high:.4g}; give floats in [0, 1], before any "
                "normalisation (clip what resizing adds), or uint8 in [0, 255]"
            )
        array = np.rint(array.astype(np.float32) * 255).clip(0, 255).astype(np.uint8)
    if array.dtype not in (np.uint8, np.uint16):
        raise ConfigError(f"{what}; give uint8 in [0, 255], uint16, or floats in [0, 1]")
    values = array.reshape(*array.shape[:2], -1)
    return ArrayImage(
        format="",
        size=(values.shape[1], values.shape[0]),
        channels=1 if values.shape[2] == 1 else 3,
        dtype=values.dtype,
        load=lambda: values,
        alpha="straight" if values.shape[2] == 4 else "",
    )


def is_array(value: object) -> bool:
    """Whether `value` is a numpy array or a torch tensor; imports no torch."""
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and torch.is_tensor(value))


def describe(value: object) -> str:
    """Type of a value, with shape and dtype of an array, and size of an image."""
    kind = type(value).__name__
    if isinstance(value, Image.Image):
        return f"a PIL image of {value.width} x {value.height}"
    if is_array(value):
        name = "an array" if isinstance(value, np.ndarray) else "a tensor"
        dtype = str(value.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
        return f"{name} of {dtype} {tuple(value.shape)}"  # type: ignore[attr-defined]
    if value is None or isinstance(value, int | float):
        return f"{value} ({kind})"
    return printable(kind)
