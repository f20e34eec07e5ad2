"""Learning rate and image size as pure functions of how far a run has come.

    cosine   lr(step) = min + (peak - min) * (1 + cos(pi * progress)) / 2      after the warm-up
    wsd      lr(step) = peak until the cooldown, then linear to min; `shares` bend the line

Nothing is stored, so nothing can go wrong on resume or on several processes. With wsd no step
depends on how many follow before the cooldown, nor in it before a step whose share is known, so
that the length of a run may be settled late.

Source: Loshchilov and Hutter, "SGDR", section 3, arXiv:1608.03983; wsd: Hu et al., "MiniCPM",
section 4, arXiv:2404.06395; linear warm-up: Goyal et al., arXiv:1706.02677.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

from vit.config import Config, TrainingConfig

# share of a run after which images have their full size
GROWN = 0.75
# share of a run in which the learning rate of wsd falls
COOLDOWN = 0.7


@dataclass(frozen=True, kw_only=True)
class CosineSchedule:
    """Linear warm-up, then a cosine from `peak` to `least`; the warm-up is in optimiser steps."""

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


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
    """Linear warm-up to `peak`, constant, then linear to `least`.

    Args:
        shares: Steps after the beginning of the cooldown, each with its share of `peak`; the rate
            is linear between them, and to `least` after them.
    """

    peak: float
    least: float
    warmup_steps: int
    cooldown_steps: int
    total_steps: int
    shares: tuple[tuple[float, float], ...] = ()

    def __call__(self, step: int) -> float:
        """Learning rate of optimiser step `step`, the first being 0."""
        warm = min((step + 1) / (self.warmup_steps + 1), 1.0)
        return max(self.peak * min(warm, self.share(step)), self.least)

    def share(self, step: int) -> float:
        """Of the peak at `step`, without the warm-up."""
        after = step - self.start
        if after <= 0 or not self.cooldown_steps:
            return 1.0
        known = bisect_right(self.shares, after, key=itemgetter(0))
        points = ((0.0, 1.0), *self.shares, (float(self.cooldown_steps), 0.0))
        (first, before), (last, end) = points[known : known + 2]
        return before + (end - before) * min((after - first) / max(last - first, 1), 1.0)

    @property
    def start(self) -> int:
        """The step with which the cooldown begins."""
        return self.total_steps - self.cooldown_steps


def learning_rate(
    training: TrainingConfig, *, epoch_steps: float, total: int
) -> Callable[[int], float]:
    """The learning rate of each step of a run of `total` steps, `epoch_steps` an epoch."""
    warmup_steps = round(training.warmup * epoch_steps)
    if training.schedule == "cosine":
        return CosineSchedule(
            peak=training.lr, least=training.min_lr, warmup_steps=warmup_steps, total_steps=total
        )
    cooldown, shares = training.cooldown_epochs, training.cooldown_shares
    at = training.cooldown_steps or [epoch_steps * (n + 1) for n in range(len(shares))]
    return WarmupStableDecay(
        peak=training.lr,
        least=training.min_lr,
        warmup_steps=warmup_steps,
        cooldown_steps=round(COOLDOWN * total if cooldown is None else cooldown * epoch_steps),
        total_steps=total,
        shares=tuple(zip(at, shares, strict=True)),
    )


def total_steps(config: Config, epoch_steps: int) -> int:
    """Optimiser steps of a whole run of epochs of `epoch_steps`; 0 where these are 0."""
    if not epoch_steps or config.training.steps is None:
        return config.training.epochs * epoch_steps
    return config.training.steps


def image_side(config: Config, epoch: int, epochs: int) -> int:
    """Side of training images in `epoch`: small ones first, which cost less, then full size.

    Grows linearly over the first `growth_epochs`, in steps of a patch. Source: Tan and Le,
    "EfficientNetV2", section 4, arXiv:2104.00298.
    """
    full, growth = config.model.image_size, config.training.growth_epochs
    start, patch = config.training.start_image_size or full, config.model.patch_size
    share = min(epoch / max(GROWN * epochs if growth is None else growth, 1), 1.0)
    return min(full, start + round(share * (full - start) / patch) * patch)
