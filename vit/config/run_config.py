"""Settings of a run: device, precision, checkpoints, tracking."""

from dataclasses import dataclass
from typing import Literal

from vit.config.config_section import Section, setting


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Device, precision, checkpoints and tracking."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = "auto"
    """Arithmetic of the network; auto is bf16 where the hardware has it, else fp32 (not tf32)."""
    deterministic: bool = False
    """Give the same bits each time on a GPU too, where it costs speed; CPUs do anyhow."""
    compile: bool = setting(False, "--torchcompile")
    """Compile the network; pays for runs of more than some minutes."""
    checkpoint_activations: bool = setting(False, "--grad-checkpointing")
    """Compute the inside of each encoder block again when needed: less memory, more work."""
    checkpoint_minutes: float = 10.0
    """Longest time between two checkpoints; there is one after each epoch anyhow."""
    checkpoint_steps: int | None = None
    """Optimiser steps between two checkpoints; by time and epoch alone when left empty."""
    keep_best: int = 1
    """How many of the best epochs keep their weights; those of the best are model.safetensors."""
    track: Literal["tensorboard", "wandb", "mlflow", "trackio"] | None = None
    """Send losses and scores to this experiment tracker as well."""

    def __post_init__(self) -> None:
        self.check_above(0, "checkpoint_minutes")
        self.check_at_least(1, "keep_best")
        if self.checkpoint_steps is not None:
            self.check_at_least(1, "checkpoint_steps")
