"""Safe image reading for training, evaluation and prediction.

`read_image` and `read_pixels` return an upright RGB image or raise BadImage, and nothing else: they
never block on a pipe, decompress a bomb, return a truncated image or leak a parser's exception.

    several frames       the first
    EXIF orientation     applied; a damaged tag is ignored
    transparency         composited over white
    more than 8 bits     scaled by `intensity_range`; without one by 0 to 65535, floats by 0 to 1,
                         or by 0 to 255 if a value is above 1
    HEIC, HEIF           with pillow-heif, if it is installed

JPEGs are decoded by libjpeg-turbo, without Pillow's overhead: the same pixels, byte for byte, in
less time. It takes only files of which it has no complaint and leaves the others to Pillow, so
whether an image is readable does not depend on the decoder.

An image of more pixels than `set_max_pixels` allows is refused before it is decoded; a JPEG is
decoded at half, a quarter or an eighth of its sides instead, the first that is within the limit.
"""

import contextlib
import importlib.util
import io
import math
import os
import re
import stat
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageFile, JpegImagePlugin, UnidentifiedImageError

from vit.config.data_config import DataConfig
from vit.data.image_archives import MAX_BYTES, is_inside, open_member, split_address
from vit.data.instrument_images import (
    MAX_CHANNELS,
    Array,
    ArrayImage,
    ChannelImage,
    ChannelSpec,
    UnusableFile,
    open_array_image,
)
from vit.errors import BadImage, error_text

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
"""RGB, (height, width, 3) uint8."""
IntensityRange = tuple[float, float]
"""Values of a deep image (more than 8 bits per channel) that become 0 and 255."""
MinSize = Callable[[int, int], tuple[int, int]]
"""(width, height) of an image -> the smallest (width, height) at which it may be decoded."""


class EncodedImage(NamedTuple):
    """An image file in memory."""

    name: str
    """Its name in errors; never opened."""
    data: bytes


PathLike = str | os.PathLike[str]

# Formats that people keep images in, the common ones first; Pillow tries no other parser.
FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"),
    *("AVIF", "JPEG2000", "ICO", "DIB", "QOI"),
)
JPEG_FORMATS = {"JPEG", "MPO"}
STACKS = {"TIFF", "GIF", "WEBP", "PNG", "AVIF"}
"""Formats whose files may have several frames or pages; MPO has previews."""
MAX_PIXELS = DataConfig.max_pixels
"""Limit of decoded pixels, unless `set_max_pixels` sets another."""
_limit = [MAX_PIXELS]
PIXEL_BYTES = 8
"""A pixel of more bytes counts as several against the limit."""
JPEG_DIVISORS = (1, 2, 4, 8)
"""By which the sides of a JPEG can be divided while it is decoded."""
MIN_REDUCED_PIXELS = 4_000_000
"""A JPEG is not reduced to fewer pixels, so that networks see the same under any limit."""
BY_TILES = "vit train --tiles reads an 8-bit TIFF of any size"
MAX_SCANNED_PIXELS = 2_000_000_000
"""Limit of pixels times scans of a JPEG: an empty scan costs a byte of file and a pass over all
pixels. An image of 24 million pixels may have 83 scans; encoders write about 10."""

EXIF_TRANSPOSE: dict[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How to turn an image upright, by its EXIF orientation."""
SWAPS_SIDES = {EXIF_TRANSPOSE[number] for number in (5, 6, 7, 8)}


# they warn of damage that is harmless or raised as BadImage: `-W error` would refuse good images
warnings.filterwarnings("ignore", module=r"(PIL|pydicom)\.")


def set_max_pixels(pixels: int) -> None:
    """Set the most pixels of one image that this process and its loaders decode.

    It belongs to the process as its memory does, of which a pixel may take eight bytes.
    """
    _limit[0] = pixels
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, pixels)  # which Pillow allows twice


def max_pixels() -> int:
    """The limit that `set_max_pixels` has set."""
    return _limit[0]


def read_image(
    path: PathLike | EncodedImage,
    *,
    intensity_range: IntensityRange | Literal["own"] | None = None,
    min_size: MinSize | None = None,
    before_decode: Callable[[int], object] = lambda _pixels: None,
    on_dark: Callable[[int], object] | None = None,
    axes: str = "",
) -> Image.Image:
    """Read the image at `path`: its first frame, upright, RGB, with its file's `format`.

    Args:
        intensity_range: Of a deep image, the values that become 0 and 255; others are clipped.
            `own` is the range that the image itself uses, which makes it visible but removes its
            absolute intensity. None: the range of its type, see above.
        min_size: As in `read_pixels`; None: the whole size.
        before_decode: Called with the number of pixels before they are decoded; it may block until
            there is memory for them.
        on_dark: Called with the largest value of a 16-bit image that is read nearly black, since
            it uses a small part of the range of its type and `intensity_range` is None.
        axes: Of a TIFF, those that are channels.
    """
    with _open_image(path, axes) as image:
        before_decode(math.prod(image.size))
        pixels = _decode_intact_jpeg(image, min_size)
        if pixels is None:
            rgb = upright_rgb(image, intensity_range, on_dark)
        else:
            rgb = _turn_upright(Image.fromarray(pixels), _orientation(image))
        rgb.format = image.format
        return rgb


def read_channels(
    path: PathLike | EncodedImage,
    spec: ChannelSpec,
    *,
    before_decode: Callable[[int], object] | None = None,
) -> ChannelImage:
    """Read the channels `spec` of the image of an instrument, upright, in the type of `spec`."""
    with _open_image(path, spec.axes) as image:
        if not isinstance(image, ArrayImage) or image.ink:
            raise UnusableFile(f"{image.mode} of 8 bits; the network takes {spec.count} channels")
        spec.check_file(image.channels, image.dtype)
        if before_decode is not None:
            before_decode(math.prod(image.size) * math.ceil(4 * spec.count / PIXEL_BYTES))
        return to_channel_image(image, spec)


def to_channel_image(image: ArrayImage, spec: ChannelSpec) -> ChannelImage:
    """Decode the channels `spec` of an image, upright; values that are missing become the fill."""
    values = image.load()[..., spec.order_of(image.names)]
    missing = image.missing(values)
    values = np.where(missing, spec.fill, values) if missing.any() else values
    if not np.isfinite(values).all():
        raise UnusableFile("values that are not finite")
    channels = ChannelImage(values, dtype=np.dtype(spec.value_type), file_format=image.format)
    transpose = EXIF_TRANSPOSE.get(_orientation(image))
    return channels if transpose is None else channels.transpose(transpose)


def read_pixels(
    path: str | os.PathLike[str],
    min_size: MinSize,
    *,
    intensity_range: IntensityRange | None = None,
) -> Pixels:
    """Read the image at `path` as an array: its first frame, upright, RGB.

    A JPEG is decoded at half, a quarter or an eighth of its size where that is at least `min_size`.
    """
    with _open_image(path) as image:
        pixels = _decode_intact_jpeg(image, min_size)
        if pixels is None:
            return np.array(upright_rgb(image, intensity_range))
        if _orientation(image) not in EXIF_TRANSPOSE:
            return pixels
        return np.array(_turn_upright(Image.fromarray(pixels), _orientation(image)))


def _stored_size(image: Image.Image, min_size: MinSize) -> tuple[int, int]:
    """The smallest (width, height) at which an image may be decoded, before it is made upright."""
    if EXIF_TRANSPOSE.get(_orientation(image)) in SWAPS_SIDES:
        width, height = min_size(*image.size[::-1])
        return height, width
    return min_size(*image.size)


def read_intensities(path: str | os.PathLike[str], axes: str = "") -> Array:
    """Read the values of a deep image as stored, (height, width, channels), without opacity.

    Floating-point numbers, and NaN for pixels without a value, if there are such pixels.
    """
    with _open_image(path, axes) as image:
        if not isinstance(image, ArrayImage):
            raise UnusableFile("has 8 bits per channel")
        values = image.load()[..., : image.channels]
        missing = image.missing(values)
        if not (np.isfinite(values) | missing).all():
            raise UnusableFile("values that are not finite")
        return np.where(missing, np.nan, values) if missing.any() else values


def read_size(path: PathLike | EncodedImage, axes: str = "") -> tuple[int, int]:
    """Read the (width, height) at which an image is decoded, before any EXIF rotation."""
    with _open_image(path, axes) as image:
        return image.size


class Origin(NamedTuple):
    """What a file says of where its image comes from."""

    size: tuple[int, int]
    """(width, height) in pixels, before any EXIF rotation."""
    camera: str
    """Maker, model and serial number in the EXIF data; empty without."""
    seconds: float | None
    """Time of the photograph since 1970, by the clock of the camera; None if it is not known."""
    format: str
    """File format, size, and a checksum of a JPEG's quantisation tables."""


def read_origin(path: PathLike | EncodedImage, axes: str = "") -> Origin:
    """Read where the image at `path` comes from, from its header."""
    with _open_image(path, axes) as image:
        camera, seconds, tables = "", None, getattr(image, "quantization", None)
        with contextlib.suppress(Exception):  # damaged tags, or none in an ArrayImage
            exif = image.getexif()  # type: ignore[union-attr]
            details = exif.get_ifd(ExifTags.IFD.Exif)
            names = exif.get(ExifTags.Base.Make), exif.get(ExifTags.Base.Model)
            parts = (*names, details.get(ExifTags.Base.BodySerialNumber))
            camera = " ".join(str(one).replace("\0", " ") for one in parts if one)
            camera = " ".join(camera.split())
            time = str(details[ExifTags.Base.DateTimeOriginal])
            taken = datetime.strptime(time, "%Y:%m:%d %H:%M:%S").replace(tzinfo=UTC)
            fraction = int(details.get(ExifTags.Base.SubsecTimeOriginal, 0))
            seconds = taken.timestamp() + float(f"0.{fraction}")
        short, long = sorted(image.size)
        quality = f" {zlib.crc32(repr(tables).encode()):08x}" if tables else ""
        return Origin(image.size, camera, seconds, f"{image.format} {long}x{short}{quality}")


class StoredValues(NamedTuple):
    """What the file of an instrument holds."""

    channels: int
    """Without opacity."""
    dtype: str
    names: tuple[str, ...] = ()
    axes: str = ""
    nodata: float | None = None
    """The last three as of an `ArrayImage`."""


def check_header(path: PathLike | EncodedImage, axes: str = "") -> StoredValues | None:
    """Check file type, format and size without decoding; None for an image of 8-bit RGB or grey."""
    with _open_image(path, axes) as image:
        if not isinstance(image, ArrayImage) or image.ink:
            return None
        named = image.names, image.axes, image.nodata
        return StoredValues(image.channels, image.dtype.name, *named)


class Header(NamedTuple):
    """Properties of an image that are known without decoding it."""

    format: str
    """File format, as Pillow names it."""
    mode: str
    """Pixel format, as Pillow names it."""
    exif_rotated: bool
    """Whether its EXIF orientation changes it."""
    alpha: bool
    """Whether pixels may be transparent."""
    deep: bool
    """Whether it has more than 8 bits per channel."""
    width: int
    """In pixels, upright like the height."""
    height: int


def read_header(path: PathLike | EncodedImage, axes: str = "") -> Header:
    with _open_image(path, axes) as image:
        transpose = EXIF_TRANSPOSE.get(_orientation(image))
        size = image.size[::-1] if transpose in SWAPS_SIDES else image.size
        if isinstance(image, ArrayImage):
            alpha = bool(image.alpha)
        else:
            alpha = "A" in image.mode.upper() or "transparency" in image.info
            if image.format == "TIFF" and transpose in SWAPS_SIDES:  # Pillow may have swapped them
                width, height = (int(image.getexif()[tag]) for tag in (256, 257))
                size = height, width
        deep = is_deep(image)
        return Header(image.format or "", image.mode, transpose is not None, alpha, deep, *size)


def is_deep(image: Image.Image | ArrayImage) -> bool:
    """Whether an opened image has other values than those of 8 bits, which need a range."""
    return isinstance(image, ArrayImage) and image.dtype != np.uint8 and not image.ink


def is_reduced(path: PathLike | EncodedImage) -> bool:
    """Whether the image at `path` is a JPEG that is decoded at a part of its size."""
    with _open_image(path) as image:
        return (getattr(image, "decoderconfig", None) or (1,))[0] > 1


def has_more_frames(path: str | os.PathLike[str]) -> bool:
    """Whether a readable image is the first of several frames or pages, so the others are unused.

    Of a format in `STACKS`: in a JPEG, the others are previews that the camera appended.
    """
    with _open_image(path) as image, contextlib.suppress(Exception):  # only later frames are bad
        return bool(getattr(image, "is_animated", False))
    return False


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a file of which only the content matters; BadImage unless it is regular and readable."""
    with errors_as_bad_image(path) as name, open_regular_file(name) as file:
        return read_all(file)


@contextmanager
def _open_image(
    path: PathLike | EncodedImage, axes: str = ""
) -> Iterator[ImageFile.ImageFile | ArrayImage]:
    """The image at `path` with its header parsed; any error inside becomes a BadImage.

    Its `size` is that at which it is decoded. Of more than 8 bits per channel it is an ArrayImage.
    """
    with errors_as_bad_image(path), open_file(path) as file:
        array_image = open_array_image(file, axes)
        if array_image is not None:
            _check_array_size(array_image)
            yield array_image
            return
        with _parse_header(file) as image:
            width, height = image.size
            if width < 1 or height < 1:
                raise UnusableFile(f"has no pixels: {width} x {height}")
            divisor = _divisor(image, max_pixels())
            if divisor > 1:
                image.draft(image.mode, (width // divisor, height // divisor))
            if image.format == "BMP" and image.mode == "RGBA" and not _has_alpha_mask(file):
                image = _without_alpha(image)
            elif image.mode == "RGB" and image.info.get("compression") == 3:  # BMP with masks
                if _has_alpha_mask(file):
                    raise UnusableFile("a BMP of 16 bits with transparency; save it as PNG")
            elif image.format == "PNG" and image.mode == "L" and "transparency" in image.info:
                stored: Any = image.tile[0].args  # Pillow scales the pixels, and not this value
                image.info["transparency"] *= {"L;2": 85, "L;4": 17}.get(stored, 1)
            yield pillow_array(image) or image


def _check_array_size(image: ArrayImage) -> None:
    """Refuse an image without pixels, of too many channels, or beyond the limit of pixels."""
    width, height = image.size
    if min(width, height, image.channels) < 1:
        raise UnusableFile(f"has no pixels: {width} x {height} x {image.channels}")
    if image.channels > MAX_CHANNELS:
        raise UnusableFile(f"{image.channels} channels; at most {MAX_CHANNELS} are read")
    values = image.channels + bool(image.alpha)
    stored = width * height * values * image.dtype.itemsize
    if max(width * height, stored / PIXEL_BYTES) > max_pixels():
        raise _too_large(width, height, max_pixels(), f" of {PIXEL_BYTES} bytes")


def _divisor(image: ImageFile.ImageFile, limit: int) -> int:
    """By what the sides of an image are divided while it is decoded."""
    pixels = image.width * image.height
    if pixels > MAX_SCANNED_PIXELS:
        raise UnusableFile(f"declares more than {MAX_SCANNED_PIXELS:,} pixels; {BY_TILES}")
    for divisor in JPEG_DIVISORS if image.format in JPEG_FORMATS else (1,):
        least = MIN_REDUCED_PIXELS if divisor > 1 else 1
        if least <= pixels / divisor**2 <= limit:
            return divisor
    raise _too_large(*image.size, limit)


def _too_large(width: int, height: int, limit: int, what: str = "") -> UnusableFile:
    return UnusableFile(
        f"{width} x {height} is more than {limit:,} pixels{what}; raise --max-pixels (in Python "
        f"vit.set_max_pixels), or make it smaller; {BY_TILES}"
    )


def open_file(path: PathLike | EncodedImage, limit: int | None = MAX_BYTES) -> BinaryIO:
    """Open a file, also one in memory, of at most `limit` bytes."""
    if not isinstance(path, EncodedImage):
        return open_regular_file(os.fsdecode(path), limit)
    _check_bytes(len(path.data), limit)
    return io.BytesIO(path.data)


@contextmanager
def errors_as_bad_image(path: PathLike | EncodedImage) -> Iterator[str]:
    """The name of `path`; any error inside becomes a BadImage with that name."""
    name = path.name if isinstance(path, EncodedImage) else os.fsdecode(path)
    try:
        yield name
    except BadImage:
        raise
    except UnusableFile as error:
        raise BadImage(name, str(error)) from None
    except Image.DecompressionBombError:
        raise BadImage(
            name, f"declares more than {max_pixels():,} pixels; raise --max-pixels if it is good"
        ) from None
    except Exception as error:  # any parser, any exception: one file must not end a run
        text = error_text(error, 120)
        what = "not supported" if text.startswith("Unsupported ") else "damaged or cut short"
        raise BadImage(name, f"{what} ({text})") from None


def _parse_header(file: BinaryIO) -> ImageFile.ImageFile:
    try:
        return Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError:
        file.seek(0)
        if file.read(2) != b"\xff\xd8":
            raise
        file.seek(0)
        return JpegImagePlugin.jpeg_factory(file)  # which will be decoded at a reduced size
    except UnidentifiedImageError:
        file.seek(0)
        start = file.read(512)
        if guess_content(start) == HEIC and reads_heic():
            import pillow_heif

            pillow_heif.register_heif_opener()
            file.seek(0)
            with contextlib.suppress(UnidentifiedImageError):
                return Image.open(file, formats=("HEIF",))
        raise UnusableFile(f"not a readable image ({guess_content(start)})") from None


def _has_alpha_mask(file: BinaryIO) -> bool:
    """Whether the header of a BMP says which bits of a pixel are its opacity."""
    file.seek(0)
    start = file.read(70)
    return int.from_bytes(start[14:18], "little") >= 56 and any(start[66:70])


def _without_alpha(image: ImageFile.ImageFile) -> ImageFile.ImageFile:
    """A BMP whose fourth byte, which has no mask, is no opacity."""
    image._mode = "RGB"
    tiles: list[Any] = image.tile
    image.tile = [
        tile._replace(args=(tile.args[0].replace("A", "X"), *tile.args[1:])) for tile in tiles
    ]
    return image


def reads_heic() -> bool:
    """Whether the decoder of HEIC and HEIF images is installed."""
    return importlib.util.find_spec("pillow_heif") is not None


def _orientation(image: Image.Image | ArrayImage) -> int:
    try:
        if isinstance(image, ArrayImage):
            return image.orientation()
        number = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # a damaged tag must not cost the image
        return 1
    return number if isinstance(number, int) else 1


# --- files ---------------------------------------------------------------------------------------


def open_regular_file(name: str, limit: int | None = MAX_BYTES) -> BinaryIO:
    """Open a file, or an image inside an archive, unless reading it may block or never end."""
    if is_inside(name):
        return open_member(name)
    try:
        # checked before opening too: opening a device can have side effects
        _check_status(os.stat(name), limit)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(name, flags), "rb")
    except FileNotFoundError:
        raise UnusableFile("no such file") from None
    except OSError as error:
        raise UnusableFile(error.strerror or "cannot be opened") from None
    try:
        _check_status(os.fstat(file.fileno()), limit)
    except UnusableFile:
        file.close()
        raise
    return file


def _check_status(status: os.stat_result, limit: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise UnusableFile("a folder, not an image")
    if not stat.S_ISREG(status.st_mode):
        raise UnusableFile("not a regular file (a pipe, socket or device)")
    _check_bytes(status.st_size, limit)


def _check_bytes(size: int, limit: int | None) -> None:
    if not size:
        raise UnusableFile("an empty file (0 bytes)")
    if limit is not None and size > limit:
        raise UnusableFile(f"{size:,} bytes are more than the limit of {limit:,}; {BY_TILES}")


def read_all(file: IO[bytes]) -> bytes:
    """Read an open file from its beginning.

    No more than its size is requested: allocating for the limit costs more than reading.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return file.read(min(size, MAX_BYTES))


Fingerprint = tuple[int, int, int, int]
"""Size in bytes, times of the last change of content and of metadata in nanoseconds, inode."""
MAX_INT64 = 2**63 - 1
"""Of integers in databases and files; inodes may be larger."""


def file_fingerprint(path: str) -> Fingerprint:
    """Fingerprint of a file, or of the archive that `path` lies in; zeros for a missing file.

    Copying other content over a file with its times preserved (`cp -p`) changes the third number,
    which no user can set.
    """
    archive = split_address(path)
    try:
        status = os.stat(path if archive is None else archive[0])
    except OSError:
        return 0, 0, 0, 0
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_size, *times, status.st_ino & MAX_INT64


HEIC = "a HEIC image: pip install 'vit-toolkit[heic]', or convert it to JPEG or PNG"
# What is often found under an image's name: pattern of the first bytes, description.
FILE_SIGNATURES = (
    (rb"\A....ftyp(hei|hev|mif1|msf1)", HEIC),
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


def guess_content(start: bytes) -> str:
    """Describe a file that is not an image, from its first bytes."""
    names = (name for pattern, name in FILE_SIGNATURES if re.match(pattern, start, re.I | re.S))
    return next(names, "unknown content")


# --- decoding ------------------------------------------------------------------------------------

START_OF_SCAN = 0xDA
START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
PROGRESSIVE_FRAME = {0xC2, 0xC6, 0xCA, 0xCE}


def _decode_intact_jpeg(
    image: ImageFile.ImageFile | ArrayImage, min_size: MinSize | None
) -> Pixels | None:
    """Decode an RGB or grey JPEG without a flaw, not yet upright; None leaves it to Pillow."""
    if isinstance(image, ArrayImage) or image.format not in JPEG_FORMATS or image.fp is None:
        return None
    data = read_all(image.fp)
    scans, divisor = count_scans(data), (image.decoderconfig or (1,))[0]
    width, height = image.width * divisor, image.height * divisor
    if scans * width * height > MAX_SCANNED_PIXELS:
        raise UnusableFile(
            f"{scans:,} scans of {width} x {height} pixels: too many; save it as a baseline JPEG"
        )
    if scans > 1 and width * height > 2 * max_pixels():
        raise _too_large(width, height, 2 * max_pixels(), " for a progressive JPEG")
    size = image.size if divisor > 1 else None
    if min_size is not None:
        size = _stored_size(image, min_size)
    return decode_jpeg(data, size) if image.mode in ("RGB", "L") else None


def decode_jpeg(data: bytes, min_size: tuple[int, int] | None = None) -> Pixels | None:
    """Decode a JPEG with libjpeg-turbo, not smaller than `min_size`, (width, height).

    None if the decoder has any complaint.
    """
    width, height = min_size or (0, 0)
    factor = 1 if min_size is None else 2
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data, "RGB", min_width=width, min_height=height, min_factor=factor, strict=True
        )
    except (ValueError, RuntimeError):
        return None
    return pixels


def decode_jpeg_part(data: bytes, height: int, width: int) -> Pixels:
    """Decode a strip or tile of a TIFF, of at most `height` rows."""
    rows, cols, *_ = simplejpeg.decode_jpeg_header(data)
    pixels = decode_jpeg(data) if rows <= height and cols == width else None
    if pixels is None:
        raise UnusableFile("a strip or tile is damaged, or not of its size")
    return pixels


def count_scans(data: bytes) -> int:
    """Upper bound of the passes that decoding a JPEG makes over its pixels."""
    offset, components, progressive = 2, 0, False
    while offset + 10 < len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker in START_OF_FRAME:
            components, progressive = data[offset + 9], marker in PROGRESSIVE_FRAME
        if marker == START_OF_SCAN:
            if not progressive and data[offset + 4] == components:
                return 1
            break
        offset += 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    # also counts those of thumbnails and of a second image
    return max(data.count(b"\xff\xda"), 1 + progressive)


DEEP_COLOURS = ("RGB;16B", "RGBA;16B", "LA;16B")
"""Pillow's names of the stored pixels of a PNG of 16 bits, of which it reads the upper 8."""
ROUNDING = 0.5 / 255
"""By how much a float may leave its scale, as a share of it: half a step of 8 bits is clipped."""
NEARLY_BLACK = 4095
"""Largest value of an image of 16-bit integers up to which less than 1/16 of its range is used."""
MAX_QUANTILE_VALUES = 2**20
INTENSITY_QUANTILES = (0.001, 0.999)


def pillow_array(image: Image.Image) -> ArrayImage | None:
    """An opened image of more than 8 bits per channel with all of them; None for any other."""
    tiles: Any = getattr(image, "tile", None)  # of a file that is not yet loaded
    stored = tiles[0].args if tiles and image.format == "PNG" else ""
    load: Callable[[], Array]
    if image.mode[0] in "IF":
        dtype = np.dtype({"I": np.int32, "F": np.float32}.get(image.mode, np.uint16))
        channels, load = 1, lambda: np.asarray(image)[..., None]
    elif stored in DEEP_COLOURS:
        assert isinstance(image, ImageFile.ImageFile)
        dtype = np.dtype(np.uint16)
        channels, load = 1 if stored == "LA;16B" else 3, lambda: _decode_16_bit(image, stored)
    else:
        return None
    clear = image.info.get("transparency") if stored else None  # the colour that is transparent

    def with_opacity() -> Array:
        colours = load()
        opaque = (colours != clear).any(axis=2, keepdims=True)
        return np.concatenate([colours, opaque * np.uint16(65535)], axis=2)

    return ArrayImage(
        format=image.format or "",
        size=image.size,
        channels=channels,
        dtype=dtype,
        load=load if clear is None else with_opacity,
        alpha="straight" if stored in ("RGBA;16B", "LA;16B") or clear is not None else "",
        orientation=lambda: _orientation(image),
    )


def _decode_16_bit(image: ImageFile.ImageFile, stored: str) -> Array:
    """Decode 16-bit colours, or grey with transparency, (height, width, channels) uint16."""
    assert image.fp is not None
    with Image.open(io.BytesIO(read_all(image.fp)), formats=["PNG"]) as other:
        if stored == "LA;16B":  # four bytes a pixel, which are read as if they were four channels
            other._mode = "RGBA"
            other.tile = [tile._replace(args="RGBA") for tile in other.tile]
            return np.array(other).view(">u2").astype(np.uint16)
        # in the other byte order, the byte of two that Pillow unpacks is the lower one
        other.tile = [tile._replace(args=f"{stored[:-1]}L") for tile in other.tile]
        low = np.asarray(other)
    values: Array = (np.asarray(image).astype(np.uint16) << 8) | low
    return values


def array_to_rgb(
    image: ArrayImage,
    intensity_range: IntensityRange | Literal["own"] | None = None,
    on_dark: Callable[[int], object] | None = None,
) -> Image.Image:
    """Decode an image of any depth as RGB, over white, not yet upright; arguments as for
    `read_image`."""
    values, channels = image.load(), image.channels
    if image.ink and values.shape[2] == 4 and values.dtype == np.uint16:
        return Image.fromarray((values >> 8).astype(np.uint8), "CMYK").convert("RGB")
    if intensity_range == "own" and channels not in (1, 3):  # to be looked at
        values, channels = values[..., : 3 if channels > 3 else 1], 3 if channels > 3 else 1
    if channels not in (1, 3) or image.ink:
        raise UnusableFile(f"{channels} channels; the network takes 1 (grey) or 3 (colours)")
    colours = values[..., :channels]
    missing = image.missing(colours)
    if missing.any() and intensity_range is not None and values.dtype != np.uint8:  # black
        if intensity_range == "own":
            intensity_range = (0, 0) if missing.all() else intensity_quantiles(colours[~missing])
        colours = np.where(missing, intensity_range[0], colours)
    if values.dtype == np.uint8:
        shown = colours
    else:
        shown = scale_to_8_bit(colours, intensity_range)
        if on_dark is not None and intensity_range is None and values.dtype.kind in "ui":
            highest = int(colours.max())
            if 0 < highest <= NEARLY_BLACK:
                on_dark(highest)
    rgb = np.repeat(shown, 3, axis=2) if channels == 1 else np.ascontiguousarray(shown)
    if not image.alpha or values.shape[2] == channels:
        return Image.fromarray(rgb)
    opacity = values[..., channels:]
    opacity = opacity if values.dtype == np.uint8 else _scale_by_type(opacity)
    mode = "RGBA" if image.alpha == "straight" else "RGBa"
    return to_rgb(Image.frombytes(mode, image.size, np.dstack([rgb, opacity]).tobytes()))


def upright_rgb(
    image: Image.Image | ArrayImage,
    intensity_range: IntensityRange | Literal["own"] | None = None,
    on_dark: Callable[[int], object] | None = None,
) -> Image.Image:
    """Decode an opened image upright, RGB; arguments as for `read_image`."""
    if isinstance(image, ArrayImage):
        return _turn_upright(array_to_rgb(image, intensity_range, on_dark), _orientation(image))
    image.load()
    return _turn_upright(to_rgb(image), _orientation(image))


def _turn_upright(rgb: Image.Image, orientation: int) -> Image.Image:
    transpose = EXIF_TRANSPOSE.get(orientation)
    return rgb if transpose is None else rgb.transpose(transpose)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a decoded image of 8 bits per channel to RGB; transparency over white."""
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode == "LAB":
        from PIL import ImageCms

        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
        assert converted is not None
        return converted
    return image if image.mode == "RGB" else image.convert("RGB")


def scale_to_8_bit(
    values: Array, intensity_range: IntensityRange | Literal["own"] | None
) -> Pixels:
    """Values of 16 or 32 bits as uint8; `intensity_range` as in `read_image`."""
    if intensity_range is None:
        return _scale_by_type(values)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UnusableFile("values that are not finite")
    low, high = intensity_quantiles(values) if intensity_range == "own" else intensity_range
    # float32 has all integers of 16 bits, not those of 32
    dtype = np.float32 if values.dtype.itemsize <= 2 else np.float64
    scaled = np.subtract(values, low, dtype=dtype)
    scaled *= 255 / (high - low) if high > low else 0.0
    return np.asarray(np.rint(scaled).clip(0, 255), dtype=np.uint8)


def intensity_quantiles(values: Array) -> IntensityRange:
    """The range of the values of one image, without the 0.1 % at each end: damaged pixels."""
    step = max(values.size // MAX_QUANTILE_VALUES, 1) | 1
    low, high = np.quantile(values.ravel()[::step], INTENSITY_QUANTILES)
    return float(low), float(high)


def _scale_by_type(grey: Array) -> Pixels:
    """Values as uint8, by the range of their type."""
    low, high = float(grey.min()), float(grey.max())
    limit = 65535.0 if grey.dtype.kind != "f" else 1.0 if high <= 1 + ROUNDING else 255.0
    if not -limit * ROUNDING <= low <= high <= limit * (1 + ROUNDING):  # also false for NaN
        raise UnusableFile(
            f"values from {low:g} to {high:g}; expected 0 to {limit:g}, or --intensity-range "
            "LOW HIGH"
        )
    scaled = np.rint(np.multiply(grey, 255 / limit, dtype=np.float32))
    return np.asarray(scaled.clip(0, 255), dtype=np.uint8)
