"""RMSNorm: normalisation of each token by its root mean square.

    RMSNorm(x) = x / sqrt(mean(x²) + eps) * weight

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scales each token to unit root mean square, then by a learned weight.

    Args:
        dim: Width of a token.
        eps: Added to the mean square, so that a zero token stays zero.
    """

    # torch's own warns about, and slows down on, bfloat16 tokens with float32 weights,
    # which is what autocast gives to the norms of queries and keys.

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)"""
        wide = x.to(torch.promote_types(x.dtype, torch.float))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)
