"""Converts timm's weights to ours and back, and reads timm's config.json.

Our parameter names are timm's; the patch projection is a matrix here and a convolution there, and
rotary networks (timm's Eva) and BEiT name and order some parts differently. Settings are read from
timm's own network (timm_network.py); class names and preprocessing from its `pretrained_cfg`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from vit.config import ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, WeightsError
from vit.text import join_names, printable
from vit.weights.formats.infer_architecture import (
    infer_config,
    infer_preprocessing,
    is_vision_transformer,
)
from vit.weights.formats.original_checkpoints import PERIODS, to_timm_names
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.state_dict_names import (
    BIAS_TABLE,
    PATCH_WEIGHT,
    SHARED_BIAS,
    State,
    check_fit,
    deduplicate_names,
    expand_shared_bias,
    flatten_patches,
    fuse_qkv,
    meta_model,
    to_float32,
)
from vit.weights.formats.timm_cache import TimmFacts, cached_facts
from vit.weights.formats.timm_network import (
    RotaryOrder,
    build_timm_model,
    config_from_timm,
    known_pretrained_cfg,
    reorder_rotary_channels,
    rotary_order,
)

RESIZES = {"center": "crop", "squash": "squash"}
NOTHING: Mapping[str, Any] = MappingProxyType({})
# Errors caused by malformed tensors and values in a file.
FAULTS = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)


def read_timm(
    state: Mapping[str, Tensor],
    *,
    architecture: str | None,
    model_args: Mapping[str, Any] = NOTHING,
    pretrained_cfg: Mapping[str, Any] = NOTHING,
    label_names: Sequence[str] | Mapping[Any, str] | None = None,
    other_names: Collection[str] = (),
    where: str,
) -> Pretrained:
    """Convert weights with timm's names or those of the original repositories.

    Args:
        architecture: timm model name, with or without a tag; None to infer the settings from
            the tensors.
        other_names: Names of integers in the file, which may tell its family.
    """
    try:
        about = dict(pretrained_cfg)
        return _read(state, architecture, model_args, about, label_names, other_names)
    except FAULTS as error:
        raise WeightsError(f"{printable(where)}: {printable(error)}") from None


def looks_like_timm(state: Mapping[str, Tensor]) -> bool:
    """Whether `read_timm` recognises the names in `state`."""
    try:
        return is_vision_transformer(to_timm_names(state)[0])
    except WeightsError:
        return False


def _read(
    state: Mapping[str, Tensor],
    architecture: str | None,
    model_args: Mapping[str, Any],
    about: dict[str, Any],
    label_names: Sequence[str] | Mapping[Any, str] | None,
    other_names: Collection[str],
) -> Pretrained:
    theirs, notes = to_timm_names(state)
    facts, order = None, None
    if architecture is None:
        if model_args:
            raise WeightsError("model_args need the architecture that they are for")
        config, assumptions = infer_config(theirs, original=(*state, *other_names))
    else:
        named = bool(label_names)
        facts = cached_facts(
            lambda: timm_facts(architecture, model_args, about, theirs, named=named),
            theirs,
            architecture=architecture,
            model_args=dict(model_args),
            pretrained_cfg=about,
            named=named,
        )
        config, order, about, assumptions = facts[:4]
    ours, dropped = _ours(theirs, config, order)
    check_fit(ours, meta_model(config))
    names = label_names or about.get("label_names")
    classes, on_classes = class_names(names, config.num_classes)
    if not names and facts is not None:
        classes, on_classes = facts.classes, facts.class_notes
    prepared, on_images = preprocessing(about, config.image_size)
    if prepared is None and not on_images and config.channels == 3:
        prepared, on_images = infer_preprocessing(state.keys(), config.image_size)
    terms = about.get("license")
    return Pretrained(
        state=ours,
        config=config,
        classes=classes,
        preprocessing=prepared,
        license=terms if isinstance(terms, str) else None,
        origin=f"timm {architecture}" if architecture else "a network in timm's names",
        notes=(*notes, *assumptions, *dropped, *on_classes, *on_images),
    )


def timm_facts(
    architecture: str,
    model_args: Mapping[str, Any],
    about: dict[str, Any],
    state: Mapping[str, Tensor],
    *,
    named: bool,
) -> TimmFacts:
    """Facts about weights from a network that timm builds; imports timm."""
    about = about or known_pretrained_cfg(architecture)
    model, size, notes = build_timm_model(architecture, model_args, about, state)
    config = config_from_timm(model, architecture, size)
    found: tuple[tuple[str, ...] | None, tuple[str, ...]] = (None, ())
    if not named and not about.get("label_names"):
        found = imagenet_names(architecture, about, config.num_classes)
    return TimmFacts(config, rotary_order(model), about, notes, *found)


def read_timm_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Parse timm's config.json to keyword arguments of `read_timm`; older files are flat."""
    about = content.get("pretrained_cfg", content)
    parts = {"model_args": content.get("model_args") or {}, "pretrained_cfg": about}
    name = content.get("architecture")
    if not isinstance(name, str) or not all(isinstance(part, Mapping) for part in parts.values()):
        raise WeightsError("config.json names no architecture of timm")
    names = [part.get(key) for part in (content, about) for key in ("label_names", "labels")]
    return {"architecture": name, **parts, "label_names": next(filter(None, names), None)}


def preprocessing(
    about: Mapping[str, Any], image_size: int
) -> tuple[Preprocessing | None, tuple[str, ...]]:
    """Preprocessing in timm's `pretrained_cfg`, and a note if it is unknown.

    Args:
        image_size: Side of the input images in pixels.
    """
    if not {"mean", "std", "crop_pct"} <= about.keys():
        return None, ()
    mode, share = about.get("crop_mode") or "center", about["crop_pct"]
    if mode not in RESIZES:
        return None, (f"preprocessing is not known: timm's crop_mode={mode!r} is not one of ours",)
    try:
        return (
            Preprocessing(
                image_size=(image_size, image_size),
                resize=RESIZES[mode],  # type: ignore[arg-type]  # checked by the class
                crop_share=share,
                interpolation=about.get("interpolation") or "bicubic",
                mean=tuple(about["mean"]),
                std=tuple(about["std"]),
            ),
            (),
        )
    except (ConfigError, TypeError, ValueError) as error:
        return None, (f"preprocessing is not known: timm's {printable(error)}",)


def class_names(
    names: Sequence[str] | Mapping[Any, str] | None, count: int
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Class names by output, and a note if they are invalid.

    Args:
        names: A list, or a mapping from index to name; None if there are none.
    """
    if not names or not count:
        return None, ()
    if isinstance(names, Mapping):
        numbers = [str(number) for number in range(count)]
        by_number = {str(number): name for number, name in names.items()}
        names = [by_number[number] for number in numbers if number in by_number]
    found = tuple(names) if isinstance(names, list | tuple) else ()
    if not found or not all(isinstance(name, str) for name in found):
        return None, ("class names are not known: label_names is no list of names",)
    if len(found) != count:
        return None, (f"class names are not known: {len(found)} names for {count} outputs",)
    return deduplicate_names(found)


def imagenet_names(
    name: str, about: Mapping[str, Any], count: int
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """WordNet ids of the classes, if timm's tag names ImageNet as the last training set.

    Args:
        about: timm's `pretrained_cfg`, which may have the tag instead.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    base, _, tag = name.partition(".")
    tag = tag or str(about.get("tag") or "")
    subset = infer_imagenet_subset({"num_classes": count})
    known = known_pretrained_cfg(f"{base}.{tag}").get("num_classes") == count
    if subset is None or not known or not re.search(r"(^|_)in\d+k", tag):
        return None, ()
    note = f"class names are the WordNet numbers of {subset}, which the tag {tag} stands for"
    return tuple(ImageNetInfo(subset).label_names()), (note,)


def from_timm(state: Mapping[str, Tensor], *, packed: bool = False) -> State:
    """Convert tensors of timm's Vision Transformers to our names and shapes."""
    ours: State = {}
    for name, tensor in state.items():
        name = re.sub(r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma", name)
        name = re.sub(rf"\.attn\.({BIAS_TABLE})$", r".attn.rel_pos.\1", name)
        name = re.sub(rf"^shared_rel_pos\.{BIAS_TABLE}$", SHARED_BIAS, name)
        _put(ours, re.sub(r"\.attn\.([qkv])_proj\.", r".attn.\1.", name), tensor)
    for name in ours:
        if re.search(r"\.attn\.q\.", name) and name.replace(".q.", ".qkv.") in ours:
            raise WeightsError(f"{printable(name)} is there beside a whole qkv")
    whole = fuse_qkv(expand_shared_bias(_fill_key_biases(ours)))
    return flatten_patches(whole if packed else _unpack(whole))


def to_timm(state: Mapping[str, Tensor], config: ModelConfig) -> State:
    """Convert our tensors of the network `config` to those of the equivalent timm network."""
    theirs = dict(state)
    if config.stem == "linear":
        matrix, side = theirs[PATCH_WEIGHT], config.patch_size
        theirs[PATCH_WEIGHT] = matrix.reshape(len(matrix), -1, side, side)
    if not config.is_rotary:
        return theirs
    return {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): t for name, t in theirs.items()}


def _put(state: State, name: str, tensor: Tensor) -> None:
    if name in state:
        raise WeightsError(f"two tensors are both {printable(name)}")
    state[name] = tensor


def _fill_key_biases(state: State) -> State:
    """Add zeros for the key biases that Eva and BEiT do not have."""
    whole = dict(state)
    for name in [name for name in state if re.fullmatch(r"blocks\.\d+\.attn\.q_bias", name)]:
        start = name.removesuffix("q_bias")
        query, value = whole.pop(name), whole.pop(f"{start}v_bias", None)
        if value is None:
            raise WeightsError(f"{start}v_bias is missing")
        _put(whole, f"{start}qkv.bias", torch.cat([query, torch.zeros_like(query), value]))
    for name in [name for name in state if re.fullmatch(r"blocks\.\d+\.attn\.q\.bias", name)]:
        whole.setdefault(name.replace(".q.", ".k."), torch.zeros_like(whole[name]))
    return whole


def _unpack(state: State) -> State:
    """Split packed SwiGLU matrices into gate and value; the gate comes first."""
    unpacked = dict(state)
    for name in state:
        match = re.fullmatch(r"(blocks\.\d+\.mlp\.)fc1\.(weight|bias)", name)
        second = state.get(f"{match[1]}fc2.weight") if match else None
        if match and second is not None and len(state[name]) == 2 * second.shape[1]:
            gate, value = unpacked.pop(name).chunk(2)
            _put(unpacked, f"{match[1]}fc1_g.{match[2]}", gate)
            _put(unpacked, f"{match[1]}fc1_x.{match[2]}", value)
    return unpacked


def _ours(
    theirs: State, config: ModelConfig, order: RotaryOrder | None
) -> tuple[State, tuple[str, ...]]:
    """Tensors by our names for the network `config`, and notes on dropped ones."""
    notes = []
    kept = {name: tensor for name, tensor in theirs.items() if name != PERIODS}
    if len(kept) < len(theirs):
        notes.append(f"left out: {PERIODS} (computed from rotary_temperature)")
    ours = from_timm(to_float32(kept))
    biases = [name for name in ours if name.endswith(".attn.qkv.bias")]
    if biases and not config.qkv_bias and not any(bool(ours[name].any()) for name in biases):
        notes.append(f"left out: {join_names(biases, 3)} (all zeros, and the network has none)")
        ours = {name: tensor for name, tensor in ours.items() if name not in biases}
    if order is not None:
        ours = reorder_rotary_channels(ours, order, config.num_heads)
    return {name: tensor.contiguous() for name, tensor in ours.items()}, tuple(notes)
