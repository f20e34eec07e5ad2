"""Attention of words to the tokens of an image: queries from one, keys and values from the other.

Source: Vaswani et al., "Attention Is All You Need", section 3.2.3, arXiv:1706.03762.
"""

from einops import rearrange
from torch import Tensor, nn

from vit.model.attention import JOINED, AttentionContext, KeysValues, sharing


class CrossAttention(nn.Module):
    """Every token gathers from all tokens of the memory.

    Keys and values depend on the memory alone: `look` makes them, once an image, and `forward`
    finds them in `places.memory`.

    Args:
        dim: Width of a token.
        num_heads: Heads that share `dim` equally.
        memory_dim: Width of a token of the memory.
        num_kv_heads: As in SelfAttention.
        q_norm, k_norm: Normalise each head's queries and keys; identities by default.
        bias: Whether the projections to queries, keys and values have a bias.
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
        memory_dim: int,
        num_kv_heads: int | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        bias: bool = True,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim={dim} does not split into {num_heads} heads")
        self.num_heads = num_heads
        self.kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={num_heads} is not a multiple of num_kv_heads={self.kv_heads}"
            )
        self.share = sharing(num_heads // self.kv_heads)
        self.attention_dropout = attention_dropout
        self.q = nn.Linear(dim, dim, bias=bias)
        self.kv = nn.Linear(memory_dim, 2 * self.kv_heads * (dim // num_heads), bias=bias)
        self.q_norm = q_norm or nn.Identity()
        self.k_norm = k_norm or nn.Identity()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(dropout)

    def look(self, memory: Tensor) -> KeysValues:
        """(batch, tokens, memory_dim) -> two of (batch, kv_heads, tokens, head_dim)"""
        key, value = rearrange(
            self.kv(memory),
            "batch tokens (two heads head_dim) -> two batch heads tokens head_dim",
            two=2,
            heads=self.kv_heads,
        )
        return self.k_norm(key), value

    def forward(self, x: Tensor, places: AttentionContext) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        assert places.memory is not None, "cross-attention without a memory"
        key, value = places.memory
        pattern = "batch tokens (heads head_dim) -> batch heads tokens head_dim"
        gathered = places.attend(
            self.q_norm(rearrange(self.q(x), pattern, heads=self.num_heads)),
            self.share(key),
            self.share(value),
            dropout=self.attention_dropout if self.training else 0.0,
        )
        tokens: Tensor = self.proj_drop(self.proj(rearrange(gathered, JOINED)))
        return tokens
