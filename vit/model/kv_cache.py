"""What a decoder remembers between two words, so that each is computed once.

It belongs to the caller, who may keep some of its rows, repeat them (beam search), or throw it
away. Keys and values of the image are made once and never grow; those of the words grow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vit.model.attention import KeysValues


@dataclass
class Layer:
    """The memory of one block.

    Args:
        image: Keys and values of the image's tokens, each (batch, heads, memory_tokens, head_dim);
            None in a decoder that looks at nothing.
        words: Those of the words so far, each (batch, heads, tokens, head_dim); None before any.
    """

    image: KeysValues | None = None
    words: KeysValues | None = None

    def extend(self, key: Tensor, value: Tensor) -> KeysValues:
        """Keys and values of all words, those of the new ones last."""
        if self.words is not None:
            key, value = (
                torch.cat([old, new], dim=2)
                for old, new in zip(self.words, (key, value), strict=True)
            )
        self.words = key, value
        return key, value

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self.image, self.words = (
            None if pair is None else (pair[0][rows], pair[1][rows])
            for pair in (self.image, self.words)
        )


@dataclass
class Cache:
    """The memory of a decoder, block by block, and how many words it has read."""

    layers: list[Layer] = field(default_factory=list)
    length: int = 0

    @classmethod
    def of(cls, images: Sequence[KeysValues | None]) -> "Cache":
        """A memory before the first word."""
        return cls([Layer(image) for image in images])

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; one may come twice.

        Args:
            rows: (kept,), int64.
        """
        for layer in self.layers:
            layer.select(rows)
