"""`batch_size: auto`: how many images a GPU takes at once.

The batch of an optimiser step stays as it is; it is split into as few micro-batches as fit. What
fits is tried: the network, its optimiser and its average are built, and take steps at full size.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size
from torch.nn.parallel import DistributedDataParallel

from vit.config import Config
from vit.data.dataset import Batch
from vit.data.dataset_types import Splits
from vit.errors import RunError
from vit.model.patch_embed import FlexiblePatchEmbedding
from vit.training.batch_norm_statistics import local_batch_norm
from vit.training.dry_run import forget, largest, rehearse
from vit.training.training_loaders import rows_of
from vit.training.training_loop import TrainingState, clip, losses_of, objective

Notify = Callable[[str], None]

# Share of the free memory that a trial may not use: sizes of images that change leave gaps, and
# libraries beside torch (NCCL, cuDNN) take some as well.
HEAD_ROOM = 0.08
# The first step makes the optimiser's state; the second has it from its beginning.
STEPS = 2
# fp16 skips steps while it looks for its scale
MOST_STEPS = 12
GIB = 2**30


def fit_memory(
    config: Config, accelerator: Accelerator, notify: Notify, splits: Splits | None = None
) -> Config:
    """`config` with `accumulate` as a number, found out where it is None.

    Args:
        config: Settings; the batch is one that the training images fill.
        accelerator: The devices.
        say: Told in one line what was found.
        splits: The data, which know the words of captions; not needed for classes.

    Raises:
        RunError: Not even the smallest micro-batch fits.
    """
    data, device = config.data, accelerator.device
    if data.accumulate is not None:
        return config
    if device.type != "cuda":
        notify(
            f"note: -b auto tries what fits into a GPU; device={device.type} does not say when its "
            f"memory is full, so accumulate=1: {data.batch_size} images a step, all at once"
        )
        return accumulating(config, 1)
    share, rest = divmod(data.batch_size, accelerator.num_processes)
    if rest:
        return accumulating(config, 1)  # which the schedule refuses, with the reason

    def trial(size: int) -> float:
        torch.cuda.reset_peak_memory_stats(device)
        parts = share // size
        fitted = accumulating(config, parts)
        rehearse(fitted, accelerator, lambda run: take_steps(run, size), splits)
        return torch.cuda.max_memory_reserved(device)

    sizes = micro_batch_sizes(share, pairs=config.augment.mixes)
    with limited(accelerator) as room:
        found = largest_that_fits(sizes, trial, accelerator)
    if found is None:
        raise RunError(too_large(config, sizes[-1], room))
    size, peak = found
    total = torch.cuda.get_device_properties(device).total_memory
    parts, batches = share // size, "micro-batch" if size == share else "micro-batches"
    notify(
        f"note: batch_size={data.batch_size} in {parts} {batches} of {size} a device "
        f"({peak / GIB:.1f} of {total / GIB:.1f} GiB)"
    )
    return accumulating(config, parts)


def accumulating(config: Config, micro_batches: int) -> Config:
    """`config` with this number of micro-batches a step."""
    data = dataclasses.replace(config.data, accumulate=micro_batches)
    return dataclasses.replace(config, data=data)


def micro_batch_sizes(share: int, *, pairs: bool) -> list[int]:
    """Sizes of micro-batches that split the images of a device evenly, the largest first.

    Args:
        share: Images of a device in one step.
        pairs: Never part neighbours.
    """
    sizes = [share // parts for parts in range(1, share + 1) if share % parts == 0]
    return [size for size in sizes if size == share or not (pairs and size % 2)]


def largest_that_fits(
    sizes: Sequence[int], trial: Callable[[int], float], accelerator: Accelerator
) -> tuple[int, float] | None:
    """The first of `sizes` that fits on every process.

    Args:
        sizes: What to try, in this order.
        trial: Answers with the memory that a size needs, or runs out of it, which torch says by an
            OutOfMemoryError. It waits for no other process, which may have run out earlier.
        accelerator: The devices.

    Returns:
        The size and the most memory that a process needs; None where none fits.
    """
    smaller = iter(sizes[1:])

    def attempt(size: int) -> tuple[int, float]:
        needed = math.inf
        try:
            needed = trial(size)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
        forget(accelerator)  # only now: the traceback held what had been built
        most = largest(accelerator, needed)
        if most == math.inf:
            raise torch.OutOfMemoryError(f"{size} images: out of memory.")
        return size, most

    finder = find_executable_batch_size(
        attempt, starting_batch_size=sizes[0], reduce_batch_size_fn=lambda: next(smaller)
    )
    try:
        found: tuple[int, float] = finder()
    except StopIteration:
        return None
    return found


@contextlib.contextmanager
def limited(accelerator: Accelerator) -> Iterator[float]:
    """Inside the `with`, torch takes at most this many bytes of the GPU, the same on all processes.

    So processes whose steps wait for each other run out of memory together.
    """
    device = accelerator.device
    if device.index is None:  # that of a single process
        device = torch.device("cuda", torch.cuda.current_device())
    before = fraction(device)
    free, total = torch.cuda.mem_get_info(device)
    mine = (1 - HEAD_ROOM) * (free + torch.cuda.memory_reserved(device))
    room = -largest(accelerator, -mine)
    torch.cuda.set_per_process_memory_fraction(min(room / total, before), device)
    try:
        yield room
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def fraction(device: torch.device) -> float:
    """The share of the GPU's memory that torch may take; older versions cannot tell."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if ask is None else float(ask(device))


def take_steps(run: TrainingState, size: int) -> None:
    """Make steps as the run will, on random images, `size` at once."""
    run.model.train()
    patches = run.network.patch_embed
    if isinstance(patches, FlexiblePatchEmbedding):
        patches.current_patch_size = min(patches.resize_matrices)  # which makes the most tokens
    # with a second micro-batch, gradients are there while it is computed
    batches = [random_batch(run.config, size)] * min(run.config.data.micro_batches, 2)
    done = 0
    for _ in range(MOST_STEPS):
        with local_batch_norm(run.network) if alone(run) else contextlib.nullcontext():
            step_alone(run, batches)
        done += not run.accelerator.optimizer_step_was_skipped
        if done == STEPS:
            return


def alone(run: TrainingState) -> bool:
    """Whether a step may be made without the other processes, which have the whole network too."""
    return isinstance(run.model, DistributedDataParallel)


def step_alone(run: TrainingState, batches: Sequence[Batch]) -> None:
    """One update; processes that have the whole network each do not wait for the others."""
    by_itself = alone(run)
    for index, batch in enumerate(batches):
        apart = by_itself or index < len(batches) - 1
        with run.accelerator.no_sync(run.model) if apart else contextlib.nullcontext():
            losses = losses_of(run, batch, 0, micro_batch=index, alone=by_itself)
            run.accelerator.backward(objective(run, losses) / run.config.data.batch_size)
    clip(run)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average is not None:
        run.average.update(run.step)


def random_batch(config: Config, size: int) -> Batch:
    """Noise of the full size, (size, channels, image_size, image_size)."""
    model, words = config.model, config.decoder
    shape = (size, model.channels, model.image_size, model.image_size)
    places = torch.arange(size)
    wide = rows_of(config)
    one = torch.randint(0, max(model.num_classes, 1), (size,))
    return Batch(
        images=torch.randint(0, 256, shape, dtype=torch.uint8),
        labels=one if wide is None else torch.randint(0, 2, (size, wide), dtype=torch.uint8),
        indices=places,
        positions=places,
        failed=[],
        words=torch.randint(0, words.vocab_size, (size, words.caption_tokens))
        if words.vocab_size and words.caption_tokens
        else None,
    )


def too_large(config: Config, size: int, room: float) -> str:
    """Why nothing fits, and what can be done."""
    recompute = "" if config.run.checkpoint_activations else "--checkpoint-activations, "
    images = "an image" if size == 1 else f"{size} images"
    return (
        f"batch_size=auto: not even {images} of {config.model.image_size} px fit into "
        f"{room / GIB:.1f} GiB of a GPU: use {recompute}a smaller --model or --image-size, or "
        "several GPUs with FSDP (docs/training.md)"
    )
