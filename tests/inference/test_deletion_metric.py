"""Deletion: curves against a loop over single images, verdicts on networks that are known."""

import pytest
import torch
from sklearn.metrics import auc
from torch import nn

from tests.inference.test_attribution import KINDS, input_images, network
from vit.inference.deletion_metric import RANDOM_ORDERS, STEPS, Curve, deletions, passes, steps


class Weighted(nn.Module):
    """Two classes; the first has what light is in patches, times a weight of each."""

    def __init__(self, weights) -> None:
        super().__init__()
        self.weights, self.seen = weights, 0

    def forward(self, images):
        self.seen += len(images)
        light = images.mean(1).unflatten(1, (4, 4)).unflatten(3, (4, 4)).mean((2, 4)).flatten(1)
        logits = (light * self.weights).sum(1)
        return torch.stack([logits, torch.zeros_like(logits)], dim=1)


def by_loop(model, image, order, side, wanted):
    """The curve of one order, image by image."""
    cols = image.shape[2] // side
    found = []
    for step in range(STEPS + 1):
        deleted = image.clone()
        for patch in order[: round(len(order) * step / STEPS)]:
            top, left = side * (patch // cols), side * (patch % cols)
            deleted[:, top : top + side, left : left + side] = 0
        with torch.no_grad():
            found.append(float(model(deleted[None])[0].double().softmax(0)[wanted]))
    return found


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_curves_equal_those_of_an_explicit_loop(settings):
    model = network(**settings)
    image = input_images(1, height=32, width=40)[0]
    maps = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(0))
    for one, weights, wanted in zip(
        deletions(model, image, maps, [2, 0], batch_size=7, seed=0), maps, [2, 0], strict=True
    ):
        order = weights.flatten().argsort(descending=True).tolist()
        expected = by_loop(model, image, order, 8, wanted)
        assert one.curve.probabilities == pytest.approx(expected, abs=1e-5)
        backwards = by_loop(model, image, order[::-1], 8, wanted)
        assert one.reverse.probabilities == pytest.approx(backwards, abs=1e-5)
        assert one.curve.deleted == tuple(step / 10 for step in range(11))
        assert one.curve.score == pytest.approx(auc(one.curve.deleted, expected), abs=1e-5)
        assert len(one.random) == RANDOM_ORDERS


def test_a_faithful_map_beats_chance_and_a_reversed_one_does_not():
    weights = torch.rand(16, generator=torch.Generator().manual_seed(1)) - 0.3
    model, image = Weighted(weights), torch.ones(3, 16, 16)
    true = weights.view(4, 4)
    found = deletions(model, image, torch.stack([true, -true]), [0, 0], batch_size=8, seed=0)
    assert [one.better for one in found] == [True, False]
    assert found[0].curve.score < found[0].chance < found[0].reverse.score
    assert found[1].curve.probabilities == found[0].reverse.probabilities
    assert found[0].random == found[1].random
    (other,) = deletions(model, image, -true[None], [1], batch_size=8, seed=0)
    assert other.better  # what speaks against one class speaks for the other


def test_a_random_map_beats_chance_once_in_ten_times():
    model = Weighted(torch.linspace(-1, 1, 16))
    better = sum(
        deletions(model, torch.ones(3, 16, 16), torch.zeros(1, 4, 4), [0], batch_size=128, seed=n)[
            0
        ].better
        for n in range(300)
    )
    assert 15 <= better <= 45  # 1 in 10: 30, with a standard deviation of 5


@pytest.mark.parametrize(("patches", "maps"), [(1, 1), (4, 2), (16, 1), (16, 2)])
def test_the_number_of_forward_passes_is_as_stated(patches, maps):
    model = Weighted(torch.ones(16))
    side = int(patches**0.5)
    weights = torch.rand(maps, side, side)
    deletions(model, torch.ones(3, 16, 16), weights, [0] * maps, batch_size=5, seed=0)
    assert model.seen == passes(patches, maps)
    assert passes(100, 2) == 119


def test_the_same_seed_gives_the_same_numbers():
    model, image = Weighted(torch.linspace(-1, 1, 16)), torch.ones(3, 16, 16)

    def found(seed):
        return deletions(model, image, torch.zeros(1, 4, 4), [0], batch_size=8, seed=seed)

    assert found(3) == found(3)
    assert found(3) != found(4)


def test_deletion_steps_go_from_none_to_all():
    assert steps(100) == list(range(0, 101, 10))
    assert steps(3) == [0, 1, 2, 3]
    assert steps(1) == [0, 1]
    assert Curve((0.0, 0.5, 1.0), (1.0, 0.5, 0.0)).score == 0.5
