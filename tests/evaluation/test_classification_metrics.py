"""Scores against scikit-learn, scipy and the papers' formulas written out."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn import metrics

from vit.evaluation.classification_metrics import (
    Outcomes,
    calibration_error,
    ranking,
    summarize,
    wilson_interval,
)

CLASSES = [f"class{index}" for index in range(8)]


def draw(images: int, *, seed: int = 0, labels: range = range(8)) -> tuple[torch.Tensor, ...]:
    """Probabilities that lean to the true label, and labels from `labels`."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(labels.start, labels.stop, (images,), generator=generator)
    logits = torch.randn(images, len(CLASSES), generator=generator, dtype=torch.float64)
    logits[torch.arange(images), truth] += 1.0
    return logits.softmax(dim=1), truth


def scores_of(probabilities: torch.Tensor, labels: torch.Tensor, classes: list[str]) -> dict:
    return summarize(Outcomes.of(probabilities, labels), classes)


@pytest.mark.parametrize("labels", [range(8), range(2, 5)], ids=["all classes", "three of eight"])
def test_equals_scikit_learn(labels):
    probabilities, truth = draw(400, labels=labels)
    scores = scores_of(probabilities, truth, CLASSES)
    answers = probabilities.argmax(dim=1)
    expected = {
        "top1": metrics.accuracy_score(truth, answers),
        "top5": metrics.top_k_accuracy_score(truth, probabilities, k=5, labels=range(8)),
        "loss": metrics.log_loss(truth, probabilities, labels=range(8)),
        "macro_f1": metrics.f1_score(truth, answers, average="macro", zero_division=0),
        "balanced_accuracy": metrics.recall_score(
            truth, answers, labels=truth.unique(), average="macro"
        ),
    }
    for name, value in expected.items():
        assert scores[name] == pytest.approx(value, abs=1e-12), name
    table = metrics.precision_recall_fscore_support(
        truth, answers, labels=range(8), zero_division=0
    )
    for row, label, precision, recall, f1, count in zip(
        scores["per_class"], CLASSES, *table, strict=True
    ):
        assert row["label"] == label
        assert row["count"] == count
        assert (row["precision"], row["recall"], row["f1"]) == pytest.approx(
            (precision, recall, f1), abs=1e-12
        )


def test_balanced_accuracy_equals_scikit_learn_where_every_answer_is_a_label():
    probabilities, truth = draw(400)
    value = metrics.balanced_accuracy_score(truth, probabilities.argmax(dim=1))
    scores = scores_of(probabilities, truth, CLASSES)
    assert scores["balanced_accuracy"] == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (1, 1), (7, 7), (333, 341), (50, 100)])
def test_wilson_interval_equals_scipy(successes, trials):
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    assert wilson_interval(successes, trials) == pytest.approx(tuple(expected), abs=1e-12)
    low, high = wilson_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1


def test_calibration_error_equals_the_formula():
    probabilities, truth = draw(500)
    confidences, answers = probabilities.max(dim=1)
    right = answers == truth
    expected = 0.0
    for place in range(15):
        inside = (confidences > place / 15) & (confidences <= (place + 1) / 15)
        if inside.any():
            accuracy, confidence = right[inside].double().mean(), confidences[inside].mean()
            expected += float(inside.double().mean() * (accuracy - confidence).abs())
    assert calibration_error(confidences, right) == pytest.approx(expected, abs=1e-12)
    assert scores_of(probabilities, truth, CLASSES)["ece"] == pytest.approx(expected)


def test_calibration_error_by_hand():
    confidences = torch.tensor([1.0, 1.0, 0.5, 0.5])
    right = torch.tensor([True, True, True, False])
    assert calibration_error(confidences, right) == 0.0
    assert calibration_error(confidences, ~right) == pytest.approx(0.5)
    assert calibration_error(torch.zeros(3), torch.zeros(3, dtype=torch.bool)) == 0.0


def test_equal_probabilities_count_for_the_first_class_only():
    probabilities = torch.full((3, 8), 1 / 8)
    scores = scores_of(probabilities, torch.tensor([0, 4, 5]), CLASSES)
    assert scores["top1"] == pytest.approx(1 / 3)
    assert scores["top5"] == pytest.approx(2 / 3)
    assert ranking(probabilities)[0].tolist() == list(range(8))


def test_fewer_classes_than_five_make_top5_certain():
    scores = scores_of(torch.eye(3)[[0, 1, 1]], torch.tensor([0, 1, 2]), CLASSES[:3])
    assert scores["top5"] == 1.0
    assert scores["top1"] == pytest.approx(2 / 3)


def test_a_certain_and_wrong_answer_has_a_finite_loss():
    scores = scores_of(torch.eye(2)[[0]], torch.tensor([1]), CLASSES[:2])
    assert math.isfinite(scores["loss"])
    assert scores["loss"] > 700


def test_parts_add_up_to_the_whole():
    probabilities, truth = draw(100)
    parts = [
        Outcomes.of(probabilities[place : place + 33], truth[place : place + 33])
        for place in range(0, 100, 33)
    ]
    whole = scores_of(probabilities, truth, CLASSES)
    assert summarize(Outcomes.cat(parts), CLASSES) == whole
    assert whole["count"] == 100


def test_scores_are_plain_numbers():
    probabilities, truth = draw(10)
    scores = scores_of(probabilities, truth, CLASSES)
    assert {type(value) for value in scores.values()} == {int, float, list}
    assert not any(isinstance(value, np.generic) for value in scores["per_class"][0].values())


@pytest.mark.parametrize(
    ("probabilities", "labels", "reason"),
    [
        (torch.eye(3), torch.tensor([0, 1]), "need"),
        (torch.eye(3), torch.tensor([0, 1, 3]), "from 0 to 2"),
        (torch.full((1, 3), math.nan), torch.tensor([0]), "finite"),
    ],
)
def test_refuses_what_cannot_be_scored(probabilities, labels, reason):
    with pytest.raises(ValueError, match=reason):
        Outcomes.of(probabilities, labels)


def test_refuses_no_image():
    with pytest.raises(ValueError, match="no image"):
        scores_of(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), CLASSES[:3])
