"""Contact sheet: a grid of images in one image, with text below each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from PIL import Image, ImageDraw
from torch import Tensor

from vit.data.text_rendering import LINE_HEIGHT, break_lines, draw_centred
from vit.errors import ConfigError
from vit.text import printable

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
TILE = 176
"""Longer side of an image on the sheet, in pixels; small images are enlarged by whole factors."""
MARGIN = 8
MAX_IMAGES = 64
COLS = 8
MAX_TEXT = 160
"""Characters below an image; longer text ends in an ellipsis."""


def sheet_format(path: str | Path) -> str:
    """Pillow's name of the image format of `path`."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(f"{printable(path)}: a drawing ends in {', '.join(FORMATS)}")
    return FORMATS[suffix]


def contact_sheet(images: Tensor, texts: Sequence[Sequence[str]]) -> Image.Image:
    """The first 64 of (images, 3, height, width) uint8 in rows of 8, each with its texts below."""
    tiles = [tile(image) for image in images[:MAX_IMAGES]]
    width, height = tiles[0].size
    cell = max(width, TILE // 2)
    lines = [
        [line for text in paragraphs for line in wrap(truncate(printable(text)), cell)]
        for paragraphs in texts[:MAX_IMAGES]
    ]
    cols = min(len(tiles), COLS)
    rows = [range(at, min(at + cols, len(tiles))) for at in range(0, len(tiles), cols)]
    heights = [height + LINE_HEIGHT * max(len(lines[i]) for i in row) + MARGIN for row in rows]
    sheet = Image.new("RGB", (MARGIN + cols * (cell + MARGIN), MARGIN + sum(heights)), "white")
    draw, top = ImageDraw.Draw(sheet), MARGIN
    for row, row_height in zip(rows, heights, strict=True):
        for col, index in enumerate(row):
            left = MARGIN + col * (cell + MARGIN)
            sheet.paste(tiles[index], (left + (cell - width) // 2, top))
            for number, line in enumerate(lines[index]):
                draw_centred(draw, line, (left + cell // 2, top + height + LINE_HEIGHT * number))
        top += row_height
    return sheet


def tile(image: Tensor) -> Image.Image:
    """(3, height, width) uint8 -> an image at its size on the sheet."""
    full = Image.fromarray(np.ascontiguousarray(rearrange(image, "rgb h w -> h w rgb").numpy()))
    longer = max(full.size)
    if longer <= TILE:
        scale = TILE // longer
        return full.resize((full.width * scale, full.height * scale), Image.Resampling.NEAREST)
    width, height = (max(1, round(side * TILE / longer)) for side in full.size)
    return full.resize((width, height), Image.Resampling.BICUBIC)


def truncate(text: str) -> str:
    """Truncate `text` to MAX_TEXT characters."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def wrap(text: str, width: int) -> list[str]:
    """Wrap `text` to lines of at most `width` pixels, between words if possible."""
    lines = [""]
    for word in text.split(" "):
        longer = break_lines(f"{lines[-1]} {word}".lstrip(), width)
        if len(longer) == 1:
            lines[-1] = longer[0]
        else:
            lines += break_lines(word, width)
    return [line for line in lines if line] or [""]


def save_sheet(sheet: Image.Image, path: Path, kind: str) -> None:
    """Write `sheet` to `path` in the format `kind` of `sheet_format`."""
    exact: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 95, "subsampling": 0},
        "WEBP": {"lossless": True},
    }
    sheet.save(path, format=kind, **exact.get(kind, {}))
