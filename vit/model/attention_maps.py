"""Where a network looks: attention that remembers its weights."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vit.model.attention import AttentionContext, attention_weights, mixed

if TYPE_CHECKING:
    from vit.model.vision_transformer import VisionTransformer


class Recorder:
    """Attends by the formula and keeps the weights, one entry a call, in `maps`."""

    def __init__(self) -> None:
        self.maps: list[Tensor] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """As `attend`; keeps (batch, heads, tokens, memory_tokens)."""
        weights = attention_weights(query, key, mask=mask)
        self.maps.append(weights)
        return mixed(weights, value, dropout=dropout)


class Recording(NamedTuple):
    """What `record` saw; everything is part of one graph and has gradients."""

    logits: Tensor
    """(batch, classes)."""
    maps: list[Tensor]
    """Attention weights of every block, each (batch, heads, tokens, tokens)."""
    pooling: Tensor | None
    """Weights of attention pooling, (batch, heads, 1, patches); None where another one pools."""
    tokens: Tensor
    """After the last norm, (batch, tokens, dim)."""
    places: AttentionContext
    """Where the tokens are; `places.grid` is (rows, cols) of the patches."""


def record(model: "VisionTransformer", images: Tensor) -> Recording:
    """Logits and attention maps of one pass; nothing in `model` is changed or left behind.

    Maps have gradients wherever torch makes any, also where all weights are frozen.

    Args:
        model: In training or evaluation, as it is; `maps` are the weights before dropout.
        images: (batch, channels, height, width).
    """
    if not images.requires_grad:
        images = images.clone().requires_grad_(torch.is_grad_enabled())
    recorder = Recorder()
    tokens, places = model.encode(images, attend=recorder)
    maps = [*recorder.maps]
    logits = model.head(model.pool(tokens, places))
    pooling = recorder.maps[-1] if len(recorder.maps) > len(maps) else None
    return Recording(logits, maps, pooling, tokens, places)
