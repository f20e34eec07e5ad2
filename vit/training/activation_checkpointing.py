"""Activation checkpointing: a block keeps its input alone, and the backward pass computes the rest.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", section 4, arXiv:1604.06174.
"""

import contextlib
from functools import partial

from torch.utils.checkpoint import checkpoint

from vit.model.moe import MixtureOfExperts
from vit.model.vision_transformer import VisionTransformer


def recompute_blocks(network: VisionTransformer) -> None:
    """Make each block of `network` compute its inside again when its gradient is needed.

    Dropout and DropPath draw the same numbers again, so gradients stay as they are, and so do the
    names of parameters, since nothing is wrapped. Call it before the network is compiled or given
    to the devices.
    """
    for block in network.blocks:
        # use_reentrant=False: gradients through the block's own parameters, DDP and compilation
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if any(isinstance(module, MixtureOfExperts) for module in network.modules()):
        _let_experts_tell()


def _let_experts_tell() -> None:
    """Let a compiled block of experts leave what it did, which it does the first time alone.

    Without this, as in older torch, compilation stops at every block and goes on after it.
    """
    import torch._dynamo.config

    with contextlib.suppress(AttributeError):
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
