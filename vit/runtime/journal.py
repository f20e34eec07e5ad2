"""Files that grow block by block and survive a kill, and the journal of how far they got.

    FILE.partial            rows, as FILE will have them
    FILE.partial.journal    first what was asked, then a line for each block

A line says how long each file was when the block was whole, and the checksum of all before. What
comes after the last line that agrees with the files is cut off when the work goes on: a torn row,
a block that was half written, or what a power failure left of the disk's own order.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from vit.errors import RunError, printable

JOURNAL = ".journal"


@dataclass(frozen=True)
class Mark:
    """One line of a journal: what was whole at that moment.

    Args:
        rows: Pictures with an answer.
        ends: Length and checksum (CRC-32) of each file, by its name in the journal.
        tally: Totals so far, such as failures.
        errors: (place in the block, reason) of the pictures of this block that failed.
    """

    rows: int = 0
    ends: dict[str, tuple[int, int]] = field(default_factory=dict)
    tally: dict[str, int] = field(default_factory=dict)
    errors: list[tuple[int, str]] = field(default_factory=list)

    def line(self) -> bytes:
        """As the journal has it."""
        return json.dumps([self.rows, self.ends, self.tally, self.errors]).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "Mark":
        """Raises ValueError, TypeError or AttributeError where `line` is none."""
        rows, ends, tally, errors = json.loads(line)
        whole = {name: (int(size), int(crc)) for name, (size, crc) in ends.items()}
        counts = {str(name): int(number) for name, number in tally.items()}
        return cls(int(rows), whole, counts, [(int(place), str(why)) for place, why in errors])


class Growing:
    """A file that only grows; what is written is with the operating system at once.

    Args:
        path: It is begun anew where `size` is 0, else cut to `size` bytes.
        size, crc: Of what is kept.

    Raises:
        RunError: It cannot be written.
    """

    def __init__(self, path: Path, size: int = 0, crc: int = 0) -> None:
        self.path, self.size, self.crc = path, size, crc
        try:
            self._file: BinaryIO = open(path, "r+b" if size else "wb", buffering=0)  # noqa: SIM115
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise not_written(path, error) from None

    def write(self, data: bytes) -> None:
        """Append; of a full disk, what went onto it stays and is not counted."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise not_written(self.path, error) from None
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def close(self, *, sync: bool = False) -> None:
        """With `sync` after it is on the disk."""
        try:
            if sync and not self._file.closed:
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise not_written(self.path, error) from None


class Journal:
    """Files that grow together, each block in all of them or, after a resume, in none.

    Args:
        path: Of the journal.
        files: Paths of the files, by names that stay the same.
        asked: What decides the answers; see `differences`.
        resume: Go on after the last whole block of what is there; begin where nothing is.

    Attributes:
        mark: What is whole now.

    Raises:
        RunError: What is there was made from something else, or cannot be written.
    """

    def __init__(
        self, path: Path, files: Mapping[str, Path], asked: Mapping[str, Any], *, resume: bool
    ) -> None:
        self.path, self.mark = path, Mark()
        if not (resume and path.exists()):
            write_first(path, asked)
        self.mark, end = last_whole(path, files)
        ends = {name: self.mark.ends.get(name, (0, 0)) for name in files}
        self._files = {name: Growing(files[name], *ends[name]) for name in files}
        self._lines = Growing(path, end)

    def write(self, rows: int, pieces: Mapping[str, bytes], **notes: Any) -> None:
        """Append `pieces` to the files, then the line that makes `rows` count.

        Args:
            rows: Pictures with an answer, in all.
            pieces: Of some of the files.
            notes: tally and errors of a Mark.
        """
        for name, piece in pieces.items():
            self._files[name].write(piece)
        ends = {name: (file.size, file.crc) for name, file in self._files.items()}
        mark = Mark(rows, ends, **notes)
        self._lines.write(mark.line())
        self.mark = mark

    def close(self, *, sync: bool = False) -> None:
        """End the writing; the files stay."""
        for file in (*self._files.values(), self._lines):
            file.close(sync=sync)


def write_first(path: Path, asked: Mapping[str, Any]) -> None:
    """Begin a journal, whole or not at all."""
    line = json.dumps(dict(asked)).encode() + b"\n"
    beside = path.with_name(f"{path.name}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise not_written(path, error) from None


def read_first(path: Path) -> dict[str, Any]:
    """What the journal's work was asked.

    Raises:
        RunError: It is none.
    """
    try:
        with open(path, "rb") as file:
            asked = json.loads(file.readline())
    except (OSError, ValueError):
        asked = None
    if not isinstance(asked, dict):
        raise RunError(
            f"{printable(path)} is no journal of vit predict: begin again with --overwrite and "
            "without --resume"
        )
    return asked


def marks(path: Path) -> Iterator[tuple[Mark, int]]:
    """The lines of a journal after the first, and where each ends; none after a damaged one."""
    with open(path, "rb") as file:
        end = len(file.readline())
        for line in file:
            end += len(line)
            try:
                mark = Mark.parse(line)
            except (ValueError, TypeError, AttributeError):
                return
            if not line.endswith(b"\n"):
                return
            yield mark, end


def last_whole(path: Path, files: Mapping[str, Path]) -> tuple[Mark, int]:
    """The last mark of a journal that all files agree with, and where its line ends."""
    with open(path, "rb") as file:
        good, end = Mark(), len(file.readline())
    with ExitStack() as stack:
        handles: dict[str, BinaryIO] = {}
        for name, unfinished in files.items():
            if not unfinished.exists():
                return good, end
            handles[name] = stack.enter_context(open(unfinished, "rb"))
        for mark, line_end in marks(path):
            if mark.ends.keys() != files.keys():
                break
            if not all(_agrees(handles[name], name, good, mark) for name in files):
                break
            good, end = mark, line_end
    return good, end


def _agrees(file: BinaryIO, name: str, before: Mark, mark: Mark) -> bool:
    """Whether what follows `before` in the file is what `mark` says."""
    start, crc = before.ends.get(name, (0, 0))
    size, expected = mark.ends[name]
    piece = file.read(size - start) if size >= start else b""
    return len(piece) == size - start and zlib.crc32(piece, crc) == expected


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two works were asked otherwise, in words; long digests are not shown."""
    lines = []
    for name in sorted({*then, *now}):
        old, new = then.get(name), now.get(name)
        if json.dumps(old) == json.dumps(new):
            continue
        shown = name.replace("_", " ")
        secret = any(isinstance(value, str) and len(value) == 64 for value in (old, new))
        words = f"{printable(old)}, now {printable(new)}"
        lines.append(f"another {shown}" if secret else f"{shown} ({words})")
    return lines


def not_written(path: Path, error: OSError) -> RunError:
    """The error of a full disk and its like."""
    return RunError(f"{printable(path)} could not be written: {error.strerror}")
