"""Rotary positions: queries and keys are turned by angles that grow with the place of their patch.

    angle_j = place * temperature^(-j / waves)
    (x1, x2) -> (x1 cos - x2 sin, x1 sin + x2 cos)

so that the score of a query and a key depends on how far apart their patches are. A head's channels
are two halves, x1 and x2; in each, the first `waves` turn with the row, the others with the column.

Source: Su et al., "RoFormer", section 3.4.2, arXiv:2104.09864; in two dimensions: Heo et al.,
"Rotary Position Embedding for Vision Transformer", section 3.2, arXiv:2403.13298; from -1 to 1
across the image: Simeoni et al., "DINOv3", section 3.2, arXiv:2508.10104.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.position_embedding import Grid


class Unturned:
    """The rotation of a network without rotary positions: none."""

    def __call__(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, head_dim) -> the same"""
        return x

    def moved(self, _move: Callable[[Tensor], Tensor]) -> "Unturned":
        """The rotation of the tokens that `move` makes of these."""
        return self


unturned = Unturned()


class Rotation:
    """Turns queries or keys; an angle of zero changes no bit.

    Args:
        angles: (batch, tokens, head_dim / 2), in radians; or (1, ...), the same for all images.
    """

    def __init__(self, angles: Tensor) -> None:
        self.angles = angles
        self.cos, self.sin = angles.cos().unsqueeze(-3), angles.sin().unsqueeze(-3)

    def __call__(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, head_dim) -> the same shape and type"""
        first, second = x.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, first * self.sin + second * self.cos)
        return torch.cat(turned, dim=-1).to(x.dtype)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Rotation":
        """The rotation of the tokens that `move` makes of these.

        Args:
            move: (batch, tokens, anything) -> (batch, other tokens, anything). Angles are linear
                in the place: their mean is the angle of the mean place.
        """
        return Rotation(move(self.angles))


Rotate = Unturned | Rotation


class NoRotation(nn.Module):
    """Turns nothing."""

    def forward(self, _grid: Grid, _tokens: Tensor) -> Rotate:
        """The rotation of queries and keys for patches of `grid`."""
        return unturned


class RotaryPositions(nn.Module):
    """Makes the rotation for images of any size; it has no weights.

    Args:
        head_dim: Channels of a head, a multiple of 4.
        places: The places along a side of so many patches, (patches,) float64.
        temperature: How much slower the last wave is than the first.
        prefix: Tokens in front of the patches, which are not turned.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        places: Callable[[int], Tensor],
        temperature: float,
        prefix: int,
    ) -> None:
        super().__init__()
        self.waves = head_dim // 4
        self.places, self.temperature, self.prefix = places, temperature, prefix

    def forward(self, grid: Grid, tokens: Tensor) -> Rotate:
        """The rotation of queries and keys for patches of `grid`, on the device of `tokens`."""
        angles = self.angles(grid).to(tokens.device, torch.promote_types(tokens.dtype, torch.float))
        return Rotation(F.pad(angles, (0, 0, self.prefix, 0)).unsqueeze(0))

    def angles(self, grid: Grid) -> Tensor:
        """By how much each pair of channels turns, (rows * cols, head_dim / 2), in radians."""
        frequencies = self.temperature ** -(
            torch.arange(self.waves, dtype=torch.float64) / self.waves
        )
        row, col = torch.meshgrid(*(self.places(side) for side in grid), indexing="ij")
        return torch.cat([torch.outer(place.flatten(), frequencies) for place in (row, col)], dim=1)


def by_index(side: int, *, reference: int | None = None) -> Tensor:
    """0, 1, 2, ...; scaled as if there were `reference` patches, where that is given."""
    scale = 1.0 if reference is None else reference / side
    return torch.arange(side, dtype=torch.float64) * scale


def by_centre(side: int) -> Tensor:
    """The patches' centres from -1 to 1 across the image, as full turns."""
    return 2 * math.pi * (2 * (torch.arange(side, dtype=torch.float64) + 0.5) / side - 1)


def in_a_row(rotations: Sequence[Rotate], counts: Sequence[int]) -> Rotate:
    """One rotation for sequences that are laid one after the other, each `count` times."""
    pairs = zip(rotations, counts, strict=True)
    angles = [
        turning.angles.expand(count, -1, -1).flatten(0, 1)
        for turning, count in pairs
        if isinstance(turning, Rotation)
    ]
    return Rotation(torch.cat(angles).unsqueeze(0)) if angles else unturned
