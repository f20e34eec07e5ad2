"""Corruptions against scipy, colorsys and Pillow; the same everywhere, and worse by severity."""

import colorsys
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter

from vit.data.corruptions import CORRUPTIONS, SEVERITIES, Corruption
from vit.data.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(image_size=(64, 64), crop_share=1.0)


def apply(name, severity, image, **settings):
    settings = {"preprocessing": PREPROCESSING, **settings}
    found = Corruption(name=name, severity=severity, **settings)(image)
    assert (found.mode, found.size) == ("RGB", image.size)
    return np.asarray(found, dtype=np.float64)


@pytest.fixture(scope="module")
def image():
    """A smooth gradient with a dark square, 64 x 64."""
    rows, cols = np.mgrid[0:64, 0:64] / 64
    pixels = np.stack([200 * rows, 180 * cols, 90 + 60 * rows * cols], axis=2)
    pixels[20:40, 20:40] = (30, 10, 0)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_higher_severity_changes_an_image_more(image, name):
    original = np.asarray(image, dtype=np.float64)
    changes = [np.abs(apply(name, each, image) - original).mean() for each in SEVERITIES]
    assert changes == sorted(changes)
    assert changes[0] > 0.1


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_threads_order_and_copies_do_not_matter(image, name):
    corruption = Corruption(name=name, severity=3, preprocessing=PREPROCESSING)
    expected = corruption(image).tobytes()
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(corruption, [image.rotate(90), image.copy(), image, image.copy()])]
    assert {one.tobytes() for one in found[1:]} == {expected}


def test_the_seed_and_the_image_decide_the_noise(image):
    first = apply("gaussian_noise", 1, image)
    assert (first != apply("gaussian_noise", 1, image, seed=1)).any()
    grey = [Image.new("RGB", (64, 64), (value,) * 3) for value in (127, 128)]
    noises = [
        apply("gaussian_noise", 1, one) - value for one, value in zip(grey, (127, 128), strict=True)
    ]
    assert (noises[0] != noises[1]).any()
    for severity, share in zip(SEVERITIES[:3], (0.08, 0.12, 0.18), strict=True):
        noise = apply("gaussian_noise", severity, grey[0]) - 127
        assert noise.std() == pytest.approx(255 * share, rel=0.05)
        assert noise.mean() == pytest.approx(0, abs=2)


def test_blur_is_scipys_with_a_width_relative_to_the_image(image):
    expected = gaussian_filter(np.asarray(image, dtype=float), (6 * 64 / 224,) * 2, axes=(0, 1))
    found = apply("gaussian_blur", 5, image)
    inside = np.abs(found - expected)[8:-8, 8:-8]
    assert inside.max() < 5
    assert inside.mean() < 1


def test_brightness_is_added_to_the_value_of_hsv(image):
    found = apply("brightness", 2, image)
    for row, col in ((0, 0), (5, 60), (30, 30), (60, 3), (63, 63)):
        hue, saturation, value = colorsys.rgb_to_hsv(*(np.array(image.getpixel((col, row))) / 255))
        expected = 255 * np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + 0.2, 1)))
        np.testing.assert_allclose(found[row, col], expected, atol=0.51)


def test_contrast_keeps_the_mean_colour(image):
    original = np.asarray(image, dtype=np.float64)
    found = apply("contrast", 1, image)
    np.testing.assert_allclose(found.mean((0, 1)), original.mean((0, 1)), atol=0.2)
    np.testing.assert_allclose(found.std((0, 1)), 0.4 * original.std((0, 1)), rtol=0.02)


def test_jpeg_is_pillows(image):
    content = io.BytesIO()
    image.save(content, "JPEG", quality=15)
    expected = np.asarray(Image.open(content))
    assert (apply("jpeg", 3, image) == expected).all()


def test_rotation_is_to_either_side(image):
    sides = []
    for turn in range(8):
        one = image.rotate(45 * turn)
        fill = tuple(np.rint(np.asarray(one).mean((0, 1))).astype(int).tolist())
        found = apply("rotation", 5, one)
        both = [
            np.asarray(one.rotate(angle, Image.Resampling.BILINEAR, fillcolor=fill))
            for angle in (30, -30)
        ]
        matches = [bool((found == side).all()) for side in both]
        assert sum(matches) == 1
        sides.append(matches[0])
    assert len({*sides}) == 2


@pytest.mark.parametrize(
    ("size", "expected"), [((640, 320), (128, 64)), ((40, 300), (40, 300)), ((64, 64), (64, 64))]
)
def test_large_images_are_first_reduced_as_the_network_does(size, expected):
    image = Image.new("RGB", size, (90, 120, 40))
    found = Corruption(name="contrast", severity=1, preprocessing=PREPROCESSING)(image)
    assert found.size == expected


def test_a_reduced_image_is_not_resized_again():
    noise = np.random.default_rng(0).integers(0, 255, size=(150, 211, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    for preprocessing in (
        Preprocessing(image_size=(64, 64)),
        Preprocessing(image_size=(48, 64)),
        Preprocessing(image_size=(64, 64), resize="squash"),
    ):
        resized = image.resize(preprocessing.resized_size(*image.size), Image.Resampling.BICUBIC)
        found = preprocessing(resized)
        assert (found == preprocessing(image)).all()
