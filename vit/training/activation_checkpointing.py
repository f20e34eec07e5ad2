"""Activation checkpointing: only block inputs are stored; the backward pass recomputes the rest.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", section 4, arXiv:1604.06174.
"""

import contextlib
from functools import partial

from torch.utils.checkpoint import checkpoint

from vit.model.moe import MixtureOfExperts
from vit.model.vision_transformer import VisionTransformer


def recompute_blocks(network: VisionTransformer) -> None:
    """Recompute the activations of each block of `network` in the backward pass.

    Dropout and DropPath draw the same numbers again, so gradients are unchanged. Nothing is
    wrapped, so parameter names are unchanged. Call it before the network is compiled or prepared.
    """
    for block in network.blocks:
        # use_reentrant=False: gradients through the block's own parameters, DDP and compilation
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if any(isinstance(module, MixtureOfExperts) for module in network.modules()):
        _allow_router_side_effects()


def _allow_router_side_effects() -> None:
    """Allow a compiled MoE block to record its routing in the first forward pass only.

    Without this, as in older torch, every block is a graph break.
    """
    import torch._dynamo.config

    with contextlib.suppress(AttributeError):
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
