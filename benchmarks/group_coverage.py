"""Do the promises about scores hold for images of new groups? By simulation.

    python -m benchmarks groups [--draws 1000]

Each draw makes groups (patients, films) whose images are alike, and whose truth is known. Each
table has a rule with the groups, and in brackets the same rule with images taken as independent:

    intervals     how often the 95 % interval of a share holds the share of all groups; each group
                  has another one, of a beta distribution
    losses        the same of log loss and Brier score, by the bootstrap
    thresholds    how often fewer answers than promised are right from the threshold on; answers of
                  a group are right or wrong together, with confidence c in sqrt(c) of the groups
    sets          share of the images of new groups, each of which counts the same, whose set has
                  the class, where images of large groups are easier
    slices        how often a slice is flagged where none is worse; groups lie in one of 5 slices
"""

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.coverage import markdown, percent
from vit.evaluation.accuracy_slices import Feature, accuracy_slices
from vit.evaluation.classification_metrics import Outcomes, class_intervals
from vit.evaluation.fit_calibration import set_levels
from vit.evaluation.intervals import group_means, share_interval
from vit.evaluation.selective_prediction import precision_threshold

SHARES = (
    # groups, fewest and most images of each, and the beta distribution of their shares
    (40, 1, 12, 2.4, 0.6),
    (20, 5, 5, 2.4, 0.6),
    (10, 5, 19, 2.4, 0.6),
    (100, 2, 7, 2.7, 0.3),
    (6, 10, 10, 1.5, 1.5),
)
LOSSES = ("nll", "brier")
LOSS_GROUPS = ((60, 5), (20, 5))
THRESHOLDS = (600, 1000, 2500)
TARGET = 0.9
SET_GROUPS, NEW_GROUPS, COVERED = 40, 20, 0.9
SLICES = ((20, 2, 30), (60, 2, 14), (200, 2, 30))
HOSPITALS = 5


def groups(options: argparse.Namespace) -> Iterator[str]:
    """Tables of all rules."""
    draws = options.draws
    yield markdown(
        "Intervals of a share: draws that hold it",
        ["groups", "images of each", "mean share", "held"],
        [
            [
                number,
                f"{low} to {high}",
                percent(a / (a + b)),
                with_and_without_groups(held, draws, seed),
            ]
            for seed, (number, low, high, a, b) in enumerate(SHARES)
            for held in [share_draws(number, low, high, a, b)]
        ],
    )
    few = max(draws // 5, 1)
    yield markdown(
        f"Intervals of losses, {few} draws: those that hold it",
        ["groups", "images of each", "log loss", "Brier score"],
        [
            [
                number,
                size,
                *(with_and_without_groups(loss_draws(number, size, name), few) for name in LOSSES),
            ]
            for number, size in LOSS_GROUPS
        ],
    )
    rows = []
    for number in THRESHOLDS:
        found = [threshold_draws(number, few, use_groups) for use_groups in (True, False)]
        rows.append([number, *(f"{a} ({b})" for a, b in zip(*found, strict=True))])
    yield markdown(
        f"At least {TARGET:.0%} of the answers are right, {few} draws, of which 1 % may break it",
        ["groups of 1 to 30 images", "draws with a threshold", "broken"],
        rows,
    )
    yield markdown(
        f"Sets of {COVERED} from {SET_GROUPS} groups",
        ["mean share of a new group covered"],
        [[with_and_without_groups(set_draws(), draws)]],
    )
    yield markdown(
        "Slices where none is worse: draws with a flag",
        ["groups", "images of each", "flagged"],
        [
            [
                number,
                f"{low} to {high}",
                with_and_without_groups(slice_draws(number, low, high), few),
            ]
            for number, low, high in SLICES
        ],
    )


Draw = Callable[[np.random.Generator], Callable[[bool], float]]
"""Draws images; the function that it returns applies a rule to them, with or without groups."""


def with_and_without_groups(draw: Draw, draws: int, seed: int = 0) -> str:
    """Mean outcome of the draws with groups, and in brackets without."""
    generator = np.random.default_rng(seed)
    sums = [0.0, 0.0]
    for _ in range(draws):
        outcome = draw(generator)
        for place, use_groups in enumerate((True, False)):
            sums[place] += outcome(use_groups) / draws
    return f"{percent(sums[0])} ({percent(sums[1])})"


def sized_groups(generator: np.random.Generator, number: int, low: int, high: int) -> Tensor:
    """The group of each image, (images,), of `number` groups of `low` to `high` images."""
    sizes = torch.from_numpy(generator.integers(low, high + 1, number))
    return torch.arange(number).repeat_interleave(sizes)


def share_draws(number: int, low: int, high: int, a: float, b: float) -> Draw:
    """Whether the interval of a share holds that of all groups."""

    def draw(generator: np.random.Generator) -> Callable[[bool], float]:
        which = sized_groups(generator, number, low, high)
        shares = generator.beta(a, b, number)[which]
        hits = torch.from_numpy(generator.random(len(which)) < shares)

        def held(use_groups: bool) -> float:
            least, most = share_interval(hits, which if use_groups else None)
            return float(least <= a / (a + b) <= most)

        return held

    return draw


def loss_draws(number: int, size: int, name: str) -> Draw:
    """Whether the interval of a loss holds that of all groups."""

    def outcomes(groups: int, generator: np.random.Generator) -> tuple[Outcomes, Tensor]:
        """Of three classes, which are recognised better in some groups than in others."""
        which = torch.arange(groups).repeat_interleave(size)
        labels = torch.from_numpy(generator.integers(3, size=groups))[which]
        logits = torch.from_numpy(generator.normal(size=(len(which), 3))) * 0.3
        shift = torch.from_numpy(generator.normal(size=groups))[which]
        logits[torch.arange(len(labels)), labels] += 1 + 1.5 * shift
        return Outcomes.of(logits.softmax(dim=1), labels), which

    many, _ = outcomes(20_000, np.random.default_rng(1))
    losses = {
        "nll": -many.likelihoods.log(),
        "brier": many.squares - 2 * many.likelihoods + 1,
    }
    truth = float(losses[name].mean())

    def draw(generator: np.random.Generator) -> Callable[[bool], float]:
        found, which = outcomes(number, generator)

        def held(use_groups: bool) -> float:
            interval = class_intervals(found, which if use_groups else None)[f"{name}_interval"]
            return float(interval is not None and interval[0] <= truth <= interval[1])

        return held

    return draw


def threshold_draws(number: int, draws: int, use_groups: bool) -> tuple[int, int]:
    """Draws with a threshold, and those whose threshold breaks the promise."""
    generator, proven, broken = torch.Generator().manual_seed(0), 0, 0
    for _ in range(draws):
        sizes = torch.randint(1, 31, (number,), generator=generator)
        which = torch.arange(number).repeat_interleave(sizes)
        confidences = torch.rand(number, generator=generator, dtype=torch.float64)
        right = torch.bernoulli(confidences.sqrt(), generator=generator).bool()
        found = precision_threshold(
            confidences[which], right[which], TARGET, groups=which if use_groups else None
        )
        if found is not None:
            # the mean of sqrt over [threshold, 1]
            share = (2 / 3) * (1 - found.threshold**1.5) / (1 - found.threshold)
            proven, broken = proven + 1, broken + (share < TARGET)
    return proven, broken


def set_draws() -> Draw:
    """Mean share of a new group that the sets cover."""

    def draw(generator: np.random.Generator) -> Callable[[bool], float]:
        effects = torch.from_numpy(generator.random(SET_GROUPS + NEW_GROUPS))
        which = torch.arange(len(effects)).repeat_interleave(1 + ((1 - effects) * 9).long())
        scores = effects[which] + 0.1 * torch.from_numpy(generator.random(len(which)))
        known = which < SET_GROUPS

        def covered(use_groups: bool) -> float:
            (level,) = set_levels(scores[known], [COVERED], which[known] if use_groups else None)
            assert level is not None, "40 groups are enough for 0.9"
            return float(group_means((scores <= level)[~known], which[~known]).mean())

        return covered

    return draw


def slice_draws(number: int, low: int, high: int) -> Draw:
    """Whether a slice is flagged."""

    def draw(generator: np.random.Generator) -> Callable[[bool], float]:
        which = sized_groups(generator, number, low, high)
        right = generator.random(len(which)) < generator.beta(2, 0.7, number)[which]
        hospitals = [f"h{n}" for n in generator.integers(0, HOSPITALS, number)[which]]
        features = [Feature(key="hospital", title="hospital", values=hospitals)]

        def flagged(use_groups: bool) -> float:
            rows = accuracy_slices(right.tolist(), features, which if use_groups else None)
            return float(any(row.flagged for row in rows))

        return flagged

    return draw
