"""Index of a tar file: offset and size of each member, from its headers; nothing is unpacked.

Reads POSIX.1-2001 (pax), ustar and GNU tar with long names. Python's tarfile is not used: it takes
a damaged header for the end of the file, so images would be lost without an error.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

from vit.errors import DataError, printable

BLOCK = 512
LONGEST_NAME = 2**20
"""Limit of an extended header in bytes; no name is longer."""
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
FILES, FOLDERS, LINKS, DEVICES = b"0\07", b"5", b"12", b"346"
PACKED = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"\xfd7zXZ\0", "xz", "unxz"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"\x04\x22\x4d\x18", "lz4", "unlz4"),
)
"""First bytes of compressed files, their format, and the tool that unpacks them."""


class BadShard(DataError):
    """A tar file that cannot be used.

    Args:
        message: The file and the reason.
        last: The last member that was read, if any.
    """

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
        ignored: Number of skipped links and devices, by kind.
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
        wanted = os.fsencode(name)
        key = np.uint64(_key(wanted))
        at = int(np.searchsorted(self.keys, key))
        while at < len(self.keys) and self.keys[at] == key:
            row = int(self.order[at])
            if self._name(row) == wanted:
                return Member(*map(int, self.positions[row]))
            at += 1
        return None

    def _name(self, row: int) -> bytes:
        return self.blob[self.ends[row] : self.ends[row + 1]]


def _key(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def read_index(path: str) -> TarIndex:
    """Read the index of the tar file `path`.

    Raises:
        BadShard: It is not a tar file, compressed, truncated or damaged, or a name is unsafe.
    """
    try:
        with open(path, "rb") as file:
            return _HeaderReader(path, file).index()
    except OSError as error:
        raise BadShard(f"{printable(path)}: cannot be read ({error.strerror})") from None


class _HeaderReader:
    """Reads the headers of a tar file in one pass."""

    def __init__(self, path: str, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.offset = 0
        self.last = ""
        self.members: dict[str, Member] = {}
        self.ignored: Counter[str] = Counter()

    def index(self) -> TarIndex:
        if not self.size:
            raise self.error("an empty file, not a tar")
        extended: dict[str, bytes] = {}
        while (header := self.read_header()) is not None:
            kind = header[156:157]
            size = self.number(header, 124, 136)
            if kind in (b"x", b"L"):
                extended |= self.extension(kind, size)
                continue
            if kind in (b"g", b"K"):  # global headers, and long link targets
                self.offset += -(-size // BLOCK) * BLOCK
                continue
            # a link has no content, whatever size its header has
            size = (
                self.extended_size(extended, size) if kind not in LINKS + DEVICES + FOLDERS else 0
            )
            name = extended.get("path") or self.short_name(header)
            if kind == b"S" or any(key.startswith("GNU.sparse") for key in extended):
                raise self.error("is sparse; write the shard without --sparse", name)
            extended = {}
            if self.offset + size > self.size:
                end = f"needs {self.offset + size:,} bytes of a file of {self.size:,}"
                raise self.error(f"cut short: it {end}; copy it again", name)
            self.add(kind, name, size)
            self.offset += -(-size // BLOCK) * BLOCK
        return TarIndex(self.members, self.ignored)

    def add(self, kind: bytes, name: bytes, size: int) -> None:
        """Add a file to the index, or count what is skipped."""
        if kind in FILES and not name.endswith(b"/"):
            safe = self.safe_name(name)
            if safe in self.members:
                raise self.error("is there twice; write the shard with one of them", name)
            self.members[safe] = Member(self.offset, size)
            self.last = safe
        elif kind in LINKS:
            self.ignored["link"] += 1
        elif kind in DEVICES:
            self.ignored["device"] += 1
        elif kind not in FILES + FOLDERS + b"VMND":
            self.ignored["unknown member"] += 1

    def read_header(self) -> bytes | None:
        """The next header, with its checksum verified; None at the end mark."""
        self.file.seek(self.offset)
        header = self.file.read(BLOCK)
        if not self.offset and not header.startswith(b"\0"):
            self.check_format(header)
        if len(header) < BLOCK:
            after = f" after {printable(self.last)}" if self.last else ""
            raise self.error(f"cut short: it has no end mark{after}; write or copy it again")
        if not header.strip(b"\0"):
            self.check_end()
            return None
        unsigned, checksum = header[:148] + b" " * 8 + header[156:], self.number(header, 148, 156)
        signed = sum(byte - (byte & 128) * 2 for byte in unsigned)
        if checksum not in (sum(unsigned), signed):
            after = f", after {printable(self.last)}" if self.last else ""
            what = "no header of a member there; copy it again"
            raise self.error(f"damaged at byte {self.offset:,}{after}: {what}")
        self.offset += BLOCK
        return header

    def check_format(self, start: bytes) -> None:
        """Refuse a file that is not an uncompressed tar, from its first bytes."""
        for first, kind, tool in PACKED:
            if start.startswith(first):
                remedy = f"images are found by their place; unpack it once with {tool}"
                raise self.error(f"compressed with {kind}; {remedy}")
        digits = start[148:156].strip(b" \0")
        if len(start) < BLOCK or not digits or digits.strip(b"01234567"):
            raise self.error("not a tar file")

    def check_end(self) -> None:
        """Refuse anything but zeros after the end mark: a second tar would be lost silently."""
        while block := self.file.read(2**20):
            if block.strip(b"\0"):
                what = "has more behind its end mark, such as a second tar"
                raise self.error(f"{what}; keep them in files of their own")

    def number(self, header: bytes, first: int, end: int) -> int:
        """An octal number, or one in base 256 as GNU tar writes large ones."""
        field = header[first:end]
        if field[0] & 0x80:
            return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        try:
            return int(field.strip(b" \0") or b"0", 8)
        except ValueError:
            raise self.error(f"damaged at byte {self.offset:,}: a header without numbers") from None

    def short_name(self, header: bytes) -> bytes:
        name, prefix = (part.split(b"\0")[0] for part in (header[:100], header[345:500]))
        ustar = header[257:263] == b"ustar\0"
        return prefix + b"/" + name if ustar and prefix else name

    def extension(self, kind: bytes, size: int) -> dict[str, bytes]:
        """The attributes that an extended header gives the next member."""
        if size > LONGEST_NAME or self.offset + size > self.size:
            raise self.error(
                f"damaged at byte {self.offset:,}: an extended header of {size:,} bytes"
            )
        content = self.file.read(size)
        self.offset += -(-size // BLOCK) * BLOCK
        if kind == b"L":
            return {"path": content.split(b"\0")[0]}
        found: dict[str, bytes] = {}
        while content:
            length, _, _ = content.partition(b" ")
            digits = int(length) if length.isdigit() and len(length) < 8 else 0
            key, equals, value = content[len(length) + 1 : digits].partition(b"=")
            if not equals or not value.endswith(b"\n") or digits > len(content):
                raise self.error(
                    f"damaged near byte {self.offset:,}: an unreadable extended header"
                )
            found[key.decode("utf-8", "replace")] = value[:-1]
            content = content[digits:]
        return found

    def extended_size(self, extended: dict[str, bytes], size: int) -> int:
        value = extended.get("size", b"")
        if value and not (value.isdigit() and len(value) < 20):
            raise self.error(f"damaged near byte {self.offset:,}: a size that is no number")
        return int(value) if value else size

    def safe_name(self, raw: bytes) -> str:
        """The name of a member without `./`; absolute names and `..` are refused."""
        name = os.fsdecode(raw)
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or not parts:
            raise self.error("not a name inside of it (absolute, or with ..); rename it", raw)
        if CONTROL.search(name):
            raise self.error("has control characters in its name; rename it", raw)
        return "/".join(parts)

    def error(self, what: str, member: bytes = b"") -> DataError:
        name = f", member {printable(member)}" if member else ""
        return BadShard(f"{printable(self.path)}{name}: {what}", self.last)
