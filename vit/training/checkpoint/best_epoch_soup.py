"""The best epochs of a run, their weights on the disk, and the average of them (model soup).

    RUN/best/epoch-0012.safetensors     weights of one of the best `keep_best` epochs

The choice depends only on the epochs' events, so a resumed run keeps the same files.

    soup <- {best epoch};  for each other, the better first:
        soup <- soup + {it}   if the average is not worse on the validation images

Source: Wortsman et al., "Model soups", recipe 1, arXiv:2203.05482; of epochs instead of runs.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vit.atomic_files import explain_write_errors
from vit.training.checkpoint.run_folder import BEST
from vit.training.validation import Validation
from vit.weights.model_soup import average_weights
from vit.weights.safetensors_io import read_tensors, write_tensors

Event = dict[str, Any]
Rank = Callable[[Mapping[str, Any]], tuple[float, float]]
Evaluate = Callable[[Mapping[str, Tensor]], Validation]


class BestEpochs:
    """The best epochs so far, the best one first."""

    def __init__(self, folder: Path, keep: int, rank: Rank) -> None:
        self.folder = folder / BEST
        self.keep = keep
        self.rank = rank
        self.events: list[Event] = []

    @property
    def first(self) -> Event:
        """The best epoch."""
        return self.events[0]

    def add(self, event: Event) -> bool:
        """Add the event of an epoch; returns whether it is among the best (ties: the earlier)."""
        self.events = sorted([*self.events, event], key=self.rank, reverse=True)[: self.keep]
        return any(each is event for each in self.events)

    def path(self, epoch: int) -> Path:
        """File with the weights of `epoch`, from 1."""
        return self.folder / f"epoch-{epoch:04d}.safetensors"

    def save(self, epoch: int, weights: Mapping[str, Tensor]) -> None:
        """Write the weights of `epoch`, if more than the best epoch is kept."""
        if self.keep == 1:
            return
        with explain_write_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
        write_tensors(self.path(epoch), weights, {"epoch": str(epoch)})

    def load(self, epoch: int) -> dict[str, Tensor]:
        """Read what `save` wrote."""
        return read_tensors(self.path(epoch))[0]

    def prune(self, *needed: Sequence[Event]) -> None:
        """Delete the weights of epochs that no checkpoint's best epochs, `needed`, contain."""
        kept = {self.path(event["epoch"]) for state in needed for event in state}
        with explain_write_errors(self.folder):
            for path in self.folder.glob("epoch-*.safetensors"):
                if path not in kept:
                    path.unlink(missing_ok=True)


def average_best_epochs(best: BestEpochs, evaluate: Evaluate) -> tuple[Event, dict[str, Tensor]]:
    """Greedily average the weights of the best epochs, and return its event and the weights to
    save.

    Every process reads the same files, so all of them return the same average. The best epoch's
    weights are saved unless the average is better (`event["better"]`).
    """
    members, chosen = [best.first["epoch"]], best.load(best.first["epoch"])
    event = {n: v for n, v in best.first.items() if n.startswith("val_") or n == "chosen_by"}
    for candidate in best.events[1:]:
        tried = [*members, candidate["epoch"]]
        weights = average_weights(map(best.load, tried))
        measured = evaluate(weights)
        scores = {**measured.scores, "val_images": measured.count}  # as in an epoch's event
        if best.rank(scores) >= best.rank(event):
            members, chosen, event = tried, weights, scores
    better = len(members) > 1 and best.rank(event) > best.rank(best.first)
    if not better:
        chosen = best.load(best.first["epoch"])
    return {"event": "soup", "epochs": sorted(members), **event, "better": better}, chosen
