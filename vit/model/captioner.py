"""Captioner: a VisionTransformer that also writes what it sees.

    memory = encoder(images)          all tokens after the last norm
    words  = decoder(ids, memory)     each word looks at those before it, and at the memory

Source: Vaswani et al., section 3.1, arXiv:1706.03762; Vinyals et al., "Show and Tell",
arXiv:1411.4555, with Transformers in both places.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit.model.attention import Attend, AttentionContext, attend
from vit.model.decoder import TextDecoder
from vit.model.kv_cache import Cache
from vit.model.sequence_packing import check_packable, pack, same_sizes, unpack
from vit.model.vision_transformer import VisionTransformer


class Said(NamedTuple):
    """Both answers to a batch of images."""

    classes: Tensor
    """Logits, (batch, classes); (batch, 0) without a head."""
    words: Tensor
    """Logits of the token after each one, (batch, tokens, vocab)."""


class Captioner(VisionTransformer):
    """An encoder, with or without a head for classes, and a decoder that looks at its tokens.

    The encoder's parameters have the names that they have in a VisionTransformer; the decoder's
    start with `decoder.`.

    Args:
        decoder: Writes.
        parts: Those of a VisionTransformer.
    """

    def __init__(self, *, decoder: TextDecoder, **parts: Any) -> None:
        super().__init__(**parts)
        self.decoder = decoder

    def see(self, images: Tensor, *, attend: Attend = attend) -> tuple[Tensor, Tensor]:
        """Class logits, (batch, classes or 0), and the memory, (batch, tokens, dim).

        Args:
            images: (batch, channels, height, width).
            attend: How attention mixes the values.
        """
        tokens, places = self.encode(images, attend=attend)
        return self.name(tokens, places), tokens

    def see_packed(self, images: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """As `see`, for images of any sizes and aspects in one pass, as `forward_packed` is.

        Args:
            images: Each (channels, height, width), whole patches.

        Returns:
            Class logits, (images, classes or 0), and the memory of each, (tokens, dim).

        Raises:
            ConfigError: A part of the encoder would mix images that lie in one row.
        """
        self.check_packable()
        groups = same_sizes(images)
        embedded = [self.embed(torch.stack([images[i] for i in group])) for group in groups]
        row, _ = self.transform(*pack(embedded))
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for group, own, (_, places) in zip(groups, unpack(row, embedded), embedded, strict=True):
            found |= zip(group, zip(self.name(own, places), own, strict=True), strict=True)
        ordered = [found[index] for index in range(len(images))]
        return torch.stack([classes for classes, _ in ordered]), [own for _, own in ordered]

    def check_packable(self) -> None:
        """Refuse an encoder that would mix images that lie in one row; the decoder has its own.

        Raises:
            ConfigError: The message says which part does.
        """
        for name, part in self.named_children():
            if name != "decoder":
                check_packable(part)

    def name(self, tokens: Tensor, places: AttentionContext) -> Tensor:
        """Tokens as `encode` makes them -> class logits, (batch, classes or 0)"""
        if not self.num_classes:
            return tokens.new_zeros(tokens.shape[0], 0)
        logits: Tensor = self.head(self.pool(tokens, places))
        return logits

    def forward(self, images: Tensor, ids: Tensor) -> Said:  # type: ignore[override]
        """Logits of classes, and of the token after each one.

        Args:
            images: (batch, channels, height, width).
            ids: Tokens, (batch, tokens), int64; what stands behind the end changes nothing.
        """
        classes, memory = self.see(images)
        return Said(classes, self.decoder(ids, memory))


class CachedContinuation:
    """Sentences in the making, one a row.

    Args:
        decoder: Writes them.
        cache: From `decoder.look`.
    """

    def __init__(self, decoder: TextDecoder, cache: Cache) -> None:
        self.decoder, self.cache = decoder, cache

    def __call__(self, ids: Tensor) -> Tensor:
        """(rows, new tokens) -> logits of what follows the last one, (rows, vocab)"""
        return self.decoder.logits(self.decoder.states(ids, self.cache)[:, -1])

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order, (kept,) int64; one may come twice."""
        self.cache.select(rows)


def lay_out(decoder: TextDecoder) -> None:
    """Store the matrices of a decoder column by column, in a network that only writes.

    On the CPU a product with few rows, such as one word of 16 sentences, takes half to two thirds
    of the time then, and one with many rows as long as before. Names, shapes and values stay, but
    safetensors does not save such matrices.
    """
    for layer in decoder.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            layer.weight.data = layer.weight.data.T.contiguous().T
