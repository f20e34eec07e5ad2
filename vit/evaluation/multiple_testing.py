"""Adjusts p values to the number of tests.

    adjusted p_(i) = max over j <= i of  min((m - j + 1) p_(j), 1)       p_(1) <= ... <= p_(m)

If adjusted values below 0.05 count, one or more false alarms have a probability of 0.05 at most,
whatever the tests have in common.

Source: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
Statistics 6, 1979.
"""

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """p values of several tests, adjusted by Holm's method, in their order."""
    tests, largest = len(p_values), 0.0
    adjusted = [0.0] * tests
    for rank, place in enumerate(sorted(range(tests), key=p_values.__getitem__)):
        largest = max(largest, min((tests - rank) * p_values[place], 1.0))
        adjusted[place] = largest
    return adjusted
