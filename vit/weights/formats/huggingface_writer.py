"""Writes our network as a model of transformers: config.json, preprocessor_config.json, tensors.

TRANSFORMERS_CLASSES lists the requirements of each class; a network is written as the first class
whose requirements it meets. Parameters that the class has and ours lacks are written as neutral
values: zero biases and positions, layer scales of one, zeros for half of a head.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import WeightsError
from vit.weights.formats.huggingface_config import (
    FAMILIES,
    MULTILABEL,
    SAME,
    WITH_TEXT,
    label_settings,
    swiglu_width,
    write_custom_model,
    write_processor,
)
from vit.weights.formats.huggingface_weights import TensorNames, tensor_names
from vit.weights.formats.state_dict_names import PATCH_WEIGHT, State
from vit.weights.formats.timm_config_writer import incompatibility_remedy, unsupported_setting

MAX_MLP_RATIO = 64
Traits = dict[str, Any]
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Our activation names to transformers'; the others are the same."""


@dataclass(frozen=True)
class TransformersClass:
    """A model class of transformers that we can write."""

    architecture: str
    model_type: str
    requirements: Mapping[str, tuple[Any, ...]]

    def mismatches(self, traits: Traits) -> list[str]:
        """Traits that do not meet the requirements, as text."""
        found = []
        for name, allowed in self.requirements.items():
            if traits[name] not in allowed:
                prefix = "" if name in ("head", "width") else f"{name}="
                needs = " or ".join(f"{prefix}{value}" for value in allowed)
                found.append(f"{needs}, not {traits[name]}")
        return found


MULTIPLE = "a feed-forward part of a whole multiple of dim"
BASE: dict[str, tuple[Any, ...]] = {
    "stem": ("linear",),
    "norm": ("layernorm",),
    "norm_order": ("pre",),
    "qk_norm": (False,),
    "position": ("learned",),
    "norm_pre": (False,),
    "class_token": (True,),
    "registers": (0,),
    "feedforward": ("mlp",),
    "layer_scale": (False,),
    "pooling": ("class_token",),
    "final_norm": ("tokens",),
    "head": ("a head",),
}
SCALED = {"layer_scale": (True, False), "feedforward": ("mlp", "swiglu")}
DINO_HEAD = {"pooling": ("class_token", "class_token_mean", "mean")}
NO_HEAD = {"head": ("no head",)}
MANY = (1, "several")
BEIT = {
    **BASE,
    "position": ("learned", "relative"),
    "layer_scale": (True, False),
    "pooling": ("mean",),
    "final_norm": ("pooled",),
}
DINOV2 = {**BASE, **SCALED, "width": (MULTIPLE,)}
TRANSFORMERS_CLASSES = (
    TransformersClass("ViTForImageClassification", "vit", BASE),
    TransformersClass(
        "DeiTForImageClassification",
        "deit",
        {**BASE, "registers": (1,), "prefix_positions": ("all",)},
    ),
    TransformersClass("BeitForImageClassification", "beit", BEIT),
    TransformersClass("BeitModel", "beit", {**BEIT, **NO_HEAD}),
    TransformersClass("Dinov2ForImageClassification", "dinov2", {**DINOV2, **DINO_HEAD}),
    TransformersClass("Dinov2Model", "dinov2", {**DINOV2, **NO_HEAD}),
    TransformersClass(
        "Dinov2WithRegistersForImageClassification",
        "dinov2_with_registers",
        {**DINOV2, **DINO_HEAD, "registers": MANY},
    ),
    TransformersClass(
        "Dinov2WithRegistersModel",
        "dinov2_with_registers",
        {**DINOV2, **NO_HEAD, "registers": MANY},
    ),
    TransformersClass(
        "DINOv3ViTModel",
        "dinov3_vit",
        {**BASE, **SCALED, **NO_HEAD, "position": ("rotary (centred)",), "registers": (0, *MANY)},
    ),
    TransformersClass(
        "CLIPForImageClassification",
        "clip",
        {
            **BASE,
            "norm_pre": (True,),
            "patch_bias": (False,),
            "pooling": ("mean",),
            "final_norm": ("none",),
        },
    ),
    TransformersClass(
        "CLIPVisionModel",
        "clip_vision_model",
        {**BASE, **NO_HEAD, "norm_pre": (True,), "patch_bias": (False,)},
    ),
    TransformersClass(
        "SiglipForImageClassification",
        "siglip",
        {**BASE, "class_token": (False,), "pooling": ("mean",)},
    ),
    TransformersClass(
        "SiglipVisionModel",
        "siglip_vision_model",
        {**BASE, **NO_HEAD, "class_token": (False,), "pooling": ("attention",)},
    ),
)


def huggingface_incompatibility(config: ModelConfig) -> str | None:
    """Why no class of transformers can express `config`; None if one can."""
    if config.num_classes == 1:
        return "it takes a single output for yes or no, not for a class"
    setting = unsupported_setting(config)
    if config.stem == "conv":
        return None  # written as our registered class
    if setting is not None:
        return f"none has {setting}"
    target = nearest_class(config)
    mismatches = target.mismatches(traits_of(config))
    if not mismatches:
        return None
    return f"its nearest class, {target.architecture}, needs {'; '.join(mismatches)}"


def nearest_class(config: ModelConfig) -> TransformersClass:
    """The class of transformers with the fewest mismatches, the first with none if there is one."""
    traits = traits_of(config)
    return min(TRANSFORMERS_CLASSES, key=lambda target: len(target.mismatches(traits)))


def traits_of(config: ModelConfig) -> Traits:
    """Traits of our network that decide which class can express it."""
    all_placed = config.num_positioned_prefix_tokens == config.num_prefix_tokens
    table = {"rotary": f"rotary ({config.rotary_grid})", "learned_rotary": "learned and rotary"}
    table["relative"] = "relative"
    same = ("stem", "norm", "norm_order", "qk_norm", "norm_pre", "class_token", "feedforward")
    return {
        **{name: getattr(config, name) for name in (*same, "pooling", "patch_bias")},
        "registers": config.registers if config.registers < 2 else "several",
        "position": table.get(config.position, "learned"),
        "layer_scale": config.layer_scale > 0,
        "final_norm": config.last_norm,
        "head": "a head" if config.num_classes else "no head",
        "prefix_positions": "all" if all_placed else "not all",
        "width": MULTIPLE if mlp_ratio(config) else f"hidden_dim={config.feedforward_dim}",
    }


def mlp_ratio(config: ModelConfig) -> int | None:
    """Integer `mlp_ratio` of DINOv2 for this hidden dimension, or None."""
    for ratio in range(1, MAX_MLP_RATIO + 1):
        width = config.dim * ratio
        if config.feedforward_dim == (
            swiglu_width(width) if config.feedforward == "swiglu" else width
        ):
            return ratio
    return None


def write_huggingface(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    classes: Sequence[str] | None,
    preprocessing: Preprocessing,
    *,
    multilabel: bool = False,
) -> tuple[dict[str, Any], dict[str, Any], State]:
    """Contents of config.json and preprocessor_config.json, and the tensors of model.safetensors,
    for a network of ours."""
    reason = huggingface_incompatibility(config)
    if reason is not None:
        remedy = incompatibility_remedy(reason)
        raise WeightsError(f"transformers cannot express this network: {reason}{remedy}")
    processor = write_processor(preprocessing, config.image_size)
    on_cpu = {name: tensor.detach().cpu().float() for name, tensor in state.items()}
    if config.stem == "conv":
        settings, tensors = write_custom_model(on_cpu, config, classes or ())
    else:
        target = nearest_class(config)
        tensors = _tensors(on_cpu, config, target)
        settings = _config(config, target, classes or ())
    if multilabel:
        settings["problem_type"] = MULTILABEL
    return settings, processor, tensors


def _config(
    config: ModelConfig, target: TransformersClass, classes: Sequence[str]
) -> dict[str, Any]:
    gated, relative = config.feedforward == "swiglu", config.position == "relative"
    dino = target.model_type.startswith("dino")
    known = {
        **{theirs: getattr(config, ours) for ours, theirs in SAME.items()},
        "intermediate_size": config.feedforward_dim,
        "hidden_act": ACTIVATIONS.get(config.activation, config.activation),
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "mlp_ratio": mlp_ratio(config),
        "use_swiglu_ffn": gated,
        "use_gated_mlp": gated,
        "layer_scale_init_value": config.layer_scale,
        "layerscale_value": config.layer_scale or 1.0,
        "use_mean_pooling": True,
        "use_absolute_position_embeddings": not relative,
        "use_relative_position_bias": relative,
        "num_register_tokens": config.registers,
        **{f"{name}_bias": config.qkv_bias for name in ("query", "key", "value")},
        **{f"{name}_bias": config.proj_bias for name in ("proj", "mlp")},
        "rope_theta": config.rotary_temperature,
        "vision_use_head": config.pooling == "attention",
    }
    read = FAMILIES[target.model_type].defaults
    encoder = {name: value for name, value in known.items() if name in read}
    if target.model_type == "beit":
        encoder["drop_path_rate"] = config.drop_path
    if target.model_type == "dinov3_vit":
        encoder["pos_embed_rescale"] = None  # training augmentation that ours lacks
    if dino and gated:
        encoder["hidden_act"] = "silu"
    return {
        "architectures": [target.architecture],
        "model_type": target.model_type,
        **({"vision_config": encoder} if target.model_type in WITH_TEXT else encoder),
        **label_settings(classes),
    }


def _tensors(state: State, config: ModelConfig, target: TransformersClass) -> State:
    """Tensors of the class, by the names of its files."""
    family = target.model_type
    names = tensor_names(family, gated=config.feedforward == "swiglu")
    ours = {**state, **_biases(state, family), **_scales(config, family)}
    ours.update(_positions(ours, config, family))
    if family.startswith("dinov2") and config.num_classes:
        ours["head.weight"] = _pad_head(ours["head.weight"], config)
    if target.architecture == "CLIPForImageClassification":
        ours |= {"norm.weight": torch.ones(config.dim), "norm.bias": torch.zeros(config.dim)}
    packed = _packed(ours, config, names, family)
    if family == "beit":  # no key bias: softmax is invariant to it
        packed = {name: part for name, part in packed.items() if not name.endswith(".key.bias")}
    theirs = names.write(packed, target.architecture)
    if family.startswith(("beit", "dinov2")) and not config.num_classes:
        theirs = {name.removeprefix(names.prefix): tensor for name, tensor in theirs.items()}
    if family.startswith("dino"):  # unused parameters of these classes
        prefix = names.prefix if config.num_classes else ""
        one = (1, config.dim) if family.startswith("dinov2") else (1, 1, config.dim)
        theirs[f"{prefix}embeddings.mask_token"] = torch.zeros(one)
    if family == "dinov3_vit":
        theirs.setdefault("embeddings.register_tokens", torch.zeros(1, 0, config.dim))
    # safetensors requires tensors that share no memory
    return {name: tensor.contiguous().clone() for name, tensor in theirs.items()}


def _biases(state: State, family: str) -> State:
    """Zeros for biases that the class always has and `state` lacks."""
    always = [] if family == "dinov3_vit" else [r"attn\.proj", r"mlp\.fc\w+"]
    always += [r"attn\.qkv"] if family.startswith(("beit", "clip", "siglip")) else []
    pattern = rf"(blocks\.\d+\.({'|'.join(always)})\.)weight" if always else r"(?!)"
    found = {name: re.fullmatch(pattern, name) for name in state}
    zeros = {
        f"{match[1]}bias": state[name].new_zeros(len(state[name]))
        for name, match in found.items()
        if match is not None
    }
    if not family.startswith("clip"):
        zeros["patch_embed.proj.bias"] = state[PATCH_WEIGHT].new_zeros(len(state[PATCH_WEIGHT]))
    return {name: tensor for name, tensor in zeros.items() if name not in state}


def _scales(config: ModelConfig, family: str) -> State:
    """Layer scales of one for DINO's classes, if our network has none."""
    if config.layer_scale or not family.startswith("dino"):
        return {}
    names = [f"blocks.{index}.ls{part}.gamma" for index in range(config.depth) for part in (1, 2)]
    return {name: torch.ones(config.dim) for name in names}


def _positions(state: State, config: ModelConfig, family: str) -> State:
    """Position table with a row per prefix token of the class; DINOv2's registers have none."""
    if family == "dinov3_vit" or config.position == "relative":
        return {}
    rows, cols = config.grid
    table = state.get("pos_embed", torch.zeros(1, rows * cols, config.dim))
    placed = config.num_positioned_prefix_tokens if "pos_embed" in state else 0
    prefix_rows = {"deit": 2, "siglip": 0, "siglip_vision_model": 0}.get(family, 1)
    changed: State = {}
    if placed > prefix_rows:
        changed["reg_token"] = state["reg_token"] + table[:, prefix_rows:placed]
        table = torch.cat([table[:, :prefix_rows], table[:, placed:]], dim=1)
    missing = max(prefix_rows - placed, 0)
    return {**changed, "pos_embed": F.pad(table, (0, 0, missing, 0)) if missing else table}


def _pad_head(head: Tensor, config: ModelConfig) -> Tensor:
    """Pad the head with zeros to DINOv2's input, the class token and the mean of the patches."""
    zeros = torch.zeros_like(head)
    halves = {"class_token": (head, zeros), "mean": (zeros, head)}.get(config.pooling, (head,))
    return torch.cat(halves, dim=1)


def _packed(state: State, config: ModelConfig, names: TensorNames, family: str) -> State:
    """Reshape tensors for transformers: the inverse of reading."""
    packed: State = {}
    for name, tensor in state.items():
        start, qkv, end = name.rpartition(".qkv.")
        if qkv:
            parts = zip(names.qkv, tensor.chunk(3), strict=True)
            packed |= {f"{start}.{word}.{end}": part for word, part in parts}
        else:
            packed[name] = tensor
    side = config.patch_size
    packed[PATCH_WEIGHT] = packed[PATCH_WEIGHT].reshape(config.dim, -1, side, side)
    if family.startswith(("clip", "siglip")):
        packed["pos_embed"] = packed["pos_embed"].flatten(0, 1)
        if config.class_token:
            packed["cls_token"] = packed["cls_token"].flatten()
    joined = [("attn_pool.q.", "attn_pool.kv.", "attn_pool.packed.")]
    if family.startswith("dinov2"):
        joined.append(("mlp.fc1_g.", "mlp.fc1_x.", "mlp.packed."))
    for first, second, whole in joined:
        for name in [name for name in packed if first in name]:
            pair = (packed.pop(name), packed.pop(name.replace(first, second)))
            packed[name.replace(first, whole)] = torch.cat(pair)
    return packed
