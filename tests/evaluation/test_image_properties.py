"""Properties of images against numpy, scipy and Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageStat
from scipy.ndimage import laplace

from vit.data.image_io import read_image
from vit.evaluation.image_properties import (
    ImageProperties,
    column_values,
    origin_folders,
    pixel_statistics,
)


def to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.fixture
def image():
    noise = np.random.default_rng(0).integers(0, 255, size=(20, 30, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def test_brightness_and_sharpness_equal_numpy_and_scipy(image):
    dark = image.point(lambda value: value // 3)
    found = pixel_statistics(torch.stack([to_tensor(one) for one in (image, dark)]))
    for (brightness, sharpness), one in zip(found, (image, dark), strict=True):
        assert brightness == pytest.approx(np.mean(ImageStat.Stat(one).mean) / 255)
        grey = np.asarray(one).mean(axis=2)
        assert sharpness == pytest.approx(laplace(grey)[1:-1, 1:-1].std(), rel=1e-4)


def test_a_blurred_image_is_less_sharp_and_a_flat_one_has_none(image):
    blurred = image.filter(ImageFilter.GaussianBlur(2))
    flat = Image.new("RGB", image.size, (9, 80, 200))
    found = pixel_statistics(torch.stack([to_tensor(one) for one in (image, blurred, flat)]))
    sharp, soft, none = (sharpness for _, sharpness in found)
    assert sharp > 5 * soft > 0
    assert none == pytest.approx(0, abs=1e-4)
    tiny = pixel_statistics(torch.full((1, 3, 2, 9), 255, dtype=torch.uint8))
    assert tiny == [(1.0, 0.0)]
    extreme = Image.fromarray(np.indices((9, 9)).sum(0).astype(np.uint8) % 2 * 255).convert("RGB")
    ((_, sharpest),) = pixel_statistics(to_tensor(extreme)[None])
    assert sharpest == pytest.approx(1020, rel=0.02)  # 4 * 255: no overflow


def test_a_batch_of_any_length_has_the_values_of_its_images():
    batch = torch.randint(256, (150, 3, 8, 9), dtype=torch.uint8)
    paths = [str(number) for number in range(150)]
    properties = ImageProperties()
    properties.add_pixels(paths, batch)
    for path, image in zip(paths, batch, strict=True):
        single = ImageProperties()
        single.add(path, (9, 8), "PNG", image)
        assert properties.pixels[path] == pytest.approx(single.pixels[path])


def test_headers_give_the_size_and_format_of_the_decoded_image(image, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # on its side
    paths = [str(tmp_path / name) for name in ("a.jpg", "b.png", "turned.jpg", "wrong.png")]
    for path in paths[:2]:
        image.save(path)
    image.save(paths[2], exif=exif)
    image.save(paths[3], "GIF")
    properties, observed = ImageProperties(), ImageProperties()
    properties.add_headers([*paths, str(tmp_path / "missing.jpg")])
    for path in paths:
        decoded = read_image(path)
        observed.add(path, decoded.size, decoded.format, to_tensor(decoded))
    assert properties.files == observed.files
    assert properties.files[paths[2]] == (20, 30, "JPEG")
    assert properties.files[paths[3]] == (30, 20, "GIF")
    values = {one.key: one.values for one in observed.features(paths)}
    assert values["file_type"] == ["JPEG", "PNG", "JPEG", "GIF"]
    assert values["size"] == [20.0] * 4
    assert values["aspect"] == [1.5, 1.5, pytest.approx(2 / 3), 1.5]


def test_an_image_that_was_not_read_has_no_values():
    values = ImageProperties().features(["a/1.png"], classes=["a"])
    unknown = {one.key for one in values if one.values == [None]}
    assert unknown == {"size", "aspect", "brightness", "sharpness", "file_type"}


def test_the_first_of_five_crops_is_measured(image):
    crops, single = ImageProperties(), ImageProperties()
    pixels = to_tensor(image)
    crops.add("x", image.size, "PNG", torch.stack([pixels, pixels // 2]))
    single.add("x", image.size, "PNG", pixels)
    assert crops.pixels == single.pixels


def test_folders_are_those_below_the_common_one_without_the_class():
    paths = ["/d/val/cat/site1/1.png", "/d/val/dog/site1/2.png", "/d/val/dog/site2/x/3.png"]
    assert origin_folders(paths, ["cat", "dog", "dog"]) == ["site1", "site1", "site2/x"]
    assert origin_folders(paths[:2]) == ["cat/site1", "dog/site1"]
    assert origin_folders(["/d/val/cat/1.png"] * 2, ["cat"] * 2) == [".", "."]
    assert origin_folders([]) == []


def test_classes_are_counted_here_or_in_training():
    paths, classes = ["1", "2", "3"], ["cat", "cat", "dog"]
    here, training = (
        next(one for one in features if one.key == "class_frequency")
        for features in (
            ImageProperties().features(paths, classes=classes),
            ImageProperties().features(paths, classes=classes, training_counts={"cat": 90}),
        )
    )
    assert here.values == [2.0, 2.0, 1.0]
    assert training.values == [90.0, 90.0, 0.0]
    assert "in training" in training.title


def test_cells_are_numbers_only_where_all_are():
    assert column_values(["1", "", "2.5"]) == [1.0, None, 2.5]
    assert column_values(["1", "", "front"]) == ["1", "(empty)", "front"]
    assert column_values(["1", "inf"]) == ["1", "inf"]
