"""Convolutional stem: 3x3 convolutions embed the patches, instead of one linear projection.

    x <- pool(GELU(norm(conv(x)))),  for each convolution; the last has dim output channels

The first convolution has stride 2 where patches have 8 pixels or more, and a 2x2 max pooling
follows as many of the last ones as are needed for one pixel per patch.

Source: Xiao et al., "Early Convolutions Help Transformers See Better", section 4, arXiv:2106.14881;
max pooling: Hassani et al., "Escaping the Big Data Paradigm" (CCT), section 3.3, arXiv:2104.05704.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.patch_embed import ImageEmbedding
from vit.model.position_embedding import Grid


class ConvStem(ImageEmbedding):
    """Embeds each patch as one token, whose receptive field is larger than the patch.

    Feature maps are in channels-last memory format, which is fastest for convolutions on a CPU;
    images may be in any.

    Args:
        channels: Channels of an image.
        widths: Output channels of each convolution; the last is the width of a token.
        stride: Stride of the first convolution; the others have 1.
        pools: Number of the last convolutions that are followed by a 2x2 max pooling.
        norm: Builds the norm layer of a number of channels, for (batch, channels, height, width).
    """

    proj: nn.Conv2d

    def __init__(
        self,
        channels: int,
        widths: Sequence[int],
        *,
        stride: int,
        pools: int,
        norm: Callable[[int], nn.Module],
    ) -> None:
        super().__init__(channels, stride << pools)
        strides = [stride, *[1] * (len(widths) - 1)]
        sizes = pairwise([channels, *widths])
        # the norm has the bias
        *convs, self.proj = (
            nn.Conv2d(*size, 3, stride=by, padding=1, bias=False)
            for size, by in zip(sizes, strides, strict=True)
        )
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(norm(width) for width in widths)
        self.pools = nn.ModuleList(
            nn.MaxPool2d(2) if index >= len(widths) - pools else nn.Identity()
            for index in range(len(widths))
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Grid]:
        """(batch, channels, height, width) -> (batch, rows * cols, dim), and (rows, cols)

        Raises:
            ValueError: The images cannot be cut into whole patches of the right channels.
        """
        grid = self.grid(images, self.patch_size)
        return self.tokens(images), grid

    def tokens(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, rows * cols, dim)"""
        x = images.contiguous(memory_format=torch.channels_last)
        for conv, norm, pool in zip([*self.convs, self.proj], self.norms, self.pools, strict=True):
            x = pool(F.gelu(norm(conv(x))))
        return rearrange(x, "batch dim rows cols -> batch (rows cols) dim")


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
