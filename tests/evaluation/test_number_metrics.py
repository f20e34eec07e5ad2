"""Metrics of numbers against scikit-learn and scipy; coverage of intervals by simulation."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics

from vit.evaluation.number_metrics import COVERAGES, conformal_half_widths, summarize_numbers


def draw_numbers(images: int, seed: int, *, step: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Predicted and true numbers; rounded to multiples of `step`, they have ties."""
    generator = np.random.default_rng(seed)
    true = generator.gamma(2.0, 10.0, images)
    predicted = true + generator.standard_t(3, images) * 5 + 1
    if step:
        predicted, true = predicted.round(-1) + step, (true / step).round() * step
    return torch.tensor(predicted), torch.tensor(true)


@pytest.mark.parametrize("step", [0.0, 7.3])
@pytest.mark.parametrize("images", [2, 3, 50, 1000])
def test_scores_equal_those_of_scikit_learn_and_scipy(images, step):
    predicted, true = draw_numbers(images, images, step=step)
    found = summarize_numbers(*torch.stack([predicted, true], dim=1).T, brief=True)
    assert found == {
        "count": images,
        "mae": pytest.approx(metrics.mean_absolute_error(true.numpy(), predicted.numpy())),
        "rmse": pytest.approx(metrics.root_mean_squared_error(true.numpy(), predicted.numpy())),
        "r2": pytest.approx(metrics.r2_score(true.numpy(), predicted.numpy())),
        "spearman": pytest.approx(stats.spearmanr(true, predicted).statistic),
    }


def test_undefined_scores_are_none():
    numbers, same = torch.arange(30) / 7.0, torch.full((30,), 0.1)
    numbers, same = numbers.double(), same.double()
    equal_truth = summarize_numbers(numbers, same)
    assert equal_truth["r2"] is equal_truth["spearman"] is equal_truth["r2_interval"] is None
    assert equal_truth["mae"] == pytest.approx(
        metrics.mean_absolute_error(same.numpy(), numbers.numpy())
    )
    equal_answers = summarize_numbers(same, numbers, brief=True)
    assert equal_answers["spearman"] is None
    assert equal_answers["r2"] == pytest.approx(metrics.r2_score(numbers.numpy(), same.numpy()))
    perfect = summarize_numbers(numbers, numbers)
    scores = [perfect[name] for name in ("mae", "rmse", "r2", "spearman", "mae_interval")]
    assert scores == [0, 0, 1, pytest.approx(1), None]
    assert summarize_numbers(-numbers, numbers)["spearman"] == pytest.approx(-1)
    one = summarize_numbers(numbers[3:4], same[:1])
    assert one["mae"] == pytest.approx(3 / 7 - 0.1)
    assert one["r2"] is one["spearman"] is one["mae_interval"] is None
    assert set(summarize_numbers(same[:0], same[:0]).values()) == {0, None}


@pytest.mark.slow
def test_intervals_are_those_of_draws_of_the_images():
    """The statistics of weights are those of the images that a draw repeats: scipy's bootstrap."""
    predicted, true = draw_numbers(120, 0, step=7.3)
    found = summarize_numbers(predicted, true)

    def compare(name, statistic):
        expected = stats.bootstrap(
            (predicted.numpy(), true.numpy()),
            statistic,
            paired=True,
            vectorized=False,
            n_resamples=1000,
            method="BCa",
            random_state=0,
        ).confidence_interval
        width = expected.high - expected.low
        assert found[f"{name}_interval"] == pytest.approx([*expected], abs=0.12 * width)

    compare("mae", lambda given, truth: abs(given - truth).mean())
    compare("rmse", lambda given, truth: math.sqrt(((given - truth) ** 2).mean()))
    compare("r2", lambda given, truth: metrics.r2_score(truth, given))
    compare("spearman", lambda given, truth: stats.spearmanr(given, truth).statistic)


def test_groups_are_drawn_whole_and_few_images_have_no_interval():
    predicted, true = draw_numbers(60, 1)
    alone = summarize_numbers(predicted, true)
    groups = torch.arange(60).repeat_interleave(5)
    repeated = predicted.repeat_interleave(5), true.repeat_interleave(5)
    for name in ("mae", "rmse", "r2", "spearman"):
        low, high = summarize_numbers(*repeated, groups)[f"{name}_interval"]
        wide = alone[f"{name}_interval"]
        assert high - low == pytest.approx(wide[1] - wide[0], rel=0.15)
        low, high = summarize_numbers(*repeated)[f"{name}_interval"]
        assert high - low < 0.7 * (wide[1] - wide[0])
    assert summarize_numbers(*repeated, groups % 19)["mae_interval"] is None
    assert summarize_numbers(predicted[:19], true[:19])["mae_interval"] is None


def test_half_widths_are_order_statistics_that_the_images_prove():
    residuals = torch.arange(19, 0, -1).double()
    assert conformal_half_widths(residuals) == {0.5: 10, 0.8: 16, 0.9: 18, 0.95: 19}
    assert conformal_half_widths(residuals[1:]) == {0.5: 10, 0.8: 16, 0.9: 18}
    assert conformal_half_widths(residuals[:0]) == {}
    repeated = residuals.repeat_interleave(3)
    groups = torch.arange(19).repeat_interleave(3)
    assert conformal_half_widths(repeated, groups) == conformal_half_widths(residuals)


@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_cover_new_images_and_images_of_new_groups(grouped):
    """Over 200 draws; the images of a group share an error, which is larger in small groups."""
    generator = np.random.default_rng(0)

    def draw(groups):
        shared = generator.standard_normal(groups)
        sizes = np.where(abs(shared) < 1, 9, 2) if grouped else np.ones(groups, dtype=int)
        residuals = abs(2 * shared.repeat(sizes) + generator.standard_normal(sizes.sum()))
        return torch.tensor(residuals), torch.tensor(np.arange(groups).repeat(sizes))

    covered = dict.fromkeys(COVERAGES, 0.0)
    for _ in range(200):
        residuals, groups = draw(60)
        widths = conformal_half_widths(residuals, groups if grouped else None)
        residuals, groups = draw(3000)
        for coverage, width in widths.items():
            inside = groups.bincount((residuals <= width).double()) / groups.bincount()
            covered[coverage] += float(inside.mean()) / 200
    for coverage, share in covered.items():
        assert coverage - 0.02 < share < coverage + (0.03 if grouped else 0.02)
