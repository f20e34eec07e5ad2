"""Rotated channels of a head in the order of our network, whatever order they were trained in.

Ours: the pair of channel i is a half of the head further on; the first quarter turns with the row,
the second with the column. Scores do not change when queries and keys are reordered alike.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Rotation:
    """How a network of timm orders the rotated channels of a head.

    Args:
        interleaved: Pairs are neighbours; otherwise a half apart.
        columns_first: The angles of columns come before those of rows.
    """

    interleaved: bool
    columns_first: bool

    def order(self, head_dim: int) -> Tensor:
        """Their channel for each of ours, (head_dim,)."""
        theirs = torch.arange(head_dim)
        pairs = theirs.view(-1, 2).T if self.interleaved else theirs.view(2, -1)
        by_axis = pairs.reshape(2, 2, -1)
        return (by_axis.flip(1) if self.columns_first else by_axis).flatten()


def reorder(state: Mapping[str, Tensor], rotation: Rotation, num_heads: int) -> State:
    """`state`, by our names, with the queries and keys of each head in our order."""
    ordered = dict(state)
    for name, tensor in state.items():
        if re.fullmatch(r"blocks\.\d+\.attn\.qkv\.(weight|bias)", name):
            parts = tensor.reshape(3, num_heads, -1, *tensor.shape[1:])
            order = rotation.order(parts.shape[2]).to(tensor.device)
            turned = parts[:2].index_select(2, order)
            ordered[name] = torch.cat([turned, parts[2:]]).flatten(0, 2)
        elif re.fullmatch(r"blocks\.\d+\.attn\.[qk]_norm\.(weight|bias)", name):
            ordered[name] = tensor[rotation.order(len(tensor)).to(tensor.device)]
    return ordered
