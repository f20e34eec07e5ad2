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
WITH_TEXT = ("clip", "siglip")
"""Families with the encoder settings under `vision_config`."""
MODEL_TYPE = "vit_toolkit"
PREFIX = "network."
CLASSES = {True: "VitToolkitForImageClassification", False: "VitToolkitModel"}


@dataclass(frozen=True)
class ConfigValues:
    """Values of config.json, with one checked accessor per type."""

    model_type: str
    values: Mapping[str, Any]

    def invalid(self, name: str, why: str) -> WeightsError:
        """Error for the value of `name`."""
        return WeightsError(f"config.json: {name}={printable(repr(self.values.get(name)))}: {why}")

    def integer(self, name: str, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.values.get(name)
        if type(value) is not int or value < least:
            raise self.invalid(name, f"expected a whole number of at least {least}")
        return value

    def number(self, name: str) -> float:
        """A finite number of at least 0."""
        value: Any = self.values.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise self.invalid(name, "expected a number of at least 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.values.get(name)
        if type(value) is not bool:
            raise self.invalid(name, "expected true or false")
        return value

    def square_side(self, name: str) -> int:
        """Side of a square, given as one integer or two equal ones."""
        value = self.values.get(name)
        if isinstance(value, list | tuple):
            if len(value) != 2 or value[0] != value[1]:
                raise self.invalid(name, "this network needs squares")
            value = value[0]
        if type(value) is not int or value < 1:
            raise self.invalid(name, "expected a whole number")
        return value

    def activation(self) -> str:
        """Our name for `hidden_act`."""
        value = self.values.get("hidden_act")
        if not isinstance(value, str) or value not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise self.invalid("hidden_act", f"this network has {known} only")
        return ACTIVATIONS[value]


def read_vision_config(config: Mapping[str, Any]) -> ConfigValues:
    """Settings of the image encoder in `config`."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise WeightsError(
            f"config.json: model_type={printable(repr(model_type))} (transformers) cannot be "
            f"loaded; there are {', '.join(FAMILIES)}"
        )
    if "quantization_config" in config:
        raise WeightsError("the weights are quantised; take the ones they were made from")
    defaults = FAMILIES[model_type].defaults
    if model_type not in WITH_TEXT:
        return ConfigValues(model_type, {**defaults, **config})
    values = dict(defaults)
    for name in ("vision_config", "vision_config_dict"):
        part = config.get(name)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise WeightsError(f"config.json: {name} is not a group of settings")
        if part.get("model_type", f"{model_type}_vision_model") != f"{model_type}_vision_model":
            raise WeightsError(f"config.json: {name} is not that of a {model_type} (transformers)")
        # the older `vision_config_dict`, with defaults, takes precedence in transformers
        values |= {**defaults, **part}
    return ConfigValues(model_type, values)


def model_fields(settings: ConfigValues, *, classifies: bool) -> dict[str, Any]:
    """Fields of ModelConfig, except the number of classes."""
    dim, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    if "head_dim" in settings.values and settings.values["head_dim"] != dim / heads:
        raise settings.invalid(
            "head_dim", f"this network has hidden_size / heads = {dim / heads:g}"
        )
    own = FAMILIES[settings.model_type].fields(settings, classifies)
    gated = own.get("feedforward") == "swiglu"
    return {
        "image_size": settings.square_side("image_size"),
        "patch_size": settings.square_side("patch_size"),
        "channels": settings.integer("num_channels"),
        "dim": dim,
        "depth": settings.integer("num_hidden_layers"),
        "num_heads": heads,
        "norm_eps": settings.number("layer_norm_eps"),
        "hidden_dim": settings.integer("intermediate_size"),
        "activation": "gelu" if gated else settings.activation(),
        **own,
    }


def missing_biases(settings: ConfigValues) -> tuple[str, ...]:
    """Layers of a block without a bias, where our setting gives one to all of their kind."""
    if settings.model_type in ("beit", "data2vec-vision"):
        return ("attn.key", "attn.k")
    if settings.model_type != "dinov3_vit":
        return ()
    kinds = (
        {"query_bias": ("attn.q",), "key_bias": ("attn.k",), "value_bias": ("attn.v",)},
        {"proj_bias": ("attn.proj",), "mlp_bias": tuple(f"mlp.{name}" for name in MLP_PARTS)},
    )
    return tuple(
        part
        for kind in kinds
        if any(settings.flag(name) for name in kind)
        for name, parts in kind.items()
        if not settings.flag(name)
        for part in parts
    )


def _vit(settings: ConfigValues, _classifies: bool) -> dict[str, Any]:
    return {"qkv_bias": settings.flag("qkv_bias")}


def _ijepa(settings: ConfigValues, classifies: bool) -> dict[str, Any]:
    mean = {"class_token": False, "pooling": "mean", "final_norm": "tokens"}
    return {**_vit(settings, classifies), **mean}


def _deit(settings: ConfigValues, classifies: bool) -> dict[str, Any]:
    return {**_vit(settings, classifies), "registers": 1, "prefix_positions": "all"}


def _beit(settings: ConfigValues, _classifies: bool) -> dict[str, Any]:
    absolute = settings.flag("use_absolute_position_embeddings")
    relative = [name for name in RELATIVE if settings.flag(f"use_{name}")]
    if absolute and relative:
        raise settings.invalid(f"use_{relative[0]}", "this network has one kind of positions")
    mean = settings.flag("use_mean_pooling")
    return {
        "position": "relative" if relative else "learned" if absolute else "none",
        "layer_scale": settings.number("layer_scale_init_value"),
        "pooling": "mean" if mean else "class_token",
        "final_norm": "pooled" if mean else "tokens",
    }


def _dinov2(settings: ConfigValues, classifies: bool) -> dict[str, Any]:
    hidden = int(settings.integer("hidden_size") * settings.number("mlp_ratio"))
    gated = settings.flag("use_swiglu_ffn")
    return {
        "hidden_dim": swiglu_width(hidden) if gated else hidden,
        "feedforward": "swiglu" if gated else "mlp",
        "qkv_bias": settings.flag("qkv_bias"),
        "layer_scale": settings.number("layerscale_value") or SMALLEST_SCALE,
        "pooling": "class_token_mean" if classifies else "class_token",
        "registers": settings.integer("num_register_tokens", 0),
    }


def swiglu_width(hidden: int) -> int:
    """Hidden dimension of DINOv2's SwiGLU: two thirds, rounded up to a multiple of 8."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8


def _dinov3(settings: ConfigValues, _classifies: bool) -> dict[str, Any]:
    gated = settings.flag("use_gated_mlp")
    if gated and settings.values["hidden_act"] not in SILU:
        raise settings.invalid("hidden_act", "a gated feed-forward part has silu only")
    biases = [settings.flag(f"{name}_bias") for name in ("query", "key", "value")]
    return {
        "feedforward": "swiglu" if gated else "mlp",
        "qkv_bias": any(biases),
        "proj_bias": settings.flag("proj_bias") or settings.flag("mlp_bias"),
        "layer_scale": settings.number("layerscale_value") or SMALLEST_SCALE,
        "registers": settings.integer("num_register_tokens", 0),
        "position": "rotary",
        "rotary_grid": "centred",
        "rotary_temperature": settings.number("rope_theta"),
    }


def _clip(_settings: ConfigValues, classifies: bool) -> dict[str, Any]:
    return {
        "patch_bias": False,
        "norm_pre": True,
        # its classifier averages the patches without a final norm
        "pooling": "mean" if classifies else "class_token",
        "final_norm": "none" if classifies else "tokens",
    }


def _siglip(settings: ConfigValues, classifies: bool) -> dict[str, Any]:
    attends = settings.flag("vision_use_head") and not classifies
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

    fields: Callable[[ConfigValues, bool], dict[str, Any]]
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
DINO = {**COMMON, "layer_norm_eps": 1e-6, "qkv_bias": True, "mlp_ratio": 4, "layerscale_value": 1.0}
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
