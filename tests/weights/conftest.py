"""Weights that would show a mistake: every norm, bias and token is far from its initial value."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

Randomise = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@pytest.fixture
def randomise() -> Randomise:
    """A function that draws new values for the tensors of a state dict, meta tensors too."""

    def draw(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            name: _draw(name, tensor.shape, generator) for name, tensor in sorted(state.items())
        }

    return draw


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1 and name.endswith("weight"):
        return noise.mul_(shape[1:].numel() ** -0.5)
    is_scale = name.endswith(("weight", "gamma"))
    return noise.mul_(0.3).add_(1.0 if is_scale else 0.0)
