"""Whether one of two classifiers is better: both answer the same images, so pairs are compared.

Of one class an image, by right answers:

    difference = (only B right - only A right) / images
    p          = P(|X - n/2| >= |only B right - n/2|),  X ~ Binomial(n, 1/2),
                 n = only A right + only B right                          McNemar's exact test
    interval   = d ± z_0.975 sqrt((a + b - d²) / (images + 2)),  d = b - a,
                 a = (only A right + 1) / (images + 2),  b = (only B right + 1) / (images + 2)
    needed     = (z_0.975 sqrt(s) + z_0.8 sqrt(s - difference²))² / difference²,  s = n / images

The two shares of right answers say little here: on images that both answer alike, nothing differs.
Where images of a group (a patient, a film) are alike, A and B may be exchanged within each group
(the exact test of sign flips, McNemar's with groups of one image), and the interval is that of the
effective number of images (vit/evaluation/intervals.py):

    D_g = images of group g that only B gets right - those that only A gets right
    p   = P(|sum_g ± D_g| >= |sum_g D_g|), each sign with probability 1/2

The smallest p of G groups is 2^(1 - G), so fewer than 6 show no difference at 5 %.

Of several classes an image, by the mean average precision (mAP):

    difference = mAP of B - mAP of A
    s²         = (g - 1) / g sum (d_i - mean d)²      d_i: the difference without group i of images,
                                                      in g groups      (the grouped jackknife)
    p          = P(|T| >= |difference| / s),  T: Student's, with the degrees of freedom of a mean
                 over classes, at most g - 1
    interval   = difference ± t_0.975 s
    needed     = images ((z_0.975 + z_0.8) s / difference)²

Of more than two classifiers, every two are compared, with p values that are adjusted to the number
of pairs (Holm, vit/evaluation/exact_tests.py).

Source: McNemar, "Note on the sampling error of the difference between correlated proportions",
Psychometrika 12, 1947; interval: Bonett and Price, "Adjusted Wald confidence interval for a
difference of binomial proportions based on paired data", Journal of Educational and Behavioral
Statistics 37, 2012 (a bootstrap misses the difference where few images decide it); number of
images: Connor, "Sample size for testing differences in proportions for the paired-sample design",
Biometrics 43, 1987; sign flips: Fisher, "The Design of Experiments", section 21, 1935; jackknife:
Efron, "The Jackknife, the Bootstrap and Other Resampling Plans", 1982; degrees of freedom:
Satterthwaite, as in vit/evaluation/multilabel_metrics.py.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice
from statistics import NormalDist
from string import ascii_uppercase
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.evaluation.exact_tests import Z95, binomial_tail, holm
from vit.evaluation.html_page import read_thumbnail, render_page, thumbnails
from vit.evaluation.intervals import (
    FEWEST_DEGREES,
    MIN_GROUPS,
    ROUNDING,
    Interval,
    count_groups,
    effective_images,
    jackknife_error,
    jackknife_weights,
    share_interval,
    student_quantile,
    student_tails,
)
from vit.evaluation.multilabel_metrics import (
    MAX_WORK,
    average_precisions,
    degrees_of_mean,
    map_interval,
)
from vit.text import plural

LEVEL = 0.05
POWER = 0.8
UNDECIDED = "not distinguishable"
MAX_RUNS = len(ascii_uppercase)
"""Classifiers that are compared at once: each has a letter."""
MAX_IMAGES = 48


class MapScores(NamedTuple):
    """The mean average precision of one network, which all its comparisons share."""

    value: float
    interval: Interval
    left_out: Tensor
    """Average precision without each part of the images, (classes, parts)."""

    @staticmethod
    def of(scores: Tensor, targets: Tensor, groups: Tensor | None = None) -> "MapScores":
        """From probabilities, (images, classes); as for `PairedComparison.of_maps`."""
        parts = jackknife_weights(len(scores), groups, most=MAX_WORK // scores.numel())
        return MapScores(
            float(average_precisions(scores, targets).nanmean()),
            map_interval(scores, targets, groups),
            torch.cat([average_precisions(scores, targets, weights) for weights in parts], dim=1),
        )


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """Two classifiers on the same images.

    Args:
        difference: Score of B minus that of A: accuracy or mAP.
        interval: Its 95 % interval; [-1, 1] of too few groups.
        p_value: Probability of so large a difference where neither is better.
        effective: Number of independent images that say as much about the difference.
        error: Standard error of a difference of mAP; NaN where it is not known: fewer than 5 parts
            or groups of images, one without which no class is left, or none that changes it.
    """

    count: int
    only_a_right: int
    only_b_right: int
    difference: float
    interval: tuple[float, float]
    p_value: float
    sides: tuple[dict[str, Any], dict[str, Any]]
    effective: float
    error: float | None = None
    groups: int | None = None

    @staticmethod
    def of(a_right: Tensor, b_right: Tensor, groups: Tensor | None = None) -> "PairedComparison":
        """From whether each answer is right, and the group of each image, (images,) all."""
        count = len(a_right)
        gains = b_right.long() - a_right.long()
        only_a, only_b = int((gains < 0).sum()), int((gains > 0).sum())
        if groups is None:
            number, effective = None, float(count)
            p_value = min(2 * binomial_tail(min(only_a, only_b), only_a + only_b, 0.5), 1.0)
        else:
            number, effective = count_groups(groups), effective_images(gains, groups)
            sums = torch.zeros(number, dtype=torch.int64).index_add_(0, groups, gains)
            p_value = sign_flip_test(sums.tolist())
        share_a, share_b = (
            (effective / count * only + 1) / (effective + 2) for only in (only_a, only_b)
        )
        centre = share_b - share_a
        half = Z95 * math.sqrt((share_a + share_b - centre**2) / (effective + 2))
        interval = max(centre - half, -1.0), min(centre + half, 1.0)
        if number is not None and number < fewest_groups(LEVEL):
            interval = -1.0, 1.0
        side_a, side_b = (
            {"top1": int(right.sum()) / count, "top1_interval": share_interval(right, groups)}
            for right in (a_right, b_right)
        )
        return PairedComparison(
            count=count,
            only_a_right=only_a,
            only_b_right=only_b,
            difference=(only_b - only_a) / count,
            interval=interval,
            p_value=p_value,
            sides=(side_a, side_b),
            effective=effective,
            groups=number,
        )

    @staticmethod
    def of_maps(
        maps: tuple[MapScores, MapScores],
        targets: Tensor,
        right: tuple[Tensor, Tensor],
        groups: Tensor | None = None,
    ) -> "PairedComparison":
        """From scores of multi-label networks; an answer is `right` with all classes right."""
        a, b = maps
        difference, left_out = b.value - a.value, b.left_out - a.left_out
        means, parts = left_out.nanmean(dim=0), left_out.shape[1]
        finite = parts >= MIN_GROUPS and bool(means.isfinite().all())
        known = finite and float(means.max() - means.min()) > ROUNDING
        error = jackknife_error(means) if known else math.nan
        degrees = max(min(degrees_of_mean(left_out, targets), parts - 1), FEWEST_DEGREES)
        half = student_quantile(degrees) * error if known else math.inf
        side_a, side_b = (
            {
                "map": each.value,
                "map_interval": each.interval,
                "subset_accuracy": int(hits.sum()) / len(hits),
            }
            for each, hits in zip(maps, right, strict=True)
        )
        return PairedComparison(
            count=len(targets),
            only_a_right=int((right[0] & ~right[1]).sum()),
            only_b_right=int((~right[0] & right[1]).sum()),
            difference=difference,
            interval=(max(difference - half, -1.0), min(difference + half, 1.0)),
            p_value=student_tails(abs(difference) / error, degrees) if known else 1.0,
            sides=(side_a, side_b),
            effective=len(targets),
            error=error,
            groups=None if groups is None else count_groups(groups),
        )

    @property
    def score(self) -> str:
        """Key of the score in `sides`: top1 or map."""
        return next(iter(self.sides[0]))

    def verdict(self, p_value: float | None = None) -> str:
        """Whether B is better than A, worse, or neither is shown, also at an adjusted p value."""
        if (self.p_value if p_value is None else p_value) >= LEVEL:
            return UNDECIDED
        return "better" if self.difference > 0 else "worse"

    def images_needed(self, level: float = LEVEL) -> int | None:
        """Images that show a difference of this size in 8 of 10 cases.

        None if there is no difference, there are too few groups, or the formula, which is for many
        images, says that these images are enough where they are not.
        """
        unknown = self.error is not None and not self.error > 0  # as of NaN
        if unknown or not self.difference or self.few_groups(level):
            return None
        false, true = map(NormalDist().inv_cdf, (1 - level / 2, POWER))
        if self.error is None:
            share = (self.only_a_right + self.only_b_right) / self.count
            root = false * math.sqrt(share)
            root += true * math.sqrt(max(share - self.difference**2, 0.0))
            needed = (root / abs(self.difference)) ** 2 * self.count / self.effective
        else:
            needed = self.count * ((false + true) * self.error / self.difference) ** 2
        return math.ceil(needed) if needed > self.count or self.p_value < level else None

    def few_groups(self, level: float = LEVEL) -> str:
        """Why no difference can be shown, and the remedy; empty where one can."""
        fewest = fewest_groups(level) if self.error is None else MIN_GROUPS
        if self.groups is None or self.groups >= fewest:
            return ""
        return f"; fewer than {fewest} groups show nothing: give images of at least {fewest} groups"

    @property
    def images(self) -> str:
        groups = f" of {plural(self.groups, 'group')}" if self.groups else ""
        return f"{plural(self.count, 'image')}{groups}"

    def sentence(self) -> str:
        low, high = self.interval
        a, b = (side[self.score] for side in self.sides)
        numbers = (
            f"{b:.2%} against {a:.2%} {'right' if self.score == 'top1' else 'mAP'}, "
            f"{100 * self.difference:+.2f} points (95 % interval {100 * low:+.2f} to "
            f"{100 * high:+.2f}), p = {self.p_value:.2g}"
        )
        if self.verdict() != UNDECIDED:
            return f"B is {self.verdict()} than A on {self.images}: {numbers}"
        needed = self.images_needed()
        remedy = (
            self.few_groups()
            if needed is None
            else f"; it would take about {needed:,} to show this difference"
        )
        return f"A and B are not distinguishable with {self.images}: {numbers}{remedy}"


def compare_all_pairs(
    right: Tensor,
    groups: Tensor | None = None,
    *,
    scores: Sequence[Tensor] = (),
    targets: Tensor | None = None,
) -> dict[tuple[int, int], PairedComparison]:
    """The comparison of every two classifiers, by their places.

    `right` is (classifiers, images); multi-label ones have `scores` and `targets` of (images,
    classes).
    """
    places = combinations(range(len(right)), 2)
    if targets is None or not scores:
        return {(a, b): PairedComparison.of(right[a], right[b], groups) for a, b in places}
    maps = [MapScores.of(one, targets, groups) for one in scores]
    return {
        (a, b): PairedComparison.of_maps((maps[a], maps[b]), targets, (right[a], right[b]), groups)
        for a, b in places
    }


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """An image that some of the classifiers get right, and their answers with their probability."""

    path: str
    label: str
    answers: Sequence[tuple[str, float]]
    right: Sequence[bool]

    def lines(self) -> list[tuple[str, str, float]]:
        """Letters, answer and highest probability of networks with equal answers; right ones come
        first, the others by their probability."""
        places: dict[tuple[bool, str], list[int]] = {}
        for place, (answer, _) in enumerate(self.answers):
            places.setdefault((not self.right[place], answer), []).append(place)
        lines = [
            (wrong, -max(self.answers[place][1] for place in alike), letters(alike), answer)
            for (wrong, answer), alike in places.items()
        ]
        return [(who, answer, -share) for _, share, who, answer in sorted(lines)]

    def order(self) -> tuple[float, float]:
        """Sort key: images on which most runs contradict each other, then the surest mistakes."""
        answers = zip(self.answers, self.right, strict=True)
        wrong = [share for (_, share), right in answers if not right]
        return abs(len(wrong) - len(self.right) / 2), -max(wrong)


@dataclass(frozen=True)
class RunsComparison:
    """Every two of several classifiers on the same images, the result of `vit compare`, with the
    images that some of them get right."""

    names: Sequence[str]
    pairs: Mapping[tuple[int, int], PairedComparison]
    disagreements: Sequence[Disagreement] = ()
    failed: Sequence[dict[str, str]] = ()

    @property
    def first(self) -> PairedComparison:
        return self.pairs[0, 1]

    @cached_property
    def sides(self) -> list[dict[str, Any]]:
        others = (self.pairs[0, place].sides[1] for place in range(1, len(self.names)))
        return [self.first.sides[0], *others]

    @cached_property
    def adjusted(self) -> dict[tuple[int, int], float]:
        """The adjusted p value of each pair."""
        values = holm([pair.p_value for pair in self.pairs.values()])
        return dict(zip(self.pairs, values, strict=True))

    @cached_property
    def verdicts(self) -> dict[tuple[int, int], str]:
        """Whether the second of each pair is better than the first, worse, or neither is shown."""
        return {key: pair.verdict(self.adjusted[key]) for key, pair in self.pairs.items()}

    @property
    def strictest(self) -> float:
        """Level of the strictest test (Bonferroni)."""
        return LEVEL / len(self.pairs)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit compare`."""
        groups = {"groups": self.first.groups} if self.first.groups else {}
        pairs = [
            {
                "a": ascii_uppercase[key[0]],
                "b": ascii_uppercase[key[1]],
                "difference": pair.difference,
                "difference_interval": list(pair.interval),
                "p_value": pair.p_value,
                "p_adjusted": self.adjusted[key],
                "only_a_right": pair.only_a_right,
                "only_b_right": pair.only_b_right,
                "verdict": self.verdicts[key],
                "images_needed": pair.images_needed(self.strictest),
            }
            for key, pair in self.pairs.items()
        ]
        both = zip(self.names, self.sides, strict=True)
        if len(self.names) == 2:
            a, b = ({"run": name, **side} for name, side in both)
            (pair,) = pairs
            del pair["p_adjusted"]
            return {
                "count": self.first.count,
                **pair,
                "a": a,
                "b": b,
                **groups,
                "failed": self.failed,
            }
        return {
            "count": self.first.count,
            **groups,
            "runs": [
                {"name": letter, "run": name, **side}
                for letter, (name, side) in zip(ascii_uppercase, both, strict=False)
            ],
            "pairs": pairs,
            "sentence": self.sentence(),
            "failed": self.failed,
        }

    def sentence(self) -> str:
        """Which of them are distinguishable, in words."""
        if len(self.names) == 2:
            return self.first.sentence()
        worse: dict[int, list[int]] = {}
        for (a, b), verdict in self.verdicts.items():
            if verdict != UNDECIDED:
                winner, loser = (b, a) if verdict == "better" else (a, b)
                worse.setdefault(winner, []).append(loser)
        method = f"Holm's correction for {plural(len(self.pairs), 'pair')}, 5 % level"
        if not worse:
            return (
                f"None of the {len(self.names)} runs is distinguishable from another with "
                f"{self.first.images} ({method}){self.first.few_groups(self.strictest)}"
            )
        scores = [side[self.first.score] for side in self.sides]
        clauses = [
            f"{ascii_uppercase[winner]} is better than {letters(sorted(worse[winner]))}"
            for winner in sorted(worse, key=lambda place: (-scores[place], place))
        ]
        if left := len(self.pairs) - sum(map(len, worse.values())):
            others = "the other pair is" if left == 1 else f"the other {left} pairs are"
            clauses.append(f"{others} {UNDECIDED}")
        return f"On {self.first.images}, {'; '.join(clauses)} ({method})"

    def page(self) -> str:
        """The HTML page: the result in words, and images on which the networks differ."""
        ordered = sorted(self.disagreements, key=Disagreement.order)
        readable = thumbnails(range(len(ordered)), lambda at: read_thumbnail(ordered[at].path))
        return render_page(
            "comparison_page.html.j2",
            heading=" and ".join(self.names) if len(self.names) == 2 else f"{len(self.names)} runs",
            runs=[*zip(ascii_uppercase, self.names, self.sides, strict=False)],
            score=self.first.score,
            groups=self.first.groups,
            pairs=[
                (letters(key), pair, self.adjusted[key], self.verdicts[key])
                for key, pair in self.pairs.items()
            ],
            level=self.strictest,
            sentence=self.sentence(),
            count=len(ordered),
            images=[(ordered[index], image) for index, image in islice(readable, MAX_IMAGES)],
        )


def letters(places: Sequence[int]) -> str:
    """Names of classifiers: `A`, `A and B`, `A, B and C`."""
    *first, last = (ascii_uppercase[place] for place in places)
    return f"{', '.join(first)} and {last}" if first else last


def fewest_groups(level: float) -> int:
    """The smallest number G of groups with 2^(1 - G) < `level`."""
    return math.floor(2 - math.log2(level))


def sign_flip_test(sums: list[int]) -> float:
    """P(|sum of ± s| >= |sum of s|) over all signs of `sums`, exact but for rounding."""
    sizes = Counter(abs(one) for one in sums if one)
    total, observed = sum(size * times for size, times in sizes.items()), abs(sum(sums))
    chances = np.ones(1)  # of the values -total, -total + 1, ..., total
    for size, times in sizes.items():
        spread = np.zeros(2 * size * times + 1)
        spread[:: 2 * size] = fair_coins(times)
        chances = np.convolve(chances, spread)
    values = np.abs(np.arange(-total, total + 1))
    return min(float(chances[values >= observed].sum()), 1.0)


def fair_coins(times: int) -> NDArray[np.float64]:
    """The probability of each number of heads from 0 to `times`."""
    logs = np.array([math.lgamma(heads + 1) for heads in range(times + 1)])
    chances: NDArray[np.float64] = np.exp(logs[-1] - logs - logs[::-1] - times * math.log(2))
    return chances
