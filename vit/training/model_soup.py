"""A soup: the average of those of a run's best epochs that are better together.

    soup <- {best epoch};  for each other, the better first:
        soup <- soup + {it}   if the average does not get worse on the validation images

Source: Wortsman et al., "Model soups", recipe 1, arXiv:2203.05482; of epochs instead of runs.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from vit.training.best_checkpoints import BestEpochs, Event
from vit.training.checkpoint import require_same
from vit.training.checkpoint_metric import rank
from vit.training.validation import Validation

Measure = Callable[[Mapping[str, Tensor]], Validation | None]


def make_soup(best: BestEpochs, measure: Measure) -> tuple[Event, dict[str, Tensor]] | None:
    """Average the best epochs as far as that does not make them worse.

    All processes read the same files, so they come to the same soup.

    Args:
        best: At least one epoch, with the weights of all.
        measure: What weights are worth; None where a signal came.

    Returns:
        The event of the soup, and the weights that the run is to answer with: the soup's where it
        is better than the best epoch, which is then `event["better"]`, else the best epoch's. None
        where a signal came.

    Raises:
        WeightsError: Weights of an epoch are missing or damaged, or of another network.
    """
    members, chosen = [best.first["epoch"]], best.load(best.first["epoch"])
    event = {n: v for n, v in best.first.items() if n.startswith("val_") or n == "chosen_by"}
    for candidate in best.events[1:]:
        tried = [*members, candidate["epoch"]]
        parts = [best.load(epoch) for epoch in tried]
        require_same(best.path(candidate["epoch"]), "the best epoch", parts[-1], parts[0])
        weights = average(parts)
        measured = measure(weights)
        if measured is None:
            return None
        scores = measured.scores
        if rank(scores) >= rank(event):
            members, chosen, event = tried, weights, scores
    better = len(members) > 1 and rank(event) > rank(best.first)
    if not better:
        chosen = best.load(best.first["epoch"])
    return {"event": "soup", "epochs": sorted(members), **event, "better": better}, chosen


def average(weights: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each tensor over `weights`, summed in float64, in its own type."""
    return {
        name: torch.stack([each[name].double() for each in weights]).mean(dim=0).to(tensor.dtype)
        for name, tensor in weights[0].items()
    }
