"""One safe reader of pictures for training, evaluation and prediction.

A file gives an upright RGB picture or a BadImage, and nothing else: no hang on a pipe, no bomb, no
half picture, no exception of a parser. What a picture means:

    several frames       the first
    EXIF orientation     applied; a damaged tag is ignored
    transparency         over white
    16 bits a channel    scaled, not clipped; 32-bit integers count as 16-bit
    floating point       0 to 1, or 0 to 255 where a value is above 1
"""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from vit.data.colours import to_rgb
from vit.data.jpeg import SCANNED_PIXELS, Pixels, count_scans, decode_jpeg
from vit.data.regular import Refused, all_of, open_regular
from vit.data.silence import QUIET
from vit.data.strangers import guessed
from vit.errors import BadImage

Least = Callable[[int, int], tuple[int, int]]
"""Told (width, height) of a picture, how large (width, height) it must at least be decoded."""

# Only parsers of formats that people keep pictures in; the common ones first.
FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"),
    *("AVIF", "JPEG2000", "ICO", "DIB", "QOI"),
)
MAX_PIXELS = 100_000_000
"""Below Pillow's own limit of 179 million: a picture may need eight bytes a pixel on the way."""
PNG_CHUNKS = 10_000

UPRIGHT: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

ACROSS = {UPRIGHT[number] for number in (5, 6, 7, 8)}
"""Turns that swap width and height."""
JPEGS = {"JPEG", "MPO"}


def read_image(
    path: str | os.PathLike[str], *, admit: Callable[[int], object] = lambda _pixels: None
) -> Image.Image:
    """The picture in the file `path`: its first frame, upright, RGB.

    Args:
        path: Of the file.
        admit: Told how many pixels it has before they are decoded; may wait until there is room.

    Raises:
        BadImage: Anything else; the reason is short and names no path.
    """
    with _opened(path) as image:
        admit(image.width * image.height)
        pixels = _jpeg(image, None)
        if pixels is None:
            image.load()
        turn = UPRIGHT.get(_orientation(image))
        colour = to_rgb(image) if pixels is None else Image.fromarray(pixels)
        return colour if turn is None else colour.transpose(turn)


def read_pixels(path: str | os.PathLike[str], least: Least) -> Pixels:
    """The picture in the file `path` as (height, width, 3) bytes: its first frame, upright, RGB.

    Args:
        path: Of the file.
        least: Asked before a JPEG is decoded; where that is quicker and no smaller than this, it
            is decoded at a half, a quarter or an eighth of its size.

    Raises:
        BadImage: As in `read_image`.
    """
    with _opened(path) as image:
        pixels = None
        if image.format in JPEGS:
            turn = UPRIGHT.get(_orientation(image))
            wide = turn in ACROSS
            wanted = least(*image.size[::-1]) if wide else least(*image.size)
            pixels = _jpeg(image, wanted[::-1] if wide else wanted)
        if pixels is None:
            image.load()
            turn = UPRIGHT.get(_orientation(image))
        elif turn is None:
            return pixels
        colour = to_rgb(image) if pixels is None else Image.fromarray(pixels)
        return np.array(colour if turn is None else colour.transpose(turn))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """All bytes of the file `path`, which is not looked into.

    Raises:
        BadImage: It is no regular file, too long, or cannot be read.
    """
    with _named(path) as name, open_regular(name) as file:
        return all_of(file)


def count_pixels(path: str | os.PathLike[str]) -> int:
    """Pixels of the picture in `path` as its header says, known before they take memory.

    Raises:
        BadImage: As in `check_header`.
    """
    width, height = read_size(path)
    return width * height


def read_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(width, height) of the picture in `path` as its header says, before it is turned upright.

    Raises:
        BadImage: As in `check_header`.
    """
    with _opened(path) as image:
        return image.size


def check_header(path: str | os.PathLike[str]) -> None:
    """Refuse `path` where that is clear without decoding it: type, format, dimensions, a cut PNG.

    Raises:
        BadImage: As in `read_image`, which may still refuse what passes here.
    """
    with _opened(path) as image:
        if image.format == "PNG" and image.fp is not None:
            _check_png(image.fp)


class Header(NamedTuple):
    """What is known of a picture before its pixels are decoded."""

    format: str
    """Of the file, as Pillow calls it."""
    mode: str
    """Of its pixels, as Pillow calls it."""
    turned: bool
    """Whether an EXIF orientation changes it."""
    alpha: bool
    """Whether pixels may be transparent."""


def read_header(path: str | os.PathLike[str]) -> Header:
    """What the picture in `path` says of itself.

    Raises:
        BadImage: As in `check_header`.
    """
    with _opened(path) as image:
        alpha = "A" in image.mode.upper() or "transparency" in image.info
        return Header(image.format or "", image.mode, _orientation(image) in UPRIGHT, alpha)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[ImageFile.ImageFile]:
    """The picture in `path` with its header read; whatever fails inside becomes a BadImage."""
    with _named(path) as name, QUIET, open_regular(name) as file, _identified(file) as image:
        width, height = image.size
        if width < 1 or height < 1:
            raise Refused(f"has no pixels: {width} x {height}")
        if width * height > MAX_PIXELS:
            raise Refused(f"{width} x {height} is more than {MAX_PIXELS:,} pixels")
        yield image


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[str]:
    """The name of `path`; whatever fails inside becomes a BadImage of that name."""
    name = os.fsdecode(path)
    try:
        yield name
    except BadImage:
        raise
    except Refused as refusal:
        raise BadImage(name, str(refusal)) from None
    except Image.DecompressionBombError:
        raise BadImage(name, f"declares more than {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # any parser, any exception: one file must not end a run
        words = " ".join(str(error).split())[:120]
        raise BadImage(name, f"damaged or cut short ({words or type(error).__name__})") from None


def _identified(file: BinaryIO) -> ImageFile.ImageFile:
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        file.seek(0)
        what = guessed(file.read(512))
        raise Refused(f"not a readable picture ({what})") from None


def _jpeg(image: ImageFile.ImageFile, least: tuple[int, int] | None) -> Pixels | None:
    """The pixels of an RGB or grey JPEG without a flaw, not yet upright; None for Pillow to read.

    Raises:
        Refused: It has so many scans that reading it might never end.
    """
    if image.format not in JPEGS or image.fp is None:
        return None
    data = all_of(image.fp)
    scans = count_scans(data)
    if scans * image.width * image.height > SCANNED_PIXELS and scans > 1:
        raise Refused(f"{scans:,} scans of {image.width} x {image.height} pixels: too many")
    return decode_jpeg(data, least) if image.mode in ("RGB", "L") else None


def _check_png(file: IO[bytes]) -> None:
    """Refuse a PNG whose pixel data reach beyond the end of the file."""
    size, position = file.seek(0, os.SEEK_END), 8
    for _ in range(PNG_CHUNKS):
        file.seek(position)
        header = file.read(8)
        if len(header) < 8:
            return
        length, kind = struct.unpack(">I4s", header)
        end = position + 8 + length
        # The last 4 bytes are a checksum of the whole, without which all pixels are there.
        if kind == b"IDAT" and end - 4 > size:
            raise Refused("cut short: the pixel data are not complete")
        position = end + 4


def _orientation(image: Image.Image) -> object:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # a damaged tag must not cost the picture
        return None
