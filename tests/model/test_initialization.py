"""Initialisation leaves no parameter as it was, and draws what the JAX ViT draws."""

import math

import pytest
import torch
from torch import nn

from vit.config import ModelConfig
from vit.model.build import build_classifier
from vit.model.initialization import init_weights
from vit.model.vision_transformer import VisionTransformer

OPTIONS = {
    "default": {},
    "everything": {"registers": 2, "layer_scale": 1e-4, "qk_norm": True, "feedforward": "swiglu"},
    "mean_rmsnorm": {"pooling": "mean", "norm": "rmsnorm", "qk_norm": True, "class_token": False},
    "conv": {"stem": "conv"},
    "conv_layernorm": {"stem": "conv", "stem_norm": "layernorm", "stem_depth": 2},
    "post": {"norm_order": "post", "position": "sinusoidal_2d"},
}


def build(dim: int = 32, **options) -> VisionTransformer:
    torch.manual_seed(0)
    return build_classifier(
        ModelConfig(image_size=32, patch_size=8, dim=dim, depth=2, num_heads=4, **options)
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_every_parameter_is_initialised(options):
    model = build(**OPTIONS[options])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    init_weights(model)
    untouched = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    assert untouched == []


def test_a_parameter_without_a_rule_is_refused():
    model = build()
    model.novelty = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="no rule initialises novelty"):
        init_weights(model)


def test_initial_weights_have_the_distributions_of_the_jax_vit():
    model = build(dim=256, registers=4, layer_scale=0.25)
    block = model.blocks[0]
    # uniform in +-sqrt(6 / (fan_in + fan_out)) has this standard deviation
    square, wide = math.sqrt(2 / (256 + 256)), math.sqrt(2 / (256 + 1024))
    expected = {
        "qkv": (block.attn.qkv.weight, square),
        "proj": (block.attn.proj.weight, square),
        "fc1": (block.mlp.fc1.weight, wide),
        "fc2": (block.mlp.fc2.weight, wide),
        "patches": (model.patch_embed.proj.weight, math.sqrt(1 / 192)),
        "registers": (model.reg_token, 0.02),
        "positions": (model.pos_embed, 0.02),
        "mlp bias": (block.mlp.fc1.bias, 1e-6),
    }
    for name, (tensor, std) in expected.items():
        assert tensor.std().item() == pytest.approx(std, rel=0.1), name
    assert block.attn.qkv.weight.abs().max() <= math.sqrt(6 / 512)
    zeros = [model.head.weight, model.head.bias, model.cls_token, block.attn.qkv.bias]
    assert not any(tensor.any() for tensor in zeros)
    assert bool((block.norm1.weight == 1).all())
    assert bool((block.ls2.gamma == 0.25).all())


def test_packed_and_separate_swiglu_have_the_same_initialisation():
    torch.manual_seed(0)
    kinds = ("swiglu", "swiglu_packed")
    nets = [build(feedforward=kind) for kind in kinds]
    separate, packed = (model.blocks[0].mlp for model in nets)
    bound = math.sqrt(6 / sum(separate.fc1_g.weight.shape))
    for matrix in (separate.fc1_g.weight, separate.fc1_x.weight, *packed.fc1.weight.chunk(2)):
        assert 0.9 * bound < matrix.abs().max() <= bound
