import numpy as np
import pytest
import torch
from scipy import stats

from vit.evaluation.bootstrap_intervals import class_intervals, draw_weights, jackknife_weights
from vit.evaluation.classification_metrics import Outcomes
from vit.evaluation.image_groups import (
    count_groups,
    effective_images,
    number_groups,
    share_interval,
)
from vit.evaluation.multilabel_metrics import map_interval
from vit.evaluation.wilson_interval import wilson_interval


def test_images_without_a_group_are_alone():
    groups = number_groups(["b", "", "a", "b", ""])
    assert groups.tolist() == [0, 1, 2, 0, 3]
    assert count_groups(groups) == 4
    assert count_groups(number_groups(["0", "", "1", ""])) == 4  # "0" is no place


def test_groups_of_one_image_give_the_interval_of_independent_images():
    hits = torch.arange(400) % 5 > 0
    low, high = wilson_interval(320, 400)
    found = share_interval(hits, torch.arange(400))
    assert found == pytest.approx([low, high], abs=3e-4)  # Student's distribution is a little wider
    assert found[0] < low < high < found[1]
    assert share_interval(hits, None) == [low, high]


def test_images_that_repeat_their_group_count_as_one():
    """Ten equal images a group tell as much as one: with scipy's quantile, Wilson's formula."""
    right = torch.arange(60) % 4 > 0
    found = share_interval(right.repeat_interleave(10), torch.arange(60).repeat_interleave(10))
    informative = 59 * (stats.norm.ppf(0.975) / stats.t.ppf(0.975, 59)) ** 2
    assert found == pytest.approx(wilson_interval(0.75 * informative, informative), abs=1e-5)


def test_of_groups_that_do_not_differ_there_are_no_more_than_groups():
    groups = torch.arange(30).repeat_interleave(20)
    informative = 30 * (stats.norm.ppf(0.975) / stats.t.ppf(0.975, 29)) ** 2
    low, high = share_interval(torch.ones(600, dtype=torch.bool), groups)
    assert (low, high) == (pytest.approx(wilson_interval(informative, informative)[0], abs=1e-4), 1)
    low, high = share_interval(torch.zeros(600, dtype=torch.bool), groups)
    assert (low, high) == (0, pytest.approx(wilson_interval(0, informative)[1], abs=1e-4))
    assert share_interval(groups > 0, groups % 4) == [0, 1]  # four groups tell nothing


@pytest.mark.parametrize("size", range(2, 12))
def test_groups_with_equal_shares_do_not_differ_whatever_the_rounding(size):
    """A third is no binary fraction, and the sums of such groups are not exactly 0."""
    groups = torch.arange(40).repeat_interleave(size)
    alike = 40 * (stats.norm.ppf(0.975) / stats.t.ppf(0.975, 39)) ** 2
    assert effective_images(torch.arange(40 * size) % size == 0, groups) == pytest.approx(
        alike, rel=1e-3
    )


def test_the_interval_of_a_share_holds_the_truth_of_other_groups():
    """40 groups of 1 to 12 images, in each of which another share is right, 80 % on average."""
    generator = np.random.default_rng(0)
    held = {"groups": 0, "images": 0}
    for _ in range(1000):
        sizes = generator.integers(1, 13, 40)
        groups = torch.arange(40).repeat_interleave(torch.tensor(sizes))
        shares = generator.beta(2.4, 0.6, 40)[groups]
        hits = torch.tensor(generator.random(len(groups)) < shares)
        for name, given in (("groups", groups), ("images", None)):
            low, high = share_interval(hits, given)
            held[name] += low <= 0.8 <= high
    assert 930 <= held["groups"] <= 970
    assert held["images"] < 850  # what groups are for


def test_draws_and_parts_have_whole_groups():
    groups = number_groups(["a", "b", "a", "c", "", "b", "a"])
    weights = torch.cat([*draw_weights(7, 50, groups=groups)])
    assert torch.equal(weights[:, 0], weights[:, 2])
    assert torch.equal(weights[:, 0], weights[:, 6])
    assert torch.equal(weights[:, 1], weights[:, 5])
    assert (weights[:, [0, 1, 3, 4]].sum(dim=1) == 4).all()
    left_out = torch.cat([*jackknife_weights(7, groups)])
    assert [row.tolist() for row in left_out] == [
        [0, 1, 0, 1, 1, 1, 0],
        [1, 0, 1, 1, 1, 0, 1],
        [1, 1, 1, 0, 1, 1, 1],
        [1, 1, 1, 1, 0, 1, 1],
    ]


def grouped_outcomes(groups: int, size: int, seed: int) -> tuple[Outcomes, torch.Tensor]:
    """Outcomes of three classes, where the images of a group are right or wrong together."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.arange(groups).repeat_interleave(size)
    labels = torch.randint(3, (groups,), generator=generator)[which]
    shift = torch.randn(groups, generator=generator)[which]
    logits = torch.randn(groups * size, 3, generator=generator) * 0.3
    logits[torch.arange(len(labels)), labels] += 1 + 1.5 * shift
    return Outcomes.of(logits.double().softmax(dim=1), labels), which


def test_intervals_of_metrics_hold_the_truth_of_other_groups():
    many = torch.cat([grouped_outcomes(2000, 5, seed)[0].likelihoods.log() for seed in range(9)])
    truth, held = -float(many.mean()), {True: 0, False: 0}
    for seed in range(100):
        outcomes, groups = grouped_outcomes(60, 5, 1000 + seed)
        for grouped in held:
            found = class_intervals(outcomes, groups if grouped else None)["nll_interval"]
            assert found is not None
            held[grouped] += found[0] <= truth <= found[1]
    assert held[True] >= 90
    assert held[False] <= 75


def test_few_groups_have_no_interval_but_that_of_a_share():
    outcomes, groups = grouped_outcomes(19, 10, 0)
    found = class_intervals(outcomes, groups)
    low, high = found.pop("top1_interval")
    assert low < float((outcomes.ranks == 0).double().mean()) < high
    assert {*found.values()} == {None}
    assert "top1_interval" not in class_intervals(outcomes)


def test_the_interval_of_map_is_wider_of_groups():
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(40).repeat_interleave(6)
    targets = torch.randint(2, (40, 4), generator=generator)[groups]
    scores = torch.sigmoid(targets + torch.randn(40, 4, generator=generator)[groups] * 1.5).double()
    low, high = map_interval(scores, targets)
    grouped = map_interval(scores, targets, groups)
    assert grouped[1] - grouped[0] > 1.5 * (high - low)
    assert map_interval(scores, targets, groups % 10) is None
