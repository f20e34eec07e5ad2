"""Checkpoint manager: writes checkpoints and the weights of the best epochs in the background.

    at a step      copy weights, average and optimiser state
    in a thread    best weights -> metrics flushed -> checkpoint -> old files deleted

With this order, every file that a checkpoint refers to is on the disk before it, whenever a run is
killed. The thread writes bytes that are already serialised: a torch computation in it would start
a second OpenMP thread pool, and steps after that were measured 25 % slower.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from vit.errors import RunError
from vit.training.checkpoint.best_epoch_soup import BestEpochs, Event
from vit.training.checkpoint.checkpoint import (
    CHECKPOINTS,
    CheckpointState,
    Snapshot,
    take_snapshot,
    write_checkpoint,
)
from vit.training.checkpoint.run_folder import WEIGHTS, clean_leftovers
from vit.training.distributed.fsdp import is_sharded
from vit.training.finetune.finetune_settings import merged_state_dict
from vit.training.logging.metrics_logger import MetricsFile
from vit.training.training_context import TrainingContext
from vit.weights.saved_model import SerializedModel, serialize_model

FIRST_MINUTES = 1.0
"""Time to the first checkpoint of a process, unless `checkpoint_minutes` is less."""


class CheckpointWriter:
    """Writes checkpoints and the weights of the best epochs, at most one at a time.

    At most one copy of the weights is therefore in memory; a disk slower than the training delays
    it.
    """

    def __init__(
        self,
        run: TrainingContext,
        folder: Path,
        classes: Sequence[str],
        best: BestEpochs,
        metrics: MetricsFile | None,
    ) -> None:
        self.run = run
        self.folder = folder
        self.classes = classes
        self.best = best
        self.metrics = metrics
        self.previous_best: Sequence[Event] = ()  # of the previous checkpoint
        self.damaged: Collection[Path] = ()  # checkpoints that cannot be read
        self.has_checkpoint = False  # whether the run has a checkpoint, pending or on the disk
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self.pending: Future[None] | None = None
        self.saved = time.monotonic()
        self.interval = min(FIRST_MINUTES, run.config.run.checkpoint_minutes)
        if metrics is not None:
            clean_leftovers(folder)

    def due(self) -> bool:
        """Whether a checkpoint is due on the main process, `checkpoint_minutes` after the last one.

        The first one is due after a minute, since the first epoch may take hours.
        """
        if self.pending is not None and self.pending.done():
            self.wait()  # which raises its error
        minutes = (time.monotonic() - self.saved) / 60
        return self.metrics is not None and minutes >= self.interval

    def resume(self, state: CheckpointState) -> None:
        """Continue from a checkpoint that was loaded."""
        self.best.events = list(state.best)
        self.previous_best, self.damaged = state.best, state.damaged
        self.has_checkpoint = True
        if self.best.events and not (self.folder / WEIGHTS).is_file():
            raise RunError(
                f"{self.folder / WEIGHTS} is missing, and epoch "
                f"{self.best.first['epoch']}, whose weights it had, is over: restore it, or start "
                "anew with --overwrite"
            )

    def save(
        self, *, epoch: int, part: Mapping[str, Any], data: dict[str, Any], kept: bool = False
    ) -> None:
        """Copy the state of the run, and write it as a checkpoint in the background."""
        run, self.has_checkpoint = self.run, True
        self.saved, self.interval = time.monotonic(), run.config.run.checkpoint_minutes
        if self.metrics is None and not is_sharded(run.accelerator):
            return
        snapshot = take_snapshot(run, keep=self.metrics is not None)
        if self.metrics is None:
            return
        state = CheckpointState.capture(
            run,
            epoch=epoch,
            part=part,
            data=data,
            metrics_bytes=self.metrics.size(),
            best=self.best.events,
        )
        is_best = kept and self.best.first["epoch"] == epoch
        packed = self.serialize_model(snapshot.weights()) if is_best else None
        self.wait()
        self.pending = self.writer.submit(self._write, snapshot, state, packed, kept=kept)

    def _write(
        self,
        snapshot: Snapshot,
        state: CheckpointState,
        packed: SerializedModel | None,
        *,
        kept: bool,
    ) -> None:
        assert self.metrics is not None
        if kept:
            self.best.save(state.epoch, snapshot.weights())
        if packed is not None:
            packed.write(self.folder)
        self.metrics.flush()
        write_checkpoint(self.folder / CHECKPOINTS, snapshot, state, self.damaged)
        self.best.prune(state.best, self.previous_best)
        self.previous_best = state.best

    def serialize_model(self, weights: Mapping[str, Tensor]) -> SerializedModel:
        """Serialise `weights` with the metadata that inference needs."""
        run = self.run
        return serialize_model(
            merged_state_dict(weights, run.config),
            config=run.config,
            classes=self.classes,
            preprocessing=run.preprocessing,
            terms=run.config.finetune.license,
            tokenizer=run.tokenizer,
            task_fields=run.task.stored_fields(run.config, self.classes),
        )

    def wait(self) -> None:
        """Wait until everything is on the disk."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the pending job and ignore its error, since another one is being raised."""
        self.writer.shutdown(wait=True)
