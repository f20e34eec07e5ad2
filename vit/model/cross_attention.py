"""Cross-attention: queries from the text, keys and values from the tokens of the image.

Source: Vaswani et al., "Attention Is All You Need", section 3.2.3, arXiv:1706.03762.
"""

from einops import rearrange
from torch import Tensor, nn

from vit.model.attention import MERGE_HEADS, AttentionContext, KeyValue, repeat_kv


class CrossAttention(nn.Module):
    """Multi-head attention from each token to all tokens of the memory.

    Keys and values depend only on the memory: `project_kv` computes them once for an image, and
    `forward` reads them from `context.memory_kv`.

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
        ValueError: `dim` is not a multiple of `num_heads`, or `num_heads` not of `num_kv_heads`.
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
        self.queries_per_kv = num_heads // self.kv_heads
        self.attention_dropout = attention_dropout
        self.q = nn.Linear(dim, dim, bias=bias)
        self.kv = nn.Linear(memory_dim, 2 * self.kv_heads * (dim // num_heads), bias=bias)
        self.q_norm = q_norm or nn.Identity()
        self.k_norm = k_norm or nn.Identity()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(dropout)

    def project_kv(self, memory: Tensor) -> KeyValue:
        """(batch, tokens, memory_dim) -> two of (batch, kv_heads, tokens, head_dim)"""
        key, value = rearrange(
            self.kv(memory),
            "batch tokens (two heads head_dim) -> two batch heads tokens head_dim",
            two=2,
            heads=self.kv_heads,
        )
        return self.k_norm(key), value

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        assert context.memory_kv is not None, "cross-attention without a memory"
        key, value = context.memory_kv
        pattern = "batch tokens (heads head_dim) -> batch heads tokens head_dim"
        gathered = context.attention_fn(
            self.q_norm(rearrange(self.q(x), pattern, heads=self.num_heads)),
            repeat_kv(key, self.queries_per_kv),
            repeat_kv(value, self.queries_per_kv),
            dropout=self.attention_dropout if self.training else 0.0,
        )
        tokens: Tensor = self.proj_drop(self.proj(rearrange(gathered, MERGE_HEADS)))
        return tokens
