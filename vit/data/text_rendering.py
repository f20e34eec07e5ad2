"""Words of any script in a drawing, in the fonts of the machine.

A font draws a box for a sign that it lacks, so each word takes the first font that has all of its
signs. Signs that none has are written by their numbers, as in Python: \\u732b.
"""

from functools import cache
from typing import Any

from PIL import ImageDraw, ImageFont

SIZE = 15
LINE = 20
# after Pillow's own, which has Latin letters: those of Linux, Windows and macOS, the wide ones last
FONTS = (
    *("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "FreeSans.ttf"),
    *("arial.ttf", "segoeui.ttf", "Arial Unicode.ttf", "Arial Unicode MS.ttf"),
    *("NotoSansCJK-Regular.ttc", "NotoSansCJKsc-Regular.otf", "wqy-zenhei.ttc", "unifont.ttf"),
    *("DroidSansFallbackFull.ttf", "msyh.ttc", "msgothic.ttc", "malgun.ttf", "PingFang.ttc"),
    *("NotoSansArabic-Regular.ttf", "NotoSansDevanagari-Regular.ttf", "Nirmala.ttf"),
    *("NotoSansThai-Regular.ttf", "leelawui.ttf", "NotoEmoji-Regular.ttf", "seguiemj.ttf"),
)
NOWHERE = "\U0010ffff"
"""A sign that is none, for which a font draws what it draws for all that it lacks."""


def lines_of(text: str, width: int) -> list[str]:
    """`text` as lines of at most `width` pixels, where a single sign is not wider.

    Args:
        text: Printable.
        width: In pixels.
    """
    lines = [""]
    for sign in spelled(text):
        longer = lines[-1] + sign
        if lines[-1] and font_of(longer).getlength(longer) > width:
            lines.append(sign)
        else:
            lines[-1] = longer
    return lines


def draw_line(draw: ImageDraw.ImageDraw, text: str, place: tuple[int, int]) -> None:
    """Draw one of `lines_of`; `place` is the middle of its upper edge, in pixels."""
    font = font_of(text)
    left = place[0] - font.getlength(text) / 2
    draw.text((left, place[1]), text, fill="black", font=font)


def spelled(text: str) -> str:
    """`text`, with the numbers of the signs that no font of this machine has."""
    spelt = "".join(sign if any(has(f, sign) for f in fonts()) else _escape(sign) for sign in text)
    if any(has_all(font, spelt) for font in fonts()):
        return spelt
    # several scripts in one word, and no font for all of them
    return "".join(sign if has(fonts()[0], sign) else _escape(sign) for sign in text)


def font_of(text: str) -> Any:
    """The first font that has all signs of `text`; the first of all where none has."""
    return next((font for font in fonts() if has_all(font, text)), fonts()[0])


@cache
def fonts() -> tuple[Any, ...]:
    """Pillow's own font, and those of `FONTS` that this machine has."""
    found = [_opened(name) for name in FONTS]
    return (ImageFont.load_default(SIZE), *(font for font in found if font is not None))


def has_all(font: Any, text: str) -> bool:
    """Whether `font` has every sign of `text`."""
    return all(has(font, sign) for sign in set(text))


def _opened(name: str) -> Any:
    try:
        return ImageFont.truetype(name, SIZE)
    except (OSError, ImportError):  # not here, damaged, or Pillow was built without FreeType
        return None


@cache
def has(font: Any, sign: str) -> bool:
    """Whether `font` draws something of its own for `sign`."""
    if sign.isspace():
        return True
    try:
        return _drawn(font, sign) != _drawn(font, NOWHERE)
    except (UnicodeError, OSError):  # a font of bitmaps knows Latin-1 alone
        return sign.isascii()


def _drawn(font: Any, sign: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(sign)
    return mask.size, bytes(mask)


def _escape(sign: str) -> str:
    return sign.encode("unicode_escape").decode("ascii")
