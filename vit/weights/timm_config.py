"""config.json of a run folder: timm's schema, so that timm opens the folder as `local-dir:`.

What timm cannot build must not open there as something else: such a run names an architecture
that timm does not have. Our own part of the file is the key "vit", which timm ignores.
"""

import math
from collections.abc import Sequence
from typing import Any

from vit.config import ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.presets import PRESETS

# Settings that JSON cannot hold come from an architecture that has them; the rest are arguments.
PLAIN = "vit_tiny_patch16_224"
GATED = "aimv2_large_patch14_224"  # timm's name for a ViT with SwiGLU
UNKNOWN = "vit_toolkit"

POSITIONS = {"learned": "learn", "sinusoidal_1d": "learn", "sinusoidal_2d": "learn", "none": "none"}
POOLINGS = {"class_token": "token", "mean": "avg"}
CROP_MODES = {"crop": "center", "squash": "squash"}


def timm_config(
    config: ModelConfig, classes: Sequence[str], preprocessing: Preprocessing
) -> dict[str, Any]:
    """timm's part of config.json, as plain values."""
    return {
        "architecture": architecture(config),
        "num_classes": len(classes),
        "num_features": config.dim,
        "global_pool": POOLINGS[config.pooling],
        "label_names": list(classes),
        "model_args": model_args(config),
        "pretrained_cfg": {
            "input_size": [config.channels, *preprocessing.image_size],
            "fixed_input_size": True,
            "interpolation": preprocessing.interpolation,
            "crop_pct": preprocessing.crop_share,
            "crop_mode": CROP_MODES[preprocessing.resize],
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "num_classes": len(classes),
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def architecture(config: ModelConfig) -> str:
    """A model of timm that `model_args` turns into this one, or a name timm does not know."""
    if config.norm_order == "post":
        return UNKNOWN
    if config.feedforward == "swiglu":
        return GATED
    sizes = {name: getattr(config, name) for name in ("dim", "depth", "num_heads", "patch_size")}
    named = (name for name, preset in PRESETS.items() if sizes.items() <= preset.items())
    return next(named, PLAIN)


def model_args(config: ModelConfig) -> dict[str, Any]:
    """Arguments of timm's VisionTransformer, all of them, whatever the architecture's are."""
    gated = config.feedforward == "swiglu"
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "embed_dim": config.dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": mlp_ratio(config.dim, config.feedforward_dim),
        "qkv_bias": True,
        "proj_bias": True,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,  # 0, unlike null, overrides the architecture's
        "class_token": config.class_token,
        "reg_tokens": config.registers,
        "no_embed_class": config.registers > 0,
        "pos_embed": POSITIONS[config.position],
        "global_pool": POOLINGS[config.pooling],
        "fc_norm": config.pooling == "mean",
        "norm_layer": config.norm,
        "embed_norm_layer": "",
        "act_layer": "silu" if gated else config.activation,
    }


def mlp_ratio(dim: int, hidden_dim: int) -> float:
    """The ratio of which timm's `int(dim * ratio)` is exactly `hidden_dim`."""
    ratio = hidden_dim / dim
    while int(dim * ratio) < hidden_dim:
        ratio = math.nextafter(ratio, math.inf)
    return ratio
