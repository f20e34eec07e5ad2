"""Exponential moving average of the weights, which is often more accurate than the last weights.

    average <- decay * average + (1 - decay) * weights

Source: Polyak and Juditsky, 1992; the early steps are weighted as in Tarvainen and Valpola,
"Mean teachers", section 3, arXiv:1703.01780.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vit.training.batch_norm_statistics import running_stats
from vit.training.distributed.fsdp import reshard


class ExponentialMovingAverage:
    """Keeps the average of every parameter of `model` that learns, and of BatchNorm's statistics.

    Averaged weights make other activations, whose statistics are nearer to averaged ones than to
    those of the last step. Other buffers do not change, so they are not averaged.

    Args:
        model: The network being trained.
        decay: Share of the average that one step keeps, in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.statistics = running_stats(model)
        learned = {**self.parameters, **self.statistics}
        self.average = {n: p.detach().clone() for n, p in learned.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimiser step `step` (the first is 0).

        Early steps count more, or the random start would stay in the average for 1 / (1 - decay)
        steps.
        """
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        # apart: sharding cuts parameters alone into pieces
        for tensors in (self.parameters, self.statistics):
            if tensors:
                averages = [self.average[name] for name in tensors]
                torch._foreach_lerp_(averages, list(tensors.values()), weight)

    def state_dict(self) -> dict[str, Tensor]:
        """The average by name of a parameter or buffer."""
        return self.average

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`; its names and shapes must be those of the network."""
        assert state.keys() == self.average.keys(), "the average has other names than the network"
        for name, value in state.items():
            self.average[name].copy_(value)


@contextmanager
def swapped_weights(model: nn.Module, others: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Inside the `with`, `model` computes with the weights in `others`, which hold its own.

    Args:
        model: The network itself, not what wraps it.
        others: Weights by name, of the same shapes and in the same pieces; None changes nothing.
    """
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
