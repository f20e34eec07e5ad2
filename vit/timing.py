"""Times pieces of work: training steps, forward passes, loading of images."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds that `work` takes, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def time_calls(
    work: Callable[[], object], *, repeats: int, warmup: int = 0, seconds: float = math.inf
) -> list[float]:
    """Seconds of each call of `work`, which has to wait for its device itself.

    Args:
        warmup: Calls before those, which import, choose kernels and allocate memory.
        seconds: No further call is timed after as many.
    """
    for _ in range(warmup):
        work()
    taken = [timed(work)[0]]
    while len(taken) < repeats and sum(taken) < seconds:
        taken.append(timed(work)[0])
    return taken


class Stopwatch:
    """Seconds between its laps.

    Args:
        wait: Waits for a device, before the clock is read.
        agree: Makes seconds the same on all processes, such as those of the slowest.
    """

    def __init__(
        self,
        wait: Callable[[], object] = lambda: None,
        agree: Callable[[float], float] = float,
    ) -> None:
        self.wait, self.agree = wait, agree
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, or since the start."""
        self.wait()
        now = time.perf_counter()
        took, self.last = now - self.last, now
        return self.agree(took)
