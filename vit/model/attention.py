"""Scaled dot-product attention among the tokens of one image.

    attention(Q, K, V) = softmax(Q Kᵀ / √head_dim + mask) V

Source: Vaswani et al., "Attention Is All You Need", section 3.2, arXiv:1706.03762.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.position_embedding import Grid
from vit.model.rotary_embedding import Rotate, unturned

# Longest sequence whose score matrix the CPU may hold; its memory grows with the square.
LONGEST_EXPLICIT = 1024
JOINED = "batch heads tokens head_dim -> batch tokens (heads head_dim)"


class Attend(Protocol):
    """A way to mix values, as `attend` does."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor: ...


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Mix values by how well their keys match the queries, in the faster of two equal ways.

    In half precision the CPU's fused kernel is 2 to 5 times slower than plain products (forward
    and backward, 64 to 200 tokens). Elsewhere it is as fast or faster, and holds no scores.

    Args:
        query: (batch, heads, tokens, head_dim).
        key, value: (batch, heads, memory_tokens, head_dim).
        mask: True where a query may look, or numbers added to the scores, (tokens, memory_tokens)
            or whatever broadcasts to the scores.
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
    return mixed(attention_weights(query, key, mask=mask), value, dropout=dropout)


def mixed(weights: Tensor, value: Tensor, *, dropout: float) -> Tensor:
    """Values mixed by attention weights, some of which are dropped."""
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
    return masked(scores, mask).softmax(dim=-1)


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores (..., tokens, memory_tokens) with what `mask` says, as for `attend`."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


KeysValues = tuple[Tensor, Tensor]


def as_they_are(key: Tensor, value: Tensor) -> KeysValues:
    """Tokens look at each other alone."""
    return key, value


class AttentionContext(NamedTuple):
    """What the blocks know of their tokens besides the values."""

    grid: Grid = (0, 0)
    """Rows and columns of the patches."""
    rotate: Rotate = unturned
    """Turns queries and keys by their places."""
    mask: Tensor | None = None
    """Where queries may look, or what is added to their scores, as for `attend`."""
    attend: Attend = attend
    """How values are mixed."""
    sizes: Tensor | None = None
    """Patches that each token is made of, (batch, tokens), where some were merged."""
    remember: Callable[[Tensor, Tensor], KeysValues] = as_they_are
    """Keys and values to look at, from those of these tokens: a cache puts earlier ones first."""
    memory: KeysValues | None = None
    """Keys and values of the image that cross-attention looks at."""


def as_mask(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """What makes a token of size s count as s tokens, (batch, tokens) -> (batch, 1, 1, tokens)."""
    return sizes.log()[:, None, None].to(dtype)


class Unbiased(nn.Module):
    """Scores depend on queries and keys alone."""

    def forward(self, places: AttentionContext) -> Tensor | None:
        """The mask of the attention: the one that the caller gave."""
        return places.mask


class SelfAttention(nn.Module):
    """Every token gathers from all tokens of its own image.

    Args:
        dim: Width of a token.
        num_heads: Heads that share `dim` equally.
        num_kv_heads: Heads of keys and values, each read by as many heads of queries (Ainslie et
            al., "GQA", section 2.2, arXiv:2305.13245; with 1, Shazeer's multi-query attention,
            arXiv:1911.02150); as many as `num_heads` by default.
        rel_pos: Makes what is added to the scores from the places of the tokens.
        q_norm, k_norm: Normalise each head's queries and keys; identities by default.
        qkv_bias: Whether the projections to queries, keys and values have a bias.
        proj_bias: Whether the projection at the end has one.
        attention_dropout: Probability of dropping an attention weight during training.
        dropout: Probability of dropping an output during training.

    Raises:
        ValueError: `dim` is not a multiple of `num_heads`, or that not of `num_kv_heads`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        rel_pos: nn.Module | None = None,
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
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % kv_heads:
            raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={kv_heads}")
        self.heads = (num_heads, kv_heads, kv_heads)
        self.share = sharing(num_heads // kv_heads)
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(dim, sum(self.heads) * (dim // num_heads), bias=qkv_bias)
        self.rel_pos = rel_pos or Unbiased()
        self.q_norm = q_norm or nn.Identity()
        self.k_norm = k_norm or nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(dropout)

    def split(self, x: Tensor, places: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, tokens, dim) -> query, key, value, each (batch, its heads, tokens, head_dim)"""
        joined = rearrange(
            self.qkv(x),
            "batch tokens (heads head_dim) -> batch heads tokens head_dim",
            heads=sum(self.heads),
        )
        query, key, value = joined.split(self.heads, dim=1)
        return places.rotate(self.q_norm(query)), places.rotate(self.k_norm(key)), value

    def forward(self, x: Tensor, places: AttentionContext | None = None) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim); relative positions need the `places`."""
        places = places or AttentionContext()
        query, key, value = self.split(x, places)
        key, value = places.remember(key, value)
        gathered = places.attend(
            query,
            self.share(key),
            self.share(value),
            mask=self.rel_pos(places),
            dropout=self.attention_dropout if self.training else 0.0,
        )
        tokens: Tensor = self.proj_drop(self.proj(rearrange(gathered, JOINED)))
        return tokens


def sharing(share: int) -> Callable[[Tensor], Tensor]:
    """What gives each head of keys or values to `share` heads of queries."""
    return unshared if share == 1 else partial(shared, share=share)


def unshared(x: Tensor) -> Tensor:
    """(batch, heads, tokens, head_dim) -> the same"""
    return x


def shared(x: Tensor, share: int) -> Tensor:
    """(batch, heads, tokens, head_dim) -> each head `share` times in a row"""
    return repeat(
        x, "batch heads tokens head_dim -> batch (heads share) tokens head_dim", share=share
    )
