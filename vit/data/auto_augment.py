"""Automatic augmentation policies: random colour and geometry operations on training images.

    randaugment     some of 14 operations, all of one strength         arXiv:1909.13719
    trivialaugment  one operation of random strength                   arXiv:2103.10158, table 1
    augmix          a mixture of the image and three operation chains  arXiv:1912.02781, section 3
    three           grey, solarised or blurred, then colour jitter     arXiv:2204.07118, section 4.1

3-Augment and colour jitter run on every image of a training, so they are written here in few passes
over its pixels; the other policies are torchvision's.

All random numbers come from torch's global generator, which the dataset seeds for each image.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from vit.config import AugmentConfig
from vit.data.instrument_images import ChannelImage, ChannelSpec

Operation = Callable[[Any], Any]

THREE_JITTER = 0.3
"""Default colour jitter of 3-Augment."""
BLUR_SIGMA = (0.1, 2.0)
"""Range of the standard deviation of 3-Augment's blur, in pixels."""
LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R BT.601), as in Pillow's mode L."""
NOISE = 0.1
"""Largest standard deviation of the noise of a channel, as a share of its range and strength."""
Colour = Literal["brightness", "contrast", "saturation"]
COLOURS: tuple[Colour, ...] = ("brightness", "contrast", "saturation")


def build_operations(
    config: AugmentConfig, fill: Sequence[float], channels: ChannelSpec | None = None
) -> list[Operation]:
    """The random operations of `config` in their order, for RGB images or those of `channels`;
    pixels outside the image have the colour `fill`."""
    strength = config.color_jitter
    if channels is not None:
        return [ChannelJitter(strength, channels)] if strength else []
    if config.auto_augment == "three":
        strength = strength or THREE_JITTER
    jitter: list[Operation] = [ColorJitter(strength)] if strength else []
    if config.auto_augment == "none":
        return jitter
    if config.auto_augment == "three":
        return [three_augment, *jitter]
    from torchvision.transforms import v2  # its import takes two seconds

    common = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": list(fill)}
    layers, magnitude = config.randaugment_layers, config.randaugment_magnitude
    policies: dict[str, Callable[[], Operation]] = {
        "randaugment": lambda: v2.RandAugment(layers, magnitude, **common),
        "trivialaugment": lambda: v2.TrivialAugmentWide(**common),
        # as in the paper, without operations that its robustness benchmark uses as corruptions
        "augmix": lambda: v2.AugMix(all_ops=False, **common),
    }
    return [policies[config.auto_augment](), *jitter]


class ChannelJitter:
    """Random brightness and contrast of each channel, noise, and a channel that is left out.

    Each factor is uniform in [max(0, 1 - strength), 1 + strength]; noise has a standard deviation
    of up to strength / 10 of a channel's range. With a probability of strength / 3 one of several
    channels is replaced by its mean: what colour operations are for other images.
    """

    def __init__(self, strength: float, spec: ChannelSpec) -> None:
        self.strength, self.spec = strength, spec
        self.low = np.array(spec.low, np.float32)
        self.width = np.array(spec.high, np.float32) - self.low

    def __call__(self, image: ChannelImage) -> ChannelImage:
        channels, strength = len(self.low), self.strength
        factors = torch.empty(2, channels).uniform_(max(0.0, 1 - strength), 1 + strength).numpy()
        values = (image.to_array() - self.low) / self.width
        values *= factors[0]
        means = values.mean(axis=(0, 1))
        values = (values - means) * factors[1] + means
        sigma = NOISE * strength * torch.rand(1).item()
        values += sigma * torch.randn(*values.shape).numpy()
        drop, chosen = torch.rand(2).tolist()
        if channels > 1 and drop < strength / 3:
            number = int(chosen * channels)
            values[..., number] = self.spec.mean[number]
        varied = (values * self.width + self.low).astype(np.float32)
        return ChannelImage(varied, dtype=image.dtype)


class ColorJitter:
    """Random brightness, contrast and saturation in random order.

    Each factor is uniform in [max(0, 1 - strength), 1 + strength].
    """

    def __init__(self, strength: float) -> None:
        self.factors = max(0.0, 1 - strength), 1 + strength

    def __call__(self, image: Image.Image) -> Image.Image:
        low, high = self.factors
        order = torch.randperm(len(COLOURS)).tolist()
        drawn = torch.empty(len(COLOURS)).uniform_(low, high).tolist()
        return adjust_colours(image, [(COLOURS[n], drawn[n]) for n in order])


def adjust_colours(image: Image.Image, adjustments: Sequence[tuple[Colour, float]]) -> Image.Image:
    """Adjust brightness, contrast and saturation by factors, in the given order.

    Each of them maps a pixel to `own * pixel + grey * luma(pixel) + offset`, and so do several in
    sequence: one pass over the image instead of one for each. Colours are rounded and clipped once,
    at the end.
    """
    red, green, blue = LUMA
    pixel = image.reduce(image.size).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    mean = red * pixel[0] + green * pixel[1] + blue * pixel[2]
    own, grey, offset = 1.0, 0.0, 0.0
    for name, factor in adjustments:
        if name == "saturation":
            grey = factor * grey + (1 - factor) * (own + grey)
            own *= factor
            continue
        level = (own + grey) * mean + offset if name == "contrast" else 0.0
        own, grey = factor * own, factor * grey
        offset = factor * offset + (1 - factor) * level
    luma = [grey * weight for weight in LUMA]
    rows = [[*luma, offset] for _ in range(3)]
    for channel, row in enumerate(rows):
        row[channel] += own
    return image.convert("RGB", tuple(number for row in rows for number in row))


def three_augment(image: Image.Image) -> Image.Image:
    """3-Augment: greyscale, solarisation or blur, with equal probability."""
    which = int(torch.randint(3, ()))
    if which == 0:
        return image.convert("L").convert("RGB")
    if which == 1:
        return solarize(image)
    low, high = BLUR_SIGMA
    return blur(image, low + (high - low) * float(torch.rand(())))


def solarize(image: Image.Image) -> Image.Image:
    """Invert every colour value from 128 on."""
    pixels = np.asarray(image)
    return Image.fromarray(np.minimum(pixels, 255 - pixels))


def blur(image: Image.Image, sigma: float) -> Image.Image:
    """Blur an RGB image by a standard deviation of about `sigma` pixels.

    Shrinking and enlarging by linear interpolation convolves twice with a triangle of variance
    scale² / 6: close to a Gaussian, in a fifth of the time of Pillow's. Nothing is blurred
    below 0.58 pixels.
    """
    scale = max(math.sqrt(3) * sigma, 1.0)
    small = [max(round(side / scale), 1) for side in (image.height, image.width)]
    pixels = torch.from_numpy(np.array(image))[None].permute(0, 3, 1, 2)
    for size in (small, [image.height, image.width]):
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
    return Image.fromarray(pixels[0].permute(1, 2, 0).contiguous().numpy())
