"""Paired tests against scipy, and their error rates by simulation."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, norm

from vit.evaluation.paired_comparison import PairedComparison


def counts(only_a: int, only_b: int, count: int = 1000, both: int = 500) -> PairedComparison:
    return PairedComparison(count, both + only_a, both + only_b, only_a, only_b)


def draw(images: int, better: float, random: np.random.Generator) -> PairedComparison:
    """Two networks that differ on a fifth of the images; B is right on more by `better`."""
    kinds = random.choice(3, images, p=[0.1 - better / 2, 0.1 + better / 2, 0.8])
    a, b = torch.from_numpy(kinds == 0), torch.from_numpy(kinds == 1)
    return PairedComparison.of(a, b)


def share_of_verdicts(draws: int, images: int, better: float) -> float:
    random = np.random.default_rng(0)
    found = [draw(images, better, random).verdict for _ in range(draws)]
    return sum(one != "not distinguishable" for one in found) / draws


@pytest.mark.parametrize(
    ("a", "b"), [(0, 0), (0, 1), (3, 3), (5, 14), (30, 12), (200, 260), (0, 9)]
)
def test_the_p_value_is_scipys(a, b):
    expected = binomtest(a, a + b).pvalue if a + b else 1.0
    assert counts(a, b).p_value == pytest.approx(expected, rel=1e-9)


def test_counts_are_those_of_the_answers():
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, True])
    found = PairedComparison.of(a, b)
    assert found == PairedComparison(4, 2, 3, 1, 2)
    assert found.difference == 0.25
    result = found.to_dict()
    assert result["a"]["top1"] == 0.5
    assert result["b"]["top1"] == 0.75
    assert result["verdict"] == "not distinguishable"


def test_the_interval_is_nearly_the_normal_one():
    found = counts(80, 130, count=2000)
    low, high = found.interval()
    share, difference = 210 / 2000, 50 / 2000
    half = norm.ppf(0.975) * np.sqrt((share - difference**2) / 2000)
    assert (low, high) == pytest.approx((difference - half, difference + half), abs=1e-3)
    assert found.interval() == (low, high)
    assert counts(0, 0).interval() == (0.0, 0.0)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [(10, 40, "better"), (40, 10, "worse"), (10, 12, "not distinguishable")],
)
def test_the_verdict_is_about_b(a, b, verdict):
    found = counts(a, b)
    assert found.verdict == verdict
    assert verdict in found.sentence()


def test_as_many_images_as_needed_show_the_difference():
    found = counts(90, 110)
    needed = found.images_needed()
    assert f"about {needed:,} to show this difference" in found.sentence()
    assert 0.72 < share_of_verdicts(200, needed, 0.02) < 0.9
    assert counts(5, 5).images_needed() is None
    assert "to show" not in counts(5, 5).sentence()


def test_equal_networks_are_seldom_called_different():
    assert share_of_verdicts(400, 500, 0.0) < 0.08


@pytest.mark.slow
def test_error_rates_in_two_thousand_draws():
    assert 0.03 <= share_of_verdicts(2000, 2000, 0.0) <= 0.07
    random = np.random.default_rng(1)
    intervals = [draw(500, 0.05, random).interval() for _ in range(1000)]
    covered = sum(low <= 0.05 <= high for low, high in intervals) / 1000
    assert 0.93 <= covered <= 0.97
