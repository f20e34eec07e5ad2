"""HTML pages from the jinja2 templates in templates/: one offline file a page, with one script.

Every value that a template writes is made printable and escaped: names of classes and files come
from users. Markup is made in templates alone. A page's policy allows the script by its digest, so
that a browser refuses any other.
"""

import base64
import hashlib
import io
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit.data.image_archives import relative
from vit.data.image_io import read_image
from vit.errors import BadImage
from vit.evaluation.metric_rows import describe_new_sources, metric_of, metric_rows
from vit.text import (
    format_count,
    format_duration,
    format_megabytes,
    percent,
    plural,
    printable,
    quoted,
)
from vit.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
THUMBNAIL, TINY = 240, 96  # pixels


def render_page(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(version=__version__, **values)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if hasattr(value, "__html__") else printable(value),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (
        *(describe_new_sources, format_count, format_duration, format_megabytes),
        *(metric, metric_rows, number),
        *(percent, plural, printable, quoted, relative, script_digest, shorten),
    )
    environment.filters |= {function.__name__: function for function in filters}
    return environment


def metric(value: float | None, name: str) -> str:
    return metric_of(name).text(value)


def number(value: float, spec: str = ",") -> str:
    """`value` in a format of Python, by default with commas between thousands."""
    return format(value, spec)


def script_digest(script: str) -> str:
    """The source of a Content-Security-Policy that allows this script and no other."""
    digest = hashlib.sha256(script.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")


def shorten(text: str, limit: int = 300) -> str:
    """`text` on one line, printable, and cut where it is longer than `limit` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= limit else f"{line[:limit]} ..."


@dataclass(frozen=True)
class Thumbnail:
    """A small JPEG inside a page."""

    source: str
    width: int
    height: int

    @property
    def tiny(self) -> bool:
        """Whether the image has so few pixels that they are better seen unblurred."""
        return max(self.width, self.height) < TINY


def read_thumbnail(path: str, size: int = THUMBNAIL, *, axes: str = "") -> Thumbnail | None:
    """A thumbnail of at most `size` pixels a side, without metadata; None if unreadable."""

    def enough(width: int, height: int) -> tuple[int, int]:
        scale = min(size / max(width, height), 1.0)
        return math.ceil(width * scale), math.ceil(height * scale)

    try:
        image = read_image(path, intensity_range="own", min_size=enough, axes=axes)
        image.thumbnail((size, size))
    except (BadImage, OSError, ValueError, MemoryError):
        return None
    image.info = {}
    return encode_thumbnail(image, quality=88 if size >= THUMBNAIL else 80)


def encode_thumbnail(image: Any, *, quality: int = 88) -> Thumbnail:
    """A thumbnail of a small RGB image of Pillow."""
    content = io.BytesIO()
    image.save(content, "JPEG", quality=quality)
    encoded = base64.b64encode(content.getvalue()).decode("ascii")
    return Thumbnail("data:image/jpeg;base64," + encoded, image.width, image.height)


def thumbnails(
    indices: Iterable[int], read: Callable[[int], Thumbnail | None], *, fast: bool = False
) -> Iterator[tuple[int, Thumbnail | None]]:
    """`indices` of images with their thumbnails, lazily, without unreadable images; with `fast`
    all of them, and no image is opened."""
    for index in indices:
        image = None if fast else read(index)
        if fast or image is not None:
            yield index, image
