"""Infers ModelConfig and Preprocessing from a state dict with timm's names.

Sizes follow from shapes and parts from names. Number of heads, epsilon and activation are assumed
to be the usual ones, with a note; if several networks fit, WeightsError asks for model=NAME.
Preprocessing follows from names that only CLIP, DINO or MAE have.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from vit.config import ModelConfig
from vit.data.preprocessing import CLIP_COLOURS, IMAGENET_COLOURS, Preprocessing
from vit.errors import WeightsError
from vit.weights.formats.original_checkpoints import PERIODS
from vit.weights.formats.state_dict_names import (
    BIAS_TABLE,
    PATCH_WEIGHT,
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
    state: Mapping[str, Tensor], original: Collection[str] = ()
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Infer the settings of `state`, with notes on the assumptions."""
    if not is_vision_transformer(state):
        raise WeightsError("these are not a Vision Transformer's weights in timm's names")
    notes: list[str] = []
    settings = {**_sizes(state), **_parts(state)}
    settings |= _position(state, settings)
    settings |= _heads(state, settings, notes)
    settings |= _rest(state, settings, OPENAI in original, notes)
    learned = settings.get("position", "learned") == "learned"
    if learned and any(name.endswith(".gamma_1") for name in original):
        notes.append("position=learned assumed: some rotary networks have the same names")
    return ModelConfig(**settings), tuple(notes)


def infer_preprocessing(
    original: Collection[str], image_size: int
) -> tuple[Preprocessing | None, tuple[str, ...]]:
    """Preprocessing of the family that tensor names reveal, with a note; None for other names.

    Args:
        image_size: Side of the input images in pixels.
    """
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


def usual_heads(dim: int) -> int:
    """Heads of the networks of timm and torchvision of the width `dim`; 0 if none is usual."""
    return WIDE_HEADS.get(dim, 0 if dim % HEAD_DIM else dim // HEAD_DIM)


def _sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    patch = state[PATCH_WEIGHT]
    if patch.ndim != 4 or patch.shape[2] != patch.shape[3]:
        raise WeightsError(f"{PATCH_WEIGHT} {tuple(patch.shape)} has no square patches; {REMEDY}")
    numbers = block_numbers(state)
    if numbers != set(range(len(numbers))):
        raise WeightsError(f"block {len(numbers) - 1} is missing, or a later one")
    head = state.get("head.weight")
    return {
        "dim": patch.shape[0],
        "channels": patch.shape[1],
        "patch_size": patch.shape[2],
        "depth": len(numbers),
        "hidden_dim": state["blocks.0.mlp.fc2.weight"].shape[1],
        "registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "num_classes": 0 if head is None else head.shape[0],
    }


def _parts(state: Mapping[str, Tensor]) -> dict[str, Any]:
    relative = _bias_table(state) is not None
    eva = [name for name in ("q_bias", "q_proj.weight") if f"blocks.0.attn.{name}" in state]
    if eva and not relative:
        raise WeightsError(f"blocks.0.attn.{eva[0]} is one of timm's many Eva networks; {REMEDY}")
    token = "cls_token" in state
    mean = "fc_norm.weight" in state or not token
    pooling = "mean" if mean else "class_token"
    if "attn_pool.latent" in state:
        pooling = "attention"
    norms = [name for name in ("norm", "fc_norm") if f"{name}.weight" in state]
    usual = "fc_norm" if pooling == "mean" else "norm"
    final = {"norm": "tokens", "fc_norm": "pooled"} | {usual: "auto"}
    if len(norms) > 1:
        raise WeightsError(f"there are both norm and fc_norm; {REMEDY}")
    first = state.get("blocks.0.mlp.fc1.weight")
    gated = first is None or len(first) == 2 * state["blocks.0.mlp.fc2.weight"].shape[1]
    return {
        "class_token": token,
        "pooling": pooling,
        "final_norm": final[norms[0]] if norms else "none",
        "feedforward": "swiglu" if gated else "mlp",
        "norm": "layernorm" if "blocks.0.norm1.bias" in state else "rmsnorm",
        "norm_pre": "norm_pre.weight" in state,
        "patch_bias": "patch_embed.proj.bias" in state,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state or "blocks.0.attn.q_bias" in state,
        "proj_bias": "blocks.0.attn.proj.bias" in state,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
    }


def _position(state: Mapping[str, Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    table, periods = state.get("pos_embed"), state.get(PERIODS)
    if periods is not None:
        if table is not None:
            raise WeightsError(f"there are both pos_embed and {PERIODS}; {REMEDY}")
        whole = USUAL_SIDE // settings["patch_size"] * settings["patch_size"]
        return {"position": "rotary", "image_size": whole, **_rotary_temperature(periods)}
    biases = _bias_table(state)
    if biases is not None:
        if table is not None:
            raise WeightsError(f"there are both pos_embed and {biases}; {REMEDY}")
        prefix = settings["class_token"] or settings["registers"] > 0
        side = bias_table_side(biases, state[biases], prefix=prefix)
        return {"position": "relative", "image_size": side * settings["patch_size"]}
    if table is None:
        raise WeightsError(f"there is no pos_embed: positions may be rotary; {REMEDY}")
    token, registers = int(settings["class_token"]), settings["registers"]
    choices = {"none": 0, "class_token": token, "all": token + registers}
    rows = table.shape[1]
    grids = {
        placed: side for placed in choices.values() if (side := square_side(rows - placed)) > 0
    }
    if len(grids) != 1:
        found = " or ".join(f"{side} x {side} and {placed}" for placed, side in grids.items())
        raise WeightsError(
            f"pos_embed has {rows} rows, which is {found or 'no square'} (patches, and tokens "
            f"before them); {REMEDY}"
        )
    placed, side = next(iter(grids.items()))
    usual = 0 if registers else token
    name = next(name for name, number in choices.items() if number == placed)
    return {
        "image_size": side * settings["patch_size"],
        "prefix_positions": "auto" if placed == usual else name,
    }


def _bias_table(state: Mapping[str, Tensor]) -> str | None:
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


def _heads(
    state: Mapping[str, Tensor], settings: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    dim, biases = settings["dim"], _bias_table(state)
    norm, periods = state.get("blocks.0.attn.q_norm.weight"), state.get(PERIODS)
    if biases is not None:
        return {"num_heads": state[biases].shape[1]}
    if norm is not None:
        head_dim = len(norm)
    elif periods is not None:
        head_dim = 4 * len(periods)
    else:
        return {"num_heads": _assumed_heads(state, dim, notes)}
    if dim % head_dim:
        raise WeightsError(f"{dim} channels do not split into heads of {head_dim}; {REMEDY}")
    return {"num_heads": dim // head_dim}


def _assumed_heads(state: Mapping[str, Tensor], dim: int, notes: list[str]) -> int:
    """Number of heads where no tensor determines it, with a note."""
    # of width 1536 are DINOv2's giant, with 24 heads and LayerScale, and SigLIP 2's, with 16
    siglip = dim == 1536 and "blocks.0.ls1.gamma" not in state
    heads = 16 if siglip else usual_heads(dim)
    if not heads:
        raise WeightsError(f"{dim} channels do not split into heads of {HEAD_DIM}; {REMEDY}")
    channels = dim // heads
    why = f"{channels} channels a head" if channels == HEAD_DIM else f"usual for {dim} channels"
    notes.append(f"num_heads={heads} assumed: {why}")
    return heads


def _rest(
    state: Mapping[str, Tensor], settings: dict[str, Any], openai: bool, notes: list[str]
) -> dict[str, Any]:
    """Settings that do not follow from tensors."""
    clip_or_dino = settings["norm_pre"] or settings.get("position") == "rotary"
    rest = {
        "norm_eps": 1e-5 if clip_or_dino else 1e-6,
        "activation": "quick_gelu" if openai else "gelu",
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in state else 0.0,
    }
    assumed = [f"norm_eps={rest['norm_eps']:g}"]
    if settings["feedforward"] == "mlp" and not openai:
        assumed.append(f"activation={rest['activation']}")
    if settings.get("position") == "rotary":
        assumed.append(f"image_size={settings['image_size']}")
    if settings["class_token"] and settings["pooling"] != "attention":
        assumed.append(f"pooling={settings['pooling']}")
    if settings["norm_pre"] and not openai:
        notes.append("OpenAI's own weights of CLIP use activation=quick_gelu")
    notes.append(f"{', '.join(assumed)} assumed: tensors do not determine them; model=NAME does")
    return rest
