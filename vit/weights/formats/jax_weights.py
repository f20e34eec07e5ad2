"""Reads .npz weights of the original JAX code of the Vision Transformer.

The first code (github.com/google-research/vision_transformer) and its successor
(github.com/google-research/big_vision) name some parts differently.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.config import DataConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import WeightsError
from vit.model.build import check_fit, meta_model
from vit.text import join_names
from vit.weights.formats.infer_architecture import infer_config
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.state_dict_names import (
    FAULTS,
    State,
    Table,
    flatten_patches,
    fuse_qkv,
    rename,
    to_float32,
)

Array = NDArray[Any]

PREFIXES = ("opt/target/", "params/img/", "params/", "")
KERNEL = "embedding/kernel"
STACKED = "Transformer/encoderblock/"
POOL = "MAPHead_0.MultiHeadDotProductAttention_0"
# Names with dots, and `weight` for kernels and scales; {l} is the prefix of a block.
NAMES: Table = (
    (r"embedding.{p}", "patch_embed.proj.{p}"),
    (r"cls", "cls_token"),
    (r"(?:Transformer.posembed_input.)?pos_embedding", "pos_embed"),
    (r"{l}LayerNorm_0.{p}", "blocks.{b}.norm1.{p}"),
    (r"{l}MultiHeadDotProductAttention_[01].{qkv}.{p}", "blocks.{b}.attn.{qkv}.{p}"),
    (r"{l}MultiHeadDotProductAttention_[01].out.{p}", "blocks.{b}.attn.proj.{p}"),
    (r"{l}LayerNorm_[12].{p}", "blocks.{b}.norm2.{p}"),
    (r"{l}MlpBlock_[03].Dense_0.{p}", "blocks.{b}.mlp.fc1.{p}"),
    (r"{l}MlpBlock_[03].Dense_1.{p}", "blocks.{b}.mlp.fc2.{p}"),
    (r"Transformer.encoder_norm.{p}", "norm.{p}"),
    (r"MAPHead_0.probe", "attn_pool.latent"),
    (rf"{POOL}.query.{{p}}", "attn_pool.q.{p}"),
    (rf"{POOL}.key.{{p}}", "attn_pool.k.{p}"),
    (rf"{POOL}.value.{{p}}", "attn_pool.v.{p}"),
    (rf"{POOL}.out.{{p}}", "attn_pool.proj.{p}"),
    (r"MAPHead_0.LayerNorm_0.{p}", "attn_pool.norm.{p}"),
    (r"MAPHead_0.MlpBlock_0.Dense_0.{p}", "attn_pool.mlp.fc1.{p}"),
    (r"MAPHead_0.MlpBlock_0.Dense_1.{p}", "attn_pool.mlp.fc2.{p}"),
    (r"head.{p}", "head.{p}"),
)
TABLE = tuple((name.replace("{l}", "Transformer.encoderblock_{b}."), ours) for name, ours in NAMES)
USUAL = {"norm_eps": 1e-6, "activation": "gelu", "layer_scale": 0.0}
NOTE = (
    "activation=gelu, as timm runs these weights; the JAX code approximates it by gelu_tanh; mean "
    "and std of images are 0.5, as there"
)


def read_jax(arrays: Mapping[str, Array], where: str) -> Pretrained:
    """Convert the arrays of an .npz file."""
    try:
        inside, notes = _select(arrays)
        heads = next((a.shape[1] for name, a in inside.items() if name.endswith("key/kernel")), 0)
        parts = {
            re.sub(r"\.(kernel|scale)$", ".weight", name.replace("/", ".")): _tensor(name, array)
            for name, array in inside.items()
        }
        state = _join(rename(parts, TABLE, "the JAX code"))
        config, _ = infer_config(state, {**USUAL, "num_heads": heads})
        state = flatten_patches(state)
        check_fit(state, meta_model(config))
    except FAULTS as error:
        raise WeightsError(f"{where}: {error}") from None
    return Pretrained(
        state=state,
        config=config,
        origin="a Vision Transformer of the JAX code",
        preprocessing=Preprocessing.from_config(DataConfig(), config.image_size),
        notes=(*notes, NOTE),
    )


def _select(arrays: Mapping[str, Array]) -> tuple[dict[str, Array], list[str]]:
    """The arrays of the network, one for each block, and notes on the others."""
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
    single: dict[str, Array] = {}
    for name, array in inside.items():
        if name.startswith(STACKED):
            rest = name.removeprefix(STACKED)
            single |= {f"{STACKED[:-1]}_{i}/{rest}": part for i, part in enumerate(array)}
        elif name not in old:
            single[name] = array
    return single, notes


def _tensor(name: str, array: Array) -> Tensor:
    """`array` with torch's order of axes."""
    # copied, since torch takes no arrays that cannot be written
    tensor = torch.from_numpy(np.array(array))
    heads = re.search(r"/(query|key|value)/(kernel|bias)$", name)
    if heads:  # (dim, heads, head_dim), or without dim
        return tensor.flatten(1).T if heads[2] == "kernel" else tensor.flatten()
    if name == KERNEL:
        return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor
    # the head of some fine-tuned networks is a 1x1 convolution
    return tensor.flatten(0, -2).T if name.endswith("/kernel") else tensor


def _join(state: State) -> State:
    joined = fuse_qkv(to_float32(state))
    for part in ("weight", "bias"):
        if f"attn_pool.k.{part}" in joined:
            pair = (joined.pop(f"attn_pool.k.{part}"), joined.pop(f"attn_pool.v.{part}"))
            joined[f"attn_pool.kv.{part}"] = torch.cat(pair)
    return {name: tensor.contiguous() for name, tensor in joined.items()}
