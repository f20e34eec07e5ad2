"""Patch embedding: images are cut into patches, each flattened and projected to a token.

    x_patch E + b,  with E of shape (channels * patch_size², dim)

For patches resized by the matrix R, the projection is resized too (FlexiViT):

    (R x) . w_new  =  x . w_old,  so w_new = pinv(R^T) w_old

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", section 3.1, arXiv:2010.11929; other
sizes: Beyer et al., "FlexiViT", section 3.4, arXiv:2212.08013.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.position_embedding import Grid


class ImageEmbedding(nn.Module):
    """Base class: embeds images as one token for each square patch, row by row.

    Args:
        channels: Channels of an image.
        patch_size: Side of a patch, in pixels.
    """

    proj: nn.Linear | nn.Conv2d

    def __init__(self, channels: int, patch_size: int) -> None:
        super().__init__()
        self.channels = channels
        self.patch_size = patch_size

    def grid(self, images: Tensor, patch_size: int) -> Grid:
        """(rows, cols) of patches in `images`."""
        channels, height, width = images.shape[-3:]
        if channels != self.channels:
            raise ValueError(f"images have {channels} channels; this network takes {self.channels}")
        for name, size in (("height", height), ("width", width)):
            if size % patch_size or size == 0:
                raise ValueError(
                    f"{name}={size} is not a multiple of patch_size={patch_size}; "
                    f"resize or pad the images"
                )
        return height // patch_size, width // patch_size

    def embed_sizes(self, batches: Sequence[Tensor]) -> list[tuple[Tensor, Grid]]:
        """`forward` of batches of several sizes, which are one for statistics of a batch."""
        return [self(images) for images in batches]


class PatchEmbedding(ImageEmbedding):
    """Cuts images into square patches and projects each to one token, row by row.

    The pixels of a patch are ordered (channels patch_h patch_w): the matrix is the weight of the
    usual strided convolution, flattened.

    Args:
        channels: Channels of an image.
        patch_size: Side of a patch, in pixels.
        dim: Width of a token.
        bias: Whether E x has a bias.
    """

    def __init__(self, channels: int, patch_size: int, dim: int, *, bias: bool = True) -> None:
        super().__init__(channels, patch_size)
        self.proj = nn.Linear(channels * patch_size**2, dim, bias=bias)

    def patchify(self, images: Tensor, patch_size: int) -> tuple[Tensor, Grid]:
        """Images -> patches, (batch, rows * cols, channels * patch_size²), and (rows, cols)"""
        rows, cols = self.grid(images, patch_size)
        patches = rearrange(
            images,
            "batch channels (rows patch_h) (cols patch_w)"
            " -> batch (rows cols) (channels patch_h patch_w)",
            rows=rows,
            cols=cols,
        )
        return patches, (rows, cols)

    def forward(self, images: Tensor) -> tuple[Tensor, Grid]:
        """(batch, channels, height, width) -> (batch, rows * cols, dim), and (rows, cols)"""
        patches, grid = self.patchify(images, self.patch_size)
        return self.proj(patches), grid


class NormedPatchEmbedding(PatchEmbedding):
    """A patch embedding whose tokens are normalised (AIMv2, arXiv:2411.14402).

    Args:
        channels, patch_size, dim, bias: As for PatchEmbedding.
        norm: Applied to each token.
    """

    def __init__(
        self, channels: int, patch_size: int, dim: int, *, norm: nn.Module, bias: bool = True
    ) -> None:
        super().__init__(channels, patch_size, dim, bias=bias)
        self.norm = norm

    def forward(self, images: Tensor) -> tuple[Tensor, Grid]:
        """(batch, channels, height, width) -> (batch, rows * cols, dim), and (rows, cols)"""
        tokens, grid = super().forward(images)
        return self.norm(tokens), grid


class FlexiblePatchEmbedding(PatchEmbedding):
    """FlexiViT: patches of several sizes in training, projected by one matrix, which is resized.

    The training loop sets `current_patch_size` before each step; evaluation uses `patch_size`.

    Args:
        channels, patch_size, dim, bias: As for PatchEmbedding; `patch_size` is that of evaluation.
        patch_sizes: All patch sizes of training.
    """

    def __init__(
        self,
        channels: int,
        patch_size: int,
        dim: int,
        *,
        patch_sizes: Sequence[int],
        bias: bool = True,
    ) -> None:
        super().__init__(channels, patch_size, dim, bias=bias)
        self.current_patch_size = patch_size
        # no buffers: a network may be built without values, on the meta device
        with torch.device("cpu"):
            self.resize_matrices = {
                size: inverse_resize_matrix(patch_size, size) for size in patch_sizes
            }

    def forward(self, images: Tensor) -> tuple[Tensor, Grid]:
        """(batch, channels, height, width) -> (batch, rows * cols, dim), and (rows, cols)"""
        if not self.training or self.current_patch_size == self.patch_size:
            return super().forward(images)
        patches, grid = self.patchify(images, self.current_patch_size)
        weight = resize_projection(
            self.proj.weight, self.resize_matrices[self.current_patch_size].to(self.proj.weight)
        )
        return F.linear(patches, weight, self.proj.bias), grid


class ConvStem(ImageEmbedding):
    """Convolutional stem: each patch becomes one token, whose receptive field is larger.

        x <- pool(GELU(norm(conv(x)))),  for each 3x3 convolution; the last has dim output channels

    The first convolution has stride 2 where patches have 8 pixels or more, and a 2x2 max pooling
    follows as many of the last ones as are needed for one pixel per patch. Feature maps are in
    channels-last memory format, which is fastest for convolutions on a CPU;
    images may be in any.

    Args:
        channels: Channels of an image.
        widths: Output channels of each convolution; the last is the width of a token.
        stride: Stride of the first convolution; the others have 1.
        pools: Number of the last convolutions that are followed by a 2x2 max pooling.
        norm: Builds the norm layer of a number of channels, for (batch, channels, height, width).

    Source: Xiao et al., "Early Convolutions Help Transformers See Better", section 4,
    arXiv:2106.14881; max pooling: Hassani et al., "Escaping the Big Data Paradigm" (CCT), section
    3.3, arXiv:2104.05704.
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
        return self.tokens_of_sizes([images])[0]

    def tokens_of_sizes(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """`tokens` of batches of several sizes, normalised as one."""
        maps = [images.contiguous(memory_format=torch.channels_last) for images in batches]
        for conv, norm, pool in zip([*self.convs, self.proj], self.norms, self.pools, strict=True):
            maps = [pool(F.gelu(x)) for x in normalise_together(norm, [conv(x) for x in maps])]
        return [rearrange(x, "batch dim rows cols -> batch (rows cols) dim") for x in maps]

    def embed_sizes(self, batches: Sequence[Tensor]) -> list[tuple[Tensor, Grid]]:
        grids = [self.grid(images, self.patch_size) for images in batches]
        return [*zip(self.tokens_of_sizes(batches), grids, strict=True)]


def normalise_together(norm: nn.Module, maps: Sequence[Tensor]) -> list[Tensor]:
    """`norm` of feature maps of several sizes at once, each (batch, channels, rows, cols)."""
    if len(maps) == 1:
        return [norm(maps[0])]
    rows = [rearrange(x, "batch channels rows cols -> (batch rows cols) channels") for x in maps]
    # pixels as a batch: as an image of one column torch 2.14 gives BatchNorm wrong gradients
    joined = torch.cat(rows)[:, :, None, None].contiguous(memory_format=torch.channels_last)
    parts = norm(joined)[:, :, 0, 0].split([len(part) for part in rows])
    back = "(batch rows cols) channels -> batch channels rows cols"
    return [
        rearrange(part, back, rows=x.shape[2], cols=x.shape[3])
        for part, x in zip(parts, maps, strict=True)
    ]


def resize_patch_embed(matrix: Tensor, *, old: int, new: int) -> Tensor:
    """The patch projection for another patch size, which gives resized patches the same tokens.

    Exact for larger patches; for smaller ones the best approximation on white noise.

    Args:
        matrix: (dim, channels * old * old).
        old: Side of a patch in pixels.
        new: New side.

    Returns:
        (dim, channels * new * new), of the same type.
    """
    return resize_projection(matrix.double(), inverse_resize_matrix(old, new).to(matrix.device)).to(
        matrix
    )


def resize_projection(matrix: Tensor, side: Tensor) -> Tensor:
    """(dim, channels * old * old) by `side`, (new, old) -> (dim, channels * new * new)"""
    pixels = "dim (channels rows cols) -> dim channels rows cols"
    old = side.shape[1]
    # Rows and columns are resized alike and one after the other, so each has its own inverse:
    # the inverse of a Kronecker product is the product of the inverses.
    return (side @ rearrange(matrix, pixels, rows=old, cols=old) @ side.T).flatten(1)


def inverse_resize_matrix(old: int, new: int) -> Tensor:
    """The pseudo-inverse of R^T, which resizes a line of weights, (new, old) in float64."""
    inverse: Tensor = torch.linalg.pinv(resize_matrix(old, new)).T
    return inverse


def resize_matrix(old: int, new: int) -> Tensor:
    """R, which resizes a line of `old` pixels, bicubic and antialiased, (new, old) in float64."""
    lines = torch.eye(old, dtype=torch.float64)[None, None]
    return F.interpolate(lines, size=(new, old), mode="bicubic", antialias=True)[0, 0]
