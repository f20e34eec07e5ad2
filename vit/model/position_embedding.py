"""Position embedding: a table of vectors, added to the tokens before the first block.

Learned: Dosovitskiy et al., appendix D.4, arXiv:2010.11929. Sinusoidal in one dimension: Vaswani
et al., section 3.5, arXiv:1706.03762. In two: Beyer et al., "Better plain ViT baselines for
ImageNet-1k", arXiv:2205.01580; He et al. (MAE), appendix A.1, arXiv:2111.06377.

The table belongs to the network, which owns it as `pos_embed`. Its rows are those of the
positioned prefix tokens, then of the patches, row by row.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

TEMPERATURE = 10_000.0

Grid = tuple[int, int]


class GridTables:
    """Constant tables of the last few grids, kept where the network computes.

    A GPU would else wait in every step until the processor, busy with loading images, has made the
    table again and copied it.
    """

    MOST = 64

    def __init__(self) -> None:
        self.kept: dict[tuple[Grid, torch.device, torch.dtype], Tensor] = {}

    def get(
        self, grid: Grid, device: torch.device, dtype: torch.dtype, make: Callable[[], Tensor]
    ) -> Tensor:
        """What `make` returns for `grid`."""
        if torch.compiler.is_compiling():  # first, since a grid may have no numbers there
            return make().to(device, dtype)
        key = grid, device, dtype
        found = self.kept.get(key)
        if found is not None:
            return found
        with torch.inference_mode(False):  # training may use it later
            made = make().to(device, dtype)
        if type(made) is Tensor:  # not where a network is traced, with tensors without numbers
            if len(self.kept) >= self.MOST:
                self.kept.clear()
            self.kept[key] = made
        return made


class LearnedPositions(nn.Module):
    """Adds one learned vector for each position, interpolated for images of another size.

    Args:
        grid: Rows and columns of the patches that the table describes.
        dim: Width of a token.
        prefix: Prefix tokens (class token) that have a row in the table.
        unpositioned: Further prefix tokens (registers), which have no position.
    """

    def __init__(self, grid: Grid, dim: int, *, prefix: int, unpositioned: int = 0) -> None:
        super().__init__()
        self.grid, self.dim, self.prefix = grid, dim, prefix
        self.padding = (0, 0, unpositioned, 0)

    def table(self) -> Tensor:
        """The table before training, (1, prefix + rows * cols, dim)."""
        rows, cols = self.grid
        return nn.Parameter(torch.zeros(1, self.prefix + rows * cols, self.dim))

    def resized_table(self, table: Tensor, grid: Grid) -> Tensor:
        """Positions for the patches of another `grid`, (1, prefix + rows * cols, dim)."""
        return resize_positions(table, self.grid, grid, prefix=self.prefix)

    def forward(self, tokens: Tensor, table: Tensor, grid: Grid) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        # a traced grid may have no numbers to compare
        usual = all(isinstance(side, int) for side in grid) and grid == self.grid
        positions = table if usual else self.resized_table(table, grid)
        prefix, patches = positions[:, : self.prefix], positions[:, self.prefix :]
        return tokens + torch.cat([prefix, F.pad(patches, self.padding)], dim=1)


class SinusoidalPositions(LearnedPositions):
    """Adds sines and cosines of each patch's position; prefix tokens get zeros.

    Args:
        grid: Rows and columns of the patches of an image of the default size.
        dim: Width of a token.
        encode: The formula, (grid, dim) -> (rows * cols, dim).
        prefix, unpositioned: As for LearnedPositions.
    """

    def __init__(
        self,
        grid: Grid,
        dim: int,
        *,
        encode: Callable[[Grid, int], Tensor],
        prefix: int,
        unpositioned: int = 0,
    ) -> None:
        super().__init__(grid, dim, prefix=prefix, unpositioned=unpositioned)
        self.encode, self.tables = encode, GridTables()

    def table(self) -> Tensor:
        return self.encoded(self.grid)

    def resized_table(self, table: Tensor, grid: Grid) -> Tensor:
        return self.tables.get(grid, table.device, table.dtype, lambda: self.encoded(grid))

    def encoded(self, grid: Grid) -> Tensor:
        """Positions of the prefix tokens and of the patches of `grid`."""
        return F.pad(self.encode(grid, self.dim), (0, 0, self.prefix, 0)).unsqueeze(0)


def resize_positions(
    table: Tensor, old: Grid, new: Grid, *, prefix: int, antialias: bool = True
) -> Tensor:
    """Interpolate a learned table to another grid, so that trained weights fit other image sizes.

    Args:
        table: Learned positions of the old grid, (1, prefix + patches, dim).
        old, new: Rows and columns of both grids, in patches.
        prefix: Rows of the table in front of the patches, which stay as they are.
        antialias: Whether to low-pass; most networks of transformers do not.

    Returns:
        Positions of the new grid, (1, prefix + rows * cols, dim).

    Source: Dosovitskiy et al., section 3.2, arXiv:2010.11929 (bicubic, antialiased, as in timm).
    """
    patches = rearrange(table[:, prefix:], "1 (rows cols) dim -> 1 dim rows cols", rows=old[0])
    exact = patches.to(torch.promote_types(patches.dtype, torch.float))
    if all(isinstance(side, int) for side in new) and (new[1] > 1 or not antialias):
        stretched = F.interpolate(exact, size=new, mode="bicubic", antialias=antialias)
    else:  # traced for every size, as engines differ; one column, which torch 2.14 gets wrong
        by_row, by_col = (bicubic_matrix(*each).to(exact) for each in zip(old, new, strict=True))
        stretched = by_row @ exact @ by_col.T
    tokens = rearrange(stretched, "1 dim rows cols -> 1 (rows cols) dim").to(table.dtype)
    return torch.cat([table[:, :prefix], tokens], dim=1)


def bicubic_matrix(old: int, new: int) -> Tensor:
    """The antialiased bicubic resize of a line, (new, old) in float64, by its formula (Keys')."""
    scale = old / torch.scalar_tensor(new, dtype=torch.float64)
    centres = (torch.arange(new, dtype=torch.float64) + 0.5) * scale
    places = torch.arange(old, dtype=torch.float64) + 0.5
    t = ((places - centres[:, None]) / scale.clamp(min=1)).abs()
    near, far = (1.5 * t - 2.5) * t * t + 1, (((5 - t) * t - 8) * t + 4) / 2
    weights = torch.where(t < 1, near, torch.where(t < 2, far, 0.0))
    return weights / weights.sum(dim=1, keepdim=True)


def sinusoidal_1d(grid: Grid, dim: int) -> Tensor:
    """Positions in row-major order; sines in even entries, cosines in odd ones.

    entry 2i = sin(position / 10000^(2i / dim)),  entry 2i + 1 = cos(the same)

    Returns:
        Positions, (rows * cols, dim).
    """
    rows, cols = grid
    angles = _angles(torch.arange(rows * cols, device="cpu"), dim // 2)
    waves = [angles.sin(), angles.cos()]
    table = rearrange(waves, "two positions waves -> positions (waves two)")
    return table.to(torch.get_default_device())


def sinusoidal_2d(grid: Grid, dim: int) -> Tensor:
    """Four quarters: sines, then cosines of the column; sines, then cosines of the row.

    entry i of a quarter: angle = position / 10000^(i / (dim / 4))

    These are MAE's frequencies; Beyer et al.'s code divides i by dim / 4 - 1 instead.

    Returns:
        Positions, (rows * cols, dim).
    """
    rows, cols = grid
    sides = (torch.arange(side, device="cpu") for side in (rows, cols))
    row, col = torch.meshgrid(*sides, indexing="ij")
    by_col, by_row = _angles(col.flatten(), dim // 4), _angles(row.flatten(), dim // 4)
    table = torch.cat([by_col.sin(), by_col.cos(), by_row.sin(), by_row.cos()], dim=1)
    return table.to(torch.get_default_device())


def _angles(positions: Tensor, waves: int) -> Tensor:
    """position / 10000^(i / waves), (positions, waves), computed in float64 for precision.

    On the CPU: on the meta device, sines take a second of imports.
    """
    counts = torch.arange(waves, dtype=torch.float64, device="cpu")
    frequencies = TEMPERATURE ** -(counts / waves)
    return torch.outer(positions.double(), frequencies).float()
