"""The linear probe is the optimum that scikit-learn finds, chosen by images it has not seen."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn import functional as F

from vit.training.finetune import linear_probe, logistic_regression
from vit.training.finetune.linear_probe import (
    STRENGTHS,
    PenaltyTrial,
    assign_folds,
    choose_penalty,
    fit_probe,
    probe_summary,
    within_one_standard_error,
)
from vit.training.finetune.logistic_regression import Eigenbasis, LogisticProblems, minimise


def draw(
    images: int, dim: int, classes: int, *, apart: float = 0.5, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Overlapping classes; features of very different scales, correlated, far from zero."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    centres = torch.randn(classes, dim, generator=generator) * apart
    mixed = torch.randn(dim, dim, generator=generator) * torch.arange(1, dim + 1).rsqrt()
    noise = torch.randn(images, dim, generator=generator)
    return (centres[labels] + noise) @ mixed.T + 3, labels


def standardised(features: Tensor) -> np.ndarray:
    values = features.double()
    std = values.std(0, correction=0)
    return ((values - values.mean(0)) / torch.where(std > 1e-6, std, 1.0)).numpy()


def scikit(features: np.ndarray, labels: Tensor, weight: float) -> LogisticRegression:
    """Its optimum where `weight` counts beside the mean loss."""
    other = LogisticRegression(
        C=1 / (weight * len(labels)), solver="newton-cg", tol=1e-9, max_iter=1000
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that so small a tolerance is not reached
        return other.fit(features, labels.numpy())


@pytest.mark.parametrize("weight", [3.0, 0.1, 1e-3, 1e-4])
@pytest.mark.parametrize(("images", "dim"), [(150, 12), (40, 60)])
def test_the_head_is_the_optimum_of_scikit_learn(images, dim, weight):
    features, labels = draw(images, dim, 4)
    features[:, 5] = 7.0  # says nothing
    head = fit_probe(features, labels, 4, seed=0, strengths=[weight])
    ours = head.logits(features).softmax(1)
    theirs = scikit(standardised(features), labels, weight).predict_proba(standardised(features))
    torch.testing.assert_close(ours.double(), torch.from_numpy(theirs), atol=2e-4, rtol=0)
    assert head.weight.dtype == head.bias.dtype == torch.float32
    assert not head.weight[:, 5].any()
    assert head.strength == weight
    assert head.correct(features, labels) == int((ours.argmax(1) == labels).sum())


@pytest.mark.parametrize("folds", [3, 5])
def test_held_out_images_were_not_seen(monkeypatch, folds):
    monkeypatch.setattr(linear_probe, "FOLDS", folds)
    features, labels = draw(200, 30, 3, apart=0.3)
    tried = [1.0, 1e-2, 1e-4]
    head = fit_probe(features, labels, 3, seed=7, strengths=tried)
    part, inputs = assign_folds(labels, folds, 7), standardised(features)
    for weight in tried:
        right, loss = 0, 0.0
        for fold in range(folds):
            held = part == fold
            other = scikit(inputs[~held], labels[~held], weight)
            right += int((other.predict(inputs[held]) == labels[held].numpy()).sum())
            own = other.predict_proba(inputs[held])[np.arange(int(held.sum())), labels[held]]
            loss -= float(np.log(own).sum())
        assert head.accuracy_by_strength[weight] == pytest.approx(right / 200, abs=0.011)
        assert head.loss_by_strength[weight] == pytest.approx(loss / 200, rel=5e-3)
    assert head.cv_accuracy < head.correct(features, labels) / 200 - 0.05
    assert head.cv_accuracy == head.accuracy_by_strength[head.strength]
    low, high = head.cv_interval
    assert low < head.cv_accuracy < high
    assert (head.cv_count, head.folds) == (200, folds)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_head():
    features, labels = draw(60, 10, 3)
    first, again, other = (fit_probe(features, labels, 3, seed=seed) for seed in (1, 1, 2))
    assert first.weight.equal(again.weight)
    assert first.bias.equal(again.bias)
    assert first.loss_by_strength == again.loss_by_strength != other.loss_by_strength


def test_on_real_digits_the_sweep_finds_its_middle():
    pixels, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
    head = fit_probe(pixels[:900].float(), labels[:900], 10, seed=0)
    assert list(head.accuracy_by_strength) == [*STRENGTHS]
    assert STRENGTHS[-1] < head.strength < STRENGTHS[0]
    assert head.cv_accuracy > 0.94
    assert head.correct(pixels[900:].float(), labels[900:]) / len(labels[900:]) > 0.9
    assert head.notes == ()


@pytest.mark.parametrize("labels", [[0] * 10 + [1] * 7 + [2] * 4 + [3], [0, 1], [1] * 9])
def test_parts_are_even_and_so_are_the_classes_in_them(labels):
    parts = min(5, len(labels))
    part = assign_folds(torch.tensor(labels), parts, 3)
    sizes = part.bincount(minlength=parts)
    assert sizes.max() - sizes.min() <= 1
    for label in set(labels):
        share = part[torch.tensor(labels) == label].bincount(minlength=parts)
        assert share.max() - share.min() <= 1
    assert not part.equal(torch.arange(len(labels)) % parts) or len(labels) < 3


def test_a_class_without_images_is_never_the_answer():
    features, labels = draw(90, 8, 3)
    head = fit_probe(features, labels * 2, 6, seed=0)  # 1, 3 and 5 have none
    alone = fit_probe(features, labels, 3, seed=0)
    probabilities = head.logits(features).softmax(1)
    assert head.weight.shape == (6, 8)
    assert head.bias.isfinite().all()
    assert probabilities[:, 1::2].max() < 1e-8
    ours = alone.logits(features).softmax(1)
    torch.testing.assert_close(probabilities[:, ::2], ours, atol=1e-4, rtol=0)
    assert head.cv_accuracy == alone.cv_accuracy


def test_a_class_with_one_image_counts_as_wrong_and_is_learnt():
    features, labels = draw(61, 8, 3, apart=3.0)
    labels[:60], labels[60] = labels[:60].clamp(max=1), 2
    features[60] += 30
    head = fit_probe(features, labels, 3, seed=0)
    assert head.cv_accuracy == 60 / 61
    assert head.loss_by_strength[head.strength] < 0.1  # it is not infinite
    assert head.correct(features, labels) == 61


@pytest.mark.parametrize(
    ("labels", "why"),
    [([0, 1, 2], "no class has two"), ([1, 1, 1, 1], "one class"), ([2], "no class has two")],
)
def test_too_few_images_to_choose_by(labels, why):
    features = torch.eye(4)[: len(labels)] + 1
    head = fit_probe(features, torch.tensor(labels), 3, seed=0)
    assert (head.strength, head.cv_accuracy, head.cv_interval, head.folds) == (0.1, None, None, 0)
    assert head.accuracy_by_strength == {}
    assert why in head.notes[0]
    assert head.correct(features, torch.tensor(labels)) == len(labels)
    assert fit_probe(features, torch.tensor(labels), 3, seed=0, strengths=[2.0]).strength == 2.0
    assert "of 0 tried" not in probe_summary(head, correct=1, total=2)[0]


def test_two_images_of_each_class_are_enough_to_choose():
    features, labels = draw(6, 20, 3, apart=5.0)
    head = fit_probe(features, labels, 3, seed=0)
    assert head.cv_count == 6
    assert head.correct(features, labels) == 6


def test_features_that_say_nothing_give_the_shares_of_the_classes():
    labels = torch.tensor([0] * 6 + [1] * 3 + [2] * 3)
    head = fit_probe(torch.full((12, 5), 0.1), labels, 3, seed=0, strengths=[0.1])
    shares = head.logits(torch.full((1, 5), 0.1)).softmax(1)[0]
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.25, 0.25]), atol=1e-4, rtol=0)
    assert not head.weight.any()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_units_of_the_features_do_not_matter(scale):
    features, labels = draw(80, 6, 3)
    plain = fit_probe(features, labels, 3, seed=0, strengths=[0.01])
    scaled = fit_probe(features * scale, labels, 3, seed=0, strengths=[0.01])
    torch.testing.assert_close(
        scaled.logits(features * scale), plain.logits(features), atol=5e-3, rtol=1e-3
    )


def test_the_weakest_strength_is_not_chosen_for_separable_classes():
    features, labels = draw(60, 20, 3, apart=9.0)  # the weaker, the surer
    weak = fit_probe(features, labels, 3, seed=0)
    assert weak.strength > STRENGTHS[-1]  # which would be as good, with a head far larger
    given = fit_probe(features, labels, 3, seed=0, strengths=[1e-2, 1.0, 1e-2])
    assert [*given.accuracy_by_strength] == [1.0, 1e-2]


def test_large_data_are_held_out_once(monkeypatch):
    features, labels = draw(100, 10, 3)
    monkeypatch.setattr(linear_probe, "MAX_FOLD_PRODUCTS", 1000)
    head = fit_probe(features, labels, 3, seed=0)
    assert (head.folds, head.cv_count) == (1, 20)
    assert [*head.accuracy_by_strength][:7] == [*STRENGTHS[::2]]
    assert "held out one part of 5" in head.notes[0]
    assert "held out once" in probe_summary(head, correct=9, total=10)[1]


@pytest.mark.slow
def test_blocks_change_nothing(monkeypatch):
    features, labels = draw(70, 9, 3)
    whole = fit_probe(features, labels, 5, seed=0)
    for module in (logistic_regression, linear_probe):
        monkeypatch.setattr(module, "BLOCK", 100)
    parts = fit_probe(features, labels, 5, seed=0)
    torch.testing.assert_close(parts.weight, whole.weight, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(parts.bias, whole.bias, atol=1e-3, rtol=1e-3)
    assert parts.accuracy_by_strength == whole.accuracy_by_strength
    assert parts.correct(features, labels) == whole.correct(features, labels)


def test_problems_end_where_each_would_alone():
    features, labels = draw(80, 12, 3)
    rotation = Eigenbasis.of(features)
    inputs = rotation.rotate(features)
    format_count = torch.stack([torch.arange(80) % 4 != 0, torch.arange(80) < 30], dim=1)
    both = LogisticProblems(inputs, labels, format_count, 3, rotation.variance)
    together = minimise(both, both.start(), 1e-3, tolerance=1e-9)
    assert together.converged
    for number in range(2):
        alone = LogisticProblems(inputs, labels, format_count[:, [number]], 3, rotation.variance)
        weights = minimise(alone, alone.start(), 1e-3, tolerance=1e-9).weights[:, 0]
        torch.testing.assert_close(together.weights[:, number], weights, atol=3e-3, rtol=1e-2)
    assert not minimise(both, both.start(), 1e-3, tolerance=1e-9, most=2).converged


def test_the_gradient_is_that_of_the_loss():
    features, labels = draw(40, 5, 3)
    rotation = Eigenbasis.of(features)
    inputs = rotation.rotate(features)
    format_count = torch.stack([torch.arange(40) < 30, torch.arange(40) % 3 == 0], dim=1)
    problems = LogisticProblems(inputs, labels, format_count, 3, rotation.variance)
    penalty = torch.tensor([0.3] * 5 + [0.0])[:, None, None]
    weights = torch.randn(problems.shape, generator=torch.Generator().manual_seed(1))
    weights.requires_grad_()
    expected = (penalty * weights.square()).sum((0, 2)) / 2
    logits = torch.einsum("np,pbc->bnc", inputs, weights)
    for number in range(2):
        rows = format_count[:, number]
        if number == 1:  # images 0, 3, 6... of labels 0, 1, 2, 0...: class 0 alone
            assert labels[rows].unique().tolist() == [0]
            continue
        expected[number] += F.cross_entropy(logits[number, rows], labels[rows])
    (gradient,) = torch.autograd.grad(expected.sum(), weights)
    loss, ours = problems.loss(weights.detach(), penalty)
    torch.testing.assert_close(ours, gradient, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loss, expected.detach().double(), atol=1e-5, rtol=1e-5)


def test_a_loss_next_to_nothing_has_its_digits():
    inputs, labels = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), torch.tensor([0, 1])
    problems = LogisticProblems(inputs, labels, torch.ones(2, 1) > 0, 2, torch.ones(1).double())
    weights = torch.tensor([[8.0, -8.0], [0.0, 0.0]]).unsqueeze(1)
    loss, gradient = problems.loss(weights, torch.zeros(2, 1, 1))
    assert loss.item() == pytest.approx(math.exp(-16), rel=1e-4)  # float32 has 1 - exp(-16) = 1
    assert gradient[0, 0].tolist() == pytest.approx([-math.exp(-16), math.exp(-16)], rel=1e-4)


def trial(right: str, loss: float, weight: float = 1.0) -> PenaltyTrial:
    """A trial that was right where `right` has a 1."""
    return PenaltyTrial(
        weight,
        torch.empty(0),
        torch.tensor([letter == "1" for letter in right]),
        torch.full((len(right),), loss),
    )


def test_accuracy_counts_unless_it_is_luck():
    best = trial("1111111100", 2.0)
    near, far = trial("1111111000", 1.0), trial("1111000000", 0.5)
    assert within_one_standard_error(near, best)  # one lost, none won: one standard error
    assert not within_one_standard_error(far, best)
    assert choose_penalty([far, best, near]) is near
    assert choose_penalty([far, best]) is best
    assert within_one_standard_error(trial("0001111111", 1.0), best)  # three lost, two won
    # unseen classes have no loss
    for losses, loss in (([math.inf, 0.5], 0.5), ([math.inf], math.inf)):
        unseen = PenaltyTrial(1.0, torch.empty(0), torch.ones(len(losses)), torch.tensor(losses))
        assert unseen.loss == loss


def test_what_a_user_sees():
    features, labels = draw(60, 10, 3)
    head = fit_probe(features, labels, 3, seed=0, strengths=[0.1, 0.01, 0.001])
    lines = probe_summary(head, correct=535, total=614)
    assert lines[0] == (
        f"probe: 87.1% of 614 validation images (84.3% to 89.6%), strength {head.strength:.2g} "
        "of 3 tried"
    )
    assert lines[1].startswith(f"cross-validation: {head.cv_accuracy:.1%} of 60 images")
    assert lines[1].endswith(", 5 folds")
