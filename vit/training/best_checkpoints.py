"""The best epochs of a run: which they are, their weights, and when to stop looking for better.

    RUN/best/epoch-0012.safetensors     weights of one of the best `keep_best` epochs

Which epochs are kept follows from their events alone, so a run that was killed keeps the same.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vit.training.checkpoint_metric import rank
from vit.weights.safetensors_io import explain_write_errors, read_tensors, write_tensors

BEST = "best"

Event = dict[str, Any]


def stopped_early(best_epoch: int, epoch: int, patience: int | None) -> bool:
    """Whether `patience` epochs since the best one brought nothing better, by epoch `epoch`."""
    return patience is not None and epoch - best_epoch >= patience


class BestEpochs:
    """The best epochs so far, the best one first.

    Args:
        folder: The run folder.
        keep: How many of them keep their weights; the best one's are in model.safetensors anyhow.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder / BEST
        self.keep = keep
        self.events: list[Event] = []

    @property
    def first(self) -> Event:
        """The best epoch."""
        return self.events[0]

    def offer(self, event: Event) -> bool:
        """Take in the event of an epoch; whether it is among the best, of equals the earlier."""
        self.events = sorted([*self.events, event], key=rank, reverse=True)[: self.keep]
        return any(each is event for each in self.events)

    def state(self) -> list[Event]:
        """What a checkpoint keeps of it."""
        return list(self.events)

    def restore(self, state: Sequence[Event]) -> None:
        """Go on from what a checkpoint kept."""
        self.events = list(state)

    def path(self, epoch: int) -> Path:
        """Where the weights of `epoch` are, counted from 1."""
        return self.folder / f"epoch-{epoch:04d}.safetensors"

    def save(self, epoch: int, weights: Mapping[str, Tensor]) -> None:
        """Write the weights of `epoch`, where more than the best one's are kept.

        Raises:
            RunError: They cannot be written.
        """
        if self.keep == 1:
            return
        with explain_write_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
        write_tensors(self.path(epoch), weights, {"epoch": str(epoch)})

    def load(self, epoch: int) -> dict[str, Tensor]:
        """Read what `save` wrote.

        Raises:
            WeightsError: The file is missing or damaged.
        """
        return read_tensors(self.path(epoch))[0]

    def prune(self, *needed: Sequence[Event]) -> None:
        """Delete weights of epochs in none of `needed`.

        Args:
            needed: States of the checkpoints that a run may go back to.
        """
        kept = {self.path(event["epoch"]) for state in needed for event in state}
        with explain_write_errors(self.folder):
            for path in self.folder.glob("epoch-*.safetensors"):
                if path not in kept:
                    path.unlink(missing_ok=True)
