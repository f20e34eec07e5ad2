"""The mean of the weights of several networks."""

import pytest
import torch

from vit.errors import WeightsError
from vit.weights.model_soup import average_weights


def test_each_tensor_keeps_its_dtype():
    parts = [
        {"w": torch.full((2,), value), "n": torch.tensor(n)} for value, n in ((1.0, 3), (2, 6))
    ]
    mean = average_weights(iter(parts))
    assert torch.equal(mean["w"], torch.full((2,), 1.5))
    assert torch.equal(mean["n"], torch.tensor(4))  # 4.5, of int64
    half = average_weights([{"w": torch.tensor([0.1]).bfloat16()}] * 3)["w"]
    assert torch.equal(half, torch.tensor([0.1]).bfloat16())


@pytest.mark.parametrize(
    "other", [{}, {"w": torch.ones(3)}, {"w": torch.ones(2), "v": torch.ones(1)}]
)
def test_networks_with_other_parameters_have_no_mean(other):
    with pytest.raises(WeightsError, match="other parameters have no mean"):
        average_weights([{"w": torch.ones(2)}, other])
