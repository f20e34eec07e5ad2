"""Paired tests against scipy, and their error rates by simulation."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, bootstrap, chi2, norm

from vit.evaluation.paired_comparison import AllPairs, PairedComparison, letters


def counts(only_a: int, only_b: int, count: int = 1000, both: int = 500) -> PairedComparison:
    return PairedComparison(count, both + only_a, both + only_b, only_a, only_b)


def draw(images: int, better: float, random: np.random.Generator) -> PairedComparison:
    """Two networks that differ on a fifth of the images; B is right on more by `better`."""
    kinds = random.choice(3, images, p=[0.1 - better / 2, 0.1 + better / 2, 0.8])
    a, b = torch.from_numpy(kinds == 0), torch.from_numpy(kinds == 1)
    return PairedComparison.of(a, b)


def share_of_verdicts(draws: int, images: int, better: float) -> float:
    """How often a verdict is given; the draws are those of `draw`, all at once."""
    shares = [0.1 - better / 2, 0.1 + better / 2, 0.8]
    drawn = np.random.default_rng(0).multinomial(images, shares, size=draws)[:, :2]
    cases, times = np.unique(drawn, axis=0, return_counts=True)
    verdicts = [counts(*case, count=images).verdict for case in cases.tolist()]
    return sum(times[[one != "not distinguishable" for one in verdicts]]) / draws


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
    low, high = counts(0, 0, count=200).interval()
    assert -low == high == pytest.approx(norm.ppf(0.975) * np.sqrt(2) / 202)
    assert counts(0, 1, count=1, both=0).interval()[1] == 1


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
    assert 0.75 < share_of_verdicts(1000, needed, 0.02) < 0.85
    assert counts(5, 5).images_needed() is None
    assert "to show" not in counts(5, 5).sentence()


def test_images_that_show_nothing_are_never_enough():
    """Five right answers against none: p = 0.06, and 4 by the formula, which is for many images."""
    few = torch.ones(5, dtype=torch.bool)
    found = PairedComparison.of(~few, few)
    assert (found.verdict, found.images_needed()) == ("not distinguishable", None)
    assert "to show" not in found.sentence()


@pytest.mark.parametrize("images", [700, 2000])
def test_equal_networks_are_called_different_in_five_of_a_hundred_cases(images):
    assert 0.03 <= share_of_verdicts(4000, images, 0.0) <= 0.07


@pytest.mark.parametrize(("a", "b"), [(480, 540), (210, 290), (1000, 1010)])
def test_the_exact_test_agrees_with_the_asymptotic_one_of_many_images(a, b):
    statistic = (abs(a - b) - 1) ** 2 / (a + b)
    assert counts(a, b, count=9000).p_value == pytest.approx(chi2.sf(statistic, 1), rel=0.05)


def test_the_interval_is_nearly_that_of_scipys_bootstrap_of_the_images():
    found = counts(30, 52, count=400, both=250)
    differences = np.repeat([-1, 1, 0], [30, 52, 318])
    expected = bootstrap((differences,), np.mean, method="percentile", n_resamples=5000)
    assert found.interval() == pytest.approx(tuple(expected.confidence_interval), abs=0.008)


@pytest.mark.parametrize(("a", "b"), [(0.0, 0.008), (0.002, 0.01), (0.05, 0.1)])
def test_the_interval_holds_the_difference_also_where_few_images_decide(a, b):
    drawn = np.random.default_rng(0).multinomial(200, [a, b, 1 - a - b], size=2000)
    intervals = [counts(*pair, count=200).interval() for pair in drawn[:, :2].tolist()]
    assert sum(low <= b - a <= high for low, high in intervals) >= 0.94 * 2000


@pytest.mark.slow
def test_the_intervals_of_a_thousand_draws_cover_the_difference():
    random = np.random.default_rng(1)
    intervals = [draw(500, 0.05, random).interval() for _ in range(1000)]
    covered = sum(low <= 0.05 <= high for low, high in intervals) / 1000
    assert 0.93 <= covered <= 0.97


def several(draws: int, images: int, skills: list[float]) -> torch.Tensor:
    """Right answers of classifiers, (draws, classifiers, images); some images are hard for all."""
    random = np.random.default_rng(0)
    hardness = random.normal(size=(draws, 1, images))
    own = random.normal(size=(draws, len(skills), images))
    return torch.from_numpy(hardness + own < np.array(skills)[None, :, None])


def test_all_pairs_have_the_tests_of_every_two():
    (right,) = several(1, 300, [1.0, 1.2, 1.4, 1.0])
    found = AllPairs.of(right)
    assert found.right == tuple(right.sum(dim=1).tolist())
    assert list(found.pairs) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert found.pairs[1, 3] == PairedComparison.of(right[1], right[3])
    first = min(found.pairs, key=lambda key: found.pairs[key].p_value)
    assert found.adjusted[first] == pytest.approx(min(6 * found.pairs[first].p_value, 1))
    row = found.to_dict(["a", "b", "c", "d"])["pairs"][4]
    assert (row["a"], row["b"]) == ("B", "D")
    alone = found.pairs[1, 3].to_dict()
    shared = ("difference", "difference_interval", "p_value", "only_a_right", "only_b_right")
    assert {name: row[name] for name in shared} == {name: alone[name] for name in shared}
    assert row["p_adjusted"] == found.adjusted[1, 3] >= row["p_value"]
    assert row["images_needed"] > alone["images_needed"]


def test_two_classifiers_need_no_adjustment():
    (right,) = several(1, 200, [0.5, 1.0])
    found, pair = AllPairs.of(right), PairedComparison.of(*several(1, 200, [0.5, 1.0])[0])
    assert found.adjusted[0, 1] == pair.p_value
    assert found.verdicts[0, 1] == pair.verdict
    assert found.needed((0, 1)) == pair.images_needed()


def test_the_sentence_names_who_is_better_than_whom():
    right = torch.ones(4, 400, dtype=torch.bool)
    assert AllPairs.of(right).sentence().startswith("None of the 4 runs is distinguishable")
    right[1, :100] = False
    right[3, :200] = False
    found = AllPairs.of(right)
    assert found.sentence() == (
        "On 400 images, A is better than B and D; C is better than B and D; B is better than D; "
        "the other pair is not distinguishable (Holm's correction for 6 pairs, 5 % level)"
    )
    assert found.verdicts[0, 1] == "worse"
    assert letters([0, 1, 3]) == "A, B and D"


def test_four_equal_classifiers_are_seldom_called_different_and_a_better_one_mostly():
    alarms = [
        set(AllPairs.of(right).verdicts.values()) != {"not distinguishable"}
        for right in several(300, 500, [1.0] * 4)
    ]
    assert sum(alarms) / len(alarms) <= 0.07
    alone = [AllPairs.of(right).verdicts for right in several(60, 500, [1.0, 1.0, 1.0, 1.6])]
    assert sum(all(one[a, 3] == "better" for a in range(3)) for one in alone) / len(alone) > 0.8
