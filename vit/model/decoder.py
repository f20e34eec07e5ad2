"""TextDecoder: an autoregressive Transformer decoder with cross-attention to an image.

    z0 = E[ids] + positions
    z  = block_depth( ... block_1(z0))      causal self-attention, and cross-attention to the image
    logits = norm(z) Eᵀ                     tied embedding

Without cross-attention in its blocks it is a language model.

Source: Vaswani et al., "Attention Is All You Need", section 3, arXiv:1706.03762; tied embedding:
Press and Wolf, arXiv:1608.05859; word dropout: Bowman et al., "Generating Sentences from a
Continuous Space", section 3.1, arXiv:1511.06349.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.attention import AttentionContext, AttentionFunction, dot_product_attention
from vit.model.blocks import Block, DecoderBlock
from vit.model.kv_cache import KVCache
from vit.model.moe import MixtureOfExperts
from vit.model.text_position_embedding import TextPositions


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

    def init_cache(self, memory: Tensor | None) -> KVCache:
        """An empty cache with each block's keys and values of the image.

        Args:
            memory: Tokens of the image, (batch, memory_tokens, memory_dim); None for a language
                model.
        """
        if memory is None:
            return KVCache.from_memory([None] * len(self.blocks))
        tokens = self.norm_memory(memory)
        blocks = [block for block in self.blocks if isinstance(block, DecoderBlock)]
        return KVCache.from_memory([block.cross_attn.project_kv(tokens) for block in blocks])

    def forward(
        self,
        ids: Tensor,
        memory: Tensor | None = None,
        *,
        counted: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token at each position.

        Padding on the right changes no logits of the text, since attention is causal.

        Args:
            ids: (batch, tokens), int64.
            memory: As in `init_cache`.
            counted: True at tokens that the routing of experts counts, (batch, tokens): those with
                a next token. All if omitted.

        Returns:
            (batch, tokens, vocab).
        """
        layers = [layer for layer in self.modules() if isinstance(layer, MixtureOfExperts)]
        for layer in layers:
            layer.counted = counted
        hidden = self.hidden_states(ids, self.init_cache(memory))
        for layer in layers:
            layer.counted = None
        return self.logits(hidden)

    def decode(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Logits after each of some further tokens, which are added to the cache.

        Args:
            ids: (batch, new), int64.
            cache: From `init_cache`, or as an earlier call left it.

        Returns:
            (batch, new, vocab).
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
        """Output of the last norm, (batch, new, dim); further tokens are added to the cache.

        Args:
            ids, cache: As for `decode`.
            attention_fn: Implementation of attention.
        """
        offset, new = cache.length, ids.shape[1]
        if offset + new > self.max_length:
            raise ValueError(
                f"{offset + new} tokens, but there are positions for {self.max_length}"
            )
        x, rope = self.positions(self.word_dropout(self.token_embed(ids)), offset)
        x = self.pos_drop(x)
        mask = causal_mask(offset, new, x.device)
        context = AttentionContext(rope=rope, mask=mask, attention_fn=attention_fn)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x, _ = block(x, context.replace(kv_cache=layer, memory_kv=layer.memory_kv))
        cache.length += new
        hidden: Tensor = self.norm(x)
        return hidden


def causal_mask(offset: int, new: int, device: torch.device) -> Tensor | None:
    """True where a token may attend, (new, offset + new): itself and those before it.

    Args:
        offset: Tokens in the cache.
        new: New tokens.
        device: Device of the mask.

    Returns:
        The mask; None for a single token, which may attend to all.
    """
    if new == 1:
        return None
    # aligned at the end: the last new token attends to all (is_causal aligns the start);
    # torch 2.8 cannot export `tril` with a diagonal that is an input
    positions = torch.arange(offset + new, device=device)
    return positions <= positions[offset:, None]
