"""LeJEPA's losses against what the paper writes down."""

import cmath
import itertools
import math

import pytest
import torch

from vit.tasks.lejepa import prediction_losses, sigreg


def epps_pulley(values):
    """N ∫ |mean exp(i t x) - exp(-t²/2)|² exp(-t²/2) dt over [-5, 5], by the trapezoidal rule."""
    points = [-5 + 10 * step / 16 for step in range(17)]
    heights = []
    for t in points:
        empirical = sum(cmath.exp(1j * t * x) for x in values) / len(values)
        normal = math.exp(-(t**2) / 2)
        heights.append(abs(empirical - normal) ** 2 * normal)
    area = sum((a + b) / 2 * 10 / 16 for a, b in itertools.pairwise(heights))
    return len(values) * area


def test_sigreg_is_the_mean_of_written_out_epps_pulley_statistics():
    torch.manual_seed(0)
    views = torch.randn(2, 7, 3, dtype=torch.float64) * 1.7 + 0.3
    directions = torch.nn.functional.normalize(torch.randn(3, 4, dtype=torch.float64), dim=0)
    expected = [
        epps_pulley((view @ direction).tolist()) for view in views for direction in directions.T
    ]
    found = sigreg(views, directions)
    assert float(found) == pytest.approx(sum(expected) / len(expected), abs=1e-6)
    assert min(expected) > 0.01


def test_sigreg_is_small_for_a_gaussian_and_large_for_a_collapse():
    torch.manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(8, 32), dim=0)
    gaussian = float(sigreg(torch.randn(1, 500, 8), directions))
    assert gaussian < 2
    for others in (torch.zeros(1, 500, 8), 5 * torch.randn(1, 500, 8), torch.randn(1, 500, 8) + 2):
        assert float(sigreg(others, directions)) > 20 * gaussian


def test_images_of_other_processes_are_counted():
    torch.manual_seed(0)
    views, directions = (
        torch.randn(2, 9, 4),
        torch.nn.functional.normalize(torch.randn(4, 5), dim=0),
    )
    whole = sigreg(views, directions)
    messages = []

    def record(mine):
        messages.append(mine)
        return mine

    parts = (views[:, :4], views[:, 4:], views[:, :0])
    for part in parts:
        sigreg(part, directions, total=record)
    everyone = sum(messages)
    for part in parts:
        torch.testing.assert_close(sigreg(part, directions, total=lambda _mine: everyone), whole)


def test_views_predict_the_mean_of_the_global_ones():
    views = torch.tensor([[[0.0, 2.0]], [[2.0, 2.0]], [[1.0, 5.0]]])  # (views, 1 image, 2)
    assert prediction_losses(views, 2).tolist() == pytest.approx([(1 + 1 + 9) / 6])
