"""Intervals against scipy's bootstrap, and how often they hold the true value."""

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap as scipy_bootstrap

from vit.evaluation.bootstrap_intervals import (
    bootstrap,
    class_intervals,
    draw_weights,
    jackknife_weights,
    multilabel_intervals,
)
from vit.evaluation.classification_metrics import Outcomes, summarize
from vit.evaluation.multilabel_metrics import summarize_multilabel
from vit.evaluation.wilson_interval import wilson_interval

NAMES = ("nll", "brier", "hamming", "micro_f1", "subset_accuracy")
CLASSES = [f"class{index}" for index in range(4)]


def draw(images, seed=0):
    """Probabilities and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (images,), generator=generator)
    logits = torch.randn(images, 4, generator=generator, dtype=torch.float64)
    logits[torch.arange(images), labels] += 1.5
    return (1.5 * logits).softmax(dim=1), labels


def measure(probabilities, labels):
    outcomes = Outcomes.of(probabilities, labels)
    return summarize(outcomes, CLASSES), class_intervals(outcomes)


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
    monkeypatch.setattr("vit.evaluation.bootstrap_intervals.CHUNK", 45)
    parts = [*draw_weights(10, 25)]
    assert [len(part) for part in parts] == [4] * 6 + [1]
    assert torch.cat(parts).shape == whole.shape


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


def test_few_mistakes_and_few_images_of_a_class_have_no_interval():
    for probabilities, labels in (draw(1), (torch.eye(4), torch.arange(4))):
        found = measure(probabilities, labels)[1]
        assert len(found) == 4
        assert {*found.values()} == {None}
    found = measure(*draw(79))[1]
    assert [name for name, limits in found.items() if limits is None] == [
        "balanced_accuracy_interval",
        "macro_f1_interval",
    ]
    assert None not in measure(*draw(80))[1].values()
    probabilities, labels = draw(100)
    for rights in (0, 1, 4):  # of the answers
        wrong = (probabilities.argmax(dim=1) + (torch.arange(100) >= rights)) % 4
        found = measure(probabilities, wrong)[1]
        assert [name for name, limits in found.items() if limits is None] == [
            "balanced_accuracy_interval",
            "macro_f1_interval",
        ]
    constant = measure(torch.full((100, 4), 0.25), labels)[1]  # no draw differs
    assert (constant["nll_interval"], constant["brier_interval"]) == (None, None)
    nothing = multilabel_intervals(
        torch.eye(2).repeat(20, 1), torch.ones(40, 2), torch.zeros(40, 2)
    )
    assert (nothing["micro_f1_interval"], nothing["hamming_interval"]) == (None, None)
    right = torch.eye(2).repeat(20, 1)
    few = multilabel_intervals(right, right.long(), right)
    assert few.pop("subset_accuracy_interval") == list(wilson_interval(40, 40))
    assert len(few) == 4
    assert {*few.values()} == {None}


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
    assert found.keys() == {f"{name}_interval" for name in NAMES}
    for name, (low, high) in found.items():
        value = expected[name.removesuffix("_interval")]
        assert low < value < high
        assert (low + high) / 2 == pytest.approx(value, rel=0.1)
