"""config.json and preprocessor_config.json of transformers as our settings, and our own model type.

Every value that changes the computation is read, or raises WeightsError. Missing values have the
default of their family, as in transformers.

    ViT, SigLIP, DINOv3, BEiT, TIPSv2       resize to (height, width)
    SigLIP 2 (NaFlex)                       the same, to the square of its most patches
    DeiT                                    the same, and a centre crop
    CLIP, BiT (DINOv2)                      shortest edge, and a centre crop

Resizing is the same, but transformers' centre crop rounds half pixels down and ours to even, and
with torchvision installed another implementation resizes: single bytes differ by one, rarely more.

A network that no class of transformers can express is written with model_type "vit_toolkit", our
settings under `network`, and our tensor names after "network."; the classes are registered by
huggingface_classes.py.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import Tensor

from vit.config import DataConfig, ModelConfig
from vit.config.setting_layers import parse_model_config
from vit.data.preprocessing import CLIP_COLOURS, IMAGENET_COLOURS, Preprocessing
from vit.errors import ConfigError, WeightsError
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
WITH_TEXT = ("clip", "metaclip_2", "siglip", "siglip2", "tipsv2", "aimv2")
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
            f"config.json: model_type={model_type!r} (transformers) cannot be "
            f"loaded; there are {', '.join(FAMILIES)}"
        )
    if "quantization_config" in config:
        raise WeightsError("the weights are quantised; take the ones they were made from")
    defaults = FAMILIES[model_type].defaults
    values = dict(config)
    if model_type in WITH_TEXT:
        # the older `vision_config_dict` takes precedence in transformers
        part = config.get("vision_config_dict") or config.get("vision_config") or {}
        own = f"{model_type}_vision_model"
        if not isinstance(part, Mapping) or part.get("model_type", own) != own:
            raise WeightsError(
                f"config.json: vision_config is not that of a {model_type} (transformers)"
            )
        values = dict(part)
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
    return WeightsError(f"config.json: {name}={value!r}: {why}")


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
        "norm_eps": float(values["layer_norm_eps" if "norm" not in own else "rms_norm_eps"]),
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


def _siglip2(values: Values, classifies: bool) -> dict[str, Any]:
    side = math.isqrt(values["num_patches"])
    return {**_siglip(values, classifies), "image_size": side * values["patch_size"]}


def _aimv2(values: Values, _classifies: bool) -> dict[str, Any]:
    for name, only in {"hidden_act": SILU, "qkv_bias": (False,), "mlp_bias": (False,)}.items():
        if values[name] not in only:
            raise invalid(name, values[name], f"an AIMv2 has {only[0]}")
    return {
        "stem": "linear_norm",
        "norm": "rmsnorm",
        "feedforward": "swiglu",
        "qkv_bias": False,
        "proj_bias": False,
        "class_token": False,
        "position": "sinusoidal_2d" if values["is_native"] else "learned",
        "pooling": "mean",
        "final_norm": "tokens",
    }


@dataclass(frozen=True)
class Family:
    """A model type of transformers; config.json may omit the `defaults`."""

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
TIPSV2 = {**DINO, "image_size": 448, "patch_size": 14, "num_register_tokens": 1}
AIMV2 = {**COMMON, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8}
AIMV2 |= {"intermediate_size": 2816, "patch_size": 14, "hidden_act": "silu", "rms_norm_eps": 1e-5}
AIMV2 |= {"qkv_bias": False, "mlp_bias": False, "is_native": False}
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
    "siglip": Family(_siglip, SIGLIP),
    "siglip2": Family(_siglip2, {**SIGLIP, "num_patches": 256}),
    "metaclip_2": Family(_clip, CLIP),
    "tipsv2": Family(_dinov2, TIPSV2),
    "aimv2": Family(_aimv2, AIMV2),
}
FAMILIES |= {f"{name}_vision_model": FAMILIES[name] for name in WITH_TEXT}


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
    config = parse_model_config(content.get("network"))
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}


RESAMPLES: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}  # Pillow's
BYTE = 1 / 255
HALF = (0.5, 0.5, 0.5)
ALWAYS = {"do_resize": True, "do_rescale": True, "rescale_factor": BYTE, "do_normalize": True}
SQUARE = {"size": 224, "do_center_crop": False, "crop_size": None, **ALWAYS}
CROP = {**SQUARE, "do_center_crop": True, "crop_size": 224}
HALVES = {"image_mean": HALF, "image_std": HALF}
CLIP_PIXELS = {"image_mean": CLIP_COLOURS[0], "image_std": CLIP_COLOURS[1], "resample": 3}
IMAGENET_PIXELS = {"image_mean": IMAGENET_COLOURS[0], "image_std": IMAGENET_COLOURS[1]}
# Defaults by class prefix: "ViT" for ViTImageProcessor, ViTFeatureExtractor, ...
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {**SQUARE, **HALVES, "resample": 2},
    "DeiT": {**CROP, **HALVES, "resample": 3, "size": 256},
    "Beit": {**SQUARE, **HALVES, "resample": 3},
    "Bit": {**CROP, **CLIP_PIXELS},
    "CLIP": {**CROP, **CLIP_PIXELS},
    "Siglip": {**SQUARE, **HALVES, "resample": 3},
    "Siglip2": {**SQUARE, **HALVES, "resample": 2, "max_num_patches": 256, "patch_size": 16},
    "Tipsv2": {**SQUARE, "resample": 2, "size": 448, "do_normalize": False},
    "DINOv3ViT": {**SQUARE, **IMAGENET_PIXELS, "resample": 2},
}
# The class of a file that names none, by model type, as in AutoImageProcessor.
OF_MODEL_TYPE = {
    **dict.fromkeys(("vit", "vit_mae", "vit_msn", "ijepa"), "ViT"),
    "deit": "DeiT",
    **dict.fromkeys(("beit", "data2vec-vision"), "Beit"),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), "Bit"),
    "dinov3_vit": "DINOv3ViT",
    **dict.fromkeys(("clip", "metaclip_2", "aimv2"), "CLIP"),
    "siglip": "Siglip",
    "siglip2": "Siglip2",
    "tipsv2": "Tipsv2",
}
STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")
BY_EDGE = ("Bit", "CLIP")
"""Classes where one number is the shortest edge; in the others it is both sides."""


def read_processor(
    processor: Mapping[str, Any] | None, image_size: int, model_type: str | None = None
) -> tuple[Preprocessing | None, tuple[str, ...]]:
    """Our Preprocessing of an image processor of transformers, and notes; None if it cannot be
    expressed.

    If only the resizing cannot be expressed, it is our usual one, with the given mean and std.
    """
    if processor is None:
        return None, ("there is no preprocessor_config.json: how images are prepared is unknown",)
    inner, usual = processor.get("image_processor", processor), None
    try:
        kind, values = _values(inner if isinstance(inner, Mapping) else {}, model_type)
        usual = _colours(values, Preprocessing.from_config(DataConfig(), image_size))
        found = _resizing(values, usual, by_edge=kind in BY_EDGE)
    except (ValueError, TypeError) as error:
        remedy = "how images are prepared is left open"
        if usual is not None:
            remedy = (
                f"its mean and std are used, but images are resized by {usual.interpolation}, the "
                f"middle {usual.crop_share:.0%} to {image_size} px"
            )
        return usual, (f"preprocessor_config.json: {error}: {remedy}",)
    side = found.image_size[0]
    shape = f"images become {side} x {side} pixels; transformers keeps their shape"
    sizes = f"images are prepared at {side} pixels, the positions are those of {image_size}"
    return found, (*[shape] * (kind == "Siglip2"), *[sizes] * (side != image_size))


def _values(given: Mapping[str, Any], model_type: str | None) -> tuple[str, Mapping[str, Any]]:
    """Class of the processor, and its settings over the defaults of this class."""
    name = given.get("image_processor_type", given.get("feature_extractor_type"))
    match = re.fullmatch(r"(\w+?)(FeatureExtractor|ImageProcessor(Fast|Pil)?)", str(name))
    usual = OF_MODEL_TYPE.get(str(model_type).removesuffix("_vision_model"))
    kind = usual if name is None else match and match[1]
    if kind is None or kind not in PROCESSORS:
        raise ConfigError(f"the processor {name!r} is unknown")
    return kind, {**PROCESSORS[kind], **given}


def _refuse(values: Mapping[str, Any], *names: str) -> ConfigError:
    shown = " with ".join(f"{name}={values[name]!r}" for name in names)
    return ConfigError(f"{shown} is not done here")


def _colours(values: Mapping[str, Any], usual: Preprocessing) -> Preprocessing:
    """`usual` with mean and std of `values`; ConfigError if pixels are scaled otherwise."""
    factor = values["rescale_factor"]
    if not (isinstance(factor, int | float) and abs(factor - BYTE) < 1e-9):
        raise _refuse(values, "rescale_factor")
    steps = {key for key in values if str(key).startswith("do_") and key not in STEPS}
    for key in {"do_rescale"} | steps:
        if values[key] is not (key == "do_rescale"):
            raise _refuse(values, key)
    if values["do_normalize"] is not True:
        return replace(usual, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    colours = {"mean": values["image_mean"], "std": values["image_std"]}
    return Preprocessing.from_dict(usual.to_dict() | colours)


def _resizing(values: Mapping[str, Any], usual: Preprocessing, *, by_edge: bool) -> Preprocessing:
    """`usual` with the resizing of `values`; ConfigError if it cannot be expressed."""
    size, crops = values["size"], values["do_center_crop"] is True
    if "max_num_patches" in values:
        size = math.isqrt(values["max_num_patches"]) * values["patch_size"]
    if values["do_resize"] is not True or values["resample"] not in RESAMPLES:
        raise _refuse(values, "do_resize", "resample")
    if type(size) is int:
        size = {"shortest_edge": size} if by_edge else {"height": size, "width": size}
    size = size if isinstance(size, Mapping) else {}
    sides = {key: side for key, side in size.items() if side is not None}
    edge = sides.keys() == {"shortest_edge"}
    square = sides.keys() == {"height", "width"} and len({*sides.values()}) == 1
    if not (square or (edge and crops)):
        raise _refuse(values, "size", "do_center_crop")
    full = next(iter(sides.values()))
    crop = values["crop_size"] if crops else full
    if isinstance(crop, Mapping):
        given = {side for side in crop.values() if side is not None}
        crop = given.pop() if len(given) == 1 else None
    if type(full) is not int or type(crop) is not int or not 0 < crop <= full:
        raise _refuse(values, "size", "crop_size")
    share = crop / full
    while math.floor(crop / share) < full:  # the largest share that gives `full` back
        share = math.nextafter(share, 0)
    return replace(
        usual,
        image_size=(crop, crop),
        resize="crop" if edge else "squash",
        crop_share=share,
        interpolation=RESAMPLES[values["resample"]],
    )


def write_processor(preprocessing: Preprocessing, image_size: int) -> dict[str, Any]:
    """preprocessor_config.json for `preprocessing`; AutoImageProcessor and pipeline() take it."""
    if preprocessing.image_size != (image_size, image_size):
        height, width = preprocessing.image_size
        raise WeightsError(
            "transformers cannot express a preprocessing that makes images of "
            f"{height} x {width} for a network of {image_size} x {image_size}"
        )
    if preprocessing.whole:
        raise WeightsError(f"transformers cannot express resize={preprocessing.resize}")
    full = math.floor(image_size / preprocessing.crop_share)
    squashes = preprocessing.resize == "squash"
    both = {"height": full, "width": full}
    crops = full != image_size or not squashes
    crop = {
        "do_center_crop": True,
        "crop_size": {"height": image_size, "width": image_size},
    }
    return {
        # ViT's processor cannot crop; BiT's supports both forms of size
        "image_processor_type": "BitImageProcessor" if crops else "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": both if squashes else {"shortest_edge": full},
        "resample": 2 if preprocessing.interpolation == "bilinear" else 3,
        **(crop if crops else {}),
        "do_rescale": True,
        "rescale_factor": BYTE,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }


def processor_notes(preprocessing: Preprocessing) -> tuple[str, ...]:
    """Notes if transformers' centre crop is shifted by one pixel.

    A margin of 3, 7 or 11 pixels leaves 1.5, 3.5 or 5.5 on each side: our crop starts at 2, 4 or
    6, transformers' at 1, 3 or 5.
    """
    size = preprocessing.image_size[0]
    if (math.floor(size / preprocessing.crop_share) - size) % 4 == 3:
        return ("transformers cuts the centre out one pixel further up and left",)
    if preprocessing.resize == "crop":
        return ("transformers cuts the centre of some images one pixel further up or left",)
    return ()
