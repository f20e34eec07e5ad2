"""Attention weights of a forward pass, recorded by an attention function that keeps them."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vit.model.attention import AttentionContext, attention_weights, weighted_values

if TYPE_CHECKING:
    from vit.model.vision_transformer import VisionTransformer


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
