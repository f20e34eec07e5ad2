"""Relative position bias: a learned bias for each offset of two patches, added to the scores.

    scores[i, j] = q_i · k_j / √head_dim + table[row_i - row_j, col_i - col_j]

The table has one row for each offset, from (1 - rows, 1 - cols) to (rows - 1, cols - 1), and one
column for each head. Three more rows are for prefix tokens, which have no position: prefix query to
patch, patch query to prefix, and prefix to prefix.

Source: Raffel et al. (T5), section 2.1, arXiv:1910.10683, after the vectors of Shaw et al.,
arXiv:1803.02155; in two dimensions: Liu et al., "Swin Transformer", section 3.2, arXiv:2103.14030;
with a class token: Bao et al., "BEiT", arXiv:2106.08254, and its code. The order of the rows is
theirs and timm's.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.attention import AttentionContext, apply_mask
from vit.model.position_embedding import Grid

PREFIX_ROWS = 3


class RelativePositionBias(nn.Module):
    """The attention bias of one block, for images of any size.

    Args:
        grid: Rows and columns of the patches that the table describes.
        num_heads: Query heads.
        prefix: Tokens in front of the patches.
    """

    def __init__(self, grid: Grid, num_heads: int, *, prefix: int = 0) -> None:
        super().__init__()
        self.grid, self.prefix = grid, prefix
        self.num_prefix_rows = PREFIX_ROWS if prefix else 0
        rows, cols = num_offsets(grid)
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros(rows * cols + self.num_prefix_rows, num_heads)
        )

    def forward(self, context: AttentionContext) -> Tensor:
        """Bias plus the mask of the context, (batch or 1, heads, tokens, tokens)"""
        table: Tensor = self.relative_position_bias_table
        if context.grid != self.grid:
            table = resize_bias_table(
                table, self.grid, context.grid, num_prefix_rows=self.num_prefix_rows
            )
        return apply_mask(self.pairwise_bias(table, context.grid).unsqueeze(0), context.mask)

    def pairwise_bias(self, table: Tensor, grid: Grid) -> Tensor:
        """Bias of each pair of tokens, (heads, tokens, tokens)."""
        if not self.prefix:
            return patch_bias(table, grid)
        patches = patch_bias(table[:-PREFIX_ROWS], grid)
        at_patch, at_prefix, within = table[-PREFIX_ROWS:].unsqueeze(2).unsqueeze(3)
        heads, count, _ = patches.shape
        first = [
            within.expand(heads, self.prefix, self.prefix),
            at_patch.expand(heads, self.prefix, count),
        ]
        below = [at_prefix.expand(heads, count, self.prefix), patches]
        return torch.cat([torch.cat(first, dim=2), torch.cat(below, dim=2)], dim=1)


def num_offsets(grid: Grid) -> Grid:
    """Number of row offsets, and of column offsets, between two patches."""
    return 2 * grid[0] - 1, 2 * grid[1] - 1


def patch_bias(table: Tensor, grid: Grid) -> Tensor:
    """Bias of each pair of patches, (heads, patches, patches).

    The offsets from one patch to all others are a window of the table, and the next patch's window
    lies one step beside it. So no index is made or kept, and it takes half the time of one.
    """
    rows, cols = grid
    # reversed, so that a window's entries are ordered as the key patches
    plane = rearrange(table.flip(0), "(rows cols) heads -> heads rows cols", rows=2 * rows - 1)
    windows = plane.unfold(1, rows, 1).unfold(2, cols, 1).flip(1, 2)
    return rearrange(windows, "heads row col rows cols -> heads (row col) (rows cols)")


def resize_bias_table(table: Tensor, old: Grid, new: Grid, *, num_prefix_rows: int) -> Tensor:
    """Stretch a table to another grid; its last `num_prefix_rows` rows stay as they are.

    Args:
        table: (offsets of the old grid + num_prefix_rows, heads).
        old: Rows and columns of the table's grid, in patches.
        new: Rows and columns of the new grid.
        num_prefix_rows: Rows of the table that are for no offset.

    Returns:
        (offsets of the new grid + num_prefix_rows, heads), of the same type.
    """
    rows, cols = num_offsets(old)
    plane = rearrange(table[: rows * cols], "(rows cols) heads -> 1 heads rows cols", rows=rows)
    precise = plane.to(torch.promote_types(table.dtype, torch.float))
    stretched = F.interpolate(precise, size=num_offsets(new), mode="bicubic")
    flat = rearrange(stretched, "1 heads rows cols -> (rows cols) heads").to(table.dtype)
    return torch.cat([flat, table[len(table) - num_prefix_rows :]])
