"""One safe reader of images for training, evaluation and prediction.

A file gives an upright RGB image or a BadImage, and nothing else: no hang on a pipe, no bomb, no
half image, no exception of a parser. What an image means:

    several frames       the first
    EXIF orientation     applied; a damaged tag is ignored
    transparency         over white
    16 bits a channel    scaled, not clipped; 32-bit integers count as 16-bit
    floating point       0 to 1, or 0 to 255 where a value is above 1

What tells whether an image's file is still the one that was looked at.
Names for files that are no images but are called so.
Pillow's warnings are not for users of this package: an image is good, or a BadImage.
Opens an image's file unless reading it may block, never end, or be too long.
What an image means as RGB, whatever mode its file has.
JPEG by libjpeg-turbo without Pillow's detours: the same pixels, byte for byte, in less time.

Only files without any complaint of the decoder are taken; the others are Pillow's to judge. So
what is a good image does not depend on which of the two reads it.
"""

import errno
import os
import re
import stat
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from vit.data.archives import MAX_BYTES, open_member
from vit.errors import BadImage

Stamp = tuple[int, int, int, int]
"""Size in bytes, nanoseconds of the last change of content and of anything, number on its disk."""
POSITIVE = 2**63 - 1
"""Of integers that databases and files hold; numbers on a disk may be larger."""


def stamp_of(path: str) -> Stamp:
    """The stamp of a file, or of the one that `path` lies inside of; zeros where there is none.

    Copying other content over a file with its times kept (`cp -p`) changes the third number:
    nobody can set that one.
    """
    while path:
        try:
            status = os.stat(path)
        except NotADirectoryError:  # noqa: PERF203 - something inside a file, or inside of such
            path = os.path.dirname(path)
        except OSError:
            break
        else:
            times = status.st_mtime_ns, status.st_ctime_ns
            return status.st_size, *times, status.st_ino & POSITIVE
    return 0, 0, 0, 0


# What is often found under an image's name: pattern of the first bytes, what to call it.
STRANGERS = (
    (rb"\A....ftyp(hei|hev|mif1|msf1)", "a HEIC image: convert it to JPEG or PNG"),
    (rb"\A....ftypavi", "a damaged AVIF image, or AVIF is missing in this Pillow"),
    (rb"\A....ftyp", "a video"),
    (rb"\A(\xff\x0a|\0\0\0\x0cJXL )", "a JPEG XL image: convert it to JPEG or PNG"),
    (rb"\A\s*<(!doctype html|html|head)", "a web page, maybe a failed download"),
    (rb"\A\s*<(\?xml|svg)", "XML or SVG: convert it to PNG"),
    (rb"\Aversion https://git-lfs", "a Git LFS pointer: run `git lfs pull`"),
    (rb"\A%PDF", "a PDF document"),
    (rb"\APK\x03\x04", "a ZIP archive: unpack it"),
    (rb"\A\s*\{", "JSON, maybe a failed download"),
    (rb"\A(\xff\xd8\xff|\x89PNG|GIF8|RIFF|BM|II\*|MM\0\*)", "damaged from its first bytes on"),
    (rb"\A[\t\n\r -~]*\Z", "text"),
)


def guessed(start: bytes) -> str:
    """What a file is that no parser of images knows, from its first bytes."""
    names = (name for pattern, name in STRANGERS if re.match(pattern, start, re.I | re.S))
    return next(names, "unknown content")


class Quiet:
    """Silences Pillow's warnings while any thread reads; catch_warnings alone is not for threads.

    They tell of damage that is either harmless or reported as a BadImage, and with `-W error`
    they would refuse good images.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.readers = 0
        self.filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self.lock:
            if not self.readers:
                self.filters = warnings.catch_warnings()
                self.filters.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self.readers += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.readers -= 1
            if not self.readers:
                self.filters.__exit__(None, None, None)


QUIET = Quiet()


class Refused(Exception):
    """Why a file is not accepted, without its name."""


def open_regular(name: str) -> BinaryIO:
    """Open `name` unless it is something whose reading may block, never end, or be too long."""
    try:
        # Looked at before opening too: opening a device can have effects of its own.
        _check(os.stat(name))
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(name, flags), "rb")
    except FileNotFoundError:
        raise Refused(
            "a link to a missing file" if os.path.islink(name) else "no such file"
        ) from None
    except NotADirectoryError:
        return open_member(name)
    except PermissionError:
        raise Refused("no permission to read it") from None
    except OSError as error:
        loop = error.errno == errno.ELOOP
        reason = "a link that leads in a circle" if loop else error.strerror
        raise Refused(reason or "cannot be opened") from None
    try:
        _check(os.fstat(file.fileno()))
    except Refused:
        file.close()
        raise
    return file


def all_of(file: IO[bytes]) -> bytes:
    """All bytes of an open file, from its beginning.

    No more than it has are asked for: room for a length that it might have costs more than reading.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return file.read(min(size, MAX_BYTES))


def _check(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise Refused("a folder, not an image")
    if not stat.S_ISREG(status.st_mode):
        raise Refused("not a regular file (a pipe, socket or device)")
    if not status.st_size:
        raise Refused("an empty file (0 bytes)")
    if status.st_size > MAX_BYTES:
        raise Refused(f"{status.st_size:,} bytes are more than the limit of {MAX_BYTES:,}")


def to_rgb(image: Image.Image) -> Image.Image:
    """A loaded image of any mode as RGB; transparency over white, deep channels scaled."""
    if image.mode[0] in "IF":
        return Image.fromarray(_scaled(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        colour = image.convert("RGBA")
        white = Image.new("RGBA", colour.size, "white")
        return Image.alpha_composite(white, colour).convert("RGB")
    if image.mode == "LAB":
        from PIL import ImageCms

        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
        assert converted is not None
        return converted
    return image if image.mode == "RGB" else image.convert("RGB")


def _scaled(grey: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Grey values of 16 or 32 bits, (height, width), as bytes."""
    low, high = float(grey.min()), float(grey.max())
    limit = 65535.0 if grey.dtype.kind != "f" else 1.0 if high <= 1 else 255.0
    if not 0 <= low <= high <= limit:  # also false for NaN
        raise Refused(f"grey values from {low:g} to {high:g}; expected 0 to {limit:g}")
    scaled = np.rint(np.multiply(grey, 255 / limit, dtype=np.float32))
    return np.asarray(scaled, dtype=np.uint8)


Pixels = np.ndarray[Any, np.dtype[np.uint8]]

PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
SCAN = 0xDA
SCANNED_PIXELS = 2_000_000_000
"""Pixels times scans above which a file is refused: a scan of nothing costs a byte of file and
a pass over all pixels. 24 million pixels may have 83 scans; encoders write about 10."""


def decode_jpeg(data: bytes, least: tuple[int, int] | None = None) -> Pixels | None:
    """The image in `data`, (height, width, 3), or None where the decoder complains of anything.

    Args:
        data: The file.
        least: (width, height) that suffices: then the image may be decoded at half, a quarter
            or an eighth of its size, which costs less. It is never smaller than that.
    """
    width, height = least or (0, 0)
    factor = 1 if least is None else 2
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data, "RGB", min_width=width, min_height=height, min_factor=factor, strict=True
        )
    except (ValueError, RuntimeError):
        return None
    return pixels


def count_scans(data: bytes) -> int:
    """How often a decoder goes over the pixels of a JPEG, at most."""
    at, components, progressive = 2, 0, False
    while at + 10 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in FRAMES:
            components, progressive = data[at + 9], marker in PROGRESSIVE
        if marker == SCAN:
            if not progressive and data[at + 4] == components:
                return 1
            break
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    # also finds those of thumbnails, and of a second image: a few too many
    return data.count(b"\xff\xda")


Least = Callable[[int, int], tuple[int, int]]
"""Told (width, height) of an image, how large (width, height) it must at least be decoded."""

# Only parsers of formats that people keep images in; the common ones first.
FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"),
    *("AVIF", "JPEG2000", "ICO", "DIB", "QOI"),
)
MAX_PIXELS = 100_000_000
"""Below Pillow's own limit of 179 million: an image may need eight bytes a pixel on the way."""
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
    """The image in the file `path`: its first frame, upright, RGB.

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
    """The image in the file `path` as (height, width, 3) bytes: its first frame, upright, RGB.

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
    """Pixels of the image in `path` as its header says, known before they take memory.

    Raises:
        BadImage: As in `check_header`.
    """
    width, height = read_size(path)
    return width * height


def read_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(width, height) of the image in `path` as its header says, before it is turned upright.

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
    """What is known of an image before its pixels are decoded."""

    format: str
    """Of the file, as Pillow calls it."""
    mode: str
    """Of its pixels, as Pillow calls it."""
    turned: bool
    """Whether an EXIF orientation changes it."""
    alpha: bool
    """Whether pixels may be transparent."""


def read_header(path: str | os.PathLike[str]) -> Header:
    """What the image in `path` says of itself.

    Raises:
        BadImage: As in `check_header`.
    """
    with _opened(path) as image:
        alpha = "A" in image.mode.upper() or "transparency" in image.info
        return Header(image.format or "", image.mode, _orientation(image) in UPRIGHT, alpha)


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[ImageFile.ImageFile]:
    """The image in `path` with its header read; whatever fails inside becomes a BadImage."""
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
        raise Refused(f"not a readable image ({what})") from None


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
    except Exception:  # a damaged tag must not cost the image
        return None
