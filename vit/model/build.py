"""Names meet classes here, and nowhere else.

A layer takes plain numbers and never sees the config. To add an option: write the class, add its
line below, and add its name to the Literal in vit/config/ (a test compares the two).
"""

import difflib
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from torch import nn

from vit.config import ModelConfig
from vit.errors import ConfigError
from vit.model.attention import SelfAttention
from vit.model.blocks import Block, LayerScale, PostNormBlock, PreNormBlock
from vit.model.classifier import VisionTransformer
from vit.model.feedforward import MLP, QuickGELU, SwiGLU
from vit.model.initialise import initialise
from vit.model.norms import RMSNorm
from vit.model.patches import PatchEmbedding
from vit.model.pooling import ClassTokenPooling, MeanPooling
from vit.model.positions import (
    LearnedPositions,
    NoPositions,
    SinusoidalPositions,
    sinusoidal_1d,
    sinusoidal_2d,
)
from vit.presets import preset
from vit.settings import all_settings, convert

Builder = Callable[[ModelConfig], nn.Module]

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layernorm": partial(nn.LayerNorm, eps=1e-6),
    "rmsnorm": partial(RMSNorm, eps=1e-6),
}

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
}

FEEDFORWARDS: dict[str, Builder] = {
    "mlp": lambda c: MLP(
        c.dim, c.feedforward_dim, activation=ACTIVATIONS[c.activation](), dropout=c.dropout
    ),
    "swiglu": lambda c: SwiGLU(c.dim, c.feedforward_dim, dropout=c.dropout),
}

POSITIONS: dict[str, Callable[[ModelConfig], LearnedPositions | NoPositions]] = {
    "learned": lambda c: LearnedPositions(c.grid, c.dim, **_prefix(c)),
    "sinusoidal_1d": lambda c: SinusoidalPositions(
        c.grid, c.dim, encode=sinusoidal_1d, **_prefix(c)
    ),
    "sinusoidal_2d": lambda c: SinusoidalPositions(
        c.grid, c.dim, encode=sinusoidal_2d, **_prefix(c)
    ),
    "none": lambda _: NoPositions(),
}

BLOCKS: dict[str, type[Block]] = {
    "pre": PreNormBlock,
    "post": PostNormBlock,
}

POOLINGS: dict[str, Builder] = {
    "class_token": lambda _: ClassTokenPooling(),
    "mean": lambda c: MeanPooling(c.num_prefix_tokens),
}

# Where the last norm stands. Blocks that normalise last leave nothing to do.
FINAL_NORMS: dict[tuple[str, str], str] = {
    ("pre", "class_token"): "norm",
    ("pre", "mean"): "fc_norm",
    ("post", "class_token"): "none",
    ("post", "mean"): "none",
}


def create_model(name: str, **settings: Any) -> VisionTransformer:
    """Build the preset called `name`, with freshly initialised weights.

    Args:
        name: A preset, such as vit_small_patch16_224.
        settings: Fields of ModelConfig that differ from the preset's.

    Raises:
        ConfigError: The name or a setting is unknown, or the settings contradict each other. It
            is a ValueError.
    """
    known = [field.name for field in fields(ModelConfig)]
    for key in settings.keys() - set(known):
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; choose from {', '.join(known)}"
        raise ConfigError(f"{key} is not a model setting{hint}")
    kinds = all_settings()
    chosen = {key: convert(kinds[key].kind, value, key) for key, value in settings.items()}
    return build_classifier(ModelConfig(**{**preset(name), **chosen}))


def build_classifier(config: ModelConfig) -> VisionTransformer:
    """Build the network that `config` describes, with freshly initialised weights."""
    model = assemble(config)
    initialise(model)
    return model


def assemble(config: ModelConfig) -> VisionTransformer:
    """The network of `config`, whose weights are still to be set."""
    final = FINAL_NORMS[config.norm_order, config.pooling]
    return VisionTransformer(
        patch_embed=PatchEmbedding(config.channels, config.patch_size, config.dim),
        positions=POSITIONS[config.position](config),
        blocks=[_block(config, index) for index in range(config.depth)],
        pool=POOLINGS[config.pooling](config),
        norm=_norm(config) if final == "norm" else nn.Identity(),
        fc_norm=_norm(config) if final == "fc_norm" else nn.Identity(),
        dim=config.dim,
        num_classes=config.num_classes,
        class_token=config.class_token,
        registers=config.registers,
        dropout=config.dropout,
    )


def _block(config: ModelConfig, index: int) -> Block:
    """Block number `index`, from 0; its drop-path rate grows linearly with depth."""
    return BLOCKS[config.norm_order](
        SelfAttention(
            config.dim,
            config.num_heads,
            q_norm=_qk_norm(config),
            k_norm=_qk_norm(config),
            attention_dropout=config.attention_dropout,
            dropout=config.dropout,
        ),
        FEEDFORWARDS[config.feedforward](config),
        norms=(_norm(config), _norm(config)),
        scales=(_scale(config), _scale(config)),
        drop_path=config.drop_path * index / max(config.depth - 1, 1),
    )


def _norm(config: ModelConfig) -> nn.Module:
    return NORMS[config.norm](config.dim)


def _qk_norm(config: ModelConfig) -> nn.Module:
    if not config.qk_norm:
        return nn.Identity()
    return NORMS[config.norm](config.dim // config.num_heads)


def _scale(config: ModelConfig) -> nn.Module:
    return LayerScale(config.dim, config.layer_scale) if config.layer_scale else nn.Identity()


def _prefix(config: ModelConfig) -> dict[str, int]:
    """As timm's models with registers: then neither they nor the class token have a position."""
    if config.registers:
        return {"prefix": 0, "unplaced": config.num_prefix_tokens}
    return {"prefix": config.num_prefix_tokens, "unplaced": 0}
