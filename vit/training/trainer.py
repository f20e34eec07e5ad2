"""Trainer: runs the epochs of a training, validates, saves checkpoints and stops on signals."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import trange

from vit.data.dataloader import EvaluationLoader
from vit.data.dataset import Batch
from vit.data.dataset_types import Splits
from vit.data.transforms import TileFeatures
from vit.errors import BadImage
from vit.stop_signals import Interrupted
from vit.text import format_bytes, plural, quoted
from vit.training.callbacks import CallbackRun
from vit.training.checkpoint.best_epoch_soup import BestEpochs, average_best_epochs
from vit.training.checkpoint.checkpoint import CHECKPOINTS, CheckpointState, load_checkpoint
from vit.training.checkpoint.checkpoint_writer import CheckpointWriter
from vit.training.checkpoint.run_folder import train_on, write_config
from vit.training.distributed.collectives import (
    agreed_signal,
    max_over_processes,
    require_same_step,
)
from vit.training.distributed.fsdp import shard_like
from vit.training.final_report import finish_run
from vit.training.finetune.linear_probe import ProbeFit
from vit.training.logging.metrics_logger import MetricsLogger
from vit.training.logging.training_progress import Progress, TimeRemaining, steps_left
from vit.training.lr_schedule import (
    WarmupStableDecay,
    learning_rate,
    total_steps,
)
from vit.training.optimizers import set_lr
from vit.training.settings_from_data import encodes_tiles_once
from vit.training.setup import fingerprint, preflight
from vit.training.time_budget import TimeBudget, settle_steps
from vit.training.training_context import Step, TrainingContext
from vit.training.training_loaders import evaluation_loader, training_loader
from vit.training.training_loop import train_one_epoch
from vit.training.validation import Validation, validate
from vit.weights.saved_model import load_run

# Relative change of the number of steps above which it is logged.
NOTED_CHANGE = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training.

    Args:
        classes: Class names, in the order of the network's outputs.
        epoch: The best epoch, whose weights (or the average of the best epochs) are in
            model.safetensors; 0 is the head of a linear probe, before the first step.
        val_top1: Validation accuracy of model.safetensors in [0, 1]; None without classes.
    """

    folder: Path
    classes: tuple[str, ...]
    epoch: int
    val_top1: float | None
    scores: dict[str, float]
    failed: dict[str, str]
    test_scores: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Runs a training from its first or resumed step to its last."""

    def __init__(
        self,
        run: TrainingContext,
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
        self.settled = (0.0, 0)  # when steps were last counted against the time, and which
        self.epoch = 0  # epochs recorded so far
        self.part = {"images": 0, "loss_sum": 0.0}  # of the epoch in progress
        self.best = BestEpochs(folder, run.config.run.keep_best, run.task.rank)
        self.logger = MetricsLogger(run, folder)
        self.outputs = run.task.output_names(splits)
        self.checkpoints = CheckpointWriter(
            run, folder, self.outputs, self.best, self.logger.metrics
        )
        self.callbacks = CallbackRun(run, folder, self.logger)
        self.training = training_loader(run, splits.train)
        self.evaluation = evaluation_loader(run, splits.val)

    @property
    def total_steps(self) -> int:
        return total_steps(self.run.config, self.steps)

    def begin(self, resuming: bool, probed: ProbeFit | None = None) -> None:
        """Restore the newest checkpoint, if any, and log what will be trained."""
        run, notify, state = self.run, self.logger.notify, None
        if resuming:
            state = load_checkpoint(self.folder / CHECKPOINTS, run, notify)
        if state is not None:
            self.restore(state)
            notify(f"resuming at step {run.step} of {self.total_steps}")
        require_same_step(run.accelerator, run.step)
        self.logger.start(metrics_bytes=0 if state is None else state.metrics_bytes)
        for line in preflight(run, self.splits, self.total_steps):
            notify(line)
        notify(f"run folder: {quoted(self.folder)}")
        if probed is not None:
            self.part = {"images": probed.images, "loss_sum": probed.loss * probed.images}
        if run.step == 0 and self.part["images"] and not self.best.events and self.total_steps:
            self.measure_start()

    def measure_start(self) -> None:
        """Validate the head that a linear probe fitted, as epoch 0, which may remain the best."""
        self.save_first()
        progress = self.logger.open_progress(-1, 0)
        progress.close()
        measured = self.validate(self.run, self.evaluation, len(self.splits.val), self.averaged)
        self.epoch = -1
        self.finish_epoch(measured, progress)

    def restore(self, state: CheckpointState) -> None:
        """Continue from a checkpoint whose tensors are loaded."""
        state.require_same_data(self.data, remedy=train_on(self.folder))
        self.epoch, self.part = state.epoch, dict(state.part)
        self.callbacks.stopped = str(self.part.pop("stopped", ""))
        self.checkpoints.resume(state)
        state.restore(self.run)
        # callbacks may read that of the last step
        set_lr(self.run.optimizer, self.run.lr_at(max(self.run.step - 1, 0)))

    def close(self) -> None:
        """Stop loader processes and close files."""
        for opened in (self.checkpoints, self.training, self.evaluation, self.logger):
            opened.close()

    def run_all(self) -> TrainingResult:
        """Train the remaining epochs."""
        run, training = self.run, self.run.config.training
        self.settled = (time.monotonic(), run.step)
        room = math.inf if self.budget is None else self.budget.ends - self.settled[0]
        left = steps_left(
            run.config,
            step=run.step,
            steps_per_epoch=self.steps,
            val_images=len(self.splits.val),
        )
        growing = training.start_image_size is not None
        self.remaining = TimeRemaining(left, most=room, growing=growing)
        if encodes_tiles_once(run.config) and self.epoch < training.epochs:
            self.encode_tiles()
        while self.epoch < run.config.training.epochs and not self.stopped_early():
            with self.saving_at_bad_images():
                progress = self.run_epoch()
                self.save_first()
                measured = self.validate(run, self.evaluation, len(self.splits.val), self.averaged)
            self.finish_epoch(measured, progress)
            if not self.callbacks.stopped:
                self.keep_to_time()
        self.checkpoints.wait()
        self.training.close()
        soup = self.average_best_checkpoints() if training.soup else None
        self.evaluation.close()
        run.accelerator.wait_for_everyone()
        chosen = soup or self.best.first
        self.logger.end(
            chosen,
            images=chosen.get("val_images", len(self.splits.val)),
            routers=self.best.first.get("routers", ()),
        )
        measures = self.splits.test and self.report and not run.config.training.pretrains
        tested = self.measure_test() if measures else {}
        if run.accelerator.is_main_process and self.report:
            epoch = self.best.first["epoch"]
            self.logger.new_source(finish_run(run, self.folder, self.splits, epoch=epoch))
        result = TrainingResult(
            folder=self.folder,
            classes=self.outputs,
            epoch=self.best.first["epoch"],
            val_top1=chosen.get("val_top1"),
            scores={n.removeprefix("val_"): v for n, v in chosen.items() if n.startswith("val_")},
            test_scores=tested,
            failed=run.failed,
        )
        self.callbacks.call("at_end", result)
        return result

    def encode_tiles(self) -> None:
        """Compute the features of all tiles, on which epochs then train and validate."""
        run, samples = self.run, [*self.splits.train, *self.splits.val]
        loader, features = evaluation_loader(run, samples), dict[str, Tensor]()
        run.model.eval()
        shown = None if run.accelerator.is_main_process else True
        with contextlib.closing(loader), torch.no_grad(), self.saving_at_bad_images():
            batches = iter(loader)
            for _ in trange(loader.max_batches, desc="features", leave=False, disable=shown):
                batch = next(batches, loader.empty_batch)
                images = batch.images.to(run.accelerator.device, non_blocking=True)
                bags = run.encode_tiles(images).cpu() if len(images) else ()
                paths = [samples[index].path for index in batch.indices.tolist()]
                features |= run.gather([*zip(paths, bags, strict=True)])
                if run.gather(batch.failed):
                    run.exclude_unreadable(batch.failed)
                self.stop_on_signal(agreed_signal(run.accelerator, run.interruption.number))
        run.tile_features = TileFeatures(features, run.failed)
        size = format_bytes(sum(bag.nbytes for bag in features.values()))
        what = f"tiles of {plural(len(features), 'image')} are encoded once, without augmentation"
        self.logger.notify(f"note: {what}; their features take {size} of memory")
        self.training = training_loader(run, self.splits.train)
        self.evaluation = evaluation_loader(run, self.splits.val)

    def keep_to_time(self) -> None:
        """Adapt the number of remaining steps to the time budget, in the cooldown."""
        run, step, budget, rate = self.run, self.run.step, self.budget, self.run.lr_at
        if budget is None or not isinstance(rate, WarmupStableDecay):
            return
        (began, first), now = self.settled, time.monotonic()
        if step <= run.frozen_steps:  # whose steps are cheaper
            self.settled = (now, step)
        first_measured = max(rate.start, run.frozen_steps + 1)
        if step < first_measured:  # all until the cooldown is one measurement
            return
        self.settled = (now, step)
        if not first < step < self.total_steps:
            return
        expected = budget.costs.between(run.config, self.steps, first, step)
        if not first:  # with the start of the loaders
            expected += budget.costs.start
        if step % self.steps:  # in the last epoch, whose validation has not been
            expected -= budget.costs.validation + budget.costs.saving
        self.settle(budget, rate, (now - began) / expected)

    def settle(self, budget: TimeBudget, rate: WarmupStableDecay, pace: float) -> None:
        """Settle the number of steps at a `pace`, as a share of what was expected."""
        run, training, before = self.run, self.run.config.training, self.total_steps
        pace = max_over_processes(run.accelerator, pace)
        config = settle_steps(run.config, rate, budget, self.steps, run.step, pace, run.accelerator)
        if run.accelerator.is_main_process:
            write_config(self.folder, config)
        run.config = config
        run.lr_at = learning_rate(config.training, epoch_steps=self.steps, total=self.total_steps)
        if config.training.epochs != training.epochs:
            self.training.close()
            self.training = training_loader(run, self.splits.train)
        if abs(self.total_steps - before) > NOTED_CHANGE * before:
            self.logger.notify(
                f"note: {self.total_steps:,} steps instead of {before:,} fill the time"
            )

    def run_epoch(self) -> Progress:
        """Make the remaining steps of the epoch."""

        def end() -> int:
            last = min((self.epoch + 1) * self.steps, self.total_steps)
            return min(last, run.step) if self.callbacks.stopped else last

        def after_step(seen: Step) -> None:
            self.after_step(seen)
            rate, at = run.lr_at, run.config.training.cooldown_steps
            settles = at and isinstance(rate, WarmupStableDecay) and run.step == rate.start + at[-1]
            if settles and run.step < end():
                self.keep_to_time()
                progress.resize(progress.done + (end() - run.step) * run.config.data.batch_size)

        run, done = self.run, self.run.step - self.epoch * self.steps
        batches: Iterator[Batch] = iter(())
        if left := end() - run.step:  # else, as in a probe, no loader process need start
            batches = self.training.epoch(self.epoch, done)
        progress = self.logger.open_progress(self.epoch, left * run.config.data.batch_size)
        train_one_epoch(
            run,
            batches,
            epoch=self.epoch,
            end=end,
            progress=progress,
            due=self.checkpoints.due,
            after_step=after_step,
        )
        progress.close()
        return progress

    def after_step(self, seen: Step) -> None:
        """Record a step, save a checkpoint if one is due, and stop on a signal."""
        self.part["loss_sum"] += seen.loss * seen.images
        self.part["images"] += seen.images
        self.logger.step(self.epoch, seen)
        self.callbacks.call("after_step", seen)
        if line := self.remaining.step():
            self.logger.notify(line)
        often = self.run.config.run.checkpoint_steps
        if seen.due or (often and self.run.step % often == 0):
            self.save()
        self.stop_on_signal(seen.signal)

    def validate(
        self,
        run: TrainingContext,
        loader: EvaluationLoader,
        expected: int,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Validation:
        """Measure the network, or stop on a signal."""
        measured = validate(run, loader, expected, weights)
        self.stop_on_signal(agreed_signal(run.accelerator, run.interruption.number))
        assert measured is not None
        return measured

    def stop_on_signal(self, signal: int) -> None:
        """Save a checkpoint and raise, if `signal` is not 0."""
        if signal:
            self.save_and_wait()
            raise Interrupted(
                f"interrupted at step {self.run.step} of {self.total_steps}; continue with "
                f"{self.resume_command()}",
                signal,
            )

    @contextlib.contextmanager
    def saving_at_bad_images(self) -> Iterator[None]:
        """Save a checkpoint before an unreadable image stops the run."""
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
        """The command that resumes the run."""
        command, folder = self.resumed_by
        return f"{command} --resume {flags}--out {quoted(folder)}"

    def save_and_wait(self) -> None:
        """Write a checkpoint on all processes; a launcher ends all when the first one exits."""
        self.save()
        self.checkpoints.wait()
        self.run.accelerator.wait_for_everyone()

    def finish_epoch(self, measured: Validation, progress: Progress) -> None:
        """Record an epoch, and save a checkpoint and its weights if they are among the best."""
        train_loss = self.part["loss_sum"] / max(self.part["images"], 1)
        event = self.logger.epoch_event(self.epoch + 1, train_loss, measured, progress)
        kept = self.best.add(event)
        self.part, self.epoch = {"images": 0, "loss_sum": 0.0}, self.epoch + 1
        self.logger.epoch(event, measured, best=self.best.first is event)
        self.callbacks.call("after_validation", dict(event))
        self.save(kept=kept)

    @property
    def averaged(self) -> Mapping[str, Tensor] | None:
        """The averaged weights, which are validated instead of the network's own, if any."""
        return None if self.run.average is None else self.run.average.state_dict()

    def stopped_early(self) -> bool:
        """Whether a callback stopped it, or the last `patience` epochs brought no improvement."""
        if self.callbacks.stopped and not self.part["images"]:  # else its epoch is to be measured
            return True
        patience = self.run.config.training.patience
        over = (
            patience is not None
            and bool(self.best.events)
            and self.epoch - self.best.first["epoch"] >= patience
        )
        if over:
            self.logger.notify(f"note: no better epoch in {patience}: stopping early")
        return over

    def average_best_checkpoints(self) -> dict[str, Any] | None:
        """Average the weights of the best epochs, and save the average if it is better."""
        run = self.run

        def evaluate(weights: Mapping[str, Tensor]) -> Validation:
            present = run.network.state_dict()
            shards = {n: shard_like(tensor, present[n]) for n, tensor in weights.items()}
            return self.validate(run, self.evaluation, len(self.splits.val), shards)

        event, weights = average_best_epochs(self.best, evaluate)
        self.logger.soup({**event, "step": run.step})
        if run.accelerator.is_main_process:
            self.checkpoints.serialize_model(weights).write(self.folder)
        return event if event["better"] else None

    def measure_test(self) -> dict[str, Any]:
        """Measure the saved weights, once, on the test images, by which nothing was chosen."""
        network = load_run(self.folder).model.to(self.run.accelerator.device)
        run = dataclasses.replace(self.run, network=network, model=network, tile_features=None)
        loader = evaluation_loader(run, self.splits.test)
        with contextlib.closing(loader), self.saving_at_bad_images():
            measured = self.validate(run, loader, len(self.splits.test))
        self.logger.test(measured)
        return {name.removeprefix("val_"): score for name, score in measured.scores.items()}

    def save_first(self) -> None:
        """Write a checkpoint if the run has none, so that one is there before its first weights."""
        if not self.checkpoints.has_checkpoint:
            self.save()

    def save(self, *, kept: bool = False) -> None:
        """Write a checkpoint, and the weights of the epoch that ended if they are `kept`."""
        why = self.callbacks.stopped
        part = {**self.part, "stopped": why} if why else self.part
        self.checkpoints.save(epoch=self.epoch, part=part, data=self.data, kept=kept)
