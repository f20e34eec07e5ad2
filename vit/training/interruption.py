"""SIGINT and SIGTERM ask a training to stop after its step; a second one stops it at once."""

import signal
import threading
from types import FrameType

from vit.errors import VitError


class Interrupted(VitError):
    """A signal stopped the run; a checkpoint was saved.

    Args:
        message: What was saved, and how to go on.
        number: The signal.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Interruption:
    """Inside the `with`, the first signal is remembered in `number` instead of acted on."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
