"""Scaled dot-product attention among the tokens of one image.

    attention(Q, K, V) = softmax(Q Kᵀ / √head_dim + mask) V

Source: Vaswani et al., "Attention Is All You Need", section 3.2, arXiv:1706.03762.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.rotary import Rotate, unturned

# Longest sequence whose score matrix the CPU may hold; its memory grows with the square.
LONGEST_EXPLICIT = 1024


class SelfAttention(nn.Module):
    """Every token gathers from all tokens of its own image.

    Args:
        dim: Width of a token.
        num_heads: Heads that share `dim` equally.
        q_norm, k_norm: Normalise each head's queries and keys; identities by default.
        qkv_bias: Whether the projections to queries, keys and values have a bias.
        proj_bias: Whether the projection at the end has one.
        attention_dropout: Probability of dropping an attention weight during training.
        dropout: Probability of dropping an output during training.

    Raises:
        ValueError: `dim` is not a multiple of `num_heads`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim={dim} does not split into {num_heads} heads")
        self.num_heads = num_heads
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = q_norm or nn.Identity()
        self.k_norm = k_norm or nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(dropout)

    def split(self, x: Tensor, rotate: Rotate = unturned) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, tokens, dim) -> query, key, value, each (batch, heads, tokens, head_dim)"""
        query, key, value = rearrange(
            self.qkv(x),
            "batch tokens (qkv heads head_dim) -> qkv batch heads tokens head_dim",
            qkv=3,
            heads=self.num_heads,
        ).unbind(0)
        return rotate(self.q_norm(query)), rotate(self.k_norm(key)), value

    def forward(
        self, x: Tensor, rotate: Rotate = unturned, *, mask: Tensor | None = None
    ) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim); `mask` as for `attend`."""
        query, key, value = self.split(x, rotate)
        dropout = self.attention_dropout if self.training else 0.0
        mixed = attend(query, key, value, mask=mask, dropout=dropout)
        mixed = rearrange(mixed, "batch heads tokens head_dim -> batch tokens (heads head_dim)")
        tokens: Tensor = self.proj_drop(self.proj(mixed))
        return tokens

    def weights(
        self, x: Tensor, rotate: Rotate = unturned, *, mask: Tensor | None = None
    ) -> Tensor:
        """How much each token (row) gathers from each (column), (batch, heads, tokens, tokens)."""
        query, key, _ = self.split(x, rotate)
        return attention_weights(query, key, mask=mask)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Mix values by how well their keys match the queries, in the faster of two equal ways.

    In half precision the CPU's fused kernel is 2 to 5 times slower than plain products (forward
    and backward, 64 to 200 tokens). Elsewhere it is as fast or faster, and holds no scores.

    Args:
        query: (batch, heads, tokens, head_dim).
        key, value: (batch, heads, memory_tokens, head_dim).
        mask: True where a query may look, (tokens, memory_tokens) or broadcast to the scores.
        dropout: Probability of dropping an attention weight.

    Returns:
        Mixed values, (batch, heads, tokens, head_dim).
    """
    # value tells the precision of the products: autocast leaves norms of queries in float32.
    half = value.dtype in (torch.bfloat16, torch.float16)
    if half and value.device.type == "cpu" and value.shape[-2] <= LONGEST_EXPLICIT:
        return explicit_attention(query, key, value, mask=mask, dropout=dropout)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """`attend` by the formula; the whole matrix of scores is in memory."""
    weights = attention_weights(query, key, mask=mask)
    return F.dropout(weights, dropout, training=dropout > 0) @ value


def attention_weights(query: Tensor, key: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / √head_dim + mask), (batch, heads, tokens, memory_tokens)."""
    batch, _, _, head_dim = query.shape
    pattern = "batch heads tokens head_dim -> (batch heads) tokens head_dim"
    query, key = rearrange(query, pattern), rearrange(key, pattern)
    # One product with the scale inside: a tenth faster than scaling the queries first.
    scores = torch.baddbmm(
        query.new_zeros(1), query, key.transpose(1, 2), beta=0, alpha=head_dim**-0.5
    )
    scores = rearrange(scores, "(batch heads) ... -> batch heads ...", batch=batch)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1)
