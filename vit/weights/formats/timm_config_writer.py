"""config.json of a run folder in timm's schema, so that timm opens the folder as `local-dir:`.

A network that timm cannot build names an architecture unknown to timm, so that it cannot open as
another one. Our own section of the file is the key "vit", which timm ignores.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from vit.config import ModelConfig
from vit.config.presets import PRESETS
from vit.data.preprocessing import Preprocessing

# Arguments that JSON cannot express (classes, epsilons) come from the base architecture; all others
# are in model_args. By norm, epsilon and MLP:
PLAIN: dict[tuple[str, float, str], str] = {
    ("layernorm", 1e-6, "mlp"): "vit_tiny_patch16_224",
    ("rmsnorm", 1e-6, "mlp"): "vit_tiny_patch16_224",
    ("layernorm", 1e-5, "mlp"): "vit_base_patch16_clip_224",
    ("layernorm", 1e-6, "swiglu"): "aimv2_large_patch14_224",
    ("rmsnorm", 1e-6, "swiglu"): "aimv2_large_patch14_224",
    ("rmsnorm", 1e-5, "swiglu"): "aimv2_large_patch14_224",
    ("layernorm", 1e-6, "swiglu_packed"): "vit_giant_patch14_dinov2",
    ("rmsnorm", 1e-6, "swiglu_packed"): "vit_giant_patch14_dinov2",
}
# timm's Eva has no argument for the norm.
ROTARY: dict[tuple[str, float], str] = {
    ("layernorm", 1e-6): "eva_giant_patch14_224",
    ("layernorm", 1e-5): "vit_pe_spatial_base_patch16_512",
}
# timm's network with relative position bias, and the settings it supports.
RELATIVE = "vit_relpos_base_patch16_224"
RELATIVE_NEEDS: dict[str, tuple[object, ...]] = {
    "norm": ("layernorm",),
    "norm_eps": (1e-6,),
    "feedforward": ("mlp",),
    "activation": ("gelu",),
    "proj_bias": (True,),
    "norm_pre": (False,),
    "registers": (0,),
    "pooling": ("mean", "class_token"),
    "final_norm": ("tokens", "pooled"),
}
NAMED_EPSILON = 1e-6
"""Epsilon of timm's norms when chosen by name."""
UNKNOWN_ARCHITECTURE = "vit_toolkit"
CONV_STEM = "vit_conv_stem"
"""Architecture that timm_conv_stem.py registers with timm."""
POOLINGS = {
    "class_token": "token",
    "mean": "avg",
    "attention": "map",
    "attention_all": "map",
    "class_token_mean": "",
    "class_token_registers": "",
    "none": "",
}
CROP_MODES = {"crop": "center", "squash": "squash", "pad": "border", "native": "squash"}
"""timm has no native: all of an image is the nearest."""
GRIDS = {"index": "cat", "index_1": "cat", "centred": "dinov3", "mixed": "mixed"}
SUB_ORDERS = ("pre", "sub", "sub_mlp")  # norm orders of timm's Eva
# Settings that timm cannot build. Sinusoidal tables are no obstacle: they are stored as weights.
REFUSALS: tuple[tuple[str, Callable[[ModelConfig], bool]], ...] = (
    (
        "norm_order={c.norm_order}",
        lambda c: c.norm_order not in (SUB_ORDERS if c.is_rotary else ("pre",)),
    ),
    (
        "pooling={c.pooling}",
        lambda c: c.pooling in ("class_token_mean", "class_token_registers"),
    ),
    (
        "pooling=attention_all with position={c.position}",
        lambda c: c.pooling == "attention_all" and not c.is_rotary,
    ),
    (
        "patch_bias={c.patch_bias} with norm_pre={c.norm_pre}",
        lambda c: c.stem != "conv" and c.patch_bias == c.norm_pre,
    ),
    (
        "stem=linear_norm with norm={c.norm}, norm_eps={c.norm_eps:g}, feedforward={c.feedforward}",
        lambda c: c.stem == "linear_norm" and not _is_aimv2(c),
    ),
    ("rotary_grid=mixed", lambda c: c.rotary_grid == "mixed"),
    # timm's Eva has no argument for the patch embedding
    ("stem=conv with position={c.position}", lambda c: c.stem == "conv" and c.is_rotary),
    (
        "prefix_positions={c.prefix_positions} with registers={c.registers}",
        lambda c: _has_table(c) and c.num_positioned_prefix_tokens not in (0, c.num_prefix_tokens),
    ),
    (
        "pooling=attention with feedforward={c.feedforward}",
        lambda c: c.pooling == "attention" and c.feedforward != "mlp",
    ),
    (
        "norm={c.norm} with norm_eps={c.norm_eps:g} and feedforward={c.feedforward}",
        lambda c: not c.is_rotary and (c.norm, c.norm_eps, c.feedforward) not in PLAIN,
    ),
    (
        "norm={c.norm} with norm_eps={c.norm_eps:g} and position={c.position}",
        lambda c: c.is_rotary and (c.norm, c.norm_eps) not in ROTARY,
    ),
    (
        "activation={c.activation} with position={c.position}",
        lambda c: c.is_rotary and c.activation != "gelu",
    ),
    ("proj_bias=False with position={c.position}", lambda c: c.is_rotary and not c.proj_bias),
    (
        "feedforward={c.feedforward} with position={c.position}",
        lambda c: c.is_rotary and c.feedforward == "swiglu_packed",
    ),
    (
        "pooling=attention with position={c.position} and tokens before the patches",
        lambda c: c.is_rotary and c.pooling == "attention" and c.num_prefix_tokens > 0,
    ),
)
REMEDY = "; --merge-tokens 0 leaves merging out, with slightly other answers"
UNSUPPORTED_SETTINGS = ("parallel_blocks", "repeat_blocks", "num_kv_heads", "merge_tokens")


def timm_config(
    config: ModelConfig, classes: Sequence[str], preprocessing: Preprocessing
) -> dict[str, Any]:
    """timm's part of config.json, without our section."""
    return {
        "architecture": architecture(config),
        "num_classes": len(classes),
        "num_features": config.pooled_dim,
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
            "first_conv": first_convolution(config),
            "classifier": "head",
        },
    }


def timm_incompatibility(config: ModelConfig) -> str | None:
    """The first settings that no network of timm supports; None if timm can build `config`."""
    found = (text.format(c=config) for text, impossible in REFUSALS if impossible(config))
    return unsupported_setting(config) or _unfit_for_relative(config) or next(found, None)


def _unfit_for_relative(config: ModelConfig) -> str | None:
    """The first setting that timm's network with relative position bias does not support."""
    if config.position != "relative":
        return None
    values = {**vars(config), "final_norm": config.last_norm}
    unfit = (name for name, fit in RELATIVE_NEEDS.items() if values[name] not in fit)
    return next((f"{name}={values[name]} with position=relative" for name in unfit), None)


def architecture(config: ModelConfig) -> str:
    """timm architecture from which `model_args` builds `config`, or an unknown name."""
    if timm_incompatibility(config) is not None:
        return UNKNOWN_ARCHITECTURE
    return CONV_STEM if config.stem == "conv" else _base(config)


def _base(config: ModelConfig) -> str:
    """Base architecture in timm itself."""
    if config.position == "relative":
        return RELATIVE
    if config.is_rotary:
        return ROTARY[config.norm, config.norm_eps]
    plain = PLAIN[config.norm, config.norm_eps, config.feedforward]
    if plain != PLAIN["layernorm", NAMED_EPSILON, "mlp"]:
        return plain
    sizes = {name: getattr(config, name) for name in ("dim", "depth", "num_heads", "patch_size")}
    named = (name for name, preset in PRESETS.items() if sizes.items() <= preset.items())
    return next(named, plain)


def model_args(config: ModelConfig) -> dict[str, Any]:
    """All arguments of timm's network, including those equal to the architecture's defaults."""
    last = config.last_norm
    packed = 2 if config.feedforward == "swiglu_packed" else 1
    shared = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "embed_dim": config.dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": mlp_ratio(config.dim, packed * config.feedforward_dim),
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "class_token": config.class_token,
        **(_stem_args(config) if config.stem == "conv" else {}),
        "global_pool": POOLINGS[config.pooling],
    }
    if config.position == "relative":
        return {
            **shared,
            "init_values": config.layer_scale,  # 0, unlike null, overrides the architecture's
            "fc_norm": last == "pooled",
            "rel_pos_type": "bias",
            "shared_rel_pos": False,
        }
    shared["no_embed_class"] = (
        config.num_positioned_prefix_tokens == 0 and config.num_prefix_tokens > 0
    )
    if config.is_rotary:
        return {**shared, **_eva_args(config, last)}
    gated = config.feedforward.startswith("swiglu")
    # a norm chosen by name has epsilon 1e-6; another epsilon comes from the architecture
    norm = {"norm_layer": config.norm} if config.norm_eps == NAMED_EPSILON else {}
    return {
        **shared,
        **norm,
        "proj_bias": config.proj_bias,
        "init_values": config.layer_scale,  # 0, unlike null, overrides the architecture's
        "reg_tokens": config.registers,
        "pos_embed": "learn" if _has_table(config) else "none",
        "pre_norm": config.norm_pre,
        "final_norm": last != "none",
        "fc_norm": last == "pooled",
        **({} if config.stem == "linear_norm" else {"embed_norm_layer": ""}),
        "act_layer": "silu" if gated else config.activation,
    }


def _stem_args(config: ModelConfig) -> dict[str, Any]:
    """Arguments of vit/weights/formats/timm_conv_stem.py."""
    return {
        **({"base": _base(config)} if timm_incompatibility(config) is None else {}),
        "stem_depth": config.stem_depth,
        "stem_width": config.stem_width,
        "stem_stride": config.stem_stride,
        "stem_norm": config.stem_norm,
        "stem_eps": config.norm_eps,
    }


def _eva_args(config: ModelConfig, last: str) -> dict[str, Any]:
    # Without a reference grid, positions are not scaled. For an architecture that has one we pass
    # the grid of the images, which scales by one.
    reference = config.rotary_reference or config.grid[0]
    scaled = config.rotary_reference is not None or config.norm_eps != NAMED_EPSILON
    scale = {"init_values": config.layer_scale} if config.layer_scale else {}
    ratio = mlp_ratio(config.dim, config.feedforward_dim)
    pool = {"attn_pool_num_heads": config.num_heads, "attn_pool_mlp_ratio": ratio}
    pools = {"attention": pool}
    pools["attention_all"] = {"attn_pool_num_heads": 8, "attn_pool_mlp_ratio": 4.0}
    return {
        **scale,
        **({"ref_feat_shape": [reference] * 2} if scaled else {}),
        **pools.get(config.pooling, {}),
        "attn_type": "rope",  # this one has key biases
        "qkv_fused": True,
        "scale_mlp": config.norm_order != "pre",
        "scale_attn_inner": config.norm_order == "sub",
        "swiglu_mlp": config.feedforward == "swiglu",
        "swiglu_align_to": int(config.feedforward == "swiglu"),  # separate gate and value
        "num_reg_tokens": config.registers,
        "use_abs_pos_emb": _has_table(config),
        "use_rot_pos_emb": True,
        "rope_type": GRIDS[config.rotary_grid],
        "rope_temperature": config.rotary_temperature,
        "rope_grid_offset": float(config.rotary_grid == "index_1"),
        "rope_grid_indexing": "ij",
        "rope_rotate_half": True,
        "use_post_norm": False,
        "use_pre_transformer_norm": config.norm_pre,
        "use_post_transformer_norm": last == "tokens",
        "use_fc_norm": last == "pooled",
    }


def first_convolution(config: ModelConfig) -> str:
    """Name of the first convolution, whose input channels are those of the images."""
    inner = config.stem == "conv" and config.stem_depth > 1
    return "patch_embed.convs.0" if inner else "patch_embed.proj"


def _is_aimv2(config: ModelConfig) -> bool:
    """Whether the base architecture has the same norm after its patches."""
    plain = (config.norm, config.norm_eps, config.feedforward) == ("rmsnorm", 1e-5, "swiglu")
    return plain and config.position != "relative" and not config.is_rotary


def _has_table(config: ModelConfig) -> bool:
    return config.position not in ("rotary", "relative", "none")


def mlp_ratio(dim: int, hidden_dim: int) -> float:
    """Smallest float ratio for which timm's `int(dim * ratio)` equals `hidden_dim`."""
    ratio = hidden_dim / dim
    while int(dim * ratio) < hidden_dim:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def unsupported_setting(config: ModelConfig) -> str | None:
    """The first setting, with its value, that neither timm nor transformers has; None if none."""
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    if config.feedforward == "moe":
        return "feedforward=moe"
    changed = (name for name in UNSUPPORTED_SETTINGS if getattr(config, name) != defaults[name])
    return next((f"{name}={getattr(config, name)}" for name in changed), None)


def incompatibility_remedy(incompatibility: str) -> str:
    """Suffix for the error message of an `incompatibility`; often empty."""
    return REMEDY if "merge_tokens=" in incompatibility else ""
