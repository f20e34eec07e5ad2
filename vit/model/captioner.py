"""Captioner: a VisionTransformer with a text decoder.

    memory = encoder(images)          all tokens after the last norm
    logits = decoder(ids, memory)     each token attends to those before it, and to the memory

Source: Vaswani et al., section 3.1, arXiv:1706.03762; Vinyals et al., "Show and Tell",
arXiv:1411.4555, with Transformers as encoder and decoder.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit.config import ModelConfig
from vit.model.attention import AttentionContext
from vit.model.decoder import TextDecoder
from vit.model.kv_cache import KVCache
from vit.model.vision_transformer import VisionTransformer


class CaptionerOutput(NamedTuple):
    """Output of `Captioner.forward`."""

    class_logits: Tensor
    """(batch, classes); (batch, 0) without a head."""
    caption_logits: Tensor
    """Logits of the next token at each position, (batch, tokens, vocab)."""


class Captioner(VisionTransformer):
    """Encoder, with or without a classification head, and decoder with cross-attention to it.

    The encoder's parameters have the names that they have in a VisionTransformer; the decoder's
    start with `decoder.`.

    Args:
        decoder: The text decoder.
    """

    def __init__(self, config: ModelConfig, decoder: TextDecoder) -> None:
        super().__init__(config)
        self.decoder = decoder

    def encode_images(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits, (batch, classes or 0), and the memory, (batch, tokens, dim).

        Args:
            images: (batch, channels, height, width).
        """
        tokens, context = self.encode(images)
        return self.forward_head(tokens, context), tokens

    def encode_images_packed(self, images: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Class logits, (images, classes or 0), and memories, (tokens, dim), of `encode_packed`."""
        outputs: dict[int, tuple[Tensor, Tensor]] = {}
        for indices, tokens, context in self.encode_packed(images):
            logits = self.forward_head(tokens, context)
            outputs |= zip(indices, zip(logits, tokens, strict=True), strict=True)
        ordered = [outputs[index] for index in range(len(images))]
        return torch.stack([logits for logits, _ in ordered]), [memory for _, memory in ordered]

    def forward_head(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """Output of `encode` -> class logits, (batch, classes), or (batch, 0) without a head."""
        if not self.num_classes:
            return tokens.new_zeros(tokens.shape[0], 0)
        return super().forward_head(tokens, context)

    def forward(  # type: ignore[override]
        self, images: Tensor, ids: Tensor, counted: Tensor | None = None
    ) -> CaptionerOutput:
        """Class logits, and logits of the next token at each position.

        Args:
            images: (batch, channels, height, width).
            ids: Token ids, (batch, tokens), int64; ids after the end token change nothing.
            counted: As for TextDecoder.
        """
        class_logits, memory = self.encode_images(images)
        return CaptionerOutput(class_logits, self.decoder(ids, memory, counted=counted))


class CachedDecoder:
    """A decoder with its cache, from `init_cache`: an `IncrementalDecoder` for generation."""

    def __init__(self, decoder: TextDecoder, cache: KVCache) -> None:
        self.decoder, self.cache = decoder, cache

    def __call__(self, ids: Tensor) -> Tensor:
        """(rows, new tokens) -> logits of the token after the last one, (rows, vocab)"""
        return self.decoder.logits(self.decoder.hidden_states(ids, self.cache)[:, -1])

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order, (kept,) int64; a row may be repeated."""
        self.cache.select_rows(rows)


def use_column_major_weights(decoder: TextDecoder) -> None:
    """Store the decoder's weight matrices column by column, for inference only.

    On the CPU a product with few rows, such as one token of 16 captions, then takes half to two
    thirds of the time; one with many rows takes as long as before. Names, shapes and values stay,
    but safetensors does not save such matrices.
    """
    for layer in decoder.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            layer.weight.data = layer.weight.data.T.contiguous().T


def caption_losses(
    logits: Tensor, ids: Tensor, pad: int, *, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Summed next-token cross-entropy of each caption, and its number of target tokens.

    Args:
        logits: After each token but the last, (batch, tokens - 1, vocab).
        ids: Token ids, (batch, tokens), padded with `pad`.
        pad: Id of padding, which has no loss.
        smoothing: Label smoothing.

    Returns:
        Two tensors (batch,); the losses in float32 or wider.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = ids[:, 1 : 1 + logits.shape[1]]
    losses = F.cross_entropy(
        logits.transpose(1, 2),
        targets,
        ignore_index=pad,
        label_smoothing=smoothing,
        reduction="none",
    )
    return losses.sum(dim=1), (targets != pad).sum(dim=1)


def matched_and_shuffled_losses(
    decoder: TextDecoder, memory: Tensor, ids: Tensor, shuffled_ids: Tensor, pad: int
) -> Tensor:
    """`caption_losses` of the images' own captions, and of captions of other images.

    If captions are as likely with other images, the decoder ignores the image.

    Args:
        memory: Output of the encoder, (batch, memory_tokens, dim).
        ids, shuffled_ids: Captions of these images and of others, (batch, tokens), padded.

    Returns:
        float64 on the CPU, (4, batch): losses and token counts, then those of `shuffled_ids`.
    """
    shuffled = caption_losses(decoder(shuffled_ids[:, :-1], memory), shuffled_ids, pad)
    # last, so that MoE layers keep the routing of the right captions
    logits = decoder(ids[:, :-1], memory, counted=ids[:, 1:] != pad)
    matched = caption_losses(logits, ids, pad)
    return torch.stack([part.cpu().double() for part in (*matched, *shuffled)])
