"""The patch projection for pictures of other channels; relative positions for another grid.

Source: the code of Bao et al., "BEiT", arXiv:2106.08254.
"""

import torch
from einops import rearrange
from torch import Tensor

# Between which BEiT's code looks for the ratio of two gaps; the second grows where it must.
NARROWEST, WIDEST = 1.01, 1.5


def spread_offsets(
    table: Tensor, old: tuple[int, int], new: tuple[int, int], *, extra: int
) -> Tensor:
    """Relative positions for another grid, in which near offsets keep nearly what they were.

    Args:
        table: (offsets of the old grid + extra, heads).
        old: Rows and columns of the table's grid, in patches.
        new: Rows and columns wanted.
        extra: Rows of the table that are for no offset; they stay as they are.

    Returns:
        (offsets of the new grid + extra, heads), of the same type.
    """
    count = len(table) - extra
    across = 2 * old[1] - 1
    plane = rearrange(table[:count].double(), "(rows cols) heads -> heads rows cols", cols=across)
    rows, cols = (spread_matrix(*sides) for sides in zip(old, new, strict=True))
    spread = rearrange(rows @ plane @ cols.T, "heads rows cols -> (rows cols) heads")
    return torch.cat([spread.to(table), table[count:]])


def spread_matrix(old: int, new: int) -> Tensor:
    """What spreads a line of offsets, linearly between places, (2 new - 1, 2 old - 1) in float64.

    The old offsets 0, 1, 2, ... come to the places 0, 1, 1 + q, 1 + q + q^2, ... The last comes to
    new - 1, where q may be at least NARROWEST; what lies beyond the last place takes its number.
    """
    if old == 1:
        return torch.ones(2 * new - 1, 1, dtype=torch.float64)
    low, high = NARROWEST, WIDEST
    while old > 2 and _last_place(high, old) < new - 1:
        high *= 2
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if _last_place(middle, old) > new - 1 else (middle, high)
    side = (low ** torch.arange(old - 1, dtype=torch.float64)).cumsum(0)
    places = torch.cat([-side.flip(0), torch.zeros(1), side])
    wanted = torch.arange(1 - new, new, dtype=torch.float64)
    right = torch.bucketize(wanted, places).clamp(1, len(places) - 1)
    gaps = places[right] - places[right - 1]
    share = ((wanted - places[right - 1]) / gaps).clamp(0, 1)[:, None]
    matrix = torch.zeros(len(wanted), len(places), dtype=torch.float64)
    matrix.scatter_(1, right[:, None] - 1, 1 - share)
    return matrix.scatter_(1, right[:, None], share)


def _last_place(ratio: float, side: int) -> float:
    """1 + q + ... + q^(side - 2)"""
    return sum(ratio**power for power in range(side - 1))


def change_channels(matrix: Tensor, *, old: int, new: int) -> Tensor:
    """The projection for pictures of `new` channels instead of `old`.

    One channel takes the sum of the old ones: a grey picture gets the tokens that it had as a
    colour picture of three equal channels. Otherwise the old channels are repeated in their order
    and scaled by old / new, so that tokens keep their size; from one channel to three, a colour
    picture is read as the mean of its colours.

    Args:
        matrix: (dim, old * pixels).
        old: Channels of the pictures.
        new: Channels wanted.

    Returns:
        (dim, new * pixels), of the same type.
    """
    kernels = rearrange(
        matrix.double(), "dim (channels pixels) -> dim channels pixels", channels=old
    )
    order = torch.arange(new) % old
    changed = kernels.sum(dim=1, keepdim=True) if new == 1 else kernels[:, order] * (old / new)
    return changed.flatten(1).to(matrix)
