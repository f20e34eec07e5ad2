"""Infers ModelConfig and Preprocessing from a state dict with timm's names.

Sizes follow from shapes and parts from names. What tensors do not say is given (`known`, as of
timm's own network), or assumed to be usual, with a note; if several networks fit, WeightsError asks
for model=NAME. Preprocessing follows from names that only CLIP, DINO or MAE have.
"""

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from vit.config import ModelConfig
from vit.data.preprocessing import CLIP_COLOURS, IMAGENET_COLOURS, Preprocessing
from vit.errors import WeightsError
from vit.weights.formats.state_dict_names import (
    BIAS_TABLE,
    PATCH_WEIGHT,
    PERIODS,
    bias_table_side,
    block_numbers,
    square_side,
)

REMEDY = "name the network: model=NAME, one of timm's"
HEAD_DIM = 64
WIDE_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
"""Heads of timm's and torchvision's networks by width, where a head has other than 64 channels:
SO400M, ViT-H, ViT-g and ViT-bigG."""
USUAL_SIDE = 224
NOTHING: Mapping[str, Any] = MappingProxyType({})
# Names of the family, whose mean and std, these, and the share of the centre crop.
FAMILIES = (
    (r"(.+\.)?(norm_pre|ln_pre)\.weight", "CLIP's", CLIP_COLOURS, 1.0),
    (
        r"(module\.|_orig_mod\.|model\.|backbone\.)*"
        r"(mask_token|register_tokens|storage_tokens|decoder_embed\.weight)",
        "ImageNet's, as of DINO and MAE",
        IMAGENET_COLOURS,
        224 / 256,
    ),
)
OPENAI = "input_resolution"  # a number that only OpenAI's own CLIP files contain


def is_vision_transformer(state: Mapping[str, Tensor]) -> bool:
    """Whether `state` has the parameters of a Vision Transformer under timm's names."""
    parts = ("norm1", "attn.proj", "norm2", "mlp.fc2")
    return {PATCH_WEIGHT, *(f"blocks.0.{part}.weight" for part in parts)} <= state.keys()


def infer_config(
    state: Mapping[str, Tensor],
    known: Mapping[str, Any] = NOTHING,
    original: Collection[str] = (),
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Infer the settings of `state`, with notes on the assumptions.

    The patch projection is still a convolution. `known` are settings that tensors do not determine;
    `original` are the names in the file, before renaming.
    """
    if not is_vision_transformer(state):
        raise WeightsError("these are not a Vision Transformer's weights in timm's names")
    notes: list[str] = []
    settings = {**_sizes(state), **known}
    settings |= _parts(state, settings)
    settings |= _position(state, settings)
    if "num_heads" not in settings:
        settings["num_heads"] = _heads(state, settings, notes)
    if "norm_eps" not in settings:
        settings |= _assumptions(state, settings, OPENAI in original, notes)
        if settings["position"] == "learned" and any(
            name.endswith(".gamma_1") for name in original
        ):
            notes.append("position=learned assumed: some rotary networks have the same names")
    return ModelConfig(**settings), tuple(notes)


def infer_preprocessing(
    original: Collection[str], image_size: int
) -> tuple[Preprocessing | None, tuple[str, ...]]:
    """Preprocessing of the family that tensor names reveal, with a note; None for other names."""
    if any(name.endswith(BIAS_TABLE) for name in original):  # BEiT, whose versions differ
        return None, ()
    for pattern, whose, (mean, std), share in FAMILIES:
        if any(re.fullmatch(pattern, name) for name in original):
            found = Preprocessing(
                image_size=(image_size, image_size), crop_share=share, mean=mean, std=std
            )
            return found, (
                "nothing says how images are prepared for these weights; assumed: the middle "
                f"{share:.0%} of {image_size / share:.0f} px, mean and std are {whose}",
            )
    return None, ()


def _sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    patch = state[PATCH_WEIGHT]
    if patch.ndim != 4 or patch.shape[2] != patch.shape[3]:
        raise WeightsError(f"{PATCH_WEIGHT} {tuple(patch.shape)} has no square patches; {REMEDY}")
    numbers = block_numbers(state)
    if numbers != set(range(len(numbers))):
        raise WeightsError(f"block {len(numbers) - 1} is missing, or a later one")
    return {
        "dim": patch.shape[0],
        "channels": patch.shape[1],
        "patch_size": patch.shape[2],
        "depth": len(numbers),
        "hidden_dim": state["blocks.0.mlp.fc2.weight"].shape[1],
        "registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "num_classes": len(state["head.weight"]) if "head.weight" in state else 0,
    }


def _parts(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    token = "cls_token" in state
    pooling = "mean" if "fc_norm.weight" in state or not token else "class_token"
    if "attn_pool.latent" in state:
        pooling = "attention"
    pooling = settings.get("pooling", pooling)
    registers, head = settings["registers"], state.get("head.weight")
    if registers and head is not None and head.shape[1] == (1 + registers) * settings["dim"]:
        pooling = "class_token_registers"
    inner = [f"blocks.0.{part}.norm.weight" in state for part in ("attn", "mlp")]
    if any(inner):
        settings = {**settings, "norm_order": "sub" if inner[0] else "sub_mlp"}
    if "patch_embed.norm.weight" in state:
        settings = {**settings, "stem": "linear_norm"}
    norms = [name for name in ("norm", "fc_norm") if f"{name}.weight" in state]
    if len(norms) > 1:
        raise WeightsError(f"there are both norm and fc_norm; {REMEDY}")
    usual = "fc_norm" if pooling == "mean" else "norm"
    final = {"norm": "tokens", "fc_norm": "pooled"} | {usual: "auto"}
    return {
        "class_token": token,
        "pooling": pooling,
        "final_norm": final[norms[0]] if norms else "none",
        "feedforward": "swiglu" if "blocks.0.mlp.fc1_g.weight" in state else "mlp",
        "norm": "layernorm" if "blocks.0.norm1.bias" in state else "rmsnorm",
        "norm_pre": "norm_pre.weight" in state,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "proj_bias": "blocks.0.attn.proj.bias" in state,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "patch_bias": settings.get("stem") == "conv" or "patch_embed.proj.bias" in state,
        **{name: settings[name] for name in ("norm_order", "stem") if name in settings},
    }


def _position(state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    table, periods, biases = state.get("pos_embed"), state.get(PERIODS), bias_table(state)
    patch_size, size = settings["patch_size"], settings.get("image_size")
    if table is not None and (periods is not None or biases is not None):
        raise WeightsError(f"there are both pos_embed and {biases or PERIODS}; {REMEDY}")
    if biases is not None:
        prefix = settings["class_token"] or settings["registers"] > 0
        side = bias_table_side(biases, state[biases], prefix=prefix)
        return {"position": "relative", "image_size": size or side * patch_size}
    if periods is not None:
        whole = USUAL_SIDE // patch_size * patch_size
        return {"position": "rotary", "image_size": size or whole, **_rotary_temperature(periods)}
    rotary = "rotary_grid" in settings
    if table is None and size is None:
        raise WeightsError(f"there is no pos_embed: positions may be rotary; {REMEDY}")
    if table is None:
        return {"position": "rotary" if rotary else "none"}
    if table.ndim != 3:
        raise WeightsError(f"pos_embed {tuple(table.shape)} is no table of positions")
    rows, token = table.shape[1], int(settings["class_token"])
    choices = {"none": 0, "class_token": token, "all": token + settings["registers"]}
    sides = {placed: square_side(rows - placed) for placed in choices.values()}
    grids = {placed: side for placed, side in sides.items() if side and side * patch_size == size}
    grids = grids or {placed: side for placed, side in sides.items() if side}
    if len(grids) != 1:
        found = " or ".join(f"{side} x {side} and {placed}" for placed, side in grids.items())
        raise WeightsError(
            f"pos_embed has {rows} rows, which is {found or 'no square'} (patches, and tokens "
            f"before them); {REMEDY}"
        )
    placed, side = next(iter(grids.items()))
    usual = 0 if settings["registers"] else token
    name = next(name for name, number in choices.items() if number == placed)
    return {
        "position": "learned_rotary" if rotary else "learned",
        "image_size": size or side * patch_size,
        "prefix_positions": "auto" if placed == usual else name,
    }


def bias_table(state: Mapping[str, Tensor]) -> str | None:
    """Name of the first relative position bias table."""
    return next((name for name in sorted(state) if name.endswith(BIAS_TABLE)), None)


def _rotary_temperature(periods: Tensor) -> dict[str, Any]:
    """Recover the temperature from DINOv3's periods, temperature^(j / n) in bfloat16."""
    waves = len(periods)
    if waves < 2:
        raise WeightsError(f"{PERIODS} has a single wave; {REMEDY}")
    exact = float(periods[-1]) ** (waves / (waves - 1))
    near = float(f"{exact:.2g}")
    if abs(near / exact - 1) > 0.01:
        raise WeightsError(f"{PERIODS} ends at {float(periods[-1])}; {REMEDY}")
    return {"rotary_grid": "centred", "rotary_temperature": near}


def _heads(state: Mapping[str, Tensor], settings: Mapping[str, Any], notes: list[str]) -> int:
    dim, biases = settings["dim"], bias_table(state)
    norm, periods = state.get("blocks.0.attn.q_norm.weight"), state.get(PERIODS)
    if biases is not None:
        return int(state[biases].shape[1])
    if norm is not None:
        head_dim = len(norm)
        heads = 0 if dim % head_dim else dim // head_dim
    elif periods is not None:
        head_dim = 4 * len(periods)
        heads = 0 if dim % head_dim else dim // head_dim
    else:
        # of width 1536 are DINOv2's giant, with 24 heads and LayerScale, and SigLIP 2's, with 16
        siglip = dim == 1536 and "blocks.0.ls1.gamma" not in state
        head_dim = HEAD_DIM
        usual = 0 if dim % HEAD_DIM else dim // HEAD_DIM
        heads = 16 if siglip else WIDE_HEADS.get(dim, usual)
        why = f"{HEAD_DIM} channels a head" if heads == usual else f"usual for {dim} channels"
        notes.append(f"num_heads={heads} assumed: {why}")
    if not heads:
        raise WeightsError(f"{dim} channels do not split into heads of {head_dim}; {REMEDY}")
    return heads


def _assumptions(
    state: Mapping[str, Tensor], settings: Mapping[str, Any], openai: bool, notes: list[str]
) -> dict[str, Any]:
    """Settings that do not follow from tensors."""
    rotary = settings["position"] == "rotary"
    rest = {
        "norm_eps": 1e-5 if settings["norm_pre"] or rotary else 1e-6,
        "activation": "quick_gelu" if openai else "gelu",
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in state else 0.0,
    }
    assumed = [f"norm_eps={rest['norm_eps']:g}"]
    if settings["feedforward"] == "mlp" and not openai:
        assumed.append(f"activation={rest['activation']}")
    if rotary:
        assumed.append(f"image_size={settings['image_size']}")
    if settings["class_token"] and settings["pooling"] != "attention":
        assumed.append(f"pooling={settings['pooling']}")
    if settings["norm_pre"] and not openai:
        notes.append("OpenAI's own weights of CLIP use activation=quick_gelu")
    notes.append(f"{', '.join(assumed)} assumed: tensors do not determine them; model=NAME does")
    return rest
