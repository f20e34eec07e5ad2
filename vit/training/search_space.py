"""The search space of `vit tune`: changes of the plan's settings.

    trial 0   the plan
    trial n   each setting of SPACE, with probability 1/2, at a value near that of the plan

A change is a function of (seed, trial, setting): a setting that the user chose leaves the others
as they were.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vit.config.parser import make_config
from vit.data.random_seed import random_seed
from vit.errors import ConfigError
from vit.training.plan_rules import Plan, make_plan, neighbours

CHANGE_PROBABILITY = 0.5
MAX_DRAWS = 50
"""Draws of a trial; one fails if its settings contradict each other or are those of another."""


@dataclass(frozen=True, kw_only=True)
class SearchDimension:
    """A setting that trials change."""

    name: str
    kind: Literal["factor", "times", "choice", "network"]
    values: tuple[float, ...] = ()
    chosen: tuple[str, ...] = ()

    def is_fixed(self, values: Mapping[str, Any]) -> bool:
        """Whether the user's settings `values` fix it."""
        return bool({self.name, *self.chosen} & values.keys())


# fallback_lr follows lr; lr, before its factor, follows the batch size as in the plan
SPACE = (
    SearchDimension(name="lr", kind="factor", values=(0.4, 2.5), chosen=("lr", "fallback_lr")),
    SearchDimension(
        name="network",
        kind="network",
        chosen=(
            *("image_size", "patch_size", "dim", "depth", "num_heads", "hidden_dim"),
            *("stem", "stem_depth", "stem_width", "stem_stride"),
        ),
    ),
    SearchDimension(name="batch_size", kind="times", values=(0.5, 2.0)),
    SearchDimension(
        name="min_crop", kind="choice", values=(0.2, 0.35, 0.6, 0.8), chosen=("random_crop",)
    ),
    SearchDimension(name="drop_path", kind="choice", values=(0.0, 0.05, 0.1, 0.2)),
    SearchDimension(name="smoothing", kind="choice", values=(0.0, 0.05, 0.1, 0.2)),
    SearchDimension(name="weight_decay", kind="factor", values=(0.25, 4.0)),
)


def make_trials(
    plan: Plan, values: Mapping[str, Any], seed: int, most: int
) -> list[dict[str, Any]]:
    """At most `most` different trials, the plan first.

    Returns:
        For each its `settings` for `make_config`, the `values` of the searched settings, and those
        of them that are `changes` of the plan.
    """
    base = trial_settings(plan, values, {})
    trials = [{"values": searched_values(base), "changes": {}, "settings": base}]
    for number in range(1, most):
        for attempt in range(MAX_DRAWS):
            drawn, factors = sample_changes(plan, base, values, (seed, number, attempt))
            try:
                settings = trial_settings(plan, values, drawn, factors)
                make_config(settings)
            except ConfigError:  # with settings that the user chose
                continue
            if all(settings != other["settings"] for other in trials):
                tried, planned = searched_values(settings), searched_values(base)
                changes = {name: v for name, v in tried.items() if v != planned.get(name)}
                trials.append({"values": tried, "changes": changes, "settings": settings})
                break
        else:
            break
    return trials


def sample_changes(
    plan: Plan, base: Mapping[str, Any], values: Mapping[str, Any], seed: tuple[int, int, int]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Draw the settings that the plan takes as given, and factors of those that it decides."""
    drawn: dict[str, Any] = {}
    factors: dict[str, float] = {}
    for dimension in SPACE:
        if dimension.is_fixed(values):
            continue
        name = dimension.name
        generator = random.Random(random_seed(*seed, "tune", name))
        if generator.random() >= CHANGE_PROBABILITY:
            continue
        now = base.get(name)
        if dimension.kind == "network":
            if networks := neighbours(plan):
                drawn |= generator.choice(networks)
        elif now is None or (name == "min_crop" and now == 1):
            continue  # the plan has no such setting, or crops would cut characters
        elif dimension.kind == "choice":
            drawn[name] = generator.choice([value for value in dimension.values if value != now])
        elif dimension.kind == "times":
            size = round(now * generator.choice(dimension.values))
            drawn[name] = min(max(size, 1), plan.facts.images)
        else:
            factor = math.exp(generator.uniform(*map(math.log, dimension.values)))
            if name == "lr":
                factors["lr"] = factor
            else:
                drawn[name] = three_digits(now * factor)
    return drawn, factors


def trial_settings(
    plan: Plan,
    values: Mapping[str, Any],
    drawn: Mapping[str, Any],
    factors: Mapping[str, float] = {},
) -> dict[str, Any]:
    """Settings of a training by the plan, with `drawn` as if the user chose them."""
    given = {name: value for name, value in values.items() if name != "time"}
    planned = make_plan(plan.facts, {**plan.given, **drawn}).settings
    settings = {**given, **planned, **drawn}
    settings.pop("time", None)
    usual = make_config({}).training
    settings.setdefault("smoothing", usual.smoothing)
    if "lr" not in values:
        for name in ("lr", "fallback_lr"):
            peak = settings.get(name, getattr(usual, name))
            if peak is not None and name not in values:
                least = settings.get("min_lr", usual.min_lr)
                settings[name] = max(three_digits(peak * factors.get("lr", 1.0)), least)
    return settings


def three_digits(value: float) -> float:
    """`value` rounded to three significant digits."""
    return float(f"{value:.3g}")


def searched_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of SPACE, with the network by its name."""
    names = [one.name for one in SPACE if one.kind != "network" and one.name in settings]
    return {"network": network_name(settings), **{name: settings[name] for name in names}}


def network_name(settings: Mapping[str, Any]) -> str:
    """Blocks x width, patch size and image size of a network; it differs where costs differ."""
    size, patch = settings["image_size"], settings["patch_size"]
    return f"{settings['depth']} x {settings['dim']}, patches of {patch} at {size} px"
