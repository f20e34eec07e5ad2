"""The training loop: forward, loss, backward, clip, step.

Every duration in this module is a number of optimiser steps.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from vit.data.dataset import Batch
from vit.data.random_seed import random_seed
from vit.errors import RunError
from vit.model.normalization import BatchNorm
from vit.model.patch_embed import FlexiblePatchEmbedding
from vit.stop_signals import Interruption
from vit.training.distributed.collectives import all_reduce, widest_float
from vit.training.distributed.fsdp import full_tensor, is_sharded
from vit.training.finetune.lora import HEAD
from vit.training.logging.training_progress import Progress, notifier
from vit.training.moe_losses import router_losses
from vit.training.optimizers import set_lr
from vit.training.training_context import Step, TrainingContext

MIN_LOSS_SCALE = 1e-4
STOP_IN_ROW, STOP_SHARE = 3, 0.01
"""Steps without a finite gradient end a training: this many in a row, or this many plus a share of
all steps in all."""


def train_one_epoch(
    run: TrainingContext,
    batches: Iterator[Batch],
    *,
    epoch: int,
    end: Callable[[], int],
    progress: Progress,
    due: Callable[[], bool],
    after_step: Callable[[Step], None],
) -> None:
    """Make optimiser steps from `batches` until `run.step` is `end()`, which is called before every
    step."""
    set_training_mode(run)
    while run.step < end():
        started = time.perf_counter()
        micro_batches = [next(batches) for _ in range(run.config.data.micro_batches)]
        waited = time.perf_counter() - started
        step = train_one_step(run, micro_batches, epoch, due=due())
        progress.advance(step.images, step.loss * step.images, waited)
        after_step(step)


def train_one_step(
    run: TrainingContext, micro_batches: list[Batch], epoch: int, *, due: bool = False
) -> Step:
    """Update the weights once, from this process's share of a batch."""
    lr = run.lr_at(run.step)
    set_lr(run.optimizer, lr)
    choose_patch_size(run)
    device = run.accelerator.device
    statistics: list[Tensor] | None = None
    may_stop = run.processes > 1 or any(batch.failed for batch in micro_batches)
    if may_stop and run.config.data.on_bad_image == "stop":  # the step is made again on resume
        statistics = [each.clone() for each in run.running_stats]
    loss_sums = torch.zeros(3, device=device, dtype=widest_float(device))
    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1  # averages gradients over processes
        with contextlib.nullcontext() if last else run.accelerator.no_sync(run.model):
            losses = forward_losses(run, batch, epoch, micro_batch=index)
            backward(run, losses)
        loss_sums[: len(losses)] += losses.detach()
    if run.step < run.frozen_steps:
        for parameter in backbone_of(run):
            parameter.grad = None  # which no optimiser moves
    grad_norm = clip_gradients(run)
    failed = [bad for batch in micro_batches for bad in batch.failed]
    images = sum(len(batch.labels) for batch in micro_batches)
    signals = [int(run.interruption.number == number) for number in Interruption.SIGNALS]
    counts = [images, len(failed), int(due), *signals]
    step, unreadable = step_over_processes(run.accelerator, loss_sums, grad_norm, counts, lr=lr)
    if unreadable:
        if statistics is not None:
            for each, before in zip(run.running_stats, statistics, strict=True):
                each.copy_(before)
        run.exclude_unreadable(failed)
    if updates_weights(run, step.loss, step.grad_norm):
        run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average is not None:
        run.average.update(run.step)
    run.step += 1
    return step


def set_training_mode(run: TrainingContext) -> None:
    """Training mode; in `frozen_steps` not of batch norms, and without gradients of the backbone,
    which wrappers of several processes wait for."""
    frozen = run.step < run.frozen_steps
    if run.frozen_steps and run.processes == 1 and not is_sharded(run.accelerator):
        for parameter in backbone_of(run):
            parameter.requires_grad_(not frozen)
    run.model.train()
    for module in run.network.modules():
        if frozen and isinstance(module, BatchNorm):
            module.eval()


def backbone_of(run: TrainingContext) -> list[nn.Parameter]:
    """The parameters of all but the head, decoder and pooling of tiles."""
    return [each for name, each in run.network.named_parameters() if not name.startswith(HEAD)]


def step_over_processes(
    accelerator: Accelerator,
    losses: Tensor,
    grad_norm: Tensor,
    counts: Sequence[int],
    *,
    lr: float,
) -> tuple[Step, int]:
    """Results of a step, and how many images could not be read, over all processes.

    One message, and the only point at which a step waits for the GPU. `losses` are the summed loss,
    balance loss and router z-loss of this process, (3,), on the device.
    """
    totals = torch.cat([losses, grad_norm.to(losses).view(1)])
    loss, balance, z_loss, norm, *found = all_reduce(accelerator, totals, counts)
    images, failed, due, *received = map(int, found)
    signals = zip(Interruption.SIGNALS, received, strict=True)
    divisor = max(images, 1)
    step = Step(
        loss=loss / divisor,
        images=images,
        grad_norm=norm / accelerator.num_processes,
        lr=lr,
        signal=next((number for number, count in signals if count), 0),
        due=due > 0,
        routers=(balance / divisor, z_loss / divisor),
    )
    return step, failed


def choose_patch_size(run: TrainingContext) -> None:
    """Draw the patch size of this step, the same on all processes and after a resume."""
    patches = run.network.patch_embed
    if isinstance(patches, FlexiblePatchEmbedding):
        sizes, seed = run.config.model.training_patch_sizes, run.config.training.seed
        number = random_seed(seed, "patch size", run.step)
        patches.current_patch_size = sizes[number % len(sizes)]


def backward(run: TrainingContext, losses: Tensor) -> None:
    """Add the gradient of a micro-batch's summed losses, scaled to the mean over the batch."""
    # gradients are averaged over processes; the loss is a sum over the whole batch
    share = run.processes / run.config.data.batch_size
    run.accelerator.backward(objective(run, losses) * share)


def objective(run: TrainingContext, losses: Tensor) -> Tensor:
    """Weighted sum of the losses that `forward_losses` returns: what training minimises."""
    loss, *routers = losses.unbind()
    weights = (run.config.training.balance_loss, run.config.training.router_z_loss)
    return loss + sum(weight * term for weight, term in zip(weights, routers, strict=False))


def forward_losses(
    run: TrainingContext,
    batch: Batch,
    epoch: int,
    *,
    micro_batch: int,
    reduce_routers: bool = True,
) -> Tensor:
    """Forward pass: the summed loss of one micro-batch, (1,), or (3,) with routers' balance and z
    losses.

    The random state depends only on the seed, the step, the micro-batch and the rank. With
    `reduce_routers` all processes must make this call.
    """
    config, rank = run.config, run.accelerator.process_index
    device = run.accelerator.device
    seed = random_seed(config.training.seed, "model", run.step, micro_batch, rank)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":  # not torch.manual_seed, which is slow where devices are not in use
        torch.get_device_module(device).manual_seed(seed)
    images = run.normalise(batch.images.to(device, non_blocking=True))
    loss = run.task.loss(run, batch, images, epoch)
    if config.model.feedforward != "moe":
        return loss
    everyone = run.accelerator if reduce_routers else None
    routers = router_losses(everyone, run.network, images=len(batch.labels))
    return torch.cat([loss, routers.to(loss)])


def clip_gradients(run: TrainingContext) -> Tensor:
    """Clip the gradient to the norm `clip_grad`; returns its norm before clipping, ()."""
    most, parameters = run.config.training.clip_grad, [*run.network.parameters()]
    if is_sharded(run.accelerator):
        norm: Tensor = run.accelerator.clip_grad_norm_(parameters, most or math.inf)
        return full_tensor(norm)
    # as accelerate does, which in every step looks for shards too, with a second of imports
    run.accelerator.unscale_gradients()
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if most:
        clip_grads_with_norm_(parameters, most, norm)
    return norm


def updates_weights(run: TrainingContext, loss: float, norm: float) -> bool:
    """Whether the optimiser makes this step: not if its gradient is not finite.

    Every process has the same numbers. With fp16 an infinite gradient is expected now and then: the
    scaler skips that step itself.
    """
    scaled = run.accelerator.mixed_precision == "fp16"
    if scaled and run.accelerator.scaler.get_scale() < MIN_LOSS_SCALE:
        raise RunError(
            f"gradients overflow fp16 whatever their scale, at step {run.step}: lower --lr, or use "
            "--precision bf16 or fp32"
        )
    if math.isfinite(loss):
        if scaled or math.isfinite(norm):
            run.skipped_in_row = 0
            return True
        run.skipped += 1
        run.skipped_in_row += 1
        if run.skipped_in_row < STOP_IN_ROW and run.skipped < STOP_IN_ROW + STOP_SHARE * run.step:
            notifier(run.accelerator)(
                f"note: the gradient became {norm} at step {run.step + 1}: the step is left out"
            )
            return False
    what = f"the loss became {loss}" if not math.isfinite(loss) else f"the gradient became {norm}"
    raise RunError(
        f"{what} at step {run.step}: nothing of it was saved; lower --lr, raise --warmup-epochs or "
        "use --precision fp32"
    )
