"""Exponential moving average (EMA) of the weights, often more accurate than the last weights.

    average <- decay * average + (1 - decay) * weights

Source: Polyak and Juditsky, 1992; the early steps are weighted as in Tarvainen and Valpola,
"Mean teachers", section 3, arXiv:1703.01780.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vit.training.distributed.fsdp import reshard
from vit.training.sync_batch_norm import running_stats


class ExponentialMovingAverage:
    """Averages the trainable parameters of `model`, and BatchNorm's running statistics."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.statistics = running_stats(model)
        learned = {**self.parameters, **self.statistics}
        self.average = {n: p.detach().clone() for n, p in learned.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after optimiser step `step`, from 0.

        Early steps have a larger weight; otherwise the initialisation would dominate the average
        for 1 / (1 - decay) steps.
        """
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        # not in one call: only parameters are sharded
        for tensors in (self.parameters, self.statistics):
            if tensors:
                averages = [self.average[name] for name in tensors]
                torch._foreach_lerp_(averages, list(tensors.values()), weight)

    def state_dict(self) -> dict[str, Tensor]:
        """The average by name of a parameter or buffer."""
        return self.average

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state`, with the names and shapes of the network."""
        assert state.keys() == self.average.keys(), "the average has other names than the network"
        for name, value in state.items():
            self.average[name].copy_(value)


@contextmanager
def swapped_weights(model: nn.Module, others: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Inside, `model` has the weights `others`, and `others` those of `model`; nothing if None."""
    _swap(model, others or {})
    try:
        yield
    finally:
        _swap(model, others or {})


@torch.no_grad()
def _swap(model: nn.Module, others: Mapping[str, Tensor]) -> None:
    if others:
        reshard(model)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, other in others.items():
        kept = own[name].detach().clone()
        own[name].copy_(other)
        other.copy_(kept)
