"""Files written while training goes on, one after the other, in the order they were asked for.

What is written is bytes already: a computation of torch in this thread would leave OpenMP with a
second team of threads, and with more threads than cores it makes every later step wait differently:
25 % slower ones were measured, long after the file was written.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """One thread that writes; at most one piece of work waits for it.

    So a run holds one copy of its weights for the disk, and a disk that is slower than the training
    holds it up instead of filling the memory.
    """

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self.pending: Future[None] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Let `work` be done once what was asked for earlier is.

        Raises:
            VitError: The earlier work failed.
        """
        self.wait()
        self.pending = self.thread.submit(work)

    def check(self) -> None:
        """Raise what finished work failed with; waits for nothing."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when everything is on the disk.

        Raises:
            VitError: It could not be written.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Let the work in hand end; what it fails with is not said, an error is on its way."""
        self.thread.shutdown(wait=True)
