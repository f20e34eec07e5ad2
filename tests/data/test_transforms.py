"""Training transforms: shapes, ranges, and where their randomness comes from."""

import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image

from vit.config import AugmentConfig
from vit.data.image_io import read_image, read_pixels
from vit.data.preprocessing import Preprocessing
from vit.data.transforms import FastCrop, TrainingTransform, random_crop_box, random_erasing

PREPROCESSING = Preprocessing(image_size=(24, 32))
NOTHING = {"min_crop": 1.0, "hflip": 0.0}
OPTIONS = {
    "crop": {"hflip": 0.0},
    "hflip": NOTHING | {"hflip": 0.5},
    "vflip": NOTHING | {"vflip": 0.5},
    "rotate": NOTHING | {"rotate": 20.0},
    "translate": NOTHING | {"translate": 0.2},
    "color_jitter": NOTHING | {"color_jitter": 0.4},
    "randaugment": NOTHING | {"auto_augment": "randaugment"},
    "trivialaugment": NOTHING | {"auto_augment": "trivialaugment"},
    "three": NOTHING | {"auto_augment": "three"},
    "simple": {"random_crop": "simple", "hflip": 0.0},
    "erase": NOTHING | {"erase": 0.5},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_random_by_torch_s_generator_only(pil_image, option):
    transform = TrainingTransform(AugmentConfig(**OPTIONS[option]), PREPROCESSING)
    transform = pickle.loads(pickle.dumps(transform))
    image = pil_image(40, 30)
    before = random.getstate(), np.random.get_state()[1].tolist()
    results = []
    for seed in [*range(12), 0]:
        torch.manual_seed(seed)
        results.append(transform(image))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert all(r.shape == (3, 24, 32) and r.dtype == torch.uint8 for r in results)
    assert torch.equal(results[0], results[-1])
    assert any(not torch.equal(results[0], other) for other in results)


def test_without_augmentation_it_equals_the_evaluation_transform(pil_image):
    transform = TrainingTransform(AugmentConfig(**NOTHING), PREPROCESSING)
    state = torch.get_rng_state()
    assert torch.equal(transform(pil_image(40, 30)), PREPROCESSING(pil_image(40, 30)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("option", "axis"), [("hflip", 2), ("vflip", 1)])
def test_a_flip_of_probability_one_flips_every_image(pil_image, option, axis):
    transform = TrainingTransform(AugmentConfig(**NOTHING | {option: 1.0}), PREPROCESSING)
    plain = PREPROCESSING(pil_image(40, 30))
    assert torch.equal(transform(pil_image(40, 30)), plain.flip(axis))


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (17, 5), (160, 160)])
def test_images_of_any_size_are_transformed(pil_image, size):
    config = AugmentConfig(rotate=10, translate=0.1, erase=1.0)
    transform = TrainingTransform(config, PREPROCESSING)
    assert transform(pil_image(*size)).shape == (3, 24, 32)


def test_random_crops_have_the_given_areas_and_aspect_ratios():
    torch.manual_seed(0)
    shares, ratios = [], []
    for _ in range(500):
        left, top, right, bottom = random_crop_box(40, 40, 0.25, 4 / 3)
        assert 0 <= left < right <= 40
        assert 0 <= top < bottom <= 40
        shares.append((right - left) * (bottom - top) / 1600)
        ratios.append((right - left) / (bottom - top))
    assert 0.249 < min(shares) < 0.3
    assert max(shares) > 0.9
    assert 0.749 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.334


def test_a_very_thin_image_is_cropped_at_its_centre():
    left, top, right, bottom = random_crop_box(1, 300, 0.9, 4 / 3)
    assert (left, right) == (0, 1)
    assert bottom - top == pytest.approx(4 / 3)
    assert top + bottom == pytest.approx(300)


def test_random_erasing_fills_one_rectangle_with_the_mean_colour():
    torch.manual_seed(1)
    pixels = torch.zeros(3, 24, 32, dtype=torch.uint8)
    random_erasing(pixels, (1, 2, 3))
    painted = pixels[0] == 1
    assert 0.01 < painted.float().mean() < 0.4
    rows, cols = painted.any(1), painted.any(0)
    assert torch.equal(painted, rows[:, None] & cols[None])
    assert torch.equal(pixels[:, painted].unique(dim=1).flatten(), torch.tensor([1, 2, 3]))


def test_translation_fills_borders_with_the_mean_colour(pil_image):
    config = AugmentConfig(**NOTHING | {"translate": 1.0})
    torch.manual_seed(4)
    white = pil_image(32, 24).point(lambda _: 255)
    pixels = TrainingTransform(config, PREPROCESSING)(white)
    assert set(pixels.unique().tolist()) == {128, 255}


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_fast_crop_equals_pillow_s_up_to_rounding(pil_image, interpolation):
    image, box = pil_image(400, 300), (31, 20, 331, 290)
    crop = FastCrop(lambda _: (96, 112), interpolation, lambda *_: box)
    pixels = crop(lambda _min_size: np.array(image)).permute(1, 2, 0).numpy()
    expected = image.resize((112, 96), getattr(Image.Resampling, interpolation.upper()), box=box)
    assert np.abs(pixels.astype(int) - np.asarray(expected)).max() <= 2


def test_the_fast_crop_of_a_small_image_keeps_fractions_of_pixels(pil_image):
    image, box = pil_image(20, 16), (2.3, 1.7, 14.9, 12.1)
    crop = FastCrop(lambda _: (24, 24), "bicubic", lambda *_: box)
    pixels = crop(lambda _min_size: np.array(image)).permute(1, 2, 0).numpy()
    expected = image.resize((24, 24), Image.Resampling.BICUBIC, box=box)
    assert np.array_equal(pixels, np.asarray(expected))


@pytest.mark.parametrize(
    "changes",
    [{}, {"vflip": 1.0}, {"erase": 1.0}, {"rotate": 20.0, "translate": 0.1}, {"color_jitter": 0.4}],
)
def test_fast_and_exact_crops_use_the_same_random_numbers(pil_image, tmp_path, changes):
    path = tmp_path / "x.png"
    pil_image(90, 80).save(path)
    config, size = AugmentConfig(min_crop=0.9, **changes), Preprocessing(image_size=(48, 48))
    results = []
    for fast in (False, True):
        transform = TrainingTransform(config, size, fast_crop=fast)
        torch.manual_seed(3)
        read = transform(read_image(path)) if not fast else None
        pixels = (
            transform.apply(lambda min_size: read_pixels(path, min_size)) if read is None else read
        )
        results.append(pixels.to(torch.int16))
    assert results[0].shape == results[1].shape == (3, 48, 48)
    assert (results[0] - results[1]).abs().float().mean() < 3  # edges at whole pixels, and rounding


@pytest.mark.parametrize("shape", [(32, 24), (40, 30)])
@pytest.mark.parametrize(
    "changes",
    [{"translate": 0.2}, {"vflip": 0.5}, {"erase": 0.5}, {"translate": 1.0, "vflip": 1.0}],
)
def test_images_that_are_only_moved_are_those_of_pillow(pil_image, shape, changes):
    image = pil_image(*shape)
    transform = TrainingTransform(AugmentConfig(min_crop=1.0, hflip=0.5, **changes), PREPROCESSING)
    pixels = np.array(image)
    for seed in range(12):
        torch.manual_seed(seed)
        expected = transform(image)
        torch.manual_seed(seed)
        found = transform.apply(lambda _min_size: pixels)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
    assert np.array_equal(pixels, np.asarray(image))  # those of a cache stay as they are


@pytest.mark.parametrize("resize", ["pad", "native"])
@pytest.mark.parametrize("fast", [False, True])
def test_training_crops_have_the_shape_of_the_image(pil_image, resize, fast):
    patch_size = 8 if resize == "native" else None
    size = Preprocessing(image_size=(96, 96), resize=resize, crop_share=1, patch_size=patch_size)
    transform = TrainingTransform(AugmentConfig(min_crop=0.4, crop_ratio=1), size, fast_crop=fast)
    image = pil_image(300, 100)
    for seed in range(5):
        torch.manual_seed(seed)
        pixels = transform.apply(lambda _: np.asarray(image)) if fast else transform(image)
        if resize == "native":
            assert pixels.shape == (3, 56, 160)
        else:  # 96 x 32 in the middle of the mean colour
            assert pixels.shape == (3, 96, 96)
            assert (pixels[:, :32] == 128).all()
            assert (pixels[:, 64:] == 128).all()
            assert pixels[:, 32:64].float().std() > 5
