"""Tests of streams are exact, raise few false alarms, and name what changed and since when."""

import itertools
import math

import pytest
import torch
from scipy.stats import hypergeom

from vit.evaluation.drift_detection import (
    ALPHA,
    Windows,
    change_point,
    find_drift,
    log_tail,
    stream_tests,
)

CLASSES = ("cat", "dog", "owl")


def tail(hits: int, images: int, before: int, reference: int) -> float:
    numbers = (torch.tensor([float(one)], dtype=torch.float64) for one in (hits, images, before))
    return math.exp(log_tail(*numbers, reference))


@pytest.mark.parametrize(
    ("hits", "images", "before", "reference"),
    [(9, 20, 30, 300), (50, 50, 20, 2000), (0, 200, 40, 400), (3, 400, 100, 2000), (1, 1, 0, 99)],
)
def test_the_tail_is_that_of_the_hypergeometric_distribution_or_little_more(
    hits, images, before, reference
):
    known = hypergeom(images + reference, hits + before, images)
    more = hits * reference >= before * images
    exact = known.sf(hits - 1) if more else known.cdf(hits)
    assert exact * (1 - 1e-9) <= tail(hits, images, before, reference) <= 1.6 * exact


def test_no_difference_has_no_small_p():
    assert tail(10, 100, 100, 1000) == 1


def test_more_than_a_value_of_the_reference_has_the_same_probability():
    """Of all orders of 5 + 4 images those in which `hits` of the 4 are larger than the rank."""
    reference, images = 5, 4
    for above, hits in [(0, 2), (1, 3), (2, 4)]:
        orders = list(itertools.combinations(range(reference + images), images))
        found = 0
        for places in orders:  # from the largest value on
            own = [place for place in range(reference + images) if place not in places]
            found += sum(place < own[above] for place in places) >= hits
        exact = hypergeom(reference + images, above + hits, images).sf(hits - 1)
        assert found / len(orders) == pytest.approx(exact)


def test_all_windows_share_the_allowed_error():
    found = Windows.of(1000)
    assert 0.8 < float(found.weight.exp().sum()) < 1
    assert int(found.end.max()) == 1000
    lengths = found.end - found.first
    assert {*lengths.tolist()} == {2**j for j in range(10)}
    assert Windows.of(3).first.tolist() == [0, 1, 2, 0, 1]


def drawn(lines: int, shift: float, generator: torch.Generator, first: int = 0) -> torch.Tensor:
    """Values of lines of 20 images; from line `first` on larger."""
    values = torch.randn(lines, 20, generator=generator, dtype=torch.float64)
    values[first:] += shift
    return values


def counted(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    edges = reference.flatten().quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    places = torch.searchsorted(edges, values)
    return torch.nn.functional.one_hot(places, 4).sum(1).double()


def test_a_small_reference_and_a_long_stream_raise_few_false_alarms():
    generator, alarms = torch.Generator().manual_seed(0), 0
    for _ in range(60):
        reference = drawn(3, 0, generator)
        own = {"answers": counted(reference, reference).sum(0)}
        lines = {"answers": counted(drawn(500, 0, generator), reference)}
        _, tests = stream_tests(own, lines)
        alarms += bool((tests["answers"] <= math.log(0.2)).any())
    assert alarms <= 12


def test_a_change_is_found_where_it_is_and_its_classes_are_named():
    generator = torch.Generator().manual_seed(1)
    reference = drawn(100, 0, generator)
    values = drawn(60, 1.0, generator, first=40)
    lines, own = counted(values, reference), counted(reference, reference).sum(0)
    assert abs(change_point(own, lines) - 40) <= 1
    answers = torch.tensor([[10.0, 10, 0]] * 40 + [[2.0, 10, 8]] * 20, dtype=torch.float64)
    found = find_drift(
        {"answers": torch.tensor([1000.0, 1000, 0], dtype=torch.float64), "scores": own},
        {"answers": answers, "scores": lines},
        CLASSES,
        [f"time {line}" for line in range(60)],
        run="runs/photos",
    )
    assert found.different
    assert (found.since, found.since_time) == (801, "time 40")
    assert 800 < found.noticed <= 900
    assert max(found.p_values.values()) <= ALPHA
    assert [(one.label, one.now) for one in found.classes] == [("cat", 0.1), ("owl", 0.4)]
    sentence = found.sentence()
    assert sentence.startswith("different since image 801, time 40 (1,200 images, 2,000 of the")
    assert "higher scores; more often owl (40%, was 0%); less often cat (10%, was 50%)" in sentence
    assert found.to_dict()["verdict"] == "different"


def test_a_line_alone_is_as_before():
    counts = torch.tensor([5.0, 5], dtype=torch.float64)
    found = find_drift({"answers": 9 * counts}, {"answers": counts[None]}, "ab", [None], run="r")
    assert not found.different
    assert found.sentence() == (
        "as before: no difference from the images of the calibration is certain (10 images, 90 of "
        "the calibration)"
    )
    assert found.to_dict()["p_value"] == 1
