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
        """(batch, channels, height, width) -> (batch, rows * cols, dim), and (rows, cols)"""
        grid = self.grid(images, self.patch_size)
        return self.tokens(images), grid

    def tokens(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, rows * cols, dim)"""
        x = images.contiguous(memory_format=torch.channels_last)
        for conv, norm, pool in zip([*self.convs, self.proj], self.norms, self.pools, strict=True):
            x = pool(F.gelu(norm(conv(x))))
        return rearrange(x, "batch dim rows cols -> batch (rows cols) dim")
