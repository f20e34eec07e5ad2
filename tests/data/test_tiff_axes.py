"""Axes, names of channels and nodata of TIFFs: as tifffile reads them, or a refusal by name."""

import io
import itertools
import random
import re
import resource
import struct
import time
import warnings
from typing import Any

import numpy as np
import pytest
import tifffile

from tests.data.test_instrument_images import damaged, refusal
from vit.data.image_io import (
    EncodedImage,
    check_header,
    read_channels,
    read_image,
    read_intensities,
)
from vit.data.instrument_images import ChannelSpec
from vit.errors import BadImage

HEIGHT, WIDTH = 20, 28
KINDS = [
    kind
    for kind in itertools.product(
        *(("ome", "imagej", "axes", "shaped", "plain"), ("u1", "u2", "f4"), range(1, 7)),
        *((1, 3), (1, 2), ("pages", "planar", "contig"), (None, "deflate", "lzw"), (0, 1)),
    )
    if not (kind[5] != "pages" and kind[2] == 1) and not (kind[0] == "imagej" and kind[7])
]
"""Metadata, type, channels, z, t, layout, compression, levels of a pyramid in SubIFDs."""
REFUSED = re.compile(
    r"axes (\w+) \((\d+ \w(, )?)+\); (vit train --axes (\w+) takes \d+ planes as channels, or "
    r"|more than 32 channels: )save one plane as an image"
)


def encoded(values: np.ndarray, **options: Any) -> EncodedImage:
    tifffile.imwrite(file := io.BytesIO(), values, **{"photometric": "minisblack", **options})
    return EncodedImage("x", file.getvalue())


def write(kind, dtype, channels, z, t, layout, compression, levels) -> EncodedImage | None:
    """None if tifffile does not write such a file."""
    sizes = {"T": t, "Z": z, "C": channels, "Y": HEIGHT, "X": WIDTH}
    if layout != "pages":
        sizes = {"T": t, "Z": z, "S": channels, "Y": HEIGHT, "X": WIDTH}
    if layout == "contig":
        sizes["S"] = sizes.pop("S")
    sizes = {axis: size for axis, size in sizes.items() if size > 1}
    count = np.arange(np.prod([*sizes.values()])).reshape([*sizes.values()])
    values = (count / count.size if dtype == "f4" else count * 7 % 60000).astype(dtype)
    colours = layout != "pages" and channels in (3, 4)
    options = {"compression": compression, "photometric": "rgb" if colours else "minisblack"}
    if layout != "pages":
        options["planarconfig"] = "separate" if layout == "planar" else "contig"
    metadata = {"plain": None, "shaped": {}}.get(kind, {"axes": "".join(sizes)})
    named = {"ome": kind == "ome", "imagej": kind == "imagej"}
    named["shaped"] = None if kind in ("axes", "shaped") else False
    try:
        with tifffile.TiffWriter(file := io.BytesIO(), **named) as writer:
            writer.write(values, subifds=levels, metadata=metadata, **options)
            if levels:
                every = tuple(slice(None, None, 2 if axis in "YX" else 1) for axis in sizes)
                less = None if metadata is None else {}
                writer.write(values[every], subfiletype=1, metadata=less, **options)
    except ValueError:
        return None
    return EncodedImage("x", file.getvalue())


def check_axes(file: EncodedImage) -> str:
    """`read`, `page` (the first, by Pillow), `refused`, or `taken` with the axes of the remedy."""
    with tifffile.TiffFile(io.BytesIO(file.data)) as tiff:
        series, first = tiff.series[0], tiff.pages.first.asarray()
        letters, shape = series.get_axes(squeeze=False), series.get_shape(squeeze=False)
        values = series.asarray().reshape(shape)
        planar = tiff.pages.first.planarconfig == 2 and first.ndim == 3
        opacity = tuple(tiff.pages.first.extrasamples) == (2,)

    def channels(names: str) -> np.ndarray:
        chosen: list[int] = []
        for name in names:
            where = (n for n, one in enumerate(letters) if one == name and n not in chosen)
            chosen.append(next(where))
        order = [letters.index("Y"), letters.index("X"), *chosen]
        order += [n for n in range(len(letters)) if n not in order]
        return values.transpose(order).reshape(HEIGHT, WIDTH, -1)

    others = [axis for axis, size in zip(letters, shape, strict=True) if size > 1]
    others = [axis for axis in others if axis not in "YX"]
    if reason := refusal(file, check_header):
        assert len(others) > 1 or others[0] not in "CS"
        taken = REFUSED.fullmatch(reason)
        assert taken is not None, reason
        assert taken[1] == "".join(one for one in letters if one in [*others, "Y", "X"])
        if taken[5] is None:
            return "refused"
        assert np.array_equal(read_intensities(file, taken[5]), channels(taken[5]))
        assert check_header(file, taken[5]).axes == taken[5]
        return "taken"
    if check_header(file) is None:
        assert set(others) <= {*"IQS"}, "it names what is left out"
        first = np.moveaxis(first, 0, -1) if planar else first
        expected = first.reshape(HEIGHT, WIDTH, -1)
        shown = np.asarray(read_image(file))
        assert opacity or np.array_equal(shown, np.broadcast_to(expected, shown.shape))
        return "page"
    assert others in ([], ["C"], ["S"])
    found, expected = read_intensities(file), channels("".join(others))
    assert np.array_equal(found, expected[..., : expected.shape[2] - opacity])
    return "read"


@pytest.mark.parametrize("step", [41, pytest.param(5, marks=pytest.mark.slow)])
def test_files_of_any_axes_are_read_as_tifffile_does_or_refused_by_name(step):
    files = [write(*kind) for kind in KINDS[::step]]
    found = [check_axes(file) for file in files if file is not None]
    assert {"read", "page", "taken", "refused"} == set(found)
    assert len(found) > 0.9 * len(files)


STACK = np.random.default_rng(0).integers(0, 60000, (2, 3, 32, 48), dtype=np.uint16)
OF_CHANNELS = {"axes": "CYX", "Channel": {"Name": ["red", "µ & x", "nir"]}}


@pytest.mark.parametrize(
    ("options", "axes", "reason"),
    [
        (
            {"ome": True, "metadata": {"axes": "ZCYX"}},
            "C",
            r"\(2 z, 3 c\); vit train --axes ZC",
        ),
        (
            {"ome": True, "metadata": {"axes": "ZCYX"}},
            "ZP",
            "no axis P in TZCYXS; vit train",
        ),
        ({"ome": True, "metadata": {"axes": "ZCYX"}}, "ZCX", "no axis X in"),
        ({"metadata": None, "description": "Aperio Image"}, "", "pages of svs; save it by ImageJ"),
        ({"metadata": {"axes": "ZTCY"}}, "", "axes ZTCY, which have no rows and columns"),
    ],
)
def test_other_axes_are_refused(options, axes, reason):
    with pytest.raises(BadImage, match=reason):
        check_header(encoded(STACK, **options), axes)


def test_axes_are_taken_in_the_order_given():
    file = encoded(STACK, ome=True, metadata={"axes": "ZCYX"})
    expected = STACK.transpose(2, 3, 1, 0).reshape(32, 48, 6)
    assert np.array_equal(read_intensities(file, "CZ"), expected)
    small = encoded(STACK[0].astype("u1"), metadata=None)
    assert check_header(small) is None  # Pillow reads the first of pages without a name
    assert np.array_equal(read_intensities(small, "I"), STACK[0].astype("u1").transpose(1, 2, 0))
    with pytest.raises(BadImage, match=r"no TIFF, which alone names its axes \(vit train --axes C"):
        check_header(EncodedImage("x", b"\xff\xd8\xff\xe0"), "C")


def pages(number: int, *, bits: int = 16, text: bytes = b"", back: bool = False) -> EncodedImage:
    """Many pages of 4 x 4 that share their pixels and description; `back`: the last leads back."""
    tags = [(256, 4, 1, 4), (257, 4, 1, 4), (258, 3, 1, bits), (259, 3, 1, 1), (262, 3, 1, 1)]
    tags += [(270, 2, len(text), 40)] if text else []
    tags += [(273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, 4), (279, 4, 1, 2 * bits)]
    first, size = 40 + len(text) + len(text) % 2, 6 + 12 * len(tags)
    data = [struct.pack("<2sHI32x", b"II", 42, first), text, b"\0" * (len(text) % 2)]
    body = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    for page in range(number):
        last = first + size * (number // 2) if back else 0
        data.append(
            body + struct.pack("<I", first + size * (page + 1) if page < number - 1 else last)
        )
    return EncodedImage("x", b"".join(data))


def ome(c: int, z: int = 1, part: str = "") -> bytes:
    sizes = f'DimensionOrder="XYCZT" SizeC="{c}" SizeT="1" SizeX="4" SizeY="4" SizeZ="{z}"'
    return f"<OME><Image><Pixels {sizes}><TiffData {part}/></Pixels></Image></OME>\0".encode()


OTHER_FILE = 'PlaneCount="1"><UUID FileName="y.tif">urn:uuid:1</UUID></TiffData><TiffData IFD="1"'
IMAGEJ = b"ImageJ=1.11a\nimages=100000\nslices=100000\n\0"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (pages(100_000), "more than 1,024 pages"),
        (pages(100_000, bits=8), ""),
        (pages(100_000, text=ome(100_000)), "more than 1,024 pages"),
        (pages(100_000, text=IMAGEJ), "more than 1,024 pages"),
        (pages(100_000, bits=8, text=b'{"shape": [100000, 4, 4]}\0'), "more than 1,024 pages"),
        (pages(500, back=True), "more than 1,024 pages"),
        (pages(1000, text=ome(1000)), "1000 channels; at most 32"),
        (pages(3, text=ome(999_999, 999_999)), "OME-XML of 999,998,000,001 planes"),
        (pages(3, text=ome(3, 1, 'PlaneCount="999999999"')), "OME-XML of 999,999,999 planes"),
        (pages(3, text=ome(3, 1, 'IFD="2"')), "some of its planes are missing"),
        (pages(3, text=ome(5)), "some of its planes are missing"),
        (pages(3, text=ome(3, 1, OTHER_FILE)), "OME-TIFF in several files, or damaged"),
        (pages(1, text=b"<OME>" + b"<a/>" * 1_000_001 + b"</OME>\0"), "metadata of more than"),
        (pages(1, text=b'{"shape": [' + b"1," * 50_000 + b"4, 4]}\0"), "axes QQQQ"),
        (pages(3), r"axes IYX \(3 i\); vit train --axes I takes 3 planes"),
        (pages(5, text=b'{"shape": [5, 4, 4], "axes": "CYX"}\0'), ""),
    ],
)
def test_many_pages_and_numbers_without_end_take_little_time_and_memory(file, reason):
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = refusal(file, check_header)
    assert re.match(reason or "$", found), found
    assert time.monotonic() - began < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def with_other_numbers(data: bytes, rng: random.Random) -> bytes:
    """Metadata of the axes with some other digits."""
    words = rb"(Size\w|IFD|Count|First\w|channels|slices|images|shape)\W+(\d+)"
    at = [place for found in re.finditer(words, data) for place in range(*found.span(2))]
    changed = bytearray(data)
    for place in rng.sample(at, min(3, len(at))):
        changed[place] = rng.choice(b"0123456789")
    return bytes(changed)


def test_damaged_stacks_are_read_or_refused_in_one_line(capfd):
    kinds = [{"ome": True}, {"imagej": True}, {}]
    forms = [(STACK, "ZCYX"), (STACK[0], "CYX"), (STACK[0].astype("f4"), "CYX")]
    files = [
        encoded(values, metadata={"axes": axes}, compression=compression, **kind).data
        for kind, (values, axes) in itertools.product(kinds, forms)
        for compression in (None, "deflate", "lzw")
    ]
    rng, refused = random.Random(0), 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=r"(PIL|pydicom)\.")  # as in a user's process
        for number in range(300):
            how = number // len(files) % 5
            good = files[number % len(files)]
            data = damaged(good, how, rng) if how < 4 else with_other_numbers(good, rng)
            start = time.monotonic()
            for axes in ("", "ZC"):
                reason = refusal(EncodedImage("x", data), intensity_range="own", axes=axes)
                refused += bool(reason) and not axes
            assert time.monotonic() - start < 2, number
    assert not warned
    assert capfd.readouterr() == ("", "")
    assert 100 < refused < 280


GDAL = "<GDALMetadata>" + "".join(
    f'<Item name="DESCRIPTION" sample="{number}" role="description">{name}</Item>'
    for number, name in reversed([*enumerate(("red", "µ &amp; x", "nir"))])
)
SAMPLES = STACK[0].transpose(1, 2, 0)


@pytest.mark.parametrize(
    ("values", "options", "names"),
    [
        (STACK[0], {"ome": True, "metadata": OF_CHANNELS}, ("red", "µ & x", "nir")),
        (STACK[0], {"ome": True, "metadata": {"axes": "CYX"}}, ()),
        (
            STACK[0],
            {"imagej": True, "metadata": {"axes": "CYX", "Labels": ["a\nb", "c", "d"]}},
            "acd",
        ),
        (STACK[0], {"imagej": True, "metadata": {"axes": "CYX", "Labels": ["a", "a", "d"]}}, ()),
        (
            SAMPLES,
            {"extratags": [(42112, 2, 0, f"{GDAL}</GDALMetadata>".encode(), True)]},
            ("red", "µ & x", "nir"),
        ),
        (SAMPLES, {"extratags": [(42112, 2, 0, GDAL.encode(), True)]}, ()),  # damaged
    ],
)
def test_names_of_channels_are_read(values, options, names):
    if values is SAMPLES:
        options = {"planarconfig": "contig", "metadata": None, **options}
    assert check_header(encoded(values, **options)).names == tuple(names)


@pytest.mark.parametrize(
    ("dtype", "nodata", "text"),
    [
        *(("f4", -9999, "-9999"), ("f4", np.nan, "nan"), ("f4", -3.4028235e38, "-3.40282347e+38")),
        *(("f8", -1.7e308, "-1.7e+308"), ("i2", -32768, "-32768"), ("u2", 65535, "65535")),
        *(("u2", 0, "0 \0"), ("f2", -9999, "-9999"), ("u2", None, "-9999")),
    ],
)
def test_nodata_is_masked(dtype, nodata, text):
    values = (STACK[0].transpose(1, 2, 0) % 30000 + 1).astype(dtype)
    empty = np.zeros(values.shape, bool)
    if nodata is not None:
        empty[:9, :, 0] = empty[20:, :30, 2] = True
        values[empty] = np.asarray(nodata).astype(dtype)
    tags = [(42113, 2, 0, text, True)]
    file = encoded(values, planarconfig="contig", metadata=None, extratags=tags)
    read = read_intensities(file)
    assert np.array_equal(np.isnan(read), empty)
    assert np.array_equal(read[~empty], values[~empty])
    ends: dict[str, Any] = {"low": (5, 5, 5), "high": (205, 205, 205), "std": (1, 1, 1)}
    kind = "uint16" if dtype == "u2" else "float32"
    spec = ChannelSpec(value_type=kind, count=3, order=(2, 0, 1), mean=(0.1, 0.25, 0.5), **ends)
    seen = read_channels(file, spec).to_array()
    assert seen.dtype == kind
    expected = np.where(empty, (55, 105, 25), values)[..., [2, 0, 1]]  # (0.25, 0.5, 0.1) * 200 + 5
    assert np.allclose(seen, expected.astype(kind), rtol=1e-6)
    shown = np.asarray(read_image(file, intensity_range="own"))
    assert shown[empty].max(initial=0) == 0
    assert np.median(shown[~empty]) > 100


def test_numbers_that_are_not_finite_are_refused_without_nodata():
    for number, text in ((np.nan, "-9999"), (np.inf, "nan")):
        values = np.full((8, 8), number, "f4")
        file = encoded(values, metadata=None, extratags=[(42113, 2, 0, text, True)])
        with pytest.raises(BadImage, match="values that are not finite"):
            read_intensities(file)
