"""The safe reader: good images of every kind upright in RGB, everything else a BadImage."""

import io
import os
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from vit.data import image_archives, image_io
from vit.data.image_io import (
    FORMATS,
    check_header,
    count_scans,
    decode_jpeg,
    file_fingerprint,
    read_header,
    read_image,
    read_intensities,
    read_pixels,
    read_size,
    set_max_pixels,
)
from vit.errors import BadImage

# Four corners of different colours, so that any turn shows.
CORNERS = np.zeros((32, 48, 3), np.uint8)
CORNERS[:16, :24] = 220, 30, 30
CORNERS[:16, 24:] = 30, 200, 60
CORNERS[16:, :24] = 40, 60, 220
CORNERS[16:, 24:] = 230, 210, 40
GREY = np.asarray(Image.fromarray(CORNERS).convert("L"))
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}
"""How an image is stored whose EXIF orientation turns it upright."""


def encoded(image: Image.Image, kind: str, **settings) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def encode_jpeg(image: Image.Image, *, kind: str = "JPEG", **settings) -> bytes:
    return encoded(image, kind, **settings)


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


@pytest.fixture
def write(tmp_path):
    def write(content: bytes, name: str = "x.jpg") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


def assert_shows(path, expected, tolerance=2):
    image = read_image(path)
    assert image.mode == "RGB"
    found = np.asarray(image).astype(int)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance


def refusal(path) -> str:
    with pytest.raises(BadImage) as caught:
        read_image(path)
    assert caught.value.path == os.fsdecode(path)
    assert "\n" not in caught.value.reason
    assert len(caught.value.reason) < 200
    return caught.value.reason


JPEG = {"quality": 95, "subsampling": 0}


@pytest.mark.parametrize(
    ("kind", "settings", "tolerance"),
    [
        ("JPEG", JPEG, 12),
        ("JPEG", JPEG | {"progressive": True}, 12),
        ("MPO", JPEG, 12),
        ("PNG", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("GIF", {}, 0),
        ("BMP", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("PPM", {}, 0),
        ("JPEG2000", {"irreversible": False}, 0),
        ("AVIF", {"quality": 100, "subsampling": "4:4:4"}, 12),
        ("QOI", {}, 0),
    ],
)
def test_formats_are_recognised_by_content_not_by_name(write, kind, settings, tolerance):
    content = encoded(Image.fromarray(CORNERS), kind, **settings)
    for name in ("x.jpg", "X.PNG", "without suffix"):
        path = write(content, name)
        assert_shows(path, CORNERS, tolerance)
        check_header(path)


def test_pillow_supports_all_formats():
    Image.init()
    assert set(FORMATS) <= Image.OPEN.keys()


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize(("kind", "settings"), [("JPEG", JPEG), ("PNG", {}), ("TIFF", {})])
def test_exif_orientation_is_applied(write, orientation, kind, settings):
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](CORNERS)))
    path = write(encoded(stored, kind, exif=exif(orientation), **settings))
    assert_shows(path, CORNERS, 12)
    header = read_header(path)
    assert (header.width, header.height) == read_image(path).size


@pytest.mark.parametrize("tags", [b"", b"Exif\0\0", b"Exif\0\0garbage" * 9, exif(0), exif(99)])
def test_a_damaged_exif_tag_is_ignored(write, tags):
    jpeg = encoded(Image.fromarray(CORNERS), "JPEG", **JPEG)
    segment = b"\xff\xe1" + struct.pack(">H", len(tags) + 2) + tags
    assert_shows(write(jpeg[:2] + segment + jpeg[2:]), CORNERS, 12)


def grey_rgb(values) -> np.ndarray:
    return np.stack([np.asarray(values).astype(int)] * 3, -1)


@pytest.mark.parametrize(
    ("pixels", "kind", "expected"),
    [
        (GREY, "PNG", GREY),
        (GREY > 110, "PNG", (GREY > 110) * 255),
        (GREY.astype(np.uint16) * 257, "PNG", GREY),
        (GREY.astype(np.uint16) * 257, "TIFF", GREY),
        ((GREY // 16).astype(np.uint16) * 257, "PNG", GREY // 16),
        (GREY.astype(np.int32) * 257, "TIFF", GREY),
        ((GREY / 255).astype(np.float32), "TIFF", GREY),
        (
            np.clip(GREY / 255, 0, 0.5).astype(np.float32) * 2.00001 - 1e-7,
            "TIFF",
            np.clip(2 * GREY.astype(int), 0, 255),
        ),
        (GREY.astype(np.float32), "TIFF", GREY),
    ],
)
def test_grey_images_of_any_depth_are_scaled_not_clipped(write, pixels, kind, expected):
    path = write(encoded(Image.fromarray(np.ascontiguousarray(pixels)), kind))
    assert_shows(path, grey_rgb(expected), 1)


@pytest.mark.parametrize("value", [-1.0, 300.0, float("nan"), float("inf")])
def test_floating_point_without_a_known_scale_is_refused(write, value):
    pixels = (GREY / 255).astype(np.float32)
    pixels[0, 0] = value
    assert "values from" in refusal(write(encoded(Image.fromarray(pixels), "TIFF")))


RAMP = np.linspace(0, 4095, GREY.size).astype(np.uint16).reshape(GREY.shape)
"""Values of a camera of 12 bits, in an image of 16."""
SCALED = np.rint(RAMP * (255 / 4095))


def pgm(values: np.ndarray) -> bytes:
    return f"P5\n{values.shape[1]} {values.shape[0]}\n65535\n".encode() + values.tobytes()


def tiff(
    values: np.ndarray, order: str = "<", compression: int = 1, *, cmyk: bool = False
) -> bytes:
    """A TIFF of 16-bit samples, (height, width) or (height, width, channels), in one strip."""
    height, width, *channels = values.shape
    samples = channels[0] if channels else 1
    data = values.astype(f"{order}u2").tobytes()
    data = zlib.compress(data) if compression == 8 else data
    bits = struct.pack(f"{order}{samples}H", *[16] * samples)
    tags = [
        *((256, 4, 1, width), (257, 4, 1, height)),
        (258, 3, samples, int.from_bytes(bits, "little" if order == "<" else "big"))
        if samples == 1
        else (258, 3, samples, 8 + len(data)),
        *(
            (259, 3, 1, compression),
            (262, 3, 1, 5 if cmyk else 2 if channels else 1),
            (273, 4, 1, 8),
        ),
        *((277, 3, 1, samples), (278, 4, 1, height), (279, 4, 1, len(data))),
        *([(338, 3, 1, 2)] if samples == 4 and not cmyk else []),
    ]

    def value(kind: int, count: int, number: int) -> bytes:
        short = kind == 3 and count == 1
        return struct.pack(
            f"{order}HH" if short else f"{order}I", *([number, 0] if short else [number])
        )

    rows = [struct.pack(f"{order}HHI", t, k, n) + value(k, n, v) for t, k, n, v in tags]
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(
        f"{order}I", 8 + len(data) + len(bits)
    )
    table = struct.pack(f"{order}H", len(rows)) + b"".join(rows) + bytes(4)
    return start + data + bits + table


@pytest.mark.parametrize(
    "content",
    [
        encoded(Image.fromarray(RAMP), "PNG"),
        encoded(Image.fromarray(RAMP), "TIFF", compression="tiff_lzw"),
        encoded(Image.fromarray(RAMP.astype(np.int32)), "TIFF"),
        encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF"),
        encoded(Image.fromarray(RAMP), "JPEG2000", irreversible=False),
        *(tiff(RAMP), tiff(RAMP, ">"), pgm(RAMP.astype(">u2"))),
    ],
    ids=["PNG", "LZW", "int32", "float32", "JPEG2000", "TIFF", "big-endian TIFF", "PGM"],
)
def test_the_intensity_range_of_deep_images_becomes_black_to_white(write, content):
    path = write(content)
    assert check_header(path)
    for image in (
        read_image(path, intensity_range=(0, 4095)),
        read_image(path, intensity_range="own"),
        Image.fromarray(read_pixels(path, lambda w, h: (w, h), intensity_range=(0, 4095))),
    ):
        assert np.abs(np.asarray(image) - grey_rgb(SCALED)).max() <= 1
    assert np.array_equal(read_intensities(path)[..., 0], RAMP)
    clipped = np.asarray(read_image(path, intensity_range=(1000, 2000)))[..., 0]
    assert np.array_equal(clipped == 0, RAMP < 1002)
    assert np.array_equal(clipped == 255, RAMP > 1998)


COLOURS = np.stack([RAMP, RAMP[::-1], np.full_like(RAMP, 2048)], -1)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("compression", [1, 8])
def test_both_bytes_of_16_bit_colours_are_read(write, order, compression):
    path = write(tiff(COLOURS, order, compression))
    assert np.array_equal(read_intensities(path), COLOURS)
    found = np.asarray(read_image(path, intensity_range=(0, 4095)))
    assert np.array_equal(found, np.rint(COLOURS * (255 / 4095)))
    assert np.array_equal(read_image(path), np.rint(COLOURS / 257))
    alpha = np.full_like(RAMP, 65535)
    alpha[:16] = 0
    path = write(tiff(np.dstack([COLOURS, alpha]), order, compression))
    over_white = np.asarray(read_image(path, intensity_range=(0, 4095)))
    assert (over_white[:16] == 255).all()
    assert np.array_equal(over_white[16:], found[16:])


def deep_png(values: np.ndarray, colour_type: int, clear: bytes = b"", bits: int = 16) -> bytes:
    """A PNG: colour type 0 is grey, 2 RGB, 4 grey with transparency; or one colour is `clear`."""
    places = np.arange(bits)[::-1]
    filled = [np.packbits((row.reshape(-1, 1) >> places) & 1) for row in values]
    rows = b"".join(b"\0" + row.tobytes() for row in filled)
    header = struct.pack(">IIBBBBB", *values.shape[1::-1], bits, colour_type, 0, 0, 0)
    parts = [(b"IHDR", header), (b"tRNS", clear), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    parts = [part for part in parts if part != (b"tRNS", b"")]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_both_bytes_of_16_bit_colours_of_a_png_are_read(write):
    assert np.array_equal(read_intensities(write(deep_png(COLOURS, 2))), COLOURS)


def test_16_bit_grey_with_transparency_is_read_over_white(write):
    alpha, seen = np.full_like(RAMP, 65535), []
    alpha[:8] = 0
    path = write(deep_png(np.dstack([RAMP, alpha]).astype(np.uint16), 4))
    assert check_header(path)
    assert np.array_equal(read_intensities(path)[..., 0], RAMP)
    dark = np.asarray(read_image(path, on_dark=seen.append))
    assert np.array_equal(dark[8:], grey_rgb(np.rint(RAMP / 257))[8:])
    assert seen == [4095]
    shown = np.asarray(read_image(path, intensity_range=(0, 4095)))
    assert np.array_equal(shown[8:], grey_rgb(SCALED)[8:])
    assert (shown[:8] == 255).all()


@pytest.mark.parametrize(("bits", "kind"), [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (16, 2)])
def test_the_transparent_colour_of_a_png_is_white(write, bits, kind):
    most, channels = 2**bits - 1, 1 + kind
    values = np.random.default_rng(0).integers(0, most + 1, (6, 9, channels))
    for key in (values[0, 0], values[3, 4], np.full(channels, most // 2)):
        path = write(deep_png(values, kind, key.astype(">u2").tobytes(), bits))
        clear = (values == key).all(2, keepdims=True)
        expected = np.where(clear, 255, values * (255 / most))
        assert np.abs(np.asarray(read_image(path)) - expected).max() <= 0.5


def test_16_bit_cmyk_has_the_colours_of_8_bits(write):
    ink = np.random.default_rng(0).integers(0, 256, (6, 9, 4), dtype=np.uint8)
    expected = read_image(write(encoded(Image.fromarray(ink, "CMYK"), "TIFF"), "a.tif"))
    path = write(tiff(ink.astype(np.uint16) * 257, cmyk=True), "b.tif")
    assert not check_header(path)
    assert np.array_equal(read_image(path), expected)


def test_signed_values_are_read_with_an_intensity_range(write):
    values = RAMP.astype(np.int32) - 2000
    path = write(encoded(Image.fromarray(values), "TIFF"))
    assert np.array_equal(read_intensities(path)[..., 0], values)
    found = np.asarray(read_image(path, intensity_range=(-2000, 2095)))
    assert np.array_equal(found, grey_rgb(SCALED))
    assert "--intensity-range" in refusal(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_with_an_intensity_range(write, value):
    pixels = (GREY / 255).astype(np.float32)
    pixels[0, 0] = value
    path = write(encoded(Image.fromarray(pixels), "TIFF"))
    for read in (read_intensities, lambda path: read_image(path, intensity_range=(0, 1))):
        with pytest.raises(BadImage, match="not finite"):
            read(path)


def test_images_of_8_bits_do_not_depend_on_the_intensity_range(write):
    for kind in ("PNG", "JPEG"):
        path = write(encoded(Image.fromarray(CORNERS), kind))
        assert not check_header(path)
        plain = read_image(path)
        assert np.array_equal(read_image(path, intensity_range=(100, 120)), plain)
        with pytest.raises(BadImage, match="8 bits"):
            read_intensities(path)


@pytest.mark.parametrize(
    ("values", "highest"), [(RAMP, 4095), (RAMP * 16, None), (COLOURS, 4095), (RAMP / 65535, None)]
)
def test_images_that_are_read_nearly_black_are_reported(write, values, highest):
    seen = []
    if values.dtype.kind == "f":
        content = encoded(Image.fromarray(values.astype(np.float32)), "TIFF")
    else:
        content = tiff(values)
    path = write(content)
    read_image(path, on_dark=seen.append)
    assert seen == [highest] * (highest is not None)
    read_image(path, intensity_range=(0, 4095), on_dark=seen.append)
    assert len(seen) <= 1


HEIC_START = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


@pytest.mark.parametrize("orientation", [1, 6])
def test_heic_images_are_read_upright_with_their_extra(write, orientation):
    heif = pytest.importorskip("pillow_heif")
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](CORNERS)))
    heif.register_heif_opener()
    content = encoded(stored, "HEIF", quality=95, exif=exif(orientation))
    Image.OPEN.pop("HEIF")  # as in a process that has read none
    path = write(content, "x.heic")
    assert check_header(path) is None
    assert_shows(path, CORNERS, 20)
    assert refusal(write(content[: len(content) // 2]))


def test_a_heic_image_without_the_extra_has_one_line_with_the_remedy(write, monkeypatch):
    monkeypatch.setattr(image_io, "reads_heic", lambda: False)
    reason = refusal(write(HEIC_START + bytes(300), "x.heic"))
    assert "pip install 'vit-toolkit[heic]'" in reason


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_composited_over_white(write, mode):
    image = Image.fromarray(CORNERS).convert(mode)
    image.putalpha(Image.fromarray(np.full((32, 48), 96, np.uint8)))
    shown = CORNERS if mode == "RGBA" else grey_rgb(GREY)
    expected = np.round(shown * (96 / 255) + 255 * (1 - 96 / 255))
    assert_shows(write(encoded(image, "PNG")), expected, 2)


def test_transparent_palette_entries_are_composited_over_white(write):
    image = Image.fromarray(CORNERS).quantize(4)
    index = image.getpixel((0, 0))
    expected = CORNERS.astype(int)
    expected[:16, :24] = 255
    alphas = bytes(0 if entry == index else 255 for entry in range(4))
    assert_shows(write(encoded(image, "PNG", transparency=alphas)), expected, 3)
    assert_shows(write(encoded(image, "PNG", transparency=index)), expected, 3)
    assert_shows(write(encoded(image, "GIF", transparency=index)), expected, 3)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB", "P"])
def test_other_colour_modes_are_converted_to_rgb(write, mode):
    if mode == "YCbCr" and int(PIL.__version__.split(".")[0]) < 13:
        pytest.skip("Pillow 12 cannot read the YCbCr TIFF that it writes")
    image = Image.fromarray(CORNERS).convert("RGB")
    if mode == "LAB":
        from PIL import ImageCms

        srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        image = ImageCms.profileToProfile(image, srgb, lab, outputMode="LAB")
    else:
        image = image.quantize(4) if mode == "P" else image.convert(mode)
    assert_shows(write(encoded(image, "PNG" if mode == "P" else "TIFF")), CORNERS, 24)


@pytest.mark.parametrize(("kind", "settings"), [("GIF", {}), ("PNG", {}), ("TIFF", {})])
def test_the_first_of_several_frames_is_read(write, kind, settings):
    rest = [Image.new("RGB", (48, 32), "black")]
    content = encoded(Image.fromarray(CORNERS), kind, save_all=True, append_images=rest, **settings)
    assert_shows(write(content), CORNERS)


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1)])
def test_images_of_one_pixel_width_or_height_are_read(write, size):
    assert read_image(write(encoded(Image.new("RGB", size), "PNG"))).size == size


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file (0 bytes)"),
        (b"this is text\n" * 20, "text"),
        (b"<!DOCTYPE html><html>404</html>", "web page"),
        (b'{"error": "rate limited"}', "JSON"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (HEIC_START + bytes(300), "HEIC image"),
        (b"%PDF-1.4\n", "PDF"),
        (b"PK\x03\x04" + bytes(99), "ZIP"),
        (b"\xff\xd8\xff\xd9", "damaged"),
        (bytes(4096), "not a readable image"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "damaged"),
    ],
)
def test_files_that_are_not_images_are_refused_with_their_content(write, content, reason):
    path = write(content)
    assert reason in refusal(path)
    with pytest.raises(BadImage):
        check_header(path)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_images_are_refused(write, kind, share):
    noise = np.random.RandomState(0).randint(0, 256, (64, 64, 3)).astype(np.uint8)
    content = encoded(Image.fromarray(noise), kind)
    assert refusal(write(content[: int(len(content) * share)]))


def png(width: int, height: int, chunks: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", chunks) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_001, 14_000, 100_000])
def test_decompression_bombs_are_refused_before_decoding(write, side):
    path = write(png(side, side, zlib.compress(bytes(1000))))
    assert len(path.read_bytes()) < 200
    for reader in (read_image, check_header):
        with pytest.raises(BadImage, match="pixels"):
            reader(path)


def test_an_oversized_file_is_refused_before_reading(tmp_path):
    path = tmp_path / "sparse.jpg"
    with open(path, "wb") as file:
        file.truncate(image_archives.MAX_BYTES + 1)
    assert "bytes are more than the limit" in refusal(path)


def test_pipes_devices_and_folders_are_refused(tmp_path):
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    started = time.monotonic()
    assert refusal(tmp_path / "folder.jpg") == "a folder, not an image"
    assert "pipe" in refusal(tmp_path / "pipe.jpg")
    assert "device" in refusal(tmp_path / "device.jpg")
    assert refusal(tmp_path / "missing.jpg") == "no such file"
    assert refusal(str(tmp_path / "nul\0.jpg"))
    assert time.monotonic() - started < 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads anything")
def test_a_file_without_read_permission_is_refused(write):
    path = write(encoded(Image.fromarray(CORNERS), "PNG"))
    path.chmod(0)
    assert refusal(path) == "Permission denied"


@pytest.mark.parametrize(
    "name", ["日本.jpg", "new\nline.jpg", "-rf.jpg", "[a]*?.jpg", "esc\x1b[31m.jpg"]
)
def test_unusual_file_names_are_read(write, name):
    assert_shows(write(encoded(Image.fromarray(CORNERS), "PNG"), name), CORNERS)
    bad = write(b"", "bad " + name)
    with pytest.raises(BadImage) as caught:
        read_image(bad)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_file_names_that_are_not_utf8_are_read(tmp_path):
    path = os.fsencode(tmp_path) + b"/latin1_\xe9.jpg"
    with open(path, "wb") as file:
        file.write(encoded(Image.fromarray(CORNERS), "PNG"))
    assert_shows(os.fsdecode(path), CORNERS)


def test_any_exception_of_a_decoder_becomes_a_bad_image(write, monkeypatch):
    path = write(encoded(Image.fromarray(CORNERS), "PNG"))
    monkeypatch.setattr(image_io, "to_rgb", lambda *_: 1 / 0)
    assert "division by zero" in refusal(path)


def test_the_fingerprint_of_an_archive_member_is_that_of_the_archive(tmp_path):
    file = tmp_path / "x.tar"
    file.write_bytes(b"12345")
    assert file_fingerprint(str(file))[0] == 5
    assert file_fingerprint(f"{file}/a/b.png") == file_fingerprint(str(file))
    assert file_fingerprint(str(tmp_path / "gone" / "b.png")) == (0, 0, 0, 0)


OPAQUE, OPACITY = (0xFF0000, 0xFF00, 0xFF, 0), (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
BGR = (0xFF, 0xFF00, 0xFF0000, 0xFF000000)


def bmp(pixels: np.ndarray, header: int, masks) -> bytes:
    """A BMP of 32 bits, of which the header has so many bytes; it has masks if any are given."""
    rows = np.empty_like(pixels)
    places = {0xFF: 0, 0xFF00: 1, 0xFF0000: 2}
    rows[..., [places.get(mask, 3) for mask in masks or OPAQUE]] = pixels
    data, known = rows[::-1].tobytes(), struct.pack("<4I", *masks or OPAQUE)
    fields = (header, *pixels.shape[1::-1], 1, 32, 3 if masks else 0, len(data), 0, 0, 0, 0)
    start = (struct.pack("<IiiHHIIiiII", *fields) + known + bytes(124))[:header]
    start += known[:12] if masks and header == 40 else b""
    at = 14 + len(start)
    return b"BM" + struct.pack("<IHHI", at + len(data), 0, 0, at) + start + data


@pytest.mark.parametrize("header", [40, 52, 56, 108, 124])
@pytest.mark.parametrize("masks", [None, OPAQUE, OPACITY, BGR])
@pytest.mark.parametrize("alpha", [0, 255, None])
def test_bmps_have_an_opacity_only_with_its_mask(write, header, masks, alpha):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    pixels[..., 3] = pixels[..., 3] if alpha is None else alpha
    path, known = write(bmp(pixels, header, masks)), header >= 56 and masks in (OPACITY, BGR)
    if masks == BGR and not known:
        assert "Unsupported BMP bitfields layout" in refusal(path)
        return
    share = pixels[..., 3:] / 255 if known else 1
    expected = pixels[..., :3] * share + 255 * (1 - share)
    assert np.abs(np.asarray(read_image(path)) - expected).max() <= known


def test_a_bmp_of_16_bits_with_transparency_is_refused(write):
    data = bytearray(bmp(np.zeros((4, 4, 4), np.uint8), 56, (0x7C00, 0x3E0, 0x1F, 0x8000)))
    data[28] = 16
    assert "a BMP of 16 bits with transparency" in refusal(write(bytes(data)))


# --- fast JPEG decoding


def full_size(width: int, height: int) -> tuple[int, int]:
    return width, height


JPEG_SETTINGS = [
    {"quality": 90},
    {"quality": 30, "subsampling": 0},
    {"quality": 95, "subsampling": 1},
    {"quality": 90, "progressive": True},
    {"quality": 90, "restart_marker_blocks": 2},
    {"quality": 90, "optimize": True},
    {"kind": "MPO"},
]


@pytest.mark.parametrize("settings", JPEG_SETTINGS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_fast_jpeg_decoding_equals_pillow(pil_image, settings, mode):
    data = encode_jpeg(pil_image(83, 61).convert(mode), **settings)
    fast = decode_jpeg(data)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(fast, expected)


def test_jpegs_are_read_without_pillow_s_decoder(pil_image, tmp_path, monkeypatch):
    (path := tmp_path / "x.jpg").write_bytes(encode_jpeg(pil_image(40, 30)))
    monkeypatch.setattr(Image.core, "jpeg_decoder", None)  # Pillow's, which must not be missed
    assert read_image(path).size == (40, 30)


def decode_or_none(path, monkeypatch, *, fast: bool) -> np.ndarray | None:
    with monkeypatch.context() as patch:
        if not fast:
            patch.setattr(image_io, "decode_jpeg", lambda *_: None)
        try:
            return np.asarray(read_image(path))
        except BadImage:
            return None


def test_fast_decoding_refuses_the_same_damaged_jpegs_as_pillow(pil_image, tmp_path, monkeypatch):
    random, path = np.random.default_rng(0), tmp_path / "x.jpg"
    good = encode_jpeg(pil_image(64, 48), quality=85)
    accepted = refused = 0
    for number in range(150):
        data = bytearray(good if number % 3 else good[: random.integers(2, len(good))])
        for place in random.integers(0, len(data), size=number % 4):
            data[place] ^= 1 << int(random.integers(8))
        path.write_bytes(data)
        ours, theirs = (decode_or_none(path, monkeypatch, fast=fast) for fast in (True, False))
        assert (ours is None) == (theirs is None), number
        if ours is not None:
            assert np.array_equal(ours, theirs), number
        accepted, refused = accepted + (ours is not None), refused + (ours is None)
    assert min(accepted, refused) > 20


def repeat_last_scan(data: bytes, count: int) -> bytes:
    """A progressive JPEG whose last scan comes `count` times."""
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


def test_a_jpeg_with_endless_scans_is_refused(pil_image, tmp_path, monkeypatch):
    data = encode_jpeg(pil_image(64, 48), progressive=True)
    assert 3 < count_scans(data) < 20
    assert count_scans(encode_jpeg(pil_image(64, 48))) == 1
    (path := tmp_path / "x.jpg").write_bytes(repeat_last_scan(data, 500))
    assert count_scans(path.read_bytes()) > 500
    monkeypatch.setattr(image_io, "MAX_SCANNED_PIXELS", 64 * 48 * 400)
    for read in (read_image, lambda path: read_pixels(path, full_size)):
        with pytest.raises(BadImage, match="48 pixels: too many; save it as a baseline JPEG"):
            read(path)
    path.write_bytes(data)
    read_image(path)


@pytest.fixture
def limit(monkeypatch):
    """Sets the limit of decoded pixels, 1 for a thousand pixels."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    monkeypatch.setattr(image_io, "MIN_REDUCED_PIXELS", 1000)
    yield lambda thousands: set_max_pixels(1000 * thousands)
    set_max_pixels(image_io.MAX_PIXELS)


@pytest.mark.parametrize("settings", JPEG_SETTINGS)
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_jpeg_above_the_limit_is_decoded_at_a_part_of_its_size(
    pil_image, tmp_path, monkeypatch, limit, settings, orientation
):
    (path := tmp_path / "x.jpg").write_bytes(
        encode_jpeg(pil_image(161, 121), exif=exif(orientation), **settings)
    )
    whole = np.asarray(read_image(path))
    for thousands, size in [(20, (161, 121)), (10, (81, 61)), (2, (41, 31))]:
        limit(thousands)
        if settings.get("progressive") and thousands == 2:
            assert "progressive" in refusal(path)
            continue
        image = read_image(path)
        assert image.size == (size if orientation == 1 else size[::-1])
        assert read_size(path) == size
        assert np.array_equal(image, decode_or_none(path, monkeypatch, fast=False))
        assert np.array_equal(image, read_pixels(path, full_size))
        if thousands == 20:
            assert np.array_equal(image, whole)
    limit(1)  # an eighth is within it, and too small for a network
    assert "161 x 121 is more than 1,000 pixels; raise --max-pixels" in refusal(path)


def test_the_limit_of_other_formats_is_the_setting(pil_image, write, limit):
    path = write(encoded(pil_image(161, 121), "PNG"))
    limit(19)
    assert "raise --max-pixels (in Python vit.set_max_pixels), or make it" in refusal(path)
    limit(20)
    assert read_image(path).size == (161, 121)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(12_000, 9_000), (16_320, 12_240)])
def test_photographs_of_108_and_200_megapixels_are_read(tmp_path, width, height):
    path = tmp_path / "x.jpg"
    Image.new("RGB", (width, height), (9, 99, 199)).save(path)
    image = read_image(path)
    assert image.size == (width // 2, height // 2)
    assert np.abs(np.asarray(image.resize((4, 4))).astype(int) - (9, 99, 199)).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_read_pixels_equals_read_image(pil_image, tmp_path, orientation, kind):
    path = tmp_path / "x"
    pil_image(50, 34).save(path, kind, exif=exif(orientation))
    assert np.array_equal(read_pixels(path, full_size), np.asarray(read_image(path)))


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_large_jpeg_is_decoded_at_reduced_size(pil_image, tmp_path, orientation):
    path = tmp_path / "x.jpg"
    path.write_bytes(encode_jpeg(pil_image(640, 400), exif=exif(orientation), quality=95))
    sizes = []

    def quarter(width: int, height: int) -> tuple[int, int]:
        sizes.append((width, height))
        return width // 4, height // 4

    pixels = read_pixels(path, quarter)
    full = read_image(path)
    assert sizes == [full.size]
    assert pixels.shape == (full.height // 4, full.width // 4, 3)
    small = np.asarray(full.reduce(4)).astype(int)
    assert np.abs(pixels - small).mean() < 2
