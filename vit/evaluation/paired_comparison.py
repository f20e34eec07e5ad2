"""Whether one of two classifiers is better: both answer the same images, so pairs are compared.

    difference = (only B right - only A right) / images
    p          = P(|X - n/2| >= |only B right - n/2|),  X ~ Binomial(n, 1/2),
                 n = only A right + only B right                          McNemar's exact test
    interval   = 2.5 % and 97.5 % quantiles of the difference over draws of as many images
    needed     = (z_0.975 sqrt(s) + z_0.8 sqrt(s - difference²))² / difference²,  s = n / images

The two shares of right answers say little here: on images that both answer alike, nothing differs.

Source: McNemar, "Note on the sampling error of the difference between correlated proportions",
Psychometrika 12, 1947; number of images: Connor, "Sample size for testing differences in
proportions for the paired-sample design", Biometrics 43, 1987.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vit.evaluation.classification_metrics import Z95, wilson_interval
from vit.evaluation.selective_prediction import binomial_tail

LEVEL = 0.05
Z80 = 0.8416212335729143  # the standard normal's 80 % point
DRAWS = 10_000


@dataclass(frozen=True)
class PairedComparison:
    """Counts of two classifiers on the same images.

    Args:
        count: Number of images, at least 1.
        a_right, b_right: Right answers of each.
        only_a_right, only_b_right: Images that one answers right and the other wrong.
    """

    count: int
    a_right: int
    b_right: int
    only_a_right: int
    only_b_right: int

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
    def verdict(self) -> str:
        """Whether B is better than A, worse, or neither is shown."""
        if self.p_value >= LEVEL:
            return "not distinguishable"
        return "better" if self.difference > 0 else "worse"

    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference, by the paired bootstrap."""
        counts = (self.only_a_right, self.only_b_right)
        shares = [*(count / self.count for count in counts)]
        drawn = np.random.default_rng(0).multinomial(
            self.count, [*shares, max(0.0, 1 - sum(shares))], size=DRAWS
        )
        low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / self.count, [0.025, 0.975])
        return float(low), float(high)

    def images_needed(self) -> int | None:
        """Images that show a difference of this size in 8 of 10 cases; None if there is none."""
        difference = abs(self.difference)
        if not difference:
            return None
        share = (self.only_a_right + self.only_b_right) / self.count
        root = Z95 * math.sqrt(share) + Z80 * math.sqrt(max(share - difference**2, 0.0))
        return math.ceil((root / difference) ** 2)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit compare`."""
        sides = {
            name: {
                "top1": right / self.count,
                "top1_interval": list(wilson_interval(right, self.count)),
            }
            for name, right in (("a", self.a_right), ("b", self.b_right))
        }
        return {
            "count": self.count,
            **sides,
            "difference": self.difference,
            "difference_interval": list(self.interval()),
            "p_value": self.p_value,
            "only_a_right": self.only_a_right,
            "only_b_right": self.only_b_right,
            "verdict": self.verdict,
            "images_needed": self.images_needed(),
        }

    def sentence(self) -> str:
        """The result in words."""
        low, high = self.interval()
        numbers = (
            f"{self.b_right / self.count:.2%} against {self.a_right / self.count:.2%} right, "
            f"{100 * self.difference:+.2f} points (95 % interval {100 * low:+.2f} to "
            f"{100 * high:+.2f}), p = {self.p_value:.2g}"
        )
        if self.verdict != "not distinguishable":
            return f"B is {self.verdict} than A on {self.count:,} images: {numbers}"
        needed = self.images_needed()
        remedy = (
            "" if needed is None else f"; it would take about {needed:,} to show this difference"
        )
        return f"A and B are not distinguishable with {self.count:,} images: {numbers}{remedy}"
