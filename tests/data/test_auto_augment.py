"""Policies against timm's and torchvision's: which operations, how often, and of what strength."""

import itertools
import random
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from timm.data.auto_augment import auto_augment_transform
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from vit.config import AugmentConfig
from vit.config.setting_layers import make_config
from vit.data import auto_augment
from vit.data.auto_augment import (
    THREE_JITTER,
    ColorJitter,
    adjust_colours,
    blur,
    build_operations,
    solarize,
    three_augment,
)
from vit.data.preprocessing import Preprocessing
from vit.data.transforms import TrainingTransform, simple_random_crop

GREY = (128, 128, 128)
DRAWS = 300


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    """A photograph whose colours stay within a byte when they are jittered"""
    from sklearn import datasets  # which takes a second

    pixels = np.asarray(Image.fromarray(datasets.load_sample_image("china.jpg")).resize((96, 64)))
    return Image.fromarray((60 + pixels * 0.4).astype(np.uint8))


def kinds(image: Image.Image, augment) -> tuple[dict[str, int], list[float]]:
    """How often `augment` makes grey, solarised and blurred images, and how sharp the last are"""
    grey = {image.convert("L").convert("RGB").tobytes()}
    # timm desaturates by blending with the grey image, which is the same
    solarised = ImageOps.solarize(image, 128).tobytes()
    found, sharpness = {"grey": 0, "solarised": 0, "blurred": 0}, []
    for _ in range(DRAWS):
        made = augment(image)
        pixels = np.asarray(made).astype(int)
        if made.tobytes() == solarised:
            found["solarised"] += 1
        elif made.tobytes() in grey or not np.ptp(pixels, axis=2).any():
            found["grey"] += 1
        else:
            found["blurred"] += 1
            sharpness.append(float(np.abs(np.diff(pixels, axis=0)).mean()))
    return found, sharpness


def test_three_augment_has_the_operations_and_probabilities_of_timm():
    noise = np.random.RandomState(0).randint(0, 256, (24, 20, 3)).astype(np.uint8)
    image = Image.fromarray(noise)
    torch.manual_seed(0)
    ours, our_sharpness = kinds(image, three_augment)
    random.seed(0)
    np.random.seed(0)
    theirs, their_sharpness = kinds(image, auto_augment_transform("3a", {}))
    for name in ours:  # 100 of 300 with a deviation of 8.2
        assert abs(ours[name] - 100) < 30
        assert abs(theirs[name] - 100) < 30
    ends = [[min(s), np.median(s), max(s)] for s in (our_sharpness, their_sharpness)]
    assert ends[0] == pytest.approx(ends[1], rel=0.35)


def test_three_augment_jitters_colours_by_the_paper_s_default_or_the_setting():
    for chosen, expected in ((0.0, THREE_JITTER), (0.1, 0.1)):
        config = AugmentConfig(auto_augment="three", color_jitter=chosen)
        *_, jitter = build_operations(config, GREY)
        assert isinstance(jitter, ColorJitter)
        assert jitter.factors == (1 - expected, 1 + expected)
    assert THREE_JITTER == 0.3
    assert build_operations(AugmentConfig(), GREY) == []


def test_colours_are_adjusted_like_torchvision_s_one_after_another(photo):
    apply = {
        "brightness": functional.adjust_brightness,
        "contrast": functional.adjust_contrast,
        "saturation": functional.adjust_saturation,
    }
    pixels = functional.to_dtype(functional.to_image(photo), torch.float32, scale=True)
    for order in itertools.permutations(apply):
        for factors in itertools.product((0.7, 1.0, 1.3), repeat=3):
            adjustments = list(zip(order, factors, strict=True))
            theirs = pixels
            for name, factor in adjustments:
                theirs = apply[name](theirs, factor)
            ours = functional.to_image(adjust_colours(photo, adjustments))
            assert (ours - 255 * theirs).abs().max() < 1.5  # rounded, and so is the mean colour


def test_jitter_draws_every_factor_uniformly_and_every_order(photo, monkeypatch):
    drawn = []
    monkeypatch.setattr(auto_augment, "adjust_colours", lambda _, each: drawn.append(each))
    torch.manual_seed(0)
    jitter = ColorJitter(0.4)
    for _ in range(DRAWS):
        jitter(photo)
    assert {tuple(name for name, _ in each) for each in drawn} == set(
        itertools.permutations(("brightness", "contrast", "saturation"))
    )
    factors = np.array([[dict(each)[name] for name in dict(drawn[0])] for each in drawn])
    assert factors.min() >= 0.6
    assert factors.max() <= 1.4
    np.testing.assert_allclose(factors.mean(0), 1.0, atol=0.04)  # a deviation of 0.013
    np.testing.assert_allclose(factors.std(0), 0.8 / np.sqrt(12), rtol=0.1)


def test_solarisation_equals_pillow_s(pil_image):
    image = pil_image(40, 30)
    assert solarize(image).tobytes() == ImageOps.solarize(image, 128).tobytes()


@pytest.mark.parametrize("sigma", [0.8, 1.2, 2.0])
def test_a_blur_is_close_to_a_gaussian(photo, sigma):
    gaussian = np.asarray(photo.filter(ImageFilter.GaussianBlur(sigma))).astype(float)
    changed = np.abs(gaussian - np.asarray(photo)).mean()
    assert np.abs(np.asarray(blur(photo, sigma)) - gaussian).mean() < 0.35 * changed


def test_augmix_equals_torchvision_with_the_paper_s_operations(pil_image):
    (ours,) = build_operations(AugmentConfig(auto_augment="augmix"), GREY)
    theirs = v2.AugMix(3, 3, -1, 1.0, all_ops=False, fill=list(GREY))
    for seed in range(5):
        results = []
        for augment in (ours, theirs):
            torch.manual_seed(seed)
            results.append(augment(pil_image(40, 30)).tobytes())
        assert results[0] == results[1]
    overlapping = {"Brightness", "Color", "Contrast", "Sharpness"}
    space = ours._AUGMENTATION_SPACE if ours.all_ops else ours._PARTIAL_AUGMENTATION_SPACE
    assert not overlapping & space.keys()


@pytest.mark.parametrize(("width", "height"), [(40, 30), (30, 40), (24, 32), (5, 7)])
def test_a_simple_crop_is_a_window_of_torchvision_s_padded_image(pil_image, width, height):
    image = pil_image(width, height)
    whole = v2.Resize(24, v2.InterpolationMode.BICUBIC)(image)
    padded = np.asarray(v2.Pad(4, padding_mode="reflect")(whole))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (24, 24, 3))[:, :, 0]
    positions = set()
    for seed in range(40):
        torch.manual_seed(seed)
        crop = np.asarray(simple_random_crop(image, 24, 24, Image.Resampling.BICUBIC))
        rows, cols = np.nonzero((windows == crop).all(axis=(2, 3, 4)))
        assert len(rows) >= 1
        positions.add((int(rows[0]), int(cols[0])))
    assert len(positions) > 25
    assert {row for row, _ in positions} >= {0, windows.shape[0] - 1} or windows.shape[0] > 9
    assert max(row for row, _ in positions) > windows.shape[0] - 3


def test_a_simple_crop_of_a_very_long_image_resizes_only_the_crop(pil_image):
    image = pil_image(1, 300).resize((1, 60_000))
    config = AugmentConfig(random_crop="simple")
    transform = TrainingTransform(config, Preprocessing(image_size=(224, 224)))
    torch.manual_seed(0)
    assert transform(image).shape == (3, 224, 224)


def test_a_simple_crop_replaces_the_default_crop_of_captioning():
    usual = make_config({"task": "caption"}).augment.min_crop
    assert usual != AugmentConfig.min_crop
    simple = make_config({"task": "caption", "random_crop": "simple"})
    assert simple.augment.min_crop == AugmentConfig.min_crop


def test_every_policy_of_the_config_can_be_built():
    for name in get_args(get_type_hints(AugmentConfig)["auto_augment"]):
        operations = build_operations(AugmentConfig(auto_augment=name, color_jitter=0.1), GREY)
        assert len(operations) == 1 + (name != "none")
