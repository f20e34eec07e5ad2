"""What the network is worth on the validation pictures, each of them counted once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.data.loading import Batch, EvaluationLoader
from vit.errors import BadImage, DataError, RunError
from vit.training.agreement import agreed_signal
from vit.training.ema import exchanged
from vit.training.loop import Training, forward, leave_out, summed, widest
from vit.training.routing import watched


@dataclass(frozen=True)
class Validation:
    """What the validation pictures say of the network."""

    count: int
    loss: float
    top1: float
    failed: int
    routers: tuple[dict[str, Any], ...] = ()
    """How evenly the experts are used, an entry a layer of them."""


@torch.no_grad()
def validate(
    run: Training,
    loader: EvaluationLoader,
    expected: int,
    weights: Mapping[str, Tensor] | None = None,
) -> Validation | None:
    """Measure the network on every validation picture exactly once, over all processes.

    Args:
        run: What is trained.
        loader: This process's share of the pictures.
        expected: How many pictures there are, over all processes.
        weights: Measured instead of the network's own, by name.

    Returns:
        None where a signal came to any process: nothing was measured.

    Raises:
        BadImage: A picture cannot be read, and `on_bad_image` is stop.
        DataError: None can be read.
        RunError: The loss is not finite.
    """
    run.model.eval()
    device, batches = run.accelerator.device, iter(loader)
    sums = torch.zeros(3, dtype=torch.float64)
    failed: list[BadImage] = []
    with exchanged(run.network, weights), watched(run.network) as routers:
        # the same number of passes on all processes: they may exchange weights in each
        for _ in range(loader.rounds):
            batch = next(batches, loader.empty)
            failed += batch.failed
            sums += measure(run, batch)
            if routers is not None:
                routers.add(len(batch.labels))
            if agreed_signal(run.accelerator, run.interruption.number):
                return None
        usage = () if routers is None else tuple(routers.describe(run.accelerator))
    loss_sum, correct, count, lost = summed(run, sums.to(device, widest(device)), [len(failed)])
    assert count + lost == expected, f"{count:.0f} of {expected} validation pictures were measured"
    if lost:
        leave_out(run, failed)
    if not count:
        raise DataError("not one validation picture can be read")
    if not math.isfinite(loss_sum):
        raise RunError(
            f"the validation loss became {loss_sum / count} after step {run.step}: lower --lr, or "
            "raise --warmup-epochs"
        )
    return Validation(int(count), loss_sum / count, correct / count, int(lost), usage)


def measure(run: Training, batch: Batch) -> Tensor:
    """Summed loss, number of right answers and number of pictures of one batch, float64, (3,)."""
    images = batch.images.to(run.accelerator.device, non_blocking=True)
    logits = forward(run, run.preprocessing.normalise(images, run.dtype)).to(run.dtype).cpu()
    loss = F.cross_entropy(logits, batch.labels, reduction="sum")
    correct = (logits.argmax(dim=1) == batch.labels).sum()
    return torch.stack([loss.double(), correct.double(), torch.tensor(len(logits)).double()])
