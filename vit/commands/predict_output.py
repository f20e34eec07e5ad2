"""Output files of `vit predict`: unfinished files of each process, and the finished ones."""

import argparse
import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from vit.commands.command_output import check_output, resolve_link
from vit.errors import RunError, VitError, WeightsError, printable
from vit.output import embeddings_file
from vit.output.prediction_results import Prediction, column_width, csv_text, pad
from vit.output.resumable_output import (
    STOP,
    FileLock,
    Journal,
    check_settings_match,
    count_partial_rows,
    journal_blocks,
    journal_path,
    last_valid_entry,
    merge_parts,
    partial_files,
    partial_path,
    refuse_partial_files,
    remove,
)
from vit.text import plural

Row = tuple[bool, bool]
"""Whether the row belongs to its image, and whether it is an error."""


def count_failed_rows(path: Path, style: str, images: Sequence[str]) -> int:
    """Count the error rows of a finished file.

    Args:
        path: The file.
        style: Its format.
        images: The images its rows must belong to, in this order.

    Raises:
        RunError: It has other images or another format, or cannot be read.
    """
    name = printable(path)
    other = "give another --out, or start again with --overwrite"
    try:
        with open(path, "rb") as file:
            rows = sum(1 for _ in file) - (style != "jsonl")
        if rows != len(images):
            raise RunError(
                f"{name} is complete with {plural(rows, 'row')}, and the inputs are "
                f"{plural(len(images), 'image')}: {other}"
            )
        failed = 0
        with open(path, encoding="utf-8", newline="\n") as text:
            for number, (same, error) in enumerate(READERS[style](text, images), 1):
                if not same:
                    raise RunError(f"{name}, row {number} belongs to another image: {other}")
                failed += error
    except OSError as error:
        raise RunError(f"{name} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, csv.Error):
        raise RunError(f"{name} is complete, but not in the format {style}: {other}") from None
    return failed


def _json(file: TextIO, images: Sequence[str]) -> Iterator[Row]:
    for line, image in zip(file, images, strict=True):
        record = json.loads(line)
        yield record["image"] == image, "error" in record


def _csv(file: TextIO, images: Sequence[str]) -> Iterator[Row]:
    rows = csv.reader(file)
    next(rows)
    for row, image in zip(rows, images, strict=True):
        yield row[0] == csv_text(image), bool(row[-1])


def _table(file: TextIO, images: Sequence[str]) -> Iterator[Row]:
    width = column_width("image", *images)
    next(file)
    for line, image in zip(file, images, strict=True):
        start = pad(printable(image), width) + "  "
        yield line.startswith(start), line.startswith("error: ", len(start))


READERS: dict[str, Callable[[TextIO, Sequence[str]], Iterator[Row]]] = {
    "jsonl": _json,
    "csv": _csv,
    "table": _table,
}


ROWS, VECTORS = "rows", "embeddings"


class Interrupted(VitError):
    """The prediction stopped early.

    Args:
        message: Why, and what is kept.
        code: The exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass(frozen=True)
class OutputFiles:
    """Paths of one prediction's outputs.

    Args:
        out: File of rows.
        embeddings: File of embeddings, or None.
        processes: Number of processes, each of which writes partial files of its own.
    """

    out: Path
    embeddings: Path | None = None
    processes: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace, processes: int = 1) -> "OutputFiles":
        """From the command line; symbolic links are followed."""
        vectors = None if args.embeddings is None else resolve_link(args.embeddings)
        return cls(resolve_link(args.out), vectors, processes)

    @property
    def targets(self) -> dict[str, Path]:
        """The finished files."""
        vectors = {} if self.embeddings is None else {VECTORS: self.embeddings}
        return {ROWS: self.out, **vectors}

    def partial_files_of(self, rank: int) -> dict[str, Path]:
        """The unfinished files of one process."""
        return {
            name: partial_path(path, rank, self.processes) for name, path in self.targets.items()
        }

    def journal(self, rank: int) -> Path:
        """The journal of one process."""
        return journal_path(partial_path(self.out, rank, self.processes))

    @property
    def stop(self) -> Path:
        """A process that fails creates this file, and the others stop too."""
        whole = partial_path(self.out)
        return whole.with_name(whole.name + STOP)

    @property
    def unfinished_files(self) -> list[Path]:
        """All unfinished files that exist."""
        return [file for path in self.targets.values() for file in partial_files(path)]

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Check, before any work is done, that the outputs can be written.

        Raises:
            VitError: As `check_output`; or there are unfinished files, and neither `resume` nor
                `overwrite` is set.
        """
        resuming = resume and bool(partial_files(self.out))
        check_output(os.fspath(self.out), overwrite=overwrite or resume)
        if resuming and self.out.exists() and has_partial_rows(self.out) and not overwrite:
            raise VitError(
                f"{printable(self.out)} exists beside an unfinished one; add --overwrite to "
                "replace it when the latter is complete"
            )
        if self.embeddings is not None:
            done = resume and (resuming or self.out.exists())
            check_output(os.fspath(self.embeddings), overwrite=overwrite or done)
        if not (resume or overwrite):
            for path in self.targets.values():
                refuse_partial_files(path)

    def complete(self, images: Sequence[str], style: str) -> int | None:
        """Return the failures of finished files; None if the outputs are not finished.

        Raises:
            RunError: Finished files belong to something else.
        """
        with FileLock([*self.targets.values()]) as lock:
            lock.acquire()
            if not self.out.exists() or has_partial_rows(self.out):
                return None
            failed = count_failed_rows(self.out, style, images)
            if self.embeddings is not None and not self.embeddings.exists():
                raise RunError(
                    f"{printable(self.out)} is complete and {printable(self.embeddings)} is not "
                    "there: start again with --overwrite"
                )
            remove(self.unfinished_files)  # a kill after the last rename may leave a journal
        return failed

    def begin(
        self, lock: FileLock, settings: Mapping[str, Any], *, resume: bool, overwrite: bool
    ) -> bool:
        """Prepare the unfinished files; return whether there is something to resume.

        Raises:
            VitError: They have other settings, or another process writes them.
        """
        lock.acquire()
        resume = resume and bool(partial_files(self.out))
        self.check(resume=resume, overwrite=overwrite)
        if not resume:
            remove(self.unfinished_files)
            return False
        check_settings_match(self.out, settings)
        remove([self.stop])
        self._undo_first_rename(settings)
        return True

    def _undo_first_rename(self, settings: Mapping[str, Any]) -> None:
        """Undo the first rename of a `finish` that was killed before the second."""
        mine, journal = self.partial_files_of(0), self.journal(0)
        vectors = mine.get(VECTORS)
        if self.embeddings is None or vectors is None or vectors.exists() or not journal.exists():
            return
        if self.embeddings.is_file() and mine[ROWS].exists():
            entry, _ = last_valid_entry(journal, mine | {VECTORS: self.embeddings})
            if entry.rows == settings["images"]:
                self.embeddings.replace(vectors)

    def finish(self, images: Sequence[str], dim: int) -> None:
        """Merge and rename the complete unfinished files; rows are renamed last.

        Raises:
            RunError: The disk is full; the unfinished files stay.
        """
        ranks = range(self.processes)
        journals = [self.journal(rank) for rank in ranks]
        whole = {name: partial_path(path) for name, path in self.targets.items()}
        if self.processes > 1:
            for name, path in whole.items():
                parts = [self.partial_files_of(rank)[name] for rank in ranks]
                merge_parts(parts, journals, name, path)
        if self.embeddings is not None and self.embeddings.suffix.lower() == ".parquet":
            errors = iterate_failures(journals)
            embeddings_file.write_parquet(whole[VECTORS], self.embeddings, dim, images, errors)
        elif self.embeddings is not None:
            whole[VECTORS].replace(self.embeddings)
        whole[ROWS].replace(self.out)
        remove(self.unfinished_files)

    def describe_kept(self) -> str:
        """Describe the rows that are kept; without any, the unfinished files are removed."""
        files, rows = self.unfinished_files, count_partial_rows(self.out)
        if not files:
            return ""
        if not rows:
            remove(files)
            return "no block was complete and nothing is kept"
        name = printable(partial_path(self.out))
        return f"{plural(rows, 'row')} {'is' if rows == 1 else 'are'} kept in {name}" + (
            f" of {self.processes} processes" if self.processes > 1 else ""
        )


class RowWriter:
    """Writes blocks of predictions into the unfinished files of one process.

    Args:
        files: The outputs.
        rank: Rank of the process.
        settings: As for Journal.
        resume: As for Journal.
        layout: Header and row formatter, from vit.output.prediction_results.FORMATS.
        images: Number of images of the whole list.
        dim: Width of an embedding; 0 without embeddings.
    """

    def __init__(
        self,
        files: OutputFiles,
        rank: int,
        settings: Mapping[str, Any],
        *,
        resume: bool,
        layout: tuple[str, Callable[[Prediction], str]],
        images: int,
        dim: int,
    ) -> None:
        header, self.format_row = layout
        self.dim = dim
        self.journal = Journal(
            files.journal(rank), files.partial_files_of(rank), settings, resume=resume
        )
        if not self.journal.entry.ends:
            heads = {ROWS: header.encode()}
            if files.embeddings is not None:
                heads[VECTORS] = embeddings_file.npy_header(files.embeddings, images, dim)
            self.journal.write(0, heads)

    @property
    def rows(self) -> int:
        """Images of this process that are predicted."""
        return self.journal.entry.rows

    @property
    def totals(self) -> dict[str, int]:
        """Their totals."""
        return self.journal.entry.totals

    def write_block(self, predictions: Sequence[Prediction], totals: dict[str, int]) -> None:
        """Append one block.

        Raises:
            RunError: The disk is full.
            WeightsError: An embedding is missing or of another width.
        """
        pieces = {ROWS: "".join(map(self.format_row, predictions)).encode()}
        if self.dim:
            for one in predictions:
                if one.error is None and one.embedding is None:
                    raise WeightsError(f"{printable(one.image)}: the network gave no embedding")
            pieces[VECTORS] = embeddings_file.encode_rows(
                (one.embedding for one in predictions), self.dim
            )
        errors = [(at, one.error) for at, one in enumerate(predictions) if one.error is not None]
        self.journal.write(self.rows + len(predictions), pieces, totals=totals, errors=errors)


def iterate_failures(journals: Sequence[Path]) -> Iterator[tuple[int, str]]:
    """Yield (index of the image, reason) of all failures, in order."""
    first = 0
    for _, before, after in journal_blocks(journals):
        yield from ((first + place, reason) for place, reason in after.errors)
        first += after.rows - before.rows


def has_partial_rows(path: Path) -> bool:
    """Whether unfinished rows of `path` exist."""
    return any(not file.name.endswith((".journal", ".tmp", STOP)) for file in partial_files(path))
