"""Progress of a training on standard error: log lines, a bar, the estimated time remaining."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from statistics import fmean

from accelerate import Accelerator
from tqdm import tqdm

from vit.config import Config
from vit.text import Notify, format_duration
from vit.timing import Stopwatch
from vit.training.lr_schedule import image_side, total_steps

# Time between two progress lines without a terminal.
PLAIN_SECONDS = 30.0
# Steps that are not timed: they start loaders, compile and warm up.
WARM_UP = 2
# Steps or seconds that are timed before the estimate.
TIMED_STEPS = 10
TIMED_SECONDS = 10.0
# Shortest remaining time that is reported, in seconds.
MIN_REMAINING = 10.0
# Cost of an image in validation relative to training: the forward pass only.
VALIDATION_SHARE = 1 / 3


_is_silent = False


@contextlib.contextmanager
def silent_log() -> Iterator[None]:
    """Inside, log no line."""
    global _is_silent
    _is_silent = True
    try:
        yield
    finally:
        _is_silent = False


def notify(text: str) -> None:
    """Log one line to standard error, above the progress bar."""
    # a closed pipe, as with `| head`, must not stop the training
    with contextlib.suppress(BrokenPipeError):
        if not _is_silent:
            tqdm.write(text, file=sys.stderr)


def notify_on_main(line: str) -> None:
    """Log a line in the main process of a launch, before the devices are known."""
    if os.environ.get("RANK", "0") == "0":
        notify(line)


def notifier(accelerator: Accelerator) -> Notify:
    """`notify` on the main process, and a function that does nothing on the others."""
    return notify if accelerator.is_main_process else lambda _: None


class Progress:
    """Progress of one epoch: rate, time left, loss and share of time spent waiting for data."""

    def __init__(self, title: str, total: int, *, visible: bool) -> None:
        self.title = title
        self.total = total
        self.done, self.loss_sum, self.waited = 0, 0.0, 0.0
        self.started = self.logged = time.perf_counter()
        self.ended: float | None = None
        on_terminal = visible and sys.stderr.isatty()
        self.bar = tqdm(desc=title, total=total, unit="img", disable=not on_terminal, leave=False)
        self.plain = visible and not on_terminal

    @property
    def seconds(self) -> float:
        """Time since the start, until `close`."""
        return (self.ended or time.perf_counter()) - self.started

    @property
    def loss(self) -> float:
        """Mean loss of an image so far."""
        return self.loss_sum / max(self.done, 1)

    @property
    def rate(self) -> float:
        """Images a second."""
        return self.done / max(self.seconds, 1e-9)

    @property
    def data_wait(self) -> float:
        """Share of the time spent waiting for data."""
        return self.waited / max(self.seconds, 1e-9)

    def advance(self, images: int, loss_sum: float, waited: float) -> None:
        """Add one optimiser step: its images, their summed loss, seconds spent waiting for data."""
        self.done += images
        self.loss_sum += loss_sum
        self.waited += waited
        self.bar.set_postfix_str(f"loss {self.loss:.3f}, data wait {self.data_wait:.0%}", False)
        self.bar.update(images)
        if self.plain and time.perf_counter() - self.logged > PLAIN_SECONDS:
            self.logged = time.perf_counter()
            left = (self.total - self.done) / max(self.rate, 1e-9)
            notify(
                f"{self.title}  {self.done}/{self.total} images  loss {self.loss:.3f}  "
                f"{self.rate:.0f} img/s  data wait {self.data_wait:.0%}  {left:.0f} s left"
            )

    def resize(self, images: int) -> None:
        """Change the number of images in the epoch."""
        self.total = self.bar.total = images

    def close(self) -> None:
        """End the epoch: its rate and times no longer change."""
        self.ended = self.ended or time.perf_counter()
        self.bar.close()


class TimeRemaining:
    """Estimates the time remaining of a run once, after the first steps of the process.

    Args:
        steps: Those that are left and the validations, in units of the cost of the next step.
        most: Seconds that the run may take at most.
        growing: Whether images grow later, beyond what a time budget allows.
    """

    def __init__(self, steps: float, *, most: float = math.inf, growing: bool = False) -> None:
        self.steps, self.ends = steps, time.perf_counter() + most
        self.about = "at most about" if growing else "about"
        self.watch, self.seconds = Stopwatch(), list[float]()
        self.reported = False

    def step(self) -> str | None:
        """Call after each optimiser step; returns the estimate as a line when it is ready."""
        if self.reported:
            return None
        self.seconds.append(self.watch.lap())
        timed = self.seconds[WARM_UP:]
        if len(timed) < TIMED_STEPS and sum(timed) < TIMED_SECONDS:
            return None
        self.reported, step = True, fmean(timed)
        left = min((self.steps - len(self.seconds)) * step, self.ends - time.perf_counter())
        if left < MIN_REMAINING:
            return None
        return f"{self.about} {format_duration(left)} to go ({step:.2g} s a step)"


def steps_left(config: Config, *, step: int, steps_per_epoch: int, val_images: int = 0) -> float:
    """Remaining steps and validations of the run, in units of the cost of the next step.

    A step counts in proportion to its number of patches. A linear probe has none.
    """
    if not steps_per_epoch:
        return 0.0
    first = step // steps_per_epoch
    epochs, total = config.training.epochs, total_steps(config, steps_per_epoch)
    sizes = [image_side(config, epoch, epochs) ** 2 for epoch in range(first, epochs)]
    if not sizes:
        return 0.0
    counts = [
        min(total - epoch * steps_per_epoch, steps_per_epoch) for epoch in range(first, epochs)
    ]
    done = step - first * steps_per_epoch
    weighted = sum(count * size for count, size in zip(counts, sizes, strict=True))
    validations = len(sizes) * VALIDATION_SHARE * val_images / config.data.batch_size
    return weighted / sizes[0] - done + validations
