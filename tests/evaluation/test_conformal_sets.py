"""Prediction sets cover what they promise, and are those that prediction returns."""

import pytest
import torch

from vit.evaluation.conformal_sets import set_levels, set_scores
from vit.score_calibration import COVERAGES, FREE_CLASSES, SET_PENALTY, ScoreCalibration


def draw(images: int, classes: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(images, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    return (1.7 * logits).softmax(dim=1), labels  # too sure of themselves


def coverage_and_size(draws: int, share: float) -> tuple[float, float]:
    """Mean coverage of other images and mean size, over calibrations on 200 images."""
    covered = sizes = 0.0
    for seed in range(draws):
        probabilities, labels = draw(600, 8, seed)
        scores = set_scores(probabilities, labels)
        (level,) = set_levels(scores[:200], [share])
        covered += float((scores[200:] <= level).double().mean()) / draws
        calibration = make_calibration([level] * len(COVERAGES))
        ordered = probabilities[200].sort(descending=True).values.tolist()
        sizes += calibration.set_size(ordered, share) / draws
    return covered, sizes


def make_calibration(levels):
    plain = {"temperature": 1.0, "images": 200, "target_precision": 0.98}
    return ScoreCalibration(**plain, set_levels=tuple(levels))


@pytest.mark.parametrize("share", [0.8, 0.9])
def test_coverage_is_what_is_stated(share):
    covered, size = coverage_and_size(60, share)
    assert share - 0.01 < covered < share + 0.02
    assert 1 < size < 8


@pytest.mark.slow
def test_coverage_is_what_is_stated_within_a_point_in_a_thousand_draws():
    for share in (0.8, 0.9, 0.95):
        assert abs(coverage_and_size(1000, share)[0] - share) < 0.01


def test_a_set_has_the_true_class_if_its_score_is_at_most_the_level():
    probabilities, labels = draw(300, 12, 0)
    scores = set_scores(probabilities, labels)
    calibration = make_calibration(set_levels(scores, COVERAGES))
    for share in (0.6, 0.9, 0.995):
        level = calibration.set_level(share)
        for row, label, score in zip(probabilities, labels, scores.tolist(), strict=True):
            ordered, order = row.sort(descending=True, stable=True)
            named = order[: calibration.set_size(ordered.tolist(), share)]
            assert bool((named == label).any()) == (score <= level)


def test_the_score_is_the_papers():
    row = torch.tensor([[0.05, 0.3, 0.1, 0.2, 0.15, 0.12, 0.05, 0.03]])
    best, last = (set_scores(row, torch.tensor([label])).item() for label in (1, 7))
    assert best == 0
    assert last == pytest.approx(0.97 + SET_PENALTY * (7 - FREE_CLASSES))


def test_few_images_allow_only_the_set_of_all_classes():
    assert set_levels(torch.tensor([0.1, 0.3, 0.2]), [0.5, 0.75, 0.9]) == [
        pytest.approx(0.2),
        pytest.approx(0.3),
        None,
    ]
    assert make_calibration([None] * len(COVERAGES)).set_size([0.9, 0.06, 0.04], 0.9) == 3
