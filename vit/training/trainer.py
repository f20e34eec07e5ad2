"""One training from its first or resumed step to its last: steps, epochs, and when to save."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vit.data.dataset import Batch
from vit.data.dataset_types import Splits
from vit.errors import BadImage, DataError, WeightsError, quoted
from vit.training.best_checkpoints import BestEpochs, stopped_early
from vit.training.checkpoint import CHECKPOINTS, load_checkpoint
from vit.training.checkpoint_manager import CheckpointManager
from vit.training.collectives import agreed_signal, require_same_step
from vit.training.dry_run import largest
from vit.training.eta import Pace, steps_left
from vit.training.final_report import end
from vit.training.fsdp import pieces_like
from vit.training.linear_probe_init import ProbeFit
from vit.training.lr_schedule import WarmupStableDecay, learning_rate, total_steps
from vit.training.metrics_logger import MetricsLogger
from vit.training.model_soup import make_soup
from vit.training.run_folder import write_config
from vit.training.setup import fingerprint, preflight
from vit.training.stop_signals import Interrupted
from vit.training.time_budget import TimeBudget, settle_steps
from vit.training.training_loaders import evaluation_loader, training_loader
from vit.training.training_loop import Step, TrainingState, train_one_epoch
from vit.training.training_progress import Progress
from vit.training.validation import Validation, validate

# A change of the number of steps that is worth a line, as a share of them.
NOTED = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training ended with.

    Args:
        folder: The run folder.
        classes: Class names, in the order of the network's outputs.
        epoch: The best epoch; its weights are in model.safetensors, or those of a soup. 0 is a
            probe's head, before the first step.
        val_top1: Share of validation images that model.safetensors labels right; None without
            classes.
        scores: All that validation said of it: `loss`, and `top1`, or `cider` and others.
        failed: Images that could not be read and were left out, and why.
    """

    folder: Path
    classes: tuple[str, ...]
    epoch: int
    val_top1: float | None
    scores: dict[str, float]
    failed: dict[str, str]


class Trainer:
    """One training from its first or resumed step to its last.

    Args:
        run: What is trained.
        folder: The run folder.
        splits: The data.
        steps: Optimiser steps of an epoch.
        budget: By which the run settles its steps in its cooldown.
        resumed_by: The command and the folder that continue it, where it is a part of more.
        report: Whether it ends with thresholds and report.html.
    """

    def __init__(
        self,
        run: TrainingState,
        folder: Path,
        splits: Splits,
        steps: int,
        budget: TimeBudget | None = None,
        *,
        resumed_by: tuple[str, Path] | None = None,
        report: bool = True,
    ) -> None:
        self.run = run
        self.folder = folder
        self.splits = splits
        self.data = fingerprint(splits)
        self.steps = steps
        self.budget = budget
        self.resumed_by = resumed_by or ("vit train", folder)
        self.report = report
        self.elapsed = 0.0  # from the first step to the end of the last epoch
        self.epoch = 0  # how many are recorded
        self.part = {"images": 0, "loss_sum": 0.0}  # of an epoch that a checkpoint cut in two
        self.best = BestEpochs(folder, run.config.run.keep_best)
        self.records = MetricsLogger(run, folder)
        self.keeper = CheckpointManager(
            run, folder, splits.classes, self.best, self.records.metrics
        )
        self.training = training_loader(run, splits.train)
        self.evaluation = evaluation_loader(run, splits.val)

    @property
    def total_steps(self) -> int:
        return total_steps(self.run.config, self.steps)

    def begin(self, resuming: bool, probed: ProbeFit | None = None) -> None:
        """Restore the newest checkpoint, if there is one, and say what is about to happen.

        Args:
            resuming: Whether there may be one.
            probed: Where the head came from, where a probe found it just now.

        Raises:
            DataError: The images are not those that the run began with.
        """
        run, tell, state = self.run, self.records.tell, None
        if resuming:
            state = load_checkpoint(
                self.folder / CHECKPOINTS,
                model=run.network,
                optimizer=run.optimizer,
                average=run.average,
                notify=tell,
            )
        if state is not None:
            self.restore(state)
            tell(f"resuming at step {run.step} of {self.total_steps}")
        require_same_step(run.accelerator, run.step)
        self.records.start(metrics_bytes=0 if state is None else state["metrics_bytes"])
        for line in preflight(run, self.splits, self.total_steps):
            tell(line)
        tell(f"run folder: {quoted(self.folder)}")
        if probed is not None:
            self.take_head(probed)
        elif run.step == 0 and self.part["images"] and not self.best.events and self.total_steps:
            self.measure_start()  # which a signal cut short

    def take_head(self, probed: ProbeFit) -> None:
        """Begin with the head that a probe found: as epoch 0, which may well remain the best."""
        self.part = {"images": probed.images, "loss_sum": probed.loss * probed.images}
        if self.total_steps:
            self.measure_start()

    def measure_start(self) -> None:
        """Record what the network is worth before its first step, as epoch 0."""
        progress = self.records.open_progress(-1, 0)
        measured = validate(self.run, self.evaluation, len(self.splits.val), self.averaged)
        progress.close()
        self.stop_on_signal(agreed_signal(self.run.accelerator, self.run.interruption.number))
        assert measured is not None
        self.epoch = -1
        self.finish_epoch(measured, progress)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint says.

        Raises:
            DataError: The images are not those that the run began with.
            RunError: The best weights so far are gone.
        """
        then, now = state["data"], self.data
        if then != now:
            raise DataError(
                f"the data set changed since this run began ({then['train']} training and "
                f"{then['val']} validation images then, {now['train']} and {now['val']} now; "
                "some added, removed, renamed or relabelled): restore it, or start a new run with "
                "another --out"
            )
        run = self.run
        run.step, self.epoch, self.part = state["step"], state["epoch"], dict(state["part"])
        run.failed |= state["failed"]
        self.best.restore(state["best"])
        self.keeper.before, self.keeper.damaged = state["best"], state["damaged"]
        self.keeper.require_model()
        if (scaler := run.accelerator.scaler) is not None:
            scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Let go of loader processes and files."""
        for opened in (self.keeper, self.training, self.evaluation, self.records):
            opened.close()

    def run_all(self) -> TrainingResult:
        """Train what is left of the epochs."""
        run, began = self.run, time.monotonic()
        training = run.config.training
        self.pace = Pace(
            steps=steps_left(run.config, step=run.step, steps_per_epoch=self.steps),
            validations=training.epochs - self.epoch,
            validation_share=len(self.splits.val) / run.config.data.batch_size,
            growing=training.start_image_size is not None,
        )
        while self.epoch < run.config.training.epochs and not self.stopped_early():
            done = run.step - self.epoch * self.steps
            with self.saving_at_bad_images():
                progress = self.run_epoch(self.training.epoch(self.epoch, done))
                measured = validate(run, self.evaluation, len(self.splits.val), self.averaged)
            self.stop_on_signal(agreed_signal(run.accelerator, run.interruption.number))
            assert measured is not None
            self.finish_epoch(measured, progress)
            self.pace.validated()
            self.keep_to_time(began)
        self.keeper.wait()
        self.training.close()
        soup = self.average_best_checkpoints() if training.soup else None
        self.evaluation.close()
        run.accelerator.wait_for_everyone()
        chosen = soup or self.best.first
        self.records.end(
            chosen,
            images=len(self.splits.val),
            routers=self.best.first.get("routers", ()),
        )
        if run.accelerator.is_main_process and self.report:
            end(run, self.folder, self.splits, epoch=self.best.first["epoch"])
        return TrainingResult(
            folder=self.folder,
            classes=self.splits.classes,
            epoch=self.best.first["epoch"],
            val_top1=chosen.get("val_top1"),
            scores={n.removeprefix("val_"): v for n, v in chosen.items() if n.startswith("val_")},
            failed=run.failed,
        )

    def keep_to_time(self, began: float) -> None:
        """Settle how many steps follow, after each epoch from where the cooldown begins.

        What was learned so far does not depend on them: the run is what its new settings say.

        Args:
            began: When the first step was made, by `time.monotonic`.
        """
        run, step, before = self.run, self.run.step, self.total_steps
        training, rate = run.config.training, run.lr_at
        if self.budget is None or not isinstance(rate, WarmupStableDecay):
            return
        seconds, self.elapsed = time.monotonic() - began - self.elapsed, time.monotonic() - began
        start = before - rate.cooldown_steps
        if not start <= step < before or not step:
            return
        costs, first = self.budget.costs, max(step - self.steps, 0)
        expected = costs.between(run.config, self.steps, first, step)
        if step == start:  # all so far, with the start of the loaders, which may be most of it
            seconds = self.elapsed
            expected = costs.start + costs.between(run.config, self.steps, 0, step)
        pace = largest(run.accelerator, seconds / expected)
        config = settle_steps(run.config, self.budget, self.steps, step, pace, run.accelerator)
        if run.accelerator.is_main_process:
            write_config(self.folder, config)
        run.config = config
        run.lr_at = learning_rate(config.training, epoch_steps=self.steps, total=self.total_steps)
        if config.training.epochs != training.epochs:
            self.training.close()
            self.training = training_loader(run, self.splits.train)
        if abs(self.total_steps - before) > NOTED * before:
            self.records.tell(
                f"note: {self.total_steps:,} steps instead of {before:,} fill the time"
            )

    def run_epoch(self, batches: Iterator[Batch]) -> Progress:
        """Make the steps that are left of the epoch."""
        left = min((self.epoch + 1) * self.steps, self.total_steps) - self.run.step
        progress = self.records.open_progress(self.epoch, left * self.run.config.data.batch_size)
        train_one_epoch(
            self.run,
            batches,
            epoch=self.epoch,
            steps=left,
            progress=progress,
            due=self.keeper.due,
            after_step=self.after_step,
        )
        progress.close()
        return progress

    def after_step(self, seen: Step) -> None:
        """Between two steps: record it, save when it is time, heed a signal."""
        self.part["loss_sum"] += seen.loss * seen.images
        self.part["images"] += seen.images
        self.records.step(self.epoch, seen)
        if line := self.pace.step():
            self.records.tell(line)
        often = self.run.config.run.checkpoint_steps
        if seen.due or (often and self.run.step % often == 0):
            self.save()
        self.stop_on_signal(seen.signal)

    def stop_on_signal(self, signal: int) -> None:
        """Save and stop if a signal has come.

        Raises:
            Interrupted: It has.
        """
        if signal:
            self.save_and_wait()
            raise Interrupted(
                f"interrupted at step {self.run.step} of {self.total_steps}; continue with "
                f"{self.resume_command()}",
                signal,
            )

    @contextlib.contextmanager
    def saving_at_bad_images(self) -> Iterator[None]:
        """Save before an image that cannot be read stops the run, and say how to go on."""
        try:
            yield
        except BadImage as bad:
            self.save_and_wait()
            raise BadImage(
                bad.path,
                f"{bad.reason}; stopped at step {self.run.step}: put a good file there, or leave "
                f"such files out: {self.resume_command('--on-bad-image skip ')}",
            ) from None

    def resume_command(self, flags: str = "") -> str:
        """What somebody types to go on."""
        command, folder = self.resumed_by
        return f"{command} --resume {flags}--out {quoted(folder)}"

    def save_and_wait(self) -> None:
        """Write a checkpoint before anybody leaves: a launcher ends the others with the first."""
        self.save()
        self.keeper.wait()
        self.run.accelerator.wait_for_everyone()

    def finish_epoch(self, measured: Validation, progress: Progress) -> None:
        """Record an epoch, keep its weights if they are among the best so far, and save."""
        train_loss = self.part["loss_sum"] / max(self.part["images"], 1)
        event = self.records.epoch_event(self.epoch + 1, train_loss, measured, progress)
        kept = self.best.offer(event)
        self.part, self.epoch = {"images": 0, "loss_sum": 0.0}, self.epoch + 1
        self.records.epoch(event, measured, best=self.best.first is event)
        self.save(kept=kept)

    @property
    def averaged(self) -> Mapping[str, Tensor] | None:
        """The weights that are measured, where they are not the network's own."""
        return None if self.run.average is None else self.run.average.state_dict()

    def stopped_early(self) -> bool:
        """Whether the last `patience` epochs brought nothing better."""
        patience = self.run.config.training.patience
        over = bool(self.best.events) and stopped_early(
            self.best.first["epoch"], self.epoch, patience
        )
        if over:
            self.records.tell(f"note: no better epoch in {patience}: stopping early")
        return over

    def average_best_checkpoints(self) -> dict[str, Any] | None:
        """Average the best epochs; where that is better, it is what the run answers with."""
        run = self.run

        def worth(weights: Mapping[str, Tensor]) -> Validation | None:
            present = run.network.state_dict()
            pieces = {n: pieces_like(tensor, present[n]) for n, tensor in weights.items()}
            return validate(run, self.evaluation, len(self.splits.val), pieces)

        try:
            made = make_soup(self.best, worth)
        except WeightsError as error:  # the same files on all processes; the run is complete
            self.records.tell(f"note: no soup: {error}")
            with contextlib.suppress(WeightsError):  # an earlier end may have left a soup there
                weights = self.best.load(self.best.first["epoch"])
                if run.accelerator.is_main_process:
                    self.keeper.save_model(weights)
            return None
        self.stop_on_signal(agreed_signal(run.accelerator, run.interruption.number))
        assert made is not None
        event, weights = made
        self.records.soup({**event, "step": run.step})
        if run.accelerator.is_main_process:
            self.keeper.save_model(weights)
        return event if event["better"] else None

    def save(self, *, kept: bool = False) -> None:
        """Write a checkpoint, and the weights of the epoch that ended if they are `kept`."""
        scaler = self.run.accelerator.scaler
        state = {
            "step": self.run.step,
            "epoch": self.epoch,
            "part": dict(self.part),
            "failed": dict(self.run.failed),
            "data": self.data,
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        self.keeper.save(state, epoch=self.epoch if kept else None)
