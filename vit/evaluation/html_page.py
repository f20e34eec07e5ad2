"""HTML pages from the jinja2 templates in templates/: one offline file a page, without scripts.

Every value that a template writes is made printable and escaped: names of classes and files come
from users. Markup is made in templates alone.
"""

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit.data.archives import relative
from vit.data.image_io import read_image
from vit.errors import BadImage
from vit.text import format_count, format_duration, percent, plural, printable, quoted
from vit.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
THUMBNAIL, TINY = 240, 96  # pixels


def render_page(template: str, **values: Any) -> str:
    """The page that `template`, a file of templates/, makes of `values`."""
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
        *(format_count, format_duration, number, percent, plural),
        *(printable, quoted, relative, shorten),
    )
    environment.filters |= {function.__name__: function for function in filters}
    return environment


def number(value: float, spec: str = ",") -> str:
    """`value` in a format of Python, by default with commas between thousands."""
    return format(value, spec)


def shorten(text: str, limit: int = 300) -> str:
    """`text` on one line, printable, and cut where it is longer than `limit` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= limit else f"{line[:limit]} ..."


@dataclass(frozen=True)
class Thumbnail:
    """A small JPEG inside a page.

    Args:
        source: Its data URI.
        width, height: In pixels.
    """

    source: str
    width: int
    height: int

    @property
    def tiny(self) -> bool:
        """Whether the image has so few pixels that they are better seen unblurred."""
        return max(self.width, self.height) < TINY


def read_thumbnail(path: str) -> Thumbnail | None:
    """A thumbnail of the image in `path`, without its metadata; None if it is unreadable."""
    try:
        image = read_image(path, intensity_range="own")
        image.thumbnail((THUMBNAIL, THUMBNAIL))
    except (BadImage, OSError, ValueError, MemoryError):
        return None
    image.info = {}
    content = io.BytesIO()
    image.save(content, "JPEG", quality=88)
    encoded = base64.b64encode(content.getvalue()).decode("ascii")
    return Thumbnail("data:image/jpeg;base64," + encoded, image.width, image.height)


def readable_thumbnails(
    indices: Iterable[int], paths: Sequence[str]
) -> Iterator[tuple[int, Thumbnail]]:
    """`indices` of `paths` with their thumbnails, lazily; unreadable images are left out."""
    for index in indices:
        if (image := read_thumbnail(paths[index])) is not None:
            yield index, image
