"""How a decoder knows the order of words: learned, sinusoidal or rotary positions in one dimension.

Source: Vaswani et al., section 3.5, arXiv:1706.03762; rotary: Su et al., section 3.4.2,
arXiv:2104.09864 (halves of a head's channels are paired, and not neighbours).
"""

import torch
from torch import Tensor, nn

from vit.model.position_embedding import TEMPERATURE, sinusoidal_1d
from vit.model.rotary_embedding import Rotate, Rotation, unturned


class TextPositions(nn.Module):
    """What all ways share.

    Args:
        most: Longest text in tokens.
        dim: Width of a token, or of a head where heads are turned.
    """

    def __init__(self, most: int, dim: int) -> None:
        super().__init__()
        self.most, self.dim = most, dim

    def forward(self, x: Tensor, first: int, padding: Tensor | None) -> tuple[Tensor, Rotate]:
        """Tokens with their places, and how queries and keys are turned.

        Args:
            x: Embedded tokens, (batch, tokens, dim).
            first: Place of the first of them.
            padding: True where there is no word, (batch, tokens): it takes no place.
        """
        raise NotImplementedError


class LearnedTextPositions(TextPositions):
    """Adds one learned vector a place."""

    def __init__(self, most: int, dim: int) -> None:
        super().__init__(most, dim)
        self.pos_embed = nn.Parameter(torch.zeros(most, dim))

    def forward(self, x: Tensor, first: int, padding: Tensor | None) -> tuple[Tensor, Rotate]:
        """(batch, tokens, dim) -> the same with places, and no turning"""
        return x + rows_of(self.pos_embed, x, first, padding), unturned


class SinusoidalTextPositions(TextPositions):
    """Adds sines and cosines of the place to embeddings that are scaled up to their size."""

    table: Tensor

    def __init__(self, most: int, dim: int) -> None:
        super().__init__(most, dim)
        self.register_buffer("table", sinusoidal_1d((most, 1), dim))

    def forward(self, x: Tensor, first: int, padding: Tensor | None) -> tuple[Tensor, Rotate]:
        """(batch, tokens, dim) -> the same with places, and no turning"""
        return x * self.dim**0.5 + rows_of(self.table, x, first, padding), unturned


class RotaryTextPositions(TextPositions):
    """Leaves tokens as they are, and turns queries and keys by their places."""

    angles: Tensor

    def __init__(self, most: int, dim: int) -> None:
        super().__init__(most, dim)
        waves = dim // 2
        frequencies = TEMPERATURE ** -(torch.arange(waves, dtype=torch.float64) / waves)
        angles = torch.outer(torch.arange(most, dtype=torch.float64), frequencies)
        self.register_buffer("angles", angles.float())

    def forward(self, x: Tensor, first: int, padding: Tensor | None) -> tuple[Tensor, Rotate]:
        """(batch, tokens, dim) -> the same, and how queries and keys are turned"""
        angles = rows_of(self.angles, x, first, padding)
        return x, Rotation(angles if angles.ndim == 3 else angles.unsqueeze(0))


def rows_of(table: Tensor, x: Tensor, first: int, padding: Tensor | None) -> Tensor:
    """Rows of a table for tokens, (tokens, ...), or with padding (batch, tokens, ...)."""
    if padding is None:
        return table[first : first + x.shape[1]]
    return table[(~padding).cumsum(dim=1).sub(1).clamp_min(0)]
