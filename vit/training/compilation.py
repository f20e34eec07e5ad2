"""torch.compile for trainings: of the whole network, or block by block where sizes vary.

A network is compiled anew for each size of its images, in half a minute on a GPU. The blocks
are alike, so that one graph of a block serves all, in some seconds, and steps are a little slower:
that is the better choice where images grow, or patches change their size.
"""

import torch
from torch import nn

from vit.config import Config
from vit.model.blocks import Block, DecoderBlock, DropPath

# Graphs of a block before torch gives up on it, 8 by default: each size is one, once for training
# and once for validation, whose last batch is another.
RECOMPILE_LIMIT = 256


def compiles_blocks(config: Config) -> bool:
    """Whether a compiled training meets images or patches of several sizes."""
    side = config.model.image_size
    grows = (config.training.start_image_size or side) != side
    views = config.training.pretrains and config.pretraining.local_views > 0
    return config.run.compile and (grows or views or len(config.model.training_patch_sizes) > 1)


def compile_network(network: nn.Module, config: Config) -> None:
    """Compile `network` in place, when it is first called."""
    if not compiles_blocks(config):
        network.compile()
        return
    raise_recompile_limit()
    # those of a decoder stay as they are: captions come in too many lengths
    blocks = [one for one in network.modules() if isinstance(one, Block)]
    blocks = [block for block in blocks if not isinstance(block, DecoderBlock)]
    dropping = any(isinstance(block.drop_path, DropPath) for block in blocks)
    for block in blocks:
        if dropping and not isinstance(block.drop_path, DropPath):
            block.drop_path = DropPath(0.0)  # else the first block has a graph of its own
        # not `block.compile`, with which blocks whose activations are recomputed stay as they are
        forward = torch.compile(block.forward, dynamic=False)
        block.forward = forward  # type: ignore[method-assign]


def raise_recompile_limit() -> None:
    """Allow `RECOMPILE_LIMIT` graphs; beyond its limit torch runs eagerly, with a warning."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
