"""The promised share of right answers holds in simulation; bounds equal scipy's."""

import math

import pytest
import torch
from scipy.stats import binom

from tests.slow_cases import mostly_slow
from vit.errors import ConfigError
from vit.evaluation.fit_calibration import describe_calibration, fit_calibration
from vit.evaluation.selective_prediction import (
    binomial_tail,
    mean_tail,
    needed_images,
    precision_threshold,
)
from vit.evaluation.temperature_scaling import fit_temperature
from vit.score_calibration import UNLIKE, check_selection


def draw(images: int, generator: torch.Generator):
    """Confidences, and whether answers of an overconfident network are right."""
    confidences = torch.rand(images, generator=generator, dtype=torch.float64)
    return confidences, torch.bernoulli(confidences.sqrt(), generator=generator).bool()


def share_right(threshold: float) -> float:
    """P(right | confidence >= threshold) of `draw`: the mean of sqrt over [threshold, 1]."""
    return (2 / 3) * (1 - threshold**1.5) / (1 - threshold)


def misses(draws: int, images: int, target: float) -> tuple[int, int]:
    """Draws whose threshold breaks the promise, and draws with a threshold."""
    generator = torch.Generator().manual_seed(0)
    found = [precision_threshold(*draw(images, generator), target) for _ in range(draws)]
    thresholds = [one.threshold for one in found if one is not None]
    return sum(share_right(threshold) < target for threshold in thresholds), len(thresholds)


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (0, 300), (3, 150), (20, 2000), (7, 7)])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_the_tail_equals_scipys(successes, trials, share):
    expected = binom.cdf(successes, trials, share)
    assert binomial_tail(successes, trials, share) == pytest.approx(expected, rel=1e-9)


def test_the_promise_is_kept():
    wrong, proven = misses(40, 1500, 0.9)
    assert proven >= 30
    assert wrong <= 2


def draw_groups(number: int, generator: torch.Generator):
    """As `draw` by groups of 1 to 30 images, the answers of which are right or wrong together."""
    sizes = torch.randint(1, 31, (number,), generator=generator)
    groups = torch.arange(number).repeat_interleave(sizes)
    confidences, right = draw(number, generator)
    return confidences[groups], right[groups], groups


@pytest.mark.slow
def test_the_promise_is_kept_for_groups_and_not_where_images_are_taken_as_independent():
    generator, broken = torch.Generator().manual_seed(0), {True: 0, False: 0}
    proven = 0
    for _ in range(60):
        confidences, right, groups = draw_groups(1000, generator)
        for told in broken:
            own = groups if told else None
            found = precision_threshold(confidences, right, 0.9, groups=own)
            proven += told and found is not None
            broken[told] += found is not None and share_right(found.threshold) < 0.9
    assert proven > 25
    assert broken[True] <= 2
    assert broken[False] > 10


def test_groups_of_one_image_prove_little_less_than_images():
    generator = torch.Generator().manual_seed(0)
    confidences, right = draw(3000, generator)
    alone = precision_threshold(confidences, right, 0.9)
    grouped = precision_threshold(confidences, right, 0.9, groups=torch.arange(3000))
    assert alone.threshold <= grouped.threshold <= alone.threshold + 0.05


@pytest.mark.parametrize("wrong", [0, 1, 7, 40])
def test_the_bound_of_a_mean_is_above_the_exact_chance_of_shares_of_0_and_1(wrong):
    shares = (torch.arange(300) < wrong).double()
    exact = binom.cdf(wrong, 300, 0.1)
    bound = mean_tail(shares, 0.1)
    assert exact <= bound * (1 + 1e-9)
    assert bound <= math.e * exact * (1 + 1e-9) or wrong == 40
    if wrong == 0:
        assert bound == pytest.approx(0.9**300)
    assert mean_tail(shares * 0 + 0.1, 0.1) == 1


def test_answers_that_are_all_right_are_all_given_and_none_where_all_are_wrong():
    images = needed_images(0.98)
    right = torch.ones(images, dtype=torch.bool)
    confidences = torch.linspace(0.5, 1, images)
    assert precision_threshold(confidences, right, 0.98) == pytest.approx((0.5, 1.0))
    assert precision_threshold(confidences[1:], right[1:], 0.98) is None
    assert precision_threshold(confidences, ~right, 0.5) is None
    assert precision_threshold(confidences[:1], ~right[:1], 0.5) is None


def test_equal_confidences_are_answered_together():
    right = torch.arange(600) < 300
    found = precision_threshold(torch.where(right, 0.9, 0.4), right, 0.95)
    assert found == pytest.approx((0.9, 0.5))


@pytest.mark.parametrize("multilabel", [False, True])
def test_a_calibration_that_proves_nothing_says_what_it_takes(multilabel):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (200,), generator=generator)
    targets = torch.nn.functional.one_hot(labels, 3)
    logits = 4.0 * targets - 2 + 1.5 * torch.randn(200, 3, generator=generator)
    known = targets if multilabel else labels
    fitted = fit_calibration(logits, known, target_precision=0.98)
    assert not fitted.calibration.rejects
    (line,) = (line for line in describe_calibration(fitted) if "no score from which" in line)
    assert line.endswith("than these 200 images, or a lower --target-precision")
    assert fit_calibration(logits, known, target_precision=0.6).calibration.rejects


def test_the_highest_share_that_is_proven_is_promised():
    """Levels by the exact test alone; lower ones are named with what they answer."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (600,), generator=generator)
    noise = torch.randn(600, 3, generator=generator) * torch.linspace(0.2, 2.5, 600).unsqueeze(1)
    logits = 4.0 * torch.nn.functional.one_hot(labels, 3) + noise
    scaling = fit_temperature(logits, labels)
    fitted = fit_calibration(logits, labels, fitted=scaling)
    alone = {
        share: fit_calibration(logits, labels, fitted=scaling, target_precision=share).calibration
        for share in (0.99, 0.98, 0.95, 0.9, 0.85, 0.8)
    }
    proven = [share for share, one in alone.items() if one.rejects]
    assert 0.99 not in proven
    assert fitted.calibration == alone[proven[0]]
    assert fitted.lower == {share: alone[share].answered for share in proven[1:]}
    (line,) = (one for one in describe_calibration(fitted) if "gives more" in one)
    assert f"{alone[0.9].answered:.1%} with 0.9" in line
    named = fit_calibration(logits, labels, fitted=scaling, target_classes={"first": 0}).calibration
    assert None not in (named.threshold, named.class_thresholds["first"])


def test_only_images_unlike_the_training_images_are_unknown_if_nothing_is_proven():
    logits = torch.randn(150, 3, generator=torch.Generator().manual_seed(0))
    labels, distances = torch.arange(150) % 3, torch.arange(150.0).double()
    fitted = fit_calibration(logits, labels, distances=distances)
    calibration = fitted.calibration
    assert not calibration.rejects
    assert describe_calibration(fitted)[2].endswith(
        "all images but those unlike the training images, as 1% of images like the validation "
        "images are taken to be"
    )
    check_selection(calibration, reject=True, sets=None)
    assert calibration.reject_reason(0.34, calibration.farthest) is None
    assert calibration.reject_reason(0.99, calibration.farthest + 1) == UNLIKE
    assert "not proven" in calibration.promise
    alone = fit_calibration(logits, labels).calibration
    with pytest.raises(ConfigError, match=r"right for 80% of the answers"):
        check_selection(alone, reject=True, sets=None)


def test_few_images_reject_by_distance_and_prove_what_they_can():
    logits, labels = torch.eye(2).repeat(15, 1)[:28] * 8, (torch.arange(28) % 2)
    for images, proven, alarms in ((12, False, "8%"), (28, True, None)):
        distances = torch.arange(images).double()
        fitted = fit_calibration(logits[:images], labels[:images], distances=distances)
        calibration, lines = fitted.calibration, describe_calibration(fitted)
        assert not calibration.scales
        assert f"takes 50 validation images, and there are {images}" in lines[0]
        assert calibration.farthest == images - 1
        assert calibration.rejects == proven
        assert alarms is None or f"as {alarms} of images like" in lines[2]
        check_selection(calibration, reject=True, sets=0.9)


def test_the_largest_distance_is_that_of_a_new_group_where_groups_are_enough():
    """A group of many images near those of training does not make the others look far."""
    logits = torch.randn(600, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(3).repeat(200)
    groups = torch.arange(600).clamp(max=250)
    distances = torch.arange(600, 0, -1).double()

    def farthest(which):
        return fit_calibration(
            logits, labels, distances=distances, groups=which
        ).calibration.farthest

    assert farthest(None) == 595  # 5 of 600 images exceed it
    assert farthest(groups) == 599  # 1 of 251 groups
    assert farthest(groups.clamp(max=90)) == 595  # too few groups for 1 in 100


@pytest.mark.parametrize("multilabel", [False, True])
def test_no_group_is_scaled_or_decided_by_itself(multilabel, monkeypatch):
    """The labels of one group change what is fitted to the others, and nothing of its own."""
    generator = torch.Generator().manual_seed(0)
    labels, groups = torch.randint(3, (200,), generator=generator), torch.arange(200) // 4
    logits = 2.0 * torch.nn.functional.one_hot(labels, 3) + torch.randn(200, 3, generator=generator)
    seen = []

    def record(confidences, _right, target, **_options):
        seen.extend([confidences] * (target == 0.8))

    monkeypatch.setattr("vit.evaluation.fit_calibration.precision_threshold", record)
    for changed in (labels, torch.where(groups == 9, (labels + 1) % 3, labels)):
        targets = torch.nn.functional.one_hot(changed, 3) if multilabel else changed
        assert fit_calibration(logits, targets, groups=groups) is not None
    own = groups == 9
    before, after = seen
    assert torch.equal(before[own], after[own])
    same = (before == after).double()
    assert same.mean() < 0.5
    assert all(same[groups == group].mean() in (0, 1) for group in range(50)) or multilabel


def slow_threshold(confidences, wrong_from, tested, target, groups):
    """The same rule with every count made anew, for answers that change with the threshold."""
    error, values = 0.01 / 2, sorted((one for one in tested if one >= 0), reverse=True)
    first = math.ceil(math.log(error) / math.log(target))
    places, place = [], 1.0
    while place < len(values):
        places.append(round(place))
        place = max(place + 1, place * 1.01)
    levels = [values[place - 1] for place in [*places, len(values)]] if values else []
    levels = [one for one in dict.fromkeys(levels) if sum(c >= one for c in confidences) >= first]
    if groups is not None:
        levels = [
            one
            for one in levels
            if len({g for g, c in zip(groups, confidences, strict=True) if c >= one})
            >= math.ceil(math.log(error) / math.log(target))
        ]
    passed = []
    for start in (0, len(levels) // 2):
        for level in levels[start:]:
            given = [n for n, one in enumerate(confidences) if one >= level]
            wrong = [wrong_from[n] >= level for n in given]
            if groups is None:
                chance = binom.cdf(sum(wrong), len(given), 1 - target)
            else:
                each = {}
                for n, bad in zip(given, wrong, strict=True):
                    each.setdefault(groups[n], []).append(bad)
                means = torch.tensor([sum(v) / len(v) for v in each.values()]).double()
                chance = mean_tail(means, 1 - target)
            if chance > error:
                break
            passed.append(level)
    return min(passed, default=None)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("seed", mostly_slow(range(12)))
def test_answers_that_change_with_the_threshold_equal_counts_made_anew(seed, grouped):
    generator = torch.Generator().manual_seed(seed)
    images = 900
    drawn = torch.rand(images, 2, generator=generator, dtype=torch.float64)
    confidences, other = 1 - (1 - drawn.amax(1)) ** 2, drawn.amin(1)
    if seed % 3 == 0:  # ties
        confidences, other = (confidences * 40).round() / 40, (other * 40).round() / 40
    other = torch.minimum(confidences, other)
    confidences[: images // 20 * (seed % 2)] = -1
    tested = torch.minimum(confidences, other)
    right = torch.rand(images, generator=generator) < 0.75 + 0.02 * seed
    wrong_from = torch.where(right, -1.0, tested)
    groups = torch.randint(450, (images,), generator=generator) if grouped else None
    for target in (0.8, 0.9):
        found = precision_threshold(
            confidences, right, target, groups=groups, wrong_from=other, tested=tested
        )
        expected = slow_threshold(
            *(one.tolist() for one in (confidences, wrong_from, tested)),
            target,
            None if groups is None else groups.tolist(),
        )
        assert (None if found is None else found.threshold) == expected
        if found is not None:
            share = float((confidences >= expected).double().mean())
            assert found.answered == pytest.approx(share)


def test_a_flat_answer_is_the_special_case():
    generator = torch.Generator().manual_seed(3)
    confidences, right = draw(2000, generator)
    flat = precision_threshold(confidences, right, 0.9)
    never = torch.zeros(2000, dtype=torch.bool)
    wrong_from = torch.where(right, -1.0, confidences)
    assert precision_threshold(confidences, never, 0.9, wrong_from=wrong_from) == flat
    assert flat is not None
