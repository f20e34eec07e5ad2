"""What a child process is to do: `vit predict` that something ends in the middle."""

import os
import signal
from collections.abc import Callable

from vit.commands.main import main


def ended(words: list[str], block: int, how: str, rank: int = 0) -> int:
    """The exit code of `vit WORDS...`, where something happens in a block of one process.

    Args:
        words: Of the command line.
        block: Before which it happens, counted from 0.
        how: "torn" (SIGKILL while a row is written), "kill" (SIGKILL between rows and journal),
            "term" (SIGTERM) or "fail" (an error).
        rank: Of the process.
    """
    if int(os.environ.get("RANK", "0")) == rank:
        end_at(block, how)
    return main(words)


def end_at(block: int, how: str, patch: Callable[..., None] = setattr) -> None:
    """Let it happen in this process; see `ended`."""
    from vit.commands.predict_output import Keeper
    from vit.errors import RunError
    from vit.output.resumable_output import Growing

    put, write, seen = Keeper.put, Growing.write, []

    def torn(file: Growing, data: bytes) -> None:
        half = len(data) // 2 if how == "torn" else len(data)
        write(file, data[:half])
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(keeper: Keeper, *arguments: object) -> None:
        seen.append(1)
        if len(seen) == block + 1:
            if how in ("torn", "kill"):
                patch(Growing, "write", torn)
            elif how == "fail":
                raise RunError("the disk is full")
            else:
                os.kill(os.getpid(), signal.SIGTERM if how == "term" else signal.SIGINT)
        put(keeper, *arguments)

    patch(Keeper, "put", counted)
