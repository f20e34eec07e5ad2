"""Exact tests of counts, their correction, and the interval of a share; imports no torch.

    Wilson    (t + z²/2n ± z sqrt(t (1 - t)/n + z²/4n²)) / (1 + z²/n)         t: share of n trials
    Holm      adjusted p_(i) = max over j <= i of  min((m - j + 1) p_(j), 1)   p_(1) <= ... <= p_(m)

If p values that Holm's method adjusts count below 0.05, one or more false alarms have a probability
of at most 0.05, whatever the tests have in common.

Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", Journal of
the American Statistical Association 22, 1927; Holm, "A simple sequentially rejective multiple test
procedure", Scandinavian Journal of Statistics 6, 1979.
"""

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # the standard normal's 97.5 % point


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """95 % interval of a share, which stays inside [0, 1] and is honest at 0 and at 1."""
    share, spread = successes / trials, Z95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    low = 0.0 if successes == 0 else centre - half
    return low, 1.0 if successes == trials else centre + half


def holm(p_values: Sequence[float]) -> list[float]:
    """p values of several tests, adjusted by Holm's method, in their order."""
    tests, largest = len(p_values), 0.0
    adjusted = [0.0] * tests
    for rank, place in enumerate(sorted(range(tests), key=p_values.__getitem__)):
        largest = max(largest, min((tests - rank) * p_values[place], 1.0))
        adjusted[place] = largest
    return adjusted


def binomial_tail(successes: int, trials: int, share: float) -> float:
    """P(X <= successes) of a binomial distribution with `share` in (0, 1)."""
    if successes >= trials:
        return 1.0
    terms = (
        _log_choose(trials, k) + k * math.log(share) + (trials - k) * math.log1p(-share)
        for k in range(successes + 1)
    )
    return min(math.fsum(map(math.exp, terms)), 1.0)


def lower_tail(right: int, images: int, hits: int, count: int) -> float:
    """P(X <= right) of the right answers among `count` of `images`, `hits` of which are right."""
    wrong = images - hits
    lowest = max(0, count - wrong)
    if right < lowest:
        return 0.0
    if right * images >= hits * count:  # above the mean: the sum of the other side is the small one
        return 1.0 - lower_tail(count - right - 1, images, wrong, count)
    term = math.exp(
        _log_choose(hits, right) + _log_choose(wrong, count - right) - _log_choose(images, count)
    )
    total = 0.0
    for k in range(right, lowest - 1, -1):
        total += term
        if term <= 1e-18 * total:
            break
        term *= k * (wrong - count + k) / ((hits - k + 1) * (count - k + 1))
    return min(total, 1.0)


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
