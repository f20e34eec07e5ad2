"""Where the members of a tar file are, read from its headers; nothing is ever unpacked.

POSIX.1-2001 (pax), ustar and GNU tar with long names. Python's tarfile is not used to read: it
takes a header that is damaged for the end of the file, so images would be lost unsaid.
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
"""Bytes of an extended header; a longer one is no name."""
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
FILES, FOLDERS, LINKS, DEVICES = b"0\07", b"5", b"12", b"346"
PACKED = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"\xfd7zXZ\0", "xz", "unxz"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"\x04\x22\x4d\x18", "lz4", "unlz4"),
)
"""First bytes of compressed files, their kind, and what unpacks them."""


class BadShard(DataError):
    """A tar file that is refused as a whole.

    Args:
        message: Where and why.
        last: The last member that was read before, if any.
    """

    def __init__(self, message: str, last: str = "") -> None:
        super().__init__(message)
        self.last = last


class Place(NamedTuple):
    """Where the bytes of a member are."""

    offset: int
    size: int


class Index:
    """Places of all files in one tar, by name.

    Blocks of bytes instead of a dict: forked processes share them without copying any page.

    Args:
        members: Names with places, in the order of the file; no name twice.
        ignored: How many links and devices were passed over, by kind.
    """

    def __init__(self, members: dict[str, Place], ignored: Counter[str]) -> None:
        names = [os.fsencode(name) for name in members]
        places = np.array(list(members.values()), dtype=np.int64).reshape(-1, 2)
        keys = np.array([_key(name) for name in names], dtype=np.uint64)
        self.order = np.argsort(keys, kind="stable")
        self.keys = keys[self.order]
        self.places = places
        self.blob = b"".join(names)
        self.ends = np.cumsum([0, *map(len, names)], dtype=np.int64)
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[str]:
        return (os.fsdecode(self._name(at)) for at in range(len(self)))

    def find(self, name: str) -> Place | None:
        """The place of the member called `name`; None where there is none."""
        wanted = os.fsencode(name)
        key = np.uint64(_key(wanted))
        at = int(np.searchsorted(self.keys, key))
        while at < len(self.keys) and self.keys[at] == key:
            row = int(self.order[at])
            if self._name(row) == wanted:
                return Place(*map(int, self.places[row]))
            at += 1
        return None

    def _name(self, row: int) -> bytes:
        return self.blob[self.ends[row] : self.ends[row + 1]]


def _key(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def read_index(path: str) -> Index:
    """The index of the tar file `path`.

    Raises:
        BadShard: It is none, compressed, cut short or damaged, or a member's name is not safe.
    """
    try:
        with open(path, "rb") as file:
            return _Reading(path, file).index()
    except OSError as error:
        raise BadShard(f"{printable(path)}: cannot be read ({error.strerror})") from None


class _Reading:
    """One pass over the headers of a tar file."""

    def __init__(self, path: str, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0
        self.last = ""
        self.members: dict[str, Place] = {}
        self.ignored: Counter[str] = Counter()

    def index(self) -> Index:
        if not self.size:
            raise self.wrong("an empty file, not a tar")
        extended: dict[str, bytes] = {}
        while (header := self.block()) is not None:
            kind = header[156:157]
            size = self.number(header, 124, 136)
            if kind in (b"x", b"L"):
                extended |= self.extension(kind, size)
                continue
            if kind in (b"g", b"K"):  # of all members, and of a link's target
                self.at += -(-size // BLOCK) * BLOCK
                continue
            # what a link says of a size is not in the file
            size = self.sized(extended, size) if kind not in LINKS + DEVICES + FOLDERS else 0
            name = extended.get("path") or self.short_name(header)
            if kind == b"S" or any(key.startswith("GNU.sparse") for key in extended):
                raise self.wrong("is sparse; write the shard without --sparse", name)
            extended = {}
            if self.at + size > self.size:
                end = f"needs {self.at + size:,} bytes of a file of {self.size:,}"
                raise self.wrong(f"cut short: it {end}; copy it again", name)
            self.note(kind, name, size)
            self.at += -(-size // BLOCK) * BLOCK
        return Index(self.members, self.ignored)

    def note(self, kind: bytes, name: bytes, size: int) -> None:
        """Keep a file, and count what else there is."""
        if kind in FILES and not name.endswith(b"/"):
            safe = self.safe(name)
            if safe in self.members:
                raise self.wrong("is there twice; write the shard with one of them", name)
            self.members[safe] = Place(self.at, size)
            self.last = safe
        elif kind in LINKS:
            self.ignored["link"] += 1
        elif kind in DEVICES:
            self.ignored["device"] += 1
        elif kind not in FILES + FOLDERS + b"VMND":
            self.ignored["unknown member"] += 1

    def block(self) -> bytes | None:
        """The next header, checked; None at the end mark."""
        self.file.seek(self.at)
        header = self.file.read(BLOCK)
        if not self.at and not header.startswith(b"\0"):
            self.check_kind(header)
        if len(header) < BLOCK:
            after = f" after {printable(self.last)}" if self.last else ""
            raise self.wrong(f"cut short: it has no end mark{after}; write or copy it again")
        if not header.strip(b"\0"):
            self.check_end()
            return None
        plain, said = header[:148] + b" " * 8 + header[156:], self.number(header, 148, 156)
        if said != sum(plain) and said != sum(byte - (byte & 128) * 2 for byte in plain):
            after = f", after {printable(self.last)}" if self.last else ""
            what = "no header of a member there; copy it again"
            raise self.wrong(f"damaged at byte {self.at:,}{after}: {what}")
        self.at += BLOCK
        return header

    def check_kind(self, start: bytes) -> None:
        """Refuse what is no plain tar from its first bytes on."""
        for first, kind, tool in PACKED:
            if start.startswith(first):
                remedy = f"images are found by their place; unpack it once with {tool}"
                raise self.wrong(f"compressed with {kind}; {remedy}")
        digits = start[148:156].strip(b" \0")
        if len(start) < BLOCK or not digits or digits.strip(b"01234567"):
            raise self.wrong("not a tar file")

    def check_end(self) -> None:
        """Refuse anything but zeros behind the end mark: another tar would be left out unsaid."""
        while block := self.file.read(2**20):
            if block.strip(b"\0"):
                what = "has more behind its end mark, such as a second tar"
                raise self.wrong(f"{what}; keep them in files of their own")

    def number(self, header: bytes, first: int, end: int) -> int:
        """An octal number, or one in base 256 as GNU tar writes large ones."""
        field = header[first:end]
        if field[0] & 0x80:
            return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        try:
            return int(field.strip(b" \0") or b"0", 8)
        except ValueError:
            raise self.wrong(f"damaged at byte {self.at:,}: a header without numbers") from None

    def short_name(self, header: bytes) -> bytes:
        name, prefix = (part.split(b"\0")[0] for part in (header[:100], header[345:500]))
        ustar = header[257:263] == b"ustar\0"
        return prefix + b"/" + name if ustar and prefix else name

    def extension(self, kind: bytes, size: int) -> dict[str, bytes]:
        """What an extended header says of the member behind it."""
        if size > LONGEST_NAME or self.at + size > self.size:
            raise self.wrong(f"damaged at byte {self.at:,}: an extended header of {size:,} bytes")
        content = self.file.read(size)
        self.at += -(-size // BLOCK) * BLOCK
        if kind == b"L":
            return {"path": content.split(b"\0")[0]}
        found: dict[str, bytes] = {}
        while content:
            length, _, _ = content.partition(b" ")
            digits = int(length) if length.isdigit() and len(length) < 8 else 0
            key, equals, value = content[len(length) + 1 : digits].partition(b"=")
            if not equals or not value.endswith(b"\n") or digits > len(content):
                raise self.wrong(f"damaged near byte {self.at:,}: an unreadable extended header")
            found[key.decode("utf-8", "replace")] = value[:-1]
            content = content[digits:]
        return found

    def sized(self, extended: dict[str, bytes], size: int) -> int:
        value = extended.get("size", b"")
        if value and not (value.isdigit() and len(value) < 20):
            raise self.wrong(f"damaged near byte {self.at:,}: a size that is no number")
        return int(value) if value else size

    def safe(self, raw: bytes) -> str:
        """The name of a member without `./`, refused where it could not be inside of anything."""
        name = os.fsdecode(raw)
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or not parts:
            raise self.wrong("not a name inside of it (absolute, or with ..); rename it", raw)
        if CONTROL.search(name):
            raise self.wrong("has control characters in its name; rename it", raw)
        return "/".join(parts)

    def wrong(self, what: str, member: bytes = b"") -> DataError:
        name = f", member {printable(member)}" if member else ""
        return BadShard(f"{printable(self.path)}{name}: {what}", self.last)
