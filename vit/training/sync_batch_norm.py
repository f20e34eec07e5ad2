"""BatchNorm statistics synchronised over processes, and averaged with the weights.

A step over two processes normalises by the mean and variance of both shares, so it equals the step
of one process with the whole batch. torch's SyncBatchNorm supports GPUs only.

Source: Zhang et al., "Context Encoding for Semantic Segmentation", section 3.1, arXiv:1803.08904.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vit.model.normalization import BatchNorm


class SumOverProcesses(torch.autograd.Function):
    """Differentiable sum of a tensor over all processes."""

    @staticmethod
    def forward(_: Any, mine: Tensor) -> Tensor:
        """(n,) -> (n,)"""
        total = mine.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        """The gradients of all processes' losses, summed."""
        total = gradients[0].clone()
        torch.distributed.all_reduce(total)
        return total


def sum_over_processes(mine: Tensor) -> Tensor:
    """Differentiable sum of `mine` over all processes, which must all make this call."""
    total: Tensor = SumOverProcesses.apply(mine)
    return total


def sync_batch_norm(network: nn.Module, processes: int) -> None:
    """Let each BatchNorm of `network` use the statistics of all `processes`."""
    if processes > 1:
        # here and not above the function: it imports torch's compiler, which takes a second
        total = torch.compiler.disable(sum_over_processes)  # type: ignore[no-untyped-call]
        for norm in _norms(network).values():
            norm.sum_over_processes = total


@contextlib.contextmanager
def local_batch_norm(network: nn.Module) -> Iterator[None]:
    """Inside, each BatchNorm uses the statistics of its own process, without communication."""
    norms = _norms(network).values()
    shared = [norm.sum_over_processes for norm in norms]
    for norm in norms:
        norm.sum_over_processes = None
    try:
        yield
    finally:
        for norm, total in zip(norms, shared, strict=True):
            norm.sum_over_processes = total


@contextlib.contextmanager
def frozen_running_stats(network: nn.Module) -> Iterator[None]:
    """Inside, forward passes do not update the running statistics."""
    norms = _norms(network).values()
    for norm in norms:
        norm.updates_statistics = False
    try:
        yield
    finally:
        for norm in norms:
            norm.updates_statistics = True


def running_stats(network: nn.Module) -> dict[str, Tensor]:
    """Running means and variances that training changes, by name."""
    return {
        f"{name}.{kind}": getattr(norm, kind)
        for name, norm in _norms(network).items()
        for kind in ("running_mean", "running_var")
        if norm.weight.requires_grad
    }


def _norms(network: nn.Module) -> dict[str, BatchNorm]:
    return {name: norm for name, norm in network.named_modules() if isinstance(norm, BatchNorm)}
