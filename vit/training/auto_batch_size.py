"""`batch_size: auto`: finds the largest micro-batch that fits into the memory of a GPU.

The batch of an optimiser step is unchanged; it is split into as few micro-batches as fit. Sizes are
tried: network, optimiser and moving average are built, and make steps at full size.
"""

import contextlib
import math
from collections.abc import Sequence

import psutil
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from vit.config import Config
from vit.config.setting_layers import with_settings
from vit.data.dataset import Batch
from vit.data.dataset_types import Splits
from vit.errors import RunError
from vit.evaluation.model_summary import cost_of
from vit.model.patch_embed import FlexiblePatchEmbedding
from vit.tasks.task import get_task
from vit.text import Notify, format_bytes, plural
from vit.training.sync_batch_norm import local_batch_norm
from vit.training.training_context import TrainingContext
from vit.training.training_loop import clip_gradients, forward_losses, objective
from vit.training.trial_training import dry_run, largest_that_fits, limit_gpu_memory

# The first step allocates the optimiser's state; the second one has it from its start.
STEPS = 2
# fp16 skips steps until its loss scale fits
MAX_STEPS = 12
GIB = 2**30
MANY_TOKENS = 2**14
"""Of an image, above which the cost of a step is named before it: 2048 px in patches of 16."""


def note_many_tokens(config: Config, accelerator: Accelerator, notify: Notify) -> None:
    """Name the cost of a step with very many tokens, which may end at the first one, or never."""
    model, data, device = config.model, config.data, accelerator.device
    tokens = math.prod(model.grid)
    if tokens <= MANY_TOKENS:
        return
    images = data.batch_size // (data.accumulate or 1) // accelerator.num_processes or 1
    cost = cost_of(model, batch_size=images)
    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else psutil.virtual_memory().available
    )
    notify(
        f"note: image_size={model.image_size} is {tokens:,} tokens an image: a step of "
        f"{plural(images, 'image')} takes about {format_bytes(cost.memory.training)} "
        f"({format_bytes(free)} are free) and {3 * images * cost.flops / 1e12:,.0f} TFLOPs; a "
        "smaller --image-size or a larger --patch-size takes less"
    )


def fit_memory(
    config: Config, accelerator: Accelerator, notify: Notify, splits: Splits | None = None
) -> Config:
    """Set `accumulate` to a number; it is measured if it is None."""
    data, device = config.data, accelerator.device
    if data.accumulate is not None:
        return config
    if device.type != "cuda":
        notify(
            f"note: -b auto tries what fits into a GPU; device={device.type} does not say when its "
            f"memory is full, so accumulate=1: {data.batch_size} images a step, all at once"
        )
        return with_settings(config, accumulate=1)
    share, rest = divmod(data.batch_size, accelerator.num_processes)
    if rest:
        return with_settings(config, accumulate=1)  # the schedule raises the error

    def trial(size: int) -> float:
        torch.cuda.reset_peak_memory_stats(device)
        parts = share // size
        fitted = with_settings(config, accumulate=parts)
        dry_run(fitted, accelerator, lambda run: take_steps(run, size), splits)
        return torch.cuda.max_memory_reserved(device)

    sizes = micro_batch_sizes(share, pairs=config.augment.mixes)
    with limit_gpu_memory(accelerator) as room:
        found = largest_that_fits(sizes, trial, accelerator)
    if found is None:
        recompute = "" if config.run.checkpoint_activations else "--checkpoint-activations, "
        images = "an image" if sizes[-1] == 1 else f"{sizes[-1]} images"
        raise RunError(
            f"batch_size=auto: not even {images} of {config.model.image_size} px fit into "
            f"{room / GIB:.1f} GiB of a GPU: use {recompute}a smaller --model or --image-size, or "
            "several GPUs with FSDP (docs/training.md)"
        )
    size, peak = found
    total = torch.cuda.get_device_properties(device).total_memory
    parts, batches = share // size, "micro-batch" if size == share else "micro-batches"
    notify(
        f"note: batch_size={data.batch_size} in {parts} {batches} of {size} a device "
        f"({peak / GIB:.1f} of {total / GIB:.1f} GiB)"
    )
    return with_settings(config, accumulate=parts)


def micro_batch_sizes(share: int, *, pairs: bool) -> list[int]:
    """Micro-batch sizes that divide the images of a device, the largest first; even with
    `pairs`."""
    sizes = [share // parts for parts in range(1, share + 1) if share % parts == 0]
    return [size for size in sizes if size == share or not (pairs and size % 2)]


def take_steps(run: TrainingContext, size: int) -> None:
    """Make training steps on random micro-batches of `size` images."""
    run.model.train()
    patches = run.network.patch_embed
    if isinstance(patches, FlexiblePatchEmbedding):
        patches.current_patch_size = min(patches.resize_matrices)  # the most tokens
    # during a second micro-batch, gradients exist already
    batches = [random_batch(run.config, size)] * min(run.config.data.micro_batches, 2)
    done = 0
    for _ in range(MAX_STEPS):
        # without communication if each process has a full copy of the network
        run.alone = isinstance(run.model, DistributedDataParallel)
        with local_batch_norm(run.network) if run.alone else contextlib.nullcontext():
            trial_step(run, batches)
        run.alone = False
        done += not run.accelerator.optimizer_step_was_skipped
        if done == STEPS:
            return


def trial_step(run: TrainingContext, batches: Sequence[Batch]) -> None:
    """One update; without communication if `run.alone`."""
    for index, batch in enumerate(batches):
        local = run.alone or index < len(batches) - 1
        with run.accelerator.no_sync(run.model) if local else contextlib.nullcontext():
            losses = forward_losses(run, batch, 0, micro_batch=index, reduce_routers=not run.alone)
            run.accelerator.backward(objective(run, losses) / run.config.data.batch_size)
    clip_gradients(run)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average is not None:
        run.average.update(run.step)


def random_batch(config: Config, size: int) -> Batch:
    """Noise of the full size of training images, (size, channels, height, width)."""
    model, decoder = config.model, config.decoder
    task = get_task(config.training.task)
    shape = (size, model.channels, *task.view_size(config, model.image_size))
    indices = torch.arange(size)
    width = task.label_width(config)
    one = torch.randint(0, max(model.num_classes, 1), (size,))
    return Batch(
        images=torch.randint(0, 256, shape, dtype=torch.uint8),
        labels=one if width is None else torch.randint(0, 2, (size, width), dtype=torch.uint8),
        indices=indices,
        positions=indices,
        failed=[],
        caption_ids=torch.randint(0, decoder.vocab_size, (size, decoder.caption_tokens))
        if decoder.vocab_size and decoder.caption_tokens
        else None,
    )
