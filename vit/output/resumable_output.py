"""Resumable output: files that are appended block by block, and a journal of complete blocks.

    FILE.partial            rows, as FILE will have them
    FILE.partial.journal    the settings, then one line per block

A journal line has the length and the CRC-32 of each file after its block. On resume, everything
after the last line that matches the files is truncated: a torn row, half a block, or what a power
failure left.

One process writes FILE.partial; several write FILE.partial.1-of-2, ... with blocks in turn, which
are merged at the end.
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
class JournalEntry:
    """One journal line: the state after a complete block.

    Args:
        rows: Images predicted so far.
        ends: Length and CRC-32 of each file, by its name in the journal.
        totals: Totals so far, such as failures.
        errors: (index in the block, reason) of the block's failures.
    """

    rows: int = 0
    ends: dict[str, tuple[int, int]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    errors: list[tuple[int, str]] = field(default_factory=list)

    def line(self) -> bytes:
        """Encode as a line of the journal."""
        return json.dumps([self.rows, self.ends, self.totals, self.errors]).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "JournalEntry":
        """Raises ValueError, TypeError or AttributeError if the line is damaged."""
        rows, ends, totals, errors = json.loads(line)
        positions = {name: (int(size), int(crc)) for name, (size, crc) in ends.items()}
        counts = {str(name): int(number) for name, number in totals.items()}
        return cls(int(rows), positions, counts, [(int(i), str(why)) for i, why in errors])


class AppendOnlyFile:
    """An unbuffered file that is only appended to.

    Args:
        path: Created if `size` is 0, else truncated to `size` bytes.
        size, crc: Length and CRC-32 of the kept content.

    Raises:
        RunError: The file cannot be written.
    """

    def __init__(self, path: Path, size: int = 0, crc: int = 0) -> None:
        self.path, self.size, self.crc = path, size, crc
        try:
            self._file: BinaryIO = open(path, "r+b" if size else "wb", buffering=0)  # noqa: SIM115
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise write_error(path, error) from None

    def write(self, data: bytes) -> None:
        """Append; after an error the size does not count a partial write."""
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            raise write_error(self.path, error) from None
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def close(self, *, sync: bool = False) -> None:
        """Close; with `sync`, flush to the disk first."""
        try:
            if sync and not self._file.closed:
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise write_error(self.path, error) from None


class Journal:
    """Files that are appended together; after a resume a block is in all of them or in none.

    Args:
        path: The journal.
        files: Paths of the files, by name.
        settings: What determines the content; see `differences`.
        resume: Continue after the last complete block, if there is one.

    Attributes:
        entry: State after the last complete block.

    Raises:
        RunError: A file cannot be written.
    """

    def __init__(
        self, path: Path, files: Mapping[str, Path], settings: Mapping[str, Any], *, resume: bool
    ) -> None:
        self.path, self.entry = path, JournalEntry()
        if not (resume and path.exists()):
            write_header(path, settings)
        self.entry, end = last_valid_entry(path, files)
        ends = {name: self.entry.ends.get(name, (0, 0)) for name in files}
        self._files = {name: AppendOnlyFile(files[name], *ends[name]) for name in files}
        self._lines = AppendOnlyFile(path, end)

    def write(self, rows: int, pieces: Mapping[str, bytes], **notes: Any) -> None:
        """Append `pieces` to the files, then the journal line that commits the block.

        Args:
            rows: Images predicted so far.
            pieces: Data by file.
            notes: totals and errors of a Mark.
        """
        for name, piece in pieces.items():
            self._files[name].write(piece)
        ends = {name: (file.size, file.crc) for name, file in self._files.items()}
        entry = JournalEntry(rows, ends, **notes)
        self._lines.write(entry.line())
        self.entry = entry

    def close(self, *, sync: bool = False) -> None:
        """Close all files."""
        for file in (*self._files.values(), self._lines):
            file.close(sync=sync)


def write_header(path: Path, settings: Mapping[str, Any]) -> None:
    """Create a journal atomically."""
    line = json.dumps(dict(settings)).encode() + b"\n"
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
        raise write_error(path, error) from None


def read_header(path: Path) -> dict[str, Any]:
    """Read the settings of a journal.

    Raises:
        RunError: The file is not a journal.
    """
    try:
        with open(path, "rb") as file:
            settings = json.loads(file.readline())
    except (OSError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        raise RunError(
            f"{printable(path)} is not a journal of vit predict: start again with --overwrite and "
            "without --resume"
        )
    return settings


def journal_entries(path: Path) -> Iterator[tuple[JournalEntry, int]]:
    """Yield the entries of a journal and their end offsets, up to the first damaged one."""
    with open(path, "rb") as file:
        end = len(file.readline())
        for line in file:
            end += len(line)
            try:
                entry = JournalEntry.parse(line)
            except (ValueError, TypeError, AttributeError):
                return
            if not line.endswith(b"\n"):
                return
            yield entry, end


def last_valid_entry(path: Path, files: Mapping[str, Path]) -> tuple[JournalEntry, int]:
    """The last entry that all files match, and its end offset."""
    with open(path, "rb") as file:
        good, end = JournalEntry(), len(file.readline())
    with ExitStack() as stack:
        handles: dict[str, BinaryIO] = {}
        for name, unfinished in files.items():
            if not unfinished.exists():
                return good, end
            handles[name] = stack.enter_context(open(unfinished, "rb"))
        for entry, line_end in journal_entries(path):
            if entry.ends.keys() != files.keys():
                break
            if not all(_matches(handles[name], name, good, entry) for name in files):
                break
            good, end = entry, line_end
    return good, end


def _matches(file: BinaryIO, name: str, before: JournalEntry, entry: JournalEntry) -> bool:
    """Whether the file between `before` and `entry` has the recorded length and checksum."""
    start, crc = before.ends.get(name, (0, 0))
    size, expected = entry.ends[name]
    piece = file.read(size - start) if size >= start else b""
    return len(piece) == size - start and zlib.crc32(piece, crc) == expected


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ; digests are not shown."""
    lines = []
    for name in sorted({*then, *now}):
        old, new = then.get(name), now.get(name)
        if json.dumps(old) == json.dumps(new):
            continue
        shown = name.replace("_", " ")
        is_digest = any(isinstance(value, str) and len(value) == 64 for value in (old, new))
        change = f"{printable(old)}, now {printable(new)}"
        lines.append(f"another {shown}" if is_digest else f"{shown} ({change})")
    return lines


def write_error(path: Path, error: OSError) -> RunError:
    """A failed write, such as on a full disk."""
    return RunError(f"{printable(path)} could not be written: {error.strerror}")


PARTIAL = ".partial"
STOP = ".stop"
LOCK = ".lock"


def partial_path(path: Path, rank: int = 0, processes: int = 1) -> Path:
    """Path of the unfinished file of one process."""
    which = "" if processes == 1 else f".{rank + 1}-of-{processes}"
    return path.with_name(f"{path.name}{PARTIAL}{which}")


def journal_path(unfinished: Path) -> Path:
    return unfinished.with_name(unfinished.name + JOURNAL)


def partial_files(path: Path) -> list[Path]:
    """All unfinished files of `path` that exist, sorted."""
    ours = re.compile(
        re.escape(path.name + PARTIAL) + r"(\.\d+-of-\d+)?(\.journal|\.journal\.tmp|\.stop)?"
    )
    try:
        names = os.listdir(path.parent)
    except OSError:
        return []
    return [path.with_name(name) for name in sorted(names) if ours.fullmatch(name)]


def remove(paths: Sequence[Path]) -> None:
    """Delete files.

    Raises:
        RunError: One cannot be deleted.
    """
    path = Path()
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{printable(path)} cannot be removed: {error.strerror}") from None


class FileLock:
    """Locks the unfinished files of a job against other jobs (flock on FILE.partial.lock).

    The main process holds the lock exclusively while it prepares the files; then all processes of
    the job share it. The last one deletes the lock files.

    Args:
        paths: The finished files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [
            partial_path(path).with_name(partial_path(path).name + LOCK) for path in paths
        ]
        self._handles: dict[Path, BinaryIO] = {}

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        for path, handle in self._handles.items():
            with handle, suppress(OSError):
                if _locked(handle) and _is_current(handle, path):
                    path.unlink()

    def acquire(self, *, shared: bool = False) -> None:
        """Acquire the lock, exclusive or `shared`, until the end of the `with`.

        Raises:
            RunError: Another job holds it.
        """
        for path in self._paths:
            try:
                handle = self._handles.get(path) or open(path, "ab")  # noqa: SIM115
            except OSError as error:
                raise write_error(path, error) from None
            self._handles[path] = handle
            if not _locked(handle, shared=shared) or not _is_current(handle, path):
                name = printable(path.with_name(path.name.removesuffix(LOCK)))
                raise RunError(f"{name} is being written by another process: wait, or end it")


def _locked(handle: BinaryIO, *, shared: bool = False) -> bool:
    """Try to lock; True also where the system or the disk has no locks."""
    try:
        import fcntl

        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def _is_current(handle: BinaryIO, path: Path) -> bool:
    """Whether `handle` is the file at `path`, not a deleted one."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def count_partial_rows(path: Path) -> int:
    """Rows in the unfinished files of `path`, by their journals."""
    total = 0
    for left in partial_files(path):
        if left.name.endswith(JOURNAL):
            with suppress(OSError):
                total += max((entry.rows for entry, _ in journal_entries(left)), default=0)
    return total


def refuse_partial_files(path: Path) -> None:
    """Refuse to start where unfinished files exist.

    Raises:
        VitError: They exist; the message has the number of rows.
    """
    rows = [one for one in partial_files(path) if not one.name.endswith((JOURNAL, ".tmp", STOP))]
    if not rows:
        return
    held = plural(count_partial_rows(path), "row")
    raise VitError(
        f"{printable(rows[0])} is unfinished and holds {held}; continue with --resume, or start "
        "again with --overwrite"
    )


def stored_settings(path: Path) -> dict[str, Any]:
    """Settings of the unfinished prediction into `path`; empty if there is none.

    Raises:
        RunError: Its journal is damaged.
    """
    journal = next((left for left in partial_files(path) if left.name.endswith(JOURNAL)), None)
    return {} if journal is None else read_header(journal)


def check_settings_match(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to resume files that were written with other settings.

    Raises:
        RunError: Settings differ, or the journal is lost.
    """
    found = [left for left in partial_files(path) if left.name.endswith(JOURNAL)]
    for journal in found:
        different = differences(read_header(journal), settings)
        if different:
            begun = journal.with_name(journal.name.removesuffix(JOURNAL))
            raise RunError(
                f"{printable(begun)} was begun with {'; '.join(different)}: give the same again, "
                "or start again with --overwrite and without --resume"
            )
    if not found:
        refuse_rows_without_journal(path)


def refuse_rows_without_journal(path: Path) -> None:
    """Refuse unfinished rows whose settings are unknown.

    Raises:
        RunError: There are some.
    """
    rows = [one for one in partial_files(path) if not one.name.endswith((".tmp", STOP))]
    if rows:
        raise RunError(
            f"{printable(rows[0])} has lost its journal, so nothing says what made it: begin again "
            "with --overwrite and without --resume"
        )


def journal_blocks(journals: Sequence[Path]) -> Iterator[tuple[int, JournalEntry, JournalEntry]]:
    """Yield (rank, entry before, entry after) of each block in list order: ranks take turns."""
    lines = [journal_entries(journal) for journal in journals]
    before = [next(own)[0] for own in lines]
    for turn in itertools.cycle(range(len(journals))):
        following = next(lines[turn], None)
        if following is None:
            return
        yield turn, before[turn], following[0]
        before[turn] = following[0]


def merge_parts(parts: Sequence[Path], journals: Sequence[Path], name: str, out: Path) -> None:
    """Merge the blocks of several processes into `out`, in list order.

    Args:
        parts: Files of the processes, by rank.
        journals: Their journals.
        name: Name of the files in the journals.
        out: Replaced.

    Raises:
        RunError: The disk is full.
    """
    try:
        with ExitStack() as stack:
            sources = [stack.enter_context(open(file, "rb")) for file in parts]
            target = stack.enter_context(open(out, "wb"))
            heads = [next(journal_entries(journal))[0].ends[name][0] for journal in journals]
            head, *_ = [source.read(size) for source, size in zip(sources, heads, strict=True)]
            target.write(head)  # the same in all
            for turn, before, after in journal_blocks(journals):
                target.write(sources[turn].read(after.ends[name][0] - before.ends[name][0]))
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        raise write_error(out, error) from None
