"""Scores of several classes an image are those of scikit-learn and torch."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics

from vit.evaluation import multilabel_metrics
from vit.evaluation.intervals import student_quantile
from vit.evaluation.multilabel_metrics import (
    average_precisions,
    choose_thresholds,
    f1_scores,
    map_interval,
    nanmean,
    summarize_multilabel,
)

CLASSES = ("a", "b", "c", "never", "unpredicted")
THRESHOLDS = (0.5, 0.3, 0.8, 0.99, 1.0)


@pytest.fixture
def drawn():
    """(200, 5) probabilities with ties, and labels that they know something of."""
    random = np.random.default_rng(0)
    labels = random.random((200, 5)) < [0.5, 0.1, 0.02, 0, 0.3]
    scores = np.round(np.clip(labels * 0.3 + random.random((200, 5)) * 0.65, 0, 0.98), 2)
    return torch.from_numpy(scores), torch.from_numpy(labels.astype(np.uint8))


def test_average_precision_is_scikit_learns(drawn):
    scores, labels = drawn
    found = average_precisions(scores, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the class without an image
        theirs = metrics.average_precision_score(labels.numpy(), scores.numpy(), average=None)
    known = [0, 1, 2, 4]
    np.testing.assert_allclose(found[known], theirs[known], rtol=0, atol=1e-12)
    assert math.isnan(found[3])
    assert nanmean(found) == pytest.approx(theirs[known].mean(), abs=1e-12)


@pytest.mark.parametrize("images", [1, 2, 60])
@pytest.mark.parametrize("decimals", [15, 1, 0], ids=["distinct", "ties", "zeros and ones"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0], ids=["no class", "some", "every class"])
def test_degenerate_inputs_equal_scikit_learn(images, decimals, share):
    random = np.random.default_rng(images)
    true = (random.random((images, 5)) < share).astype(int)
    scores = np.round(random.random((images, 5)), decimals)
    found = summarize_multilabel(
        torch.from_numpy(scores), torch.from_numpy(true), CLASSES, THRESHOLDS
    )
    said = (scores >= np.array(THRESHOLDS)).astype(int)
    named = (said | true).any()
    macro, micro = (
        metrics.f1_score(true, said, average=kind, zero_division=np.nan) if named else 0.0
        for kind in ("macro", "micro")
    )
    inside = scores.clip(np.finfo(np.float64).tiny, 1 - 2**-53)
    present = true.any(axis=0)
    precisions = [
        metrics.average_precision_score(true[:, k], scores[:, k]) for k in range(5) if present[k]
    ]
    expected = {
        "macro_f1": macro,
        "micro_f1": micro,
        "subset_accuracy": metrics.accuracy_score(true, said),
        "hamming": metrics.hamming_loss(true, said),
        "brier": ((scores - true) ** 2).mean(),
        "nll": -np.where(true, np.log(inside), np.log1p(-inside)).clip(-100).mean(),
        "map": np.mean(precisions) if precisions else None,
    }
    bins = np.searchsorted(np.linspace(0, 1, 16)[1:-1], scores.ravel())
    gaps = np.bincount(bins, (true - scores).ravel())
    expected |= {"loss": expected["nll"], "ece": np.abs(gaps).sum() / scores.size}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-9), name
    each = metrics.precision_recall_fscore_support(true, said, zero_division=0)
    for place, row in enumerate(found["per_class"]):
        ours = [row[name] for name in ("precision", "recall", "f1", "count")]
        assert ours == pytest.approx([values[place] for values in each], abs=1e-12)
        assert row["threshold"] == THRESHOLDS[place]
        assert (row["average_precision"] is None) == (not present[place])


def test_a_sure_and_wrong_answer_has_a_finite_loss_and_nan_is_refused():
    scores, labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([[0, 1]])
    assert math.isfinite(summarize_multilabel(scores, labels, "ab", (0.5, 0.5))["loss"])
    with pytest.raises(ValueError, match="finite"):
        summarize_multilabel(scores * math.nan, labels, "ab", (0.5, 0.5))


def test_no_other_threshold_has_a_higher_f1(drawn):
    scores, labels = drawn
    found, few = choose_thresholds(scores, labels)
    assert few == [2, 3] or few == [3]  # of 200 images about 4 have class c
    best = f1_scores(scores >= torch.tensor(found), labels)
    for cut in np.arange(0, 1.005, 0.005):
        others = f1_scores(scores >= cut, labels)
        for index in {0, 1, 2, 4} - {*few}:
            assert best[index] >= others[index]
    assert all(found[index] == 0.5 for index in few)


def test_a_threshold_lies_between_two_scores():
    scores = torch.tensor([[0.9], [0.8], [0.7], [0.6], [0.5], *[[0.2]] * 5], dtype=torch.float64)
    labels = torch.tensor([[1]] * 5 + [[0]] * 5)
    (threshold,), few = choose_thresholds(scores, labels)
    assert threshold == pytest.approx(0.35)
    assert not few
    assert choose_thresholds(scores[1:], labels[1:]) == ([0.5], [0])  # 4 images are too few


def test_an_interval_is_the_same_every_time_and_none_where_it_takes_long(drawn, monkeypatch):
    assert map_interval(*drawn) == map_interval(*drawn)
    monkeypatch.setattr(multilabel_metrics, "MAX_WORK", 200 * 200 * 5 - 1)
    assert map_interval(*drawn) is None


def test_students_quantile_is_scipys():
    for degrees in (3, 4, 10, 30, 1000):
        assert student_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=0.01)
    assert student_quantile(1) == student_quantile(3)


def test_an_interval_lies_within_0_and_1_and_there_is_none_where_nothing_varies(drawn):
    _, labels = drawn
    perfect = labels.double()
    assert map_interval(perfect, labels) is None
    nearly = perfect.clone()
    nearly[labels[:, 0].nonzero()[0], 0] = 0.0
    value = nanmean(average_precisions(nearly, labels))
    low, high = map_interval(nearly, labels)
    assert 0.5 < low < value < high <= 1


def test_an_interval_holds_what_the_scores_are_worth():
    """Of 40 small sets of one kind, most intervals hold the value of a large one."""
    random = np.random.default_rng(1)

    def draw(images):
        labels = random.random((images, 2)) < 0.3
        return torch.from_numpy(labels + random.normal(size=labels.shape)), torch.from_numpy(labels)

    truth = nanmean(average_precisions(*draw(20_000)))
    held = sum(low <= truth <= high for low, high in (map_interval(*draw(150)) for _ in range(40)))
    assert held >= 33
