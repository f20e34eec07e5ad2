"""Whether one of two classifiers is better: both answer the same images, so pairs are compared.

One class an image; of several, vit/evaluation/paired_map.py compares the average precision.

    difference = (only B right - only A right) / images
    p          = P(|X - n/2| >= |only B right - n/2|),  X ~ Binomial(n, 1/2),
                 n = only A right + only B right                          McNemar's exact test
    interval   = d ± z_0.975 sqrt((a + b - d²) / (images + 2)),  d = b - a,
                 a = (only A right + 1) / (images + 2),  b likewise
    needed     = (z_0.975 sqrt(s) + z_0.8 sqrt(s - difference²))² / difference²,  s = n / images

The two shares of right answers say little here: on images that both answer alike, nothing differs.

Of more than two, every two are compared, with p values that are adjusted to the number of pairs
(vit/evaluation/multiple_testing.py).

Source: McNemar, "Note on the sampling error of the difference between correlated proportions",
Psychometrika 12, 1947; interval: Bonett and Price, "Adjusted Wald confidence interval for a
difference of binomial proportions based on paired data", Journal of Educational and Behavioral
Statistics 37, 2012 (a bootstrap misses the difference where few images decide it); number of
images: Connor, "Sample size for testing differences in proportions for the paired-sample design",
Biometrics 43, 1987.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from statistics import NormalDist
from string import ascii_uppercase
from typing import Any, ClassVar

from torch import Tensor

from vit.evaluation.multiple_testing import holm
from vit.evaluation.selective_prediction import binomial_tail
from vit.evaluation.wilson_interval import Z95, wilson_interval
from vit.text import plural

LEVEL = 0.05
POWER = 0.8
UNDECIDED = "not distinguishable"
MAX_RUNS = len(ascii_uppercase)
"""Classifiers that are compared at once: each has a letter."""


@dataclass(frozen=True)
class PairedComparison:
    """Counts of two classifiers on the same images.

    Args:
        count: Number of images, at least 1.
        groups: Number of groups of images that are alike; None of independent images.
    """

    count: int
    a_right: int
    b_right: int
    only_a_right: int
    only_b_right: int
    groups: int | None = field(default=None, kw_only=True)

    score: ClassVar[str] = "top1"
    """Key of the score in `side`."""
    words: ClassVar[str] = "right"
    """The score in sentences."""

    @staticmethod
    def of(a_right: Tensor, b_right: Tensor) -> "PairedComparison":
        """From whether each answer is right, (images,) both."""
        return PairedComparison(
            len(a_right),
            int(a_right.sum()),
            int(b_right.sum()),
            int((a_right & ~b_right).sum()),
            int((~a_right & b_right).sum()),
        )

    @property
    def difference(self) -> float:
        """Accuracy of B minus that of A."""
        return (self.only_b_right - self.only_a_right) / self.count

    @property
    def p_value(self) -> float:
        """Probability of so unequal counts where neither is better."""
        discordant = self.only_a_right + self.only_b_right
        if not discordant:
            return 1.0
        tail = binomial_tail(min(self.only_a_right, self.only_b_right), discordant, 0.5)
        return min(2 * tail, 1.0)

    @property
    def informative(self) -> float:
        """Number of independent images that say as much about the difference as these."""
        return self.count

    @property
    def verdict(self) -> str:
        """Whether B is better than A, worse, or neither is shown."""
        return self.verdict_at(self.p_value)

    def verdict_at(self, p_value: float) -> str:
        """The verdict at an adjusted p value."""
        if p_value >= LEVEL:
            return UNDECIDED
        return "better" if self.difference > 0 else "worse"

    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference."""
        total, scale = self.informative + 2, self.informative / self.count
        only_a, only_b = (
            (scale * only + 1) / total for only in (self.only_a_right, self.only_b_right)
        )
        centre = only_b - only_a
        half = Z95 * math.sqrt((only_a + only_b - centre**2) / total)
        return max(centre - half, -1.0), min(centre + half, 1.0)

    def images_needed(self, level: float = LEVEL) -> int | None:
        """Images that show a difference of this size in 8 of 10 cases.

        None if there is no difference, there are too few groups, or the formula, which is for many
        images, says that these images are enough where they are not.
        """
        if not self.difference or self.few_groups(level):
            return None
        needed = self.expected_images(level)
        return math.ceil(needed) if needed > self.count or self.p_value < level else None

    def expected_images(self, level: float) -> float:
        """`images_needed` of a difference, by the formula above."""
        difference = abs(self.difference)
        share = (self.only_a_right + self.only_b_right) / self.count
        false, true = map(NormalDist().inv_cdf, (1 - level / 2, POWER))
        root = false * math.sqrt(share) + true * math.sqrt(max(share - difference**2, 0.0))
        return (root / difference) ** 2

    def fewest_groups(self, _level: float) -> int:
        """Groups of images from which on a difference can be shown at a level."""
        return 0

    def few_groups(self, level: float = LEVEL) -> str:
        """Why no difference can be shown, and the remedy; empty where one can."""
        fewest = self.fewest_groups(level)
        if self.groups is None or self.groups >= fewest:
            return ""
        return f"; fewer than {fewest} groups show nothing: give images of at least {fewest} groups"

    def side(self, place: int) -> dict[str, Any]:
        """The scores of A (0) or B (1)."""
        right = (self.a_right, self.b_right)[place]
        return {
            "top1": right / self.count,
            "top1_interval": list(wilson_interval(right, self.count)),
        }

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit compare`."""
        return {
            "count": self.count,
            "a": self.side(0),
            "b": self.side(1),
            "difference": self.difference,
            "difference_interval": list(self.interval()),
            "p_value": self.p_value,
            "only_a_right": self.only_a_right,
            "only_b_right": self.only_b_right,
            "verdict": self.verdict,
            "images_needed": self.images_needed(),
            **({"groups": self.groups} if self.groups else {}),
        }

    @property
    def images(self) -> str:
        """The images in words."""
        groups = f" of {plural(self.groups, 'group')}" if self.groups else ""
        return f"{plural(self.count, 'image')}{groups}"

    def sentence(self) -> str:
        """The result in words."""
        low, high = self.interval()
        numbers = (
            f"{self.side(1)[self.score]:.2%} against {self.side(0)[self.score]:.2%} {self.words}, "
            f"{100 * self.difference:+.2f} points (95 % interval {100 * low:+.2f} to "
            f"{100 * high:+.2f}), p = {self.p_value:.2g}"
        )
        if self.verdict != UNDECIDED:
            return f"B is {self.verdict} than A on {self.images}: {numbers}"
        needed = self.images_needed()
        remedy = (
            self.few_groups()
            if needed is None
            else f"; it would take about {needed:,} to show this difference"
        )
        return f"A and B are not distinguishable with {self.images}: {numbers}{remedy}"


@dataclass(frozen=True)
class AllPairs:
    """Comparisons of every two of several classifiers on the same images.

    Args:
        count: Number of images, at least 1.
    """

    count: int
    runs: int
    pairs: Mapping[tuple[int, int], PairedComparison]

    @staticmethod
    def of(
        right: Tensor,
        compared: Callable[[int, int], PairedComparison] | None = None,
    ) -> "AllPairs":
        """From whether each answer is right, (classifiers, images)."""
        compared = compared or (lambda a, b: PairedComparison.of(right[a], right[b]))
        pairs = {(a, b): compared(a, b) for a, b in combinations(range(len(right)), 2)}
        return AllPairs(right.shape[1], len(right), pairs)

    @property
    def right(self) -> tuple[int, ...]:
        """Right answers of each."""
        others = (self.pairs[0, place].b_right for place in range(1, self.runs))
        return (self.pairs[0, 1].a_right, *others)

    @cached_property
    def sides(self) -> list[dict[str, Any]]:
        """The scores of each classifier."""
        return [self.pairs[0, 1].side(0), *(self.pairs[0, b].side(1) for b in range(1, self.runs))]

    @property
    def score(self) -> str:
        """Key of the score in `sides`."""
        return self.pairs[0, 1].score

    @cached_property
    def adjusted(self) -> dict[tuple[int, int], float]:
        """The adjusted p value of each pair."""
        values = holm([pair.p_value for pair in self.pairs.values()])
        return dict(zip(self.pairs, values, strict=True))

    @cached_property
    def verdicts(self) -> dict[tuple[int, int], str]:
        """Whether the second of each pair is better than the first, worse, or neither is shown."""
        return {key: pair.verdict_at(self.adjusted[key]) for key, pair in self.pairs.items()}

    @property
    def strictest(self) -> float:
        """Level of the strictest test (Bonferroni)."""
        return LEVEL / len(self.pairs)

    def needed(self, pair: tuple[int, int]) -> int | None:
        """As `PairedComparison.images_needed`, at the level of the strictest test."""
        return self.pairs[pair].images_needed(self.strictest)

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """The JSON of `vit compare` with more than two runs, of these names."""
        runs = [
            {"name": letter, "run": name, **side}
            for letter, name, side in zip(ascii_uppercase, names, self.sides, strict=False)
        ]
        pairs = [
            {
                "a": ascii_uppercase[key[0]],
                "b": ascii_uppercase[key[1]],
                "difference": pair.difference,
                "difference_interval": list(pair.interval()),
                "p_value": pair.p_value,
                "p_adjusted": self.adjusted[key],
                "only_a_right": pair.only_a_right,
                "only_b_right": pair.only_b_right,
                "verdict": self.verdicts[key],
                "images_needed": self.needed(key),
            }
            for key, pair in self.pairs.items()
        ]
        groups = self.pairs[0, 1].groups
        return {
            "count": self.count,
            **({"groups": groups} if groups else {}),
            "runs": runs,
            "pairs": pairs,
            "sentence": self.sentence(),
        }

    def sentence(self) -> str:
        """Which of them are distinguishable, in words."""
        worse: dict[int, list[int]] = {}
        for (a, b), verdict in self.verdicts.items():
            if verdict != UNDECIDED:
                winner, loser = (b, a) if verdict == "better" else (a, b)
                worse.setdefault(winner, []).append(loser)
        method = f"Holm's correction for {plural(len(self.pairs), 'pair')}, 5 % level"
        images = self.pairs[0, 1].images
        if not worse:
            return (
                f"None of the {self.runs} runs is distinguishable from another with {images} "
                f"({method}){self.pairs[0, 1].few_groups(self.strictest)}"
            )
        found = [
            f"{ascii_uppercase[winner]} is better than {letters(sorted(worse[winner]))}"
            for winner in sorted(worse, key=lambda place: (-self.sides[place][self.score], place))
        ]
        left = len(self.pairs) - sum(map(len, worse.values()))
        others = "the other pair is" if left == 1 else f"the other {left} pairs are"
        rest = [f"{others} {UNDECIDED}"] if left else []
        return f"On {images}, {'; '.join([*found, *rest])} ({method})"


def letters(places: Sequence[int]) -> str:
    """Names of classifiers: `A`, `A and B`, `A, B and C`."""
    *first, last = (ascii_uppercase[place] for place in places)
    return f"{', '.join(first)} and {last}" if first else last
