"""Token merging (ToMe): each block merges the most similar patches between attention and MLP.

    A, B: every second patch;  each of A is matched to the most similar of B, by cosine of keys
    the r most similar pairs are merged:  x = sum of size_i x_i / sum of size_i
    attention:  softmax(Q Kᵀ / √head_dim + log size)

Source: Bolya et al., "Token Merging: Your ViT But Faster", section 3, arXiv:2210.09461.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.model.attention import AttentionContext, AttentionFunction, proportional_attention_bias
from vit.model.blocks import PreNormBlock


def bipartite_matching(keys: Tensor, count: int) -> Tensor:
    """Index of the merged patch that each patch becomes part of, (batch, patches).

    The kept patches of A come first, then those of B, each in their original order.

    Args:
        keys: (batch, patches, head_dim).
        count: Number of patches to remove; at most half of them.
    """
    batch, patches, _ = keys.shape
    keys = F.normalize(keys.detach(), dim=-1)
    first, second = keys[:, ::2], keys[:, 1::2]
    similarity, partner = (first @ second.transpose(1, 2)).max(dim=-1)
    merged = torch.zeros_like(partner, dtype=torch.bool)
    merged = merged.scatter(1, similarity.topk(count, dim=1).indices, True)
    kept = first.shape[1] - count
    of_first = torch.where(merged, kept + partner, (~merged).cumsum(dim=1) - 1)
    of_second = kept + torch.arange(second.shape[1], device=keys.device).expand(batch, -1)
    number = torch.arange(patches, device=keys.device)
    # number // 2 counts within A and within B
    position = number // 2 + number % 2 * first.shape[1]
    return torch.cat([of_first, of_second], dim=1)[:, position]


def merge_tokens(
    tokens: Tensor, keys: Tensor, context: AttentionContext, *, count: int, prefix: int
) -> tuple[Tensor, AttentionContext]:
    """Merge `count` patches of each image into others, at most half of them.

    A merged token is the mean of its patches; so is its rotary position.

    Args:
        tokens: (batch, tokens, dim).
        keys: (batch, heads, tokens, head_dim), after the rotary position embedding.
        context: Context of the tokens.
        count: Number of tokens to remove.
        prefix: Tokens in front of the patches; they are never merged.

    Returns:
        (batch, tokens - count, dim), and the context of these tokens.
    """
    batch, length, _ = tokens.shape
    device = tokens.device
    count = min(count, (length - prefix) // 2)
    if count == 0:
        return tokens, context
    target = prefix + bipartite_matching(keys[:, :, prefix:].mean(dim=1), count)
    target = torch.cat([torch.arange(prefix, device=device).expand(batch, -1), target], dim=1)
    sizes = context.token_sizes
    if sizes is None:  # at least float32, which counts further than half precision
        sizes = tokens.new_ones(batch, length, dtype=torch.promote_types(tokens.dtype, torch.float))
    merged = sizes.new_zeros(batch, length - count).scatter_add(1, target, sizes)
    weights = (sizes / merged.gather(1, target)).unsqueeze(-1)

    # All images in one dimension, which the CPU scatters twice as fast as two.
    row = target + torch.arange(batch, device=device).unsqueeze(1) * (length - count)
    row = row.flatten().unsqueeze(-1)

    def average(x: Tensor) -> Tensor:
        parts = (x * weights.to(x.dtype)).flatten(0, 1)
        empty = x.new_zeros(batch * (length - count), x.shape[-1])
        sums = empty.scatter_add(0, row.expand(-1, x.shape[-1]), parts)
        return sums.view(batch, length - count, -1)

    return average(tokens), context.replace(
        rope=None if context.rope is None else context.rope.map_tokens(average),
        mask=proportional_attention_bias(merged, tokens.dtype),
        token_sizes=merged,
    )


class KeyRecorder:
    """Attention function that keeps the keys, (batch, heads, tokens, head_dim), in `key`."""

    key: Tensor

    def __init__(self, attention_fn: AttentionFunction) -> None:
        self.attention_fn = attention_fn

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """As `dot_product_attention`."""
        self.key = key
        return self.attention_fn(query, key, value, **options)


class MergingBlock(PreNormBlock):
    """A PreNormBlock that merges tokens between attention and MLP.

    Args:
        parts, others: Arguments of PreNormBlock.
        count: Number of tokens to remove.
        prefix: Tokens in front of the patches; they are never merged.
    """

    def __init__(self, *parts: Any, count: int, prefix: int, **others: Any) -> None:
        super().__init__(*parts, **others)
        self.count, self.prefix = count, prefix

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, AttentionContext]:
        recorder = KeyRecorder(context.attention_fn)
        y = self.attn(self.norm1(x), context.replace(attention_fn=recorder))
        x = x + self.drop_path(self.ls1(y))
        x, context = merge_tokens(x, recorder.key, context, count=self.count, prefix=self.prefix)
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x)))), context
