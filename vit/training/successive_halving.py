"""Successive halving: rungs of equal time a trial, and which trials advance.

    rung r:  n / 3^r trials, 3^r times as long each; the best third advances, and always trial 0

Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization", arXiv:1502.07943; Li et al., "Hyperband", arXiv:1603.06560.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from vit.config import Config
from vit.config.parser import make_config, with_settings
from vit.data.dataset_types import Splits
from vit.errors import ConfigError
from vit.training.search_space import network_name
from vit.training.time_budget import REPORT, Costs, costs_of, count_that_fit

SEARCH_SHARE = 0.5
"""Share of the time that is for the search."""
FACTOR = 3
"""Each rung has so many times fewer trials than the one before, each so many times as long."""
MAX_FINAL_TRIALS = 3
"""Trials of the last rung at most, trial 0 among them."""
TRIAL_COUNTS = (18, 9, 6, 3)
"""Numbers of trials to choose from if the user gives none."""
MIN_STARTUPS = 4.0
"""Time of a trial of the first rung, relative to what starting it takes, beside one pass over the
images. Half of it is enough for the smallest number of trials."""
MIN_STEPS = 8
"""Optimiser steps of a trial at least."""
VALIDATIONS = 4
"""Validations of a trial, the last one at its end."""

Record = Mapping[str, Any]
"""A search as in tune.json: `trials`, `rungs` and the `results` so far."""


def with_steps(config: Config, steps: int) -> Config:
    """`config` of a training of so many steps, validated `VALIDATIONS` times."""
    epoch_steps = math.ceil(steps / VALIDATIONS)
    epochs = math.ceil(steps / epoch_steps)
    return with_settings(config, time=None, steps=steps, epoch_steps=epoch_steps, epochs=epochs)


class CostMeter:
    """Measures the costs of trials, once for each network."""

    def __init__(
        self, completed: Config, splits: Splits, accelerator: Accelerator, most: float
    ) -> None:
        self.completed = completed
        self.splits = splits
        self.accelerator = accelerator
        self.most = most
        self.measured: dict[str, tuple[int, Costs]] = {}

    def __call__(self, trial: Mapping[str, Any]) -> tuple[Config, Costs]:
        """The settings of a trial from `make_trials`, and the costs of its trainings."""
        config, completed = make_config(trial["settings"]), self.completed
        chosen = "accumulate" in trial["settings"]
        parts = (config if chosen else completed).data.micro_batches
        while config.data.batch_size % parts:  # of a batch that a trial changed
            parts += 1
        config = with_settings(
            config,
            num_classes=completed.model.num_classes,
            accumulate=parts,
            intensity_range=completed.data.intensity_range,
            task=completed.training.task,
            probe_first=completed.finetune.probe_first,
        )
        name, batch_size = network_name(trial["settings"]), config.data.batch_size
        if name not in self.measured:
            if not self.measured:  # imports and compilation, which count for no network
                costs_of(config, self.splits, self.accelerator, 0.0)
            costs = costs_of(config, self.splits, self.accelerator, self.most)
            self.measured[name] = batch_size, costs
        measured_batch_size, costs = self.measured[name]
        share = batch_size / measured_batch_size
        return config, dataclasses.replace(
            costs,
            small_step=costs.small_step * share,
            full_step=costs.full_step * share,
            ending=max(costs.ending - REPORT - costs.validation, 0.0),  # there is no report
        )


def rung_sizes(trials: int) -> list[int]:
    """Trials of each rung."""
    sizes = [trials]
    while sizes[-1] > MAX_FINAL_TRIALS:
        sizes.append(max(sizes[-1] // FACTOR, 2))
    return sizes


def first_rung_seconds(trials: int, seconds: float) -> float:
    """Seconds of a trial of the first rung in a search of `seconds`."""
    parts: int = sum(size * FACTOR**at for at, size in enumerate(rung_sizes(trials)))
    return seconds / parts


def count_trials(
    available: int,
    plan: tuple[Config, Costs],
    *,
    images: int,
    startup: float,
    seconds: float,
    requested: int | None,
) -> int:
    """Choose the number of trials: the requested one, or the most whose trials are long enough."""
    config, costs = plan
    if available < (requested or MAX_FINAL_TRIALS):
        raise ConfigError(
            f"the settings that are given leave only {available} different trials, the plan among "
            "them: leave some of them out, ask for fewer --trials, or use vit train"
        )
    if requested:
        return requested
    needed = images / config.data.batch_size * costs.full_step
    needed += MIN_STARTUPS * (startup + fixed_costs(costs))
    fitting = (n for n in TRIAL_COUNTS if n <= available)
    return next((n for n in fitting if first_rung_seconds(n, seconds) >= needed), MAX_FINAL_TRIALS)


def fixed_costs(costs: Costs) -> float:
    """Seconds of a trial besides its steps."""
    return costs.fixed + VALIDATIONS * (costs.validation + costs.saving)


def make_rungs(
    costs: Sequence[tuple[Config, Costs]],
    *,
    startup: float,
    seconds: float,
    total_seconds: float,
    requested: bool,
) -> list[dict[str, Any]]:
    """The rungs: number of trials, seconds of each, and the optimiser steps of every trial."""
    number = len(costs)
    least = startup + max(cost.of(with_steps(one, MIN_STEPS), 2, MIN_STEPS) for one, cost in costs)
    if not requested:
        least = max(least, MIN_STARTUPS / 2 * (startup + fixed_costs(costs[0][1])))
    first = first_rung_seconds(number, seconds)
    if first < least:
        missing = least / first_rung_seconds(number, 1.0) - seconds
        enough = total_seconds + missing / SEARCH_SHARE
        other = "fewer --trials" if requested else "vit train, which makes one training of it"
        raise ConfigError(
            f"time={total_seconds:g}s: half of it searches, in which {number} trials have "
            f"{max(first, 0):.1f} s each and need {least:.1f} s: use --time "
            f"{math.ceil(1.2 * enough)}s or more, or {other}"
        )
    rungs = []
    for at, size in enumerate(rung_sizes(number)):
        each = first * FACTOR**at
        steps = [steps_within(each - startup, one, cost) for one, cost in costs]
        rungs.append({"trials": size, "seconds": round(each, 2), "steps": steps})
    return rungs


def steps_within(seconds: float, config: Config, costs: Costs) -> int:
    """Optimiser steps of a training that takes `seconds`."""

    def end(steps: int) -> float:
        sized = with_steps(config, steps)
        return costs.of(sized, sized.training.epoch_steps or 1, steps)

    return max(count_that_fit(seconds, end), MIN_STEPS)


def find_result(record: Record, rung: int, trial: int) -> dict[str, Any] | None:
    """The result of a trial in a rung, if it has one."""
    own = (one for one in record["results"] if (one["rung"], one["trial"]) == (rung, trial))
    return next(own, None)


def score_key(result: Mapping[str, Any]) -> tuple[float, float]:
    """Sort key, higher is better: the score, then negative loss; lowest for a failed trial."""
    if "error" in result:
        return -math.inf, -math.inf
    return result["score"], -result["scores"]["loss"]


def ranked_results(record: Record, rung: int) -> list[dict[str, Any]]:
    """Results of a rung, the best first; ties: the earlier trial."""
    results = [one for one in record["results"] if one["rung"] == rung]
    return sorted(sorted(results, key=lambda one: one["trial"]), key=score_key, reverse=True)


def trials_of_rung(record: Record, rung: int) -> list[int]:
    """All trials in rung 1; then the best of the rung before, trial 0 among them."""
    if rung == 1:
        return [one["trial"] for one in record["trials"]]
    size = record["rungs"][rung - 1]["trials"]
    results = ranked_results(record, rung - 1)
    best = [one["trial"] for one in results if "error" not in one][:size]
    if 0 not in best:
        best[-1] = 0
    return sorted(best)


def final_results(record: Record) -> list[dict[str, Any]]:
    """Results of the last complete rung, the best first; else of the first rung."""
    for rung in range(len(record["rungs"]), 0, -1):
        results = ranked_results(record, rung)
        if results and len(results) == len(trials_of_rung(record, rung)):
            return results
    return ranked_results(record, 1)


def leaderboard(record: Record) -> list[dict[str, Any]]:
    """The result of each trial in its last rung, the best first."""
    rungs = [final_results(record)[0]["rung"], *range(len(record["rungs"]), 0, -1)]
    best: dict[int, dict[str, Any]] = {}
    for rung in rungs:
        for result in ranked_results(record, rung):
            best.setdefault(result["trial"], result)
    return [*best.values()]


def seconds_spent(record: Record) -> float:
    """Seconds of the search so far."""
    return float(record["seconds"]) + math.fsum(one["seconds"] for one in record["results"])
