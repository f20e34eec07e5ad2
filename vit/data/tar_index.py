"""Index of a tar file: offset and size of each member, from its headers; nothing is unpacked.

Headers (POSIX.1-2001 pax, ustar, GNU) are read by `tarfile.TarInfo`, one after another. A loop of
`tarfile.TarFile` would take a damaged header for the end of the file, and lose images silently.
"""

import hashlib
import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vit.errors import DataError
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


class BadShard(DataError):
    """A tar file that cannot be used."""

    def __init__(self, message: str, last: str = "") -> None:
        super().__init__(message)
        self.last = last


class Member(NamedTuple):
    """Position of a member in the file, in bytes."""

    offset: int
    size: int


class TarIndex:
    """Positions of the files in one tar, by name.

    Flat arrays instead of a dict: forked processes share them without copying a page.

    Args:
        members: Members by name, in the order of the file.
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
    """Read the index of the tar file `path`."""
    try:
        with _HeaderFile(path) as file:
            return _read_members(path, file)
    except OSError as error:
        raise BadShard(f"{printable(path)}: cannot be read ({error.strerror})") from None


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

    def error(problem: str, member: str = "") -> BadShard:
        name = f", member {printable(member)}" if member else ""
        return BadShard(f"{printable(path)}{name}: {problem}", last)

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
