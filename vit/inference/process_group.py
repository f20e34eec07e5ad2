"""Several processes that answer for one list: who does what, and all stop where one must.

Their answers go through files, so they exchange words only: over the network of the CPUs (gloo),
whatever computes.
"""

import atexit
import datetime
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from vit.errors import ConfigError, RunError, VitError

T = TypeVar("T")
PATIENCE = datetime.timedelta(days=30)  # one process may be done long before another


class Failed(VitError):
    """What ended one process, and with it all.

    Args:
        message: Of its error.
        code: Its exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


class Team:
    """The processes that a launcher has started, seen from one of them.

    Attributes:
        rank: Number of this process.
        processes: How many there are.
    """

    def __init__(self) -> None:
        with warnings.catch_warnings():  # accelerate tells how many threads it takes
            warnings.simplefilter("ignore")
            state = PartialState(cpu=True, timeout=PATIENCE)
        self.rank, self.processes = int(state.process_index), int(state.num_processes)
        started = int(os.environ["WORLD_SIZE"])
        if self.processes != started:
            raise RunError(
                f"{started} processes were started, and {self.processes} can work together"
            )
        atexit.register(leave)

    def device(self, asked: str | None) -> str | None:
        """Of this process: a GPU each, where there are some and nothing else was asked for.

        Raises:
            ConfigError: One and the same was asked for all.
        """
        if asked is not None and ":" in asked:
            raise ConfigError(
                f"device={asked!r}: {self.processes} processes take a device each; say --device "
                "cuda or cpu"
            )
        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
        if asked not in (None, "cuda") or (asked is None and on_cpu):
            return asked or "cpu"
        if not torch.cuda.is_available():
            return asked
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"

    def on_main(self, act: Callable[[], T]) -> T:
        """Let the first process `act`; all get its answer, or raise its error."""
        found = self.together(act if self.rank == 0 else lambda: None)
        box: list[Any] = [found]
        broadcast_object_list(box)
        answer: T = box[0]
        return answer

    def together(self, act: Callable[[], T]) -> T:
        """What `act` answers here, when it has ended everywhere.

        Raises:
            VitError: It failed in one of the processes; the same error in all.
        """
        try:
            answer = act()
        except VitError as error:
            self._settle((str(error), error.exit_code))
            raise
        except Exception as error:
            self._settle((f"process {self.rank}: {type(error).__name__}: {error}", 1))
            raise
        self._settle(None)
        return answer

    def everyones(self, mine: T) -> list[T]:
        """The same thing of all processes, in their order."""
        try:
            found: list[T] = gather_object([mine])
        except RuntimeError:  # its connection is closed
            raise RunError("another process has ended; what is written is kept") from None
        return found

    def _settle(self, mine: tuple[str, int] | None) -> None:
        """Raise what ended any process; those that only followed have no words for it."""
        ended = [one for one in self.everyones(mine) if one is not None]
        for message, code in sorted(ended, key=lambda one: not one[0]):
            raise Failed(message, code)


def leave() -> None:
    """Part from the others before Python ends: threads of gloo that run on may abort it."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
