"""Files of instruments: the values that other readers find, or a refusal that names the file."""

import io
import itertools
import json
import random
import re
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pydicom
import pytest
import tifffile
from PIL import Image

from tests.slow_cases import mostly_slow
from vit.data import image_io, instrument_images
from vit.data.image_io import EncodedImage, check_header, read_header, read_image, read_intensities
from vit.errors import BadImage

HEIGHT, WIDTH = 32, 48
GREY, RGB, INK = "minisblack", "rgb", "separated"


def ramp(dtype, channels: int = 1) -> np.ndarray:
    """Values of all channels that use most of their type; floats lie in [0, 1]."""
    dtype = np.dtype(dtype)
    y, x, channel = np.ogrid[:HEIGHT, :WIDTH, 1 : channels + 1]
    share = (y * channel + x * (6 - channel % 6)) / (HEIGHT * channel + WIDTH * 6)
    if dtype.kind == "f":
        return share.astype(dtype)
    low, high = np.clip([np.iinfo(dtype).min, np.iinfo(dtype).max], -30000, 60000)
    return (low + share * (high - low)).astype(dtype)


@pytest.fixture
def write(tmp_path):
    """Writes bytes, or an array as a TIFF, and returns the path."""

    def write(content, **settings) -> Path:
        path = tmp_path / "x"
        settings = {"metadata": None, "photometric": GREY, **settings}
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif settings.get("bitspersample", 1) == 1:
            tifffile.imwrite(path, content, **settings)
        else:
            settings |= {"shape": content.shape, "dtype": content.dtype, "rowsperstrip": HEIGHT}
            tifffile.imwrite(path, iter([packed(content, settings["bitspersample"])]), **settings)
        return path

    return write


def packed(values, bits) -> bytes:
    """Rows of values of `bits` bits each, filled up to whole bytes."""
    stored = values.astype(">u2").reshape(HEIGHT, -1, 1).view("u1")
    rows = np.unpackbits(stored, axis=-1)[..., 16 - bits :].reshape(HEIGHT, -1)
    return np.packbits(rows, axis=1).tobytes()


def in_memory(save, *arguments, **settings) -> bytes:
    save(buffer := io.BytesIO(), *arguments, **settings)
    return buffer.getvalue()


def refusal(path, read=read_image, **settings) -> str:
    """Why a file is refused, in one line; empty if it is read."""
    reason = ""
    try:
        read(path, **settings)
    except BadImage as error:
        reason = error.reason
    assert "\n" not in reason
    assert len(reason) < 200
    return reason


# --- TIFF ----------------------------------------------------------------------------------------

KINDS = list(
    itertools.product(
        *("<>", range(1, 7), (False, True), (None, (16, 16))),
        (None, "lzw", "deflate", "packbits", "zstd", "jpeg"),
        *(("miniswhite", GREY, RGB, INK), (False, True)),
    )
)
"""Byte order, channels, planar, tile, compression, colours, whether the last one is opacity."""
NAMED = re.compile(
    r"\d channels; the network takes 1 \(grey\) or 3 \(colours\)"
    r"|JPEG compression of uint(8|16); save it with Deflate"
    r"|ycbcr colours of 12 bits; save RGB of 8 bits"
)


def from_ink(values: np.ndarray) -> np.ndarray:
    """The RGB of CMYK of 8 or 16 bits, as Pillow converts 8 bits."""
    ink = (values[..., :4] >> (8 * values.itemsize - 8)).astype(np.uint8)
    return np.asarray(Image.fromarray(ink, "CMYK").convert("RGB"))


def inverted(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "f":
        return 1 - values
    return np.iinfo(values.dtype).max - values if values.dtype.kind == "u" else -1 - values


def check_tiff(path, dtype, order, channels, planar, tile, compression, photometric, alpha) -> str:
    """`read`, why it is refused, or empty if tifffile does not write such a file."""
    colours = {RGB: 3, INK: 4}.get(photometric, 1)
    extra = channels - colours
    if extra < 0 or (alpha and extra != 1) or (planar and channels == 1):
        return ""
    values = ramp(dtype, channels)
    settings = {"byteorder": order, "photometric": photometric, "compression": compression}
    if channels > 1:
        settings["planarconfig"] = "separate" if planar else "contig"
    if extra:
        settings["extrasamples"] = ["unassalpha"] if alpha else ["unspecified"] * extra
    stored = np.ascontiguousarray(np.moveaxis(values, -1, 0)) if planar else values.squeeze()
    try:
        tifffile.imwrite(path, stored, tile=tile, metadata=None, **settings)
        if compression == "jpeg":
            values = tifffile.imread(path)
            values = (np.moveaxis(values, 0, -1) if planar else values).reshape(HEIGHT, WIDTH, -1)
    except Exception:
        return ""
    bright = inverted(values) if photometric == "miniswhite" else values
    bright = bright[..., : channels - alpha]
    try:
        deep = check_header(path)
        read = read_intensities(path) if deep else np.asarray(read_image(path)).astype(int)
    except BadImage as error:
        return error.reason
    if deep:
        assert read.dtype == np.dtype(dtype)
        assert np.array_equal(read, bright)
        return "read"
    bright = from_ink(values) if photometric == INK else bright
    shown = np.broadcast_to(bright, read.shape).astype(float)
    if alpha:
        opacity = values[..., -1:] / 255
        shown = shown * opacity + 255 * (1 - opacity)
    assert np.abs(read - shown).max() <= (12 if compression == "jpeg" else 1 if alpha else 0)
    return "read"


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype", mostly_slow(["u2", "u1", "u4", "i4", "i1", "i2", "f4", "u8", "f2", "f8"])
)
def test_tiffs_of_any_kind_are_read_exactly_or_refused_by_name(tmp_path, dtype, step):
    found = [check_tiff(tmp_path / "x", dtype, *kind) for kind in KINDS[::step]]
    assert found.count("read") > (30 if dtype == "u1" else 80)
    refused = set(found) - {"read", ""}
    assert all(map(NAMED.fullmatch, refused)), refused
    assert len(refused) > (dtype == "u1")


U2 = ramp("u2")[..., 0]
COLOURS = ramp("u2", 3)
F4 = ramp("f4")[..., 0]
MAP = np.zeros((3, 65536), np.uint16)


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        (U2, {"predictor": 2, "compression": "deflate"}),
        (COLOURS, {"predictor": 2, "compression": "lzw", "byteorder": ">", "photometric": RGB}),
        (F4, {"predictor": 3, "compression": "deflate"}),
        (ramp("f8", 3), {"predictor": 3, "compression": "zstd", "photometric": RGB}),
        (COLOURS, {"bigtiff": True, "photometric": RGB}),
        (U2, {"bigtiff": True, "byteorder": ">", "tile": (16, 32)}),
        (U2, {"rowsperstrip": 5}),
        (ramp("u2", 32), {"planarconfig": "contig"}),
    ],
)
def test_further_tiffs_are_read_exactly(write, values, settings):
    path = write(values, **settings)
    mode = f"{values.dtype.name} x {values.size // U2.size}"
    assert read_header(path) == ("TIFF", mode, False, False, True, WIDTH, HEIGHT)
    assert np.array_equal(read_intensities(path), values.reshape(HEIGHT, WIDTH, -1))


@pytest.mark.parametrize("bits", [1, 2, 4, 12])
@pytest.mark.parametrize("photometric", [GREY, "miniswhite"])
def test_packed_values_are_read(write, bits, photometric):
    values = U2 >> (16 - bits)
    stored = values.astype(bool if bits == 1 else "u1" if bits < 8 else "u2")
    path = write(stored, photometric=photometric, bitspersample=bits)
    bright = values if photometric == GREY else 2**bits - 1 - values
    if bits == 12:
        assert np.array_equal(read_intensities(path)[..., 0], bright)
    else:
        assert np.array_equal(np.asarray(read_image(path))[..., 0], bright * 255 // (2**bits - 1))


@pytest.mark.parametrize(
    "compression", ["tiff_ccitt", "group3", "group4", "tiff_lzma", "tiff_jpeg"]
)
def test_compressions_of_pillow_are_read(compression):
    mode = "L" if compression in ("tiff_lzma", "tiff_jpeg") else "1"
    image = Image.fromarray(ramp("u1")[..., 0]).convert(mode)
    content = in_memory(image.save, "TIFF", compression=compression)
    found = np.asarray(read_image(EncodedImage("x", content)).convert("L")).astype(int)
    assert np.abs(found - np.asarray(image.convert("L"))).max() < 12


@pytest.mark.parametrize(
    ("values", "settings", "reason"),
    [
        (np.where(F4 > 0.5, np.nan, F4), {}, "values that are not finite|values from nan"),
        (np.where(F4 > 0.5, np.inf, F4), {}, "values that are not finite|values from 0 to inf"),
        (U2.astype("c8"), {}, "a TIFF of minisblack and complex64, which no network reads"),
        (U2, {"photometric": "palette", "colormap": MAP}, "palette colours of 16 bits; save RGB"),
        (COLOURS, {"photometric": "cielab"}, "cielab colours of 16 bits; save RGB"),
        (ramp("u1", 3) >> 4, {"photometric": RGB, "bitspersample": 4}, "rgb colours of 4 bits"),
        (np.stack([U2] * 3), {"volumetric": True, "tile": (3, 16, 16)}, "a volume of 3 slices"),
        (ramp("u2", 33), {"planarconfig": "contig"}, "33 channels; at most 32 are read"),
        (ramp("f4", 4), {"photometric": INK}, r"4 channels; the network takes 1 \(grey\) or 3"),
        (COLOURS, {"photometric": RGB, "compression": "lzma"}, "LZMA compression of uint16"),
        (U2, {"compression": "jpeg2000"}, "JPEG2000 compression of uint16; save it with Deflate"),
        (ramp("u1")[..., 0], {"compression": "jpegxl"}, "JPEGXL compression of uint8"),
    ],
)
def test_what_no_network_reads_is_refused_by_name(write, values, settings, reason):
    path = write(values, **settings)
    assert re.match(reason, refusal(path))
    assert re.match(reason, refusal(path, intensity_range=(0, 1)))


@pytest.mark.parametrize("dtype", ["u1", "u2"])
@pytest.mark.parametrize(("photometric", "colours"), [(GREY, 1), (RGB, 3)])
@pytest.mark.parametrize("premultiplied", [False, True])
def test_opacity_is_composited_over_white(write, dtype, photometric, colours, premultiplied):
    white = np.iinfo(dtype).max
    values = np.dstack([ramp(dtype, colours) // 3, np.full((HEIGHT, WIDTH), white // 5 * 2, dtype)])
    extra = "assocalpha" if premultiplied else "unassalpha"
    path = write(values, photometric=photometric, planarconfig="contig", extrasamples=[extra])
    share = values[..., :colours] * (255 / white) * (1.0 if premultiplied else 0.4)
    expected = np.broadcast_to(share + 255 * 0.6, (HEIGHT, WIDTH, 3))
    assert read_header(path).alpha
    assert np.abs(np.asarray(read_image(path)) - expected).max() <= 2


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, -1), (8, 1)])
def test_the_orientation_of_a_deep_tiff_is_applied(write, orientation, turns):
    path = write(U2, extratags=[(274, 3, 1, orientation, True)])
    upright = np.rot90(np.rint(U2 / 257), turns)
    assert np.array_equal(np.asarray(read_image(path))[..., 0], upright)
    header = read_header(path)
    assert (header.height, header.width) == upright.shape
    assert header.exif_rotated == (orientation != 1)


def test_pages_of_another_size_are_ignored(tmp_path):
    path = tmp_path / "x"
    for tag in (0, 1):  # whether the second page is a reduced one
        with tifffile.TiffWriter(path) as file:
            file.write(U2, photometric=GREY, metadata=None)
            file.write(U2[::2, ::2], photometric=GREY, metadata=None, subfiletype=tag)
        assert not image_io.has_more_frames(path)
        assert np.array_equal(read_intensities(path)[..., 0], U2)


@pytest.mark.parametrize(("dtype", "channels"), [("u2", 3), ("u4", 4), ("f8", 3)])
def test_the_limit_of_pixels_counts_bytes(write, monkeypatch, dtype, channels):
    path = write(ramp(dtype, channels), planarconfig="contig")
    pixels = {"u2": 1, "u4": 2, "f8": 3}[dtype]  # for which one of so many bytes counts
    monkeypatch.setattr(image_io, "_limit", [pixels * U2.size])
    assert read_intensities(path).shape == (HEIGHT, WIDTH, channels)
    monkeypatch.setattr(image_io, "_limit", [pixels * U2.size - 1])
    for read in (read_intensities, check_header):
        assert re.search(r"more than .* pixels of 8 bytes; raise --max-pixels", refusal(path, read))


# --- TIFF without imagecodecs, and damage of its strips ------------------------------------------

EXTRA = r"pip install 'vit-toolkit\[tiff\]', or save it (with Deflate|without one|as whole bytes)"


@pytest.mark.parametrize(
    ("values", "settings", "name"),
    [
        (F4, {"compression": "lzw"}, "LZW compression of float32"),
        (U2, {"compression": "zstd"}, "ZSTD compression of uint16"),
        (U2 >> 4, {"bitspersample": 12}, "packed values of 12 bits"),
        (F4, {"predictor": 3, "compression": "deflate"}, "a predictor of floating-point numbers"),
    ],
)
def test_without_imagecodecs_the_remedy_is_named(write, monkeypatch, values, settings, name):
    path = write(values, **settings)
    monkeypatch.setattr(instrument_images, "has_imagecodecs", lambda: False)
    assert re.fullmatch(f"{name}: {EXTRA}", refusal(path))


def test_without_imagecodecs_packbits_deflate_and_lzw_of_grey_are_read(tmp_path):
    kinds = [{}, {"compression": "packbits"}, {"compression": "deflate"}]
    lzw = {"compression": "lzw", "predictor": 2}
    kinds += [lzw, {**lzw, "byteorder": ">"}, {**lzw, "tile": (16, 16)}]
    kinds.append({"compression": "deflate", "predictor": 2, "byteorder": ">", "tile": (16, 16)})
    for number, kind in enumerate(kinds):
        tifffile.imwrite(tmp_path / str(number), U2, photometric=GREY, metadata=None, **kind)
    code = (
        "import sys; sys.modules['imagecodecs'] = None\n"
        "from vit.data.image_io import read_intensities\n"
        "assert not {'tifffile', 'pydicom'} & set(sys.modules), 'imported at once'\n"
        f"print([read_intensities(rf'{tmp_path}/{{n}}').tolist() for n in range({len(kinds)})])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert np.array_equal(json.loads(found.stdout), [U2[..., None]] * len(kinds))


def overwrite(path: Path, tag: str, index: int, value: int) -> None:
    """Change one of the values of a tag, in the file."""
    with tifffile.TiffFile(path, mode="r+") as file:
        entry = file.pages.first.tags[tag]
        values = [int(old) for old in np.atleast_1d(entry.value)]
        entry.overwrite([*values[:index], value, *values[index + 1 :]])


@pytest.mark.parametrize("codecs", [False, True])
def test_a_strip_that_holds_more_than_its_size_is_refused(write, monkeypatch, codecs):
    path = write(U2, compression="deflate")
    monkeypatch.setattr(instrument_images, "has_imagecodecs", lambda: codecs)
    assert np.array_equal(read_intensities(path)[..., 0], U2)
    bomb = zlib.compress(bytes(50_000_000))
    overwrite(path, "StripOffsets", 0, path.stat().st_size)
    overwrite(path, "StripByteCounts", 0, len(bomb))
    path.write_bytes(path.read_bytes() + bomb)
    assert codecs or refusal(path) == "a strip or tile holds more than its size"
    assert refusal(path)


@pytest.mark.parametrize("dtype", ["u1", "u2"])
@pytest.mark.parametrize("compression", [None, "deflate", "lzw"])
@pytest.mark.parametrize("tile", [None, (16, 16)])
def test_missing_strips_and_tiles_are_never_zeros(write, dtype, compression, tile):
    names = ("TileOffsets", "TileByteCounts") if tile else ("StripOffsets", "StripByteCounts")
    number, end = 6 if tile else 4, 1 << 15
    for name, value in itertools.product(names, (0, end)):
        path = write(ramp(dtype)[..., 0], tile=tile, compression=compression, rowsperstrip=8)
        overwrite(path, name, 2, value)
        if value == 0:
            assert refusal(path) == f"1 of its {number} strips or tiles are missing"
        elif dtype == "u2" or "Offsets" in name or compression:  # Pillow needs no byte counts
            assert "damaged or cut short" in refusal(path)


@pytest.mark.parametrize("dtype", ["u1", "u2"])
def test_values_without_byte_counts_are_read(write, dtype):
    path = write(values := ramp(dtype)[..., 0])
    with tifffile.TiffFile(path) as file:
        at = file.pages.first.tags["StripByteCounts"].offset
    data = path.read_bytes()
    path.write_bytes(data[:at] + b"\xff\xff" + data[at + 2 :])
    found = np.asarray(read_image(path)) if dtype == "u1" else read_intensities(path)
    assert np.array_equal(found[..., 0], values)


# --- damage --------------------------------------------------------------------------------------

DICOM = Path(pydicom.__file__).parent / "data" / "test_files"
OBJECTS = np.array([[{}]])  # which numpy would unpickle


def bases() -> list[bytes]:
    noise = np.random.default_rng(0).integers(0, 60000, (64, 80, 3), dtype=np.uint16)
    kinds = [{}, {"compression": "lzw"}, {"compression": "deflate", "predictor": 2}]
    kinds += [{"tile": (16, 16), "compression": "zstd"}, {"tile": (32, 16)}, {"bigtiff": True}]
    kinds += [{"compression": "packbits", "rowsperstrip": 3}, {"byteorder": ">"}]
    files = [in_memory(tifffile.imwrite, noise, photometric=RGB, **kind) for kind in kinds]
    files.append(in_memory(tifffile.imwrite, F4, predictor=3, compression="deflate"))
    files += [in_memory(np.save, noise), in_memory(np.savez_compressed, noise)]
    names = ("CT_small.dcm", "MR_small.dcm", "SC_rgb_rle_16bit.dcm", "MR_small_jp2klossless.dcm")
    return files + [(DICOM / name).read_bytes() for name in names]


def damaged(good: bytes, how: int, rng: random.Random) -> bytes:
    data = bytearray(good)
    if how == 0:
        return good[: rng.randrange(1, len(good))]
    if how == 1:
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == 2:  # near the beginning
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(min(600, len(data)))] = rng.randrange(256)
    else:  # near the end, where many a TIFF has its tags
        for _ in range(3):
            data[-rng.randrange(1, 600)] = rng.choice((0, 255, rng.randrange(256)))
    return bytes(data)


def test_damaged_files_are_read_or_refused_in_one_line(capfd):
    rng, files, refused = random.Random(0), bases(), 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=r"(PIL|pydicom)\.")  # as in a user's process
        for number in range(300):
            data = damaged(files[number % len(files)], number // len(files) % 4, rng)
            start = time.monotonic()
            refused += bool(refusal(EncodedImage("x", data), intensity_range="own"))
            assert time.monotonic() - start < 2, number
    assert not warned
    assert capfd.readouterr() == ("", "")
    assert 100 < refused < 280


# --- NumPy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "u8", "i2", ">i4", "f2", ">f4", "f8"])
@pytest.mark.parametrize("save", [np.save, np.savez, np.savez_compressed])
@pytest.mark.parametrize(("channels", "first"), [(0, False), (1, False), (3, False), (3, True)])
def test_numpy_files_are_read(write, dtype, save, channels, first):
    values = ramp(dtype, channels or 1)
    stored = np.moveaxis(values, -1, 0) if first else values if channels else values[..., 0]
    path = write(in_memory(save, stored.astype(dtype)))
    header = read_header(path)
    assert header[:2] == ("NPY", f"{values.dtype.newbyteorder('=').name} x {channels or 1}")
    assert (header.width, header.height) == (WIDTH, HEIGHT)
    if dtype == "u1":
        assert not header.deep
        assert np.array_equal(read_image(path), np.broadcast_to(values, (HEIGHT, WIDTH, 3)))
    else:
        assert np.array_equal(read_intensities(path), values)
        assert read_intensities(path).dtype.isnative


@pytest.mark.parametrize("shape", [(5, 6, 5), (4, 9, 6), (9, 6, 4), (6, 4, 5)])
def test_the_smaller_of_the_outer_sides_is_the_channels(write, shape):
    values = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    expected = np.moveaxis(values, 0, 2) if shape == (4, 9, 6) else values
    assert np.array_equal(read_intensities(write(in_memory(np.save, values))), expected)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (in_memory(np.save, OBJECTS, allow_pickle=True), "an array of object; save integers"),
        (in_memory(np.save, U2 > 9), "an array of bool; save integers"),
        (in_memory(np.save, U2.astype("c8")), "an array of complex64; save integers"),
        (in_memory(np.save, U2.ravel()), r"an array of shape \(1536,\); save \(height, width, "),
        (in_memory(np.save, U2[None, None]), r"an array of shape \(1, 1, 32, 48\); save"),
        (in_memory(np.save, U2[:0]), "has no pixels: 48 x 0 x 1"),
        (in_memory(np.save, np.zeros((40, 40, 33), np.uint8)), "33 channels; at most 32"),
        (in_memory(np.save, U2)[:-1], "damaged or cut short"),
        (in_memory(np.save, U2)[:50], "damaged or cut short"),
        (in_memory(np.savez, U2, U2), "2 arrays; save one array in a file"),
        (in_memory(np.savez, OBJECTS), "an array of object"),
        (in_memory(np.savez, U2)[:-30], "not a readable image"),
        (in_memory(np.savez, U2).replace(U2[9].tobytes(), bytes(2 * WIDTH)), "damaged.*CRC"),
    ],
)
def test_other_numpy_files_are_refused(write, content, reason):
    assert re.match(reason, refusal(write(content)))
