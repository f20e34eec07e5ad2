"""Images of any sizes and aspects in one pass: their tokens lie one after another in one row.

Linear layers, norms and feed-forward parts treat all tokens of the row at once; attention stays
inside each image. A dense block-diagonal mask would do it too, but a fused kernel then computes the
scores of the whole row, square, and the mask itself is as large; so the row is split instead.

Source: Dehghani et al., "Patch n' Pack: NaViT", sections 2.1 and 2.2, arXiv:2307.06304.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from typing import cast

import torch
from einops import rearrange
from torch import Tensor, nn

from vit.errors import ConfigError
from vit.model import blocks
from vit.model.attention import AttentionContext, SelfAttention, Unbiased, attend
from vit.model.moe import MixtureOfExperts, everywhere
from vit.model.rotary_embedding import in_a_row

# torch's kernel for sequences of many lengths came with 2.10.
HAS_VARLEN = find_spec("torch.nn.attention.varlen") is not None
# These keep their tokens, so the row can be cut again.
KEEPING = {
    blocks.PreNormBlock,
    blocks.PostNormBlock,
    blocks.SandwichNormBlock,
    blocks.ParallelBlock,
}


class AttendApart:
    """Attends within each sequence of a packed row, as `attend` does within each image of a batch.

    On CUDA in half precision it is one call of torch's variable-length kernel, where there is one;
    elsewhere one call of `attend` for each run of equal lengths.

    Args:
        lengths: Tokens of each sequence, in their order.
        device: Where the tokens are.
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
        """As `attend`, for (1, heads, all tokens, head_dim); there must be no mask."""
        if mask is not None:
            raise ConfigError("packed images have no mask of attention; run each by itself")
        if takes_varlen(value) and not dropout:
            return self.in_one_call(query, key, value)
        sizes = [length * count for length, count in self.runs]
        parts = zip(
            self.runs, *(torch.split(x, sizes, dim=2) for x in (query, key, value)), strict=True
        )
        return torch.cat([_attend_run(*part, dropout=dropout) for part in parts], dim=2)

    def in_one_call(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same by torch's kernel for sequences of many lengths."""
        from torch.nn.attention.varlen import varlen_attn

        # value tells the precision of the products, as in `attend`
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
    mixed = attend(q, k, v, dropout=dropout)
    return rearrange(mixed, "count heads length dim -> 1 heads (count length) dim")


def takes_varlen(value: Tensor) -> bool:
    """Whether torch's variable-length kernel takes `value`: half precision, Ampere or newer."""
    if not HAS_VARLEN or value.device.type != "cuda":
        return False
    half = value.dtype in (torch.bfloat16, torch.float16)
    fits = value.shape[-1] % 8 == 0 and value.shape[-1] <= 256
    return half and fits and torch.cuda.get_device_capability(value.device) >= (8, 0)


def same_sizes(images: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of the images of one size, (channels, height, width), in groups.

    Groups of as many tokens stand next to each other, so that one call attends to them.
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
    """Batches of tokens (batch, tokens, dim) -> one row (1, all tokens, dim), and its places."""
    row = torch.cat([tokens.flatten(0, 1) for tokens, _ in embedded]).unsqueeze(0)
    counts = [tokens.shape[0] for tokens, _ in embedded]
    lengths = [tokens.shape[1] for tokens, _ in embedded for _ in range(tokens.shape[0])]
    rotate = in_a_row([places.rotate for _, places in embedded], counts)
    return row, AttentionContext(rotate=rotate, attend=AttendApart(lengths, row.device))


def unpack(row: Tensor, embedded: Sequence[tuple[Tensor, AttentionContext]]) -> list[Tensor]:
    """The inverse of `pack`: (1, all tokens, dim) -> batches of tokens, (batch, tokens, dim)."""
    parts = torch.split(row[0], [x.shape[0] * x.shape[1] for x, _ in embedded])
    return [part.view_as(tokens) for part, (tokens, _) in zip(parts, embedded, strict=True)]


def check_packable(model: nn.Module) -> None:
    """Refuse what would mix images that lie in one row.

    Raises:
        ConfigError: The network has such a part; the message says which, and why.
    """
    for part in model.modules():
        why = None
        if isinstance(part, SelfAttention) and not isinstance(part.rel_pos, Unbiased):
            why = "position=relative: its scores are those of a whole image; use rotary or learned"
        elif isinstance(part, blocks.Block) and type(part) not in KEEPING:
            why = "merge_tokens: it looks for partners in the whole row; set it to 0"
        elif isinstance(part, MixtureOfExperts) and part.place is not everywhere:
            why = "capacity_factor: capacity is counted in each image; set it to 0"
        elif isinstance(part, blocks.DropPath) and part.training:
            why = "drop_path: it skips whole images in training; set it to 0"
        if why is not None:
            raise ConfigError(f"images cannot be packed with {why}, or run each size by itself")
