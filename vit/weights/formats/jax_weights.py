"""Reads .npz weights of the original JAX code of the Vision Transformer.

The first code (github.com/google-research/vision_transformer) and its successor
(github.com/google-research/big_vision) name and order some parts differently.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.config import DataConfig, ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import WeightsError
from vit.text import join_names, printable
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.state_dict_names import (
    PATCH_WEIGHT,
    State,
    check_fit,
    flatten_patches,
    meta_model,
    square_side,
)

Array = NDArray[Any]
Arrays = dict[str, Array]

PREFIXES = ("opt/target/", "params/img/", "params/", "")
KERNEL = "embedding/kernel"
POSITION_TABLE = "Transformer/posembed_input/pos_embedding"
# Errors caused by malformed arrays.
FAULTS = (ValueError, TypeError, RuntimeError, LookupError)
NOTE = (
    "activation=gelu, as timm runs these weights; the JAX code approximates it by gelu_tanh; mean "
    "and std of images are 0.5, as there"
)


@dataclass(frozen=True)
class BlockNames:
    """Indices in the module names of a block."""

    attention: int
    norm2: int
    mlp: int


FIRST = BlockNames(attention=1, norm2=2, mlp=3)
BIG_VISION = BlockNames(attention=0, norm2=1, mlp=0)


def read_jax(arrays: Mapping[str, Array], where: str) -> Pretrained:
    """Convert the arrays of an .npz file."""
    try:
        config, state, notes = _read(arrays)
        check_fit(state, meta_model(config))
    except FAULTS as error:
        raise WeightsError(f"{printable(where)}: {printable(error)}") from None
    return Pretrained(
        state=state,
        config=config,
        origin="a Vision Transformer of the JAX code",
        preprocessing=Preprocessing.from_config(DataConfig(), config.image_size),
        notes=(*notes, NOTE),
    )


def _read(arrays: Mapping[str, Array]) -> tuple[ModelConfig, State, tuple[str, ...]]:
    prefix = next((p for p in PREFIXES if f"{p}{KERNEL}" in arrays), None)
    if prefix is None:
        raise WeightsError(f"{KERNEL} is missing: these are not a Vision Transformer's in JAX")
    inside = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
    others = [name for name in arrays if not name.startswith(prefix)]
    notes = [f"left out: {join_names(others, 3)} (not of the network for images)"] if others else []
    old = [name for name in inside if name.startswith("pre_logits/")]
    if old:
        old += [name for name in inside if name.startswith("head/")]
        notes.append(f"left out: {join_names(old, limit=4)} (a head of two layers)")
    left = _unstacked({name: array for name, array in inside.items() if name not in old})
    depth = len({m[1] for n in left if (m := re.match(r"Transformer/encoderblock_(\d+)/", n))})
    state, heads, placed = _tensors(left, depth)
    if left:
        raise WeightsError(f"there is no place for {join_names(left, 3)}")
    config = _config(state, depth=depth, heads=heads, placed=placed)
    return config, flatten_patches(state), tuple(notes)


def _unstacked(arrays: Arrays) -> Arrays:
    """Split arrays that are stacked over all blocks."""
    single: Arrays = {}
    for name, array in arrays.items():
        start, _, rest = name.partition("Transformer/encoderblock/")
        if start or not rest:
            single[name] = array
        else:
            blocks = {f"Transformer/encoderblock_{i}/{rest}": a for i, a in enumerate(array)}
            single |= blocks
    return single


def _tensors(left: Arrays, depth: int) -> tuple[State, int, int]:
    """Return tensors by our names, number of heads and of prefix positions; consumes `left`."""
    kernel = _take(left, KERNEL, axes=4)
    if kernel.shape[0] != kernel.shape[1]:
        raise WeightsError(f"{KERNEL} {tuple(kernel.shape)} has no square patches")
    state = {PATCH_WEIGHT: kernel.permute(3, 2, 0, 1)}
    state["patch_embed.proj.bias"] = _take(left, "embedding/bias")
    if "cls" in left:
        state["cls_token"] = _take(left, "cls")
    big = POSITION_TABLE not in left
    state["pos_embed"] = _take(left, "pos_embedding" if big else POSITION_TABLE)
    names, heads = BIG_VISION if big else FIRST, 0
    for number in range(depth):
        heads = _block(left, state, number, names)
    _norm(left, state, "Transformer/encoder_norm", "norm")
    if "MAPHead_0/probe" in left:
        _pool(left, state)
    if "head/kernel" in left:
        _dense(left, state, "head", "head")
    placed = 0 if big else int("cls_token" in state)
    return {name: tensor.contiguous() for name, tensor in state.items()}, heads, placed


def _block(left: Arrays, state: State, number: int, names: BlockNames) -> int:
    """Convert one block, and return its number of heads."""
    theirs, ours = f"Transformer/encoderblock_{number}", f"blocks.{number}"
    attention = f"{theirs}/MultiHeadDotProductAttention_{names.attention}"
    _norm(left, state, f"{theirs}/LayerNorm_0", f"{ours}.norm1")
    parts = [_heads_in(left, f"{attention}/{part}") for part in ("query", "key", "value")]
    state[f"{ours}.attn.qkv.weight"] = torch.cat([weight for weight, _, _ in parts])
    state[f"{ours}.attn.qkv.bias"] = torch.cat([bias for _, bias, _ in parts])
    _heads_out(left, state, f"{attention}/out", f"{ours}.attn.proj")
    _norm(left, state, f"{theirs}/LayerNorm_{names.norm2}", f"{ours}.norm2")
    _mlp(left, state, f"{theirs}/MlpBlock_{names.mlp}", f"{ours}.mlp")
    return parts[0][2]


def _pool(left: Arrays, state: State) -> None:
    attention = "MAPHead_0/MultiHeadDotProductAttention_0"
    state["attn_pool.latent"] = _take(left, "MAPHead_0/probe")
    query, key, value = (_heads_in(left, f"{attention}/{p}") for p in ("query", "key", "value"))
    state["attn_pool.q.weight"], state["attn_pool.q.bias"] = query[:2]
    state["attn_pool.kv.weight"] = torch.cat([key[0], value[0]])
    state["attn_pool.kv.bias"] = torch.cat([key[1], value[1]])
    _heads_out(left, state, f"{attention}/out", "attn_pool.proj")
    _norm(left, state, "MAPHead_0/LayerNorm_0", "attn_pool.norm")
    _mlp(left, state, "MAPHead_0/MlpBlock_0", "attn_pool.mlp")


def _heads_in(left: Arrays, theirs: str) -> tuple[Tensor, Tensor, int]:
    """Weight, bias and number of heads of an input projection (dim, heads, head_dim)."""
    kernel = _take(left, f"{theirs}/kernel", axes=3)
    return kernel.flatten(1).T, _take(left, f"{theirs}/bias").flatten(), kernel.shape[1]


def _heads_out(left: Arrays, state: State, theirs: str, ours: str) -> None:
    """Convert an output projection (heads, head_dim, dim)."""
    state[f"{ours}.weight"] = _take(left, f"{theirs}/kernel", axes=3).flatten(0, 1).T
    state[f"{ours}.bias"] = _take(left, f"{theirs}/bias")


def _mlp(left: Arrays, state: State, theirs: str, ours: str) -> None:
    for number in (0, 1):
        _dense(left, state, f"{theirs}/Dense_{number}", f"{ours}.fc{number + 1}")


def _dense(left: Arrays, state: State, theirs: str, ours: str) -> None:
    # the head of some fine-tuned networks is a 1x1 convolution
    kernel = _take(left, f"{theirs}/kernel")
    state[f"{ours}.weight"] = kernel.flatten(0, -2).T
    state[f"{ours}.bias"] = _take(left, f"{theirs}/bias")


def _norm(left: Arrays, state: State, theirs: str, ours: str) -> None:
    state[f"{ours}.weight"] = _take(left, f"{theirs}/scale")
    state[f"{ours}.bias"] = _take(left, f"{theirs}/bias")


def _take(left: Arrays, name: str, axes: int | None = None) -> Tensor:
    """Remove an array from `left`, and return it as float32."""
    if name not in left:
        raise WeightsError(f"{name} is missing")
    array = left.pop(name)
    if axes is not None and array.ndim != axes:
        raise WeightsError(f"{name} {array.shape} has not {axes} axes")
    if array.dtype.kind != "f":
        raise WeightsError(f"{name} holds {array.dtype}, not numbers with a fraction")
    return torch.from_numpy(np.array(array, dtype=np.float32))


def _config(state: State, *, depth: int, heads: int, placed: int) -> ModelConfig:
    dim, channels, patch_size, _ = state[PATCH_WEIGHT].shape
    token, patches = "cls_token" in state, state["pos_embed"].shape[1] - placed
    side = square_side(patches)
    if depth == 0 or side == 0:
        raise WeightsError(f"{depth} blocks and {patches} places are not a square image's")
    pooling: Literal["attention", "class_token", "mean"] = "class_token" if token else "mean"
    if "attn_pool.latent" in state:
        pooling = "attention"
    return ModelConfig(
        image_size=side * patch_size,
        patch_size=patch_size,
        channels=channels,
        dim=dim,
        depth=depth,
        num_heads=heads,
        hidden_dim=len(state["blocks.0.mlp.fc1.bias"]),
        num_classes=len(state["head.bias"]) if "head.bias" in state else 0,
        class_token=token,
        pooling=pooling,
        prefix_positions="none" if placed < token else "auto",
        final_norm="tokens" if pooling == "mean" else "auto",
    )
