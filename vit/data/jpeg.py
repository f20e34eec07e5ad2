"""JPEG by libjpeg-turbo without Pillow's detours: the same pixels, byte for byte, in less time.

Only files without any complaint of the decoder are taken; the others are Pillow's to judge. So
what is a good picture does not depend on which of the two reads it.
"""

from typing import Any

import numpy as np
import simplejpeg

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
SCAN = 0xDA
SCANNED_PIXELS = 2_000_000_000
"""Pixels times scans above which a file is refused: a scan of nothing costs a byte of file and
a pass over all pixels. 24 million pixels may have 83 scans; encoders write about 10."""


def decode_jpeg(data: bytes, least: tuple[int, int] | None = None) -> Pixels | None:
    """The picture in `data`, (height, width, 3), or None where the decoder complains of anything.

    Args:
        data: The file.
        least: (width, height) that suffices: then the picture may be decoded at half, a quarter
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
    # also finds those of thumbnails, and of a second picture: a few too many
    return data.count(b"\xff\xda")
