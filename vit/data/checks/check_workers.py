"""Processes that look at images; an image that hangs or kills one costs that image alone."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from vit.data.checks.image_stats import Verdict, look_at
from vit.errors import DataError

SECONDS = 60.0
"""For one image."""
CHUNK = 32
MOST_WORKERS = 16


def default_workers() -> int:
    """One for each core that this process may use, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST_WORKERS)


def look_at_all(
    paths: Sequence[str], *, workers: int | None = None, seconds: float = SECONDS
) -> Iterator[tuple[int, Verdict]]:
    """The verdict on each of `paths` with its place in them, in any order, as they are made.

    Args:
        paths: What to look at.
        workers: Processes; one a core if None.
        seconds: After which an image is given up.
    """
    waiting = deque(range(at, min(at + CHUNK, len(paths))) for at in range(0, len(paths), CHUNK))
    number = min(workers or default_workers(), len(waiting))
    lookers = [Looker(paths, seconds) for _ in range(number)]
    try:
        while waiting or any(looker.asked for looker in lookers):
            for looker in lookers:
                if not looker.asked and waiting:
                    looker.ask(waiting.popleft())
            busy = {looker.pipe: looker for looker in lookers if looker.asked}
            ready = wait(list(busy), timeout=min(seconds / 4, 1.0))
            for pipe, looker in busy.items():
                yield from looker.answers(pipe in ready)
    finally:
        for looker in lookers:
            looker.stop()


def serve(pipe: Connection) -> None:
    """The work of one process: lists of paths come, a verdict on each goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        pipe.send(None)  # it has come to life
        while True:
            for path in pipe.recv():
                pipe.send(look_at(path))


class Looker:
    """One process, and another one after it where it fails.

    Args:
        paths: All images.
        seconds: After which an image is given up.
    """

    work = staticmethod(serve)

    def __init__(self, paths: Sequence[str], seconds: float) -> None:
        self.paths, self.seconds = paths, seconds
        self.asked: deque[int] = deque()
        """Places of images that it has not answered for; it is at work on the first."""
        self.since = 0.0
        self._start()

    def ask(self, places: Sequence[int]) -> None:
        """Have it look at these, in this order; it must have nothing else to do."""
        self.asked.extend(places)
        self.since = time.monotonic()
        with contextlib.suppress(OSError):  # it has ended: seen by `answers`
            self.pipe.send([self.paths[place] for place in places])

    def answers(self, ready: bool) -> Iterator[tuple[int, Verdict]]:
        """What it has found by now.

        Args:
            ready: Whether its pipe has something, or has been closed.
        """
        try:
            while self.asked and (ready or self.pipe.poll()):
                verdict = self.pipe.recv()
                ready, self.since = False, time.monotonic()
                if verdict is None:
                    self.works = True
                    continue
                yield self.asked.popleft(), verdict
        except (EOFError, OSError):
            if not self.works:
                raise DataError(
                    "processes that read images cannot be started; a script must call this under "
                    "if __name__ == '__main__'"
                ) from None
            yield self.asked.popleft(), "the decoder crashes on it"
            self._again()
        if self.works and self.asked and time.monotonic() - self.since > self.seconds:
            yield self.asked.popleft(), f"not decoded within {self.seconds:g} seconds"
            self._again()

    def stop(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.kill()
        self.process.join()

    def _again(self) -> None:
        rest = list(self.asked)
        self.asked.clear()
        self.stop()
        self._start()
        if rest:
            self.ask(rest)

    def _start(self) -> None:
        # spawned: a fork of a process with threads of torch may hang
        self.works = False
        context: Any = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.pipe: Connection = ours
        self.process = context.Process(target=self.work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
