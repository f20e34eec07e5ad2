"""One pass over one image: what its header says, whether it decodes, and what it looks like."""

import hashlib
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from vit.data.archives import open_member
from vit.data.image_io import read_header, read_image
from vit.errors import BadImage

VERSION = 2
"""Of what is found here: facts of another version are made again."""
SIDE = 32
"""Of the grey copy, in pixels."""
COARSE = 8
"""Of the copy of the colours."""
GREY = 6
"""Difference between channels up to which a pixel has no colour; JPEG makes some."""
FLAT = 2
"""Difference between pixels up to which an image is blank."""


class Facts(NamedTuple):
    """What one pass says of an image that can be read."""

    format: str
    """Of the file, as Pillow calls it."""
    mode: str
    """Of its pixels, as Pillow calls it."""
    width: int
    """Pixels, upright like the height."""
    height: int
    turned: bool
    """Whether an EXIF tag turns it by a quarter, or upside down."""
    alpha: bool
    """Whether it may be transparent."""
    grey: bool
    """Whether it has no colours, however it is stored."""
    blank: bool
    """Whether all pixels are alike."""
    digest: bytes
    """Of the file."""
    look: bytes
    """Copies: SIDE x SIDE bytes of grey, COARSE x COARSE of each difference of colours."""


Verdict = Facts | str
"""Of an image; why there are no facts is a reason in words."""


def look_at(path: str) -> Verdict:
    """The facts of the image in `path`, or why it cannot be read."""
    try:
        header = read_header(path)
        image = read_image(path)
        digest = content_digest(path)
    except BadImage as bad:
        return bad.reason
    except OSError as error:
        return error.strerror or "cannot be read again"
    small = np.asarray(shrunk(image), dtype=np.int16)
    flat = int(np.ptp(small, axis=(0, 1)).max()) <= 4 * FLAT
    return Facts(
        format=header.format,
        mode=header.mode,
        width=image.width,
        height=image.height,
        turned=header.turned,
        alpha=header.alpha,
        grey=int(np.ptp(small, axis=2).max()) <= GREY,
        blank=flat and all(high - low <= FLAT for low, high in extrema(image)),
        digest=digest,
        look=looks(small),
    )


def content_digest(path: str) -> bytes:
    """16 bytes that only files of the same content share; `path` is known to be an image.

    Raises:
        BadImage: It is inside of a file, and has gone.
        OSError: It has gone.
    """
    try:
        file: BinaryIO = open(path, "rb")  # noqa: SIM115
    except NotADirectoryError:
        file = open_member(path)
    digest = hashlib.blake2b(digest_size=16)
    with file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.digest()


def shrunk(image: Image.Image) -> Image.Image:
    """An RGB image of SIDE x SIDE pixels, whatever its aspect was."""
    return image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)


def extrema(image: Image.Image) -> list[tuple[int, int]]:
    """Least and greatest value of each channel of an RGB image."""
    found = [channel.getextrema() for channel in image.split()]
    return [(int(low), int(high)) for low, high in found]  # type: ignore[arg-type]


def looks(small: np.ndarray[Any, Any]) -> bytes:
    """What `Facts.look` holds of a (SIDE, SIDE, 3) image: Y, Cb and Cr of JPEG."""
    red, green, blue = (small[..., channel].astype(np.float32) for channel in range(3))
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    step = SIDE // COARSE
    colours = 128 + 0.564 * (blue - grey), 128 + 0.713 * (red - grey)
    blocks = (COARSE, step, COARSE, step)
    parts = [grey, *(colour.reshape(blocks).mean(axis=(1, 3)) for colour in colours)]
    return b"".join(np.rint(part).clip(0, 255).astype(np.uint8).tobytes() for part in parts)
