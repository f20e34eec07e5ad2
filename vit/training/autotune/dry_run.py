"""Dry runs: a training that is discarded, to measure its memory and time beforehand."""

from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator

from vit.config import Config
from vit.data.dataset_types import Splits
from vit.training.compilation import compiles_blocks
from vit.training.setup import make_training
from vit.training.training_state import TrainingState

T = TypeVar("T")

# Epochs and steps that a dry run never reaches, so its schedule stays in the warm-up.
LONG = 10**6
STEPS = 10**12


def dry_run(
    config: Config,
    accelerator: Accelerator,
    act: Callable[[TrainingState], T],
    splits: Splits | None = None,
) -> T:
    """Call `act` with a training of `config`, then discard the training.

    Random state, loss scale and the state of accelerate are restored. After an error, memory is
    free once the exception is released and `accelerator.free_memory` was called.

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
        if config.run.compile and not compiles_blocks(config):
            torch.compiler.reset()  # else the real run compiles for sizes it never uses
        accelerator.free_memory()
