"""Automatic augmentation policies: random colour and geometry operations on training images.

    randaugment     some of 14 operations, all of one strength         arXiv:1909.13719
    trivialaugment  one operation of random strength                   arXiv:2103.10158, table 1
    augmix          a mixture of the image and three operation chains  arXiv:1912.02781, section 3
    three           grey, solarised or blurred, then colour jitter     arXiv:2204.07118, section 4.1

All random numbers come from torch's global generator, which the dataset seeds for each image.
"""

from collections.abc import Callable

import torch
from PIL import Image, ImageFilter, ImageOps

from vit.config import AugmentConfig

Operation = Callable[[Image.Image], Image.Image]

THREE_JITTER = 0.3
"""Default colour jitter of 3-Augment."""
SOLARIZE_THRESHOLD = 128
BLUR_SIGMA = (0.1, 2.0)
"""Range of the standard deviation of 3-Augment's Gaussian blur, in pixels."""


def build_operations(config: AugmentConfig, fill: tuple[int, int, int]) -> list[Operation]:
    """The random operations of `config`, in their order.

    Args:
        config: The policy and its strength.
        fill: RGB colour of pixels outside the image.
    """
    strength = config.color_jitter
    if config.auto_augment == "three":
        strength = strength or THREE_JITTER
    if config.auto_augment == "none" and not strength:
        return []
    from torchvision.transforms import v2  # its import takes two seconds

    common = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": list(fill)}
    layers, magnitude = config.randaugment_layers, config.randaugment_magnitude
    policies: dict[str, Callable[[], list[Operation]]] = {
        "none": list,
        "randaugment": lambda: [v2.RandAugment(layers, magnitude, **common)],
        "trivialaugment": lambda: [v2.TrivialAugmentWide(**common)],
        # as in the paper, without operations that its robustness benchmark uses as corruptions
        "augmix": lambda: [v2.AugMix(all_ops=False, **common)],
        "three": lambda: [three_augment],
    }
    jitter = [v2.ColorJitter(strength, strength, strength)] if strength else []
    return [*policies[config.auto_augment](), *jitter]


def three_augment(image: Image.Image) -> Image.Image:
    """3-Augment: greyscale, solarisation or Gaussian blur, with equal probability."""
    which = int(torch.randint(3, ()))
    if which == 0:
        return image.convert("L").convert("RGB")
    if which == 1:
        return ImageOps.solarize(image, SOLARIZE_THRESHOLD)
    low, high = BLUR_SIGMA
    radius = low + (high - low) * float(torch.rand(()))
    return image.filter(ImageFilter.GaussianBlur(radius))
