"""A training that is thrown away: to see what fits and how long it takes, before the real one."""

from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator

from vit.config import Config
from vit.data.dataset_types import Splits
from vit.training.setup import make_training
from vit.training.training_loop import TrainingState, widest

T = TypeVar("T")

# Epochs that never end, and steps of a schedule that is far from leaving its warm-up.
LONG = 10**6
STEPS = 10**12


def rehearse(
    config: Config,
    accelerator: Accelerator,
    act: Callable[[TrainingState], T],
    splits: Splits | None = None,
) -> T:
    """Let `act` use a training of `config`, and leave nothing of it behind.

    Random state, loss scale and what accelerate remembers are as before. After an error the
    training's memory is free as soon as nobody holds the exception and `forget` is called.

    Args:
        config: Settings; `accumulate` is known.
        accelerator: The devices.
        act: What to do with the training.
        splits: The data, which know the words of captions; not needed for classes.

    Returns:
        What `act` returns; it must hold nothing of the training.
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
            scaler._per_optimizer_states.clear()  # of a step that ran out of memory half-way
        if config.run.compile:
            torch.compiler.reset()  # or the real run is compiled for sizes that it never sees
        forget(accelerator)


def forget(accelerator: Accelerator) -> None:
    """Free the memory of trainings that nobody uses any more."""
    accelerator.free_memory()


def largest(accelerator: Accelerator, number: float) -> float:
    """The largest of the numbers of all processes, the same on each of them.

    The device has then finished what it was asked to do before.
    """
    device = accelerator.device
    mine = torch.tensor([number], dtype=widest(device), device=device)
    return float(accelerator.gather(mine).max())
