"""The patch projection for patches of another size, and for pictures of other channels.

    x_old . w  =  (R x_old) . w_new     R: bicubic resize of a patch;  w_new = pinv(R^T) w

Source: Beyer et al., "FlexiViT", section 3.4, arXiv:2212.08013.
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F


def resize_patches(matrix: Tensor, *, old: int, new: int) -> Tensor:
    """The projection that gives resized patches the tokens that the old ones had.

    Exact where patches grow; where they shrink, the closest for patches of white noise.

    Args:
        matrix: (dim, channels * old * old).
        old: Side of a patch in pixels.
        new: Side wanted.

    Returns:
        (dim, channels * new * new), of the same type.
    """
    pixels = "dim (channels rows cols) -> dim channels rows cols"
    kernels = rearrange(matrix.double(), pixels, rows=old, cols=old)
    # Rows and columns are resized alike and one after the other, so each has its own inverse:
    # the inverse of a Kronecker product is the product of the inverses.
    side: Tensor = torch.linalg.pinv(resize_matrix(old, new)).T
    stretched = side @ kernels @ side.T
    return stretched.flatten(1).to(matrix)


def resize_matrix(old: int, new: int) -> Tensor:
    """What resizes a line of `old` pixels, bicubic and antialiased, (new, old) in float64."""
    lines = torch.eye(old, dtype=torch.float64)[None, None]
    return F.interpolate(lines, size=(new, old), mode="bicubic", antialias=True)[0, 0]


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
