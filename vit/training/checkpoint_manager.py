"""What a run keeps on the disk while it goes on: checkpoints, and the weights of its best epochs.

    at a step     copy weights, average and optimiser state
    meanwhile     best weights -> metrics flushed -> checkpoint -> old files deleted

In this order a run that is killed at any moment finds, beside its newest whole checkpoint, all the
files that this checkpoint speaks of.

The best epochs of a run: which they are, their weights, and when to stop looking for better.

    RUN/best/epoch-0012.safetensors     weights of one of the best `keep_best` epochs

Which epochs are kept follows from their events alone, so a run that was killed keeps the same.
Files written while training goes on, one after the other, in the order they were asked for.

What is written is bytes already: a computation of torch in this thread would leave OpenMP with a
second team of threads, and with more threads than cores it makes every later step wait differently:
25 % slower ones were measured, long after the file was written.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from vit.errors import RunError, printable
from vit.training.best_checkpoints import BestEpochs, Event
from vit.training.checkpoint import CHECKPOINTS, Snapshot, take_snapshot, write_checkpoint
from vit.training.finetuning import merged_state_dict
from vit.training.fsdp import is_sharded
from vit.training.run_folder import WEIGHTS, Metrics
from vit.training.training_loop import TrainingState
from vit.weights.saved_model import SerializedModel, serialize_model


class Writer:
    """One thread that writes; at most one piece of work waits for it.

    So a run holds one copy of its weights for the disk, and a disk that is slower than the training
    holds it up instead of filling the memory.
    """

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self.pending: Future[None] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Let `work` be done once what was asked for earlier is.

        Raises:
            VitError: The earlier work failed.
        """
        self.wait()
        self.pending = self.thread.submit(work)

    def check(self) -> None:
        """Raise what finished work failed with; waits for nothing."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when everything is on the disk.

        Raises:
            VitError: It could not be written.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Let the work in hand end; what it fails with is not said, an error is on its way."""
        self.thread.shutdown(wait=True)


class CheckpointManager:
    """Writes checkpoints and the weights of the best epochs.

    Args:
        run: What is trained.
        folder: The run folder.
        classes: Names of the classes.
        best: The best epochs so far.
        metrics: Of the main process; None elsewhere.
    """

    def __init__(
        self,
        run: TrainingState,
        folder: Path,
        classes: Sequence[str],
        best: BestEpochs,
        metrics: Metrics | None,
    ) -> None:
        self.run = run
        self.folder = folder
        self.classes = classes
        self.best = best
        self.metrics = metrics
        self.before: Sequence[Event] = ()  # best epochs of the checkpoint before
        self.damaged: Sequence[Path] = ()  # checkpoints that count for nothing
        self.writer = Writer()
        self.saved = time.monotonic()

    def due(self) -> bool:
        """Whether the last checkpoint is too old, by the main process's clock.

        Raises:
            RunError: The last one could not be written.
        """
        self.writer.check()
        minutes = (time.monotonic() - self.saved) / 60
        return self.metrics is not None and minutes >= self.run.config.run.checkpoint_minutes

    def save(self, state: Mapping[str, Any], *, epoch: int | None = None) -> None:
        """Copy what a checkpoint holds, and let it be written.

        Args:
            state: What the checkpoint says beside its tensors.
            epoch: An epoch that has just become one of the best, from 1.

        Raises:
            RunError: The checkpoint before could not be written.
        """
        run = self.run
        self.saved = time.monotonic()
        if self.metrics is None and not is_sharded(run.accelerator):
            return
        snapshot = take_snapshot(
            run.network, run.optimizer, run.average, keep=self.metrics is not None
        )
        if self.metrics is None:
            return
        state = {**state, "metrics_bytes": self.metrics.size(), "best": self.best.state()}
        is_best = epoch is not None and self.best.first["epoch"] == epoch
        packed = self.serialize_model(snapshot.weights()) if is_best else None
        self.writer.submit(lambda: self._write(snapshot, state, epoch, packed))

    def _write(
        self,
        snapshot: Snapshot,
        state: Mapping[str, Any],
        epoch: int | None,
        packed: SerializedModel | None,
    ) -> None:
        assert self.metrics is not None
        if epoch is not None:
            self.best.save(epoch, snapshot.weights())
        if packed is not None:
            packed.write(self.folder)
        self.metrics.flush()
        write_checkpoint(self.folder / CHECKPOINTS, snapshot, state, self.damaged)
        self.best.prune(state["best"], self.before)
        self.before = state["best"]

    def save_model(self, weights: Mapping[str, Tensor]) -> None:
        """Make `weights` those that the run answers with."""
        self.serialize_model(weights).write(self.folder)

    def serialize_model(self, weights: Mapping[str, Tensor]) -> SerializedModel:
        """`weights` with what predicting needs beside them."""
        run = self.run
        return serialize_model(
            merged_state_dict(weights, run.config),
            config=run.config,
            classes=self.classes,
            preprocessing=run.preprocessing,
            terms=run.config.finetune.license,
            tokenizer=run.tokenizer,
        )

    def require_model(self) -> None:
        """Refuse to go on where the best weights so far are gone.

        Raises:
            RunError: model.safetensors is missing.
        """
        if self.best.events and not (self.folder / WEIGHTS).is_file():
            raise RunError(
                f"{printable(self.folder / WEIGHTS)} is missing, and epoch "
                f"{self.best.first['epoch']}, whose weights it had, is over: restore it, or start "
                "anew with --overwrite"
            )

    def wait(self) -> None:
        """Return when everything is on the disk.

        Raises:
            RunError: It could not be written.
        """
        self.writer.wait()

    def close(self) -> None:
        """Let the writing in hand end."""
        self.writer.close()
