"""Scores against scikit-learn, scipy and the papers' formulas written out."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, bootstrap
from sklearn import metrics
from torch.nn import functional as F

from tests.evaluation.drawn import draw_scores
from vit.evaluation.classification_metrics import (
    ClassChange,
    Outcomes,
    calibration_error,
    chance_calibration_error,
    compare_recall,
    debiased_error,
    grade_moments,
    kappa_with_interval,
    quadratic_weighted_kappa,
    ranking,
    recall_lines,
    reliability,
    summarize,
    wilson_interval,
)

CLASSES = [f"class{index}" for index in range(8)]


def draw(images: int, labels: range | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return draw_scores(images, len(CLASSES), present=labels)


def scores_of(probabilities: torch.Tensor, labels: torch.Tensor, classes: list[str]) -> dict:
    return summarize(Outcomes.of(probabilities, labels), classes)


def gaps_by_bins(scores: np.ndarray, truth: np.ndarray, edges: np.ndarray) -> float:
    """Weighted mean of |share of truth - mean score| over bins with upper edges, in numpy."""
    place, total = np.searchsorted(edges[1:-1], scores), 0.0
    for number in set(place):
        inside = place == number
        total += inside.mean() * abs(truth[inside].mean() - scores[inside].mean())
    return total


@pytest.mark.parametrize(
    ("images", "labels"),
    [(400, range(8)), (150, range(2, 5)), (1, range(8)), (30, range(3, 4))],
    ids=["random", "absent classes", "one image", "one class"],
)
@pytest.mark.parametrize("decimals", [15, 1, 0], ids=["distinct", "ties", "zeros and ones"])
def test_degenerate_inputs_equal_scikit_learn_and_formulas_in_numpy(images, labels, decimals):
    probabilities, truth = draw(images, labels)
    probabilities = probabilities.mul(10**decimals).round().div(10**decimals)
    scores, table = scores_of(probabilities, truth, CLASSES), probabilities.numpy()
    answers = table.argmax(axis=1)  # numpy's is the first of equal ones
    own = table[np.arange(images), truth][:, None]
    earlier = np.arange(8) < truth.numpy()[:, None]
    ranks = ((table > own) | ((table == own) & earlier)).sum(axis=1)
    expected = {
        "count": images,
        "top1": metrics.accuracy_score(truth, answers),
        "top5": (ranks < 5).mean(),
        "loss": -np.log(np.maximum(own, np.finfo(np.float64).tiny)).mean(),
        "macro_f1": metrics.f1_score(truth, answers, average="macro", zero_division=0),
        "balanced_accuracy": metrics.recall_score(
            truth, answers, labels=truth.unique(), average="macro", zero_division=0
        ),
        "brier": ((table - np.eye(8)[truth.numpy()]) ** 2).sum(1).mean(),
        "ece": gaps_by_bins(table.max(1), answers == truth.numpy(), np.linspace(0, 1, 16)),
    }
    for name, value in expected.items():
        assert scores[name] == pytest.approx(value, abs=1e-12), name
    each = metrics.precision_recall_fscore_support(truth, answers, labels=range(8), zero_division=0)
    assert [row["label"] for row in scores["per_class"]] == CLASSES
    for place, row in enumerate(scores["per_class"]):
        found = [row[name] for name in ("precision", "recall", "f1", "count")]
        assert found == pytest.approx([values[place] for values in each], abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (1, 1), (7, 7), (333, 341), (50, 100)])
def test_wilson_interval_equals_scipy(successes, trials):
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    assert wilson_interval(successes, trials) == pytest.approx(tuple(expected), abs=1e-12)
    low, high = wilson_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1


@pytest.mark.parametrize(("images", "gap"), [(100, 0.0), (400, 0.0), (400, 0.05), (400, 0.1)])
def test_the_calibration_error_without_chance_is_the_true_one_on_average(images, gap):
    """Labels are drawn, so that the true error is known: 0, or `gap`."""
    generator = torch.Generator().manual_seed(0)
    errors, chances = [], []
    for _ in range(200):
        confidences = 0.3 + 0.6 * torch.rand(images, generator=generator, dtype=torch.float64)
        right = torch.bernoulli(confidences - gap, generator=generator)
        errors.append(calibration_error(confidences, right))
        chances.append(chance_calibration_error(confidences))
    error, chance = np.mean(errors), np.mean(chances)
    assert error > chance + gap / 4 if gap else error == pytest.approx(chance, rel=0.04)
    assert debiased_error(float(error), float(chance)) == pytest.approx(gap, abs=0.02)
    assert error > gap + 0.005  # the plain one is too high


def test_the_calibration_error_without_chance_is_not_negative():
    assert debiased_error(0.01, 0.02) == 0
    assert chance_calibration_error(torch.tensor([1.0, 0.0])) == 0
    assert chance_calibration_error(torch.tensor([0.5])) == pytest.approx((2 / np.pi) ** 0.5 / 2)


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
    few = scores_of(torch.eye(3)[[0, 1, 1]], torch.tensor([0, 1, 2]), CLASSES[:3])
    assert (few["top5"], few["top1"]) == (1.0, pytest.approx(2 / 3))


def test_a_certain_and_wrong_answer_has_a_finite_loss_and_nan_is_refused():
    scores = scores_of(torch.eye(2)[[0]], torch.tensor([1]), CLASSES[:2])
    assert math.isfinite(scores["loss"])
    assert scores["loss"] > 700
    with pytest.raises(ValueError, match="finite"):
        Outcomes.of(torch.full((1, 3), math.nan), torch.tensor([0]))


def test_parts_add_up_to_the_whole_in_plain_numbers():
    probabilities, truth = draw(100)
    parts = [
        Outcomes.of(probabilities[place : place + 33], truth[place : place + 33])
        for place in range(0, 100, 33)
    ]
    whole = scores_of(probabilities, truth, CLASSES)
    assert summarize(Outcomes.cat(parts), CLASSES) == whole
    assert whole["count"] == 100
    assert {type(value) for value in whole.values()} == {int, float, list}
    assert not any(isinstance(value, np.generic) for value in whole["per_class"][0].values())


def test_the_reliability_diagram_has_each_image_once():
    probabilities, truth = draw(200)
    confidences, answers = probabilities.max(dim=1)
    bins = reliability(confidences, answers == truth)
    assert sum(count for count, *_ in bins) == 200
    hits = sum(count * share for count, _, share, _ in bins)
    assert hits == pytest.approx(float((answers == truth).sum()))
    for count, mean, share, (low, high) in bins:
        interval = binomtest(round(count * share), count).proportion_ci(method="wilson")
        assert (low, high) == pytest.approx((interval.low, interval.high), abs=1e-9)
        assert 0 <= low <= share <= high <= 1
        assert 0 < mean <= 1


ANIMALS = ("ant", "bee", "cat", "dog")


def outcomes_of(labels: list[int], answers: list[int]) -> Outcomes:
    return Outcomes.of(torch.eye(4)[answers] * 0.5 + 0.1, torch.tensor(labels))


def test_classes_are_compared_by_name():
    change = ClassChange.between(("dog", "eel", "ant"), ANIMALS)
    assert (change.kept, change.added, change.lost) == (("ant", "dog"), ("bee", "cat"), ("eel",))
    assert ClassChange.between(None, ANIMALS).added == ANIMALS


def test_recall_is_that_of_each_class_and_of_all_of_an_age():
    change = ClassChange.between(("ant", "dog", "cat"), ANIMALS)
    measured = outcomes_of([0, 0, 0, 0, 1, 1, 3, 3], [0, 0, 0, 1, 1, 3, 3, 3])
    rows = compare_recall(change, measured, ANIMALS, {"ant": 4, "dog": 1})
    assert [(row.name, row.images, row.before, row.now) for row in rows] == [
        ("3 old classes", 6, 5 / 6, 5 / 6),
        ("1 new class", 2, None, 0.5),
        ("all classes", 8, None, 0.75),
        ("ant", 4, 1.0, 0.75),
        ("dog", 2, 0.5, 1.0),
        ("bee", 2, None, 0.5),
    ]
    assert [row.gain for row in rows[3:]] == [pytest.approx(-0.25), 0.5, None]


def test_the_table_for_a_terminal_escapes_names_and_has_the_worst_classes():
    names = (*(f"class{n}" for n in range(30)), "new\x1b")
    change = ClassChange.between(names[:-1], names)
    labels = torch.arange(31)
    probabilities = torch.eye(31)[labels.where(labels != 7, torch.tensor(8))]
    before = dict.fromkeys(names, 1)
    lines = recall_lines(compare_recall(change, Outcomes.of(probabilities, labels), names, before))
    assert lines[0].split() == ["recall", "images", "before", "now"]
    assert lines[1].split() == ["30", "old", "classes", "30", "100.0%", "96.7%"]
    assert lines[4].split() == ["class7", "1", "100.0%", "0.0%"]
    assert lines[-1] == "and 11 other classes"
    few = recall_lines(
        compare_recall(change, Outcomes.of(probabilities[29:], labels[29:]), names, {})
    )
    assert few[-1].split() == ["new\\x1b", "1", "-", "100.0%"]


@pytest.mark.parametrize("grades", [2, 3, 5, 12])
def test_kappa_equals_scikit_learn(grades):
    generator = np.random.default_rng(grades)
    true = generator.integers(0, grades, 300)
    answers = (true + generator.normal(0, 1, 300)).round().clip(0, grades - 1).astype(int)
    expected = metrics.cohen_kappa_score(true, answers, weights="quadratic")
    moments = grade_moments(torch.tensor(true), torch.tensor(answers))
    assert float(quadratic_weighted_kappa(moments.mean(dim=0))) == pytest.approx(expected)


def test_kappa_of_few_grades():
    def kappa(*pairs):
        grades, answers = torch.tensor(pairs).T
        return float(quadratic_weighted_kappa(grade_moments(grades, answers).mean(dim=0)))

    assert kappa((0, 0), (1, 1)) == 1
    assert kappa((0, 1), (1, 0)) == -1
    assert kappa((1, 0), (1, 2)) == 0  # one grade, two answers
    assert np.isnan(kappa((1, 1), (1, 1)))


@pytest.mark.slow
def test_interval_of_kappa_equals_that_of_scipy():
    generator = np.random.default_rng(0)
    true = generator.integers(0, 5, 200)
    answers = (true + generator.normal(0, 1.2, 200)).round().clip(0, 4).astype(int)
    outcomes = Outcomes.of(F.one_hot(torch.tensor(answers), 5), torch.tensor(true))
    found = kappa_with_interval(outcomes)

    def kappa(true, answers):
        return metrics.cohen_kappa_score(true, answers, weights="quadratic")

    expected = bootstrap(
        (true, answers), kappa, paired=True, vectorized=False, n_resamples=1000, random_state=0
    ).confidence_interval
    assert found["kappa"] == pytest.approx(kappa(true, answers))
    assert found["kappa_interval"] == pytest.approx([*expected], abs=0.012)
