"""Images inside files: a member of a shard, or a row of a table, has an address like a path.

    shards/0001.tar/cat/3.jpg              a member of an uncompressed tar
    cache/train.arrow/image/17/cat/3.jpg   a column and a row of a table, then the row's name

No file lies below another file, so such an address is never that of a file. Any image is read by
itself, in any order, so shuffling and resuming are those of files. A process keeps the indexes of
shards that it has read, and forked ones inherit them.

Images in rows of Arrow tables, as the library `datasets` keeps them: read where they lie.

A table is a stream of record batches in a file that is mapped into memory, so any row is read
without reading others, and all processes share one copy.
"""

import filecmp
import io
import os
import shutil
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np

from vit.data.tar_index import Index, read_index
from vit.errors import BadImage, DataError, printable

_TABLES: dict[tuple[int, str], Any] = {}
"""By process: each opens for itself what it reads."""


def open_arrow_table(file: str) -> Any:
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


def read_arrow_row(path: str, file: str, member: str) -> bytes:
    """The bytes of the image `COLUMN/ROW/NAME` in the table `file`.

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
        found = open_arrow_table(file)
    except DataError as error:
        raise BadImage(path, str(error)) from None
    if column not in found.column_names or not row.isdecimal() or int(row) >= len(found):
        raise BadImage(path, "no such row in the table")
    value = _value(found.column(column), int(row))
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise BadImage(path, "the row has no image")
    return content


def _value(column: Any, row: int) -> object:
    ends = np.cumsum([len(chunk) for chunk in column.chunks])
    at = int(np.searchsorted(ends, row, side="right"))
    first = int(ends[at - 1]) if at else 0
    value: object = column.chunk(at)[row - first].as_py()
    return value


SHARD, TABLE = ".tar", ".arrow"
MAX_BYTES = 2**28
"""Of an image; the limit of files too."""
MOST_OPEN = 128
"""Shards that a process keeps open."""

Identity = tuple[int, int, int, int]


def open_binary(path: str) -> BinaryIO:
    """The bytes of an image, be it a file or inside of one.

    Raises:
        BadImage: It is said to be inside of a file, and cannot be read.
        OSError: It is a file that cannot be read.
    """
    return open_member(path) if is_inside(path) else open(path, "rb")


def open_member(path: str) -> BinaryIO:
    """The bytes of the image that `path` names inside of a file.

    Raises:
        BadImage: There is no such file, or nothing of that name in it, or too much.
    """
    found = split_address(path)
    if found is None:
        raise BadImage(path, "no such file")
    file, member = found
    if file.lower().endswith(TABLE):
        content = read_arrow_row(path, file, member)
    else:
        content = _read_member(path, file, member)
    if not content:
        raise BadImage(path, "an empty file (0 bytes)")
    if len(content) > MAX_BYTES:
        raise BadImage(path, f"{len(content):,} bytes are more than the limit of {MAX_BYTES:,}")
    return io.BytesIO(content)


def size_of(path: str) -> int:
    """Bytes of an image, be it a file or inside of one.

    Raises:
        BadImage: It is said to be inside of a file, and is not there.
        OSError: There is no such file.
    """
    found = split_address(path)
    if found is None:
        return os.path.getsize(path)
    file, member = found
    if file.lower().endswith(TABLE):
        return len(read_arrow_row(path, file, member))
    place = _index(path, file).find(member)
    if place is None:
        raise BadImage(path, "no such member in the shard")
    return place.size


def copy_out(path: str, target: str) -> None:
    """Copy an image, be it a file or inside of one, over the file `target`.

    Raises:
        BadImage: As in `open_binary`.
        OSError: A file cannot be read or written.
    """
    if not is_inside(path):
        shutil.copy2(path, target)
        return
    with open_binary(path) as source, open(target, "wb") as file:
        shutil.copyfileobj(source, file)
    os.chmod(target, 0o644)


def same_bytes(path: str, file: Path) -> bool:
    """Whether an image, be it a file or inside of one, has the bytes of `file`."""
    if not is_inside(path):
        return filecmp.cmp(path, file, shallow=False)
    with open_binary(path) as source:
        return source.read() == file.read_bytes()


def is_inside(path: str) -> bool:
    """Whether `path` names something inside of a shard or a table."""
    return split_address(path) is not None


def split_address(path: str) -> tuple[str, str] | None:
    """The file in an address, and the name inside of it; None for the path of a file."""
    lower = path.lower()
    for end in (SHARD, TABLE):
        at = lower.find(end + "/")
        while at >= 0:
            file = path[: at + len(end)]
            if file in _INDEXES or os.path.isfile(file):
                return file, path[at + len(end) + 1 :]
            at = lower.find(end + "/", at + 1)
    return None


def relative(path: str, root: Path) -> str:
    """`path` inside the data set `root`, with forward slashes, as a split is recorded.

    Of what is inside a file it is the name there, so that shards and folders of the same images
    have the same names. A root that is a folder has the names of its shards in front.
    """
    found = split_address(path)
    if found is not None:
        file, member = found
        if file.lower().endswith(TABLE):
            return member.split("/", 2)[-1]
        _, dot, inside = f"{root}/".partition(f"{SHARD}/")
        if dot:
            return member.removeprefix(inside)
    above = f"{root}{os.sep}"
    if path.startswith(above) and os.sep == "/":
        below = path[len(above) :]  # what relpath gives, in a tenth of its time
        if not below.startswith((".", "/")) and "/." not in below and "//" not in below:
            return below
    return PurePath(os.path.relpath(path, root)).as_posix()


def index_of(file: str) -> Index:
    """The index of a shard, read once unless the file changes.

    Raises:
        DataError: It is no tar that can be read.
    """
    try:
        identity = _identity(os.stat(file))
    except OSError as error:
        raise DataError(f"{printable(file)}: cannot be read ({error.strerror})") from None
    known = _INDEXES.get(file)
    if known is None or known[0] != identity:
        _OPEN.pop(file, None)
        known = _INDEXES[file] = identity, read_index(file)
    return known[1]


def read_bytes(file: str, name: str) -> bytes:
    """All bytes of a member that is no image, such as a label.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return _read_member(f"{file}/{name}", file, name)
    except BadImage as bad:
        raise DataError(str(bad)) from None


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _index(path: str, file: str) -> Index:
    try:
        return index_of(file)
    except DataError as error:
        raise BadImage(path, str(error)) from None


def _read_member(path: str, file: str, member: str) -> bytes:
    place = _index(path, file).find(member)
    if place is None:
        raise BadImage(path, "no such member in the shard")
    if place.size > MAX_BYTES:
        limit = f"{place.size:,} bytes are more than the limit of {MAX_BYTES:,}"
        raise BadImage(path, limit)
    try:
        content = _pread(file, place.offset, place.size)
    except OSError as error:
        raise BadImage(path, error.strerror or "cannot be read") from None
    if len(content) < place.size:
        raise BadImage(path, "cut short: the shard ends before it")
    return content


def _pread(file: str, offset: int, size: int) -> bytes:
    if not hasattr(os, "pread"):  # Windows
        with open(file, "rb") as stream:
            stream.seek(offset)
            return stream.read(size)
    opened = _opened(file)
    parts: list[bytes] = []
    while size and (part := os.pread(opened.number, size, offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


class _Open:
    """A shard that stays open while anybody reads from it.

    It is read at given offsets only, so threads and forked processes may share it.
    """

    def __init__(self, file: str) -> None:
        self.number = -1
        self.number = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def _opened(file: str) -> _Open:
    found = _OPEN.get(file)
    if found is None:
        found = _Open(file)
        for oldest in list(_OPEN)[: max(len(_OPEN) + 1 - MOST_OPEN, 0)]:
            _OPEN.pop(oldest, None)
        _OPEN[file] = found
    return found


# No locks: a dict's own operations are whole, and two threads that read an index twice lose time
# and nothing else. A lock could be held for ever in a process that was forked meanwhile.
_INDEXES: dict[str, tuple[Identity, Index]] = {}
_OPEN: dict[str, _Open] = {}
