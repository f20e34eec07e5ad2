"""How long a run still takes, from its first steps."""

import time
from collections.abc import Callable

from vit.config import Config
from vit.text import format_duration
from vit.training.lr_schedule import image_side, total_steps

# Steps before the clock starts: the first ones start loaders, compile, and warm up.
WARM_UP = 2
STEPS = 10
SECONDS = 10.0
# A run that ends sooner says nothing.
LEAST_TO_GO = 10.0
# What an image costs in validation, as a share of its cost in training: the forward pass alone.
VALIDATION_SHARE = 1 / 3


class Pace:
    """Says once, after the first steps of a session, about how long the rest takes.

    Args:
        steps: Optimiser steps left, as `steps_left` counts them.
        validations: Validations left.
        validation_share: Images of one validation, as a share of those of one step.
        growing: Whether images grow on the way; what a step costs besides them does not, so the
            time is then an upper bound.
        clock: Seconds since some moment.
    """

    def __init__(
        self,
        *,
        steps: float,
        validations: int,
        validation_share: float,
        growing: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps_left, self.validations_left = steps, validations
        self.validation_share = validation_share
        self.about = "at most about" if growing else "about"
        self.clock = clock
        self.validation: float | None = None
        self.done, self.timed, self.seconds = 0, 0, 0.0
        self.last = clock()
        self.said = False

    def step(self) -> str | None:
        """Call after each optimiser step; returns the line when there is enough to say it."""
        now = self.clock()
        self.done += 1
        if self.done > WARM_UP:
            self.timed += 1
            self.seconds += now - self.last
        self.last = now
        ready = self.timed == STEPS or self.seconds >= SECONDS
        if self.said or not ready:
            return None
        self.said = True
        return self.line()

    def validated(self) -> None:
        """Call when a validation and its records are done, which are then no part of a step."""
        now = self.clock()
        self.validation, self.last = now - self.last, now
        self.validations_left -= 1

    def line(self) -> str | None:
        """The time left at the pace so far; None where it is not worth a line."""
        step = self.seconds / self.timed
        training = self.validation_share * step  # as long as training on its images would take
        validation = VALIDATION_SHARE * training
        if self.validation is not None:
            validation = min(self.validation, training)  # the first one starts its loaders, too
        left = (self.steps_left - self.done) * step + self.validations_left * validation
        if left < LEAST_TO_GO:
            return None
        return f"{self.about} {format_duration(left)} to go ({step:.2g} s a step)"


def steps_left(config: Config, *, step: int, steps_per_epoch: int) -> float:
    """Optimiser steps from `step` to the end of the run, in steps of the size of the next one.

    A step at a larger image counts for more, by the number of patches. A probe makes none.
    """
    if not steps_per_epoch:
        return 0.0
    first = step // steps_per_epoch
    epochs, total = config.training.epochs, total_steps(config, steps_per_epoch)
    sizes = [image_side(config, epoch, epochs) ** 2 for epoch in range(first, epochs)]
    if not sizes:
        return 0.0
    counts = [
        min(total - epoch * steps_per_epoch, steps_per_epoch) for epoch in range(first, epochs)
    ]
    begun = step - first * steps_per_epoch
    weighted = sum(count * size for count, size in zip(counts, sizes, strict=True))
    return weighted / sizes[0] - begun


duration = format_duration  # plan.py and time_budget.py import it by this name
