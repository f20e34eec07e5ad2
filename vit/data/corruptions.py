"""Common corruptions of images, of five severities, to measure how robust a network is.

An image is corrupted after it was reduced to the size that is cropped for the network, so that a
severity means the same for photographs of any size; a smaller one as it is.

Source: Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", section 4, arXiv:1903.12261, with the severities of ImageNet-C. It has no rotation.
"""

import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from vit.data.preprocessing import RESAMPLING, Preprocessing

REFERENCE_SIDE = 224
"""Short side of the images of ImageNet-C, in pixels."""
Corrupt = Callable[[Image.Image, float, np.random.Generator], Image.Image]


def add_noise(image: Image.Image, scale: float, random: np.random.Generator) -> Image.Image:
    """Add normal noise of standard deviation `scale` times 255 to each channel."""
    pixels = np.asarray(image, dtype=np.float32)
    noise = random.standard_normal(pixels.shape, dtype=np.float32)
    return _to_image(pixels + 255 * scale * noise)


def blur(image: Image.Image, scale: float, _random: np.random.Generator) -> Image.Image:
    """Blur with a Gaussian of standard deviation `scale` pixels at REFERENCE_SIDE."""
    return image.filter(ImageFilter.GaussianBlur(scale * min(image.size) / REFERENCE_SIDE))


def compress(image: Image.Image, quality: float, _random: np.random.Generator) -> Image.Image:
    """Compress as a JPEG of `quality`, and decode it."""
    content = io.BytesIO()
    image.save(content, "JPEG", quality=int(quality))
    return Image.open(content).convert("RGB")


def brighten(image: Image.Image, share: float, _random: np.random.Generator) -> Image.Image:
    """Add `share` to the value of HSV: the largest channel of a pixel; hue and saturation stay."""
    pixels = np.asarray(image, dtype=np.float32)
    value = pixels.max(axis=2, keepdims=True)
    brighter = np.minimum(value + 255 * share, 255)
    scaled = pixels * (brighter / np.maximum(value, 1))
    return _to_image(np.where(value > 0, scaled, brighter))


def reduce_contrast(image: Image.Image, factor: float, _random: np.random.Generator) -> Image.Image:
    """Multiply the distance from the mean colour of the image by `factor`."""
    pixels = np.asarray(image, dtype=np.float32)
    mean = pixels.mean(axis=(0, 1))
    return _to_image((pixels - mean) * factor + mean)


def rotate(image: Image.Image, degrees: float, random: np.random.Generator) -> Image.Image:
    """Rotate to either side; corners get the mean colour of the image."""
    mean = np.rint(np.asarray(image).mean(axis=(0, 1))).astype(int).tolist()
    angle = degrees if random.random() < 0.5 else -degrees
    return image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=tuple(mean))


CORRUPTIONS: dict[str, tuple[Corrupt, tuple[float, float, float, float, float]]] = {
    "gaussian_noise": (add_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "gaussian_blur": (blur, (1, 2, 3, 4, 6)),
    "jpeg": (compress, (25, 18, 15, 10, 7)),
    "brightness": (brighten, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (reduce_contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "rotation": (rotate, (6, 12, 18, 24, 30)),
}
"""Name -> function and its parameter at severities 1 to 5."""
SEVERITIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """A corruption of RGB images, of a severity from 1 to 5.

    The random numbers of an image depend on its pixels and the seed alone: its path, order and
    thread do not matter, and the severities of a corruption have the same ones.
    """

    name: str
    severity: int
    preprocessing: Preprocessing
    seed: int = 0

    def __call__(self, image: Image.Image) -> Image.Image:
        """A corrupted copy of `image`."""
        size = self.preprocessing.resized_size(*image.size)
        if size[0] <= image.width and size[1] <= image.height:
            image = image.resize(size, RESAMPLING[self.preprocessing.interpolation])
        corrupt, values = CORRUPTIONS[self.name]
        random = np.random.default_rng([self.seed, zlib.crc32(image.tobytes())])
        return corrupt(image, values[self.severity - 1], random)


def _to_image(pixels: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Image.Image:
    """Values of 0 to 255, (height, width, 3), as an image; others are clipped."""
    return Image.fromarray(np.rint(pixels).clip(0, 255).astype(np.uint8))
