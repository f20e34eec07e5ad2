"""Images of instruments: TIFF, DICOM and NumPy files, as arrays of their stored values.

    signature           reader      holds
    II*, MM*, BigTIFF   tifffile    8 to 64 bits, integers or floats, 1 to 32 channels, also in
                                    pages; grey, palette, RGB and CMYK of 8 bits are left to Pillow
    DICM at byte 128    pydicom     grey and RGB; rescaled, and with the window of the file
    NUMPY, ZIP          numpy       .npy, .npz with one array: (height, width[, channels]),
                                    or with the channels first

A reader returns the header of an image as an `ArrayImage`, whose `load` decodes the values: bright
is large, whatever the file's photometric interpretation. What a reader does not hold is refused by
its name. Damage is refused, never filled with zeros.

Of the axes of a TIFF (tifffile's letters), C or S is the channels if no other is longer than 1;
else `axes` names those that are.

A network takes of it the channels and the type of a `ChannelSpec`, as a `ChannelImage`: an image of
any number of channels with the operations of a PIL image.
"""

import contextlib
import importlib.util
import logging
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import Image, ImageOps

from vit.errors import ConfigError

Array = np.ndarray[Any, np.dtype[Any]]
MAX_CHANNELS = 32


class UnusableFile(Exception):
    """Why a file is refused, without its name; becomes a BadImage."""


@dataclass(frozen=True)
class ArrayImage:
    """The header of an image of which the stored values are read.

    Args:
        format: File format, named as Pillow names it.
        size: (width, height) as stored, before any rotation.
        channels: Without opacity.
        load: Decodes them: (height, width, channels), and one more channel with an opacity.
        alpha: Whether colours are multiplied by the opacity, if the last channel is that.
        orientation: Reads the number of the EXIF orientation; of some formats it decodes them.
        ink: Whether the four channels are shares of ink (CMYK).
        axes: Those of a TIFF that are the channels, unless these are the samples of its only page.
        names: Of the channels; empty if the file does not name each.
        nodata: Value of pixels without one.
    """

    format: str
    size: tuple[int, int]
    channels: int
    dtype: np.dtype[Any]
    load: Callable[[], Array]
    alpha: Literal["", "straight", "premultiplied"] = ""
    orientation: Callable[[], int] = lambda: 1
    ink: bool = False
    axes: str = ""
    names: tuple[str, ...] = ()
    nodata: float | None = None

    @property
    def mode(self) -> str:
        """Type and number of channels, such as `uint16 x 4`, or `uint16 x 4 inks`."""
        return f"{self.dtype.name} x {self.channels}{' inks' * self.ink}"

    def missing(self, values: Array) -> Array:
        """Where `values` of the file are its nodata; one False if it has none."""
        if (nodata := self.nodata) is not None and math.isnan(nodata):
            return np.isnan(values)
        with np.errstate(over="ignore"):
            known = values.dtype.type(nodata) if nodata and values.dtype.kind == "f" else nodata
        return np.asarray(known is not None and values == known)


def open_array_image(file: BinaryIO, axes: str = "") -> ArrayImage | None:
    """Read the header of an image of an instrument by its `axes`; None leaves it to Pillow."""
    start = file.read(132)
    file.seek(0)
    if start.startswith(PHOTOGRAPHS) and not axes:  # nearly all images
        return None
    reader = next((reader for signature, reader in READERS if signature.match(start)), None)
    if reader is read_tiff:
        return read_tiff(file, axes)
    if axes:
        raise UnusableFile(f"no TIFF, which alone names its axes (vit train --axes {axes})")
    return None if reader is None else reader(file)


# --- TIFF ----------------------------------------------------------------------------------------

TIFF = re.compile(rb"II[*+]\0|MM\0[*+]")
GREY_INVERTED, GREY, RGB, INK = 0, 1, 2, 5
COLOURS = {GREY_INVERTED: 1, GREY: 1, RGB: 3, INK: 4}
"""Channels of the photometric interpretations that are read as arrays."""
PILLOW_ONLY = (3, 6, 8)
"""Palette, YCbCr and CIELab, which Pillow converts; of 8 bits."""
PILLOW_COMPRESSIONS = (1, 2, 3, 4, 5, 6, 7, 8, 32771, 32773, 32809, 32946, 34925, 50000)
"""Of colours that Pillow reads; it takes a file of another one for damaged."""
DEFLATE = (8, 32946)
BUILT_IN = (1, 32773, *DEFLATE)
"""Compressions that need no imagecodecs: none, PackBits, Deflate."""
LZW = 5
WITH_IMAGECODECS = (LZW, 50000, 34926)
"""LZW and Zstandard."""
FLOAT_PREDICTOR = 3
WHOLE_BYTES = (8, 16, 32, 64)
ALPHA: dict[int, Literal["straight", "premultiplied"]] = {1: "premultiplied", 2: "straight"}
"""Kinds of opacity, by the number in ExtraSamples."""


OTHER_STACKS = (
    *("lsm", "mmstack", "ndtiff", "fluoview", "stk", "sis", "svs", "scn", "qpi", "ndpi", "bif"),
    *("avs", "eer", "philips", "scanimage", "nih", "mdgel"),
)
"""Kinds of which the first page is read, if it is the only one."""
MAX_PAGES = 1024
MAX_XML = 4_000_000
"""Characters of metadata; a pyramid of many tiles has some 100,000."""


def open_tiff(file: BinaryIO) -> Any:
    import tifffile

    logging.getLogger("tifffile").disabled = True  # what it has to say of damage is raised
    return tifffile.TiffFile(file, name="image", _multifile=False)


def read_tiff(file: BinaryIO, axes: str = "") -> ArrayImage | None:
    """Read the header of a TIFF; None if Pillow reads its first page as it is."""
    import tifffile

    tiff = open_tiff(file)
    page: Any = tiff.pages.first
    photometric, channels = int(page.photometric), int(page.samplesperpixel)
    extra = tuple(map(int, page.extrasamples))
    colours = COLOURS.get(photometric, channels)
    has_alpha = channels == colours + 1 and len(extra) == 1 and extra[0] in ALPHA
    plain = channels == colours or (has_alpha and photometric == RGB)
    bits = page.bitspersample
    colour_model = tifffile.PHOTOMETRIC(photometric).name.lower()
    plain = plain and page.sampleformat == 1 and bits in (1, 2, 4, 8)
    by_pillow = not axes and (plain or photometric in PILLOW_ONLY)
    series, chosen = _find_channels(tiff, axes, by_pillow=by_pillow)
    if by_pillow and series is None:
        if bits not in (1, 2, 4, 8) or (photometric == RGB and bits != 8):
            raise UnusableFile(f"{colour_model} colours of {bits} bits; save RGB of 8 bits")
        if int(page.compression) not in PILLOW_COMPRESSIONS:
            raise UnusableFile(f"{_compression(page)}; save it with Deflate")
        present_segments(page, page.databytecounts or repeat(1))  # Pillow needs no bytes
        return None
    if photometric not in COLOURS or page.dtype is None or page.dtype.kind not in "uif":
        kind = page.dtype.name if page.dtype is not None else f"{bits} bits"
        raise UnusableFile(
            f"a TIFF of {colour_model} and {kind}, which no network reads; save "
            "integers or floating-point numbers of grey or RGB"
        )
    grey_16 = (photometric, channels, page.dtype.str[1:]) == (GREY, 1, "u2") and not chosen
    if grey_16 and page.compression == LZW and not has_imagecodecs():  # Pillow has both right
        present_segments(page, page.databytecounts)
        return None
    if page.imagedepth > 1:
        raise UnusableFile(f"a volume of {page.imagedepth} slices; save each as an image")
    _check_compression(page)
    letters, has_alpha = "S", has_alpha and series is None
    if series is not None:
        letters = "".join(series.get_axes(squeeze=False)[n] for n in chosen)
        channels = math.prod(series.get_shape(squeeze=False)[n] for n in chosen)
    channels -= has_alpha
    nodata = page.tags.valueof(42113)
    if nodata is not None and photometric == GREY_INVERTED:
        raise UnusableFile("nodata of a TIFF whose white is 0; save it with black as 0")
    return ArrayImage(
        format="TIFF",
        size=(page.imagewidth, page.imagelength),
        channels=channels,
        dtype=page.dtype.newbyteorder("="),
        load=lambda: _tiff_values(page, series, chosen, channels),
        alpha=ALPHA[extra[0]] if has_alpha else "",
        orientation=lambda: int(page.tags.valueof(274, default=1)),
        ink=photometric == INK and series is None,
        axes="" if series is None else letters,
        names=_channel_names(tiff, letters, channels),
        nodata=None if nodata is None else float(str(nodata).strip(" \0")),
    )


def _find_channels(tiff: Any, axes: str, *, by_pillow: bool) -> tuple[Any, list[int]]:
    """The first series of pages, and the numbers of its axes that are channels; None for the
    samples of the first page. Other series, such as thumbnails and labels, are ignored."""
    page, several = tiff.pages.first, tiff.pages.is_multipage
    named = tiff.is_ome or tiff.is_imagej or tiff.is_shaped  # the last is tifffile's own
    one_page = by_pillow or not (several or axes or tiff.is_stk)
    if one_page and not named:
        return None, []
    if other := next((kind for kind in OTHER_STACKS if getattr(tiff, f"is_{kind}")), None):
        if one_page:
            return None, []
        raise UnusableFile(f"pages of {other}; save it by ImageJ or as OME-TIFF")
    if several:
        with contextlib.suppress(IndexError):
            _ = tiff.pages[MAX_PAGES]  # len() would read all of a chain
            raise UnusableFile(f"more than {MAX_PAGES:,} pages; save planes as images")
    if tiff.is_ome:
        _check_ome(tiff.ome_metadata)
    series = tiff.series[0]
    if tiff.is_ome and several and series.kind == "generic":
        raise UnusableFile("OME-TIFF in several files, or damaged; save it as one file")
    letters, shape = series.get_axes(squeeze=False), series.get_shape(squeeze=False)
    if (letters.count("Y"), letters.count("X")) != (1, 1) or len(letters) > 12:
        raise UnusableFile(f"axes {letters:.12}, which have no rows and columns")
    long = [n for n, letter in enumerate(letters) if letter not in "YX" and shape[n] > 1]
    chosen = long if not axes and len(long) == 1 and letters[long[0]] in "CS" else []
    for letter in axes:
        free = [n for n, one in enumerate(letters) if one == letter and n not in chosen]
        if not free or letter in "YX":
            raise UnusableFile(f"no axis {letter} in {letters}; vit train --axes {axes} needs it")
        chosen.append(free[0])
    if not {*long} <= {*chosen}:
        if by_pillow and {letters[n] for n in long} <= {*"IQS"}:  # pages without a name
            return None, []
        names = "".join(one for n, one in enumerate(letters) if n in long or one in "YX")
        sizes = ", ".join(f"{shape[n]} {letters[n].lower()}" for n in long)
        planes, every = math.prod(shape[n] for n in long), "".join(letters[n] for n in long)
        remedy = f"vit train --axes {every} takes {planes} planes as channels, or "
        remedy = remedy if planes <= MAX_CHANNELS else f"more than {MAX_CHANNELS} channels: "
        raise UnusableFile(f"axes {names} ({sizes}); {remedy}save one plane as an image")
    if series.dataoffset is None and any(one is None for one in series):
        raise UnusableFile("some of its planes are missing")
    if series.keyframe.hash != page.hash:
        raise UnusableFile("its first page is of another image; save one image")
    first = math.prod(shape) == math.prod(page.shape) and series[0].offset == page.offset
    return (None, []) if first else (series, chosen)


def _check_ome(text: str) -> None:
    """Refuse numbers in OME-XML of which tifffile makes lists, and axes within axes."""
    for one in _xml(text).iter():
        planes = 1
        if one.tag.endswith("Pixels"):
            planes = math.prod(int(one.attrib[f"Size{axis}"]) for axis in "ZCT")
        elif one.tag.endswith("TiffData"):
            planes = max(int(one.get(name, 1)) for name in ("PlaneCount", "NumPlanes"))
        if not 0 < planes <= MAX_PAGES or "Along" in one.tag:
            raise UnusableFile(f"OME-XML of {planes:,} planes, or of axes within axes")


def _xml(text: str) -> Any:
    from xml.etree import ElementTree

    if len(text) > MAX_XML:
        raise UnusableFile(f"metadata of more than {MAX_XML:,} characters")
    return ElementTree.fromstring(text)  # expat limits what entities become


def _channel_names(tiff: Any, letters: str, channels: int) -> tuple[str, ...]:
    """Of OME-XML, ImageJ's labels of slices, or GDAL's bands; empty unless each has its own."""
    names: list[str] = []
    gdal = tiff.pages.first.tags.valueof(42112)
    with contextlib.suppress(SyntaxError):  # of XML that is damaged
        if tiff.is_ome and letters == "C":
            images = [one for one in _xml(tiff.ome_metadata) if one.tag.endswith("Image")]
            parts = [one for image in images[:1] for one in image.iter()]
            names = [one.get("Name", "") for one in parts if one.tag.endswith("}Channel")]
        elif tiff.is_imagej and len(letters) == 1:
            names = list((tiff.imagej_metadata or {}).get("Labels", ()))
        elif isinstance(gdal, str) and letters == "S":
            items = [one for one in _xml(gdal) if one.get("role") == "description"]
            by_number = {one.get("sample"): one.text or "" for one in items}
            names = [by_number.get(str(n), "") for n in range(channels)]
    found = tuple(name.strip().partition("\n")[0] for name in names)
    return found if len(found) == channels == len({*found} - {""}) else ()


def _tiff_values(page: Any, series: Any, chosen: list[int], colours: int) -> Array:
    """The values of a page, or of a series like it, (height, width, channels); white is large."""
    if series is None:
        _check_segments(page)
        values: Array = page.asarray(squeeze=False, maxworkers=1)[:, 0]
        order = [1, 2, 0, 3]  # (planes, height, width, channels of a plane), of which one is 1
    else:
        for one in series if series.dataoffset is None else ():
            _check_segments(one)
        letters = series.get_axes(squeeze=False)
        values = series.asarray(maxworkers=1).reshape(series.get_shape(squeeze=False))
        order = [letters.index("Y"), letters.index("X"), *chosen]
        order += {*range(values.ndim)} - {*order}  # of length 1
    values = values.transpose(order).reshape(page.imagelength, page.imagewidth, -1)
    if page.photometric == GREY_INVERTED:
        values = values.copy()
        values[..., :colours] = _inverted(values[..., :colours], page.bitspersample)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _inverted(values: Array, bits: int) -> Array:
    """Black for white: of integers within their range, of floating-point numbers within [0, 1]."""
    if values.dtype.kind == "u":
        return np.asarray(((1 << bits) - 1) - values, dtype=values.dtype)
    return ~values if values.dtype.kind == "i" else 1 - values


def _compression(page: Any) -> str:
    import tifffile

    values = f"{page.bitspersample} bits" if page.dtype is None else page.dtype.name
    return f"{tifffile.COMPRESSION(page.compression).name} compression of {values}"


def _check_compression(page: Any) -> None:
    """Refuse a compression that is not read, or not without imagecodecs."""
    compression = int(page.compression)
    if compression not in BUILT_IN + WITH_IMAGECODECS:
        raise UnusableFile(f"{_compression(page)}; save it with Deflate")
    if compression in WITH_IMAGECODECS:
        what, remedy = _compression(page), "with Deflate"
    elif page.predictor == FLOAT_PREDICTOR:
        what, remedy = "a predictor of floating-point numbers", "without one"
    elif page.bitspersample not in WHOLE_BYTES:
        what, remedy = f"packed values of {page.bitspersample} bits", "as whole bytes"
    else:
        return
    if not has_imagecodecs():
        raise UnusableFile(f"{what}: pip install 'vit-toolkit[tiff]', or save it {remedy}")


def has_imagecodecs() -> bool:
    """Whether the decoders that tifffile itself lacks are installed."""
    return importlib.util.find_spec("imagecodecs") is not None


def present_segments(page: Any, sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Where strips or tiles begin, and their bytes, if none is missing."""
    number = math.prod(page.chunked)
    spans = list(zip(page.dataoffsets, sizes, strict=False))[:number]
    there = [(at, size) for at, size in spans if at > 0 and size > 0]
    if len(there) < number:
        raise UnusableFile(f"{number - len(there)} of its {number} strips or tiles are missing")
    return there


def _check_segments(page: Any) -> None:
    """Refuse strips and tiles that are missing, cut short, or larger than they should be."""
    file, spans = page.parent.filehandle, present_segments(page, page.databytecounts)
    if any(at + size > file.size for at, size in spans):
        raise UnusableFile("damaged or cut short (strips or tiles beyond the end of the file)")
    for at, size in spans if int(page.compression) in DEFLATE else ():
        file.seek(at)
        check_inflated(page, file.read(size))


def check_inflated(page: Any, data: bytes) -> None:
    """Refuse a strip or tile of Deflate that holds more than its size."""
    if int(page.compression) in DEFLATE and not has_imagecodecs():  # tifffile alone has no limit
        inflate = zlib.decompressobj()
        inflate.decompress(data, math.prod(page.chunks) * page.dtype.itemsize)
        if inflate.unconsumed_tail:
            raise UnusableFile("a strip or tile holds more than its size")


# --- NumPy ---------------------------------------------------------------------------------------


def read_npy(file: BinaryIO) -> ArrayImage:
    def opened() -> contextlib.nullcontext[BinaryIO]:
        file.seek(0)
        return contextlib.nullcontext(file)

    return _read_array(opened)


def read_npz(file: BinaryIO) -> ArrayImage | None:
    """Read the header of a `.npz` file with one array; None for any other ZIP archive."""
    if not zipfile.is_zipfile(file):
        return None
    archive = zipfile.ZipFile(file)
    names = archive.namelist()
    if not all(name.endswith(".npy") for name in names):
        return None
    if len(names) != 1:
        raise UnusableFile(f"{len(names)} arrays; save one array in a file")
    return _read_array(lambda: archive.open(names[0]))


def _read_array(opened: Callable[[], contextlib.AbstractContextManager[Any]]) -> ArrayImage:
    """Read the header of a `.npy` file, or of one in an archive, which `opened` opens."""
    with opened() as file:
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[np.lib.format.read_magic(file)]
        shape, _, dtype = read_header(file)
    if dtype.kind not in "uif":
        raise UnusableFile(f"an array of {dtype}; save integers or floating-point numbers")
    if len(shape) not in (2, 3):
        raise UnusableFile(f"an array of shape {shape}; save (height, width, channels)")
    height, width, channels = channels_last(np.broadcast_to(np.uint8(0), shape)).shape

    def load() -> Array:
        with opened() as file:
            values: Array = np.lib.format.read_array(file, allow_pickle=False)
        return channels_last(values.astype(values.dtype.newbyteorder("="), copy=False))

    return ArrayImage("NPY", (width, height), channels, dtype.newbyteorder("="), load)


def channels_last(values: Array) -> Array:
    """(height, width), (height, width, channels) or (channels, height, width) as the second.

    Of the first and the last side the smaller is the channels; the last if they are equal.
    """
    if values.ndim == 2:
        return values[..., None]
    return np.moveaxis(values, 0, 2) if values.shape[0] < values.shape[2] else values


# --- DICOM ---------------------------------------------------------------------------------------

PALETTE = "PALETTE COLOR"
DICOM_COLOURS = (
    *("MONOCHROME1", "MONOCHROME2", PALETTE, "RGB"),
    *("YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT"),
)
"""Photometric interpretations that pydicom converts to RGB."""


def read_dicom(file: BinaryIO) -> ArrayImage:
    if importlib.util.find_spec("pydicom") is None:
        raise UnusableFile("a DICOM file: pip install 'vit-toolkit[dicom]'")
    import pydicom
    from pydicom.pixels.decoders.base import get_decoder

    logging.getLogger("pydicom").disabled = True
    header = pydicom.dcmread(file, stop_before_pixels=True)
    if not header.get("Rows"):
        raise UnusableFile("a DICOM file without an image")
    syntax = header.file_meta.TransferSyntaxUID
    if syntax.is_deflated:
        raise UnusableFile(f"a DICOM file in {syntax.name}; convert it")
    if not get_decoder(syntax).is_available:
        raise UnusableFile(_not_decoded(syntax.name))
    photometric = header.PhotometricInterpretation
    if photometric not in DICOM_COLOURS:
        raise UnusableFile(f"a DICOM file of {photometric} colours; save RGB")
    if header.BitsAllocated not in (8, 16, 32):
        raise UnusableFile(f"a DICOM file of {header.BitsAllocated} bits; 8, 16 and 32 are read")
    if int(header.get("NumberOfFrames") or 1) > 1:
        raise UnusableFile(f"{header.NumberOfFrames} frames; save each as a file")
    colour = int(header.SamplesPerPixel) > 1 or photometric == PALETTE
    integer = np.dtype(f"{'i' if header.PixelRepresentation else 'u'}{header.BitsAllocated // 8}")
    if photometric == PALETTE:
        integer = np.dtype(
            np.uint8 if header.RedPaletteColorLookupTableDescriptor[2] == 8 else np.uint16
        )
    elif not colour and (_has_window(header) or _is_rescaled(header)):
        integer = np.dtype(np.float32)
    return ArrayImage(
        format="DICOM",
        size=(int(header.Columns), int(header.Rows)),
        channels=3 if colour else 1,
        dtype=integer,
        load=lambda: _dicom_values(file),
    )


def _not_decoded(syntax: str) -> str:
    return f"a DICOM file in {syntax}: pip install python-gdcm, or convert it"


def _within_table(values: Array, descriptor: Any) -> Array:
    """Values with an entry in a lookup table; pydicom drops the upper bits of all others."""
    entries, first, bits = map(int, descriptor)
    entries = entries or 2**16
    if bits == 8 and entries > 256:  # of which it drops those too
        raise UnusableFile(f"a DICOM file with a lookup table of {entries} entries of 8 bits")
    return values.astype(np.int64).clip(first, first + entries - 1)


def _has_window(header: Any) -> bool:
    return bool(header.get("VOILUTSequence")) or _has_values(header, "WindowCenter", "WindowWidth")


def _is_rescaled(header: Any) -> bool:
    return bool(header.get("ModalityLUTSequence")) or (
        _has_values(header, "RescaleSlope", "RescaleIntercept")
        and (float(header.RescaleSlope), float(header.RescaleIntercept)) != (1.0, 0.0)
    )


def _has_values(header: Any, *names: str) -> bool:
    """Whether tags are there and not empty."""
    return all(header.get(name) is not None for name in names)


def _dicom_values(file: BinaryIO) -> Array:
    """The values of a DICOM file, (height, width, channels).

    With a window they are what is shown, floating-point numbers in [0, 1]; without one they are
    rescaled to the units of the instrument. Black is small, also for MONOCHROME1.
    """
    from pydicom import dcmread
    from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi_lut

    file.seek(0)
    data = dcmread(file)
    try:
        values: Array = data.pixel_array
    except (RuntimeError, NotImplementedError):  # of all decoders that are installed
        raise UnusableFile(_not_decoded(data.file_meta.TransferSyntaxUID.name)) from None
    if data.PhotometricInterpretation == PALETTE:
        palette = data.RedPaletteColorLookupTableDescriptor
        values = apply_color_lut(_within_table(values, palette), data)
        return values.astype(np.uint8) if palette[2] == 8 else values
    if values.ndim == 3:
        return values
    stored = int(data.BitsStored)
    if data.get("ModalityLUTSequence"):
        values = _within_table(values, data.ModalityLUTSequence[0].LUTDescriptor)
    if _is_rescaled(data):
        values = apply_modality_lut(values, data).astype(np.float32)
    if _has_window(data):
        if data.get("VOILUTSequence"):
            table = data.VOILUTSequence[0].LUTDescriptor
            values = _within_table(values, table)
            black, white = 0, 2 ** table[2] - 1
        else:
            black, white = apply_voi_lut(np.array([-1e12, 1e12]), data)
        shown = apply_voi_lut(values, data)
        values = ((shown - black) / (white - black)).astype(np.float32)
    if data.PhotometricInterpretation == "MONOCHROME1":
        values = _inverted(values, stored)
    return values[..., None]


PHOTOGRAPHS = (b"\xff\xd8\xff", b"\x89PNG")
"""First bytes of JPEG and PNG."""
Reader = Callable[[BinaryIO], ArrayImage | None]
READERS: tuple[tuple[re.Pattern[bytes], Reader], ...] = (
    (re.compile(rb".{128}DICM", re.S), read_dicom),
    (TIFF, read_tiff),
    (re.compile(rb"\x93NUMPY"), read_npy),
    (re.compile(rb"PK\x03\x04"), read_npz),
)
"""Signature of a file's first bytes, and what reads it; a DICOM file may begin as a TIFF."""


# --- what a network takes of them -----------------------------------------------------------------

ValueType = Literal["uint8", "uint16", "float32"]
"""Type of the values that a network takes."""
VALUE_TYPES: tuple[ValueType, ...] = ("uint8", "uint16", "float32")


@dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """Which values of a file a network takes, and how they are normalised.

        input = (clip(value, low, high) - low) / (high - low), less mean, by std

    Args:
        value_type: Type of the values; files of narrower types are read too.
        count: Channels of a file.
        order: Those that the network takes, by their number in the file.
        low: Value of each that becomes 0; lower ones do too.
        high: Value of each that becomes 1.
        mean: Subtracted from each, in [0, 1].
        axes: Of a TIFF, those that are the channels, as in `read_tiff`.
        names: Of the channels in `order`; a file that names its own is read by them.
    """

    value_type: ValueType
    count: int
    order: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    axes: str = ""
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.low, self.high, self.mean, self.std)
        each = [*numbers, self.names] if self.names else numbers
        if not self.order or any(len(values) != len(self.order) for values in each):
            raise ConfigError(f"channels={self}: needs one range, mean, deviation, name for each")

    @property
    def fill(self) -> tuple[float, ...]:
        """The value of each channel that normalisation maps to zero."""
        ends = zip(self.low, self.high, self.mean, strict=True)
        return tuple(low + mean * (high - low) for low, high, mean in ends)

    def check_file(self, channels: int, dtype: "np.dtype[Any] | str") -> None:
        """Refuse a file of another number of channels, or of a wider type."""
        if channels != self.count:
            raise UnusableFile(f"{channels} channels; the network takes {self.count}")
        if self.value_type != "float32" and not np.can_cast(dtype, self.value_type):
            raise UnusableFile(f"values of {dtype}; the network takes {self.value_type}")

    def order_of(self, names: tuple[str, ...]) -> list[int]:
        """The channels of a file in which they have `names`, if it names them."""
        if not (self.names and names):
            return list(self.order)
        if not {*self.names} <= {*names}:
            theirs, ours = (", ".join(one)[:60] for one in (names, self.names))
            raise UnusableFile(f"channels named {theirs}; the network takes {ours}")
        return [names.index(name) for name in self.names]


class ChannelImage:
    """Channels of one size.

    Args:
        values: (height, width, channels).
        dtype: Type of the image, if it is not that of `values`.
    """

    def __init__(
        self, values: Array, *, dtype: np.dtype[Any] | None = None, file_format: str = ""
    ) -> None:
        self.dtype = dtype or values.dtype
        self.bands: Sequence[Image.Image] = [
            Image.fromarray(np.ascontiguousarray(values[..., n], dtype=np.float32))
            for n in range(values.shape[2])
        ]
        self.format = file_format

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.bands[0].size

    @property
    def width(self) -> int:
        return self.size[0]

    @property
    def height(self) -> int:
        return self.size[1]

    def _each(self, operation: Callable[[int, Image.Image], Image.Image]) -> "ChannelImage":
        made = object.__new__(ChannelImage)
        made.dtype, made.format = self.dtype, self.format
        made.bands = [operation(number, band) for number, band in enumerate(self.bands)]
        return made

    def resize(self, size: tuple[int, int], resample: Any, box: Any = None) -> "ChannelImage":
        """As `PIL.Image.Image.resize`."""
        return self._each(lambda _, band: band.resize(size, resample, box=box))

    def crop(self, box: tuple[int, int, int, int]) -> "ChannelImage":
        """As `PIL.Image.Image.crop`."""
        return self._each(lambda _, band: band.crop(box))

    def expand(self, border: Sequence[int], fill: Sequence[float]) -> "ChannelImage":
        """As `PIL.ImageOps.expand`, with (left, top, right, bottom)."""
        colours: Any = fill  # which Pillow also takes as floating-point numbers
        return self._each(lambda n, band: ImageOps.expand(band, tuple(border), colours[n]))

    def transpose(self, method: Image.Transpose) -> "ChannelImage":
        """As `PIL.Image.Image.transpose`."""
        return self._each(lambda _, band: band.transpose(method))

    def rotate(self, angle: float, *, fillcolor: Sequence[float], **options: Any) -> "ChannelImage":
        """As `PIL.Image.Image.rotate`."""
        return self._each(lambda n, band: band.rotate(angle, fillcolor=fillcolor[n], **options))

    def to_array(self) -> Array:
        """(height, width, channels), in the type of the image."""
        values = np.dstack([np.asarray(band) for band in self.bands])
        if self.dtype.kind == "u":
            np.rint(values, out=values)
            values = values.clip(0, np.iinfo(self.dtype).max)
        return values.astype(self.dtype)
