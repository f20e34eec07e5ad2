"""Validation: scores of the network on the validation images, each counted once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vit.data.dataloader import EvaluationLoader
from vit.errors import BadImage, DataError, RunError
from vit.training.distributed.collectives import agreed_signal, all_reduce, widest_float
from vit.training.ema import swapped_weights
from vit.training.moe_losses import track_expert_usage
from vit.training.training_context import TrainingContext


@dataclass(frozen=True)
class Validation:
    """Results of one validation."""

    count: int
    scores: dict[str, Any]
    """Scores as the epoch's event has them: `val_loss`, and `val_top1` or those of the task."""
    failed: int
    """Images that could not be read."""
    routers: tuple[dict[str, Any], ...] = ()
    """Expert usage, one entry per MoE layer."""

    @property
    def loss(self) -> float:
        return float(self.scores["val_loss"])


@torch.no_grad()
def validate(
    run: TrainingContext,
    loader: EvaluationLoader,
    expected: int,
    weights: Mapping[str, Tensor] | None = None,
) -> Validation | None:
    """Evaluate each validation image exactly once, over all processes; None after a signal."""
    run.model.eval()
    device, batches = run.accelerator.device, iter(loader)
    tally = run.task.tally(loader.samples)
    failed: list[BadImage] = []
    with swapped_weights(run.network, weights), track_expert_usage(run.network) as routers:
        # every process makes the same number of passes: under FSDP each gathers weights
        for _ in range(loader.max_batches):
            batch = next(batches, loader.empty_batch)
            failed += batch.failed
            images = batch.images.to(device, non_blocking=True)
            tally.add(run, batch, run.encode_tiles(images))
            if routers is not None:
                routers.add(len(batch.labels))
            if agreed_signal(run.accelerator, run.interruption.number):
                return None
        usage = () if routers is None else tuple(routers.describe(run.accelerator))
    sums = tally.sums.to(device, widest_float(device))
    *totals, lost = all_reduce(run.accelerator, sums, [len(failed)])
    count = totals[-1]
    assert count + lost == expected, f"{count:.0f} of {expected} validation images were measured"
    if lost:
        run.exclude_unreadable(failed)
    if not count:
        raise DataError("not one validation image can be read")
    measured = Validation(int(count), tally.scores(run, totals), int(lost), usage)
    if not math.isfinite(measured.loss):
        raise RunError(
            f"the validation loss became {measured.loss} after step {run.step}: lower --lr, or "
            "raise --warmup-epochs"
        )
    return measured
