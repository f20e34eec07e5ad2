"""What a run says of itself: metrics.jsonl, an experiment tracker, and lines on the terminal."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.config.parser import flatten
from vit.errors import BadImage, quoted
from vit.training.checkpoint_metric import blindness, told, verdict
from vit.training.collectives import on_main
from vit.training.loader_autotune import waiting
from vit.training.moe_losses import expert_imbalance
from vit.training.run_folder import Metrics, clean_leftovers
from vit.training.trackers import Tracking
from vit.training.training_loop import Step, TrainingState
from vit.training.training_progress import Progress, notify
from vit.training.validation import Validation


class MetricsLogger:
    """Tells what happens, from the main process alone.

    Args:
        run: What is trained.
        folder: The run folder.
    """

    def __init__(self, run: TrainingState, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.main = run.accelerator.is_main_process
        self.blind = self.waited = False
        self.metrics: Metrics | None = None
        self.tracking: Tracking | None = None
        self.progress: Progress | None = None
        if self.main:
            clean_leftovers(folder)
            self.metrics = Metrics(folder / "metrics.jsonl")

    def start(self, *, metrics_bytes: int) -> None:
        """Go on after what a checkpoint knows of.

        Args:
            metrics_bytes: Length of metrics.jsonl at that time.

        Raises:
            ConfigError: The tracker of a new run cannot start.
        """
        config, step = self.run.config, self.run.step

        def start() -> None:
            assert self.metrics is not None
            self.metrics.cut(metrics_bytes)
            if config.run.track is not None:
                self.tracking = Tracking(config.run.track, self.folder, flatten(config), step=step)

        on_main(self.run.accelerator, start)

    def tell(self, line: str) -> None:
        """A line to the user."""
        if self.main:
            notify(line)

    def open_progress(self, epoch: int, images: int) -> Progress:
        """A bar for the `images` that are left of an epoch, which counts from 0."""
        epochs = self.run.config.training.epochs
        self.progress = Progress(f"epoch {epoch + 1}/{epochs}", images, visible=self.main)
        return self.progress

    def step(self, epoch: int, seen: Step) -> None:
        """The optimiser step that has just been made, in an epoch counted from 0."""
        event = step_event(self.run.step, epoch + 1, seen)
        if self.run.config.model.feedforward == "moe":
            event |= dict(zip(("balance_loss", "router_z_loss"), seen.routers, strict=True))
        self._write(event)

    def epoch_event(
        self, epoch: int, train_loss: float, measured: Validation, progress: Progress
    ) -> dict[str, Any]:
        """The line of an epoch, counted from 1; times are those of its training part."""
        routers = {"routers": [*measured.routers]} if measured.routers else {}
        return {
            "event": "epoch",
            "epoch": epoch,
            "step": self.run.step,
            "train_loss": train_loss,
            **measured.scores,
            "val_images": measured.count,
            "lr": self.run.lr_at(max(self.run.step - 1, 0)),
            "images_per_second": round(progress.rate, 1),
            "data_wait": round(progress.data_wait, 4),
            "seconds": round(progress.seconds, 2),
            **routers,
        }

    def epoch(self, event: dict[str, Any], measured: Validation, *, best: bool) -> None:
        """An epoch that has been measured."""
        self._write(event)
        lost = f"  {measured.failed} unreadable" if measured.failed else ""
        self.tell(
            f"epoch {event['epoch']:>3}/{self.run.config.training.epochs}  "
            f"loss {event['train_loss']:.3f}  val loss {event['val_loss']:.3f}  "
            f"{told(event)}{' *' if best else '  '}  "
            f"{event['images_per_second']:.0f} img/s  data wait {event['data_wait']:.0%}{lost}"
        )
        note = blindness(event)
        if note is not None and not self.blind:  # once, until it looks
            self.tell(note)
        self.blind = note is not None
        note = waiting(event, self.run.config.data)
        if note is not None and not self.waited:
            self.tell(note)
            self.waited = True

    def soup(self, event: dict[str, Any]) -> None:
        """An average of epochs that has been measured."""
        self._write(event)
        members = ", ".join(map(str, event["epochs"]))
        worse = "" if event["better"] else ": not better than the best epoch, which stays"
        self.tell(f"soup of epochs {members}: {verdict(event)}{worse}")

    def end(
        self, chosen: dict[str, Any], *, images: int, routers: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """What the run ends with: the event of its best epoch, or of a soup.

        Args:
            chosen: The event.
            images: How many were measured.
            routers: Of the best epoch, where there are experts.
        """
        failed = self.run.failed
        if failed:
            self.tell(f"{len(failed)} of the images could not be read and were left out:")
        for path, reason in sorted(failed.items()):
            self.tell(f"  {BadImage(path, reason)}")
        if (note := expert_imbalance(routers)) is not None:
            self.tell(note)
        what = f"epoch {chosen['epoch']}" if chosen["event"] == "epoch" else "the soup"
        self.tell(f"best: {what}, {verdict(chosen)} of {images} images")
        self.tell(f"now: vit predict {quoted(self.folder)} IMAGE...")

    def close(self) -> None:
        """Let go of the metrics file, the progress bar and the tracker."""
        for opened in (self.metrics, self.progress, self.tracking):
            if opened is not None:
                opened.close()

    def _write(self, event: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(event)


def step_event(step: int, epoch: int, seen: Step) -> dict[str, Any]:
    """The line of an optimiser step; both count from 1."""
    return {
        "event": "step",
        "step": step,
        "epoch": epoch,
        "loss": seen.loss,
        "lr": seen.lr,
        # fp16 skips a step whose gradient overflows, and JSON has no infinity
        "grad_norm": seen.grad_norm if math.isfinite(seen.grad_norm) else None,
    }
