"""Output of commands: results as JSON, and notes and progress on standard error."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from vit.output.output_file import open_output, standard_output
from vit.text import format_clock

SECONDS = 30.0


def write_json(path: str | None, content: Any) -> None:
    """Write a JSON file as `open_output` does; nothing without a path."""
    if path is None:
        return
    from vit.output.prediction_results import to_json

    with open_output(path) as out:
        out.write(to_json(content, indent=2) + "\n")


def print_result(
    text: str, path: str | None, content: Any, *, write: Callable[[], None] = lambda: None
) -> None:
    """Print a result, write it as JSON to `path`, and `write` what else it has.

    JSON for `-`, standard output, replaces the text. If one fails, such as where nobody reads what
    is printed, the others are still there.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(write)
        if path == "-":
            from vit.output.prediction_results import to_json

            text = to_json(content, indent=2)
        else:
            stack.callback(write_json, path, content)
        print(text, file=standard_output(), flush=True)


def notify(*words: Any) -> None:
    """One line on standard error."""
    print(*words, file=sys.stderr)


def progress_bar(total: int, *, unit: str, results_on_terminal: bool, done: int = 0) -> Any:
    """A bar with rate and remaining time on a terminal; hidden elsewhere, or if rows of results
    are printed on the same terminal."""
    from tqdm import tqdm

    quiet = results_on_terminal or not sys.stderr.isatty()
    # with a delay nothing is shown before the first step, so notes have their lines to themselves
    return tqdm(
        total=total or None,
        initial=done,
        unit=f" {unit}",
        disable=quiet,
        dynamic_ncols=True,
        delay=0.1,
    )


class Progress:
    """Progress of long commands: a bar on a terminal, elsewhere a line every 30 seconds.

    Use it in a `with`, and call it with the images done, their total (0 if it is unknown), and what
    is done with them.
    """

    def __init__(self, command: str, *, share: str = "", results_on_terminal: bool = False) -> None:
        self.command, self.share, self.hidden = command, share, results_on_terminal
        self.stage: str | None = None
        self.bar: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, done: int, total: int, stage: str = "") -> None:
        """So many images are done; the first call of a stage starts its time."""
        now = time.monotonic()
        if self.bar is None or stage != self.stage:
            self.__exit__()
            self.stage, self.start, self.last_line = stage, now, now
            self.start_done = self.done = done
            self.bar = progress_bar(total, unit="image", results_on_terminal=self.hidden, done=done)
        self.bar.update(done - self.done)
        self.done = done
        if done == total:
            self.bar.close()  # lines that follow do not share its line
        elif done > self.start_done and now - self.last_line >= SECONDS:
            self._print_line(total, now)

    def _print_line(self, total: int, now: float) -> None:
        if self.hidden or sys.stderr.isatty():
            return
        self.last_line = now
        rate = (self.done - self.start_done) / (now - self.start)
        of = f" of {total:,}" if total else ""
        left = f", {format_clock((total - self.done) / rate)} left" if total else ""
        stage = f" {self.stage}" if self.stage else ""
        notify(
            f"{self.command}: {self.done:,}{of} images{stage}{self.share}, "
            f"{rate:,.4g} images/s{left}"
        )
