"""Learning rate and picture size as pure functions of how far a run has come.

    lr(step) = peak * step / warmup                                    while warming up
    lr(step) = min + (peak - min) * (1 + cos(pi * progress)) / 2       afterwards

Nothing is stored, so nothing can go wrong on resume or on several processes. Source: Loshchilov
and Hutter, "SGDR", section 3, arXiv:1608.03983; linear warm-up: Goyal et al., arXiv:1706.02677.
"""

import math
from dataclasses import dataclass

from vit.config import Config

# share of a run after which pictures have their full size
GROWN = 0.75


@dataclass(frozen=True, kw_only=True)
class CosineSchedule:
    """Linear warm-up, then a cosine from `peak` to `least`.

    Args:
        peak: Learning rate at the end of the warm-up.
        least: Learning rate at the last step.
        warmup_steps: Optimiser steps of warm-up; 0 is none.
        total_steps: Optimiser steps of the whole run.
    """

    peak: float
    least: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: int) -> float:
        """Learning rate of optimiser step `step`, the first being 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        rest = max(self.total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / rest, 1.0)
        return self.least + (self.peak - self.least) * (1 + math.cos(math.pi * progress)) / 2


def image_size_at(epoch: int, *, epochs: int, start: int, full: int, multiple: int) -> int:
    """Side of training pictures in `epoch`: small ones first, which cost less, then full size.

    Grows linearly over the first three quarters of the run, in steps of `multiple` pixels. Source:
    Tan and Le, "EfficientNetV2", section 4, arXiv:2104.00298.
    """
    share = min(epoch / max(GROWN * epochs, 1), 1.0)
    return min(full, start + round(share * (full - start) / multiple) * multiple)


def picture_side(config: Config, epoch: int, epochs: int) -> int:
    """Side of the training pictures in an epoch of so many."""
    full = config.model.image_size
    return image_size_at(
        epoch,
        epochs=epochs,
        start=config.training.start_image_size or full,
        full=full,
        multiple=config.model.patch_size,
    )
