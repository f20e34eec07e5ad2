"""Resumable output: an append-only log of finished blocks, from which the final files are made.

    blocks of images -> BlockLog.append    one write a block; a kill tears the last record at most
    --resume         -> BlockLog           cuts the torn record off and continues after the others
    all logs         -> merge_blocks       the blocks of all processes in the order of the images
                     -> ResumableOutput.finish: FILE, and the file of embeddings

    FILE.partial            the log: the settings in one line, then a record for each block
    FILE.partial.1-of-2     the log of the first of two processes
    FILE.partial.lock       locked by the processes of one prediction
    FILE.done               settings and totals of a finished FILE, after a prediction with --resume

A record is a line of JSON with a CRC-32 of all of the record, then the rows as FILE has them, then
the vectors as float32. Records after the first one whose checksum is wrong are cut off: half a
block of a killed process, or what a power failure left. No database: docs/lab-notebook.md has the
measurements against sqlite.
"""

import heapq
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vit.atomic_files import POSIX, explain_write_errors, lock_file, open_atomic, write_text
from vit.errors import ConfigError, RunError, VitError
from vit.output.output_file import check_output, resolve_link
from vit.text import plural

if TYPE_CHECKING:
    import numpy.typing as npt


PARTIAL, LOCK, DONE = ".partial", ".lock", ".done"


@dataclass(frozen=True)
class Block:
    """Results of consecutive images, with their embeddings in float32, or without any."""

    first: int
    images: int
    rows: bytes
    vectors: bytes = b""
    errors: list[tuple[int, str]] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        sizes = [len(self.rows), len(self.vectors)]
        notes = json.dumps([self.first, self.images, self.errors, self.totals, *sizes])
        record = b"".join([notes.encode(), b"\n", self.rows, self.vectors])
        return b"%08x %s" % (zlib.crc32(record), record)


def read_blocks(log: Path) -> Iterator[tuple[Block, int]]:
    """Yield the blocks of a log and the offsets where they end, up to the first damaged one."""
    with open(log, "rb") as file:
        file.readline()
        while line := file.readline():
            checksum, _, notes = line.partition(b" ")
            try:
                first, images, errors, totals, *sizes = json.loads(notes)
                rows, vectors = (file.read(size) for size in sizes)
                expected = int(checksum, 16)
            except (ValueError, TypeError):
                return
            if zlib.crc32(vectors, zlib.crc32(rows, zlib.crc32(notes))) != expected:
                return
            yield Block(first, images, rows, vectors, errors, totals), file.tell()


def read_settings(log: Path) -> dict[str, Any]:
    """Settings in the first line of a log; empty if a kill tore it, which is before any block."""
    try:
        with open(log, "rb") as file:
            line = file.readline()
        return dict(json.loads(line)["settings"]) if line.endswith(b"\n") else {}
    except (OSError, ValueError, TypeError, KeyError):
        raise RunError(
            f"{log} was not written by this version of vit: start again with "
            "--overwrite and without --resume"
        ) from None


class BlockLog:
    """The log of one process; its `totals` are those of the last block."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.path, self.images, end = path, 0, 0
        self.totals: dict[str, int] = {}
        if resume and path.exists():
            read_settings(path)  # refuses other files
            for block, block_end in read_blocks(path):
                self.images, self.totals = self.images + block.images, block.totals
                end = block_end
        with explain_write_errors(path):
            self._file: BinaryIO = open(path, "r+b" if end else "wb", buffering=0)  # noqa: SIM115
            self._file.truncate(end)
            self._file.seek(end)
        if not end:
            self._write(json.dumps({"settings": dict(settings)}).encode() + b"\n")

    def append(self, block: Block) -> None:
        """Append a block; after an error, `images` and `totals` are those before it."""
        self._write(block.encode())
        self.images, self.totals = self.images + block.images, block.totals

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        with explain_write_errors(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]


def merge_blocks(logs: Sequence[Path], images: int) -> Iterator[Block]:
    """Yield the blocks of all logs in the order of the images."""
    end = 0
    merged = heapq.merge(*map(read_blocks, logs), key=lambda pair: pair[0].first)
    for block, _ in merged:
        if block.first != end:
            break
        end += block.images
        yield block
    if end != images:
        raise RunError(
            f"{logs[0]} is damaged after {plural(end, 'row')} of {images:,}: start "
            "again with --overwrite and without --resume"
        )


def describe_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ; digests are not shown."""
    lines = []
    for name in sorted({*then, *now}):
        old, new = then.get(name), now.get(name)
        if json.dumps(old) == json.dumps(new):
            continue
        shown = name.replace("_", " ")
        is_digest = any(re.fullmatch("[0-9a-f]{64}", str(value)) for value in (old, new))
        change = f"{old}, now {new}"
        lines.append(f"another {shown}" if is_digest else f"{shown} ({change})")
    return lines


class ResumableOutput:
    """The files of one prediction."""

    def __init__(self, out: str, embeddings: str | None = None, *, processes: int = 1) -> None:
        self.out, self.processes = resolve_link(out), processes
        self.embeddings = None if embeddings is None else resolve_link(embeddings)
        self.targets = [path for path in (self.out, self.embeddings) if path is not None]
        self.partial = Path(f"{self.out}{PARTIAL}")
        self.done = Path(f"{self.out}{DONE}")
        self.stop = Path(f"{self.partial}.stop")
        """A process that fails creates this file, and the others stop too."""

    def log_path(self, rank: int) -> Path:
        part = "" if self.processes == 1 else f".{rank + 1}-of-{self.processes}"
        return Path(f"{self.partial}{part}")

    def open_log(self, rank: int, settings: Mapping[str, Any], *, resume: bool) -> BlockLog:
        return BlockLog(self.log_path(rank), settings, resume=resume)

    def logs(self) -> list[Path]:
        """Logs that exist, of any number of processes."""
        return partial_files(self.out, r"(\.\d+-of-\d+)?")

    def leftovers(self) -> list[Path]:
        """All unfinished files that exist."""
        return partial_files(self.out, r"(\.\d+-of-\d+|\.stop)?")

    def rows(self) -> int:
        total = 0
        for log in self.logs():
            with suppress(OSError):
                total += sum(block.images for block, _ in read_blocks(log))
        return total

    def is_done(self) -> bool:
        """Whether all files are complete, and a record says of which prediction."""
        return self.done.exists() and all(path.exists() for path in self.targets)

    def stored_settings(self) -> dict[str, Any]:
        """Settings of the logs, or of the finished files, or empty."""
        records = [self.done] if self.is_done() else self.logs()
        return next(filter(None, map(read_settings, records)), {})

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Check, before any work is done, that the files can be written."""
        check_output(os.fspath(self.out), overwrite=True)  # before it is looked for
        resuming, logs = resume and (self.is_done() or bool(self.leftovers())), self.logs()
        for path in self.targets:
            check_output(os.fspath(path), overwrite=overwrite or resuming)
        if logs and not (resume or overwrite):
            raise VitError(
                f"{logs[0]} is unfinished and holds {plural(self.rows(), 'row')}; "
                "continue with --resume, or start again with --overwrite"
            )

    def begin(
        self, lock: "FileLock", settings: Mapping[str, Any], *, resume: bool, overwrite: bool
    ) -> dict[str, int] | None:
        """Prepare the files; return the totals if `resume` finds them complete."""
        lock.acquire()
        self.check(resume=resume, overwrite=overwrite)
        done = resume and not overwrite and self.is_done()
        if not done and not (resume and self.logs()):
            remove([*self.leftovers(), self.done])
            return None
        for record in [self.done] if done else self.logs():
            stored = read_settings(record)
            if stored and (different := describe_differences(stored, settings)):
                raise RunError(
                    f"{record} was begun with {'; '.join(different)}: give the same "
                    "again, or start again with --overwrite and without --resume"
                )
        if done:
            remove(self.leftovers())  # of a kill in the last moment
            totals: dict[str, int] = json.loads(self.done.read_text("utf-8").splitlines()[1])
            if totals.pop("bytes") != self.out.stat().st_size:
                raise RunError(
                    f"{self.out} was changed since it was complete: give another --out, "
                    "or start again with --overwrite"
                )
            return totals
        if self.out.exists() and not overwrite:
            raise VitError(
                f"{self.out} exists beside an unfinished one; add --overwrite to "
                "replace it when the latter is complete"
            )
        remove([self.stop])
        return None

    def finish(
        self,
        header: bytes,
        images: int,
        dim: int,
        write: Callable[[BinaryIO, Iterable[bytes]], None] | None = None,
        record: tuple[Mapping[str, Any], Mapping[str, int]] | None = None,
    ) -> None:
        """Write the final files from the logs, the rows last, with the `record` by which a later
        `begin` knows them; `dim` is 0 without embeddings."""
        logs = [self.log_path(rank) for rank in range(self.processes)]
        if self.embeddings is not None:
            write_embeddings(self.embeddings, merge_blocks(logs, images), images, dim)
        with open_atomic(self.out) as file:
            blocks = (block.rows for block in merge_blocks(logs, images))
            if write is None:
                file.write(header)
                file.writelines(blocks)
            else:
                write(file, chain([header], (row for rows in blocks for row in rows.splitlines())))
        if record is not None:
            settings, totals = record
            sized = {**totals, "bytes": self.out.stat().st_size}
            lines = json.dumps({"settings": dict(settings)}), json.dumps(sized), ""
            write_text(self.done, "\n".join(lines))
        remove(self.leftovers())

    def describe_kept(self, resume: str = "continue with --resume") -> str:
        """Describe the rows that are kept; without any, the unfinished files are removed."""
        files, rows = self.leftovers(), self.rows()
        if not files:
            return ""
        if not rows:
            remove(files)
            return "no rows are kept"
        name, verb = self.partial, "is" if rows == 1 else "are"
        parts = f" of {self.processes} processes" if self.processes > 1 else ""
        return f"{plural(rows, 'row')} {verb} kept in {name}{parts}: {resume}"


def partial_files(path: Path, endings: str) -> list[Path]:
    """Files PATH.partial + `endings`, a regular expression, that exist, sorted."""
    pattern = re.compile(re.escape(path.name + PARTIAL) + endings)
    try:
        names = os.listdir(path.parent)
    except OSError:
        return []
    return [path.with_name(name) for name in sorted(names) if pattern.fullmatch(name)]


def remove(paths: Iterable[Path]) -> None:
    path = Path()
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{path} cannot be removed: {error.strerror}") from None


class FileLock:
    """Locks the files of a prediction against other ones (by FILE.partial.lock).

    The main process holds the lock exclusively while it prepares the files; then all processes of
    the prediction share it. The last one deletes the lock files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [Path(f"{path}{PARTIAL}{LOCK}") for path in paths]
        self._handles: dict[Path, BinaryIO] = {}

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        for path, handle in self._handles.items():
            with handle, suppress(OSError):
                last = _locked(handle) and _is_current(handle, path)
                if not POSIX:
                    handle.close()  # Windows deletes no open file
                if last:
                    path.unlink()

    def acquire(self, *, shared: bool = False) -> None:
        """Acquire the lock, exclusive or `shared`, until the end of the `with`."""
        for path in self._paths:
            with explain_write_errors(path):
                handle = self._handles.get(path) or open(path, "ab")  # noqa: SIM115
            self._handles[path] = handle
            if not _locked(handle, shared=shared) or not _is_current(handle, path):
                name = str(path).removesuffix(LOCK)
                raise RunError(f"{name} is being written by another process: wait, or end it")


def _locked(handle: BinaryIO, *, shared: bool = False) -> bool:
    """Try to lock; True also where the file system has no locks."""
    try:
        return lock_file(handle, shared=shared)
    except OSError:
        return True


def _is_current(handle: BinaryIO, path: Path) -> bool:
    """Whether `handle` is the file at `path`, not a deleted one."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def check_embeddings(path: str) -> None:
    if Path(path).suffix.lower() != ".npy":
        raise ConfigError(f"embeddings={path}: name it .npy")


def encode_vectors(vectors: "Iterable[npt.ArrayLike | None]", dim: int) -> bytes:
    """Encode vectors, (dim,) each, as float32; missing ones as NaN."""
    import numpy as np

    missing = np.full(dim, np.nan)
    rows = [missing if vector is None else np.asarray(vector) for vector in vectors]
    return np.stack(rows).astype("<f4").tobytes()


def write_embeddings(path: Path, blocks: "Iterable[Block]", images: int, dim: int) -> None:
    """Write the vectors of all blocks to a .npy of shape (images, dim)."""
    import numpy as np

    with open_atomic(path) as file:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (images, dim)}
        np.lib.format.write_array_header_1_0(file, shape)
        file.writelines(block.vectors for block in blocks)
