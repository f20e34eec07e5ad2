"""SIGINT or SIGTERM stops the work after its current step, a second signal at once."""

import math
import os
import signal
import threading
import time
from types import FrameType

from vit.errors import VitError


class Interrupted(VitError):
    """A signal stopped the run, after a checkpoint was saved.

    Args:
        message: What was saved, and how to resume.
        number: Number of the signal.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Interruption:
    """Context manager that records the first signal in `number` instead of stopping.

    Args:
        echo_seconds: Time in which a second signal is ignored: a launcher forwards its signal to
            processes that the terminal or the scheduler has signalled already.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)  # in order of precedence

    def __init__(self, echo_seconds: float = 0.0) -> None:
        self.number = 0
        self.echo_seconds = echo_seconds
        self._noted = -math.inf
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._noted = number, time.monotonic()
        elif time.monotonic() - self._noted > self.echo_seconds:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
