"""timm's weights as ours, and ours as timm's.

Ours has timm's names; the patch projection is a matrix here and a convolution there, and rotary
networks (timm's Eva) and BEiT name and order some parts otherwise. timm is asked for the network
itself, which is then read module by module: nothing is known here by the name of an architecture.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from vit.config import ModelConfig
from vit.errors import WeightsError, printable
from vit.model.build import assemble
from vit.weights.formats.names import (
    BIAS_TABLE,
    PATCH_WEIGHT,
    SHARED_BIAS,
    State,
    check_fit,
    flatten_patches,
    fuse_qkv,
    some,
    spread_shared_bias,
)
from vit.weights.formats.originals import PERIODS, as_timm_names
from vit.weights.formats.rotary import Rotation, reorder
from vit.weights.formats.timm_about import class_names, imagenet_names, preprocessing
from vit.weights.formats.timm_building import build, known_about
from vit.weights.formats.timm_network import describe, rotation
from vit.weights.formats.timm_shapes import guess, looks_like_vit
from vit.weights.pretrained import Pretrained

NOTHING: Mapping[str, Any] = MappingProxyType({})
# What tensors of odd shapes, and values of odd types in a file, end in.
FAULTS = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)


def read_timm(
    state: Mapping[str, Tensor],
    *,
    architecture: str | None,
    model_args: Mapping[str, Any] = NOTHING,
    pretrained_cfg: Mapping[str, Any] = NOTHING,
    label_names: Sequence[str] | Mapping[Any, str] | None = None,
    where: str,
) -> Pretrained:
    """Weights in timm's names, or in those of their makers, and what timm's config.json says.

    Args:
        state: Tensors, as they are in the file.
        architecture: timm's name of the network, with or without a tag; None to tell it from
            the tensors.
        model_args: Arguments with which timm builds it.
        pretrained_cfg: What timm notes beside weights: preprocessing, license, tag.
        label_names: Names of the classes.
        where: What the tensors come from, for errors.

    Raises:
        WeightsError: timm does not know the architecture, our network cannot express it, or the
            tensors do not fit it.
    """
    try:
        return _read(state, architecture, model_args, dict(pretrained_cfg), label_names)
    except FAULTS as error:
        raise WeightsError(f"{printable(where)}: {printable(error)}") from None


def read_timm_bare(state: Mapping[str, Tensor], where: str, model: str | None = None) -> Pretrained:
    """Weights in timm's names without a word about them; shapes tell what network it is.

    Args:
        state: Tensors, as they are in the file.
        where: What they come from, for errors.
        model: timm's name of the network, where shapes do not settle it.

    Raises:
        WeightsError: Several networks fit, or none of ours.
    """
    return read_timm(state, architecture=model, where=where)


def looks_like_timm(state: Mapping[str, Tensor]) -> bool:
    """Whether `read_timm` knows the names in `state`."""
    try:
        return looks_like_vit(as_timm_names(state)[0])
    except WeightsError:
        return False


def from_timm(state: Mapping[str, Tensor], *, packed: bool = False) -> State:
    """Weights of timm's VisionTransformer and its kin, under our names and in our shapes.

    Args:
        state: Their tensors.
        packed: Leave gate and value of a SwiGLU in one matrix.

    Raises:
        WeightsError: There is no patch projection, a part of a query, key and value is missing, or
            something is there twice.
    """
    ours: State = {}
    for name, tensor in state.items():
        name = re.sub(r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma", name)
        name = re.sub(rf"\.attn\.({BIAS_TABLE})$", r".attn.rel_pos.\1", name)
        name = re.sub(rf"^shared_rel_pos\.{BIAS_TABLE}$", SHARED_BIAS, name)
        _put(ours, re.sub(r"\.attn\.([qkv])_proj\.", r".attn.\1.", name), tensor)
    for name in ours:
        if re.search(r"\.attn\.q\.", name) and name.replace(".q.", ".qkv.") in ours:
            raise WeightsError(f"{printable(name)} is there beside a whole qkv")
    whole = fuse_qkv(spread_shared_bias(_with_key_biases(ours)))
    return flatten_patches(whole if packed else _unpacked(whole))


def to_timm(state: Mapping[str, Tensor], config: ModelConfig) -> State:
    """Our weights of the network `config`, as those of the timm network that computes the same."""
    theirs = dict(state)
    if config.stem == "linear":
        matrix, side = theirs[PATCH_WEIGHT], config.patch_size
        theirs[PATCH_WEIGHT] = matrix.reshape(len(matrix), -1, side, side)
    if not config.is_rotary:
        return theirs
    return {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): t for name, t in theirs.items()}


def _read(
    state: Mapping[str, Tensor],
    architecture: str | None,
    model_args: Mapping[str, Any],
    about: dict[str, Any],
    label_names: Sequence[str] | Mapping[Any, str] | None,
) -> Pretrained:
    theirs, notes = as_timm_names(state)
    turned = None
    if architecture is None:
        if model_args:
            raise WeightsError("model_args need the architecture that they are for")
        config, said = guess(theirs, original=state.keys())
    else:
        about = about or known_about(architecture)
        model, size, said = build(architecture, model_args, about, theirs)
        config, turned = describe(model, architecture, size), rotation(model)
    ours, dropped = _ours(theirs, config, turned)
    with torch.device("meta"):
        check_fit(ours, assemble(config))
    names = label_names or about.get("label_names")
    classes, on_classes = class_names(names, config.num_classes)
    if not names and architecture is not None:
        classes, on_classes = imagenet_names(architecture, about, config.num_classes)
    prepared, on_pictures = preprocessing(about, config.image_size)
    terms = about.get("license")
    return Pretrained(
        state=ours,
        config=config,
        classes=classes,
        preprocessing=prepared,
        license=terms if isinstance(terms, str) else None,
        origin=f"timm {architecture}" if architecture else "a network in timm's names",
        notes=(*notes, *said, *dropped, *on_classes, *on_pictures),
    )


def _put(state: State, name: str, tensor: Tensor) -> None:
    if name in state:
        raise WeightsError(f"two tensors are both {printable(name)}")
    state[name] = tensor


def _with_key_biases(state: State) -> State:
    """Eva and BEiT have biases for queries and values only: those of keys are zeros."""
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


def _unpacked(state: State) -> State:
    """Gate and value of a SwiGLU apart, where one matrix has both, the gate first."""
    apart = dict(state)
    for name in state:
        match = re.fullmatch(r"(blocks\.\d+\.mlp\.)fc1\.(weight|bias)", name)
        second = state.get(f"{match[1]}fc2.weight") if match else None
        if match and second is not None and len(state[name]) == 2 * second.shape[1]:
            gate, value = apart.pop(name).chunk(2)
            _put(apart, f"{match[1]}fc1_g.{match[2]}", gate)
            _put(apart, f"{match[1]}fc1_x.{match[2]}", value)
    return apart


def _ours(
    theirs: State, config: ModelConfig, turned: Rotation | None
) -> tuple[State, tuple[str, ...]]:
    """Weights by our names for the network `config`, and notes on what was left out."""
    notes = []
    kept = {name: tensor for name, tensor in theirs.items() if name != PERIODS}
    if len(kept) < len(theirs):
        notes.append(f"left out: {PERIODS} (computed from rotary_temperature)")
    whole = [name for name, tensor in kept.items() if not tensor.is_floating_point()]
    if whole:
        raise WeightsError(
            f"{some(whole)} hold {kept[whole[0]].dtype}, not numbers with a fraction"
        )
    ours = {name: tensor.float() for name, tensor in from_timm(kept).items()}
    biases = [name for name in ours if name.endswith(".attn.qkv.bias")]
    if biases and not config.qkv_bias and not any(bool(ours[name].any()) for name in biases):
        notes.append(f"left out: {some(biases)} (all zeros, and the network has none)")
        ours = {name: tensor for name, tensor in ours.items() if name not in biases}
    if turned is not None:
        ours = reorder(ours, turned, config.num_heads)
    return {name: tensor.contiguous() for name, tensor in ours.items()}, tuple(notes)
