"""Images beside each other in one image, with words below each, as on a contact sheet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from PIL import Image, ImageDraw
from torch import Tensor

from vit.data.text_rendering import LINE, draw_line, lines_of
from vit.errors import ConfigError, printable

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
TILE = 176
"""Pixels of the longer side of an image on the sheet; small ones are enlarged, dot by dot."""
MARGIN = 8
MOST = 64
"""Images on a sheet."""
COLS = 8
LONGEST = 160
"""Characters below an image; longer words end in an ellipsis."""


def sheet_format(path: str | Path) -> str:
    """Pillow's name of the format of a sheet that is called `path`.

    Raises:
        ConfigError: The name ends otherwise.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(f"{printable(path)}: a drawing ends in {', '.join(FORMATS)}")
    return FORMATS[suffix]


def contact_sheet(images: Tensor, texts: Sequence[Sequence[str]]) -> Image.Image:
    """At most 64 images in rows of 8, each with its texts below.

    Args:
        images: Bytes, (images, 3, height, width), at least one.
        texts: Of each image: what begins on a line of its own.
    """
    tiles = [tile(image) for image in images[:MOST]]
    width, height = tiles[0].size
    cell = max(width, TILE // 2)
    lines = [
        [row for text in some for row in wrapped(clipped(printable(text)), cell)]
        for some in texts[:MOST]
    ]
    cols = min(len(tiles), COLS)
    rows = [range(at, min(at + cols, len(tiles))) for at in range(0, len(tiles), cols)]
    tall = [height + LINE * max(len(lines[i]) for i in row) + MARGIN for row in rows]
    sheet = Image.new("RGB", (MARGIN + cols * (cell + MARGIN), MARGIN + sum(tall)), "white")
    draw, top = ImageDraw.Draw(sheet), MARGIN
    for row, down in zip(rows, tall, strict=True):
        for col, index in enumerate(row):
            left = MARGIN + col * (cell + MARGIN)
            sheet.paste(tiles[index], (left + (cell - width) // 2, top))
            for number, line in enumerate(lines[index]):
                draw_line(draw, line, (left + cell // 2, top + height + LINE * number))
        top += down
    return sheet


def tile(image: Tensor) -> Image.Image:
    """Bytes (3, height, width) -> an image as large as it is on a sheet."""
    plain = Image.fromarray(np.ascontiguousarray(rearrange(image, "rgb h w -> h w rgb").numpy()))
    longer = max(plain.size)
    if longer <= TILE:
        scale = TILE // longer
        return plain.resize((plain.width * scale, plain.height * scale), Image.Resampling.NEAREST)
    width, height = (max(1, round(side * TILE / longer)) for side in plain.size)
    return plain.resize((width, height), Image.Resampling.BICUBIC)


def clipped(text: str) -> str:
    """`text`, or as much of it as fits below an image."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def wrapped(text: str, width: int) -> list[str]:
    """`text` as lines of at most `width` pixels that end between words where they can."""
    lines = [""]
    for word in text.split(" "):
        longer = lines_of(f"{lines[-1]} {word}".lstrip(), width)
        if len(longer) == 1:
            lines[-1] = longer[0]
        else:
            lines += lines_of(word, width)
    return [line for line in lines if line] or [""]


def save_sheet(sheet: Image.Image, path: Path, kind: str) -> None:
    """Write `sheet` to `path` in the format `kind` of `sheet_format`."""
    exact: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 95, "subsampling": 0},
        "WEBP": {"lossless": True},
    }
    sheet.save(path, format=kind, **exact.get(kind, {}))
