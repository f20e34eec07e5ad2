"""config.json of transformers as settings of our network, and our own model type.

Every value that changes the computation is read, or raises WeightsError. Missing values have the
default of their family, as in transformers.

A network that no class of transformers can express is written with model_type "vit_toolkit", our
settings under `network`, and our tensor names after "network."; the classes are registered by
huggingface_classes.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from vit.config import ModelConfig
from vit.config.parser import parse_model_config
from vit.errors import WeightsError
from vit.text import printable
from vit.weights.formats.state_dict_names import State

MULTILABEL = "multi_label_classification"
"""problem_type of a classifier that gives an image any number of classes."""
TANH = ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
ACTIVATIONS = dict.fromkeys(TANH, "gelu_tanh")
ACTIVATIONS |= {"gelu": "gelu", "gelu_python": "gelu", "quick_gelu": "quick_gelu", "relu": "relu"}
SILU = ("silu", "swish")
SMALLEST_SCALE = 1e-5  # creates the layer; its values come from the file
MLP_PARTS = ("fc1", "fc1_g", "fc1_x", "fc2")
RELATIVE = ("relative_position_bias", "shared_relative_position_bias")
SQUARES = ("image_size", "patch_size")
# Our settings that transformers has too, by its names.
SAME = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "channels": "num_channels",
    "dim": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
}
WITH_TEXT = ("clip", "siglip")
"""Families with the encoder settings under `vision_config`."""
MODEL_TYPE = "vit_toolkit"
PREFIX = "network."
CLASSES = {True: "VitToolkitForImageClassification", False: "VitToolkitModel"}


Values = Mapping[str, Any]
"""Settings of an image encoder by the names of transformers, of the types of their defaults."""


def read_vision_config(config: Mapping[str, Any]) -> tuple[str, Values]:
    """Model type, and the settings of the image encoder in `config`."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise WeightsError(
            f"config.json: model_type={printable(repr(model_type))} (transformers) cannot be "
            f"loaded; there are {', '.join(FAMILIES)}"
        )
    if "quantization_config" in config:
        raise WeightsError("the weights are quantised; take the ones they were made from")
    defaults = FAMILIES[model_type].defaults
    given = [config]
    if model_type in WITH_TEXT:
        # the older `vision_config_dict`, with defaults, takes precedence in transformers
        named = {key: config.get(key) for key in ("vision_config", "vision_config_dict")}
        given = [part for part in named.values() if part is not None]
        for name, part in named.items():
            if part is not None and not isinstance(part, Mapping):
                raise WeightsError(f"config.json: {name} is not a group of settings")
            own = f"{model_type}_vision_model"
            if part is not None and part.get("model_type", own) != own:
                raise WeightsError(
                    f"config.json: {name} is not that of a {model_type} (transformers)"
                )
    values: dict[str, Any] = dict(given[-1]) if given else {}
    return model_type, values | {
        name: _checked(name, values.get(name, default), default)
        for name, default in defaults.items()
    }


def _checked(name: str, value: Any, default: Any) -> Any:
    """`value` if it is of the type of `default`; numbers are not negative."""
    if name in SQUARES and isinstance(value, list | tuple) and len({*map(repr, value)}) == 1:
        value = value[0]
    kinds = (int, float) if type(default) is float else (type(default),)
    number = type(default) in (int, float)
    if type(value) not in kinds or (number and not 0 <= value < math.inf):
        what = "one whole number, for squares" if name in SQUARES else type(default).__name__
        raise invalid(name, value, f"expected {what}{', at least 0' * number}")
    return value


def invalid(name: str, value: Any, why: str) -> WeightsError:
    """Error for a value of config.json."""
    return WeightsError(f"config.json: {name}={printable(repr(value))}: {why}")


def model_fields(model_type: str, values: Values, *, classifies: bool) -> dict[str, Any]:
    """Fields of ModelConfig, except the number of classes."""
    head_dim = values["hidden_size"] / max(values["num_attention_heads"], 1)
    if values.get("head_dim", head_dim) != head_dim:
        raise invalid("head_dim", values["head_dim"], f"this network has {head_dim:g}")
    own = FAMILIES[model_type].fields(values, classifies)
    activation = ACTIVATIONS.get(values["hidden_act"])
    if own.get("feedforward") == "swiglu":
        activation = "gelu"  # not used
    if activation is None:
        known = ", ".join(ACTIVATIONS)
        raise invalid("hidden_act", values["hidden_act"], f"this network has {known} only")
    return {
        **{ours: values[theirs] for ours, theirs in SAME.items()},
        "norm_eps": float(values["layer_norm_eps"]),
        "activation": activation,
        **own,
    }


def missing_biases(model_type: str, values: Values) -> tuple[str, ...]:
    """Layers of a block without a bias, where our setting gives one to all of their kind."""
    if model_type in ("beit", "data2vec-vision"):
        return ("attn.key", "attn.k")
    if model_type != "dinov3_vit":
        return ()
    kinds = (
        {"query_bias": ("attn.q",), "key_bias": ("attn.k",), "value_bias": ("attn.v",)},
        {"proj_bias": ("attn.proj",), "mlp_bias": tuple(f"mlp.{name}" for name in MLP_PARTS)},
    )
    return tuple(
        part
        for kind in kinds
        if any(values[name] for name in kind)
        for name, parts in kind.items()
        if not values[name]
        for part in parts
    )


def _vit(values: Values, _classifies: bool) -> dict[str, Any]:
    return {"qkv_bias": values["qkv_bias"]}


def _ijepa(values: Values, classifies: bool) -> dict[str, Any]:
    mean = {"class_token": False, "pooling": "mean", "final_norm": "tokens"}
    return {**_vit(values, classifies), **mean}


def _deit(values: Values, classifies: bool) -> dict[str, Any]:
    return {**_vit(values, classifies), "registers": 1, "prefix_positions": "all"}


def _beit(values: Values, _classifies: bool) -> dict[str, Any]:
    absolute = values["use_absolute_position_embeddings"]
    relative = [f"use_{name}" for name in RELATIVE if values[f"use_{name}"]]
    if absolute and relative:
        raise invalid(relative[0], True, "this network has one kind of positions")
    mean = values["use_mean_pooling"]
    return {
        "position": "relative" if relative else "learned" if absolute else "none",
        "layer_scale": float(values["layer_scale_init_value"]),
        "pooling": "mean" if mean else "class_token",
        "final_norm": "pooled" if mean else "tokens",
    }


def _dinov2(values: Values, classifies: bool) -> dict[str, Any]:
    hidden = int(values["hidden_size"] * values["mlp_ratio"])
    gated = values["use_swiglu_ffn"]
    return {
        "hidden_dim": swiglu_width(hidden) if gated else hidden,
        "feedforward": "swiglu" if gated else "mlp",
        "qkv_bias": values["qkv_bias"],
        "layer_scale": float(values["layerscale_value"]) or SMALLEST_SCALE,
        "pooling": "class_token_mean" if classifies else "class_token",
        "registers": values["num_register_tokens"],
    }


def swiglu_width(hidden: int) -> int:
    """Hidden dimension of DINOv2's SwiGLU: two thirds, rounded up to a multiple of 8."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8


def _dinov3(values: Values, _classifies: bool) -> dict[str, Any]:
    gated = values["use_gated_mlp"]
    if gated and values["hidden_act"] not in SILU:
        raise invalid("hidden_act", values["hidden_act"], "a gated part has silu only")
    return {
        "feedforward": "swiglu" if gated else "mlp",
        "qkv_bias": any(values[f"{name}_bias"] for name in ("query", "key", "value")),
        "proj_bias": values["proj_bias"] or values["mlp_bias"],
        "layer_scale": float(values["layerscale_value"]) or SMALLEST_SCALE,
        "registers": values["num_register_tokens"],
        "position": "rotary",
        "rotary_grid": "centred",
        "rotary_temperature": float(values["rope_theta"]),
    }


def _clip(_values: Values, classifies: bool) -> dict[str, Any]:
    return {
        "patch_bias": False,
        "norm_pre": True,
        # its classifier averages the patches without a final norm
        "pooling": "mean" if classifies else "class_token",
        "final_norm": "none" if classifies else "tokens",
    }


def _siglip(values: Values, classifies: bool) -> dict[str, Any]:
    attends = values["vision_use_head"] and not classifies
    return {
        "class_token": False,
        "pooling": "attention" if attends else "mean",
        "final_norm": "tokens",
    }


@dataclass(frozen=True)
class Family:
    """A model type of transformers.

    Args:
        defaults: Values that config.json may omit.
    """

    fields: Callable[[Values, bool], dict[str, Any]]
    defaults: Mapping[str, Any]


COMMON = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
}
VIT = {**COMMON, "layer_norm_eps": 1e-12, "qkv_bias": True}
BEIT = {**COMMON, "layer_norm_eps": 1e-12, "layer_scale_init_value": 0.1, "use_mean_pooling": True}
BEIT |= {f"use_{name}": False for name in ("absolute_position_embeddings", *RELATIVE)}
DINO = {
    **COMMON,
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
    "mlp_ratio": 4.0,
    "layerscale_value": 1.0,
}
DINO |= {"use_swiglu_ffn": False, "apply_layernorm": True, "num_register_tokens": 0}
DINOV3 = {**COMMON, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
DINOV3 |= {"layer_norm_eps": 1e-5, "rope_theta": 100.0, "layerscale_value": 1.0}
DINOV3 |= {"query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True}
DINOV3 |= {"mlp_bias": True, "use_gated_mlp": False, "num_register_tokens": 0}
CLIP = {**COMMON, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu", "patch_size": 32}
SIGLIP = {**COMMON, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
SIGLIP |= {"vision_use_head": True}
FAMILIES = {
    "vit": Family(_vit, VIT),
    "vit_mae": Family(_vit, VIT),
    "vit_msn": Family(_vit, {**VIT, "layer_norm_eps": 1e-6}),
    "ijepa": Family(_ijepa, VIT),
    "deit": Family(_deit, VIT),
    "beit": Family(_beit, BEIT),
    "data2vec-vision": Family(_beit, BEIT),
    "dinov2": Family(_dinov2, {**DINO, "patch_size": 14}),
    "dinov2_with_registers": Family(_dinov2, {**DINO, "num_register_tokens": 4}),
    "dinov3_vit": Family(_dinov3, DINOV3),
    "clip": Family(_clip, CLIP),
    "clip_vision_model": Family(_clip, CLIP),
    "siglip": Family(_siglip, SIGLIP),
    "siglip_vision_model": Family(_siglip, SIGLIP),
}


def write_custom_model(
    state: Mapping[str, Tensor], config: ModelConfig, classes: Sequence[str]
) -> tuple[dict[str, Any], State]:
    """Content of config.json and tensors for our registered class."""
    settings = {
        "architectures": [CLASSES[config.num_classes > 0]],
        "model_type": MODEL_TYPE,
        "image_size": config.image_size,
        "num_channels": config.channels,
        **label_settings(classes),
        "network": asdict(config),
    }
    # safetensors requires tensors that share no memory
    tensors = {f"{PREFIX}{name}": tensor.contiguous().clone() for name, tensor in state.items()}
    return settings, tensors


def label_settings(classes: Sequence[str]) -> dict[str, Any]:
    """Class names as in config.json, both ways; empty without classes."""
    if not classes:
        return {}
    return {
        "id2label": {str(index): name for index, name in enumerate(classes)},
        "label2id": {name: index for index, name in enumerate(classes)},
    }


def read_custom_model(
    content: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[ModelConfig, State]:
    """The inverse of `write_custom_model`."""
    unknown = [name for name in state if not name.startswith(PREFIX)]
    if unknown:
        raise WeightsError(f"{printable(unknown[0])} is no tensor of model_type={MODEL_TYPE}")
    config = parse_model_config(content.get("network"))
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
