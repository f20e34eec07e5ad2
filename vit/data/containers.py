"""Pictures inside files: a member of a shard, or a row of a table, has an address like a path.

    shards/0001.tar/cat/3.jpg

No file lies below another file, so such an address is never that of a file.
"""

import os
from typing import BinaryIO

from vit.errors import BadImage


def open_member(path: str) -> BinaryIO:
    """The bytes of the picture that `path` names inside of a file.

    Raises:
        BadImage: There is no such file, or nothing of that name in it.
    """
    raise BadImage(path, "no such file")


def is_inside(path: str) -> bool:
    """Whether `path` names something inside of a file."""
    above = os.path.dirname(path)
    while above and not os.path.lexists(above):
        above = os.path.dirname(above)
    return os.path.isfile(above)
