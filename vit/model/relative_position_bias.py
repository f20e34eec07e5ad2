"""Relative positions: a learned number for each offset between two patches, added to the scores.

    scores[i, j] = q_i · k_j / √head_dim + table[row_i - row_j, col_i - col_j]

The table has one row for each offset, from (1 - rows, 1 - cols) to (rows - 1, cols - 1), and one
column for each head. Three more rows are for tokens that have no place, in front of the patches:
when one looks at a patch, when a patch looks at one, and when they look at each other.

Source: Shaw et al., section 3.2, arXiv:1803.02155; with a table of numbers in two dimensions: Liu
et al., "Swin Transformer", section 3.2, arXiv:2103.14030; with a class token: Bao et al., "BEiT",
arXiv:2106.08254, and its code. The order of the rows is theirs and timm's.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.attention import AttentionContext, masked
from vit.model.position_embedding import Grid

PREFIX_ROWS = 3


class RelativeBias(nn.Module):
    """Makes what is added to the scores of the patches of one block, for images of any size.

    Args:
        grid: Rows and columns of the patches that the table describes.
        num_heads: Heads of the queries.
    """

    extra = 0

    def __init__(self, grid: Grid, num_heads: int) -> None:
        super().__init__()
        self.grid = grid
        rows, cols = offsets(grid)
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros(rows * cols + self.extra, num_heads)
        )

    def forward(self, places: AttentionContext) -> Tensor:
        """What is added to the scores, (batch or 1, heads, tokens, tokens)"""
        table: Tensor = self.relative_position_bias_table
        if places.grid != self.grid:
            table = resize_offsets(table, self.grid, places.grid, extra=self.extra)
        return masked(self.spread(table, places.grid).unsqueeze(0), places.mask)

    def spread(self, table: Tensor, grid: Grid) -> Tensor:
        """The number of each pair of tokens, (heads, tokens, tokens)."""
        return among_patches(table, grid)


class PrefixedRelativeBias(RelativeBias):
    """The same with tokens in front of the patches, which share three numbers a head.

    Args:
        grid, num_heads: As for RelativeBias.
        prefix: Tokens in front of the patches.
    """

    extra = PREFIX_ROWS

    def __init__(self, grid: Grid, num_heads: int, *, prefix: int) -> None:
        super().__init__(grid, num_heads)
        self.prefix = prefix

    def spread(self, table: Tensor, grid: Grid) -> Tensor:
        """The number of each pair of tokens, (heads, tokens, tokens)."""
        patches = among_patches(table[:-PREFIX_ROWS], grid)
        at_patch, at_prefix, within = table[-PREFIX_ROWS:].unsqueeze(2).unsqueeze(3)
        heads, count, _ = patches.shape
        first = [
            within.expand(heads, self.prefix, self.prefix),
            at_patch.expand(heads, self.prefix, count),
        ]
        below = [at_prefix.expand(heads, count, self.prefix), patches]
        return torch.cat([torch.cat(first, dim=2), torch.cat(below, dim=2)], dim=1)


def offsets(grid: Grid) -> Grid:
    """How many offsets there are between rows, and between columns."""
    return 2 * grid[0] - 1, 2 * grid[1] - 1


def among_patches(table: Tensor, grid: Grid) -> Tensor:
    """The row of `table` for each pair of patches, (heads, patches, patches).

    The offsets from one patch to all others are a window of the table, and the next patch's window
    lies one step beside it. So no index is made or kept, and it takes half the time of one.
    """
    rows, cols = grid
    # reversed, so that a window's entries run with the patch that is looked at
    plane = rearrange(table.flip(0), "(rows cols) heads -> heads rows cols", rows=2 * rows - 1)
    windows = plane.unfold(1, rows, 1).unfold(2, cols, 1).flip(1, 2)
    return rearrange(windows, "heads row col rows cols -> heads (row col) (rows cols)")


def resize_offsets(table: Tensor, old: Grid, new: Grid, *, extra: int) -> Tensor:
    """Stretch a table to another grid; its last `extra` rows stay as they are.

    Args:
        table: (offsets of the old grid + extra, heads).
        old: Rows and columns of the table's grid, in patches.
        new: Rows and columns wanted.
        extra: Rows of the table that are for no offset.

    Returns:
        (offsets of the new grid + extra, heads), of the same type.
    """
    rows, cols = offsets(old)
    plane = rearrange(table[: rows * cols], "(rows cols) heads -> 1 heads rows cols", rows=rows)
    precise = plane.to(torch.promote_types(table.dtype, torch.float))
    stretched = F.interpolate(precise, size=offsets(new), mode="bicubic")
    flat = rearrange(stretched, "1 heads rows cols -> (rows cols) heads").to(table.dtype)
    return torch.cat([flat, table[len(table) - extra :]])
