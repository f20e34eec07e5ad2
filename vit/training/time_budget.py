"""`--time 30m`: as many optimiser steps as fill a given time, found by measuring.

    start + sum of steps + epochs * (validation + saving) + ending = time - margin

Measured on a training that is thrown away, before the run begins; with schedule=wsd on the run
itself too, from where its cooldown begins: after each epoch, and in the last one whenever half of
the remaining steps are made. No step before depends on what follows.
"""

import dataclasses
import itertools
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from accelerate import Accelerator

from vit.config import Config
from vit.config.setting_layers import settings_with, with_settings
from vit.data.dataset_types import Sample, Splits
from vit.errors import ConfigError
from vit.text import Notify, format_duration, plural
from vit.timing import Stopwatch
from vit.training.distributed.collectives import max_over_processes
from vit.training.final_report import distance_samples
from vit.training.finetune.linear_probe import probe_samples
from vit.training.lr_schedule import (
    COOLDOWN,
    GROWN,
    WarmupStableDecay,
    image_side,
)
from vit.training.training_context import TrainingContext
from vit.training.training_loaders import (
    evaluation_loader,
    make_schedule,
    micro_batch_size,
    training_loader,
)
from vit.training.training_loop import train_one_step
from vit.training.trial_training import LONG, dry_run
from vit.training.validation import validate

# Share of the time that stays free, since no two minutes of a machine are alike.
MARGIN = 0.005
# One measurement (of steps at one size, of validation) takes this share of the time, within these
# seconds.
SHARE = 0.004
LEAST_SECONDS = 0.5
MOST_SECONDS = 2.0
# The first steps of a size allocate memory and choose kernels; they do not count as its pace.
WARM_STEPS = 2
# Validations of a run: their share of its time, at least, and at most where passes over the images
# are fewer. With five the number of steps is corrected after an epoch of images of full size.
VALIDATIONS_SHARE = 0.04
LEAST_VALIDATIONS = 5
MOST_VALIDATIONS = 24
# In the last epoch the number of steps is corrected until half of those that remain are fewer.
FEWEST_STEPS = 4
# A run of fewer steps is warned of: even with the plan's learning rates it stays near chance.
USEFUL_STEPS = 20
# Nothing is written to find out. Bytes a second of a checkpoint, digest included, and seconds of
# each one whatever its size; and seconds of the report beside measuring.
DISK = 200e6
SAVE = 0.05
REPORT = 2.0
# Seconds of calibration and report for each score of a class of a validation image, and the number
# of scores from which on they hardly grow: 6 to 12 s were seen with 1,000 images of 1,000 classes.
SCORE, MOST_SCORES = 6e-6, 4e6


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that the parts of a run take."""

    start: float
    """Until steps have their pace, from the first one on: loaders start."""
    small_step: float
    """An optimiser step with the images of the first epoch."""
    full_step: float
    """An optimiser step with images of full size."""
    validation: float
    saving: float
    """All that is written in an epoch."""
    ending: float
    """From the last epoch to the end of the process."""
    setup: float = 0.0
    """Until the first step: the network is built, a probe is fitted."""

    @property
    def fixed(self) -> float:
        """Seconds that do not depend on the number of steps and epochs."""
        return self.setup + self.start + self.ending

    def of(self, config: Config, epoch_steps: int, steps: int) -> float:
        """Duration in seconds of `steps` steps with a validation every `epoch_steps`."""
        return self.fixed + self.between(config, epoch_steps, 0, steps)

    def between(self, config: Config, epoch_steps: int, first: int, last: int) -> float:
        """Seconds of steps `first` to `last`, excluded, of a run of `last` steps."""
        config = with_growth(config, last / epoch_steps)
        epochs = math.ceil(last / epoch_steps)
        sides: Counter[int] = Counter()
        for epoch in range(first // epoch_steps, epochs):
            ends = min((epoch + 1) * epoch_steps, last)
            sides[image_side(config, epoch, epochs)] += ends - max(epoch * epoch_steps, first)
        seconds = sum(count * self.step(config, side) for side, count in sides.items())
        return seconds + (epochs - first // epoch_steps) * (self.validation + self.saving)

    def step(self, config: Config, side: int) -> float:
        """Seconds of a step at images of `side`, on a line over the number of patches."""
        full = config.model.image_size
        small = config.training.start_image_size or full
        share = (full**2 - side**2) / max(full**2 - small**2, 1)
        return self.full_step + share * (self.small_step - self.full_step)


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """When a run has to end, and what its parts cost."""

    ends: float
    """By `time.monotonic`; the margin is not part of it."""
    costs: Costs


def fit_time(
    config: Config,
    splits: Splits,
    accelerator: Accelerator,
    notify: Notify,
    *,
    began: float,
    planned: bool = False,
) -> tuple[Config, TimeBudget | None]:
    """`config` with as many steps as its `time` has room for, found out by measuring.

    Unless a setting counts in epochs, an epoch is as long as validations may take their share.

    Returns:
        Settings with `steps` and `epochs`, and without `time`: they repeat the run. And the budget
        by which a run with schedule=wsd settles its steps.
    """
    seconds = config.training.seconds
    if seconds is None:
        return config, None
    schedule = make_schedule(config, len(splits.train), processes=accelerator.num_processes)
    if config.training.schedule == "cosine":  # wsd corrects its steps later; here the first
        costs_of(config, splits, accelerator, 0.0)  # steps, with their imports, must not count
    most = min(max(SHARE * seconds, LEAST_SECONDS), MOST_SECONDS)
    costs = costs_of(config, splits, accelerator, most)
    spent = max_over_processes(accelerator, time.monotonic() - began)
    if planned:
        config, seconds = long_enough(config, seconds, costs, spent, notify)
    budget = TimeBudget(ends=began + (1 - MARGIN) * seconds, costs=costs)
    epoch_steps = epoch_length(config, schedule.steps_per_pass, costs, seconds - spent)

    def end(steps: int) -> float:
        return spent + costs.of(config, epoch_steps, steps)

    steps = count_that_fit((1 - MARGIN) * seconds, end)
    if not steps:
        raise ConfigError(
            f"time={config.training.time}: start, one step, its validation and the report take "
            f"about {format_duration(end(1))} (a step {costs.full_step:.2g} s, a validation "
            f"{costs.validation:.2g} s): use --time {math.ceil(1.1 * end(1) / (1 - MARGIN))}s or "
            "more, a smaller --model or --image-size, or fewer images"
        )
    epochs = math.ceil(steps / epoch_steps)
    notify(
        f"note: time={config.training.time}: {plural(steps, 'step')} ({costs.full_step:.2g} s a "
        f"step, {costs.validation:.2g} s a validation), about {format_duration(end(steps))}"
    )
    if steps < USEFUL_STEPS:
        notify(
            f"warning: {plural(steps, 'step')} can hardly learn anything, and the rest of the "
            "time goes to start, validations and report: give a longer --time, or fewer images"
        )
    chosen = None if epoch_steps == schedule.steps_per_pass else epoch_steps
    try:
        fitted = with_settings(config, steps=steps, epochs=epochs, epoch_steps=chosen, time=None)
        fitted = with_growth(fitted, steps / epoch_steps)
    except ConfigError as error:
        raise ConfigError(
            f"time={config.training.time} has room for {plural(epochs, 'epoch')}: {error}"
        ) from None
    if fitted.training.schedule == "cosine":
        return fitted, None
    return before_cooldown(fitted, epoch_steps, steps), budget


def long_enough(
    config: Config, seconds: float, costs: Costs, spent: float, notify: Notify
) -> tuple[Config, float]:
    """`config` with a planned time, in seconds too, of which half is left for training."""
    other = spent + costs.fixed + LEAST_VALIDATIONS * costs.validation
    needed = other + max(seconds / 2, USEFUL_STEPS * costs.full_step)
    if needed <= seconds:
        return config, seconds
    longer = f"{math.ceil(needed)}s"
    notify(
        f"note: time={longer} instead of the planned {config.training.time}: start, validations "
        f"and report take {format_duration(other)} on this machine, which is slow or busy"
    )
    return with_settings(config, time=longer), float(math.ceil(needed))


def epoch_length(config: Config, steps_per_pass: int, costs: Costs, seconds: float) -> int:
    """Optimiser steps of an epoch, so that validations take their share of the time."""
    # whoever gives a setting in epochs thinks of passes over the images
    in_epochs = ("epoch_steps", *settings_with(unit="epochs"))
    if any(getattr(config.training, name) is not None for name in in_epochs):
        return config.training.epoch_steps or steps_per_pass
    each = costs.validation + costs.saving
    room = seconds - costs.fixed
    free = dataclasses.replace(costs, setup=0.0, start=0.0, validation=0.0, saving=0.0, ending=0.0)
    steps = count_that_fit(room, lambda steps: free.of(config, steps_per_pass, steps))
    passes = steps / steps_per_pass
    most = max(MOST_VALIDATIONS, int(passes))
    count = int(min(max(VALIDATIONS_SHARE * room / max(each, 1e-9), LEAST_VALIDATIONS), most))
    return steps_per_pass if count == int(passes) else max(math.ceil(steps / count), 1)


def before_cooldown(config: Config, epoch_steps: int, steps: int) -> Config:
    """`config` for a run of `steps` steps, with the settings that must not change with them.

    The cooldown begins with an epoch: then the run knows how long its epochs really take.
    """
    training = config.training
    epochs = math.ceil(steps / epoch_steps)
    cooldown = steps / epoch_steps * COOLDOWN
    if training.cooldown_epochs is not None:
        cooldown = training.cooldown_epochs
    stable = min(max(round(steps / epoch_steps - cooldown), 0), epochs - 1)
    return with_settings(
        config,
        warmup_epochs=training.warmup,
        cooldown_epochs=steps / epoch_steps - stable,
        cooldown_shares=(),
        cooldown_steps=(),
    )


def with_growth(config: Config, epochs: float) -> Config:
    """`config` with `growth_epochs` for a run of `epochs`, which need not be a whole number.

    Rounded up, a run of 4.1 epochs would use images of full size in its last 0.1 epochs only.
    """
    training = config.training
    if training.start_image_size is None or training.growth_epochs is not None:
        return config
    return with_settings(config, growth_epochs=GROWN * epochs)


def settle_steps(
    config: Config,
    rate: WarmupStableDecay,
    budget: TimeBudget,
    epoch_steps: int,
    step: int,
    pace: float,
    accelerator: Accelerator,
) -> Config:
    """`config` with as many steps as fit the rest of the time, in the cooldown of `rate`.

    The share that the learning rate has at the next step at which they may be settled again is
    settled with it: whatever follows then, the settings give all steps before the rates they had.

    Args:
        pace: Seconds that the run took so far, as a share of what was expected of it.
    """

    def needed(more: int) -> float:
        return pace * budget.costs.between(config, epoch_steps, step, step + more)

    room = -max_over_processes(accelerator, time.monotonic() - budget.ends)
    room -= budget.costs.ending * max(pace, 1.0)  # one pass, not many: it has no faster pace
    steps = step + max(count_that_fit(room, needed), 1)
    if step % epoch_steps:
        steps = min(steps, (step // epoch_steps + 1) * epoch_steps)
    # after the next epoch, or in the last one when half of what remains is made
    half = (steps - step) // 2
    again = (step // epoch_steps + 1) * epoch_steps
    if again >= steps:
        again = step + half if half >= FEWEST_STEPS else steps
    shares, at = config.training.cooldown_shares, config.training.cooldown_steps
    if again < steps:
        share = rate.share(step) * (1 - (again - step) / (steps - step))
        shares, at = (*shares, share), (*at, again - rate.start)
    return with_settings(
        config,
        steps=steps,
        epochs=math.ceil(steps / epoch_steps),
        cooldown_epochs=(steps - rate.start) / epoch_steps,
        cooldown_shares=shares,
        cooldown_steps=at,
    )


def costs_of(config: Config, splits: Splits, accelerator: Accelerator, most: float) -> Costs:
    """What a run costs, measured on one that is thrown away, for some times `most` seconds.

    Its images stay small, and its learning rate near 0 cannot diverge. Images that cannot be read
    are for the run itself to meet, which can say how to go on.
    """
    endless = with_settings(
        config,
        epochs=LONG,
        steps=None,
        warmup_epochs=None,
        cooldown_epochs=None,
        growth_epochs=None,
        on_bad_image="skip",
    )
    watch = Stopwatch(
        wait=lambda: torch.zeros(1, device=accelerator.device).item(),
        agree=partial(max_over_processes, accelerator),
    )
    act = partial(measure, splits=splits, watch=watch, most=most)
    return dry_run(endless, accelerator, act, splits)


def measure(run: TrainingContext, splits: Splits, watch: Stopwatch, most: float) -> Costs:
    """What the parts of a run like `run` cost; `most` seconds for each of them."""
    training = run.config.training
    build = watch.lap()
    starts, small = time_steps(run, splits.train, watch, most)
    full = small
    if training.start_image_size not in (None, run.config.model.image_size):
        run.config = with_settings(run.config, start_image_size=None)
        more, full = time_steps(run, splits.train, watch, most)
        starts += more
    images = run.config.data.batch_size * most / full
    start, validation = time_validation(run, splits.val, watch, images)
    kept = run.config.run.keep_best if training.soup else 0
    written = saving(run, make_schedule(run.config, len(splits.train)).steps_per_epoch)
    probing = 0.0
    if run.config.finetune.probe_first:  # as long as validating on its images; it is epoch 0
        seen = sum(map(len, probe_samples(run.config, splits)))
        probing = validation * (seen / len(splits.val) + 1) + written
    # the main process alone measures once more for the report, and weights that may be averaged
    scores = min(len(splits.val) * len(splits.classes), MOST_SCORES)
    ending = REPORT + SCORE * scores + start + validation * (run.processes + kept)
    others = distance_samples(run.config, splits) if run.task.measures_distance else ()
    for samples in (others, () if training.pretrains else splits.test):
        if samples:
            ending += start + validation * len(samples) / len(splits.val)
    return Costs(
        setup=build + probing,
        start=starts + start,
        small_step=small,
        full_step=full,
        validation=validation,
        saving=written,
        ending=ending,
    )


def time_steps(
    run: TrainingContext, samples: Sequence[Sample], watch: Stopwatch, most: float
) -> tuple[float, float]:
    """Make steps for about `most` seconds after the first one, of the size of the first epoch.

    Returns:
        Seconds that the first steps took beyond their pace, and seconds of a step. The pace is the
        mean of the later half, without the first two: where loading is what takes time, batches
        come in bursts, so that a median would be wrong, and the first ones were loaded before they
        were asked for.
    """
    loader = training_loader(run, samples)
    batches = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in range(LONG))
    seconds: list[float] = []
    try:
        while len(seconds) <= WARM_STEPS or sum(seconds[1:]) < most:
            micro_batches = [next(batches) for _ in range(run.config.data.micro_batches)]
            train_one_step(run, micro_batches, epoch=0)
            seconds.append(watch.lap())
    finally:
        loader.close()
    pace = fmean(seconds[max(len(seconds) // 2, WARM_STEPS) :])
    return max(sum(seconds) - len(seconds) * pace, 0.0), pace


def time_validation(
    run: TrainingContext, samples: Sequence[Sample], watch: Stopwatch, images: float
) -> tuple[float, float]:
    """Validate twice on about `images` images, in batches of the sizes that all `samples` make.

    Returns:
        Seconds that the first time took more than the second, and seconds of all `samples`.
    """
    batch = micro_batch_size(run.config, run.processes) * run.processes
    whole = max(round(images / batch), 1) * batch
    count = min(whole + len(samples) % batch, len(samples))
    part = [samples[number * len(samples) // count] for number in range(count)]
    if run.config.training.captions:  # as large a share of them gets one as of all
        captions = max(round(run.config.training.caption_samples * count / len(samples)), 1)
        run.config = with_settings(run.config, caption_samples=captions)
    loader = evaluation_loader(run, part)
    try:
        watch.lap()
        validate(run, loader, count)
        first = watch.lap()
        validate(run, loader, count)
        second = watch.lap()
    finally:
        loader.close()
    return max(first - second, 0.0), second * len(samples) / count


def saving(run: TrainingContext, steps_per_epoch: int) -> float:
    """Seconds that an epoch spends on writing, if each is the best so far.

    Supposed, not measured: a checkpoint of weights, two moments and the average, at `DISK` bytes a
    second.
    """
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in run.network.parameters()]
    weights, learning = sum(s for s, _ in sizes), sum(s for s, learns in sizes if learns)
    checkpoint = SAVE + (weights + learning * (2 + (run.average is not None))) / DISK
    checkpoints = 1 + steps_per_epoch // (run.config.run.checkpoint_steps or steps_per_epoch + 1)
    return checkpoints * checkpoint + SAVE + weights / DISK


def count_that_fit(room: float, end: Callable[[int], float]) -> int:
    """The largest number, from 0, of epochs whose `end` is not after `room`."""
    most = 1
    while end(most) <= room:
        most *= 2
    return bisect_right(range(1, most + 1), room, key=end)
