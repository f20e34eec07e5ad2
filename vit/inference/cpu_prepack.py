"""Blocks whose matrices lie in memory as the CPU's products read them, for answers alone.

torch writes the bias before each product and activates after it, in passes of their own over
memory. oneDNN does both on the way out of the product, with a matrix that was laid out once. The
operators are those that torch's own compiler calls (torch.ops.mkldnn).
"""

import copy

import torch
from torch import Tensor, nn

from vit.model.mlp import MLP
from vit.model.vision_transformer import VisionTransformer
from vit.precision import has_onednn

GELU = {"none": "none", "tanh": "tanh"}
"""Ways to compute GELU that oneDNN shares with torch."""
READ = ("router",)
"""Layers whose matrices are read by others."""
ROWS = 1576
"""Rows that matrices are laid out for: eight images of 197 tokens."""


def can_pack(network: nn.Module) -> bool:
    """Whether this torch and this network on its device have anything to gain."""
    first = next(network.parameters())
    return (
        first.device.type == "cpu"
        and first.dtype == torch.float32
        and has_onednn()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def packed(network: VisionTransformer) -> VisionTransformer:
    """A copy of `network` with packed matrices in its blocks; all else is shared with it.

    The matrices of the blocks are in memory twice from then on.
    """
    shared: dict[int, object] = {id(one): one for one in network.parameters()}
    shared |= {id(one): one for one in network.buffers()}
    twin = copy.deepcopy(network, shared)
    for module in twin.blocks.modules():
        for name, child in module.named_children():
            if type(child) is nn.Linear and name not in READ:
                setattr(module, name, PackedLinear(child))
        if type(module) is MLP and type(module.act) is nn.GELU:
            assert isinstance(module.fc1, PackedLinear)
            module.fc1.gelu = GELU[module.act.approximate]
            module.act = nn.Identity()
    return twin


class PackedLinear(nn.Module):
    """y = x Wᵀ + b, or GELU of that, in float32 and without gradients.

    Args:
        linear: Whose weights are taken.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.matrix = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias = linear.bias
        self.gelu = ""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        found: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.matrix, self.bias, "gelu" if self.gelu else "none", [], self.gelu
        )
        return found
