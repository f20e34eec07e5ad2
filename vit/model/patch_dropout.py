"""Patch dropout: training on a random subset of the patches of each image.

Source: Liu et al., "PatchDropout", section 3, arXiv:2208.07220; Li et al., "Scaling Language-Image
Pre-training via Masking" (FLIP), section 3, arXiv:2212.00794.
"""

from functools import partial

import torch
from torch import Tensor, nn

from vit.model.attention import AttentionContext


class PatchDropout(nn.Module):
    """Drops random patches of each image in training, the same number for all images.

    The kept patches stay in order, on which token merging and expert capacity depend.

    Args:
        rate: Share of the patches that is dropped, in [0, 1); at least one is kept. 0 is off.
        prefix: Tokens in front of the patches, which are kept.
    """

    def __init__(self, rate: float, *, prefix: int) -> None:
        super().__init__()
        self.rate, self.prefix = rate, prefix

    def sample_indices(self, tokens: Tensor) -> Tensor:
        """Indices of the kept tokens, (batch, prefix + kept)."""
        patches = tokens.shape[1] - self.prefix
        kept = max(1, round(patches * (1 - self.rate)))
        noise = torch.rand(tokens.shape[0], patches, device=tokens.device)
        prefix = torch.arange(self.prefix, device=tokens.device).expand(tokens.shape[0], -1)
        patches_kept = noise.topk(kept, dim=1).indices.sort(dim=1).values
        return torch.cat([prefix, self.prefix + patches_kept], dim=1)

    def forward(self, tokens: Tensor, context: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, prefix + kept, dim), and the context of these tokens"""
        if not self.training or not self.rate:
            return tokens, context
        return gather_tokens(tokens, context, self.sample_indices(tokens))


def take_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """Tokens at `index`: (batch or 1, tokens, dim) and (batch, taken) -> (batch, taken, dim)"""
    every = tokens.expand(index.shape[0], -1, -1)
    return every.gather(1, index.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def gather_tokens(
    tokens: Tensor, context: AttentionContext, index: Tensor
) -> tuple[Tensor, AttentionContext]:
    """The tokens at `index`, (batch, kept), and their context."""
    rope = context.rope
    if rope is not None:
        rope = rope.map_tokens(partial(take_tokens, index=index))
    return take_tokens(tokens, index), context.replace(rope=rope)
