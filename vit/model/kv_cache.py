"""Key-value cache of a text decoder: keys and values of earlier tokens are computed once.

The caller owns the cache and may select, reorder or repeat its rows (beam search). Keys and values
of the image are computed once and never grow; those of the text grow with each token.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vit.model.attention import KeyValue


@dataclass
class LayerCache:
    """The cache of one block.

    Args:
        memory_kv: Keys and values of the image's tokens, each (batch, heads, memory_tokens,
            head_dim); None in a decoder without cross-attention.
        token_kv: Those of the text so far, each (batch, heads, tokens, head_dim); None before the
            first token.
    """

    memory_kv: KeyValue | None = None
    token_kv: KeyValue | None = None

    def update(self, key: Tensor, value: Tensor) -> KeyValue:
        """Append the newest tokens' keys and values, and return those of all tokens."""
        if self.token_kv is not None:
            key, value = (
                torch.cat([old, new], dim=2)
                for old, new in zip(self.token_kv, (key, value), strict=True)
            )
        self.token_kv = key, value
        return key, value

    def select_rows(self, rows: Tensor, *, memory: bool = True) -> None:
        """Keep these rows of the batch, in this order; without `memory`, only those of the text."""
        if memory:
            self.memory_kv = pick_rows(self.memory_kv, rows)
        self.token_kv = pick_rows(self.token_kv, rows)


def pick_rows(pair: KeyValue | None, rows: Tensor) -> KeyValue | None:
    """These rows of keys and values, if there are any."""
    return None if pair is None else (pair[0][rows], pair[1][rows])


@dataclass
class KVCache:
    """The cache of a decoder.

    Args:
        layers: One entry for each block.
        length: Number of tokens read so far.
        images: The image of each row, (batch,) int64; None while each row has its own.
        memory_mask: True at the memory's tokens that are read, (batch, 1, 1, memory_tokens); None
            for all.
    """

    layers: list[LayerCache] = field(default_factory=list)
    length: int = 0
    images: Tensor | None = None
    memory_mask: Tensor | None = None

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch, (kept,) int64, in this order; a row may be repeated."""
        old, self.images = self.images, rows if self.images is None else self.images[rows]
        # beams mostly change places within their image, whose keys and values are large
        moved = old is None or not torch.equal(old, self.images)
        for layer in self.layers:
            layer.select_rows(rows, memory=moved)
        if moved and self.memory_mask is not None:
            self.memory_mask = self.memory_mask[rows]
