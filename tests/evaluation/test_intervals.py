"""Intervals of groups of images and of the bootstrap: coverage by simulation, and scipy."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import bootstrap as scipy_bootstrap

from tests.evaluation.drawn import draw_scores
from vit.evaluation.classification_metrics import Outcomes, class_intervals, summarize
from vit.evaluation.exact_tests import wilson_interval
from vit.evaluation.intervals import (
    bootstrap,
    count_groups,
    draw_weights,
    effective_images,
    jackknife_weights,
    number_groups,
    share_interval,
    student_tails,
)
from vit.evaluation.multilabel_metrics import (
    map_interval,
    multilabel_intervals,
    summarize_multilabel,
)


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
    for group in range(4):
        own = weights[:, groups == group]
        assert (own == own[:, :1]).all()
    assert (weights[:, [0, 1, 3, 4]].sum(dim=1) == 4).all()
    left_out = torch.cat([*jackknife_weights(7, groups)])
    assert torch.equal(left_out, (torch.arange(4)[:, None] != groups).to(left_out))


def grouped_outcomes(groups: int, size: int, seed: int) -> tuple[Outcomes, torch.Tensor]:
    """Outcomes of three classes, where the images of a group are right or wrong together."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.arange(groups).repeat_interleave(size)
    labels = torch.randint(3, (groups,), generator=generator)[which]
    shift = torch.randn(groups, generator=generator)[which]
    logits = torch.randn(groups * size, 3, generator=generator) * 0.3
    logits[torch.arange(len(labels)), labels] += 1 + 1.5 * shift
    return Outcomes.of(logits.double().softmax(dim=1), labels), which


@pytest.mark.slow
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
    assert {*class_intervals(outcomes, groups).values()} == {None}
    low, high = summarize(outcomes, CLASSES)["top1_interval"]
    lower, higher = summarize(outcomes, CLASSES, groups)["top1_interval"]
    assert lower < low < float((outcomes.ranks == 0).double().mean()) < high < higher


def test_the_interval_of_map_is_wider_of_groups():
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(40).repeat_interleave(6)
    targets = torch.randint(2, (40, 4), generator=generator)[groups]
    scores = torch.sigmoid(targets + torch.randn(40, 4, generator=generator)[groups] * 1.5).double()
    low, high = map_interval(scores, targets)
    grouped = map_interval(scores, targets, groups)
    assert grouped[1] - grouped[0] > 1.5 * (high - low)
    assert map_interval(scores, targets, groups % 10) is None


CLASSES = [f"class{index}" for index in range(4)]
OF_CLASSES = {"balanced_accuracy", "macro_f1"}


def draw(images, seed=0):
    return draw_scores(images, 4, lean=1.5, sharpness=1.5, seed=seed)


def measure(probabilities, labels):
    outcomes = Outcomes.of(probabilities, labels)
    return summarize(outcomes, CLASSES), class_intervals(outcomes)


def missing(intervals):
    return {name.removesuffix("_interval") for name, found in intervals.items() if found is None}


def test_intervals_of_means_are_scipys():
    probabilities, labels = draw(300)
    _, found = measure(probabilities, labels)
    own = probabilities[torch.arange(300), labels].numpy()
    squares = ((probabilities.numpy() - np.eye(4)[labels]) ** 2).sum(axis=1)
    for name, values in (("nll", -np.log(own)), ("brier", squares)):
        expected = scipy_bootstrap(
            (values,), np.mean, n_resamples=4000, method="BCa", rng=np.random.default_rng(0)
        )
        spread = expected.standard_error
        assert found[f"{name}_interval"] == pytest.approx(
            [*expected.confidence_interval], abs=0.25 * spread
        )


def test_draws_have_as_many_images_and_are_the_same_every_time():
    parts = [*draw_weights(7, 30)]
    assert torch.cat(parts).shape == (30, 7)
    assert (torch.cat(parts).sum(dim=1) == 7).all()
    assert all(torch.equal(*pair) for pair in zip(parts, draw_weights(7, 30), strict=True))
    assert measure(*draw(50))[1] == measure(*draw(50))[1]


def test_memory_is_limited(monkeypatch):
    whole = torch.cat([*draw_weights(10, 25)])
    monkeypatch.setattr("vit.evaluation.intervals.CHUNK", 45)
    parts = [*draw_weights(10, 25)]
    assert [len(part) for part in parts] == [4] * 6 + [1]
    assert torch.cat(parts).shape == whole.shape


@pytest.mark.slow
def test_intervals_hold_the_true_value():
    """Of 40 small sets of one kind, most intervals hold the value of a large one."""
    truth, _ = measure(*draw(50_000, seed=99))
    held = dict.fromkeys(("nll", "brier", "balanced_accuracy", "macro_f1"), 0)
    for seed in range(40):
        _, found = measure(*draw(200, seed))
        for name in held:
            low, high = found[f"{name}_interval"]
            held[name] += low <= truth[name] <= high
    assert min(held.values()) >= 34, held


@pytest.mark.parametrize(
    ("probabilities", "labels"), [draw(1), (torch.eye(4), torch.arange(4))], ids=["one", "right"]
)
def test_of_few_images_there_are_no_intervals(probabilities, labels):
    assert missing(measure(probabilities, labels)[1]) == {"nll", "brier", *OF_CLASSES}


def test_few_mistakes_and_few_images_of_a_class_have_no_interval_of_classes():
    assert missing(measure(*draw(79))[1]) == OF_CLASSES
    assert missing(measure(*draw(80))[1]) == set()
    probabilities, labels = draw(100)
    for rights in (0, 1, 4):  # of the answers
        wrong = (probabilities.argmax(dim=1) + (torch.arange(100) >= rights)) % 4
        assert missing(measure(probabilities, wrong)[1]) == OF_CLASSES
    constant = measure(torch.full((100, 4), 0.25), labels)[1]  # no draw differs
    assert {"nll", "brier"} <= missing(constant)


def test_several_labels_that_never_vary_have_the_interval_of_a_share_alone():
    right = torch.eye(2).repeat(20, 1)
    nothing = multilabel_intervals(right, torch.ones(40, 2), torch.zeros(40, 2))
    assert {"micro_f1", "hamming"} <= missing(nothing)
    few = multilabel_intervals(right, right.long(), right)
    assert few["subset_accuracy_interval"] == list(wilson_interval(40, 40))
    assert missing(few) == {"nll", "brier", "hamming", "micro_f1"}


def test_skewed_metrics_have_skewed_intervals():
    """Against scipy's BCa interval, with its jackknife of single images."""
    random = np.random.default_rng(0)
    losses = torch.from_numpy(random.gamma(0.3, size=150))

    def mean(weights):
        return {"mean": weights @ losses / weights.sum(dim=1)}

    expected = scipy_bootstrap(
        (losses.numpy(),), np.mean, n_resamples=9999, method="BCa", rng=random
    )
    found = bootstrap(150, mean)["mean"]
    spread = expected.standard_error
    assert found == pytest.approx([*expected.confidence_interval], abs=0.25 * spread)
    value = float(losses.mean())
    assert found[1] - value > 1.15 * (value - found[0])
    assert bootstrap(150, lambda weights: {"none": weights.sum(dim=1) * torch.nan})["none"] is None
    grouped = torch.cat([*jackknife_weights(450)])
    assert grouped.shape == (200, 450)
    assert ((450 - grouped.sum(dim=1)) >= 2).all()
    assert (grouped.sum(dim=0) == 199).all()


def test_intervals_of_several_labels_surround_the_scores():
    random = torch.Generator().manual_seed(0)
    targets = (torch.rand(80, 4, generator=random) < 0.4).long()
    scores = (0.6 * torch.rand(80, 4, generator=random) + 0.4 * targets).double()
    expected = summarize_multilabel(scores, targets, CLASSES, [0.5] * 4)
    found = multilabel_intervals(scores, targets, scores >= 0.5)
    assert len(found) == 5
    for name, (low, high) in found.items():
        value = expected[name.removesuffix("_interval")]
        assert low < value < high
        assert (low + high) / 2 == pytest.approx(value, rel=0.1)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 9.0])
@pytest.mark.parametrize("degrees", [1.0, 2.0, 3.0, 7.7, 199.0])
def test_the_p_value_is_that_of_scipys_student_distribution(t, degrees):
    assert student_tails(t, degrees) == pytest.approx(2 * stats.t.sf(t, degrees), rel=1e-6)
