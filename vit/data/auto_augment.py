"""Policies: random operations on the colours and the shape of a training image.

    randaugment     some of 14 operations, all of one strength         arXiv:1909.13719
    trivialaugment  one operation, of any strength                     arXiv:2103.10158, table 1
    augmix          a mixture of the image and three chains of them  arXiv:1912.02781, section 3
    three           grey, solarised or blurred, then other colours     arXiv:2204.07118, section 4.1

Every draw comes from torch's global generator, which the dataset seeds for each image.
"""

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image, ImageFilter, ImageOps

from vit.config import AugmentConfig

Operation = Callable[[Image.Image], Image.Image]

THREE_JITTER = 0.3
"""Colour jitter that belongs to 3-Augment, where nobody chose another."""
SOLARISED_FROM = 128
BLUR_RADII = (0.1, 2.0)
"""Smallest and largest standard deviation of 3-Augment's Gaussian blur, in pixels."""


def operations(config: AugmentConfig, fill: tuple[int, int, int]) -> list[Operation]:
    """The random operations that `config` asks for, in their order.

    Args:
        config: Which policy, and how strong.
        fill: Colour of what is shifted in from outside, as bytes.
    """
    strength = config.color_jitter
    if config.auto_augment == "three":
        strength = strength or THREE_JITTER
    if config.auto_augment == "none" and not strength:
        return []
    from torchvision.transforms import v2  # two seconds of import, paid only where it is used

    jitter = [v2.ColorJitter(strength, strength, strength)] if strength else []
    return [*_policy(config, fill), *jitter]


def _policy(config: AugmentConfig, fill: tuple[int, int, int]) -> list[Any]:
    from torchvision.transforms import v2

    outside: dict[str, Any] = {
        "interpolation": v2.InterpolationMode.BILINEAR,
        "fill": list(fill),
    }
    layers, magnitude = config.randaugment_layers, config.randaugment_magnitude
    policies: dict[str, Callable[[], Any]] = {
        "randaugment": lambda: v2.RandAugment(layers, magnitude, **outside),
        "trivialaugment": lambda: v2.TrivialAugmentWide(**outside),
        # the paper's operations: without those that its test of robustness has as corruptions
        "augmix": lambda: v2.AugMix(all_ops=False, **outside),
        "three": three_augment,
    }
    return [policies[config.auto_augment]()] if config.auto_augment in policies else []


def three_augment() -> Operation:
    """One of grey, solarised and blurred, each as likely as the others."""
    return _one_of_three


def _one_of_three(image: Image.Image) -> Image.Image:
    which = int(torch.randint(3, ()))
    if which == 0:
        return image.convert("L").convert("RGB")
    if which == 1:
        return ImageOps.solarize(image, SOLARISED_FROM)
    least, most = BLUR_RADII
    radius = least + (most - least) * float(torch.rand(()))
    return image.filter(ImageFilter.GaussianBlur(radius))
