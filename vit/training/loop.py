"""The training loop, readable aloud. Durations are in optimiser steps here, and only steps."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from signal import SIGINT, SIGTERM
from typing import NamedTuple

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
from vit.errors import BadImage, DataError, RunError
from vit.model.classifier import VisionTransformer
from vit.training.agreement import gathered
from vit.training.ema import MovingAverage
from vit.training.interruption import Interruption
from vit.training.losses import smoothed_cross_entropy
from vit.training.optimization import set_lr
from vit.training.progress import Progress

LEAST_SCALE = 1e-4


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
    interruption: Interruption | None = None
    """Where a signal is noted."""

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
    after_step: Callable[["StepSums"], None],
) -> None:
    """Make `steps` optimiser steps from `batches`.

    Args:
        run: Updated in place.
        batches: Micro-batches of this process, `accumulate` of them a step.
        epoch: Which epoch this is, from 0.
        steps: Optimiser steps to make.
        progress: Told of every step.
        after_step: Called after each of them.

    Raises:
        RunError: The loss is not finite; the weights are those of the step before.
        BadImage: A picture cannot be read, and `on_bad_image` is stop; likewise.
    """
    run.model.train()
    for _ in range(steps):
        started = time.perf_counter()
        micro_batches = [next(batches) for _ in range(run.config.data.micro_batches)]
        waited = time.perf_counter() - started
        sums = train_one_step(run, micro_batches, epoch)
        progress.advance(int(sums.images), sums.loss, waited)
        after_step(sums)


class StepSums(NamedTuple):
    """What a step saw, summed over all processes, so that all of them decide alike."""

    loss: float
    """Summed loss of the pictures."""
    images: float
    """Pictures."""
    failed: float
    """Pictures that could not be read."""
    interrupted: float
    """Processes that have received SIGINT."""
    terminated: float
    """Processes that have received SIGTERM."""

    @property
    def signal(self) -> int:
        """The signal to heed, or 0."""
        return SIGTERM if self.terminated else SIGINT if self.interrupted else 0


def train_one_step(run: Training, micro_batches: list[Batch], epoch: int) -> StepSums:
    """One update of the weights from this process's share of a batch."""
    set_lr(run.optimizer, run.lr_at(run.step))
    device = run.accelerator.device
    total = torch.zeros((), device=device, dtype=widest(device))
    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        waiting = contextlib.nullcontext() if last else run.accelerator.no_sync(run.model)
        with waiting:
            loss = loss_of(run, batch, epoch, micro_batch=index)
            # gradients are averaged over processes; the loss is a sum over the whole batch
            share = run.processes / run.config.data.batch_size
            run.accelerator.backward(loss * share)
        total += loss.detach()
    norm = clip(run)
    failed = [bad for batch in micro_batches for bad in batch.failed]
    signal = run.interruption.number if run.interruption else 0
    counts = [sum(len(batch.labels) for batch in micro_batches), len(failed)]
    counts += [signal == SIGINT, signal == SIGTERM]
    parts = torch.cat([total[None], torch.tensor(counts, device=device, dtype=total.dtype)])
    sums = StepSums(*run.accelerator.reduce(parts).tolist())
    if sums.failed:
        leave_out(run, failed)
    require_finite(run, sums.loss / max(sums.images, 1), float(norm))
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average is not None:
        run.average.update(run.step)
    run.step += 1
    return sums


def leave_out(run: Training, failed: list[BadImage]) -> None:
    """Remember the pictures that no process could read.

    Raises:
        BadImage: They were to stop the run; on all processes.
    """
    everyones = gathered(failed)
    if run.config.data.on_bad_image == "stop":
        run.optimizer.zero_grad()
        raise BadImage(everyones[0].path, everyones[0].reason)
    run.failed.update((bad.path, bad.reason) for bad in everyones)


def widest(device: torch.device) -> torch.dtype:
    """The most exact floating type of `device`, for sums."""
    return torch.float32 if device.type == "mps" else torch.float64


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
    if scaled and run.accelerator.scaler.get_scale() < LEAST_SCALE:
        raise RunError(
            f"gradients overflow fp16 whatever their scale, at step {run.step}: lower --lr, or use "
            "--precision bf16 or fp32"
        )
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
    failed: int


@torch.no_grad()
def validate(run: Training, batches: Iterator[Batch], expected: int) -> Validation:
    """Measure the network on every validation picture exactly once, over all processes.

    Args:
        run: The average of the weights is measured where one is kept.
        batches: This process's share of the pictures.
        expected: How many pictures there are, over all processes.

    Raises:
        BadImage: A picture cannot be read, and `on_bad_image` is stop.
        DataError: None can be read.
        RunError: The loss is not finite.
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
    device = run.accelerator.device
    total = run.accelerator.reduce(sums.to(device, widest(device))).tolist()
    loss_sum, correct_sum, count, lost = total
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
    return Validation(int(count), loss_sum / count, correct_sum / count, int(lost))
