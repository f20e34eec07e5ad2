"""A moving average of the weights, which is often more accurate than the weights themselves.

    average <- decay * average + (1 - decay) * weights

Source: Polyak and Juditsky, 1992; the early steps are weighted as in Tarvainen and Valpola,
"Mean teachers", section 3, arXiv:1703.01780.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MovingAverage:
    """Keeps the average of every parameter of `model`; buffers are not averaged.

    Args:
        model: The network being trained.
        decay: Share of the average that one step keeps, in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.average = {n: p.detach().clone() for n, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimiser step `step` (the first is 0).

        Early steps count more, or the random start would stay in the average for 1 / (1 - decay)
        steps.
        """
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the `with`, the network computes with the average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.average[name])
            self.average[name].copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """The average by parameter name."""
        return self.average

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state`; its names and shapes must be those of the network."""
        assert state.keys() == self.average.keys(), "the average has other names than the network"
        for name, value in state.items():
            self.average[name].copy_(value)
