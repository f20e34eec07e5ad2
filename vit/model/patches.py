"""An image becomes a sequence of tokens: cut into patches, each flattened and projected.

    x_patch E + b,  with E of shape (channels * patch_size², dim)

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", section 3.1, arXiv:2010.11929.
"""

from einops import rearrange
from torch import Tensor, nn

from vit.model.positions import Grid


class PatchEmbedding(nn.Module):
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
        super().__init__()
        self.channels = channels
        self.patch_size = patch_size
        self.proj = nn.Linear(channels * patch_size**2, dim, bias=bias)

    def grid(self, images: Tensor) -> Grid:
        """(rows, cols) of patches in `images`.

        Raises:
            ValueError: The images cannot be cut into whole patches of the right channels.
        """
        channels, height, width = images.shape[-3:]
        if channels != self.channels:
            raise ValueError(f"images have {channels} channels; this network takes {self.channels}")
        for name, size in (("height", height), ("width", width)):
            if size % self.patch_size or size == 0:
                raise ValueError(
                    f"{name}={size} is not a multiple of patch_size={self.patch_size}; "
                    f"resize or pad the images"
                )
        return height // self.patch_size, width // self.patch_size

    def forward(self, images: Tensor) -> tuple[Tensor, Grid]:
        """(batch, channels, height, width) -> (batch, rows * cols, dim), and (rows, cols)"""
        rows, cols = self.grid(images)
        patches = rearrange(
            images,
            "batch channels (rows patch_h) (cols patch_w)"
            " -> batch (rows cols) (channels patch_h patch_w)",
            rows=rows,
            cols=cols,
        )
        return self.proj(patches), (rows, cols)
