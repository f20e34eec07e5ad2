"""Prediction sets cover what they state; fits are those of the parts."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import binom

from vit.evaluation.fit_calibration import (
    class_set_levels,
    describe_calibration,
    fit_calibration,
    set_levels,
    set_scores,
)
from vit.evaluation.intervals import group_means
from vit.evaluation.new_sources import NewSources
from vit.score_calibration import COVERAGES, FREE_CLASSES, SET_PENALTY, ScoreCalibration


def draw(images: int, classes: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(images, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    return (1.7 * logits).softmax(dim=1), labels  # too sure of themselves


def make_calibration(levels):
    plain = {"temperature": 1.0, "images": 200, "target_precision": 0.98}
    return ScoreCalibration(**plain, set_levels=tuple(levels))


@pytest.mark.parametrize("share", [0.8, 0.9])
def test_coverage_is_what_is_stated(share):
    """Mean coverage of other images and mean size, over calibrations on 200 images."""
    covered = sizes = 0.0
    for seed in range(60):
        probabilities, labels = draw(600, 8, seed)
        scores = set_scores(probabilities, labels)
        (level,) = set_levels(scores[:200], [share])
        covered += float((scores[200:] <= level).double().mean()) / 60
        calibration = make_calibration([level] * len(COVERAGES))
        ordered = probabilities[200].sort(descending=True).values.tolist()
        sizes += len(calibration.prediction_set(range(8), ordered, share)) / 60
    assert share - 0.01 < covered < share + 0.02
    assert 1 < sizes < 8


def test_images_of_new_groups_are_covered_where_large_groups_are_easier():
    """Levels of all images together miss small groups, whose images are few and hard."""
    generator = torch.Generator().manual_seed(0)
    covered = {True: 0.0, False: 0.0}
    for _ in range(200):
        effects = torch.rand(60, generator=generator, dtype=torch.float64)
        groups = torch.arange(60).repeat_interleave(1 + ((1 - effects) * 9).long())
        scores = effects[groups] + 0.1 * torch.rand(len(groups), generator=generator)
        known = groups < 40
        for told in covered:
            (level,) = set_levels(scores[known], [0.9], groups[known] if told else None)
            new = group_means((scores <= level)[~known], groups[~known])
            covered[told] += float(new.mean()) / 200
    assert 0.89 < covered[True] < 0.94
    assert covered[False] < 0.85


def test_groups_of_one_image_have_the_levels_of_images():
    scores = torch.rand(150, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone = torch.arange(150)
    assert set_levels(scores, COVERAGES, alone) == set_levels(scores, COVERAGES)
    labels = alone % 2
    assert class_set_levels(scores, labels, 2, COVERAGES, alone) == []  # 75 of each
    thrice = torch.cat([scores, scores, scores])
    by_class = class_set_levels(thrice, labels.repeat(3), 2, COVERAGES)
    assert class_set_levels(thrice, labels.repeat(3), 2, COVERAGES, alone.repeat(3)) == []
    apart = class_set_levels(thrice, labels.repeat(3), 2, COVERAGES, torch.arange(450))
    assert apart == by_class != []


def test_a_set_has_the_true_class_if_its_score_is_at_most_the_level():
    probabilities, labels = draw(300, 12, 0)
    scores = set_scores(probabilities, labels)
    calibration = make_calibration(set_levels(scores, COVERAGES))
    for share in (0.6, 0.9, 0.995):
        level = calibration.set_level(share)
        for row, label, score in zip(probabilities, labels, scores.tolist(), strict=True):
            ordered, order = row.sort(descending=True, stable=True)
            named = calibration.prediction_set(order.tolist(), ordered.tolist(), share)
            assert (int(label) in named) == (score <= level)


def test_the_score_is_the_papers():
    row = torch.tensor([[0.05, 0.3, 0.1, 0.2, 0.15, 0.12, 0.05, 0.03]])
    best, last = (set_scores(row, torch.tensor([label])).item() for label in (1, 7))
    assert best == 0
    assert last == pytest.approx(0.97 + SET_PENALTY * (7 - FREE_CLASSES))


def test_few_images_allow_only_the_set_of_all_classes():
    found = set_levels(torch.tensor([0.1, 0.3, 0.2]), [0.5, 0.75, 0.9])
    assert found == [pytest.approx(0.2), pytest.approx(0.3), None]
    every = make_calibration([None] * len(COVERAGES))
    assert every.prediction_set(range(3), [0.9, 0.06, 0.04], 0.9) == [0, 1, 2]


@pytest.mark.slow
def test_sets_by_class_cover_each_class_on_its_own():
    """A class that the network knows badly is covered too; sets of all classes together miss it."""
    covered = torch.zeros(2, 4, dtype=torch.float64)
    for seed in range(30):
        probabilities, labels = draw(2400, 4, seed)
        probabilities[labels == 3] = probabilities[labels == 3].flip(1)
        scores = set_scores(probabilities, labels)
        rows = class_set_levels(scores[:1200], labels[:1200], 4, COVERAGES)
        together = make_calibration(set_levels(scores[:1200], COVERAGES))
        by_class = replace(together, class_set_levels=tuple(rows))
        by_class.check_classes("abcd")
        new, true = probabilities[1200:1400], labels[1200:1400]
        for number, one in enumerate((by_class, together)):
            for row, label in zip(new, true, strict=True):
                ordered, order = row.sort(descending=True, stable=True)
                found = one.prediction_set(order.tolist(), ordered.tolist(), 0.9)
                covered[number, label] += (int(label) in found) / int((true == label).sum())
    by_class, together = covered / 30
    assert (by_class - 0.9).abs().max() < 0.025
    assert together.min() < 0.8


def test_each_class_needs_a_hundred_images_and_as_many_as_its_coverage_takes():
    scores = torch.arange(205, dtype=torch.float64) / 205
    labels = (torch.arange(205) < 103).long()
    rows = class_set_levels(scores, labels, 2, (0.9, 0.99, 0.995))
    assert [row is None for row in rows] == [False, False, True]
    own = scores[labels == 0].sort().values  # 102 images: the ceil(103 * 0.9)-th smallest
    assert rows[0][0] == pytest.approx(float(own[92]), abs=1e-6)
    assert rows[0][0] >= float(own[92])
    assert class_set_levels(scores[:200], labels[:200], 2, (0.5,)) == []


def test_multilabel_sets_have_all_true_classes():
    generator = torch.Generator().manual_seed(0)
    covered = 0.0
    for _ in range(60):
        logits = 2 * torch.randn(500, 5, generator=generator, dtype=torch.float64)
        targets = torch.bernoulli(logits.sigmoid(), generator=generator)
        scores = set_scores((1.5 * logits).sigmoid(), targets)
        assert (scores[targets.sum(dim=1) == 0] == 0).all()
        (level,) = set_levels(scores[:200], [0.9])
        named = 1 - (1.5 * logits[200:]).sigmoid() <= level
        covered += float((named | (targets[200:] == 0)).all(dim=1).double().mean()) / 60
    assert covered == pytest.approx(0.9, abs=0.015)
    one = replace(make_calibration([0.35] * len(COVERAGES)), multilabel=True)
    assert one.prediction_set([2, 0, 1], [0.9, 0.65, 0.5], 0.9) == [2, 0]
    assert one.prediction_set([2, 0, 1], [0.4, 0.3, 0.2], 0.9) == []


def test_sets_hold_for_new_sources_as_far_as_these_prove_it():
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (400,), generator=random)
    logits = 2 * torch.nn.functional.one_hot(labels, 4) + torch.randn(400, 4, generator=random)
    images = torch.arange(400) >= 300
    logits[images] += 2 * torch.randn(100, 4, generator=random)  # harder
    plain, apart = (
        fit_calibration(logits, labels, new=new)
        for new in (None, NewSources(images, 0.7, 0.8, 50.0, 5, "camera"))
    )
    assert plain is not None
    assert apart is not None
    assert plain.set_sizes is None
    assert apart.calibration.temperature == plain.calibration.temperature
    assert apart.calibration.threshold == plain.calibration.threshold
    scores = set_scores(apart.temperature.held_out.softmax(dim=1), labels)
    for coverage in (0.5, 0.8, 0.9):
        place = COVERAGES.index(coverage)
        least, level = plain.calibration.set_levels[place], apart.calibration.set_levels[place]
        assert level is not None
        assert least is not None
        assert level >= least
        # of 50 independent images, so few misses have a probability of 15 % at most
        misses = int((scores[images] > level).sum())
        assert binom.cdf(misses // 2, 50, 1 - coverage) <= 0.15
        assert binom.cdf(misses // 2 + 1, 50, 1 - coverage) > 0.15
    sizes = apart.set_sizes
    assert sizes is not None
    assert sizes[0] > sizes[1] > 1
    assert any("sets of 90% have" in line for line in describe_calibration(apart))
