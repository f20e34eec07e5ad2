"""The unfinished files of one prediction: their names, whose they are, and the file they become.

One process writes FILE.partial; of several each writes FILE.partial.1-of-2, with every second block
of the list, and the blocks are laid together at the end.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from vit.data.sources.folders import count
from vit.errors import RunError, VitError, printable
from vit.runtime.journal import (
    JOURNAL,
    Mark,
    differences,
    marks,
    not_written,
    read_first,
)

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
    held = count(rows_held(path), "row")
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
