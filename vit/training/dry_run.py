"""Dry runs: a training that is discarded, to measure its memory and time beforehand."""

from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator

from vit.config import Config
from vit.data.dataset_types import Splits
from vit.training.setup import make_training
from vit.training.training_loop import TrainingState, widest

T = TypeVar("T")

# Epochs and steps that a dry run never reaches, so its schedule stays in the warm-up.
LONG = 10**6
STEPS = 10**12


def rehearse(
    config: Config,
    accelerator: Accelerator,
    act: Callable[[TrainingState], T],
    splits: Splits | None = None,
) -> T:
    """Call `act` with a training of `config`, then discard the training.

    Random state, loss scale and the state of accelerate are restored. After an error, memory is
    free once the exception is released and `forget` was called.

    Args:
        config: Settings with a number for `accumulate`.
        accelerator: The devices.
        act: Uses the training.
        splits: The data, with the tokenizer of captions; not needed for classification.

    Returns:
        The result of `act`, which must not refer to the training.
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
        if config.run.compile:
            torch.compiler.reset()  # else the real run compiles for sizes it never uses
        forget(accelerator)


def forget(accelerator: Accelerator) -> None:
    """Free the memory of discarded trainings."""
    accelerator.free_memory()


def largest(accelerator: Accelerator, number: float) -> float:
    """Maximum of `number` over all processes, on each of them.

    Waits until the device has finished earlier work.
    """
    device = accelerator.device
    mine = torch.tensor([number], dtype=widest(device), device=device)
    return float(accelerator.gather(mine).max())
