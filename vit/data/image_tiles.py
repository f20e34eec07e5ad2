"""Large images as bags of tiles, which are read without decoding the whole image.

    grid          tiles of `size` x `size` pixels, `size - overlap` apart, row by row; the last row
                  and column end at the edge, and an image smaller than a tile lies on white
    background    a tile of nearly one colour: no channel deviates by BACKGROUND; left out, unless
                  the image has nothing else

A TIFF of grey or RGB of 8 bits is decoded by its strips and tiles, each of which is decoded once in
a pass over the image; any other image as a whole, within the limit of pixels.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageStat

from vit.config import DataConfig
from vit.data.image_io import (
    EncodedImage,
    PathLike,
    Pixels,
    decode_jpeg_part,
    errors_as_bad_image,
    file_fingerprint,
    is_reduced,
    max_pixels,
    open_file,
    read_header,
    read_image,
)
from vit.data.instrument_images import (
    BUILT_IN,
    GREY,
    GREY_INVERTED,
    RGB,
    TIFF,
    WITH_IMAGECODECS,
    Array,
    UnusableFile,
    check_inflated,
    has_imagecodecs,
    open_tiff,
    present_segments,
)
from vit.errors import BadImage

BACKGROUND = 6.0
"""Standard deviation of 8-bit values: empty glass, sky and borders with the noise of a camera."""
MAX_TILES = 2**20
JPEG, YCBCR = 7, 6
"""Compression and photometric interpretation."""
ADOBE_RGB = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"
"""Marker of a JPEG whose colours are not converted."""


@dataclass(frozen=True)
class TileGrid:
    """Tiles of an image; sizes are in its pixels."""

    size: int
    overlap: int = 0

    @classmethod
    def from_config(cls, data: DataConfig) -> "TileGrid | None":
        """The tiles that `data` sets; None: images are read as a whole."""
        return cls(data.tiles[0], data.tile_overlap) if data.tiles else None

    def starts(self, side: int) -> list[int]:
        """Where tiles begin along a side of an image."""
        last = max(side - self.size, 0)
        return [*range(0, last, self.size - self.overlap), last]


class Segments(NamedTuple):
    """The parts of an image that are decoded one by one, row by row."""

    height: int
    width: int
    decode: Callable[[int], Pixels]


@dataclass(frozen=True)
class TiledImage:
    """An image of which tiles are read when they are iterated over.

    Args:
        size: (width, height) in pixels.
        key: What its content is known by, of a file.
    """

    name: str
    size: tuple[int, int]
    grid: TileGrid
    open: Callable[[], AbstractContextManager[Segments]]
    format: str = ""
    key: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        if (count := math.prod(self.shape)) > MAX_TILES:
            why = f"{count:,} tiles are more than {MAX_TILES:,}: choose larger --tiles"
            raise BadImage(self.name, why)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols) of tiles."""
        width, height = self.size
        return len(self.grid.starts(height)), len(self.grid.starts(width))

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, Image.Image]]:
        """Tiles by their ascending numbers, RGB; BadImage where one cannot be decoded."""
        (width, height), size = self.size, self.grid.size
        places = [*product(self.grid.starts(height), self.grid.starts(width))]
        decoded: dict[int, Pixels] = {}
        with errors_as_bad_image(self.name), self.open() as (rows, cols, decode):
            across = math.ceil(width / cols)
            for number in numbers:
                top, left = places[number]
                bottom, right = min(top + size, height), min(left + size, width)
                for old in [old for old in decoded if (old // across + 1) * rows <= top]:
                    del decoded[old]
                tile = np.full((size, size, 3), 255, np.uint8)
                wanted = product(
                    range(top // rows, math.ceil(bottom / rows)),
                    range(left // cols, math.ceil(right / cols)),
                )
                for row, col in wanted:
                    at = row * across + col
                    if at not in decoded:
                        decoded[at] = decode(at)
                    y, x = row * rows, col * cols
                    part = decoded[at][max(top - y, 0) : bottom - y, max(left - x, 0) : right - x]
                    y, x = max(y - top, 0), max(x - left, 0)
                    tile[y : y + part.shape[0], x : x + part.shape[1]] = part
                yield number, Image.fromarray(tile)

    def foreground(self) -> Iterator[tuple[int, Image.Image]]:
        """The tiles that are no background, with their numbers; of an image without any, all."""
        if (known := FOREGROUND.get(self.key)) is not None:
            yield from self.read(known.tolist())
            return
        found = False
        for number, tile in self.read(range(math.prod(self.shape))):
            if not is_background(tile):
                found = True
                yield number, tile
        if not found:
            yield from self.read(range(math.prod(self.shape)))

    def numbers(self) -> Array:
        """The numbers of `foreground`; the first time, all tiles are read."""
        found = FOREGROUND.get(self.key)
        if found is None:
            found = np.array([number for number, _ in self.foreground()], np.int32)
            if self.key is not None:
                FOREGROUND[self.key] = found
        return found

    def thumbnail(self, side: int) -> Image.Image:
        """The whole image with a longer side of `side` pixels, put together from its tiles."""
        scale = side / max(self.size)
        width, height = (max(round(scale * one), 1) for one in self.size)
        small, box = Image.new("RGB", (width, height)), math.ceil(scale * self.grid.size)
        tops, lefts = (self.grid.starts(one) for one in self.size[::-1])
        for number, tile in self.read(range(math.prod(self.shape))):
            row, col = divmod(number, len(lefts))
            place = (int(scale * lefts[col]), int(scale * tops[row]))
            small.paste(tile.resize((box, box), Image.Resampling.BOX), place)
        return small


def is_background(tile: Image.Image) -> bool:
    """Whether a tile is of nearly one colour."""
    extremes: Any = tile.getextrema()
    if all(high - low < 2 * BACKGROUND for low, high in extremes):
        return True  # most are, without a sum over their pixels
    return max(ImageStat.Stat(tile).stddev) < BACKGROUND


FOREGROUND: dict[tuple[Any, ...] | None, Array] = {}
"""Numbers of the tiles that are no background, of the files of which this process, or that from
which it was forked, has asked for them: those of a training."""


def open_tiles(path: PathLike | EncodedImage, grid: TileGrid) -> TiledImage:
    """Read the header of the image at `path`; BadImage if its tiles cannot be read."""
    with errors_as_bad_image(path) as name:
        key = None if isinstance(path, EncodedImage) else (file_fingerprint(name), name, grid)
        with open_file(path, limit=None) as file:
            if (page := _tiff_page(file)) is not None:
                _segments(file, page)  # refuses what is missing
                size = page.imagewidth, page.imagelength
                return TiledImage(name, size, grid, partial(_open_segments, path), "TIFF", key)
        header = read_header(path)
        if header.deep:
            raise UnusableFile(f"{header.mode}: tiles are of 8 bits; save RGB of 8 bits")
        if is_reduced(path):
            raise UnusableFile(
                f"a JPEG of more than {max_pixels():,} pixels, which is decoded as a whole: save "
                "it as a tiled TIFF, or raise --max-pixels"
            )
        whole = Segments(header.height, header.width, lambda _: np.asarray(read_image(path)))
        size = header.width, header.height
        return TiledImage(name, size, grid, lambda: nullcontext(whole), header.format, key)


def tiles_in_memory(image: Image.Image, name: str, grid: TileGrid) -> TiledImage:
    whole = Segments(image.height, image.width, lambda _: np.asarray(image))
    return TiledImage(name, image.size, grid, lambda: nullcontext(whole))


@contextmanager
def _open_segments(path: PathLike | EncodedImage) -> Iterator[Segments]:
    with open_file(path, limit=None) as file:
        yield _segments(file, _tiff_page(file))


def _tiff_page(file: BinaryIO) -> Any:
    """The first page of a TIFF whose strips and tiles are decoded one by one; else None."""
    start = file.read(4)
    file.seek(0)
    if not TIFF.match(start):
        return None
    page: Any = open_tiff(file).pages.first
    photometric, channels = int(page.photometric), page.samplesperpixel
    colours = {GREY_INVERTED: 1, GREY: 1, RGB: 3, YCBCR: 3}.get(photometric)
    compressions = (*BUILT_IN, JPEG, *(WITH_IMAGECODECS if has_imagecodecs() else ()))
    if photometric == YCBCR:
        compressions = (JPEG,)
    plain = page.dtype == np.uint8 and page.bitspersample == 8 and page.imagedepth == 1
    one_plane = channels == colours and (channels == 1 or page.planarconfig == 1)
    upright = page.tags.valueof(274, default=1) == 1
    read = plain and one_plane and upright and page.compression in compressions
    return page if read and page.predictor in (1, 2) else None


def _segments(file: BinaryIO, page: Any) -> Segments:
    """The strips or tiles of a page, none of which is missing."""
    spans = present_segments(page, page.databytecounts)
    height, width = (page.tilelength, page.tilewidth) if page.is_tiled else page.chunks[:2]
    if height * width > max_pixels():
        raise UnusableFile(
            f"a strip or tile of {width} x {height} is more than {max_pixels():,} pixels: save "
            "smaller ones, or raise --max-pixels"
        )
    photometric = int(page.photometric)
    across = math.ceil(page.imagewidth / width)

    def decode(number: int) -> Pixels:
        at, size = spans[number]
        file.seek(at)
        data = file.read(size)
        if len(data) < size:
            raise UnusableFile("damaged or cut short (strips or tiles beyond the end of the file)")
        if page.compression == JPEG:
            tables = b"\xff\xd8" if page.jpegtables is None else page.jpegtables[:-2]
            marker = ADOBE_RGB if photometric == RGB else b""
            return decode_jpeg_part(tables + marker + data[2:], height, width)
        check_inflated(page, data)
        values: Pixels = page.decode(data, number)[0][0]
        least = min(height, page.imagelength - number // across * height)
        if values.shape[0] < least or values.shape[1] < min(width, page.imagewidth):
            raise UnusableFile("a strip or tile is smaller than its size")
        values = 255 - values if photometric == GREY_INVERTED else values
        return values.repeat(3, axis=2) if values.shape[2] == 1 else values

    return Segments(height, width, decode)
