"""Accuracy on new sources, and its interval."""

import math

import numpy as np
import pytest

from tests.slow_cases import mostly_slow
from vit.evaluation.exact_tests import wilson_interval
from vit.evaluation.new_sources import FAR, MEAN_LOSS, _expected, measure_new_sources


def scores(right, sources, new):
    found = measure_new_sources(right, sources, new)
    return None if found is None else found.scores()


def test_only_images_of_new_sources_count():
    right = [True] * 30 + [False] * 10 + [None] * 5 + [True] * 99
    sources = ["camera: A"] * 20 + ["camera: B"] * 25 + ["camera: C"] * 99
    new = [True] * 45 + [False] * 99
    found = scores(right, sources, new)
    assert found is not None
    assert 0.75 < found["top1"] < 0.9  # nothing is known of how much two sources differ
    assert (found["images"], found["sources"], found["by"]) == (40, 2, "camera")
    low, high = found["top1_interval"]
    assert low < 0.4
    assert high > 0.9  # of two sources, one always right and one mostly wrong
    assert scores(right[:29], sources[:29], new[:29]) is None
    # images that stand for new sources by their background are one by one
    plain = scores(right, ["background"] * 45 + [""] * 99, new)
    assert plain is not None
    assert (plain["sources"], plain["known_top1"]) == (0, 1.0)
    assert 0.75 < plain["top1"] < 0.85
    expected = wilson_interval(40 * plain["top1"], 40)
    np.testing.assert_allclose(plain["top1_interval"], expected, atol=0.03)


def test_sources_that_do_not_differ_are_images():
    right = [at % 4 > 0 for at in range(400)]
    found = scores(right, [f"camera: {at // 40}" for at in range(400)], [True] * 400)
    assert found is not None
    # as Wilson's, but for Student's quantile of 9 degrees of freedom
    shrunk = (1.960 / 2.262) ** 2
    expected = wilson_interval(300 * shrunk, 400 * shrunk)
    np.testing.assert_allclose(found["top1_interval"], expected, atol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_expected_is_the_mean_of_the_posterior(seed):
    """Against a sum over a grid of both accuracies, with the prior of their difference."""
    random = np.random.default_rng(seed)
    p0, p1 = random.uniform(0.5, 0.9, 2)
    v0, v1 = random.uniform(0.001, 0.01, 2)
    one, loss = np.linspace(-1, 3, 2001)[:, None], np.linspace(0, 1, 2001)[None]
    weights = np.exp(
        -((one - p1) ** 2) / (2 * v1) - (one + loss - p0) ** 2 / (2 * v0) - loss / MEAN_LOSS
    )
    weights /= weights.sum()
    mean = (weights * one).sum()
    variance = (weights * (one - mean) ** 2).sum()
    np.testing.assert_allclose(_expected(p0, v0, p1, v1), (mean, variance), rtol=1e-3)


@pytest.mark.parametrize("far", [FAR - 1e-6, FAR + 1e-6])
def test_the_tail_joins(far):
    variance = 0.02
    seen = 2 * variance / MEAN_LOSS - far * math.sqrt(2 * variance)
    expected, spread = _expected(0.5 + seen, variance, 0.5, variance)
    assert expected - 0.5 == pytest.approx((seen - math.sqrt(2 * variance) / far) / 2, rel=0.04)
    assert spread == pytest.approx(variance / 2, rel=0.1)


@pytest.mark.parametrize(("held_out", "size"), mostly_slow([(8, 40), (3, 60), (40, 8)]))
def test_the_interval_holds_the_accuracy_on_as_many_other_sources(held_out, size):
    """Sources with accuracies of a beta distribution, 25 of them trained on."""
    random, inside = np.random.default_rng(0), []
    for _ in range(300):
        kept = 1 - random.exponential(MEAN_LOSS) / 0.75  # of the accuracy, 0.75 on average
        known, new, other = (random.beta(12, 4, number) for number in (25, held_out, held_out))
        new, other = kept * new, kept * other
        shares = np.concatenate([np.repeat(known, 12), np.repeat(new, size)])
        names = [f"camera: {at}" for at in np.repeat(np.arange(25), 12)]
        names += [f"camera: new {at}" for at in np.repeat(np.arange(held_out), size)]
        right = (random.random(len(shares)) < shares).tolist()
        found = scores(right, names, [" new " in name for name in names])
        assert found is not None
        low, high = found["top1_interval"]
        inside.append(low <= other.mean() <= high)
    assert 0.9 <= np.mean(inside) <= 0.98


def test_right_answers_of_one_source_are_not_certain():
    (low, high) = scores([True] * 30, ["camera: A"] * 30, [True] * 30)["top1_interval"]
    assert (low < 0.3, high) == (True, 1.0)


def test_sources_of_one_image_each_are_images():
    names = [f"group: {at}" for at in range(100)]
    found = scores([at < 80 for at in range(100)], names, [True] * 100)
    assert found["known_top1"] is None
    np.testing.assert_allclose(found["top1_interval"], wilson_interval(80, 100), atol=0.01)


def test_what_is_expected_is_a_share():
    right = [False] * 30 + ([False] * 12 + [True] * 8) + [True] * 180
    names = ["camera: new"] * 30 + [f"camera: {at // 20}" for at in range(200)]
    found = scores(right, names, [True] * 30 + [False] * 200)
    low, high = found["top1_interval"]
    assert 0 <= low <= found["top1"] <= high <= 1


def test_unlike_backgrounds_that_happen_to_be_easier_promise_no_more():
    names = ["background"] * 89 + ["camera: A"] * 266
    found = scores([True] * 351 + [False] * 4, names, [True] * 89 + [False] * 266)
    assert (found["sources"], found["by"]) == (0, "background")
    assert found["known_top1"] == pytest.approx(262 / 266)
    assert 0.97 < found["top1"] < 0.99  # what both parts together make probable
    assert found["top1_interval"][1] < 1
