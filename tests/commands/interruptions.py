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
        how: "torn" (SIGKILL while the block is written), "kill" (SIGKILL before it), "term"
            (SIGTERM), "int" (SIGINT) or "fail" (an error).
        rank: Of the process.
    """
    if int(os.environ.get("RANK", "0")) == rank:
        interrupt_at(block, how)
    return main(words)


def interrupt_at(block: int, how: str, patch: Callable[..., None] = setattr) -> None:
    """Let it happen in this process; see `run_interrupted`."""
    from vit.errors import RunError
    from vit.output.resumable_output import Block, BlockLog

    append, calls = BlockLog.append, []

    def append_or_stop(log: BlockLog, one: Block) -> None:
        calls.append(one)
        if len(calls) == block + 1:
            if how == "torn":
                record = one.encode()
                with log.path.open("ab") as file:
                    file.write(record[: len(record) // 2])
            if how in ("torn", "kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "fail":
                raise RunError("the disk is full")
            os.kill(os.getpid(), signal.SIGTERM if how == "term" else signal.SIGINT)
        append(log, one)

    patch(BlockLog, "append", append_or_stop)
