"""Sequence packing: images of any sizes and aspect ratios in one pass, their tokens concatenated.

Linear layers, norms and MLPs process all tokens of the packed row at once; attention stays inside
each image. A dense block-diagonal mask would do it too, but a fused kernel then computes the scores
of the whole row, and the mask itself is as large; so the row is split instead.

Source: Dehghani et al., "Patch n' Pack: NaViT", sections 2.1 and 2.2, arXiv:2307.06304.
"""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from typing import cast

import torch
from einops import rearrange
from torch import Tensor, nn

from vit.errors import ConfigError
from vit.model import blocks
from vit.model.attention import AttentionContext, SelfAttention, dot_product_attention
from vit.model.moe import MixtureOfExperts
from vit.model.rotary_embedding import concatenate_rotations

# torch's variable-length attention came with 2.10
HAS_VARLEN = find_spec("torch.nn.attention.varlen") is not None
# These keep the number of tokens, so the row can be split again.
PACKABLE_BLOCKS = {
    blocks.PreNormBlock,
    blocks.PostNormBlock,
    blocks.SandwichNormBlock,
    blocks.ResidualPostNormBlock,
    blocks.ParallelBlock,
}


class PackedAttention:
    """Attention function for a packed row: tokens attend within their own sequence.

    On CUDA in half precision it is one call of torch's variable-length kernel, if available;
    elsewhere one call of `dot_product_attention` for each run of equal lengths.

    Args:
        lengths: Tokens of each sequence, in order.
        device: Device of the tokens.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.longest = max(lengths)
        self.runs = [(length, len(list(run))) for length, run in groupby(lengths)]
        self.starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """`dot_product_attention` for (1, heads, all tokens, head_dim), without a mask."""
        if mask is not None:
            raise ConfigError("packed images have no mask of attention; run each by itself")
        if supports_varlen(value) and not dropout:
            return self.varlen(query, key, value)
        sizes = [length * count for length, count in self.runs]
        parts = zip(
            self.runs, *(torch.split(x, sizes, dim=2) for x in (query, key, value)), strict=True
        )
        return torch.cat([_attend_run(*part, dropout=dropout) for part in parts], dim=2)

    def varlen(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same by torch's variable-length kernel."""
        from torch.nn.attention.varlen import varlen_attn

        # the precision of the products is that of value, as in `dot_product_attention`
        q, k, v = (
            rearrange(x.to(value), "1 heads tokens head_dim -> tokens heads head_dim")
            for x in (query, key, value)
        )
        starts, longest = self.starts, self.longest
        mixed = cast(Tensor, varlen_attn(q, k, v, starts, starts, longest, longest))
        return rearrange(mixed, "tokens heads head_dim -> 1 heads tokens head_dim")


def _attend_run(
    run: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, *, dropout: float
) -> Tensor:
    """Sequences of one length, (1, heads, count * length, head_dim), as a batch."""
    q, k, v = (
        rearrange(x, "1 heads (count length) dim -> count heads length dim", length=run[0])
        for x in (query, key, value)
    )
    mixed = dot_product_attention(q, k, v, dropout=dropout)
    return rearrange(mixed, "count heads length dim -> 1 heads (count length) dim")


def supports_varlen(value: Tensor) -> bool:
    """Whether torch's variable-length kernel supports `value`: half precision, Ampere or newer."""
    if not HAS_VARLEN or value.device.type != "cuda":
        return False
    half = value.dtype in (torch.bfloat16, torch.float16)
    fits = value.shape[-1] % 8 == 0 and value.shape[-1] <= 256
    return half and fits and torch.cuda.get_device_capability(value.device) >= (8, 0)


def cut_images(batch: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Images of these (height, width) whose pixels are the first ones of each channel, row by row.

    (batch, channels, height, width) -> each (channels, its height, its width); a view.
    """
    rows = zip(batch.flatten(2), sizes, strict=True)
    return [pixels[:, : math.prod(size)].unflatten(1, size) for pixels, size in rows]


def group_by_size(images: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the images of each size, (channels, height, width).

    Groups with equal numbers of tokens are adjacent, so that one attention call covers them.
    """
    if not images or any(image.ndim != 3 for image in images):
        shapes = [tuple(image.shape) for image in images]
        raise ConfigError(f"images of {shapes}: give one or more of (channels, height, width)")

    def size(index: int) -> tuple[int, ...]:
        channels, height, width = images[index].shape
        return height * width, height, channels

    order = sorted(range(len(images)), key=size)
    return [list(group) for _, group in groupby(order, key=size)]


def pack(embedded: Sequence[tuple[Tensor, AttentionContext]]) -> tuple[Tensor, AttentionContext]:
    """Batches of tokens (batch, tokens, dim) -> one row (1, all tokens, dim), and its context."""
    row = torch.cat([tokens.flatten(0, 1) for tokens, _ in embedded]).unsqueeze(0)
    counts = [tokens.shape[0] for tokens, _ in embedded]
    lengths = [tokens.shape[1] for tokens, _ in embedded for _ in range(tokens.shape[0])]
    rotate = concatenate_rotations([context.rope for _, context in embedded], counts)
    attention = PackedAttention(lengths, row.device)
    return row, AttentionContext(
        rope=rotate, attention_fn=attention, lengths=attention.starts.diff()
    )


def unpack(row: Tensor, embedded: Sequence[tuple[Tensor, AttentionContext]]) -> list[Tensor]:
    """The inverse of `pack`: (1, all tokens, dim) -> batches of tokens, (batch, tokens, dim)."""
    parts = torch.split(row[0], [x.shape[0] * x.shape[1] for x, _ in embedded])
    return [part.view_as(tokens) for part, (tokens, _) in zip(parts, embedded, strict=True)]


def check_packable(model: nn.Module) -> None:
    """Raise a ConfigError with the remedy if a part mixes images of one packed sequence.

    The decoder of a captioner is not checked.
    """
    encoder = (part for name, part in model.named_modules() if not name.startswith("decoder."))
    for part in encoder:
        why = None
        if isinstance(part, SelfAttention) and part.rel_pos is not None:
            why = "position=relative: its bias is for one image; use rotary or learned"
        elif isinstance(part, blocks.Block) and type(part) not in PACKABLE_BLOCKS:
            why = "merge_tokens: it would merge tokens of different images; set it to 0"
        elif isinstance(part, MixtureOfExperts) and part.capacity_fn is not None:
            why = "capacity_factor: capacity is counted in each image; set it to 0"
        if why is not None:
            raise ConfigError(f"images cannot be packed with {why}, or run each size by itself")
