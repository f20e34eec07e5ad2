"""Images in memory are read as files of the same pixels are, or refused in one line."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from vit.data.image_io import read_image, scale_to_8_bit
from vit.data.image_objects import named_images, to_rgb_image
from vit.errors import BadImage, ConfigError

RANDOM = np.random.default_rng(0)
RGB = RANDOM.integers(0, 256, (6, 9, 3), dtype=np.uint8)
RGB[0, :2] = [[0], [255]]
GREY, DEEP = RGB[..., 0], RANDOM.integers(0, 65536, (6, 9), dtype=np.uint16)
RGBA = np.dstack([RGB, RGB[..., :1]])


def pixels(source):
    return np.asarray(to_rgb_image(source, "images[0]"))


def chw(array):
    return torch.from_numpy(np.moveaxis(array, 2, 0).copy())


@pytest.mark.parametrize(
    "image",
    [
        RGB,
        RGB / 255,
        (RGB / 255).astype(np.float32),
        np.where(RGB > 127, RGB / 255 + 0.0015, RGB / 255 - 0.0015),  # rounding of a resize
        np.asfortranarray(RGB),
        np.moveaxis(RGB, 2, 0),
        chw(RGB),
        chw(RGB) / 255,
        (chw(RGB) / 255).requires_grad_(),
        (chw(RGB) / 255).double(),
        torch.from_numpy(RGB),
        Image.fromarray(RGB),
    ],
)
def test_pixels_of_every_kind_are_the_same(image):
    assert np.array_equal(pixels(image), RGB)


@pytest.mark.parametrize("array", [RGBA, GREY, DEEP, RGB])
def test_an_array_is_read_as_the_file_of_it(tmp_path, array):
    Image.fromarray(array).save(tmp_path / "a.png")
    expected = np.asarray(read_image(tmp_path / "a.png"))
    assert np.array_equal(pixels(array), expected)
    assert np.array_equal(pixels(Image.open(tmp_path / "a.png")), expected)
    if array.ndim == 2:
        assert np.array_equal(pixels(array[..., None]), expected)


def test_the_range_of_instruments_holds_in_memory_too(tmp_path):
    dark, told = DEEP // 16, []
    Image.fromarray(dark).save(tmp_path / "a.png")
    options = {"intensity_range": (100.0, 3000.0)}
    expected = np.asarray(read_image(tmp_path / "a.png", **options))
    assert expected.max() == 255
    for image in (dark, Image.open(tmp_path / "a.png")):
        assert np.array_equal(np.asarray(to_rgb_image(image, "x", **options)), expected)
    to_rgb_image(dark, "x", on_dark=told.append)
    assert told == [dark.max()]


@pytest.mark.parametrize("intensity_range", [None, (100.0, 3000.0)])
def test_16_bit_colours_are_read_as_a_file_of_them(intensity_range):
    colours, told = RANDOM.integers(0, 4096, (6, 9, 4), dtype=np.uint16), []
    colours[..., 3] = 65535
    options = {"intensity_range": intensity_range, "on_dark": told.append}
    expected = np.rint(colours[..., :3] / 257)
    if intensity_range is not None:
        expected = scale_to_8_bit(colours[..., :3], intensity_range)
    rgb = np.ascontiguousarray(colours[..., :3])
    for image in (rgb, np.moveaxis(rgb, 2, 0), chw(rgb), colours):
        assert np.array_equal(np.asarray(to_rgb_image(image, "x", **options)), expected)
    assert told == [] if intensity_range else [int(rgb.max())] * 4
    colours[..., 3] = 0
    assert (np.asarray(to_rgb_image(colours, "x", **options)) == 255).all()


def test_a_turned_jpeg_is_read_as_its_file(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(RGB).save(tmp_path / "a.jpg", exif=exif)
    opened = Image.open(tmp_path / "a.jpg")
    assert np.array_equal(pixels(opened), np.asarray(read_image(tmp_path / "a.jpg")))
    assert pixels(opened).shape == (9, 6, 3)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            RGB.astype(np.float32),
            r"array of float32 \(6, 9, 3\) from \d+ to 2\d\d; give floats in \[0, 1\]",
        ),
        (np.full((4, 4, 3), 1.01), "float64"),
        (torch.full((3, 4, 4), -1.5), r"float32 \(3, 4, 4\) from -1.5 to -1.5; .*before"),
        (np.full((4, 4, 3), np.nan), "from nan to nan"),
        (RGB.astype(np.int64), "int64 .*; give uint8"),
        (RGB.astype(np.int16), "int16 .*; give uint8"),
        (RGB > 9, "bool .*; give uint8"),
        (RGB[None], r"\(1, 6, 9, 3\); give one image of \(height, width, channels\)"),
        (chw(RGB)[None], r"\(1, 3, 6, 9\); give one image of \(channels, height, width\)"),
        (np.zeros((0, 4, 3), np.uint8), "give one image"),
        (np.zeros((7, 7, 7), np.uint8), "no side of 1, 3 or 4 is the channels"),
    ],
)
def test_what_is_no_image_is_refused_with_what_is_wanted(image, message):
    with pytest.raises(ConfigError, match=rf"^images\[0\] is an? .*?{message}"):
        pixels(image)


def test_a_damaged_or_closed_image_is_a_bad_image(tmp_path):
    with io.BytesIO() as file:
        Image.fromarray(RANDOM.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file, "PNG")
        cut = io.BytesIO(file.getvalue()[:3000])
    with pytest.raises(BadImage, match="cannot be read"):
        pixels(Image.open(cut))
    Image.fromarray(RGB).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as closed:
        pass
    with pytest.raises(BadImage, match="cannot be read"):
        pixels(closed)


def test_names_are_paths_or_places(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as opened:
        found = named_images([tmp_path / "b.png", "c.png", opened, RGB, chw(RGB)], first=10)
    names = [str(tmp_path / "b.png"), "c.png", str(tmp_path / "a.png"), "images[13]", "images[14]"]
    assert [one.name for one in found] == names
    assert [one.name for one in named_images(RGB[None])] == ["images[0]"]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("a.jpg", "images='a.jpg' is one path; give a list of paths"),
        (Image.fromarray(RGB), r"one image \(a PIL image of 9 x 6\); give a list: \[image\]"),
        (RGB, r"one image \(an array of uint8 \(6, 9, 3\)\); give a list: \[image\]"),
        (chw(RGB), r"one image \(a tensor of uint8 \(3, 6, 9\)\)"),
        (5, r"images=5 \(int\); give a list of paths, PIL images, numpy arrays or torch tensors"),
        (None, r"images=None \(NoneType\); give a list"),
        ({"a.jpg": 1}, "images=dict; give a list"),
        ([None], r"images\[0\] is None \(NoneType\); give paths"),
        ([b"\xff\xd8"], r"images\[0\] is bytes; .*PIL.Image.open\(io.BytesIO"),
        ([["a.jpg"]], r"images\[0\] is list; give paths"),
    ],
)
def test_other_types_are_refused_in_one_line(images, message):
    with pytest.raises(ConfigError, match=message) as error:
        list(named_images(images))
    assert "\n" not in str(error.value)
