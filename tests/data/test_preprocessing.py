"""Preprocessing against timm's evaluation transform, and its JSON form."""

import dataclasses
import json

import pytest
import torch
from timm.data import create_transform

from vit.data.preprocessing import MAX_RESIZED_PIXELS, Preprocessing, grid_of_aspect
from vit.errors import ConfigError

SIZES = [(50, 37), (33, 50), (8, 8), (1, 1), (22, 23), (102, 25), (9, 160)]
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.mark.parametrize("resize", ["crop", "squash", "pad"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop_share", [0.875, 0.9, 1.0])
@pytest.mark.parametrize("image_size", [(32, 32), (64, 64), (24, 48)])
def test_preprocessing_equals_timm(pil_image, resize, interpolation, crop_share, image_size):
    ours = Preprocessing(
        image_size=image_size,
        resize=resize,
        crop_share=crop_share,
        interpolation=interpolation,
        **IMAGENET,
    )
    theirs = create_transform(
        image_size if image_size[0] != image_size[1] else image_size[0],
        is_training=False,
        crop_pct=crop_share,
        crop_mode={"crop": "center", "squash": "squash", "pad": "border"}[resize],
        interpolation=interpolation,
        **IMAGENET,
    )
    for width, height in SIZES:
        image = pil_image(width, height)
        pixels = ours(image)
        assert pixels.dtype == torch.uint8
        assert pixels.shape == (3, *image_size)
        assert torch.equal(ours.normalise(pixels[None])[0], theirs(image))


def test_a_very_thin_image_is_not_resized_as_a_whole(pil_image, monkeypatch):
    ours = Preprocessing(image_size=(16, 16))
    image = pil_image(2, 400)
    whole = ours(image)
    monkeypatch.setattr("vit.data.preprocessing.MAX_RESIZED_PIXELS", 100)
    assert (ours(image).int() - whole.int()).abs().max() <= 1
    monkeypatch.undo()
    assert ours.resized_size(1, 30_000)[1] * 17 < MAX_RESIZED_PIXELS
    big = dataclasses.replace(ours, image_size=(224, 224))
    full_width, full_height = big.resized_size(1, 30_000)
    assert full_width * full_height > MAX_RESIZED_PIXELS
    assert big(pil_image(1, 30_000)).shape == (3, 224, 224)


def test_the_mean_colour_is_normalised_to_zero():
    ours = Preprocessing(image_size=(2, 2), **IMAGENET)
    colour = torch.tensor(ours.mean_colour, dtype=torch.uint8)[None, :, None, None]
    assert ours.normalise(colour).abs().max() < 0.01


def test_preprocessing_survives_json():
    ours = Preprocessing(image_size=(24, 48), resize="squash", crop_share=1.0, **IMAGENET)
    assert Preprocessing.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "must have exactly .*extra"),
        ({"image_size": 32}, "image_size=32"),
        ({"image_size": [32, 32, 32]}, "image_size"),
        ({"image_size": [32, 0]}, "image_size"),
        ({"image_size": [32.0, 32.0]}, "image_size"),
        ({"resize": "fit"}, "resize='fit': choose one of crop, squash, pad, native"),
        ({"resize": "native"}, "resize=native has one"),
        ({"interpolation": "nearest"}, "bilinear, bicubic"),
        ({"crop_share": 0}, "crop_share"),
        ({"crop_share": "most"}, "crop_share"),
        ({"mean": [0.5, 0.5]}, "mean"),
        ({"std": [0.5, 0.5, 0]}, "std"),
        ({"std": ["a", "b", "c"]}, "std"),
        ({"mean": [float("nan"), 0, 0]}, "mean"),
    ],
)
def test_invalid_stored_preprocessing_is_refused(change, message):
    values = Preprocessing(image_size=(32, 32)).to_dict() | change
    with pytest.raises(ConfigError, match=message):
        Preprocessing.from_dict(values)


def test_stored_preprocessing_with_a_missing_key_is_refused():
    values = Preprocessing(image_size=(32, 32)).to_dict()
    del values["crop_share"]
    with pytest.raises(ConfigError, match="crop_share"):
        Preprocessing.from_dict(values)


@pytest.mark.parametrize("patches", [1, 4, 196, 12 * 20])
def test_a_grid_of_the_image_s_aspect_ratio_has_at_most_the_given_patches(patches):
    for aspect in (1e-4, 0.01, 0.3, 0.5, 0.9, 1.0, 1.4, 2.0, 7.0, 300.0, 1e5):
        rows, cols = grid_of_aspect(aspect, patches)
        assert rows >= 1
        assert cols >= 1
        assert rows * cols <= patches
        if patches >= 196 and 0.25 <= aspect <= 4:
            assert rows * cols >= 0.85 * patches
            assert rows / cols == pytest.approx(aspect, rel=0.15)
    side = round(patches**0.5)
    assert grid_of_aspect(1.0, side * side) == (side, side)


@pytest.mark.parametrize(
    ("size", "expected"), [((50, 100), (40, 24)), ((100, 50), (24, 40)), ((3, 900), (128, 8))]
)
def test_keep_aspect_resizes_without_cropping(pil_image, size, expected):
    preprocessing = Preprocessing(image_size=(32, 32), crop_share=0.5)
    image = pil_image(*size)
    assert preprocessing.to_native(8)(image).shape == (3, *expected)
