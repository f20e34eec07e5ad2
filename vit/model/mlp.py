"""Feed-forward layers of a block, applied to each token separately.

    MLP(x) = activation(x W1 + b1) W2 + b2
    SwiGLU(x) = (SiLU(x Wg + bg) * (x Wx + bx)) W2 + b2

Source: Vaswani et al., section 3.3, arXiv:1706.03762; Hendrycks and Gimpel (GELU),
arXiv:1606.08415; Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Two linear layers with an activation between them.

    Args:
        dim: Width of a token.
        hidden_dim: Width inside.
        activation: Applied inside; the exact GELU by default.
        norm: Applied before the second layer; the identity by default.
        bias: Whether the projections have one.
        dropout: Probability of dropping an activation, inside and at the end, during training.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: nn.Module | None = None,
        norm: nn.Module | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.act = activation or nn.GELU()
        self.norm = norm or nn.Identity()
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        tokens: Tensor = self.drop(self.fc2(self.norm(self.drop(self.act(self.fc1(x))))))
        return tokens


class SwiGLU(nn.Module):
    """Gated linear unit with SiLU.

    It has three matrices: with two thirds of an MLP's `hidden_dim` it has as many parameters.

    Args:
        dim, hidden_dim, norm, bias, dropout: As for MLP.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        norm: nn.Module | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm = norm or nn.Identity()
        self.fc1_g = nn.Linear(dim, hidden_dim, bias=bias)
        self.fc1_x = nn.Linear(dim, hidden_dim, bias=bias)
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        gated = F.silu(self.fc1_g(x)) * self.fc1_x(x)
        tokens: Tensor = self.drop(self.fc2(self.norm(self.drop(gated))))
        return tokens


class PackedSwiGLU(nn.Module):
    """SwiGLU with one matrix for gate and value, the gate first.

    Args:
        dim, hidden_dim, norm, bias, dropout: As for MLP.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        norm: nn.Module | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm = norm or nn.Identity()
        self.fc1 = nn.Linear(dim, 2 * hidden_dim, bias=bias)
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        gate, value = self.fc1(x).chunk(2, dim=-1)
        tokens: Tensor = self.drop(self.fc2(self.norm(self.drop(F.silu(gate) * value))))
        return tokens


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), the first approximation of Hendrycks and Gimpel (CLIP uses it)."""

    def forward(self, x: Tensor) -> Tensor:
        """(...) -> (...)"""
        return x * torch.sigmoid(1.702 * x)
