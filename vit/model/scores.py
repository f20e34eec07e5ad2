"""How well a key matches a query, by the functions of the older literature, for study.

    dot          q · k                      Luong et al., section 3.1, arXiv:1508.04025
    scaled dot   q · k / √dim               Vaswani et al., section 3.2.1, arXiv:1706.03762
    general      q · W k                    Luong et al. (bilinear)
    additive     v · tanh(W q + U k)        Bahdanau et al., appendix A.1.2, arXiv:1409.0473

Luong's `concat`, v · tanh(W [q; k]), is `additive` with the two halves of its W. Every one of them
maps queries (..., queries, dim) and keys (..., keys, dim) to scores (..., queries, keys); weights
are shared by all heads. The network itself uses the scaled dot product, as `attend` computes it.
"""

import math

import torch
from torch import Tensor, nn

from vit.model.attention import masked, mixed


class Dot(nn.Module):
    """q · k; its size grows with the root of the width."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """(..., queries, dim), (..., keys, dim) -> (..., queries, keys)"""
        return query @ key.mT


class ScaledDot(nn.Module):
    """q · k / √dim: of variance 1 where all numbers of q and k are, independent of each other."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """(..., queries, dim), (..., keys, dim) -> (..., queries, keys)"""
        return query @ key.mT / math.sqrt(query.shape[-1])


class General(nn.Module):
    """q · W k: queries and keys may have different widths.

    Args:
        query_dim, key_dim: Their widths.
    """

    def __init__(self, query_dim: int, key_dim: int) -> None:
        super().__init__()
        self.key = nn.Linear(key_dim, query_dim, bias=False)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """(..., queries, query_dim), (..., keys, key_dim) -> (..., queries, keys)"""
        keys: Tensor = self.key(key)
        return query @ keys.mT


class Additive(nn.Module):
    """v · tanh(W q + U k): a small network looks at each pair, so it holds queries * keys * hidden.

    Args:
        query_dim, key_dim: Widths of queries and keys.
        hidden_dim: Width inside.
    """

    def __init__(self, query_dim: int, key_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_dim, hidden_dim, bias=False)
        self.key = nn.Linear(key_dim, hidden_dim, bias=False)
        self.score = nn.Linear(hidden_dim, 1, bias=False)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """(..., queries, query_dim), (..., keys, key_dim) -> (..., queries, keys)"""
        pairs = self.query(query).unsqueeze(-2) + self.key(key).unsqueeze(-3)
        scores: Tensor = self.score(torch.tanh(pairs)).squeeze(-1)
        return scores


class AttendBy(nn.Module):
    """Mixes values by any of these scores, as `attend` does by the scaled dot product.

    Args:
        score: One of the above, or whatever maps queries and keys to scores.
    """

    def __init__(self, score: nn.Module) -> None:
        super().__init__()
        self.score = score

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """(batch, heads, tokens, dim) of each -> mixed values, (batch, heads, tokens, dim)"""
        weights = masked(self.score(query, key), mask).softmax(dim=-1)
        return mixed(weights, value, dropout=dropout)
