"""The training loop, readable aloud. Durations are in optimiser steps here, and only steps."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from vit.config import Config
from vit.data.loading import Batch
from vit.data.mixing import draw_plan, mix
from vit.data.preprocessing import Preprocessing
from vit.data.seeding import random_seed
from vit.errors import BadImage, RunError
from vit.model.classifier import VisionTransformer
from vit.training.ema import MovingAverage
from vit.training.losses import smoothed_cross_entropy
from vit.training.optimization import set_lr
from vit.training.progress import Progress


@dataclass(kw_only=True)
class Training:
    """What one run carries from step to step."""

    config: Config
    accelerator: Accelerator
    network: VisionTransformer
    """The network itself, whose parameters have the names that are saved."""
    model: nn.Module
    """The same network as the devices run it: distributed, in mixed precision."""
    optimizer: Optimizer
    average: MovingAverage | None
    preprocessing: Preprocessing
    lr_at: Callable[[int], float]
    step: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Pictures left out while training, and why."""

    @property
    def processes(self) -> int:
        return int(self.accelerator.num_processes)


def train_one_epoch(
    run: Training,
    batches: Iterator[Batch],
    *,
    epoch: int,
    steps: int,
    progress: Progress,
    after_step: Callable[[float, int], None],
) -> None:
    """Make `steps` optimiser steps from `batches`.

    Args:
        run: Updated in place.
        batches: Micro-batches of this process, `accumulate` of them a step.
        epoch: Which epoch this is, from 0.
        steps: Optimiser steps to make.
        progress: Told of every step.
        after_step: Called with the summed loss and the number of pictures of each step.

    Raises:
        RunError: The loss is not finite; the weights are those of the step before.
    """
    run.model.train()
    for _ in range(steps):
        started = time.perf_counter()
        micro_batches = [next(batches) for _ in range(run.config.data.accumulate)]
        waited = time.perf_counter() - started
        loss_sum, images = train_one_step(run, micro_batches, epoch)
        progress.advance(images, loss_sum, waited)
        after_step(loss_sum, images)


def train_one_step(run: Training, micro_batches: list[Batch], epoch: int) -> tuple[float, int]:
    """One update of the weights from this process's share of a batch.

    Returns:
        Summed loss and number of pictures, over all processes.
    """
    set_lr(run.optimizer, run.lr_at(run.step))
    sums = torch.zeros(2, device=run.accelerator.device)
    for index, batch in enumerate(micro_batches):
        run.failed.update((bad.path, bad.reason) for bad in batch.failed)
        last = index == len(micro_batches) - 1
        waiting = contextlib.nullcontext() if last else run.accelerator.no_sync(run.model)
        with waiting:
            loss = loss_of(run, batch, epoch, micro_batch=index)
            # gradients are averaged over processes; the loss is a sum over the whole batch
            share = run.processes / run.config.data.batch_size
            run.accelerator.backward(loss * share)
        sums += torch.stack([loss.detach(), loss.new_tensor(len(batch.labels))])
    norm = clip(run)
    loss_sum, images = run.accelerator.reduce(sums).tolist()
    require_finite(run, loss_sum / max(images, 1), float(norm))
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average is not None:
        run.average.update(run.step)
    run.step += 1
    return loss_sum, int(images)


def loss_of(run: Training, batch: Batch, epoch: int, *, micro_batch: int) -> Tensor:
    """Summed loss of one micro-batch; its randomness comes from counters alone."""
    config, rank = run.config, run.accelerator.process_index
    torch.manual_seed(random_seed(config.training.seed, "model", run.step, micro_batch, rank))
    device = run.accelerator.device
    images = run.preprocessing.normalise(batch.images.to(device, non_blocking=True))
    labels = batch.labels.to(device, non_blocking=True)
    targets = F.one_hot(labels, config.model.num_classes).to(images.dtype)
    plan = draw_plan(
        config.augment,
        seed=config.training.seed,
        epoch=epoch,
        step=run.step,
        batch_size=config.data.batch_size,
    )
    images, targets = mix(images, targets, batch.positions, plan)
    logits = run.model(images)
    return smoothed_cross_entropy(logits, targets, smoothing=config.training.smoothing)


def clip(run: Training) -> Tensor:
    """Shorten the gradient to the largest norm allowed; returns its norm before."""
    most = run.config.training.clip_grad or math.inf
    norm: Tensor = run.accelerator.clip_grad_norm_(run.network.parameters(), most)
    return norm


def require_finite(run: Training, loss: float, norm: float) -> None:
    """Stop before the weights are touched; every process sees the same numbers.

    With fp16 an infinite gradient is everyday: the scaler skips that step by itself.
    """
    scaled = run.accelerator.mixed_precision == "fp16"
    if math.isfinite(loss) and (scaled or math.isfinite(norm)):
        return
    what = f"the loss became {loss}" if not math.isfinite(loss) else f"the gradient became {norm}"
    raise RunError(
        f"{what} at step {run.step}: nothing of it was saved; lower --lr, raise --warmup-epochs or "
        "use --precision fp32"
    )


@dataclass(frozen=True)
class Validation:
    """What the validation pictures say of the network."""

    count: int
    loss: float
    top1: float
    failed: tuple[BadImage, ...]


@torch.no_grad()
def validate(run: Training, batches: Iterator[Batch], expected: int) -> Validation:
    """Measure the network on every validation picture exactly once, over all processes.

    Args:
        run: The average of the weights is measured where one is kept.
        batches: This process's share of the pictures.
        expected: How many pictures there are, over all processes.
    """
    run.model.eval()
    averaged = contextlib.nullcontext() if run.average is None else run.average.in_place()
    sums = torch.zeros(4, dtype=torch.float64)
    failed: list[BadImage] = []
    with averaged:
        for batch in batches:
            failed += batch.failed
            images = batch.images.to(run.accelerator.device, non_blocking=True)
            logits = run.model(run.preprocessing.normalise(images)).float().cpu()
            loss = F.cross_entropy(logits, batch.labels, reduction="sum")
            correct = (logits.argmax(dim=1) == batch.labels).sum()
            sums += torch.stack([loss, correct, loss.new_tensor(len(logits)), loss.new_tensor(0)])
    sums[3] = len(failed)
    on_device = sums.float() if run.accelerator.device.type == "mps" else sums
    total = run.accelerator.reduce(on_device.to(run.accelerator.device)).tolist()
    loss_sum, correct_sum, count, lost = total
    assert count + lost == expected, f"{count:.0f} of {expected} validation pictures were measured"
    top1 = correct_sum / max(count, 1)
    return Validation(int(count), loss_sum / max(count, 1), top1, tuple(failed))
