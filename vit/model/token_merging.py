"""Token merging: in every block, between its two parts, the most alike patches become one.

    A, B: every second patch;  each of A looks for its nearest in B, by the cosine of their keys
    the r nearest of A join their partners:  x = sum of size_i x_i / sum of size_i
    attention:  softmax(Q Kᵀ / √head_dim + log size)

Source: Bolya et al., "Token Merging: Your ViT But Faster", section 3, arXiv:2210.09461.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.model.attention import Attend, AttentionContext, as_mask
from vit.model.blocks import PreNormBlock


def matched(keys: Tensor, count: int) -> Tensor:
    """To which of the new patches each old one goes, (batch, patches): numbers along the new ones.

    First come the patches of A that stay, then those of B, in the order that they had.

    Args:
        keys: (batch, patches, head_dim).
        count: How many patches there are to be fewer; at most half of them.
    """
    batch, patches, _ = keys.shape
    keys = F.normalize(keys.detach(), dim=-1)
    first, second = keys[:, ::2], keys[:, 1::2]
    alike, partner = (first @ second.transpose(1, 2)).max(dim=-1)
    leaving = torch.zeros_like(partner, dtype=torch.bool)
    leaving = leaving.scatter(1, alike.topk(count, dim=1).indices, True)
    staying = first.shape[1] - count
    of_first = torch.where(leaving, staying + partner, (~leaving).cumsum(dim=1) - 1)
    of_second = staying + torch.arange(second.shape[1], device=keys.device).expand(batch, -1)
    number = torch.arange(patches, device=keys.device)
    # number // 2 counts within A and within B
    place = number // 2 + number % 2 * first.shape[1]
    return torch.cat([of_first, of_second], dim=1)[:, place]


def merge(
    tokens: Tensor, keys: Tensor, places: AttentionContext, *, count: int, prefix: int
) -> tuple[Tensor, AttentionContext]:
    """Merge `count` patches of each image into others, at most half of them.

    A merged token is the mean of its patches, and stands in the middle of them where positions are
    rotary.

    Args:
        tokens: (batch, tokens, dim).
        keys: (batch, heads, tokens, head_dim), as queries meet them: with rotary positions turned.
        places: Of these tokens.
        count: How many tokens there are to be fewer.
        prefix: Tokens in front of the patches; they are never merged.

    Returns:
        (batch, tokens - count, dim), and the places of these tokens.
    """
    batch, length, _ = tokens.shape
    device = tokens.device
    count = min(count, (length - prefix) // 2)
    if count == 0:
        return tokens, places
    target = prefix + matched(keys[:, :, prefix:].mean(dim=1), count)
    target = torch.cat([torch.arange(prefix, device=device).expand(batch, -1), target], dim=1)
    sizes = places.sizes
    if sizes is None:  # at least float32, which counts further than half precision
        sizes = tokens.new_ones(batch, length, dtype=torch.promote_types(tokens.dtype, torch.float))
    merged = sizes.new_zeros(batch, length - count).scatter_add(1, target, sizes)
    weights = (sizes / merged.gather(1, target)).unsqueeze(-1)

    # All images in one dimension, which the CPU scatters twice as fast as two.
    row = target + torch.arange(batch, device=device).unsqueeze(1) * (length - count)
    row = row.flatten().unsqueeze(-1)

    def move(x: Tensor) -> Tensor:
        parts = (x * weights.to(x.dtype)).flatten(0, 1)
        empty = x.new_zeros(batch * (length - count), x.shape[-1])
        sums = empty.scatter_add(0, row.expand(-1, x.shape[-1]), parts)
        return sums.view(batch, length - count, -1)

    return move(tokens), places._replace(
        rotate=places.rotate.moved(move),
        mask=as_mask(merged, tokens.dtype),
        sizes=merged,
    )


class KeepKeys:
    """Attends as it is told, and keeps the keys, (batch, heads, tokens, head_dim), in `key`."""

    key: Tensor

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """As `attend`."""
        self.key = key
        return self.attend(query, key, value, mask=mask, dropout=dropout)


class MergingBlock(PreNormBlock):
    """A PreNormBlock that merges tokens between attention and feed-forward part.

    Args:
        parts, others: As for PreNormBlock.
        count: How many tokens there are to be fewer.
        prefix: Tokens in front of the patches; they are never merged.
    """

    def __init__(self, *parts: Any, count: int, prefix: int, **others: Any) -> None:
        super().__init__(*parts, **others)
        self.count, self.prefix = count, prefix

    def forward(self, x: Tensor, places: AttentionContext) -> tuple[Tensor, AttentionContext]:
        """(batch, tokens, dim) -> (batch, fewer tokens, dim), and the places of these tokens"""
        keeper = KeepKeys(places.attend)
        y = self.attn(self.norm1(x), places._replace(attend=keeper))
        x = x + self.drop_path(self.ls1(y))
        x, places = merge(x, keeper.key, places, count=self.count, prefix=self.prefix)
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x)))), places
