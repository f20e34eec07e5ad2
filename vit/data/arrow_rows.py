"""Pictures in rows of Arrow tables, as the library `datasets` keeps them: read where they lie.

A table is a stream of record batches in a file that is mapped into memory, so any row is read
without reading others, and all processes share one copy.
"""

import os
from typing import Any

import numpy as np

from vit.errors import BadImage, DataError, printable

_TABLES: dict[tuple[int, str], Any] = {}
"""By process: each opens for itself what it reads."""


def table(file: str) -> Any:
    """The pyarrow.Table in `file`, mapped into memory.

    Raises:
        DataError: It cannot be read, or pyarrow is missing.
    """
    key = os.getpid(), file
    if key not in _TABLES:
        try:
            import pyarrow as pa
        except ImportError:
            raise DataError(
                f'{printable(file)}: reading it needs pyarrow; pip install "vit-toolkit[datasets]"'
            ) from None
        try:
            _TABLES[key] = pa.ipc.open_stream(pa.memory_map(file)).read_all()
        except (OSError, pa.ArrowException) as error:
            words = " ".join(str(error).split())
            raise DataError(f"{printable(file)}: no Arrow table ({printable(words)})") from None
    return _TABLES[key]


def read(path: str, file: str, member: str) -> bytes:
    """The bytes of the picture `COLUMN/ROW/NAME` in the table `file`.

    Args:
        path: The whole address, for messages.
        file: The table.
        member: The rest of the address.

    Raises:
        BadImage: There is none.
    """
    column, _, rest = member.partition("/")
    row = rest.split("/")[0]
    try:
        found = table(file)
    except DataError as error:
        raise BadImage(path, str(error)) from None
    if column not in found.column_names or not row.isdecimal() or int(row) >= len(found):
        raise BadImage(path, "no such row in the table")
    value = _value(found.column(column), int(row))
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise BadImage(path, "the row has no picture")
    return content


def _value(column: Any, row: int) -> object:
    ends = np.cumsum([len(chunk) for chunk in column.chunks])
    at = int(np.searchsorted(ends, row, side="right"))
    first = int(ends[at - 1]) if at else 0
    value: object = column.chunk(at)[row - first].as_py()
    return value
