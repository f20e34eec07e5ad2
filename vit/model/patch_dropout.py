"""Training on a part of the patches: the others of an image never enter the blocks.

Source: Liu et al., "PatchDropout", section 3, arXiv:2208.07220; Li et al., "Scaling Language-Image
Pre-training via Masking" (FLIP), section 3, arXiv:2212.00794.
"""

import torch
from torch import Tensor, nn

from vit.model.attention import AttentionContext


class KeepAll(nn.Module):
    """Leaves out nothing."""

    def forward(self, tokens: Tensor, places: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> the same, and the places of these tokens"""
        return tokens, places


class PatchDropout(nn.Module):
    """Leaves out other patches of each image in each step, as many of all; none in evaluation.

    Those that stay keep their order, which merging and the capacity of experts go by.

    Args:
        share: Share of the patches that is left out, in [0, 1); at least one stays.
        prefix: Tokens in front of the patches, which stay.
    """

    def __init__(self, share: float, *, prefix: int) -> None:
        super().__init__()
        self.share, self.prefix = share, prefix

    def draw(self, tokens: Tensor) -> Tensor:
        """Which tokens stay, (batch, prefix + kept): numbers along the tokens."""
        patches = tokens.shape[1] - self.prefix
        kept = max(1, round(patches * (1 - self.share)))
        noise = torch.rand(tokens.shape[0], patches, device=tokens.device)
        prefix = torch.arange(self.prefix, device=tokens.device).expand(tokens.shape[0], -1)
        patches_kept = noise.topk(kept, dim=1).indices.sort(dim=1).values
        return torch.cat([prefix, self.prefix + patches_kept], dim=1)

    def forward(self, tokens: Tensor, places: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, prefix + kept, dim), and the places of these tokens"""
        if not self.training:
            return tokens, places
        return picked(tokens, places, self.draw(tokens))


def picked(
    tokens: Tensor, places: AttentionContext, index: Tensor
) -> tuple[Tensor, AttentionContext]:
    """The tokens at `index`, (batch, kept), and their places."""

    def move(x: Tensor) -> Tensor:
        many = x.expand(index.shape[0], -1, -1)
        return many.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    return move(tokens), places._replace(rotate=places.rotate.moved(move))
