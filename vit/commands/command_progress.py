"""Progress of long commands: a bar on a terminal, elsewhere a line every 30 seconds."""

import sys
import time
from types import TracebackType

from vit.commands.command_output import notify, progress_bar
from vit.text import format_clock

SECONDS = 30.0
LONG = 100  # more images than these get a line at the end


class Progress:
    """Counts processed images; use it in a `with`.

    Args:
        total: Images in all.
        done: Images done by an earlier, interrupted run.
        results_on_terminal: Whether rows are printed on the same terminal, so that a bar is hidden.
        share: Suffix for a part of the images.
        quiet: Print nothing: another process does.
        command: Name of the command.
    """

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        results_on_terminal: bool = False,
        share: str = "",
        quiet: bool = False,
        command: str = "vit predict",
    ) -> None:
        self.share, self.command = share, command
        self.total, self.done, self.before = total, done, done
        self.lines = not (quiet or results_on_terminal or sys.stderr.isatty())
        self.began = self.said = time.monotonic()
        hidden = quiet or results_on_terminal
        self.bar = progress_bar(total, unit="image", results_on_terminal=hidden, done=done)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.close()

    def update(self, count: int) -> None:
        """So many more are done."""
        self.done += count
        self.bar.update(count)
        now = time.monotonic()
        if self.lines and now - self.said >= SECONDS and self.done < self.total:
            self.said = now
            rate = (self.done - self.before) / (now - self.began)
            left = format_clock((self.total - self.done) / rate) if rate else "?"
            words = f"{self.done:,} of {self.total:,} images{self.share}"
            notify(f"{self.command}: {words}, {rate:,.4g} images/s, {left} left")

    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began


def summary(total: int, done: int, seconds: float, failed: int) -> str | None:
    """One line on a long work: `done` of `total` images in so many seconds; None for a short."""
    if total <= LONG:
        return None
    rate = f"{done / seconds:,.4g}" if seconds > 0 and done else "0"
    now = f"{total:,} images" if done == total else f"{done:,} of {total:,} images"
    return f"{now} in {format_clock(seconds)}, {rate} images/s, {failed:,} failed"
