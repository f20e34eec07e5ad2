"""Images inside archives: members of tar shards and rows of Arrow tables, addressed like files.

    shards/0001.tar/cat/3.jpg              a member of an uncompressed tar
    cache/train.arrow/image/17/cat/3.jpg   a column and a row of a table, then the row's name

No file can be below another file, so such an address is never the path of a file. Any image is read
directly, in any order, so shuffling and resuming work as for files. A process keeps the indexes of
the shards that it has read, and forked processes inherit them. Tables (of the library `datasets`)
are memory-mapped, and shared by all processes.
"""

import filecmp
import hashlib
import io
import os
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vit.errors import BadImage, DataError, error_text
from vit.text import printable

BLOCK = tarfile.BLOCKSIZE
MAX_EXTENDED_BYTES = 2**20
"""Limit of an extended header; no name is longer."""
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
GNU_VOLUME_TYPES = (b"V", b"M", b"N", b"D")
"""Volume labels and folder listings of GNU tar, which are skipped without a note."""
COMPRESSED_FORMATS = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"\xfd7zXZ\0", "xz", "unxz"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"\x04\x22\x4d\x18", "lz4", "unlz4"),
)
"""First bytes of compressed files, their format, and the tool that unpacks them."""


class Member(NamedTuple):
    """Position of a member in the file, in bytes."""

    offset: int
    size: int


class TarIndex:
    """Positions of the files in one tar, by name.

    Flat arrays instead of a dict: forked processes share them without copying a page.
    """

    def __init__(self, members: dict[str, Member], ignored: Counter[str]) -> None:
        names = [os.fsencode(name) for name in members]
        positions = np.array(list(members.values()), dtype=np.int64).reshape(-1, 2)
        keys = np.array([_key(name) for name in names], dtype=np.uint64)
        self.order = np.argsort(keys, kind="stable")
        self.keys = keys[self.order]
        self.positions = positions
        self.blob = b"".join(names)
        self.ends = np.cumsum([0, *map(len, names)], dtype=np.int64)
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[str]:
        return (os.fsdecode(self._name(at)) for at in range(len(self)))

    def find(self, name: str) -> Member | None:
        """The member `name`, or None."""
        encoded = os.fsencode(name)
        key = np.uint64(_key(encoded))
        at = int(np.searchsorted(self.keys, key))
        while at < len(self.keys) and self.keys[at] == key:
            row = int(self.order[at])
            if self._name(row) == encoded:
                return Member(*map(int, self.positions[row]))
            at += 1
        return None

    def _name(self, row: int) -> bytes:
        return self.blob[self.ends[row] : self.ends[row + 1]]


def _key(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def read_index(path: str) -> TarIndex:
    try:
        with _HeaderFile(path) as file:
            return _read_members(path, file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


class _HeaderFile(io.BufferedReader):
    """A file for `tarfile` that refuses extended headers of absurd size before allocating them."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path))

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_EXTENDED_BYTES:
            raise tarfile.HeaderError(f"an extended header of {size:,} bytes")
        return super().read(size)


def _read_members(path: str, file: _HeaderFile) -> TarIndex:
    total = os.fstat(file.fileno()).st_size
    members: dict[str, Member] = {}
    ignored: Counter[str] = Counter()
    offset, last = 0, ""

    def error(problem: str, member: str = "") -> DataError:
        name = f", member {printable(member)}" if member else ""
        return DataError(f"{path}{name}: {problem}")

    if problem := _format_problem(file.read(BLOCK)):
        raise error(problem)
    tar: tarfile.TarFile | None = None
    while True:
        file.seek(offset)
        header = file.read(BLOCK)
        after = f" after {printable(last)}" if last else ""
        if len(header) < BLOCK:
            raise error(f"cut short: it has no end mark{after}; write or copy it again")
        if not header.strip(b"\0"):
            break
        file.seek(offset)
        try:
            tar = tar or tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
            file.seek(offset)
            info = tarfile.TarInfo.fromtarfile(tar)
        except (tarfile.TarError, ValueError, RecursionError) as cause:
            reason = str(cause) if "extended" in str(cause) else "no header of a member there"
            place = f"damaged at byte {offset:,}{after and ','}{after}"
            raise error(f"{place}: {reason}; copy it again") from None
        if info.issparse():
            raise error("is sparse; write the shard without --sparse", info.name)
        if info.size < 0 or tar.offset <= offset:
            raise error(f"damaged at byte {offset:,}: a negative size; copy it again", info.name)
        offset = tar.offset
        if info.isreg():
            if (end := info.offset_data + info.size) > total:
                needs = f"it needs {end:,} bytes of a file of {total:,}"
                raise error(f"cut short: {needs}; copy it again", info.name)
            name = "/".join(part for part in info.name.split("/") if part not in ("", "."))
            if info.name.startswith("/") or ".." in name.split("/") or not name:
                raise error("not a name inside of it (absolute, or with ..); rename it", info.name)
            if CONTROL.search(name):
                raise error("has control characters in its name; rename it", info.name)
            if name in members:
                raise error("is there twice; write the shard with one of them", info.name)
            members[name] = Member(info.offset_data, info.size)
            last = name
        elif info.islnk() or info.issym():
            ignored["link"] += 1
        elif info.isdev():
            ignored["device"] += 1
        elif not info.isdir() and info.type not in GNU_VOLUME_TYPES:
            ignored["unknown member"] += 1
    while block := file.read(MAX_EXTENDED_BYTES):  # a second tar would be lost silently
        if block.strip(b"\0"):
            more = "has more behind its end mark, such as a second tar"
            raise error(f"{more}; keep them in files of their own")
    return TarIndex(members, ignored)


def _format_problem(start: bytes) -> str:
    """Why a file with these first bytes is not an uncompressed tar; empty if it may be one."""
    if not start:
        return "an empty file, not a tar"
    for magic, name, tool in COMPRESSED_FORMATS:
        if start.startswith(magic):
            remedy = f"images are found by their place; unpack it once with {tool}"
            return f"compressed with {name}; {remedy}"
    digits = start[148:156].strip(b" \0")
    is_empty_tar = start == bytes(BLOCK)
    if not is_empty_tar and (len(start) < BLOCK or not digits or digits.strip(b"01234567")):
        return "not a tar file"
    return ""


SHARD, TABLE = ".tar", ".arrow"
MAX_BYTES = 2**28
"""Of one image, in an archive or a file."""
MAX_OPEN_SHARDS = 128
"""Per process."""

Identity = tuple[int, int, int, int]


def open_binary(path: str) -> BinaryIO:
    """Open an image, in a file or an archive."""
    return open_member(path) if is_inside(path) else open(path, "rb")


def open_member(path: str) -> BinaryIO:
    """Open an image inside an archive."""
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
    """Size in bytes of an image, in a file or an archive."""
    found = split_address(path)
    if found is None:
        return os.path.getsize(path)
    file, member = found
    if file.lower().endswith(TABLE):
        return len(read_arrow_row(path, file, member))
    return _find_member(path, file, member).size


def copy_out(path: str, target: str) -> None:
    """Copy an image, in a file or an archive, to the file `target`."""
    if not is_inside(path):
        shutil.copy2(path, target)
        return
    with open_binary(path) as source, open(target, "wb") as file:
        shutil.copyfileobj(source, file)
    os.chmod(target, 0o644)


def same_bytes(path: str, file: Path) -> bool:
    """Whether an image, in a file or an archive, has the same content as `file`."""
    if not is_inside(path):
        return filecmp.cmp(path, file, shallow=False)
    with open_binary(path) as source:
        return source.read() == file.read_bytes()


def is_inside(path: str) -> bool:
    """Whether `path` is an address inside a shard or a table."""
    return split_address(path) is not None


def split_address(path: str) -> tuple[str, str] | None:
    """Split an address into the archive and the name inside it; None for the path of a file."""
    lower = path.lower()
    for end in (SHARD, TABLE):
        at = lower.find(end + "/")
        while at >= 0:
            file = path[: at + len(end)]
            if file in _INDEXES or os.path.isfile(file):
                return file, path[at + len(end) + 1 :]
            at = lower.find(end + "/", at + 1)
    return None


def content_digest(path: str) -> bytes:
    """16-byte hash of the content of `path`, an image; BadImage or OSError if it has vanished."""
    with open_binary(path) as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))  # type: ignore[arg-type]
        return digest.digest()


def relative(path: str, root: Path) -> str:
    """`path` relative to the dataset `root`, with forward slashes, as splits are recorded.

    For an image in an archive it is its name there, so that shards and folders of the same images
    have the same names; if `root` is a folder of shards, the shard's name comes first.
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
        below = path[len(above) :]  # as relpath, in a tenth of its time
        if not below.startswith((".", "/")) and "/." not in below and "//" not in below:
            return below
    return PurePath(os.path.relpath(path, root)).as_posix()


def index_of(file: str) -> TarIndex:
    """The index of a shard, cached while the file is unchanged."""
    try:
        identity = _identity(os.stat(file))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
    known = _INDEXES.get(file)
    if known is None or known[0] != identity:
        _OPEN.pop(file, None)
        known = _INDEXES[file] = identity, read_index(file)
    return known[1]


def read_bytes(file: str, name: str) -> bytes:
    """Read a member of a shard that is not an image, such as a label."""
    try:
        return _read_member(f"{file}/{name}", file, name)
    except BadImage as bad:
        raise DataError(str(bad)) from None


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _find_member(path: str, file: str, member: str) -> Member:
    try:
        place = index_of(file).find(member)
    except DataError as error:
        raise BadImage(path, str(error)) from None
    if place is None:
        raise BadImage(path, "no such member in the shard")
    return place


def _read_member(path: str, file: str, member: str) -> bytes:
    place = _find_member(path, file, member)
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
    while size and (part := os.pread(opened.descriptor, size, offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


class _OpenShard:
    """A file descriptor that is closed with its last reference.

    It is only read at given offsets, so threads and forked processes may share it.
    """

    def __init__(self, file: str) -> None:
        self.descriptor = -1
        self.descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _opened(file: str) -> _OpenShard:
    found = _OPEN.get(file)
    if found is None:
        found = _OpenShard(file)
        for oldest in list(_OPEN)[: max(len(_OPEN) + 1 - MAX_OPEN_SHARDS, 0)]:
            _OPEN.pop(oldest, None)
        _OPEN[file] = found
    return found


# No locks: operations of a dict are atomic, and two threads that read one index only lose time.
# A lock could stay locked forever in a process that is forked meanwhile.
_INDEXES: dict[str, tuple[Identity, TarIndex]] = {}
_OPEN: dict[str, _OpenShard] = {}


# --- Arrow tables --------------------------------------------------------------------------------

_TABLES: dict[tuple[int, str], Any] = {}
"""By process id and file: a forked process opens its tables itself."""


def open_arrow_table(file: str) -> Any:
    """Open a pyarrow.Table, memory-mapped."""
    key = os.getpid(), file
    if key not in _TABLES:
        try:
            import pyarrow as pa
        except ImportError:
            raise DataError(
                f'{file}: reading it needs pyarrow; pip install "vit-toolkit[datasets]"'
            ) from None
        try:
            _TABLES[key] = pa.ipc.open_stream(pa.memory_map(file)).read_all()
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file}: no Arrow table ({error_text(error)})") from None
    return _TABLES[key]


def read_arrow_row(path: str, file: str, member: str) -> bytes:
    """Read the image `COLUMN/ROW/NAME` of the table `file`."""
    column, _, rest = member.partition("/")
    row = rest.split("/")[0]
    try:
        found = open_arrow_table(file)
    except DataError as error:
        raise BadImage(path, str(error)) from None
    if column not in found.column_names or not row.isdecimal() or int(row) >= len(found):
        raise BadImage(path, "no such row in the table")
    value = found.column(column)[int(row)].as_py()
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise BadImage(path, "the row has no image")
    return content
