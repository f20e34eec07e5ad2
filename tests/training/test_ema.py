"""The moving average of weights against torch's own."""

import math

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vit.training.ema import ExponentialMovingAverage, swapped_weights


def test_the_moving_average_equals_torchs():
    torch.manual_seed(0)
    ours_of, theirs_of = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs_of.load_state_dict(ours_of.state_dict())
    ours = ExponentialMovingAverage(ours_of, 0.9)
    theirs = AveragedModel(theirs_of, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(theirs_of)  # its first update copies
    for step in range(200, 210):  # beyond the early steps, which count more here
        for parameter, other in zip(ours_of.parameters(), theirs_of.parameters(), strict=True):
            parameter.data += 0.1
            other.data += 0.1
        ours.update(step)
        theirs.update_parameters(theirs_of)
    for name, value in theirs.module.named_parameters():
        torch.testing.assert_close(ours.average[name], value.detach())


def test_the_moving_average_forgets_early_steps_faster():
    model = nn.Linear(1, 1)
    average = ExponentialMovingAverage(model, 0.999)
    model.weight.data.fill_(5.0)
    for step in range(100):
        average.update(step)
    assert math.isclose(average.average["weight"].item(), 5.0, abs_tol=0.01)


def test_averaged_weights_are_in_place_only_inside_the_context():
    model = nn.Linear(1, 1)
    model.weight.data.fill_(1.0)
    average = ExponentialMovingAverage(model, 0.9)
    model.weight.data.fill_(2.0)
    with swapped_weights(model, average.state_dict()):
        assert model.weight.item() == 1.0
    assert (model.weight.item(), average.average["weight"].item()) == (2.0, 1.0)
