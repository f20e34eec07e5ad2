"""Multi-head attention: among the tokens of an image or a text, and from a text to an image.

    attention(Q, K, V) = softmax(Q Kᵀ / √head_dim + mask) V

Source: Vaswani et al., "Attention Is All You Need", section 3.2, arXiv:1706.03762.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F

from vit.config import ModelConfig
from vit.model.normalization import build_norm
from vit.model.position_embedding import Grid
from vit.model.rotary_embedding import Rotation

if TYPE_CHECKING:
    from vit.model.kv_cache import LayerCache
    from vit.model.vision_transformer import VisionTransformer

MAX_EXPLICIT_TOKENS = 1024
"""Longest sequence whose score matrix the CPU holds; its memory grows with the square."""
SPLIT_HEADS = "batch tokens (heads head_dim) -> batch heads tokens head_dim"
MERGE_HEADS = "batch heads tokens head_dim -> batch tokens (heads head_dim)"
KeyValue = tuple[Tensor, Tensor]
"""Keys and values, each (batch, heads, tokens, head_dim)."""


class AttentionFunction(Protocol):
    """The signature of `dot_product_attention`, for implementations that replace it."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor: ...


def dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Scaled dot-product attention, by the faster of two equivalent implementations.

    In half precision the CPU's fused kernel is 2 to 5 times slower than plain matrix products
    (forward and backward, 64 to 200 tokens). Elsewhere it is as fast or faster, and does not store
    the scores.

    Args:
        query: (batch, heads, tokens, head_dim).
        key, value: (batch, heads, memory_tokens, head_dim).
        mask: Boolean, True where a query may attend, or a float bias added to the scores;
            (tokens, memory_tokens) or anything that broadcasts to the scores.
        dropout: Probability of dropping an attention weight.

    Returns:
        (batch, heads, tokens, head_dim).
    """
    # The precision of the products is that of value: autocast leaves normalised queries in float32.
    half = value.dtype in (torch.bfloat16, torch.float16)
    if half and value.device.type == "cpu" and value.shape[-2] <= MAX_EXPLICIT_TOKENS:
        return explicit_attention(query, key, value, mask=mask, dropout=dropout)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """`dot_product_attention` by the formula; stores the whole score matrix."""
    return weighted_values(attention_weights(query, key, mask=mask), value, dropout=dropout)


def weighted_values(weights: Tensor, value: Tensor, *, dropout: float) -> Tensor:
    """Product of attention weights, after dropout, and values."""
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
    return apply_mask(scores, mask).softmax(dim=-1)


def apply_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Add a mask, as in `dot_product_attention`, to scores (..., tokens, memory_tokens)."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


class AttentionContext(NamedTuple):
    """What attention layers need besides the tokens; the same for all layers of a forward pass,
    except for the caches of a decoder, of which each layer gets its own."""

    grid: Grid = (0, 0)
    """Rows and columns of the patches."""
    rope: Rotation | None = None
    """Rotary position embedding, applied to queries and keys."""
    mask: Tensor | None = None
    """Attention mask or bias, as in `dot_product_attention`."""
    attention_fn: AttentionFunction = dot_product_attention
    """Implementation of attention."""
    lengths: Tensor | None = None
    """Tokens of each image in a packed row, (images,); None where each is a row of the batch."""
    token_sizes: Tensor | None = None
    """Number of patches merged into each token, (batch, tokens); None without token merging."""
    kv_cache: "LayerCache | None" = None
    """Keys and values of earlier tokens, which self-attention reads and extends."""
    memory_kv: KeyValue | None = None
    """Keys and values of the image's tokens, which cross-attention reads."""
    memory_mask: Tensor | None = None
    """As `mask`, for the tokens that cross-attention reads."""

    def replace(self, **changes: Any) -> "AttentionContext":
        """A copy with other values; unlike `_replace`, torch 2.8 can compile it."""
        values = zip(CONTEXT_FIELDS, self, strict=True)
        chosen: list[Any] = [changes.get(name, value) for name, value in values]
        return AttentionContext(*chosen)


CONTEXT_FIELDS = AttentionContext._fields


def proportional_attention_bias(token_sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """log size: a token of s merged patches counts as s tokens (ToMe's proportional attention).

    Returns:
        (batch, 1, 1, tokens).
    """
    return token_sizes.log()[:, None, None].to(dtype)


class SelfAttention(nn.Module):
    """Multi-head self-attention among the tokens of each image.

    With `num_kv_heads`, each key and value head is shared by an equal group of query heads (Ainslie
    et al., "GQA", section 2.2, arXiv:2305.13245; with 1, Shazeer's multi-query attention,
    arXiv:1911.02150).

    Args:
        rel_pos: Relative position bias, added to the scores; None for none.
        rope: Gives the rotation of this layer's heads, where each has its own; None for one of all.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rel_pos: nn.Module | None = None,
        rope: nn.Module | None = None,
    ) -> None:
        super().__init__()
        dim, head_dim = config.dim, config.dim // config.num_heads
        kv_heads = config.num_kv_heads or config.num_heads
        self.heads = (config.num_heads, kv_heads, kv_heads)
        self.queries_per_kv = config.num_heads // kv_heads
        self.attention_dropout = config.attention_dropout
        self.qkv = nn.Linear(dim, sum(self.heads) * head_dim, bias=config.qkv_bias)
        self.rel_pos = rel_pos
        self.q_norm, self.k_norm = build_qk_norms(config)
        self.norm = build_norm(config) if config.norm_order == "sub" else nn.Identity()
        self.rope = rope
        self.proj = nn.Linear(dim, dim, bias=config.proj_bias)
        self.proj_drop = nn.Dropout(config.dropout)

    def project_qkv(self, x: Tensor, rope: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, tokens, dim) -> query, key, value, each (batch, its heads, tokens, head_dim)"""
        joined = rearrange(self.qkv(x), SPLIT_HEADS, heads=sum(self.heads))
        query, key, value = joined.split(self.heads, dim=1)
        query, key = self.q_norm(query), self.k_norm(key)
        if rope is not None:
            query, key = rope(query), rope(key)
        return query, key, value

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)

        Args:
            x: Tokens.
            context: Positions, mask and cache of the tokens; none by default.
        """
        context = context or AttentionContext()
        rope = context.rope if self.rope is None else self.rope(context.rope)
        query, key, value = self.project_qkv(x, rope)
        if context.kv_cache is not None:
            key, value = context.kv_cache.update(key, value)
        gathered = context.attention_fn(
            query,
            repeat_kv(key, self.queries_per_kv),
            repeat_kv(value, self.queries_per_kv),
            mask=context.mask if self.rel_pos is None else self.rel_pos(context),
            dropout=self.attention_dropout if self.training else 0.0,
        )
        tokens: Tensor = self.proj_drop(self.proj(self.norm(rearrange(gathered, MERGE_HEADS))))
        return tokens


class CrossAttention(nn.Module):
    """Multi-head attention from each token of a text to all tokens of an image, the memory.

    Keys and values depend only on the memory: `project_kv` computes them once for an image, and
    `forward` reads them from `context.memory_kv`.

    Args:
        memory_dim: Width of a token of the memory.
    """

    def __init__(self, config: ModelConfig, *, memory_dim: int) -> None:
        super().__init__()
        dim, head_dim = config.dim, config.dim // config.num_heads
        self.num_heads = config.num_heads
        self.kv_heads = config.num_kv_heads or config.num_heads
        self.queries_per_kv = self.num_heads // self.kv_heads
        self.attention_dropout = config.attention_dropout
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(memory_dim, 2 * self.kv_heads * head_dim)
        self.q_norm, self.k_norm = build_qk_norms(config)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(config.dropout)

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
        gathered = context.attention_fn(
            self.q_norm(rearrange(self.q(x), SPLIT_HEADS, heads=self.num_heads)),
            repeat_kv(key, self.queries_per_kv),
            repeat_kv(value, self.queries_per_kv),
            mask=context.memory_mask,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        tokens: Tensor = self.proj_drop(self.proj(rearrange(gathered, MERGE_HEADS)))
        return tokens


def build_qk_norms(config: ModelConfig) -> tuple[nn.Module, nn.Module]:
    """Norms of each head's queries and keys; identities without `qk_norm`."""
    if not config.qk_norm:
        return nn.Identity(), nn.Identity()
    head_dim = config.dim // config.num_heads
    return build_norm(config, head_dim), build_norm(config, head_dim)


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    """Repeat each key or value head `repeats` times in a row, one for each of its query heads."""
    if repeats == 1:
        return x
    return repeat(
        x, "batch heads tokens head_dim -> batch (heads repeats) tokens head_dim", repeats=repeats
    )


class AttentionRecorder:
    """Explicit attention that appends the weights of each call to `maps`."""

    def __init__(self) -> None:
        self.maps: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """As `dot_product_attention`; records (batch, heads, tokens, memory_tokens)."""
        self.maps.append(attention_weights(query, key, mask=options.get("mask")))
        return weighted_values(self.maps[-1], value, dropout=options.get("dropout", 0.0))


class AttentionRecording(NamedTuple):
    """Result of `record_attention`; all tensors are part of one graph and have gradients."""

    logits: Tensor
    """(batch, classes)."""
    maps: list[Tensor]
    """Attention weights of every block, each (batch, heads, tokens, tokens)."""
    pooling: Tensor | None
    """Weights of attention pooling, (batch, heads, 1, patches); None for other poolings."""
    tokens: Tensor
    """After the last norm, (batch, tokens, dim)."""
    context: AttentionContext
    """Context of the tokens; `context.grid` is (rows, cols) of the patches."""


def record_attention(model: "VisionTransformer", images: Tensor) -> AttentionRecording:
    """Logits and attention maps of one forward pass; `model` is not changed.

    Maps have gradients wherever gradients are enabled, even if all weights are frozen.

    Args:
        model: In training or evaluation mode; `maps` are the weights before dropout.
        images: (batch, channels, height, width).
    """
    if not images.requires_grad:
        images = images.clone().requires_grad_(torch.is_grad_enabled())
    recorder = AttentionRecorder()
    tokens, context = model.encode(images, attention_fn=recorder)
    blocks = len(recorder.maps)
    logits = model.forward_head(tokens, context)
    maps, pooling = recorder.maps[:blocks], recorder.maps[blocks:]
    return AttentionRecording(logits, maps, pooling[0] if pooling else None, tokens, context)
