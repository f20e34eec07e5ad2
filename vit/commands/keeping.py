"""Answers that survive a kill: unfinished files, what they hold, and what they become."""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.commands.finished import failed_rows
from vit.commands.output import check_output, resolved
from vit.data.sources.folders import count
from vit.errors import RunError, VitError, WeightsError, printable
from vit.runtime import embeddings
from vit.runtime.journal import Journal, last_whole
from vit.runtime.parts import (
    STOP,
    Claim,
    blocks,
    check_same,
    journal_of,
    lay_together,
    leftovers,
    part,
    refuse_leftovers,
    remove,
    rows_held,
)
from vit.runtime.results import Prediction

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
            if mark.rows == asked["pictures"]:
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
            embeddings.write_parquet(whole[VECTORS], self.embeddings, dim, images, errors)
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
        return f"{count(rows, 'row')} {'is' if rows == 1 else 'are'} kept in {name}" + (
            f" of {self.processes} processes" if self.processes > 1 else ""
        )


class Keeper:
    """Writes blocks of answers into the unfinished files of one process.

    Args:
        files: Where.
        rank: Of the process.
        asked: As for Journal.
        resume: As for Journal.
        layout: Header and writer of a row, from vit.runtime.results.FORMATS.
        pictures: Of the whole list.
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
        pictures: int,
        dim: int,
    ) -> None:
        header, self.line = layout
        self.dim = dim
        self.journal = Journal(files.journal(rank), files.unfinished(rank), asked, resume=resume)
        if not self.journal.mark.ends:
            heads = {ROWS: header.encode()}
            if files.embeddings is not None:
                heads[VECTORS] = embeddings.head(files.embeddings, pictures, dim)
            self.journal.write(0, heads)

    @property
    def rows(self) -> int:
        """Pictures of this process with an answer."""
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
            pieces[VECTORS] = embeddings.rows((one.embedding for one in predictions), self.dim)
        errors = [(at, one.error) for at, one in enumerate(predictions) if one.error is not None]
        self.journal.write(self.rows + len(predictions), pieces, tally=tally, errors=errors)


def failures(journals: Sequence[Path]) -> Iterator[tuple[int, str]]:
    """(number of the picture, reason) of all that failed, in order."""
    first = 0
    for _, before, after in blocks(journals):
        yield from ((first + place, reason) for place, reason in after.errors)
        first += after.rows - before.rows


def part_is_there(path: Path) -> bool:
    """Whether rows of an unfinished work are beside `path`."""
    return any(not left.name.endswith((".journal", ".tmp", STOP)) for left in leftovers(path))
