"""Contact sheet: a grid of images in one image, with text below each."""

import contextlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vit.errors import ConfigError
from vit.text import printable

TILE = 176
"""Longer side of an image on the sheet, in pixels; small images are enlarged by whole factors."""
MARGIN = 8
MAX_IMAGES = 64
COLS = 8
MAX_TEXT = 160
"""Characters below an image; longer text ends in an ellipsis."""
HEAT = (255, 80, 0)
MAX_HEAT = 0.85
"""Share of HEAT at the largest weight."""
CONTRAST = 0.75
"""Contrast of the grey image below the colour."""


def check_sheet_name(path: str | Path) -> None:
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"{path}: give a name that ends in .png")


def contact_sheet(images: Tensor, texts: Sequence[Sequence[str]]) -> Image.Image:
    """The first 64 of (images, 3, height, width) uint8 in rows of 8, each with its texts below."""
    tiles = [tile(image) for image in images[:MAX_IMAGES]]
    cell = max(tiles[0].width, TILE // 2)
    lines = [
        [line for text in paragraphs for line in wrap(truncate(printable(text)), cell)]
        for paragraphs in texts[:MAX_IMAGES]
    ]
    return place_in_rows(tiles, lines, cell=cell, cols=COLS)


def place_in_rows(
    images: Sequence[Image.Image], lines: Sequence[Sequence[str]], *, cell: int, cols: int
) -> Image.Image:
    """Images of one size in rows of `cols`, each centred in `cell` pixels with its lines below."""
    width, height = images[0].size
    cols = min(len(images), cols)
    rows = [range(at, min(at + cols, len(images))) for at in range(0, len(images), cols)]
    heights = [height + LINE_HEIGHT * max(len(lines[i]) for i in row) + MARGIN for row in rows]
    sheet = Image.new("RGB", (MARGIN + cols * (cell + MARGIN), MARGIN + sum(heights)), "white")
    draw, top = ImageDraw.Draw(sheet), MARGIN
    for row, row_height in zip(rows, heights, strict=True):
        for col, index in enumerate(row):
            left = MARGIN + col * (cell + MARGIN)
            sheet.paste(images[index], (left + (cell - width) // 2, top))
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


FONT_SIZE = 15
LINE_HEIGHT = 20
# tried after Pillow's own, which has Latin letters; those with the most scripts last
FONTS = (
    *("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "FreeSans.ttf"),
    *("arial.ttf", "segoeui.ttf", "Arial Unicode.ttf", "Arial Unicode MS.ttf"),
    *("NotoSansCJK-Regular.ttc", "NotoSansCJKsc-Regular.otf", "wqy-zenhei.ttc", "unifont.ttf"),
    *("DroidSansFallbackFull.ttf", "msyh.ttc", "msgothic.ttc", "malgun.ttf", "PingFang.ttc"),
    *("NotoSansArabic-Regular.ttf", "NotoSansDevanagari-Regular.ttf", "Nirmala.ttf"),
    *("NotoSansThai-Regular.ttf", "leelawui.ttf", "NotoEmoji-Regular.ttf", "seguiemj.ttf"),
)
NO_CHARACTER = "\U0010ffff"
"""Not a character: a font draws it as it draws every character that it lacks."""


def break_lines(text: str, width: int) -> list[str]:
    """Break printable `text` into lines of at most `width` pixels, between any two characters."""
    lines = [""]
    for character in escape_missing(text):
        longer = lines[-1] + character
        if lines[-1] and font_of(longer).getlength(longer) > width:
            lines.append(character)
        else:
            lines[-1] = longer
    return lines


def draw_centred(draw: ImageDraw.ImageDraw, text: str, position: tuple[int, int]) -> None:
    """Draw one line; `position` is the middle of its upper edge, in pixels."""
    font = font_of(text)
    left = position[0] - font.getlength(text) / 2
    draw.text((left, position[1]), text, fill="black", font=font)


def escape_missing(text: str) -> str:
    """`text`, or with escapes for all but Latin letters where no font has all its characters."""
    if any(has_all(font, text) for font in fonts()):
        return text
    return text.encode("ascii", "backslashreplace").decode()


def font_of(text: str) -> Any:
    """The first font that has all characters of `text`; else the first font."""
    return next((font for font in fonts() if has_all(font, text)), fonts()[0])


@cache
def fonts() -> tuple[Any, ...]:
    """Pillow's own font, and those of `FONTS` that this machine has."""
    found: list[Any] = [ImageFont.load_default(FONT_SIZE)]
    for name in FONTS:
        # not here, damaged, or Pillow was built without FreeType
        with contextlib.suppress(OSError, ImportError):
            found.append(ImageFont.truetype(name, FONT_SIZE))
    return tuple(found)


def has_all(font: Any, text: str) -> bool:
    """Whether `font` has every character of `text`."""
    return all(has_glyph(font, character) for character in set(text))


@cache
def has_glyph(font: Any, character: str) -> bool:
    if character.isspace():
        return True
    try:
        return _bitmap(font, character) != _bitmap(font, NO_CHARACTER)
    except (UnicodeError, OSError):  # a bitmap font has only Latin-1
        return character.isascii()


def _bitmap(font: Any, character: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(character)
    return mask.size, bytes(mask)


def overlay(image: Image.Image, weights: Tensor) -> Image.Image:
    """A pale grey copy of `image`, coloured by `weights`, non-negative (rows, cols) of patches."""
    largest = weights.max().clamp(min=1e-30)
    cells = Image.fromarray((weights / largest).numpy().astype(np.float32))
    smooth = np.asarray(cells.resize(image.size, Image.Resampling.BILINEAR)).clip(0, 1)
    share = MAX_HEAT * smooth[:, :, None]
    grey = 255 - CONTRAST * (255 - np.asarray(image.convert("L"), dtype=np.float32))[:, :, None]
    mixed = grey * (1 - share) + np.array(HEAT, dtype=np.float32) * share
    return Image.fromarray(mixed.round().astype(np.uint8))
