"""Progress of a training on standard error: log lines, a bar on a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from accelerate import Accelerator
from tqdm import tqdm

# Time between two progress lines without a terminal.
PLAIN_SECONDS = 30.0

Notify = Callable[[str], None]

# receive the log lines instead of standard error; the last one counts
_redirected: list[Notify] = []


@contextlib.contextmanager
def redirect_lines(to: Notify) -> Iterator[None]:
    """Inside, pass log lines to `to`, which may write them with `write_line`."""
    _redirected.append(to)
    try:
        yield
    finally:
        _redirected.pop()


def notify(text: str) -> None:
    """Log one line: to standard error above the progress bar, or to `redirect_lines`."""
    (_redirected[-1] if _redirected else write_line)(text)


def write_line(text: str) -> None:
    """Write one line to standard error, above the progress bar."""
    # a closed pipe, as with `| head`, must not stop the training
    with contextlib.suppress(BrokenPipeError):
        tqdm.write(text, file=sys.stderr)


def teller(accelerator: Accelerator) -> Notify:
    """`notify` on the main process, and a function that does nothing on the others."""
    return notify if accelerator.is_main_process else lambda _: None


class Progress:
    """Progress of one epoch: rate, time left, loss and share of time spent waiting for data.

    Args:
        title: Label of the bar, such as `epoch 3/20`.
        total: Images in the epoch.
        visible: False on all processes but the main one.
    """

    def __init__(self, title: str, total: int, *, visible: bool) -> None:
        self.title = title
        self.total = total
        self.visible = visible
        self.done, self.loss_sum, self.waited = 0, 0.0, 0.0
        self.started = self.told = time.perf_counter()
        on_terminal = visible and sys.stderr.isatty()
        self.bar = tqdm(desc=title, total=total, unit="img", disable=not on_terminal, leave=False)
        self.plain = visible and not on_terminal

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

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
        if self.plain and time.perf_counter() - self.told > PLAIN_SECONDS:
            self.told = time.perf_counter()
            left = (self.total - self.done) / max(self.rate, 1e-9)
            notify(
                f"{self.title}  {self.done}/{self.total} images  loss {self.loss:.3f}  "
                f"{self.rate:.0f} img/s  data wait {self.data_wait:.0%}  {left:.0f} s left"
            )

    def close(self) -> None:
        self.bar.close()
