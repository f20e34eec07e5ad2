"""Normalisation layers: those that torch lacks, and the one that a config chooses."""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vit.config import ModelConfig


class RMSNorm(nn.Module):
    """Normalisation of each token by its root mean square: x / sqrt(mean(x²) + eps) * weight.

    Args:
        dim: Width of a token.
        eps: Added to the mean square, so that a zero token stays zero.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """

    # torch's own warns about, and slows down on, bfloat16 tokens with float32 weights,
    # which is what autocast gives to the norms of queries and keys.

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)"""
        wide = x.to(torch.promote_types(x.dtype, torch.float))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, channels, height, width)"""
        # only views in channels-last memory format
        x = super().forward(rearrange(x, "batch channels rows cols -> batch rows cols channels"))
        return rearrange(x, "batch rows cols channels -> batch channels rows cols")


class BatchNorm(nn.Module):
    """Batch normalisation of each channel, with statistics of a micro-batch.

        (x - mean) / sqrt(variance + eps) * weight + bias

    Evaluation uses running averages of both, the buffers `running_mean` and `running_var`. As
    torch's BatchNorm2d, without `num_batches_tracked`. While `weight` is frozen, `train()` leaves
    this layer in evaluation mode, so that its statistics are frozen too.

    Args:
        channels: Channels of an image.
        eps: Added to a variance.
        momentum: Weight of one micro-batch in a running average.

    Source: Ioffe and Szegedy, "Batch Normalization", section 3, arXiv:1502.03167.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.sum_over_processes: Callable[[Tensor], Tensor] | None = None
        """Differentiable sum of a tensor over all processes of a distributed training."""
        self.updates_statistics = True
        """False while the batch is a placeholder image, which must not change the statistics."""

    def train(self, mode: bool = True) -> "BatchNorm":
        """Training mode, unless `weight` is frozen."""
        return super().train(mode and self.weight.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, channels, height, width)"""
        if self.training and self.sum_over_processes is not None:
            return self.normalise(x, *self.statistics(x, self.sum_over_processes))
        # a micro-batch without a readable image has no statistics
        measured = self.training and self.updates_statistics and x.shape[0] > 0
        running = (self.running_mean, self.running_var)
        return F.batch_norm(x, *running, self.weight, self.bias, measured, self.momentum, self.eps)

    def statistics(self, x: Tensor, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance of each channel over all processes, (channels,); updates the averages.

        Args:
            x: This process's part of the batch, (batch, channels, height, width).
            total: Sum over processes.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float))[
            : None if self.updates_statistics else 0
        ]
        sums, count = wide.sum(dim=(0, 2, 3)), wide.new_full((1,), wide.numel() // x.shape[1])
        totals = total(torch.cat([sums, count]))
        count = totals[-1].detach().clamp(min=1)
        mean = totals[:-1] / count
        variance = total((wide - mean[:, None, None]).square().sum(dim=(0, 2, 3))) / count
        with torch.no_grad():
            unbiased = variance * count / (count - 1).clamp(min=1)
            share = self.momentum * (count > 1).to(mean)  # no update without images
            self.running_mean.lerp_(mean.to(self.running_mean), share.to(self.running_mean))
            self.running_var.lerp_(unbiased.to(self.running_var), share.to(self.running_var))
        return mean, variance

    def normalise(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """The equation above."""
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return (x * scale[:, None, None] + shift[:, None, None]).to(x.dtype)


NORMS: dict[str, Callable[..., nn.Module]] = {"layernorm": nn.LayerNorm, "rmsnorm": RMSNorm}


def build_norm(config: ModelConfig, dim: int | None = None) -> nn.Module:
    """The norm of `config` for vectors of width `dim`; by default that of a token."""
    return NORMS[config.norm](dim or config.dim, eps=config.norm_eps)
