"""TextDecoder: words so far and an image in, one logit per next token out.

    z0 = E[ids] + positions
    z  = block_depth( ... block_1(z0))      each word looks at those before it, and at the image
    logits = norm(z) Eᵀ                     the embedding is used twice

Without cross-attention in its blocks it is a language model.

Source: Vaswani et al., "Attention Is All You Need", section 3, arXiv:1706.03762; the embedding used
twice: Press and Wolf, arXiv:1608.05859; hidden words: Bowman et al., "Generating Sentences from a
Continuous Space", section 3.1, arXiv:1511.06349.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.attention import Attend, AttentionContext, attend
from vit.model.blocks import Block, DecoderBlock
from vit.model.kv_cache import Cache
from vit.model.text_position_embedding import TextPositions


class HideWords(nn.Module):
    """Hides some words in training, so that the next ones must be told from the image.

    Args:
        rate: Probability of hiding an embedded token, in [0, 1).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> the same; a hidden token is zeros, the others are as they are"""
        if not self.training or not self.rate:
            return x
        return x * x.new_empty(*x.shape[:2], 1).bernoulli_(1 - self.rate)


class TextDecoder(nn.Module):
    """Reads words from left to right.

    Args:
        vocab_size: Tokens there are.
        dim: Width of a token.
        positions: Adds or keeps the places of words.
        blocks: In order; those of a language model have no cross-attention.
        norm_memory: Normalises the tokens of the image.
        norm: Normalises all tokens after the last block.
        hide: Hides words during training.
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
        hide: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, dim)
        self.hide = hide
        self.positions = positions
        self.pos_drop = nn.Dropout(dropout)
        self.norm_memory = norm_memory
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    @property
    def most_tokens(self) -> int:
        """Longest text, begin and end included."""
        return self.positions.most

    @property
    def most_words(self) -> int:
        """Longest sentence without begin and end: a last place may still tell the end."""
        return self.most_tokens - 1

    def look(self, memory: Tensor | None) -> Cache:
        """A cache before the first word, with what the blocks see of the image.

        Args:
            memory: Tokens of the image, (batch, memory_tokens, memory_dim); None for a language
                model.
        """
        if memory is None:
            return Cache.of([None] * len(self.blocks))
        tokens = self.norm_memory(memory)
        seers = [block for block in self.blocks if isinstance(block, DecoderBlock)]
        return Cache.of([block.cross_attn.look(tokens) for block in seers])

    def forward(
        self, ids: Tensor, memory: Tensor | None = None, *, padding: Tensor | None = None
    ) -> Tensor:
        """Logits of the token after each one.

        Args:
            ids: (batch, tokens), int64.
            memory: Tokens of the image, (batch, memory_tokens, memory_dim); None for a language
                model.
            padding: True where there is no word, (batch, tokens). What stands after the words
                needs none: nobody looks ahead.

        Returns:
            (batch, tokens, vocab).

        Raises:
            ValueError: There are more tokens than positions.
        """
        return self.logits(self.states(ids, self.look(memory), padding=padding))

    def read(self, ids: Tensor, cache: Cache, *, attend: Attend = attend) -> Tensor:
        """Logits after each of further tokens, which the cache then knows.

        Args:
            ids: (batch, new), int64.
            cache: From `look`, or as another `read` left it.
            attend: How attention mixes the values.

        Returns:
            (batch, new, vocab).

        Raises:
            ValueError: There are more tokens than positions.
        """
        return self.logits(self.states(ids, cache, attend=attend))

    def logits(self, states: Tensor) -> Tensor:
        """(..., dim) -> (..., vocab)"""
        return F.linear(states, self.token_embed.weight)

    def states(
        self,
        ids: Tensor,
        cache: Cache,
        *,
        padding: Tensor | None = None,
        attend: Attend = attend,
    ) -> Tensor:
        """As `read`, before the logits: (batch, new, dim).

        Args:
            ids, cache, attend: As for `read`.
            padding: As for `forward`; only where this reads all there is, since a cache does not
                know which of its words are none.
        """
        first, new = cache.length, ids.shape[1]
        if first + new > self.most_tokens:
            raise ValueError(
                f"{first + new} tokens, but there are positions for {self.most_tokens}"
            )
        x, rotate = self.positions(self.hide(self.token_embed(ids)), first, padding)
        x = self.pos_drop(x)
        mask = look_back(first, new, x.device, padding)
        places = AttentionContext(rotate=rotate, mask=mask, attend=attend)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x, _ = block(x, places._replace(remember=layer.extend, memory=layer.image))
        cache.length += new
        states: Tensor = self.norm(x)
        return states


def look_back(
    first: int, new: int, device: torch.device, padding: Tensor | None = None
) -> Tensor | None:
    """True where a word may look: at itself and those before it; None where that is everywhere.

    Args:
        first: Words before the new ones.
        new: New words.
        padding: True where there is no word, (batch, new), where `first` is 0.

    Returns:
        (new, first + new), or (batch, 1, new, new) with `padding`.
    """
    if new == 1 and padding is None:
        return None
    # aligned at the end: the last new word sees everything (torch's is_causal aligns the start)
    mask = torch.ones(new, first + new, dtype=torch.bool, device=device).tril(first)
    if padding is None:
        return mask
    assert not first, "a cache does not know which of its words are padding"
    itself = torch.eye(new, dtype=torch.bool, device=device)  # no row of scores is all empty
    return (mask & ~padding[:, None, None, :]) | itself
