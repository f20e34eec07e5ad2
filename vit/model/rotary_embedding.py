"""Rotary position embedding (RoPE): rotates queries and keys by angles given by patch positions.

    angle_j = coordinate * temperature^(-j / waves)
    (x1, x2) -> (x1 cos - x2 sin, x1 sin + x2 cos)

so that the score of a query and a key depends on the offset of their patches. The channels of a
head are two halves, x1 and x2; in each, the first `waves` rotate with the row, the others with the
column.

Source: Su et al., "RoFormer", section 3.4.2, arXiv:2104.09864; in two dimensions: Heo et al.,
"Rotary Position Embedding for Vision Transformer", section 3.2, arXiv:2403.13298; from -1 to 1
across the image: Simeoni et al., "DINOv3", section 3.2, arXiv:2508.10104.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.position_embedding import Grid, GridTables


class Rotation:
    """Rotates queries or keys; an angle of zero changes no bit.

    Args:
        angles: (batch, tokens, head_dim / 2), in radians; or (1, ...), the same for all images; or
            with an axis of heads before the tokens.
    """

    def __init__(self, angles: Tensor) -> None:
        self.angles = angles
        cos, sin = angles.cos(), angles.sin()
        by_head = angles.ndim == 4
        self.cos = cos if by_head else cos.unsqueeze(-3)
        self.sin = sin if by_head else sin.unsqueeze(-3)

    def __call__(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, head_dim) -> the same shape and type"""
        first, second = x.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, first * self.sin + second * self.cos)
        return torch.cat(turned, dim=-1).to(x.dtype)

    def map_tokens(self, function: Callable[[Tensor], Tensor]) -> "Rotation":
        """The rotation of tokens that `function` gathers or merges from these.

        Args:
            function: (batch, tokens, ...) -> (batch, new tokens, ...). Angles are linear in the
                position: their mean is the angle of the mean position.
        """
        return Rotation(function(self.angles))


class RotaryEmbedding(nn.Module):
    """Computes the rotation for images of any size; it has no weights.

    Args:
        head_dim: Channels of a head, a multiple of 4.
        coordinates: Coordinates of a given number of patches along a side, (patches,) float64.
        temperature: Ratio of the first frequency to the last.
        prefix: Tokens in front of the patches, which are not rotated.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        coordinates: Callable[[int], Tensor],
        temperature: float,
        prefix: int,
    ) -> None:
        super().__init__()
        self.waves = head_dim // 4
        self.coordinates, self.temperature, self.prefix = coordinates, temperature, prefix
        self.tables = GridTables()

    def forward(self, grid: Grid, tokens: Tensor) -> Rotation:
        """The rotation of queries and keys for patches of `grid`, on the device of `tokens`."""
        dtype = torch.promote_types(tokens.dtype, torch.float)
        table = self.tables.get(grid, tokens.device, dtype, lambda: self.padded_angles(grid))
        return Rotation(table)

    def padded_angles(self, grid: Grid) -> Tensor:
        """`angles`, and zeros for prefix tokens, (1, prefix + rows * cols, head_dim / 2)."""
        return F.pad(self.angles(grid), (0, 0, self.prefix, 0)).unsqueeze(0)

    def angles(self, grid: Grid) -> Tensor:
        """Angle of each pair of channels, (rows * cols, head_dim / 2), in radians."""
        frequencies = self.temperature ** -(
            torch.arange(self.waves, dtype=torch.float64) / self.waves
        )
        row, col = torch.meshgrid(*(self.coordinates(side) for side in grid), indexing="ij")
        return torch.cat([torch.outer(axis.flatten(), frequencies) for axis in (row, col)], dim=1)


class MixedRotaryEmbedding(RotaryEmbedding):
    """Gives the row and the column of each patch; MixedFrequencies turns them into angles."""

    def angles(self, grid: Grid) -> Tensor:
        """Row and column of each patch, (rows * cols, 2)."""
        row, col = torch.meshgrid(*(self.coordinates(side) for side in grid), indexing="ij")
        return torch.stack([row.flatten(), col.flatten()], dim=1)


class MixedFrequencies(nn.Module):
    """Learned frequencies of one layer: angle = row * freqs[0] + column * freqs[1].

    Args:
        num_heads, head_dim: Heads, and channels of one.

    Source: Heo et al., section 3.2, arXiv:2403.13298.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.zeros(2, num_heads, head_dim // 2))

    def forward(self, rotation: Rotation) -> Rotation:
        """The rotation of each head, from that of coordinates."""
        row, col = rotation.angles[:, None, :, :, None].unbind(3)  # (batch, 1, tokens, 1)
        of_row, of_col = self.freqs.to(row.dtype).unsqueeze(2)
        return Rotation(row * of_row + col * of_col)


def init_frequencies(freqs: Tensor) -> None:
    """Frequencies 10^(-j / n), each head's axes turned by a random angle."""
    waves = freqs.shape[-1] // 2
    sizes = 10.0 ** -(torch.arange(waves, device=freqs.device) / waves)
    turn = 2 * math.pi * torch.rand(freqs.shape[1], 1, device=freqs.device)
    for axis, start in zip(freqs, (0.0, -math.pi / 2), strict=True):
        angles = (turn + start, turn + start + math.pi / 2)
        axis.copy_(torch.cat([sizes * angle.cos() for angle in angles], dim=1))


def index_coordinates(side: int, *, reference: int | None = None, first: int = 0) -> Tensor:
    """0, 1, 2, ..., or from `first` on, scaled to the range of `reference` patches if given."""
    scale = 1.0 if reference is None else reference / side
    indices = torch.arange(side, dtype=torch.float64)
    return (indices + first if first else indices) * scale


def centred_coordinates(side: int) -> Tensor:
    """Patch centres from -1 to 1 across the image, times 2π."""
    return 2 * math.pi * (2 * (torch.arange(side, dtype=torch.float64) + 0.5) / side - 1)


def concatenate_rotations(
    rotations: Sequence[Rotation | None], counts: Sequence[int]
) -> Rotation | None:
    """One rotation for concatenated sequences, each repeated `count` times."""
    angles = [
        rotation.angles.expand(count, -1, -1).flatten(0, 1)
        for rotation, count in zip(rotations, counts, strict=True)
        if rotation is not None
    ]
    return Rotation(torch.cat(angles).unsqueeze(0)) if angles else None
