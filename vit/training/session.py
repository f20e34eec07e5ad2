"""One training from its first or resumed step to its last: epochs, records and checkpoints."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.data.loading import Batch, EvaluationLoader, TrainingLoader
from vit.data.samples import Splits
from vit.errors import BadImage, DataError, printable, quoted
from vit.training.agreement import agreed_signal, require_same_step
from vit.training.batches import evaluation_loader, training_loader
from vit.training.checkpoint import CHECKPOINTS, load_checkpoint, save_checkpoint
from vit.training.ending import leave_report
from vit.training.interruption import Interrupted, Interruption
from vit.training.loop import StepSums, Training, Validation, train_one_epoch, validate
from vit.training.progress import Progress, say
from vit.training.run_folder import Metrics, clean_leftovers
from vit.training.setup import fingerprint, preflight
from vit.weights.folder import save_model


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training ended with.

    Args:
        folder: The run folder.
        classes: Class names, in the order of the network's outputs.
        epoch: The epoch whose weights are in model.safetensors, from 1.
        val_top1: Share of validation pictures that they label right.
        failed: Pictures that could not be read and were left out, and why.
    """

    folder: Path
    classes: tuple[str, ...]
    epoch: int
    val_top1: float
    failed: dict[str, str]


class Session:
    """One training from its first or resumed step to its last: epochs, records and checkpoints."""

    def __init__(
        self,
        run: Training,
        folder: Path,
        splits: Splits,
        steps: int,
        interruption: Interruption,
    ) -> None:
        self.run = run
        self.folder = folder
        self.splits = splits
        self.data = fingerprint(splits)
        self.steps = steps
        self.interruption = interruption
        self.main = run.accelerator.is_main_process
        self.epoch = 0  # how many are recorded
        self.best: dict[str, Any] | None = None
        self.part = {"images": 0, "loss_sum": 0.0}  # of an epoch that a checkpoint cut in two
        self.saved = time.monotonic()
        self.opened: list[TrainingLoader | EvaluationLoader] = []
        self.metrics: Metrics | None = None
        self.progress: Progress | None = None

    def begin(self, resuming: bool) -> None:
        """Restore the newest checkpoint, if there is one, and say what is about to happen.

        Raises:
            DataError: The pictures are not those that the run began with.
        """
        run, state = self.run, None
        tell = say if self.main else lambda _: None
        if self.main:
            clean_leftovers(self.folder)
            self.metrics = Metrics(self.folder / "metrics.jsonl")
        if resuming:
            state = load_checkpoint(
                self.folder / CHECKPOINTS,
                model=run.network,
                optimizer=run.optimizer,
                average=run.average,
                say=tell,
            )
        if state is not None:
            if state["data"] != self.data:
                raise DataError(
                    "the data set changed since this run began (pictures added, removed or "
                    "renamed): restore it, or start a new run with another --out"
                )
            run.step, self.epoch = state["step"], state["epoch"]
            self.best, self.part = state["best"], state["part"]
            run.failed |= state["failed"]
            if (scaler := run.accelerator.scaler) is not None:
                scaler.load_state_dict(state["scaler"])
            tell(f"resuming at step {run.step} of {self.total_steps}")
        require_same_step(run.accelerator, run.step)
        if self.metrics is not None:
            self.metrics.cut(0 if state is None else state["metrics_bytes"])
        for line in preflight(run, self.splits, self.total_steps):
            tell(line)
        tell(f"run folder: {printable(self.folder)}")

    def close(self) -> None:
        """Let go of loader processes, the metrics file and the progress bar."""
        for opened in (*self.opened, self.metrics, self.progress):
            if opened is not None:
                opened.close()

    @property
    def total_steps(self) -> int:
        return self.run.config.training.epochs * self.steps

    def run_all(self) -> TrainingResult:
        """Train what is left of the epochs."""
        run = self.run
        training = training_loader(run, self.splits.train)
        evaluation = evaluation_loader(run, self.splits.val)
        self.opened += [training, evaluation]
        for epoch in range(self.epoch, run.config.training.epochs):
            done = run.step - epoch * self.steps
            with self.saving_at_bad_images():
                self.run_epoch(epoch, training.epoch(epoch, done))
                measured = validate(run, iter(evaluation), len(self.splits.val))
            self.heed(agreed_signal(run.accelerator, self.interruption.number))
            self.finish_epoch(epoch, measured)
        training.close()
        evaluation.close()
        run.accelerator.wait_for_everyone()
        assert self.best is not None
        if self.main:
            self.tell_end()
            leave_report(
                run,
                self.folder,
                self.splits,
                epoch=self.best["epoch"],
                interruption=self.interruption,
            )
        return TrainingResult(
            folder=self.folder,
            classes=self.splits.classes,
            epoch=self.best["epoch"],
            val_top1=self.best["val_top1"],
            failed=run.failed,
        )

    def run_epoch(self, epoch: int, batches: Iterator[Batch]) -> None:
        """Make the steps of `epoch` that are left."""
        epochs, done = self.run.config.training.epochs, self.run.step - epoch * self.steps
        total = (self.steps - done) * self.run.config.data.batch_size
        self.progress = Progress(f"epoch {epoch + 1}/{epochs}", total, visible=self.main)
        train_one_epoch(
            self.run,
            batches,
            epoch=epoch,
            steps=self.steps - done,
            progress=self.progress,
            after_step=self.after_step,
        )
        self.progress.close()

    def after_step(self, sums: StepSums) -> None:
        """Between two steps: keep the sums of the epoch, save when it is time, heed a signal."""
        self.part["loss_sum"] += sums.loss
        self.part["images"] += int(sums.images)
        minutes = (time.monotonic() - self.saved) / 60
        if minutes >= self.run.config.run.checkpoint_minutes:
            self.save()
        self.heed(sums.signal)

    def heed(self, signal: int) -> None:
        """Save and stop if a signal has come.

        Raises:
            Interrupted: It has.
        """
        if signal:
            self.save()
            raise Interrupted(
                f"interrupted at step {self.run.step} of {self.total_steps}; continue with "
                f"vit train --resume --out {quoted(self.folder)}",
                signal,
            )

    @contextlib.contextmanager
    def saving_at_bad_images(self) -> Iterator[None]:
        """Save before a picture that cannot be read stops the run, and say how to go on."""
        try:
            yield
        except BadImage as bad:
            self.save()
            raise BadImage(
                bad.path,
                f"{bad.reason}; stopped at step {self.run.step}: put a good file there, or leave "
                f"such files out: vit train --resume --on-bad-image skip --out "
                f"{quoted(self.folder)}",
            ) from None

    def finish_epoch(self, epoch: int, measured: Validation) -> None:
        """Record an epoch, keep its weights if they are the best so far, and save."""
        assert self.progress is not None
        progress, run = self.progress, self.run
        event = {
            "event": "epoch",
            "epoch": epoch + 1,
            "step": run.step,
            "train_loss": self.part["loss_sum"] / max(self.part["images"], 1),
            "val_loss": measured.loss,
            "val_top1": measured.top1,
            "lr": run.lr_at(run.step - 1),
            "images_per_second": round(progress.rate, 1),
            "data_wait": round(progress.data_wait, 4),
            "seconds": round(progress.seconds, 2),
        }
        self.part, self.epoch = {"images": 0, "loss_sum": 0.0}, epoch + 1
        better = self.best is None or self.rank(event) > self.rank(self.best)
        if better:
            self.best = event
        if self.metrics is not None:
            self.metrics.write(event)
            self.tell_epoch(event, measured, better)
            if better:
                self.save_best()
        self.save()

    @staticmethod
    def rank(event: dict[str, Any]) -> tuple[float, float]:
        """What the best epoch has most of: accuracy, then the lower loss."""
        return event["val_top1"], -event["val_loss"]

    def save_best(self) -> None:
        """Write the weights that were measured, the average where one is kept."""
        run = self.run
        averaged = contextlib.nullcontext() if run.average is None else run.average.in_place()
        with averaged:
            save_model(
                self.folder,
                run.network,
                config=run.config,
                classes=self.splits.classes,
                preprocessing=run.preprocessing,
            )

    def save(self) -> None:
        """Write a checkpoint, from the main process."""
        self.saved = time.monotonic()
        if self.metrics is None:
            return
        run, scaler = self.run, self.run.accelerator.scaler
        state = {
            "step": run.step,
            "epoch": self.epoch,
            "best": self.best,
            "part": self.part,
            "failed": run.failed,
            "data": self.data,
            "metrics_bytes": self.metrics.size(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        save_checkpoint(
            self.folder / CHECKPOINTS,
            model=run.network,
            optimizer=run.optimizer,
            average=run.average,
            state=state,
        )

    def tell_epoch(self, event: dict[str, Any], measured: Validation, better: bool) -> None:
        lost = f"  {measured.failed} unreadable" if measured.failed else ""
        say(
            f"epoch {event['epoch']:>3}/{self.run.config.training.epochs}  "
            f"loss {event['train_loss']:.3f}  val loss {event['val_loss']:.3f}  "
            f"val top-1 {event['val_top1']:.2%}{' *' if better else '  '}  "
            f"{event['images_per_second']:.0f} img/s  data wait {event['data_wait']:.0%}{lost}"
        )

    def tell_end(self) -> None:
        assert self.best is not None
        if self.run.failed:
            say(f"{len(self.run.failed)} of the pictures could not be read and were left out:")
        for path, reason in sorted(self.run.failed.items()):
            say(f"  {BadImage(path, reason)}")
        best = f"epoch {self.best['epoch']}, validation top-1 {self.best['val_top1']:.2%}"
        say(f"best: {best} of {len(self.splits.val)} pictures")
        say(f"now: vit predict {quoted(self.folder)} IMAGE...")
