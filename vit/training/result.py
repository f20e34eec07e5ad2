"""What a training ended with."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training ended with.

    Args:
        folder: The run folder.
        classes: Class names, in the order of the network's outputs.
        epoch: The best epoch; its weights are in model.safetensors, or those of a soup. 0 is a
            probe's head, before the first step.
        val_top1: Share of validation pictures that model.safetensors labels right; None without
            classes.
        scores: All that validation said of it: `loss`, and `top1`, or `cider` and others.
        failed: Pictures that could not be read and were left out, and why.
    """

    folder: Path
    classes: tuple[str, ...]
    epoch: int
    val_top1: float | None
    scores: dict[str, float]
    failed: dict[str, str]
