"""Tiles of large images: those of the whole image's array, however the file stores it."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from vit.data.image_io import EncodedImage, set_max_pixels
from vit.data.image_tiles import FOREGROUND, TileGrid, open_tiles
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (70, 90, 3), dtype=np.uint8)
TIFFS: dict[str, dict[str, Any]] = {
    "tiles": {"tile": (16, 32)},
    "strips": {"rowsperstrip": 7},
    "deflate": {"tile": (32, 32), "compression": "deflate", "predictor": True},
    "lzw": {"rowsperstrip": 16, "compression": "lzw"},
    "big": {"tile": (16, 16), "bigtiff": True, "byteorder": ">"},
    "jpeg": {"tile": (16, 16), "compression": "jpeg"},
    "jpeg of rgb": {
        "rowsperstrip": 16,
        "compression": "jpeg",
        "compressionargs": {"outcolorspace": "rgb"},
    },
}


def write(path: Path, pixels: Any, **options: Any) -> Path:
    grey = pixels.ndim == 2
    known = {"photometric": "minisblack" if grey else "rgb", "metadata": None}
    tifffile.imwrite(path, pixels, **{**known, **options})
    return path


def tiles_of(path: Any, size: int = 32, overlap: int = 8) -> dict[int, Any]:
    image = open_tiles(path, TileGrid(size, overlap))
    return {n: np.asarray(tile) for n, tile in image.read(range(np.prod(image.shape)))}


def expected_tiles(pixels: Any, size: int = 32, overlap: int = 8) -> list[Any]:
    """Written without our grid: steps, then one more that ends at the edge."""
    height, width = pixels.shape[:2]
    tops = [y for y in range(0, height, size - overlap) if y + size < height] + [height - size]
    lefts = [x for x in range(0, width, size - overlap) if x + size < width] + [width - size]
    return [pixels[y : y + size, x : x + size] for y in tops for x in lefts]


@pytest.mark.parametrize("kind", TIFFS)
def test_tiles_of_a_tiff_equal_those_of_its_array(tmp_path, kind):
    path = write(tmp_path / "a.tif", PIXELS, **TIFFS[kind])
    found, expected = tiles_of(path), expected_tiles(tifffile.imread(path))
    assert [*found] == [*range(len(expected))]
    assert all(np.array_equal(found[n], tile) for n, tile in enumerate(expected))
    assert np.array_equal(tiles_of(EncodedImage("a", path.read_bytes()))[3], expected[3])


@pytest.mark.parametrize("inverted", [False, True])
def test_grey_becomes_three_channels(tmp_path, inverted):
    photometric = "miniswhite" if inverted else "minisblack"
    path = write(tmp_path / "a.tif", PIXELS[..., 0], photometric=photometric, tile=(16, 16))
    expected = expected_tiles(255 - PIXELS[..., 0] if inverted else PIXELS[..., 0])
    found = tiles_of(path)
    assert all(np.array_equal(found[n], np.dstack([e] * 3)) for n, e in enumerate(expected))


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "palette.tif"])
def test_other_images_are_decoded_as_a_whole(tmp_path, name):
    path = tmp_path / name
    image = Image.fromarray(PIXELS)
    (image.quantize(16) if name == "palette.tif" else image).save(path)
    with Image.open(path) as opened:
        expected = expected_tiles(np.asarray(opened.convert("RGB")))
    found = tiles_of(path)
    assert all(np.array_equal(found[n], tile) for n, tile in enumerate(expected))


def test_an_image_smaller_than_a_tile_lies_on_white(tmp_path):
    ((number, tile),) = tiles_of(write(tmp_path / "a.tif", PIXELS[:20, :24])).items()
    assert number == 0
    assert np.array_equal(tile[:20, :24], PIXELS[:20, :24])
    assert (tile[20:] == 255).all()
    assert (tile[:, 24:] == 255).all()


def test_background_is_left_out_unless_there_is_nothing_else(tmp_path):
    pixels = RANDOM.normal(240, 2, (64, 96, 3)).astype(np.uint8)
    plain = open_tiles(write(tmp_path / "plain.tif", pixels), TileGrid(32))
    pixels[40:50, 70:80] = 90
    path = write(tmp_path / "spot.tif", pixels)
    spot = open_tiles(path, TileGrid(32))
    assert [number for number, _ in spot.foreground()] == [5]
    assert spot.numbers().tolist() == [5]
    assert [number for number, _ in spot.foreground()] == [5]  # as it is known now
    assert [*plain.numbers()] == [*range(6)]
    preprocessing = Preprocessing(
        image_size=(16, 16), resize="squash", crop_share=1.0, tiles=TileGrid(32)
    )
    bag = preprocessing(preprocessing.read(path))
    resized = Image.fromarray(pixels[32:, 64:]).resize((16, 16), Image.Resampling.BICUBIC)
    assert np.array_equal(bag.permute(0, 2, 3, 1).numpy(), np.asarray(resized)[None])
    assert Preprocessing.from_dict(preprocessing.to_dict()) == preprocessing
    FOREGROUND.clear()


def test_the_limit_of_pixels_counts_what_is_decoded_at_once(tmp_path):
    try:
        set_max_pixels(1000)
        tiles_of(write(tmp_path / "a.tif", PIXELS, tile=(16, 16)))
        for name in ("a.png", "b.jpg"):
            Image.fromarray(PIXELS).save(tmp_path / name)
            with pytest.raises(BadImage, match="max-pixels"):
                tiles_of(tmp_path / name)
        with pytest.raises(BadImage, match="a strip or tile of 90 x 70"):
            tiles_of(write(tmp_path / "c.tif", PIXELS, rowsperstrip=70))
    finally:
        set_max_pixels(100_000_000)
    with pytest.raises(BadImage, match="larger --tiles"):
        tiles_of(write(tmp_path / "d.tif", np.zeros((2000, 2000), np.uint8)), 1, 0)
    with pytest.raises(BadImage, match=r"uint16.*save RGB of 8 bits"):
        tiles_of(write(tmp_path / "e.tif", PIXELS.astype(np.uint16)))


@pytest.mark.parametrize("kind", ["tiles", "deflate", "jpeg"])
def test_damage_is_named_and_bounded(tmp_path, kind):
    good = write(tmp_path / "good.tif", PIXELS, **TIFFS[kind]).read_bytes()
    path, named = tmp_path / "bad.tif", 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        data = bytearray(good)
        if seed % 2:
            del data[random.integers(8, len(data)) :]
        else:
            for at in random.integers(0, len(data), 20):
                data[at] = random.integers(0, 256)
        path.write_bytes(data)
        try:
            assert all(tile.shape == (32, 32, 3) for tile in tiles_of(path).values())
        except BadImage as bad:
            named += bad.path == str(path)
    assert named >= 15


def test_a_deflate_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("vit.data.instrument_images.has_imagecodecs", lambda: False)
    path = write(
        tmp_path / "a.tif", np.zeros((16, 16), np.uint8), compression="deflate", tile=(16, 16)
    )
    with tifffile.TiffFile(path) as file:
        (at,) = file.pages.first.dataoffsets
        tag = file.pages.first.tags[325].valueoffset
    bomb, data = zlib.compress(bytes(2**24)), bytearray(path.read_bytes())
    data[at:] = bomb
    data[tag : tag + 4] = len(bomb).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(BadImage, match="holds more than its size"):
        tiles_of(path, 16, 0)
