"""Networks of transformers, as ours: ViT, ViT-MAE, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP.

A bare encoder answers with its pooled token, before any projection; a classifier with its logits.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vit.config import ModelConfig
from vit.errors import ConfigError, WeightsError, printable
from vit.model.build import assemble
from vit.weights.formats.huggingface_config import (
    Settings,
    biases_left_out,
    model_fields,
    vision_settings,
)
from vit.weights.formats.huggingface_custom import MODEL_TYPE, read_own
from vit.weights.formats.huggingface_names import names_of, split_off
from vit.weights.formats.huggingface_processor import read_processor
from vit.weights.formats.huggingface_writer import SEVERAL, huggingface_refusal, write_huggingface
from vit.weights.formats.state_dict_names import (
    PATCH_WEIGHT,
    State,
    check_fit,
    distinct,
    fuse_qkv,
    spread_shared_bias,
)
from vit.weights.pretrained import Pretrained

__all__ = ["huggingface_refusal", "read_huggingface", "write_huggingface"]

Notes = tuple[str, ...]
PLACEHOLDER = r"LABEL_\d+"
TOKENS = ("cls_token", "reg_token", "pos_embed", "attn_pool.latent")


def read_huggingface(
    config: Mapping[str, Any],
    processor: Mapping[str, Any] | None,
    state: Mapping[str, Tensor],
    where: str,
) -> Pretrained:
    """A network of transformers, as ours.

    Args:
        config: Content of config.json.
        processor: Content of preprocessor_config.json, where there is one.
        state: Tensors of the weights, by their names there.
        where: The source, for messages.

    Raises:
        WeightsError: The network is of a kind that ours cannot be, or the files do not fit.
    """
    try:
        if config.get("model_type") == MODEL_TYPE:
            found, ours = read_own(config, state)
            with torch.device("meta"):
                check_fit(ours, assemble(found))
            notes: Notes = ()
        else:
            settings = vision_settings(config)
            found, ours, notes = _network(settings, _architecture(config), state)
        classes, class_notes = _classes(config, found.num_classes)
    except (ConfigError, WeightsError) as error:
        raise WeightsError(f"{printable(where)}: {error}") from None
    preprocessing, processor_notes = read_processor(processor, found.image_size)
    return Pretrained(
        state=ours,
        config=found,
        classes=classes,
        preprocessing=preprocessing,
        license=None,
        origin=f"transformers {_architecture(config)}",
        thresholds=(0.5,) * found.num_classes if config.get("problem_type") == SEVERAL else None,
        notes=(*notes, *class_notes, *processor_notes),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    """Name of the class that was saved, or of its kind where the file does not say."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return printable(names[0])
    return printable(config.get("model_type"))


def _network(
    settings: Settings, architecture: str, state: Mapping[str, Tensor]
) -> tuple[ModelConfig, State, Notes]:
    """The network's settings and its tensors by our names, and lines for the user."""
    if "cls_classifier.weight" in state:
        raise WeightsError(
            f"{architecture} (transformers) has two heads, and this network has one; take a DeiT "
            "without distillation, or save its encoder alone: .deit.save_pretrained(FOLDER)"
        )
    if architecture.endswith("Backbone") and settings.values.get("apply_layernorm") is False:
        raise settings.refuse("apply_layernorm", "this network normalises its last tokens")
    classifies = any(name.startswith("classifier.") for name in state)
    if architecture.endswith("ForImageClassification") and not classifies:
        raise WeightsError(f"classifier.weight is missing, though this is a {architecture}")
    fields = model_fields(settings, classifies=classifies)
    names = names_of(settings.model_type, gated=fields.get("feedforward") == "swiglu")
    kept, notes = split_off(state, names.left_out + (names.unread if classifies else ()))
    renamed = names.read(kept, f"{architecture} (transformers)")
    ours = _shaped(_filled(renamed, biases_left_out(settings)))
    classes = len(ours["head.weight"]) if "head.weight" in ours else 0
    config = ModelConfig(num_classes=classes, **fields)
    config, ours, more = _one_half(config, _placed(config, ours))
    _check(config, ours)
    return config, ours, (*_assumptions(settings, config), *notes, *more)


def _filled(state: State, without: tuple[str, ...]) -> State:
    """Zeros for biases that this architecture leaves out and ours has (DINOv3's keys)."""
    filled = dict(state)
    for name, tensor in state.items():
        match = re.fullmatch(r"(blocks\.\d+\.([\w.]+)\.)weight", name)
        if match is None or match[2] not in without:
            continue
        bias = f"{match[1]}bias"
        if bias in state:
            raise WeightsError(f"config.json says that there is no {bias}")
        filled[bias] = tensor.new_zeros(tensor.shape[:1])
    return filled


def _shaped(state: State) -> State:
    """Tensors in our shapes: one matrix for query, key and value, unpacked gates, float32."""
    shaped: State = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise WeightsError(f"{name} holds {tensor.dtype}, expected floats")
        if not tensor.ndim:
            raise WeightsError(f"{name} is a single number")
        if tensor.numel() == 0:
            continue  # without registers there is an empty tensor for them
        tensor = tensor.detach().cpu().float()
        if name in TOKENS:
            tensor = tensor.reshape(1, -1, tensor.shape[-1])
        elif name == PATCH_WEIGHT and tensor.ndim > 1:
            tensor = tensor.flatten(1)
        shaped.update(_unpacked(name, tensor))
    return fuse_qkv(spread_shared_bias(shaped))


def _unpacked(name: str, tensor: Tensor) -> State:
    """Gates out of DINOv2's packed matrix, the query out of torch's MultiheadAttention."""
    start, packed, end = name.rpartition(".packed.")
    parts = 3 if start == "attn_pool" else 2
    if not packed:
        return {name: tensor}
    if len(tensor) % parts:
        raise WeightsError(f"{name} has {len(tensor)} rows, expected a multiple of {parts}")
    first, *others = (part.clone() for part in tensor.chunk(parts))
    ours = ("q", "kv") if start == "attn_pool" else ("fc1_g", "fc1_x")
    return {f"{start}.{ours[0]}.{end}": first, f"{start}.{ours[1]}.{end}": torch.cat(others)}


def _placed(config: ModelConfig, state: State) -> State:
    """Beside registers, the position of the class token becomes part of it, as in timm."""
    table = state.get("pos_embed")
    if table is None or not config.registers or config.num_placed_tokens:
        return state
    token, (rows, cols) = state.get("cls_token"), config.grid
    if token is None or token.shape != table[:, :1].shape or table.shape[1] != rows * cols + 1:
        return state  # the check of the shapes will say what is wrong
    return {**state, "cls_token": token + table[:, :1], "pos_embed": table[:, 1:].clone()}


def _one_half(config: ModelConfig, state: State) -> tuple[ModelConfig, State, Notes]:
    """A head that reads class token and mean, but one of them with zeros: that one is left out."""
    head = state.get("head.weight")
    if config.pooling != "class_token_mean" or head is None or head.ndim != 2:
        return config, state, ()
    of_token, of_mean = head.chunk(2, dim=1)
    if bool(of_token.any()) == bool(of_mean.any()):
        return config, state, ()
    if of_token.any():
        config, half, zero = replace(config, pooling="class_token"), of_token, "mean"
    else:
        config = replace(config, pooling="mean", final_norm="tokens")
        half, zero = of_mean, "class token"
    note = f"left out: the half of the head that reads the {zero}, which is zero"
    return config, {**state, "head.weight": half.clone()}, (note,)


def _check(config: ModelConfig, state: State) -> None:
    """Refuse a `state` that is not of `config`, without building a network of absurd depth."""
    if config.depth > len(state):
        raise WeightsError(
            f"num_hidden_layers={config.depth}, but there are only {len(state)} tensors"
        )
    try:
        with torch.device("meta"):
            model = assemble(config)
    except RuntimeError as error:  # more numbers than fit into memory's addresses
        raise WeightsError(f"config.json asks for an impossible network: {error}") from None
    check_fit(state, model)


def _assumptions(settings: Settings, config: ModelConfig) -> Notes:
    if settings.model_type == "vit_mae":
        return ("every patch is seen: masking was for the pre-training",)
    if settings.model_type.startswith("siglip") and config.pooling == "mean":
        return () if config.num_classes else ("no pooling of its own: the mean of the tokens",)
    return ()


def _classes(config: Mapping[str, Any], count: int) -> tuple[tuple[str, ...] | None, Notes]:
    """Names by output, where config.json has them; and lines for the user."""
    if not count:
        return None, ()
    labels, kind = config.get("id2label"), config.get("problem_type")
    notes: Notes = ()
    if kind == "regression":
        notes = ("it was trained for regression: here its outputs compete, and one wins",)
    if kind == SEVERAL:
        notes = (f"{SEVERAL}: an image may have several classes, each from 0.5 on",)
    unnamed: tuple[None, Notes] = None, (*notes, "config.json has no names for the classes")
    if not isinstance(labels, Mapping):
        return unnamed
    names = [labels.get(str(index), labels.get(index)) for index in range(count)]
    texts = [name for name in names if isinstance(name, str)]
    if len(labels) != count or len(texts) != count:
        raise WeightsError(f"id2label has {len(labels)} names for {count} outputs")
    if all(re.fullmatch(PLACEHOLDER, name) for name in texts):
        return unnamed
    classes, more = distinct(texts)
    return classes, notes + more
