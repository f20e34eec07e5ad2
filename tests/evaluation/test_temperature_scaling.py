"""Temperatures against scipy's minimisation, and what calibration promises for other images."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from scipy.special import log_expit, log_softmax

from tests.slow_cases import mostly_slow
from vit.evaluation.classification_metrics import Outcomes, ranking, summarize
from vit.evaluation.temperature_scaling import (
    PRIOR_WIDTH,
    best_scaling,
    best_temperature,
    fit_temperature,
    mean_loss,
    scale_logits,
)


def draw(images: int, temperature: float, *, classes: int = 5, seed: int = 0):
    """Logits whose softmax at `temperature` is the distribution that labels are drawn from."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(images, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    return logits * temperature, labels


def draw_multilabel(images: int, temperature: float):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(images, 4, generator=generator, dtype=torch.float64)
    return logits * temperature, torch.bernoulli(logits.sigmoid(), generator=generator).long()


def smoothed_loss(logits, labels):
    """Loss of single labels of which 1 / (images + 2) is spread over all classes."""
    images, classes = logits.shape
    targets = np.full(logits.shape, 1 / (images + 2) / classes)
    targets[np.arange(images), labels] += 1 - 1 / (images + 2)
    return -(targets * log_softmax(logits, axis=1)).sum(1).mean()


def platt_loss(logits, labels):
    """Loss of several labels with Platt's targets."""
    positives, count = labels.sum().item(), labels.numel()
    yes, no = (positives + 1) / (positives + 2), 1 / (count - positives + 2)
    targets = np.where(labels.numpy() > 0, yes, no)
    return -(targets * log_expit(logits) + (1 - targets) * log_expit(-logits)).mean()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("make", "loss"), [(draw, smoothed_loss), (draw_multilabel, platt_loss)])
def test_the_temperature_equals_scipys(temperature, make, loss):
    logits, labels = make(200, temperature)
    found = best_temperature(logits, labels)
    minimum = minimize_scalar(
        lambda power: loss(logits.numpy() / np.exp(power), labels), bracket=(-1, 1), tol=1e-12
    )
    assert found == pytest.approx((np.exp(minimum.x), 1.0), rel=1e-5)


@pytest.mark.parametrize("exponent", [0.8, 2.0])
def test_temperature_and_exponent_equal_scipys(exponent):
    true, labels = draw(300, 1.0)
    logits = scale_logits(true, 0.7, 1 / exponent)  # smoothed where the exponent is above 1
    gaps = (logits.amax(dim=1, keepdim=True) - logits).numpy()

    def loss(powers):
        scaled = -((gaps / np.exp(powers[0])) ** np.exp(powers[1]))
        prior = powers[1] ** 2 / (2 * PRIOR_WIDTH**2 * 300)
        return smoothed_loss(scaled, labels) + prior

    expected = np.exp(minimize(loss, (0, 0), method="Nelder-Mead", options={"xatol": 1e-6}).x)
    found = best_scaling(logits, labels)
    assert found == pytest.approx(tuple(expected), rel=0.02)
    assert loss(np.log(found)) == pytest.approx(loss(np.log(expected)), abs=1e-5)


@pytest.mark.parametrize(
    ("temperature", "exponent"), mostly_slow([(0.4, 1.0), (3.0, 1.0), (0.5, 2.0)])
)
def test_the_calibration_error_of_other_images_falls_by_more_than_half(temperature, exponent):
    true, labels = draw(1500, 1.0)
    logits = scale_logits(true, 1 / temperature, 1 / exponent)
    found = fit_temperature(logits[:750], labels[:750])
    assert found.loss_after < found.loss_before

    def scores(values):
        return summarize(Outcomes.of(values.softmax(dim=1), labels[750:]), "abcde")

    raw = scores(logits[750:])
    calibrated = scores(scale_logits(logits[750:], *found.scaling))
    assert calibrated["ece"] < raw["ece"] / 2
    assert calibrated["top1"] == raw["top1"]
    assert calibrated["per_class"] == raw["per_class"]


@pytest.mark.slow
def test_few_images_leave_the_exponent_near_1(monkeypatch):
    """Without the prior it varies more, and so does the loss of other images."""
    spread, loss = [], []
    other, truth = draw(2000, 1.0, seed=99)
    for width in (PRIOR_WIDTH, 100.0):
        monkeypatch.setattr("vit.evaluation.temperature_scaling.PRIOR_WIDTH", width)
        found = [best_scaling(*draw(60, 1.0, seed=seed)) for seed in range(20)]
        spread.append(np.std([np.log(one.exponent) for one in found]))
        loss.append(np.mean([mean_loss(scale_logits(other, *one), truth) for one in found]))
    assert spread[0] < 0.8 * spread[1]
    assert loss[0] < loss[1]


def test_the_order_of_the_classes_stays():
    logits = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[:, 1] = logits[:, 0]  # ties too
    for scaling in ((0.3, 1.0), (2.0, 0.5), (0.7, 2.5)):
        assert torch.equal(ranking(scale_logits(logits, *scaling)), ranking(logits))


def changed_where(changed, groups=None):
    """Which images another label of some images changes, of 100 that are scaled in five folds."""
    logits, labels = draw(100, 2.0)
    other = torch.where(changed, logits.argmin(dim=1), labels)
    before, after = (fit_temperature(logits, one, groups).held_out for one in (labels, other))
    return (after != before).any(dim=1)


def test_each_image_is_scaled_by_a_fit_without_it():
    found = changed_where(torch.arange(100) == 0)
    assert found.sum() == 80
    assert not found[0]


def test_each_group_is_scaled_by_a_fit_without_it():
    """All labels of one group change: those of its fold, five whole groups of 25, do not."""
    groups = torch.arange(25).repeat(4)
    found = changed_where(groups == 7, groups)
    assert found.sum() == 80
    assert not found[groups == 7].any()
    assert all(found[groups == group].float().mean() in (0, 1) for group in range(25))


def test_a_single_group_is_divided():
    logits, labels = draw(100, 2.0)
    one = fit_temperature(logits, labels, torch.zeros(100, dtype=torch.long))
    assert torch.equal(one.held_out, fit_temperature(logits, labels).held_out)


def test_loss_is_torchs_cross_entropy():
    logits, labels = draw(60, 1.0)
    expected = torch.nn.functional.cross_entropy(logits, labels)
    assert mean_loss(logits, labels) == pytest.approx(float(expected))


def test_no_scores_are_certain_where_every_answer_is_right():
    labels = torch.arange(60) % 3
    logits = 4.0 * torch.nn.functional.one_hot(labels, 3)
    found = fit_temperature(logits, labels)
    confidence = scale_logits(logits, *found.scaling).softmax(dim=1).max()
    assert 0.9 < confidence < 0.999


def test_raw_scores_are_kept_where_no_temperature_is_better():
    equal = fit_temperature(torch.zeros(60, 3), torch.arange(60) % 3)
    assert (equal.scaling, equal.loss_after) == ((1.0, 1.0), equal.loss_before)
    assert torch.equal(equal.held_out, torch.zeros(60, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "logits",
    [torch.randn(0, 3), torch.randn(60, 1), torch.full((60, 3), float("inf"))],
    ids=["no images", "one class", "overflow"],
)
def test_nothing_is_fitted_where_nothing_can_be_learned(logits):
    assert fit_temperature(logits, torch.zeros(len(logits), dtype=torch.long)) is None


def test_scores_of_few_images_are_kept_as_they_are():
    logits, labels = 9 * torch.randn(49, 3), torch.arange(49) % 3
    found = fit_temperature(logits, labels)
    assert found.scaling == (1.0, 1.0)
    assert torch.equal(found.held_out, logits.double())
    assert found.loss_after == found.loss_before == mean_loss(logits, labels)
