"""Paired tests against scipy and scikit-learn, and their error rates by simulation."""

from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, bootstrap, norm
from scipy.stats import t as student
from sklearn.metrics import average_precision_score

from vit.evaluation import paired_comparison
from vit.evaluation.intervals import jackknife_weights
from vit.evaluation.multilabel_metrics import degrees_of_mean, map_interval
from vit.evaluation.paired_comparison import (
    MapScores,
    PairedComparison,
    RunsComparison,
    compare_all_pairs,
    letters,
    sign_flip_test,
)

UNDECIDED = "not distinguishable"
NEITHER = torch.zeros(60, dtype=torch.bool)


def counts(only_a: int, only_b: int, count: int = 1000, both: int = 500) -> PairedComparison:
    kinds = torch.arange(count)
    alike = (kinds >= only_a + only_b) & (kinds < only_a + only_b + both)
    a_only = kinds < only_a
    b_only = (kinds >= only_a) & (kinds < only_a + only_b)
    return PairedComparison.of(alike | a_only, alike | b_only)


def runs_comparison(right: torch.Tensor, *arguments, **settings) -> RunsComparison:
    pairs = compare_all_pairs(right, *arguments, **settings)
    return RunsComparison([f"run {number}" for number in range(len(right))], pairs)


def share_of_verdicts(draws: int, images: int, better: float) -> float:
    """How often a verdict is given to networks that differ on a fifth of the images."""
    shares = [0.1 - better / 2, 0.1 + better / 2, 0.8]
    drawn = np.random.default_rng(0).multinomial(images, shares, size=draws)[:, :2]
    cases, times = np.unique(drawn, axis=0, return_counts=True)
    verdicts = [counts(*case, count=images).verdict() for case in cases.tolist()]
    return sum(times[[one != UNDECIDED for one in verdicts]]) / draws


@pytest.mark.parametrize(
    ("a", "b"), [(0, 0), (0, 1), (3, 3), (5, 14), (30, 12), (200, 260), (0, 9)]
)
def test_the_p_value_is_scipys(a, b):
    expected = binomtest(a, a + b).pvalue if a + b else 1.0
    assert counts(a, b).p_value == pytest.approx(expected, rel=1e-9)


def test_the_interval_is_nearly_the_normal_one():
    found = counts(80, 130, count=2000)
    share, difference = 210 / 2000, 50 / 2000
    half = norm.ppf(0.975) * np.sqrt((share - difference**2) / 2000)
    assert found.interval == pytest.approx((difference - half, difference + half), abs=1e-3)
    low, high = counts(0, 0, count=200, both=100).interval
    assert -low == high == pytest.approx(norm.ppf(0.975) * np.sqrt(2) / 202)
    assert counts(0, 1, count=1, both=0).interval[1] == 1


@pytest.mark.parametrize(
    ("a", "b", "verdict"), [(10, 40, "better"), (40, 10, "worse"), (10, 12, UNDECIDED)]
)
def test_the_verdict_is_about_b(a, b, verdict):
    assert counts(a, b).verdict() == verdict
    assert verdict in counts(a, b).sentence()


@pytest.mark.slow
def test_as_many_images_as_needed_show_the_difference():
    found = counts(90, 110)
    needed = found.images_needed()
    assert f"about {needed:,} to show this difference" in found.sentence()
    assert 0.75 < share_of_verdicts(1000, needed, 0.02) < 0.85


@pytest.mark.parametrize(("a", "b", "both"), [(5, 5, 500), (0, 5, 0)])
def test_images_that_show_nothing_are_never_enough(a, b, both):
    """Five right answers against none: p = 0.06, and 4 by the formula, which is for many images."""
    found = counts(a, b, a + b + both, both)
    assert (found.verdict(), found.images_needed()) == (UNDECIDED, None)
    assert "to show" not in found.sentence()


def test_equal_networks_are_called_different_in_five_of_a_hundred_cases():
    assert 0.03 <= share_of_verdicts(4000, 700, 0.0) <= 0.07


def test_the_interval_is_nearly_that_of_scipys_bootstrap_of_the_images():
    differences = np.repeat([-1, 1, 0], [30, 52, 318])
    expected = bootstrap((differences,), np.mean, method="percentile", n_resamples=5000)
    found = counts(30, 52, count=400, both=250)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval), abs=0.008)


@pytest.mark.parametrize(("a", "b"), [(0.0, 0.008), (0.002, 0.01), (0.05, 0.1)])
def test_the_interval_holds_the_difference_also_where_few_images_decide(a, b):
    drawn = np.random.default_rng(0).multinomial(200, [a, b, 1 - a - b], size=2000)
    cases, times = np.unique(drawn[:, :2], axis=0, return_counts=True)
    intervals = [counts(*pair, count=200, both=90).interval for pair in cases.tolist()]
    held = [low <= b - a <= high for low, high in intervals]
    assert sum(times[held]) >= 0.94 * 2000


@pytest.mark.parametrize(
    "sums", [[], [0, 0], [1], [3, -1, 2], [1, 1, 1, 1, 1], [4, -4, 2, 2, 0, 7, -1, 1], [2] * 9]
)
def test_p_counts_all_signs(sums):
    flipped = [sum(map(np.multiply, sums, signs)) for signs in product((-1, 1), repeat=len(sums))]
    expected = np.mean([abs(one) >= abs(sum(sums)) for one in flipped])
    assert sign_flip_test(sums) == pytest.approx(expected, rel=1e-12)


def test_groups_of_one_image_give_mcnemars_test():
    a, b = torch.arange(300) % 7 > 0, torch.arange(300) % 5 > 0
    alone, found = PairedComparison.of(a, b), PairedComparison.of(a, b, torch.arange(300))
    discordant = alone.only_a_right + alone.only_b_right
    assert (alone.only_a_right, discordant) == (int((a & ~b).sum()), int((a != b).sum()))
    assert found.p_value == pytest.approx(binomtest(alone.only_a_right, discordant).pvalue)
    assert found.interval == pytest.approx(alone.interval, abs=2e-3)
    assert found.images_needed() == pytest.approx(alone.images_needed(), rel=0.02)
    assert (alone.groups, found.groups) == (None, 300)
    assert "with 300 images of 300 groups" in found.sentence()


def test_many_images_of_a_few_sizes_are_fast_and_exact():
    assert sign_flip_test([1] * 5200 + [-1] * 4800) == pytest.approx(
        binomtest(5200, 10_000).pvalue, rel=1e-6
    )


def draw_groups(random: np.random.Generator, better: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Answers of two networks for 40 groups of 6 images, which differ by whole groups mostly."""
    groups = np.arange(40).repeat(6)
    prefer = random.normal(better, 1.0, 40)[groups]
    a = random.random(240) < 0.7 - 0.25 * prefer
    b = random.random(240) < 0.7 + 0.25 * prefer
    return torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(groups)


@pytest.mark.slow
def test_false_alarms_and_intervals_of_groups():
    random = np.random.default_rng(0)
    alarms, held = {"groups": 0, "images": 0}, {"groups": 0, "images": 0}
    for _ in range(1000):
        a, b, groups = draw_groups(random)
        for name, given in (("groups", groups), ("images", None)):
            found = PairedComparison.of(a, b, given)
            alarms[name] += found.p_value < 0.05
            held[name] += found.interval[0] <= 0 <= found.interval[1]
    assert 25 <= alarms["groups"] <= 65
    assert held["groups"] >= 930
    assert alarms["images"] > 150  # what groups are for
    assert held["images"] < 850


def test_the_sides_and_the_words_of_several_runs_are_of_groups():
    a, b, groups = draw_groups(np.random.default_rng(1), better=0.8)
    found, narrow = PairedComparison.of(a, b, groups), PairedComparison.of(a, b)
    assert found.verdict() == "better"
    for own, other in zip(found.sides, narrow.sides, strict=True):
        widths = [high - low for low, high in (own["top1_interval"], other["top1_interval"])]
        assert widths[0] > 1.2 * widths[1]
    assert found.images_needed() > narrow.images_needed()
    runs = runs_comparison(torch.stack([a, b, a]), groups)
    assert runs.sentence().startswith("On 240 images of 40 groups, B is better than A and C")
    assert runs.to_dict()["groups"] == 40


@pytest.mark.parametrize("number", [1, 2, 5])
def test_too_few_groups_show_nothing_whatever_their_size(number):
    groups = torch.arange(number).repeat_interleave(500)
    a, b = torch.arange(500 * number) % 3 > 0, torch.arange(500 * number) % 6 > 0
    found = PairedComparison.of(a, b, groups)
    assert (found.verdict(), found.interval) == (UNDECIDED, (-1.0, 1.0))
    assert found.images_needed() is None
    assert found.sentence().endswith("give images of at least 6 groups")


def test_as_many_groups_as_a_sentence_asks_for_can_show_a_difference():
    a, b, places = torch.zeros(60) > 0, torch.ones(60) > 0, torch.arange(60)
    assert PairedComparison.of(a, b, places % 6).verdict() == "better"
    six, seven = (runs_comparison(torch.stack([a, b, b]), places % number) for number in (6, 7))
    assert six.sentence().endswith("give images of at least 7 groups")
    assert six.to_dict()["pairs"][0]["images_needed"] is None
    assert "B is better than A" in seven.sentence()


def scored(noise: float, seed: int, images: int = 60, classes: int = 4):
    """Targets, and scores that follow them with so much noise, (images, classes) both."""
    random = np.random.default_rng(seed)
    targets = (np.random.default_rng(99).random((images, classes)) < 0.35).astype(np.uint8)
    scores = targets + noise * random.standard_normal((images, classes))
    return torch.from_numpy(targets), torch.from_numpy(1 / (1 + np.exp(-scores)))


def worse_and_better(noise: float = 0.6, images: int = 60):
    """Targets, and the scores of a network and of one with less noise."""
    targets, a = scored(1.5, 0, images)
    return targets, a, scored(noise, 1, images)[1]


def by_map(a, b, targets, groups=None) -> PairedComparison:
    """The comparison of two networks by their probabilities, (images, classes) both."""
    neither = torch.zeros(len(targets), dtype=torch.bool)
    maps = MapScores.of(a, targets, groups), MapScores.of(b, targets, groups)
    return PairedComparison.of_maps(maps, targets, (neither, neither), groups)


def test_difference_and_error_are_those_of_scikit_learn():
    targets, a, b = worse_and_better()
    found = by_map(a, b, targets)

    def difference(kept):
        scores = [
            average_precision_score(targets[kept], one[kept], average="macro") for one in (a, b)
        ]
        return scores[1] - scores[0]

    everything = np.arange(60)
    assert found.difference == pytest.approx(difference(everything))
    without = [difference(np.delete(everything, left_out)) for left_out in everything]
    error = np.sqrt(59 / 60 * np.square(np.array(without) - np.mean(without)).sum())
    assert found.error == pytest.approx(error)
    left_out = MapScores.of(b, targets).left_out - MapScores.of(a, targets).left_out
    degrees = min(degrees_of_mean(left_out, targets), 59)
    expected = 2 * student.sf(found.difference / error, degrees)
    assert found.p_value == pytest.approx(expected, rel=1e-6)
    low, high = found.interval
    assert (high - low) / 2 == pytest.approx(error * student.ppf(0.975, degrees), rel=0.01)


def test_a_better_network_is_called_better_and_the_sentence_has_its_map():
    targets, a, b = worse_and_better(0.3)
    found, reverse = by_map(a, b, targets), by_map(b, a, targets)
    assert (found.verdict(), reverse.verdict()) == ("better", "worse")
    maps = [side["map"] for side in found.sides]
    assert f"{maps[1]:.2%} against {maps[0]:.2%} mAP" in found.sentence()
    assert 0 < found.images_needed() < 60
    runs = runs_comparison(torch.stack([NEITHER] * 3), scores=[a, b, a], targets=targets)
    assert runs.sentence().startswith("On 60 images, B is better than A and C")
    assert [row["map"] for row in runs.to_dict()["runs"]] == [*maps, maps[0]]


def test_nothing_is_known_where_one_part_has_all_images_or_none_changes_the_difference():
    targets, a, b = worse_and_better()
    single = torch.zeros_like(targets)
    single[7, 1] = 1
    for found in (
        by_map(a, b, single),
        by_map(a, a, targets),
        by_map(targets.double(), 0.5 + 0.1 * targets.double(), targets),
        *(by_map(a, b, targets, torch.arange(60) % groups) for groups in (1, 2, 4)),
    ):
        assert (found.p_value, found.interval) == (1.0, (-1.0, 1.0))
        assert found.images_needed() is None
        assert UNDECIDED in found.sentence()


def test_the_error_of_large_tables_is_that_of_fewer_parts(monkeypatch):
    targets, a, b = worse_and_better(images=400)
    whole = by_map(a, b, targets)
    assert MapScores.of(a, targets).left_out.shape == (4, 200)
    monkeypatch.setattr(paired_comparison, "MAX_WORK", 50 * a.numel())
    assert MapScores.of(a, targets).left_out.shape == (4, 50)
    assert by_map(a, b, targets).error == pytest.approx(whole.error, rel=0.3)
    monkeypatch.setattr(paired_comparison, "MAX_WORK", 1)
    assert MapScores.of(a, targets).left_out.shape == (4, 20)


def test_the_error_of_map_is_that_of_groups():
    random = torch.Generator().manual_seed(0)
    groups = torch.arange(40).repeat_interleave(6)
    targets = torch.randint(2, (40, 3), generator=random)[groups]
    noise = torch.randn(2, 40, 3, generator=random)[:, groups]
    a, b = (torch.sigmoid(targets + one).double() for one in noise)
    alone, found = by_map(a, b, targets), by_map(a, b, targets, groups)
    assert found.error > 1.5 * alone.error
    assert (found.groups, alone.groups) == (40, None)
    assert "of 40 groups" in found.sentence()


@pytest.mark.slow
def test_equally_good_networks_are_called_different_in_about_five_of_a_hundred_comparisons():
    p_values = []
    for trial in range(250):
        random = np.random.default_rng(trial)
        targets = torch.from_numpy((random.random((80, 4)) < 0.35).astype(np.uint8))
        a, b = (targets + torch.from_numpy(random.standard_normal((80, 4))) for _ in "ab")
        p_values.append(by_map(a.sigmoid(), b.sigmoid(), targets).p_value)
    assert 0.01 < np.mean(np.array(p_values) < 0.05) < 0.09


def test_intervals_and_parts_of_map_are_computed_once_for_each_run(monkeypatch):
    interval, weights = Mock(wraps=map_interval), Mock(wraps=jackknife_weights)
    monkeypatch.setattr(paired_comparison, "map_interval", interval)
    monkeypatch.setattr(paired_comparison, "jackknife_weights", weights)
    targets = scored(1.0, 0)[0]
    scores = [scored(1.0, seed)[1] for seed in range(4)]
    pairs = compare_all_pairs(torch.stack([NEITHER] * 4), scores=scores, targets=targets)
    assert len(pairs) == 6
    assert (interval.call_count, weights.call_count) == (4, 4)
    expected = [map_interval(scores[place], targets) for place in (1, 3)]
    assert [side["map_interval"] for side in pairs[1, 3].sides] == expected
    assert None not in expected


def several(draws: int, images: int, skills: list[float]) -> torch.Tensor:
    """Right answers of classifiers, (draws, classifiers, images); some images are hard for all."""
    random = np.random.default_rng(0)
    hardness = random.normal(size=(draws, 1, images))
    own = random.normal(size=(draws, len(skills), images))
    return torch.from_numpy(hardness + own < np.array(skills)[None, :, None])


def test_all_pairs_have_the_tests_of_every_two():
    (right,) = several(1, 300, [1.0, 1.2, 1.4, 1.0])
    found = runs_comparison(right)
    assert [300 * side["top1"] for side in found.sides] == pytest.approx(right.sum(dim=1).tolist())
    assert list(found.pairs) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    alone = PairedComparison.of(right[1], right[3])
    assert found.pairs[1, 3] == alone
    first = min(found.pairs, key=lambda key: found.pairs[key].p_value)
    assert found.adjusted[first] == pytest.approx(min(6 * found.pairs[first].p_value, 1))
    row = found.to_dict()["pairs"][4]
    assert (row["a"], row["b"]) == ("B", "D")
    assert row["difference_interval"] == [*alone.interval]
    for name in ("difference", "p_value", "only_a_right", "only_b_right"):
        assert row[name] == getattr(alone, name)
    assert row["p_adjusted"] == found.adjusted[1, 3] >= row["p_value"]
    assert row["images_needed"] > alone.images_needed()


def test_two_classifiers_need_no_adjustment():
    (right,) = several(1, 200, [0.5, 1.0])
    found = runs_comparison(right)
    pair = found.pairs[0, 1]
    assert (found.adjusted[0, 1], found.verdicts[0, 1]) == (pair.p_value, pair.verdict())
    assert found.to_dict()["images_needed"] == pair.images_needed()
    assert found.sentence() == pair.sentence()


def test_the_sentence_names_who_is_better_than_whom():
    right = torch.ones(4, 400, dtype=torch.bool)
    assert runs_comparison(right).sentence().startswith("None of the 4 runs is distinguishable")
    right[1, :100] = False
    right[3, :200] = False
    found = runs_comparison(right)
    assert found.sentence() == (
        "On 400 images, A is better than B and D; C is better than B and D; B is better than D; "
        "the other pair is not distinguishable (Holm's correction for 6 pairs, 5 % level)"
    )
    assert found.verdicts[0, 1] == "worse"
    assert letters([0, 1, 3]) == "A, B and D"


def test_four_equal_classifiers_are_seldom_called_different_and_a_better_one_mostly():
    alarms = [
        set(runs_comparison(right).verdicts.values()) != {UNDECIDED}
        for right in several(300, 500, [1.0] * 4)
    ]
    assert sum(alarms) / len(alarms) <= 0.07
    verdicts = [runs_comparison(one).verdicts for one in several(60, 500, [1.0, 1.0, 1.0, 1.6])]
    best = [all(one[a, 3] == "better" for a in range(3)) for one in verdicts]
    assert sum(best) / len(best) > 0.8
