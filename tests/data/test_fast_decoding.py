"""Quick JPEGs: the bytes that Pillow gives, refused where it refuses, and never without end."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from vit.config import AugmentConfig
from vit.data import image_io
from vit.data.image_io import count_scans, decode_jpeg, read_image, read_pixels
from vit.data.preprocessing import Preprocessing
from vit.data.transforms import FastCrop, TrainingTransform
from vit.errors import BadImage


def jpeg(image: Image.Image, **settings) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, settings.pop("kind", "JPEG"), **settings)
    return buffer.getvalue()


def whole(width: int, height: int) -> tuple[int, int]:
    return width, height


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


SETTINGS = [
    {"quality": 90},
    {"quality": 30, "subsampling": 0},
    {"quality": 95, "subsampling": 1},
    {"quality": 90, "progressive": True},
    {"quality": 90, "restart_marker_blocks": 2},
    {"quality": 90, "optimize": True},
    {"kind": "MPO"},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_bytes_are_those_of_pillow(pil_image, settings, mode):
    data = jpeg(pil_image(83, 61).convert(mode), **settings)
    quick = decode_jpeg(data)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(quick, expected)


def test_the_reader_takes_the_quick_way(pil_image, tmp_path, monkeypatch):
    (path := tmp_path / "x.jpg").write_bytes(jpeg(pil_image(40, 30)))
    monkeypatch.setattr(Image.core, "jpeg_decoder", None)  # Pillow's, which must not be missed
    assert read_image(path).size == (40, 30)


def judged(path, monkeypatch, *, quick: bool) -> np.ndarray | None:
    with monkeypatch.context() as patch:
        if not quick:
            patch.setattr(image_io, "decode_jpeg", lambda *_: None)
        try:
            return np.asarray(read_image(path))
        except BadImage:
            return None


def test_damage_is_judged_as_pillow_judges_it(pil_image, tmp_path, monkeypatch):
    random, path = np.random.default_rng(0), tmp_path / "x.jpg"
    good = jpeg(pil_image(64, 48), quality=85)
    taken = refused = 0
    for number in range(150):
        data = bytearray(good if number % 3 else good[: random.integers(2, len(good))])
        for place in random.integers(0, len(data), size=number % 4):
            data[place] ^= 1 << int(random.integers(8))
        path.write_bytes(data)
        ours, pillows = (judged(path, monkeypatch, quick=quick) for quick in (True, False))
        assert (ours is None) == (pillows is None), number
        if ours is not None:
            assert np.array_equal(ours, pillows), number
        taken, refused = taken + (ours is not None), refused + (ours is None)
    assert min(taken, refused) > 20


def scans(data: bytes, count: int) -> bytes:
    """A progressive JPEG whose last scan comes `count` times."""
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


def test_scans_without_end_are_refused(pil_image, tmp_path, monkeypatch):
    data = jpeg(pil_image(64, 48), progressive=True)
    assert 3 < count_scans(data) < 20
    assert count_scans(jpeg(pil_image(64, 48))) == 1
    (path := tmp_path / "x.jpg").write_bytes(scans(data, 500))
    assert count_scans(path.read_bytes()) > 500
    monkeypatch.setattr(image_io, "MAX_SCANNED_PIXELS", 64 * 48 * 400)
    for read in (read_image, lambda path: read_pixels(path, whole)):
        with pytest.raises(BadImage, match="scans of 64 x 48 pixels: too many"):
            read(path)
    path.write_bytes(data)
    read_image(path)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_pixels_are_those_of_the_image(pil_image, tmp_path, orientation, kind):
    path = tmp_path / "x"
    pil_image(50, 34).save(path, kind, exif=exif(orientation))
    assert np.array_equal(read_pixels(path, whole), np.asarray(read_image(path)))


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_large_image_is_decoded_small(pil_image, tmp_path, orientation):
    path = tmp_path / "x.jpg"
    path.write_bytes(jpeg(pil_image(640, 400), exif=exif(orientation), quality=95))
    asked = []

    def least(width: int, height: int) -> tuple[int, int]:
        asked.append((width, height))
        return width // 4, height // 4

    pixels = read_pixels(path, least)
    full = read_image(path)
    assert asked == [full.size]
    assert pixels.shape == (full.height // 4, full.width // 4, 3)
    small = np.asarray(full.reduce(4)).astype(int)
    assert np.abs(pixels - small).mean() < 2


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_quick_crop_shows_what_pillows_shows(pil_image, interpolation):
    image, box = pil_image(400, 300), (31, 20, 331, 290)
    crop = FastCrop((96, 112), interpolation, lambda *_: box)
    pixels = crop(lambda _least: np.array(image)).permute(1, 2, 0).numpy()
    expected = image.resize((112, 96), getattr(Image.Resampling, interpolation.upper()), box=box)
    assert np.abs(pixels.astype(int) - np.asarray(expected)).max() <= 2


def test_a_small_image_keeps_fractions_of_pixels(pil_image):
    image, box = pil_image(20, 16), (2.3, 1.7, 14.9, 12.1)
    crop = FastCrop((24, 24), "bicubic", lambda *_: box)
    pixels = crop(lambda _least: np.array(image)).permute(1, 2, 0).numpy()
    expected = image.resize((24, 24), Image.Resampling.BICUBIC, box=box)
    assert np.array_equal(pixels, np.asarray(expected))


@pytest.mark.parametrize(
    "changes",
    [{}, {"vflip": 1.0}, {"erase": 1.0}, {"rotate": 20.0, "translate": 0.1}, {"color_jitter": 0.4}],
)
def test_quick_and_exact_draw_the_same(pil_image, tmp_path, changes):
    path = tmp_path / "x.png"
    pil_image(90, 80).save(path)
    config, size = AugmentConfig(min_crop=0.9, **changes), Preprocessing(image_size=(48, 48))
    results = []
    for quick in (False, True):
        transform = TrainingTransform(config, size, fast_crop=quick)
        torch.manual_seed(3)
        read = transform(read_image(path)) if not quick else None
        pixels = (
            transform.apply(lambda min_size: read_pixels(path, min_size)) if read is None else read
        )
        results.append(pixels.to(torch.int16))
    assert results[0].shape == results[1].shape == (3, 48, 48)
    assert (results[0] - results[1]).abs().float().mean() < 3  # edges at whole pixels, and rounding
