"""DICOM files: the values that pydicom finds, as they are shown, or a refusal by name."""

import io
import re
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi_lut

from vit.data.image_io import EncodedImage, read_header, read_image, read_intensities
from vit.errors import BadImage

FOLDER = Path(pydicom.__file__).parent / "data" / "test_files"


def refusal(content: bytes) -> str:
    with pytest.raises(BadImage) as caught:
        read_image(EncodedImage("x", content))
    return caught.value.reason


def dicom(name: str, **tags) -> bytes:
    """One of pydicom's own files, with tags changed, or removed if None."""
    data = pydicom.dcmread(FOLDER / name)
    for tag, value in tags.items():
        if value is None:
            delattr(data, tag)
        else:
            setattr(data, tag, value)
    data.save_as(buffer := io.BytesIO())
    return buffer.getvalue()


def table(values, bits: int = 12) -> list[Dataset]:
    """A lookup table of grey values."""
    item = Dataset()
    item.add_new(0x00283002, "US", [len(values), 0, bits])
    item.add_new(0x00283006, "US", [int(value) for value in values])
    return [item]


def of_pydicom(content: bytes) -> np.ndarray:
    """What pydicom finds in a file, with a window in [0, 1], (height, width, channels)."""
    data = pydicom.dcmread(io.BytesIO(content))
    values = data.pixel_array
    if data.PhotometricInterpretation == "PALETTE COLOR":
        return apply_color_lut(values, data)
    if values.ndim == 3:
        return values
    values = apply_modality_lut(values, data)
    if data.get("WindowCenter") is not None:
        low, high = apply_voi_lut(np.array([-1e9, 1e9]), data)
        values = (apply_voi_lut(values, data) - low) / (high - low)
    if data.PhotometricInterpretation == "MONOCHROME1":
        values = 1 - values if values.dtype.kind == "f" else 2**data.BitsStored - 1 - values
    return values[..., None]


FILES = {
    "float32 x 1": [
        *("CT_small", "693_J2KI", "examples_overlay"),  # rescaled, that and a window, two windows
        *("MR_small", "MR_small_RLE", "MR_small_bigendian", "MR_small_jp2klossless"),  # a window
    ],
    "int16 x 1": ["JPEG2000"],
    "uint32 x 1": ["rtdose_1frame"],
    "uint16 x 3": ["SC_rgb_rle_16bit", "examples_palette"],
    "uint8 x 3": [
        *("SC_rgb_small_odd_big_endian", "SC_rgb_dcmtk_+eb+cy+n1", "SC_rgb_jpeg_dcmtk"),
        *("SC_ybr_full_422_uncompressed", "examples_jpeg2k"),
    ],
}


@pytest.mark.parametrize(
    ("mode", "name"), [(mode, name) for mode, names in FILES.items() for name in names]
)
def test_dicom_files_have_the_values_of_pydicom(name, mode):
    image = EncodedImage("x", (FOLDER / f"{name}.dcm").read_bytes())
    expected = of_pydicom(image.data)
    header = read_header(image)
    assert header == ("DICOM", mode, False, False, header.deep, *expected.shape[1::-1])
    if not header.deep:
        assert np.array_equal(read_image(image), expected)
        assert mode == "uint8 x 3"
        return
    values = read_intensities(image)
    assert f"{values.dtype} x {values.shape[2]}" == mode
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)


CURVE = np.linspace(90, 4095, 3000).astype(int)
SHORT = CURVE[:256] // 2  # of 8 bits; most values lie beyond its end
GREYS = ("MR_small", "CT_small", "rtdose_1frame")


@pytest.mark.parametrize(
    ("name", "tags", "expected"),
    [
        *((name, {"PhotometricInterpretation": "MONOCHROME1"}, None) for name in GREYS),
        ("MR_small", {"WindowCenter": 600.5, "WindowWidth": 801}, lambda v: (v - 200) / 800),
        ("MR_small", {"WindowCenter": ""}, lambda v: v),
        ("MR_small", {"WindowWidth": None}, lambda v: v),
        ("MR_small", {"VOILUTSequence": table(CURVE)}, lambda v: CURVE[v] / 4095),
        ("MR_small", {"VOILUTSequence": table(CURVE[::-1])}, lambda v: CURVE[2999 - v] / 4095),
        (
            *("MR_small", {"VOILUTSequence": table(SHORT, bits=8)}),
            lambda v: SHORT[v.clip(0, 255)] / 255,
        ),
        ("CT_small", {"RescaleSlope": ""}, lambda v: v),
        ("CT_small", {"RescaleSlope": 2}, lambda v: v * 2.0 - 1024),
        ("CT_small", {"RescaleIntercept": 0}, lambda v: v),
        ("CT_small", {"ModalityLUTSequence": table(CURVE, bits=16)}, lambda v: CURVE[v]),
    ],
)
def test_windows_and_tables_of_dicom_files_are_applied(name, tags, expected):
    image = EncodedImage("x", dicom(f"{name}.dcm", **tags))
    stored = pydicom.dcmread(FOLDER / f"{name}.dcm").pixel_array
    values = expected(stored)[..., None] if expected else of_pydicom(image.data)
    values = values.clip(0, 1) if tags.get("WindowCenter") else values
    found = read_intensities(image)
    assert read_header(image).mode == f"{found.dtype} x 1"
    np.testing.assert_allclose(found, values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("examples_ybr_color.dcm", "30 frames; save each as a file"),
        ("MR_small_jpeg_ls_lossless.dcm", "a DICOM file in JPEG-LS .*: pip install python-gdcm"),
        ("JPEG-lossy.dcm", "a DICOM file in JPEG Extended .*: pip install python-gdcm, or convert"),
        ("image_dfl.dcm", "a DICOM file in Deflated Explicit VR Little Endian; convert it"),
        ("rtplan.dcm", "a DICOM file without an image"),
        ("liver_1frame.dcm", "a DICOM file of 1 bits; 8, 16 and 32 are read"),
        ("MR_truncated.dcm", "damaged or cut short"),
        ({"PhotometricInterpretation": "HSV"}, "a DICOM file of HSV colours; save RGB"),
        ({"PhotometricInterpretation": "CMYK"}, "a DICOM file of CMYK colours; save RGB"),
    ],
)
def test_other_dicom_files_are_refused(content, reason):
    changed = isinstance(content, dict)
    data = dicom("SC_rgb_small_odd.dcm", **content) if changed else (FOLDER / content).read_bytes()
    assert re.match(reason, refusal(data))


@pytest.mark.parametrize("name", ["VOILUTSequence", "ModalityLUTSequence"])
def test_lookup_tables_that_pydicom_reads_wrong_are_refused(name):
    content = dicom("MR_small.dcm", **{name: table(CURVE[:257] // 16, bits=8)})
    assert refusal(content) == "a DICOM file with a lookup table of 257 entries of 8 bits"


def test_without_pydicom_the_extra_is_named(monkeypatch):
    content = (FOLDER / "MR_small.dcm").read_bytes()
    monkeypatch.setitem(sys.modules, "pydicom", None)
    assert refusal(content) == "a DICOM file: pip install 'vit-toolkit[dicom]'"
