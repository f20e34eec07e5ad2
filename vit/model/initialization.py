"""Weight initialisation, that of the JAX ViT, as a table of rules by parameter name.

Source: Dosovitskiy et al., arXiv:2010.11929, and its code (google-research/vision_transformer,
models_vit.py): Xavier-uniform matrices, LeCun-normal patch projection, a head of zeros.
"""

import math
import re
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from vit.model.blocks import LayerScale
from vit.model.mlp import PackedSwiGLU
from vit.model.rotary_embedding import init_frequencies
from vit.model.tiled_classifier import GatedTileAttention

Model = TypeVar("Model", bound=nn.Module)


def xavier_halves(weight: Tensor) -> None:
    """Xavier-uniform for keys and values, or gate and value, separately."""
    for matrix in weight.chunk(2):
        nn.init.xavier_uniform_(matrix)


def xavier_attention(weight: Tensor) -> None:
    """Xavier-uniform for queries, keys and values separately; the last two may be narrower."""
    queries, others = weight.tensor_split([weight.shape[1]])
    for matrix in (queries, *others.chunk(2)):
        nn.init.xavier_uniform_(matrix)


def xavier_stack(weight: Tensor) -> None:
    """Xavier-uniform for each matrix of a stack."""
    for matrix in weight:
        nn.init.xavier_uniform_(matrix)


def lecun_normal(weight: Tensor) -> None:
    """Normal with variance 1 / fan_in, truncated at two standard deviations."""
    std = math.sqrt(1 / weight.shape[1]) / 0.87962566103423978  # std of a normal truncated at +-2
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def patch_projection(weight: Tensor) -> None:
    """LeCun-normal for a matrix; Kaiming-normal by fan-in for a convolution before a GELU.

    Source: He et al., "Delving Deep into Rectifiers", section 2.2, arXiv:1502.01852.
    """
    if weight.ndim == 2:
        lecun_normal(weight)
    else:
        nn.init.kaiming_normal_(weight, nonlinearity="relu")


def normal(std: float) -> Callable[[Tensor], object]:
    """Normal with mean zero."""
    return lambda tensor: nn.init.normal_(tensor, std=std)


# The first pattern that matches a parameter's name applies.
RULES: tuple[tuple[str, Callable[[Tensor], object]], ...] = (
    (r"^cls_token$", nn.init.zeros_),
    # Not zeros, unlike the class token: equal registers would get equal gradients for ever.
    (r"^reg_token$", normal(0.02)),
    (r"^pos_embed$", normal(0.02)),
    # GPT-2's: logits of the tied embedding start near zero.
    (r"(^|\.)token_embed\.weight$|positions\.pos_embed$", normal(0.02)),
    # Zeros, as BEiT: offsets get different gradients, and the bias starts without effect.
    (r"\.relative_position_bias_table$", nn.init.zeros_),
    (r"^patch_embed\.(proj|convs\.\d+)\.weight$", patch_projection),
    (r"^patch_embed\.norms\.\d+\.weight$", nn.init.ones_),
    (r"norm\d?(_pre|_post|_cross|_memory)?\.weight$|\.gamma$", nn.init.ones_),
    (r"\.attn\.qkv\.weight$", xavier_attention),
    (r"\.attn\.rope\.freqs$", init_frequencies),
    (r"^attn_pool\.kv\.weight$", xavier_halves),
    (r"^attn_pool\.(latent|(q|proj)\.weight)$", nn.init.xavier_uniform_),
    (r"^tile_pool\.\w\.weight$", nn.init.xavier_uniform_),
    (r"\.cross_attn\.q\.weight$", nn.init.xavier_uniform_),
    (r"\.cross_attn\.kv\.weight$", xavier_halves),
    (r"\.((cross_)?attn\.proj|mlp\.(shared\.)?fc\w+)\.weight$", nn.init.xavier_uniform_),
    (r"\.mlp\.experts\.fc\d_weight$", xavier_stack),
    (r"\.mlp\.router\.weight$", normal(0.02)),
    (r"\.mlp\.((shared\.)?fc\w+\.|experts\.fc\d_)bias$", normal(1e-6)),
    (r"^head\.weight$", nn.init.zeros_),
    (r"^decoder\.mask_token$", normal(0.02)),
    (r"^projector\.prototypes\.weight$", normal(1.0)),
    (r"^(decoder\.(embed|pred)|projector\.fc\d)\.weight$", nn.init.xavier_uniform_),
    (r"\.bias$", nn.init.zeros_),
)


@torch.no_grad()
def init_weights(model: Model) -> Model:
    """Initialise every parameter of `model`, from torch's global random generator; returns it."""
    for name, parameter in model.named_parameters():
        rules = (rule for pattern, rule in RULES if re.search(pattern, name))
        rule = next(rules, None)
        if rule is None:
            raise ValueError(f"no rule initialises {name}; add one to RULES")
        rule(parameter)
    for module in model.modules():
        if isinstance(module, LayerScale):
            module.gamma.fill_(module.initial_value)
        if isinstance(module, PackedSwiGLU):
            xavier_halves(module.fc1.weight)
        if isinstance(module, GatedTileAttention):
            module.begin_at_outliers()
    return model
