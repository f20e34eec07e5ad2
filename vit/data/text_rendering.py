"""Text in any script in an image, with the fonts installed on the machine.

A font draws a box for a character that it lacks, so each line uses the first font that has all of
its characters. Characters that no font has are escaped as in Python: \\u732b.
"""

import contextlib
from functools import cache
from typing import Any

from PIL import ImageDraw, ImageFont

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
    """Escape the characters of `text` that no font of this machine has."""
    escaped = "".join(
        character if any(has_glyph(f, character) for f in fonts()) else _escape(character)
        for character in text
    )
    if any(has_all(font, escaped) for font in fonts()):
        return escaped
    # characters of several scripts, and no font that has all of them
    return "".join(
        character if has_glyph(fonts()[0], character) else _escape(character) for character in text
    )


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
    """Whether `font` has a glyph for `character`."""
    if character.isspace():
        return True
    try:
        return _bitmap(font, character) != _bitmap(font, NO_CHARACTER)
    except (UnicodeError, OSError):  # a bitmap font has only Latin-1
        return character.isascii()


def _bitmap(font: Any, character: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(character)
    return mask.size, bytes(mask)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
