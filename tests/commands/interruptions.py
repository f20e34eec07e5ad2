"""What a child process is to do: `vit predict` that something ends in the middle."""

import os
import signal
from collections.abc import Callable

from vit.commands.main import main


def run_interrupted(words: list[str], block: int, how: str, rank: int = 0) -> int:
    """The exit code of `vit WORDS...`, where something happens in a block of one process.

    Args:
        words: Of the command line.
        block: Before which it happens, counted from 0.
        how: "torn" (SIGKILL while a row is written), "kill" (SIGKILL between rows and journal),
            "term" (SIGTERM) or "fail" (an error).
        rank: Of the process.
    """
    if int(os.environ.get("RANK", "0")) == rank:
        interrupt_at(block, how)
    return main(words)


def interrupt_at(block: int, how: str, patch: Callable[..., None] = setattr) -> None:
    """Let it happen in this process; see `run_interrupted`."""
    from vit.commands.predict_output import RowWriter
    from vit.errors import RunError
    from vit.output.resumable_output import AppendOnlyFile

    put, write, seen = RowWriter.write_block, AppendOnlyFile.write, []

    def torn(file: AppendOnlyFile, data: bytes) -> None:
        half = len(data) // 2 if how == "torn" else len(data)
        write(file, data[:half])
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(keeper: RowWriter, *arguments: object) -> None:
        seen.append(1)
        if len(seen) == block + 1:
            if how in ("torn", "kill"):
                patch(AppendOnlyFile, "write", torn)
            elif how == "fail":
                raise RunError("the disk is full")
            else:
                os.kill(os.getpid(), signal.SIGTERM if how == "term" else signal.SIGINT)
        put(keeper, *arguments)

    patch(RowWriter, "write_block", counted)
