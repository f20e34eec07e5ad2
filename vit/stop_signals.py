"""SIGINT or SIGTERM stops the work after its current step, a second signal at once."""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

from vit.errors import VitError

PATIENCE = 1.0
"""Seconds of work after the first signal until it is announced."""


class Interrupted(VitError):
    """A signal stopped the run, after a checkpoint was saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Interruption:
    """Context manager that records the first signal in `number` instead of stopping.

    A second signal ends the process at once, also while a long operation of a library runs: Python
    calls no handler before that returns, so a thread waits for signals too.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)  # in order of precedence

    def __init__(
        self, echo_seconds: float = 0.0, announce: Callable[[], object] = lambda: None
    ) -> None:
        self.number = 0
        self.echo_seconds, self.announce = echo_seconds, announce
        self._undo = ExitStack()

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            self._undo.enter_context(theirs)
            self._undo.callback(theirs.shutdown, socket.SHUT_RDWR)  # which ends the thread
            before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            self._undo.callback(signal.set_wakeup_fd, before)
            for number in self.SIGNALS:
                self._undo.callback(signal.signal, number, signal.signal(number, self._note))
            threading.Thread(target=self._watch, args=(ours,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.number = self.number or number

    def _watch(self, received: socket.socket) -> None:
        """Announce the first signal, and end the process at a second one."""
        with received:
            numbers = (byte[0] for byte in iter(lambda: received.recv(1), b""))
            stops = filter(self.SIGNALS.__contains__, numbers)
            if not next(stops, 0):
                return
            began = time.monotonic()
            if not select.select([received], [], [], PATIENCE)[0]:
                self.announce()
            for number in stops:
                if time.monotonic() - began > self.echo_seconds:
                    os._exit(128 + number)


if hasattr(os, "register_at_fork"):  # a forked process would report its signals to its parent
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
