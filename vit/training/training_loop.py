"""The training loop, readable aloud. Durations are in optimiser steps here, and only steps."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from vit.config import Config
from vit.data.captions.tokenizer import Tokenizer
from vit.data.dataset import Batch
from vit.data.image_cache import ImageCache
from vit.data.preprocessing import Preprocessing
from vit.data.random_seed import random_seed
from vit.errors import BadImage, RunError
from vit.model.patch_embed import FlexiblePatchEmbedding
from vit.model.vision_transformer import VisionTransformer
from vit.training.classification_task import Classification, Task
from vit.training.collectives import everyones
from vit.training.ema import ExponentialMovingAverage
from vit.training.fsdp import whole
from vit.training.moe_losses import router_losses
from vit.training.optimizers import set_lr
from vit.training.stop_signals import Interruption
from vit.training.training_progress import Progress

LEAST_SCALE = 1e-4


@dataclass(kw_only=True)
class TrainingState:
    """What one run carries from step to step."""

    config: Config
    accelerator: Accelerator
    network: VisionTransformer
    """The network itself, whose parameters have the names that are saved."""
    model: nn.Module
    """The same network as the devices run it: distributed, in mixed precision."""
    optimizer: Optimizer
    average: ExponentialMovingAverage | None
    preprocessing: Preprocessing
    lr_at: Callable[[int], float]
    task: Task = field(default_factory=Classification)
    tokenizer: Tokenizer | None = None
    """Of the captions, where they are learned."""
    cache: ImageCache | None = None
    """The training images decoded, where they are kept so."""
    workers: int | None = None
    """Loader processes, where nobody chose their number."""
    step: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Images left out while training, and why."""
    interruption: Interruption = field(default_factory=Interruption)
    """Where a signal to this process is noted."""

    @property
    def processes(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def dtype(self) -> torch.dtype:
        """Of images, weights and losses."""
        return torch.float64 if self.config.run.precision == "fp64" else torch.float32


class Step(NamedTuple):
    """What an optimiser step saw, the same on all processes, so that all of them decide alike."""

    loss: float
    """Mean loss of the images, without those of routers."""
    images: int
    """Images, over all processes."""
    grad_norm: float
    """Norm of the gradient of all parameters, before it was clipped."""
    lr: float
    """Learning rate of the step."""
    signal: int
    """The signal to heed, or 0."""
    due: bool
    """Whether a process wants a checkpoint."""
    routers: tuple[float, float] = (0.0, 0.0)
    """Balance loss and z loss of routers, summed over layers and before their weights; or zeros."""


def train_one_epoch(
    run: TrainingState,
    batches: Iterator[Batch],
    *,
    epoch: int,
    steps: int,
    progress: Progress,
    due: Callable[[], bool],
    after_step: Callable[[Step], None],
) -> None:
    """Make `steps` optimiser steps from `batches`.

    Args:
        run: Updated in place.
        batches: Micro-batches of this process.
        epoch: Which epoch this is, from 0.
        steps: Optimiser steps to make.
        progress: Told of every step.
        due: Asked in every step: does this process want a checkpoint?
        after_step: Called after each of them.

    Raises:
        RunError: The loss is not finite; the weights are those of the step before.
        BadImage: An image cannot be read, and `on_bad_image` is stop; likewise.
    """
    run.model.train()
    for _ in range(steps):
        started = time.perf_counter()
        micro_batches = [next(batches) for _ in range(run.config.data.micro_batches)]
        waited = time.perf_counter() - started
        step = train_one_step(run, micro_batches, epoch, due=due())
        progress.advance(step.images, step.loss * step.images, waited)
        after_step(step)


def train_one_step(
    run: TrainingState, micro_batches: list[Batch], epoch: int, *, due: bool = False
) -> Step:
    """One update of the weights from this process's share of a batch."""
    lr = run.lr_at(run.step)
    set_lr(run.optimizer, lr)
    draw_patch_size(run)
    totals = accumulate(run, micro_batches, epoch)
    norm = clip(run).to(totals)
    failed = [bad for batch in micro_batches for bad in batch.failed]
    # by one message, which is the only time that the step waits for a GPU
    loss, balance, z, norms, images, lost, wants, *signals = summed(
        run,
        torch.cat([totals, norm.view(1)]),
        [sum(len(batch.labels) for batch in micro_batches), len(failed), due],
        [run.interruption.number == number for number in Interruption.SIGNALS],
    )
    if lost:
        leave_out(run, failed)
    mean, *routers = (total / max(images, 1) for total in (loss, balance, z))
    grad_norm = norms / run.processes
    require_finite(run, mean, grad_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average is not None:
        run.average.update(run.step)
    run.step += 1
    had = zip(Interruption.SIGNALS, signals, strict=True)
    signal = next((number for number, count in had if count), 0)
    return Step(mean, int(images), grad_norm, lr, signal, wants > 0, (routers[0], routers[1]))


def draw_patch_size(run: TrainingState) -> None:
    """Choose the size of this step's patches, the same on all processes and after a resume."""
    patches, sizes = run.network.patch_embed, run.config.model.training_patch_sizes
    if isinstance(patches, FlexiblePatchEmbedding):
        drawn = random_seed(run.config.training.seed, "patch size", run.step) % len(sizes)
        patches.current_patch_size = sizes[drawn]


def accumulate(run: TrainingState, micro_batches: list[Batch], epoch: int) -> Tensor:
    """Gradients of the batch, averaged over processes.

    Returns:
        This process's summed loss, and its routers' balance and z losses likewise, (3,).
    """
    device = run.accelerator.device
    totals = torch.zeros(3, device=device, dtype=widest(device))
    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        waiting = contextlib.nullcontext() if last else run.accelerator.no_sync(run.model)
        with waiting:
            losses = losses_of(run, batch, epoch, micro_batch=index)
            # gradients are averaged over processes; the loss is a sum over the whole batch
            share = run.processes / run.config.data.batch_size
            run.accelerator.backward(objective(run, losses) * share)
        totals[: len(losses)] += losses.detach()
    return totals


def objective(run: TrainingState, losses: Tensor) -> Tensor:
    """What is minimised, from the losses that `losses_of` gives."""
    loss, *routers = losses.unbind()
    weights = (run.config.training.balance_loss, run.config.training.router_z_loss)
    return loss + sum(weight * term for weight, term in zip(weights, routers, strict=False))


def summed(run: TrainingState, totals: Tensor, *counts: Sequence[float]) -> list[float]:
    """`totals`, on their device, and `counts`, each summed over the processes, by one message."""
    flat = [number for part in counts for number in part]
    parts = torch.cat([totals, torch.tensor(flat, device=totals.device, dtype=totals.dtype)])
    numbers: list[float] = run.accelerator.reduce(parts).tolist()
    return numbers


def leave_out(run: TrainingState, failed: list[BadImage]) -> None:
    """Remember the images that no process could read.

    Raises:
        BadImage: They were to stop the run; on all processes.
    """
    found = everyones(failed)
    if run.config.data.on_bad_image == "stop":
        run.optimizer.zero_grad()
        raise BadImage(found[0].path, found[0].reason)
    run.failed.update((bad.path, bad.reason) for bad in found)


def widest(device: torch.device) -> torch.dtype:
    """The most exact floating type of `device`, for sums."""
    return torch.float32 if device.type == "mps" else torch.float64


def losses_of(
    run: TrainingState, batch: Batch, epoch: int, *, micro_batch: int, alone: bool = False
) -> Tensor:
    """Summed loss of one micro-batch and routers' losses, (1,) or (3,).

    Its randomness comes from counters alone. Routers exchange numbers with the other processes,
    unless this one is `alone`.
    """
    config, rank = run.config, run.accelerator.process_index
    torch.manual_seed(random_seed(config.training.seed, "model", run.step, micro_batch, rank))
    device = run.accelerator.device
    images = run.preprocessing.normalise(batch.images.to(device, non_blocking=True), run.dtype)
    loss = run.task.loss(run, batch, images, epoch)
    if config.model.feedforward != "moe":
        return loss
    everyone = None if alone else run.accelerator
    routers = router_losses(everyone, run.network, images=len(batch.labels))
    return torch.cat([loss, routers.to(loss)])


def clip(run: TrainingState) -> Tensor:
    """Shorten the gradient to the largest norm allowed; returns its norm before."""
    most = run.config.training.clip_grad or math.inf
    norm: Tensor = run.accelerator.clip_grad_norm_(run.network.parameters(), most)
    return whole(norm)


def require_finite(run: TrainingState, loss: float, norm: float) -> None:
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
