"""Images of any channels: Pillow's operations, float64's numbers, and a jitter within bounds."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vit.config import AugmentConfig
from vit.data.auto_augment import ChannelJitter
from vit.data.instrument_images import ChannelImage, ChannelSpec
from vit.data.preprocessing import Preprocessing
from vit.data.transforms import TrainingTransform


def spec_of(channels: int, **more: Any) -> ChannelSpec:
    many = {"low": 0.0, "high": 255.0, "mean": 0.5, "std": 0.25}
    ends = {name: (value,) * channels for name, value in many.items()}
    order = tuple(range(channels))
    return ChannelSpec(**{"value_type": "uint8", "count": channels, "order": order, **ends, **more})


@pytest.mark.parametrize("rotate", [0, 20])
@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_channels_of_bytes_are_resized_cropped_and_flipped_nearly_as_pillow_does(resample, rotate):
    pixels = np.random.default_rng(1).integers(64, 192, (37, 50, 3), np.uint8)  # never clipped
    one, several = Image.fromarray(pixels), ChannelImage(pixels)
    how = {"image_size": (16, 20), "interpolation": resample, "crop_share": 0.8}
    rgb = Preprocessing(**how)
    own = Preprocessing(**how, channels=spec_of(3))
    assert abs(rgb(one).int() - own(several).int()).max() <= 2  # bytes between passes
    for crop in ({"random_crop": "simple"}, {"min_crop": 0.5}):
        config = AugmentConfig(**crop, hflip=0.5, vflip=0.5, rotate=rotate, erase=0.5)
        for seed in range(20):
            made = []
            for how_read, image in ((rgb, one), (own, several)):
                torch.manual_seed(seed)
                made.append(TrainingTransform(config, how_read)(image).int())
            assert abs(made[0] - made[1]).max() <= 2


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
def test_normalised_values_are_those_of_float64(kind):
    random = np.random.default_rng(2)
    top = {"uint8": 256, "uint16": 65536, "float32": 1000.1}[kind]
    values = random.uniform(999.9 if kind == "float32" else 0, top, (2, 3, 8, 8)).astype(kind)
    low = (999.95, 1000.0, 1000.05) if kind == "float32" else (3.0, 50.0, 100.0)
    high = (1000.0, 1000.04, 1000.08) if kind == "float32" else (90.0, 99.0, top - 9.0)
    mean, std = (0.2, 0.5, 0.9), (0.1, 0.3, 0.02)
    spec = spec_of(3, value_type=kind, low=low, high=high, mean=mean, std=std)
    found = Preprocessing(image_size=(8, 8), channels=spec).normalise(torch.from_numpy(values))
    columns = [np.float64(one)[:, None, None] for one in (np.float32(low), np.float32(high))]
    exact = (values.astype(np.float64).clip(*columns) - columns[0]) / (columns[1] - columns[0])
    exact = (exact - np.float64(mean)[:, None, None]) / np.float64(std)[:, None, None]
    assert np.abs(found.numpy() - exact).max() < 1e-4


def test_a_step_copies_no_numbers_of_channels_to_its_device(monkeypatch):
    size = Preprocessing(image_size=(8, 8), channels=spec_of(5, low=(1.5,) * 5))
    images = torch.randint(0, 256, (2, 5, 8, 8), dtype=torch.uint8)
    expected = size.normalise(images)
    constants = size.constants(images.device, torch.float32)
    monkeypatch.delattr(torch, "tensor")
    assert torch.equal(size.normalise(images, constants=constants), expected)


def test_jitter_is_repeatable_within_bounds_and_leaves_a_channel_out_at_times():
    spec = spec_of(4, value_type="uint16", low=(100.0,) * 4, high=(1100.0,) * 4)
    values = np.random.default_rng(3).integers(400, 700, (40, 40, 4)).astype(np.uint16)
    jitter, image, dropped = ChannelJitter(0.3, spec), ChannelImage(values), 0
    before = (values.astype(float) - 100) / 1000
    for seed in range(100):
        torch.manual_seed(seed)
        found = jitter(image).to_array()
        torch.manual_seed(seed)
        assert np.array_equal(jitter(image).to_array(), found)
        assert found.dtype == np.uint16
        shares = (found.astype(float) - 100) / 1000
        left = [n for n in range(4) if len(np.unique(found[..., n])) == 1]
        assert len(left) <= 1
        assert all(abs(shares[0, 0, n] - 0.5) < 1e-3 for n in left)
        dropped += len(left)
        for n in {*range(4)} - {*left}:
            assert 0.7 - 0.01 < shares[..., n].mean() / before[..., n].mean() < 1.3 + 0.01
            assert shares[..., n].std() < 1.3 * 1.3 * before[..., n].std() + 0.035
    assert 2 < dropped < 25  # a tenth
    assert np.array_equal(image.to_array(), values)
