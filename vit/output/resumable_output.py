"""The unfinished files of one prediction: their names, whose they are, and the file they become.

One process writes FILE.partial; of several each writes FILE.partial.1-of-2, with every second block
of the list, and the blocks are laid together at the end.

Files that grow block by block and survive a kill, and the journal of how far they got.

    FILE.partial            rows, as FILE will have them
    FILE.partial.journal    first what was asked, then a line for each block

A line says how long each file was when the block was whole, and the checksum of all before. What
comes after the last line that agrees with the files is cut off when the work goes on: a torn row,
a block that was half written, or what a power failure left of the disk's own order.
"""

import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from vit.errors import RunError, VitError, printable
from vit.text import plural

JOURNAL = ".journal"


@dataclass(frozen=True)
class Mark:
    """One line of a journal: what was whole at that moment.

    Args:
        rows: Images with an answer.
        ends: Length and checksum (CRC-32) of each file, by its name in the journal.
        tally: Totals so far, such as failures.
        errors: (place in the block, reason) of the images of this block that failed.
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
            rows: Images with an answer, in all.
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


PARTIAL = ".partial"
STOP = ".stop"
LOCK = ".lock"


def part(path: Path, rank: int = 0, processes: int = 1) -> Path:
    """The unfinished file of one process."""
    which = "" if processes == 1 else f".{rank + 1}-of-{processes}"
    return path.with_name(f"{path.name}{PARTIAL}{which}")


def journal_of(unfinished: Path) -> Path:
    return unfinished.with_name(unfinished.name + JOURNAL)


def leftovers(path: Path) -> list[Path]:
    """Everything that an earlier prediction into `path` left unfinished, sorted."""
    ours = re.compile(
        re.escape(path.name + PARTIAL) + r"(\.\d+-of-\d+)?(\.journal|\.journal\.tmp|\.stop)?"
    )
    try:
        names = os.listdir(path.parent)
    except OSError:
        return []
    return [path.with_name(name) for name in sorted(names) if ours.fullmatch(name)]


def remove(paths: Sequence[Path]) -> None:
    """Unlink all.

    Raises:
        RunError: One cannot be.
    """
    path = Path()
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{printable(path)} cannot be removed: {error.strerror}") from None


class Claim:
    """Keeps other jobs off unfinished files: from before anyone looks at them until they are gone.

    The first process of a job has it alone until it has made way, then all of them share it, so it
    lasts as long as one of them lives. The last one removes its files.

    Args:
        paths: Of what the user gets.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [part(path).with_name(part(path).name + LOCK) for path in paths]
        self._handles: dict[Path, BinaryIO] = {}

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        for path, handle in self._handles.items():
            with handle, suppress(OSError):
                if _locked(handle) and _is(handle, path):
                    path.unlink()

    def take(self, *, shared: bool = False) -> None:
        """Have it, alone or `shared`, until the end of the `with`.

        Raises:
            RunError: Another job has it, and is still at work.
        """
        for path in self._paths:
            try:
                handle = self._handles.get(path) or open(path, "ab")  # noqa: SIM115
            except OSError as error:
                raise not_written(path, error) from None
            self._handles[path] = handle
            if not _locked(handle, shared=shared) or not _is(handle, path):
                name = printable(path.with_name(path.name.removesuffix(LOCK)))
                raise RunError(f"{name} is being written by another process: wait, or end it")


def _locked(handle: BinaryIO, *, shared: bool = False) -> bool:
    """Whether the lock is ours now; also on a system, or a disk, that has none."""
    try:
        import fcntl

        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def _is(handle: BinaryIO, path: Path) -> bool:
    """Whether `handle` is of the file that is there now, and not of one that was removed."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def rows_held(path: Path) -> int:
    """Rows in the unfinished files of `path`, as their journals count them."""
    total = 0
    for left in leftovers(path):
        if left.name.endswith(JOURNAL):
            with suppress(OSError):
                total += max((mark.rows for mark, _ in marks(left)), default=0)
    return total


def refuse_leftovers(path: Path) -> None:
    """Refuse to begin where something unfinished is.

    Raises:
        VitError: Something is; the message says how much.
    """
    rows = [one for one in leftovers(path) if not one.name.endswith((JOURNAL, ".tmp", STOP))]
    if not rows:
        return
    held = plural(rows_held(path), "row")
    raise VitError(
        f"{printable(rows[0])} is unfinished and holds {held}; go on with --resume, or begin again "
        "with --overwrite"
    )


def begun_with(path: Path) -> dict[str, Any]:
    """What the unfinished work on `path` was asked; nothing where there is none.

    Raises:
        RunError: Its journal is damaged.
    """
    journal = next((left for left in leftovers(path) if left.name.endswith(JOURNAL)), None)
    return {} if journal is None else read_first(journal)


def check_same(path: Path, asked: Mapping[str, Any]) -> None:
    """Refuse to go on with what another command began.

    Raises:
        RunError: It differs, or does not say what it was made from.
    """
    found = [left for left in leftovers(path) if left.name.endswith(JOURNAL)]
    for journal in found:
        other = differences(read_first(journal), asked)
        if other:
            begun = journal.with_name(journal.name.removesuffix(JOURNAL))
            raise RunError(
                f"{printable(begun)} was begun with {'; '.join(other)}: give the same again, or "
                "begin again with --overwrite and without --resume"
            )
    if not found:
        refuse_leftovers_without_journal(path)


def refuse_leftovers_without_journal(path: Path) -> None:
    """Rows of which nothing says where they are from are not to be continued.

    Raises:
        RunError: There are some.
    """
    rows = [one for one in leftovers(path) if not one.name.endswith((".tmp", STOP))]
    if rows:
        raise RunError(
            f"{printable(rows[0])} has lost its journal, so nothing says what made it: begin again "
            "with --overwrite and without --resume"
        )


def blocks(journals: Sequence[Path]) -> Iterator[tuple[int, Mark, Mark]]:
    """(process, before, after) of each block of the list, in its order: they took turns."""
    lines = [marks(journal) for journal in journals]
    before = [next(own)[0] for own in lines]
    for turn in itertools.cycle(range(len(journals))):
        following = next(lines[turn], None)
        if following is None:
            return
        yield turn, before[turn], following[0]
        before[turn] = following[0]


def lay_together(parts: Sequence[Path], journals: Sequence[Path], name: str, out: Path) -> None:
    """Write the blocks of several processes to `out` in the order of the list.

    Args:
        parts: The files, in the order of the processes.
        journals: Theirs.
        name: Of the files in the journals.
        out: Replaced.

    Raises:
        RunError: The disk is full.
    """
    try:
        with ExitStack() as stack:
            sources = [stack.enter_context(open(file, "rb")) for file in parts]
            target = stack.enter_context(open(out, "wb"))
            heads = [next(marks(journal))[0].ends[name][0] for journal in journals]
            head, *_ = [source.read(size) for source, size in zip(sources, heads, strict=True)]
            target.write(head)  # the same in all
            for turn, before, after in blocks(journals):
                target.write(sources[turn].read(after.ends[name][0] - before.ends[name][0]))
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        raise not_written(out, error) from None
