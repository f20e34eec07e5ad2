"""Settings of a run: device, precision, checkpoints, tracking."""

from dataclasses import dataclass
from typing import Literal

from vit.config.config_section import Section, setting


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Device, precision, checkpoints and tracking."""

    device: str = setting("auto", resumable=True)
    """Device: auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = "auto"
    """Arithmetic of the network; auto: bf16 if the hardware supports it, else fp32 (not tf32)."""
    deterministic: bool = False
    """Deterministic algorithms on GPUs, which are slower; CPUs are always deterministic."""
    compile: bool = setting(False, "--torchcompile", resumable=True)
    """Compile by torch.compile: half a minute, or seconds for each size of images that grow."""
    checkpoint_activations: bool = setting(False, "--grad-checkpointing", resumable=True)
    """Recompute activations of encoder blocks in the backward pass: less memory, more work."""
    checkpoint_minutes: float = setting(10.0, above=0, resumable=True)
    """Maximum time between two checkpoints, a minute to the first; each epoch also saves one."""
    checkpoint_steps: int | None = setting(None, least=1, resumable=True)
    """Optimiser steps between two checkpoints; only by time and epoch when left empty."""
    keep_best: int = setting(1, least=1)
    """Number of best epochs whose weights are kept; the best is model.safetensors."""
    track: Literal["tensorboard", "wandb", "mlflow", "trackio"] | None = setting(
        None, resumable=True
    )
    """Experiment tracker that losses and scores are sent to."""

    report: Literal["full", "fast"] = "full"
    """Report of the run: fast opens no image again, so it has no thumbnails and fewer slices."""
