"""Answers that survive a kill: unfinished files, what they hold, and what they become.

Finished rows, read again: are they of these images, and how many have an error?
"""

import argparse
import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from vit.commands.command_output import check_output, resolved
from vit.errors import RunError, VitError, WeightsError, printable
from vit.output import embeddings_file
from vit.output.prediction_results import Prediction, column_width, csv_text, pad
from vit.output.resumable_output import (
    STOP,
    Claim,
    Journal,
    blocks,
    check_same,
    journal_of,
    last_whole,
    lay_together,
    leftovers,
    part,
    refuse_leftovers,
    remove,
    rows_held,
)
from vit.text import plural

Row = tuple[bool, bool]
"""Whether it is of its image, and whether it is an error."""


def failed_rows(path: Path, style: str, images: Sequence[str]) -> int:
    """How many of `images` have an error in a finished file.

    Args:
        path: Of the file.
        style: Its format.
        images: Whose names its rows must have, in this order.

    Raises:
        RunError: It is of other images or of another format, or cannot be read.
    """
    name = printable(path)
    other = "give another --out, or begin again with --overwrite"
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
                    raise RunError(f"{name}, row {number} is of another image: {other}")
                failed += error
    except OSError as error:
        raise RunError(f"{name} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, csv.Error):
        raise RunError(f"{name} is complete, and not as {style}: {other}") from None
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


class Unfinished(VitError):
    """The work ended before its end.

    Args:
        message: Why, and what is kept.
        code: The exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass(frozen=True)
class Files:
    """Where one prediction writes.

    Args:
        out: The rows.
        embeddings: The vectors, or None.
        processes: That write parts of both.
    """

    out: Path
    embeddings: Path | None = None
    processes: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace, processes: int = 1) -> "Files":
        """Those of a command line; a link stays, and what it leads to is written."""
        vectors = None if args.embeddings is None else resolved(args.embeddings)
        return cls(resolved(args.out), vectors, processes)

    @property
    def ends(self) -> dict[str, Path]:
        """What the user gets."""
        vectors = {} if self.embeddings is None else {VECTORS: self.embeddings}
        return {ROWS: self.out, **vectors}

    def unfinished(self, rank: int) -> dict[str, Path]:
        """What one process writes."""
        return {name: part(path, rank, self.processes) for name, path in self.ends.items()}

    def journal(self, rank: int) -> Path:
        """How far one process is."""
        return journal_of(part(self.out, rank, self.processes))

    @property
    def stop(self) -> Path:
        """A process that gives up makes this file, and the others give up with it."""
        whole = part(self.out)
        return whole.with_name(whole.name + STOP)

    @property
    def left(self) -> list[Path]:
        """All that is unfinished."""
        return [left for path in self.ends.values() for left in leftovers(path)]

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse, before any work is done, what cannot be written or begun.

        Raises:
            VitError: As `check_output`; or something unfinished is there and nobody said what to
                do with it.
        """
        going_on = resume and bool(leftovers(self.out))
        check_output(os.fspath(self.out), overwrite=overwrite or resume)
        if going_on and self.out.exists() and part_is_there(self.out) and not overwrite:
            raise VitError(
                f"{printable(self.out)} exists beside an unfinished one; add --overwrite to "
                "replace it when that is finished"
            )
        if self.embeddings is not None:
            done = resume and (going_on or self.out.exists())
            check_output(os.fspath(self.embeddings), overwrite=overwrite or done)
        if not (resume or overwrite):
            for path in self.ends.values():
                refuse_leftovers(path)

    def complete(self, images: Sequence[str], style: str) -> int | None:
        """Failures in finished files, of which there is nothing to go on with; None in others.

        Raises:
            RunError: There are finished files, and they are of something else.
        """
        with Claim([*self.ends.values()]) as claim:
            claim.take()
            if not self.out.exists() or part_is_there(self.out):
                return None
            failed = failed_rows(self.out, style, images)
            if self.embeddings is not None and not self.embeddings.exists():
                raise RunError(
                    f"{printable(self.out)} is complete and {printable(self.embeddings)} is not "
                    "there: begin again with --overwrite"
                )
            remove(self.left)  # a kill after the last rename may leave a journal
        return failed

    def begin(
        self, claim: Claim, asked: Mapping[str, Any], *, resume: bool, overwrite: bool
    ) -> bool:
        """Make way, or check that what is there is of the same work; whether there is something.

        Raises:
            VitError: It is not, another process is at work on it, or was since `check`.
        """
        claim.take()
        resume = resume and bool(leftovers(self.out))
        self.check(resume=resume, overwrite=overwrite)
        if not resume:
            remove(self.left)
            return False
        check_same(self.out, asked)
        remove([self.stop])
        self._take_back(asked)
        return True

    def _take_back(self, asked: Mapping[str, Any]) -> None:
        """Undo the first rename of `finish`, after which a kill came."""
        mine, journal = self.unfinished(0), self.journal(0)
        vectors = mine.get(VECTORS)
        if self.embeddings is None or vectors is None or vectors.exists() or not journal.exists():
            return
        if self.embeddings.is_file() and mine[ROWS].exists():
            mark, _ = last_whole(journal, mine | {VECTORS: self.embeddings})
            if mark.rows == asked["images"]:
                self.embeddings.replace(vectors)

    def finish(self, images: Sequence[str], dim: int) -> None:
        """Turn what is unfinished and whole into what the user gets; the rows come last.

        Raises:
            RunError: The disk is full. What is unfinished stays.
        """
        ranks = range(self.processes)
        journals = [self.journal(rank) for rank in ranks]
        whole = {name: part(path) for name, path in self.ends.items()}
        if self.processes > 1:
            for name, path in whole.items():
                parts = [self.unfinished(rank)[name] for rank in ranks]
                lay_together(parts, journals, name, path)
        if self.embeddings is not None and self.embeddings.suffix.lower() == ".parquet":
            errors = failures(journals)
            embeddings_file.write_parquet(whole[VECTORS], self.embeddings, dim, images, errors)
        elif self.embeddings is not None:
            whole[VECTORS].replace(self.embeddings)
        whole[ROWS].replace(self.out)
        remove(self.left)

    def kept(self) -> str:
        """What an end before the end leaves, in words; nothing is left where no row is whole."""
        left, rows = self.left, rows_held(self.out)
        if not left:
            return ""
        if not rows:
            remove(left)
            return "no row was whole and nothing is kept"
        name = printable(part(self.out))
        return f"{plural(rows, 'row')} {'is' if rows == 1 else 'are'} kept in {name}" + (
            f" of {self.processes} processes" if self.processes > 1 else ""
        )


class Keeper:
    """Writes blocks of answers into the unfinished files of one process.

    Args:
        files: Where.
        rank: Of the process.
        asked: As for Journal.
        resume: As for Journal.
        layout: Header and writer of a row, from vit.output.prediction_results.FORMATS.
        images: Of the whole list.
        dim: Numbers of a vector.
    """

    def __init__(
        self,
        files: Files,
        rank: int,
        asked: Mapping[str, Any],
        *,
        resume: bool,
        layout: tuple[str, Callable[[Prediction], str]],
        images: int,
        dim: int,
    ) -> None:
        header, self.line = layout
        self.dim = dim
        self.journal = Journal(files.journal(rank), files.unfinished(rank), asked, resume=resume)
        if not self.journal.mark.ends:
            heads = {ROWS: header.encode()}
            if files.embeddings is not None:
                heads[VECTORS] = embeddings_file.head(files.embeddings, images, dim)
            self.journal.write(0, heads)

    @property
    def rows(self) -> int:
        """Images of this process with an answer."""
        return self.journal.mark.rows

    @property
    def tally(self) -> dict[str, int]:
        """Totals of them."""
        return self.journal.mark.tally

    def put(self, predictions: Sequence[Prediction], tally: dict[str, int]) -> None:
        """Write one block.

        Raises:
            RunError: The disk is full.
            WeightsError: A vector is missing, or of another width.
        """
        pieces = {ROWS: "".join(map(self.line, predictions)).encode()}
        if self.dim:
            for one in predictions:
                if one.error is None and one.embedding is None:
                    raise WeightsError(f"{printable(one.image)}: the network gave no embedding")
            pieces[VECTORS] = embeddings_file.rows((one.embedding for one in predictions), self.dim)
        errors = [(at, one.error) for at, one in enumerate(predictions) if one.error is not None]
        self.journal.write(self.rows + len(predictions), pieces, tally=tally, errors=errors)


def failures(journals: Sequence[Path]) -> Iterator[tuple[int, str]]:
    """(number of the image, reason) of all that failed, in order."""
    first = 0
    for _, before, after in blocks(journals):
        yield from ((first + place, reason) for place, reason in after.errors)
        first += after.rows - before.rows


def part_is_there(path: Path) -> bool:
    """Whether rows of an unfinished work are beside `path`."""
    return any(not left.name.endswith((".journal", ".tmp", STOP)) for left in leftovers(path))
