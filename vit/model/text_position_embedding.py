"""Position embedding of text: learned, sinusoidal or rotary.

Source: Vaswani et al., section 3.5, arXiv:1706.03762; rotary: Su et al., section 3.4.2,
arXiv:2104.09864 (channels of the two halves of a head are paired, not neighbours).
"""

import torch
from torch import Tensor, nn

from vit.model.position_embedding import TEMPERATURE, sinusoidal_1d
from vit.model.rotary_embedding import Rotation


class TextPositions(nn.Module):
    """Base class.

    Args:
        max_length: Longest sequence in tokens.
        dim: Width of a token; of a head for rotary positions.
    """

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        self.max_length, self.dim = max_length, dim

    def forward(self, x: Tensor, offset: int) -> tuple[Tensor, Rotation | None]:
        """Tokens with positions, (batch, tokens, dim), and the rotation of queries and keys.

        Args:
            x: Embedded tokens, (batch, tokens, dim).
            offset: Position of the first token.
        """
        raise NotImplementedError


class LearnedTextPositions(TextPositions):
    """Adds one learned vector for each position."""

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__(max_length, dim)
        self.pos_embed = nn.Parameter(torch.zeros(max_length, dim))

    def forward(self, x: Tensor, offset: int) -> tuple[Tensor, Rotation | None]:
        return x + self.pos_embed[offset : offset + x.shape[1]], None


class SinusoidalTextPositions(TextPositions):
    """Adds sines and cosines of the position to embeddings scaled by √dim."""

    table: Tensor

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__(max_length, dim)
        self.register_buffer("table", sinusoidal_1d((max_length, 1), dim))

    def forward(self, x: Tensor, offset: int) -> tuple[Tensor, Rotation | None]:
        return x * self.dim**0.5 + self.table[offset : offset + x.shape[1]], None


class RotaryTextPositions(TextPositions):
    """Rotates queries and keys by their positions; tokens are not changed."""

    angles: Tensor

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__(max_length, dim)
        waves = dim // 2
        frequencies = TEMPERATURE ** -(torch.arange(waves, dtype=torch.float64) / waves)
        angles = torch.outer(torch.arange(max_length, dtype=torch.float64), frequencies)
        self.register_buffer("angles", angles.float())

    def forward(self, x: Tensor, offset: int) -> tuple[Tensor, Rotation | None]:
        return x, Rotation(self.angles[offset : offset + x.shape[1]].unsqueeze(0))
