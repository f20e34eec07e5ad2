"""A row of a list of captions, and which columns of a table, or keys of a record, it is made of."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vit.data.sources.folders import some
from vit.data.sources.text_files import wrong
from vit.errors import printable

EXPECTED = (
    "expected a table (CSV, TSV) with a header such as `image,caption`, JSON lines such as "
    '{"file_name": ..., "text": ...}, a token file, or captions of COCO'
)
IMAGE_COLUMNS = (
    *("file_name", "filename", "image", "image_name", "image_path", "image_file"),
    *("path", "filepath", "file_path", "file", "img"),
)
"""Names of the column of pictures, the first one there is."""
CAPTION_KINDS = ("caption", "text", "sentence", "comment", "description")
"""Names of columns of captions: all of the first kind there is, maybe with an s or a number."""
LABEL_COLUMNS = ("label", "class")


class Row(NamedTuple):
    """What one line, or one picture of COCO's, says."""

    line: int
    """Where it begins, from 1; 0 where the file is no lines."""
    name: str
    """Of the picture's file, as it is written there."""
    captions: Sequence[str]
    """As they are written there; some may be empty."""
    label: str
    """Name of its class, empty where there is none."""


@dataclass(frozen=True)
class Columns:
    """Places of the columns that are read; `image` is -1 where there is none."""

    image: int
    captions: tuple[int, ...]
    label: int | None
    unused: tuple[str, ...]

    @property
    def known(self) -> bool:
        """Whether there is anything."""
        return self.image >= 0 or bool(self.captions)

    @property
    def whole(self) -> bool:
        """Whether there is all that a list of captions needs."""
        return self.image >= 0 and bool(self.captions)


def find_columns(names: Sequence[str]) -> Columns:
    """The columns by their names; capitals and white space around a name do not count."""
    plain = [name.strip().lower() for name in names]
    image = next((plain.index(name) for name in IMAGE_COLUMNS if name in plain), -1)
    captions: tuple[int, ...] = ()
    for kind in CAPTION_KINDS:
        pattern = re.compile(rf"{kind}s?[ _-]?\d*")
        captions = captions or tuple(i for i, name in enumerate(plain) if pattern.fullmatch(name))
    label = next((plain.index(name) for name in LABEL_COLUMNS if name in plain), None)
    used = {image, *captions, label}
    unused = tuple(name.strip() for i, name in enumerate(names) if i not in used)
    return Columns(image, captions, label, unused)


def choose_columns(names: Sequence[str], path: str, line: int, notes: list[str]) -> Columns:
    """The columns of the list `path` whose header, or first record, is at `line`.

    Raises:
        DataError: There are none of pictures or of captions.
    """
    columns = find_columns(names)
    has = some([printable(name.strip()) for name in names]) or "none"
    if columns.image < 0:
        expected = ", ".join(IMAGE_COLUMNS[:3])
        raise wrong(path, f"no column of pictures among {has}; expected {expected}", line)
    if not columns.captions:
        expected = "caption, captions, text, or caption_0, caption_1"
        raise wrong(path, f"no column of captions among {has}; expected {expected}", line)
    if columns.unused:
        unused = some([printable(name) for name in columns.unused])
        captions = some([printable(names[at].strip()) for at in columns.captions])
        notes.append(f"{printable(path)}: captions from {captions}; not used: {unused}")
    return columns
