"""Dry runs: a training that is discarded, to measure its memory and time beforehand."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size

from vit.config import Config
from vit.data.dataset_types import Splits
from vit.training.compilation import compiles_blocks
from vit.training.distributed.collectives import max_over_processes
from vit.training.setup import make_training
from vit.training.training_context import TrainingContext

T = TypeVar("T")

# Epochs and steps that a dry run never reaches, so its schedule stays in the warm-up.
LONG = 10**6
STEPS = 10**12
# Share of the free memory that a trial may not use: changing image sizes fragment it, and libraries
# beside torch (NCCL, cuDNN) need some.
HEADROOM = 0.08


def dry_run(
    config: Config,
    accelerator: Accelerator,
    act: Callable[[TrainingContext], T],
    splits: Splits | None = None,
) -> T:
    """Call `act` with a training of `config`, then discard the training, which its result must not
    refer to.

    Random state, loss scale and the state of accelerate are restored. After an error, memory is
    free once the exception is released and `accelerator.free_memory` was called.
    """
    scaler = accelerator.scaler
    scale = None if scaler is None else scaler.state_dict()
    cuda = [accelerator.device] if accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cuda):
            return act(make_training(config, accelerator, STEPS, splits=splits))
    finally:
        if scaler is not None:
            scaler.load_state_dict(scale)
            scaler._per_optimizer_states.clear()  # left by a step that ran out of memory
        if config.run.compile and not compiles_blocks(config):
            torch.compiler.reset()  # else the real run compiles for sizes it never uses
        accelerator.free_memory()


def largest_that_fits(
    sizes: Sequence[int], trial: Callable[[int], float], accelerator: Accelerator
) -> tuple[int, float] | None:
    """The first of `sizes` that fits on every process, with the largest of the processes' numbers;
    None if none fits.

    `trial` returns a number for a size, such as the memory that it needs, or raises
    torch.OutOfMemoryError. It must not wait for other processes, which may have run out of memory
    earlier.
    """
    for size in sizes:
        needed = math.inf
        try:
            needed = trial(size)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
        # after the except block, whose traceback referred to the training
        accelerator.free_memory()
        most = max_over_processes(accelerator, needed)
        if most < math.inf:
            return size, most
    return None


@contextlib.contextmanager
def limit_gpu_memory(accelerator: Accelerator, headroom: float = HEADROOM) -> Iterator[float]:
    """Limit torch to the same number of bytes of the GPU on all processes, and yield that limit.

    Processes whose steps wait for each other then run out of memory together. Other devices have no
    limit. Memory that was used inside is free afterwards.
    """
    device = accelerator.device
    if device.type != "cuda":
        yield math.inf
        return
    if device.index is None:  # that of a single process
        device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_per_process_memory_fraction(device)
    free, total = torch.cuda.mem_get_info(device)
    mine = (1 - headroom) * (free + torch.cuda.memory_reserved(device))
    room = -max_over_processes(accelerator, -mine)
    torch.cuda.set_per_process_memory_fraction(min(room / total, before), device)
    try:
        yield room
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
    accelerator.free_memory()
