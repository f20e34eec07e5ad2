"""TextDecoder: an autoregressive Transformer decoder with cross-attention to an image.

    z0 = E[ids] + positions
    z  = block_depth( ... block_1(z0))      causal self-attention, and cross-attention to the image
    logits = norm(z) Eᵀ                     tied embedding

Without cross-attention in its blocks it is a language model.

Source: Vaswani et al., "Attention Is All You Need", section 3, arXiv:1706.03762; rotary positions:
Su et al., section 3.4.2, arXiv:2104.09864 (channels of the two halves of a head are paired, not
neighbours); relative positions: Raffel et al., "T5", section 2.1, arXiv:1910.10683, without
buckets; tied embedding: Press and Wolf, arXiv:1608.05859; word dropout: Bowman et al.,
"Generating Sentences from a Continuous Space", section 3.1, arXiv:1511.06349.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.attention import (
    AttentionContext,
    AttentionFunction,
    apply_mask,
    dot_product_attention,
)
from vit.model.blocks import Block, DecoderBlock
from vit.model.kv_cache import KVCache, LayerCache
from vit.model.moe import MixtureOfExperts
from vit.model.position_embedding import TEMPERATURE, sinusoidal_1d
from vit.model.rotary_embedding import Rotation


class WordDropout(nn.Module):
    """Zeroes random token embeddings in training, so that the decoder depends on the image.

    Args:
        rate: Probability of zeroing a token, in [0, 1).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim); kept tokens are not scaled"""
        if not self.training or not self.rate:
            return x
        return x * x.new_empty(*x.shape[:2], 1).bernoulli_(1 - self.rate)


class TextPositions(nn.Module):
    """Base class of the position embeddings of text.

    Args:
        max_length: Longest sequence in tokens.
        dim: Width of a token; of a head for rotary positions.
    """

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        self.max_length, self.dim = max_length, dim

    def forward(self, x: Tensor, offset: int) -> tuple[Tensor, Rotation | None]:
        """Tokens with positions, (batch, tokens, dim), and the rotation of queries and keys.

        Args:
            x: Embedded tokens, (batch, tokens, dim).
            offset: Position of the first token.
        """
        raise NotImplementedError

    def add_bias(self, mask: Tensor | None, offset: int, new: int) -> Tensor | None:  # noqa: ARG002
        """The mask of self-attention, and what the positions add to its scores.

        Args:
            mask: That of `causal_mask`.
            offset, new: As for it.
        """
        return mask


class LearnedTextPositions(TextPositions):
    """Adds one learned vector for each position."""

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__(max_length, dim)
        self.pos_embed = nn.Parameter(torch.zeros(max_length, dim))

    def forward(self, x: Tensor, offset: int) -> tuple[Tensor, Rotation | None]:
        return x + self.pos_embed[offset : offset + x.shape[1]], None


class SinusoidalTextPositions(TextPositions):
    """Adds sines and cosines of the position to embeddings scaled by √dim."""

    table: Tensor

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__(max_length, dim)
        self.register_buffer("table", sinusoidal_1d((max_length, 1), dim))

    def forward(self, x: Tensor, offset: int) -> tuple[Tensor, Rotation | None]:
        return x * self.dim**0.5 + self.table[offset : offset + x.shape[1]], None


class RotaryTextPositions(TextPositions):
    """Rotates queries and keys by their positions; tokens are not changed."""

    angles: Tensor

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__(max_length, dim)
        waves = dim // 2
        frequencies = TEMPERATURE ** -(torch.arange(waves, dtype=torch.float64) / waves)
        angles = torch.outer(torch.arange(max_length, dtype=torch.float64), frequencies)
        self.register_buffer("angles", angles.float())

    def forward(self, x: Tensor, offset: int) -> tuple[Tensor, Rotation | None]:
        return x, Rotation(self.angles[offset : offset + x.shape[1]].unsqueeze(0))


class RelativeTextPositions(TextPositions):
    """Adds a learned number to the scores of a head for each distance of two tokens.

    All blocks have the same numbers, as T5's; each distance has its own, up to the longest.

    Args:
        max_length, dim: As for TextPositions.
        num_heads: Query heads.
    """

    def __init__(self, max_length: int, dim: int, *, num_heads: int) -> None:
        super().__init__(max_length, dim)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(max_length, num_heads))

    def forward(self, x: Tensor, offset: int) -> tuple[Tensor, Rotation | None]:  # noqa: ARG002
        return x, None

    def add_bias(self, mask: Tensor | None, offset: int, new: int) -> Tensor:
        """(1, heads, new, offset + new)"""
        table = self.relative_position_bias_table
        places = torch.arange(offset + new, device=table.device)
        distances = (places[offset:, None] - places).clamp(min=0)  # later tokens are masked
        bias = rearrange(table[distances], "queries keys heads -> 1 heads queries keys")
        return apply_mask(bias, mask)


class TextDecoder(nn.Module):
    """Predicts the next token from the tokens before it and the image.

    Args:
        vocab_size: Size of the vocabulary.
        dim: Width of a token.
        positions: Position embedding.
        blocks: In order; those of a language model have no cross-attention.
        norm_memory: Normalises the tokens of the image.
        norm: Normalises all tokens after the last block.
        word_dropout: Zeroes token embeddings during training.
        dropout: Probability of dropping an embedded activation during training.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        positions: TextPositions,
        blocks: Sequence[Block],
        norm_memory: nn.Module,
        norm: nn.Module,
        word_dropout: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, dim)
        self.word_dropout = word_dropout
        self.positions = positions
        self.pos_drop = nn.Dropout(dropout)
        self.norm_memory = norm_memory
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens, begin and end included."""
        return self.positions.max_length

    @property
    def max_new_tokens(self) -> int:
        """Longest caption without begin and end; the end token needs no position."""
        return self.max_length - 1

    def init_cache(self, memory: Tensor | None, memory_mask: Tensor | None = None) -> KVCache:
        """An empty cache with each block's keys and values of the image.

        Args:
            memory: Tokens of the image, (batch, memory_tokens, memory_dim); None for a language
                model.
            memory_mask: False at padding, so that memories of several lengths share a batch,
                (batch, memory_tokens), at least one True in each row; None for no padding. The
                inverse of torch's `memory_key_padding_mask`.
        """
        if memory is None:
            assert memory_mask is None, "a mask without a memory"
            return KVCache([LayerCache() for _ in self.blocks])
        tokens = self.norm_memory(memory)
        blocks = [block for block in self.blocks if isinstance(block, DecoderBlock)]
        mask = None if memory_mask is None else memory_mask[:, None, None]
        layers = [LayerCache(block.cross_attn.project_kv(tokens)) for block in blocks]
        return KVCache(layers, memory_mask=mask)

    def forward(
        self,
        ids: Tensor,
        memory: Tensor | None = None,
        *,
        memory_mask: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token at each position, (batch, tokens, vocab).

        Padding on the right changes no logits of the text, since attention is causal.

        Args:
            ids: (batch, tokens), int64.
            memory, memory_mask: As in `init_cache`.
            counted: True at tokens that the routing of experts counts, (batch, tokens): those with
                a next token. All if omitted.
        """
        layers = [layer for layer in self.modules() if isinstance(layer, MixtureOfExperts)]
        for layer in layers:
            layer.counted = counted
        hidden = self.hidden_states(ids, self.init_cache(memory, memory_mask))
        for layer in layers:
            layer.counted = None
        return self.logits(hidden)

    def decode(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Logits after each further token, (batch, new, vocab); the cache is extended.

        Args:
            ids: (batch, new), int64.
            cache: From `init_cache`, or as an earlier call left it.
        """
        return self.logits(self.hidden_states(ids, cache))

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., dim) -> (..., vocab)"""
        return F.linear(hidden_states, self.token_embed.weight)

    def hidden_states(
        self,
        ids: Tensor,
        cache: KVCache,
        *,
        attention_fn: AttentionFunction = dot_product_attention,
    ) -> Tensor:
        """Output of the last norm, (batch, new, dim), from the arguments of `decode`."""
        offset, new = cache.length, ids.shape[1]
        if offset + new > self.max_length:
            raise ValueError(
                f"{offset + new} tokens, but there are positions for {self.max_length}"
            )
        x, rope = self.positions(self.word_dropout(self.token_embed(ids)), offset)
        x = self.pos_drop(x)
        mask = self.positions.add_bias(causal_mask(offset, new, x.device), offset, new)
        context = AttentionContext(
            rope=rope, mask=mask, attention_fn=attention_fn, memory_mask=cache.memory_mask
        )
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x, _ = block(x, context.replace(kv_cache=layer, memory_kv=layer.memory_kv))
        cache.length += new
        hidden: Tensor = self.norm(x)
        return hidden


def causal_mask(offset: int, new: int, device: torch.device) -> Tensor | None:
    """True where a new token may attend, (new, offset + new): itself and those before it.

    None for a single token, which may attend to all.
    """
    if new == 1:
        return None
    # aligned at the end: the last new token attends to all (is_causal aligns the start);
    # torch 2.8 cannot export `tril` with a diagonal that is an input
    positions = torch.arange(offset + new, device=device)
    return positions <= positions[offset:, None]
