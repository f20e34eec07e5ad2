"""Logs a run: events to metrics.jsonl and an experiment tracker, lines to standard error."""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.atomic_files import explain_write_errors, write_text
from vit.config import DataConfig
from vit.config.setting_layers import flatten
from vit.errors import BadImage, RunError
from vit.evaluation.metric_rows import describe_new_sources
from vit.evaluation.runs_table import SUMMARY_FILE, summarize_run
from vit.event_log import METRICS_FILE, read_event_log
from vit.text import printable, quoted
from vit.training.distributed.collectives import on_main
from vit.training.logging.trackers import Tracking
from vit.training.logging.training_progress import Progress, notify
from vit.training.moe_losses import expert_imbalance
from vit.training.training_context import Step, TrainingContext
from vit.training.validation import Validation

MAX_WAIT_SHARE = 0.15
"""Share of an epoch spent waiting for data above which a note is logged."""
MIN_WAIT_SECONDS = 2.0


class MetricsFile:
    """Appends events to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        with explain_write_errors(path):
            self.file = path.open("ab")

    def truncate(self, size: int) -> None:
        """Truncate the file to `size` bytes, its size at a checkpoint."""
        if self.file.seek(0, os.SEEK_END) < size:
            name = printable(self.file.name)
            raise RunError(
                f"{name} is shorter than at its checkpoint: restore it, or start again with "
                "--overwrite"
            )
        self.file.truncate(size)
        self.file.seek(size)

    def write(self, event: dict[str, Any]) -> None:
        """Add one line."""
        line = json.dumps(event, allow_nan=False) + "\n"
        with explain_write_errors(Path(self.file.name)):
            self.file.write(line.encode())
            self.file.flush()

    def size(self) -> int:
        """Size of the file in bytes."""
        return self.file.tell()

    def flush(self) -> None:
        """Flush the file to the disk; another thread may write meanwhile."""
        with explain_write_errors(Path(self.file.name)):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which has raised an error already
            self.file.close()


class MetricsLogger:
    """Writes events and log lines, on the main process only."""

    def __init__(self, run: TrainingContext, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.main = run.accelerator.is_main_process
        self.noted: set[str] = set()  # each kind of note is logged once
        self.metrics: MetricsFile | None = None
        self.measured = list[dict[str, Any]]()  # events of epochs and averages
        self.tracking: Tracking | None = None
        self.progress: Progress | None = None
        if self.main:
            self.metrics = MetricsFile(folder / METRICS_FILE)

    def start(self, *, metrics_bytes: int) -> None:
        """Truncate metrics.jsonl to its size at the checkpoint, and start the tracker."""
        config, step = self.run.config, self.run.step

        def start() -> None:
            assert self.metrics is not None
            self.metrics.truncate(metrics_bytes)
            self.measured += read_event_log(self.folder / METRICS_FILE, "epoch", "soup").events
            if config.run.track is not None:
                self.tracking = Tracking(config.run.track, self.folder, flatten(config), step=step)

        on_main(self.run.accelerator, start)

    def notify(self, line: str) -> None:
        """Log a line to standard error."""
        if self.main:
            notify(line)

    def open_progress(self, epoch: int, images: int) -> Progress:
        """Open a progress bar for the remaining `images` of `epoch`, from 0."""
        epochs = self.run.config.training.epochs
        self.progress = Progress(f"epoch {epoch + 1}/{epochs}", images, visible=self.main)
        return self.progress

    def step(self, epoch: int, step: Step) -> None:
        """Write the event of an optimiser step in `epoch`, from 0."""
        event = {
            "event": "step",
            "step": self.run.step,
            "epoch": epoch + 1,
            "loss": step.loss,
            "lr": step.lr,
            # a step whose gradient is not finite is left out, and JSON has no infinity
            "grad_norm": step.grad_norm if math.isfinite(step.grad_norm) else None,
        }
        if self.run.config.model.feedforward == "moe":
            event |= dict(zip(("balance_loss", "router_z_loss"), step.routers, strict=True))
        self.write(event)

    def epoch_event(
        self, epoch: int, train_loss: float, measured: Validation, progress: Progress
    ) -> dict[str, Any]:
        """The event of `epoch`, from 1; times are those of its training part."""
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
        """Write and log the event of an epoch."""
        self._write_measured(event)
        lost = f"  {measured.failed} unreadable" if measured.failed else ""
        speed = ""
        if event["images_per_second"]:  # a probe, which is epoch 0, has none
            speed = f"  {event['images_per_second']:.0f} img/s  data wait {event['data_wait']:.0%}"
        self.notify(
            f"epoch {event['epoch']:>3}/{self.run.config.training.epochs}  "
            f"loss {event['train_loss']:.3f}  val loss {event['val_loss']:.3f}  "
            f"{self.run.task.format_scores(event)}{' *' if best else '  '}{speed}{lost}".rstrip()
        )
        notes = {
            "ignored images": self.run.task.warning(event, self.run.config),
            "waiting": data_wait_note(event, self.run.config.data),
        }
        for kind, note in notes.items():
            if note is not None and kind not in self.noted:
                self.notify(note)
                self.noted.add(kind)

    def soup(self, event: dict[str, Any]) -> None:
        """Write and log the event of an average of epochs."""
        self._write_measured(event)
        members = ", ".join(map(str, event["epochs"]))
        worse = "" if event["better"] else ": not better than the best epoch, which stays"
        self.notify(f"soup of epochs {members}: {self.run.task.format_result(event)}{worse}")

    def test(self, measured: Validation) -> None:
        """Write and log the scores of the test images."""
        kept = {name: x for name, x in measured.scores.items() if name.startswith("val_")}
        scores = {name.replace("val_", "test_", 1): x for name, x in kept.items()}
        event = {"event": "test", "step": self.run.step, "test_images": measured.count, **scores}
        self.write(event)
        self.notify(self.run.task.format_test(event))

    def new_source(self, scores: dict[str, Any] | None) -> None:
        """Write and log the accuracy on new sources, if it was measured."""
        if scores is not None:
            self._write_measured({"event": "new_source", "step": self.run.step, **scores})
            self.notify(describe_new_sources(scores))

    def end(
        self, chosen: dict[str, Any], *, images: int, routers: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Log the result of the run."""
        failed = self.run.failed
        if failed:
            self.notify(f"{len(failed)} of the images could not be read and were left out:")
        for path, reason in sorted(failed.items()):
            self.notify(f"  {BadImage(path, reason)}")
        if (note := expert_imbalance(routers)) is not None:
            self.notify(note)
        what = f"epoch {chosen['epoch']}" if chosen["event"] == "epoch" else "the soup"
        self.notify(f"best: {what}, {self.run.task.format_result(chosen)} of {images} images")
        self.notify(f"now: {self.run.task.next_command(quoted(self.folder))}")

    def close(self) -> None:
        """Close the metrics file, the progress bar and the tracker."""
        for opened in (self.metrics, self.progress, self.tracking):
            if opened is not None:
                opened.close()

    def _write_measured(self, event: dict[str, Any]) -> None:
        """Write an event with scores, and summary.json, which `vit runs` reads."""
        self.write(event)
        self.measured.append(event)
        if self.main:
            facts = summarize_run(self.measured, flatten(self.run.config), self.folder)
            write_text(self.folder / SUMMARY_FILE, json.dumps(facts) + "\n")

    def write(self, event: dict[str, Any]) -> None:
        """Write an event, and send it to the tracker."""
        if self.metrics is not None:
            self.metrics.write(event)
        if self.tracking is not None:
            self.tracking.send(event)


def data_wait_note(event: Mapping[str, Any], data: DataConfig) -> str | None:
    """Advice if an epoch spent much of its time waiting for data, else None."""
    share, seconds = event["data_wait"], event["seconds"]
    if share <= MAX_WAIT_SHARE or share * seconds < MIN_WAIT_SECONDS:
        return None
    ways = {
        "none": "--cache ram or --cache disk keeps images decoded; more loader processes (-j) "
        "help where cores are idle, and smaller files on a nearer disk where they are not",
        "disk": "--cache ram is nearer; more loader processes (-j) help where cores are idle",
        "ram": "more loader processes (-j) help where cores are idle, or fewer augmentations",
        "device": "on a GPU a larger batch (-b) takes hardly longer; else a new run with --cache "
        "ram, which has loader processes (-j)",
    }
    return f"note: {share:.0%} of the epoch was spent waiting for images: {ways[data.cache]}"
