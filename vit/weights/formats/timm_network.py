"""Builds timm's network for an architecture on the meta device, and reads its ModelConfig.

Nothing is downloaded and no values are created. Every module and attribute of timm's network must
be in KNOWN_ATTRIBUTES; a module that is not, or another attribute that is not None, False or an
identity, means that our network cannot express it. No architecture is known here by its name.

`reorder_rotary_channels` converts between the channel orders of rotary embeddings.
"""

import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn

from vit.config import ModelConfig
from vit.errors import ConfigError, WeightsError
from vit.model.patch_embed import ConvStem
from vit.text import join_names, printable
from vit.weights.formats.state_dict_names import (
    BIAS_TABLE,
    PATCH_WEIGHT,
    State,
    bias_table_side,
    square_side,
)

MODULES = (
    *("vision_transformer", "deit", "eva", "beit"),
    *("vision_transformer_relpos", "timm_conv_stem"),
)
"""Modules of timm whose networks can be read, and our plug-in."""
FIRST_CONVOLUTION = "patch_embed.convs.0.weight"
STEM_ARGUMENTS = ("stem_depth", "stem_width", "stem_stride", "stem_norm", "stem_eps")
# Arguments that are determined by the tensors, or are ignored.
DECIDED = {"num_classes", "in_chans", "img_size", "device", "dtype", "weight_init"}
REFUSALS = (TypeError, ValueError, AssertionError, RuntimeError, KeyError, ArithmeticError)


POOLINGS = {"token": "class_token", "avg": "mean", "map": "attention"}
ACTIVATIONS = {
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
SMALL_SCALE = 1e-5
NORMED = ("q_norm", "k_norm")


def build_timm_model(
    name: str,
    model_args: Mapping[str, Any],
    about: Mapping[str, Any],
    state: Mapping[str, Tensor],
) -> tuple[Any, int, tuple[str, ...]]:
    """Build timm's network for `state`; return it with the image size in pixels and notes."""
    patch, head = state.get(PATCH_WEIGHT), state.get("head.weight")
    if patch is None:
        raise WeightsError(f"{PATCH_WEIGHT} is missing: not a Vision Transformer's weights")
    args = {key: value for key, value in model_args.items() if key not in DECIDED}
    if about.get("global_pool"):
        args.setdefault("global_pool", about["global_pool"])
    args["num_classes"] = 0 if head is None else len(head)
    first = state.get(FIRST_CONVOLUTION, patch)
    args["in_chans"] = first.shape[1] if first.ndim == 4 else 3
    size = model_args.get("img_size") or (about.get("input_size") or (None,))[-1]
    if size is not None:
        args["img_size"] = size
    model = _create(name, args, most_blocks=len(state))
    return model, *_image_size(model, name, state)


def known_pretrained_cfg(name: str) -> dict[str, Any]:
    """timm's `pretrained_cfg` of a name with a tag; empty for one without."""
    import timm

    known = timm.models.get_arch_pretrained_cfgs(name.partition(".")[0])
    return dict(known[name].to_dict()) if name in known else {}


def is_timm_model(name: str) -> bool:
    """Whether `name` is one of timm's plain Vision Transformers, with or without a tag."""
    import timm

    base = name.partition(".")[0]
    return bool(timm.is_model(base) and timm.models.is_model_in_modules(base, MODULES))


def _create(name: str, args: dict[str, Any], *, most_blocks: int) -> Any:
    import timm

    base = name.partition(".")[0]
    if not timm.is_model(base):
        near = difflib.get_close_matches(base, timm.list_models(module=list(MODULES)), n=3)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise WeightsError(f"{printable(name)!r} is no network of timm {timm.__version__}{hint}")
    if not timm.models.is_model_in_modules(base, MODULES):
        raise WeightsError(
            f"{printable(name)} (timm) is not one of its plain Vision Transformers, "
            f"which are in {', '.join(MODULES)}"
        )
    unknown = [key for key in args if key not in _arguments()]
    if unknown:
        raise WeightsError(f"{printable(name)} (timm) takes no argument {join_names(unknown, 3)}")
    try:
        if args.get("depth", 0) > most_blocks:
            raise ValueError(f"depth={args['depth']}, but there are only {most_blocks} tensors")
        with torch.device("meta"):
            return timm.create_model(base, pretrained=False, **args)
    except REFUSALS as error:
        raise WeightsError(
            f"{printable(name)} (timm) cannot be built: {printable(error)}"
        ) from None


def _arguments() -> set[str]:
    from timm.models import Beit, Eva, VisionTransformer, VisionTransformerRelPos

    kinds = (VisionTransformer, Eva, Beit, VisionTransformerRelPos)
    known = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return {*known, "base", *STEM_ARGUMENTS}


def _image_size(model: Any, name: str, state: Mapping[str, Tensor]) -> tuple[int, tuple[str, ...]]:
    """Image size that the position table belongs to, a multiple of the patch size, and notes."""
    side, requested = model.patch_embed.patch_size[0], model.patch_embed.img_size[0]
    whole = requested // side * side
    table, patches = _patch_grid(model, name, state)
    size = patches * side or whole
    if size == requested:
        return size, ()
    if size == whole:
        return size, (f"image_size={size}: of {requested} pixels timm reads only whole patches",)
    return size, (f"image_size={size}, which {table} is for; {requested} is usual",)


def _patch_grid(model: Any, name: str, state: Mapping[str, Tensor]) -> tuple[str, int]:
    """Name of the position table and its side in patches; 0 without a table."""
    tables = {key for key in model.state_dict() if key.endswith(BIAS_TABLE)} & state.keys()
    for key in sorted(tables):
        return key, bias_table_side(key, state[key], prefix=model.num_prefix_tokens > 0)
    table, model_table = state.get("pos_embed"), getattr(model, "pos_embed", None)
    if table is None or model_table is None:
        return "", 0
    prefix = model_table.shape[1] - model.patch_embed.num_patches
    side = square_side(table.shape[1] - prefix)
    if not side:
        raise WeightsError(
            f"pos_embed has {table.shape[1]} rows, which are no square and the {prefix} that "
            f"{printable(name)} (timm) has for other tokens"
        )
    return "pos_embed", side


@dataclass(frozen=True)
class RotaryOrder:
    """Channel order of a rotary embedding within a head.

    Ours: channels i and i + head_dim / 2 form a pair, and row angles precede column angles.
    """

    interleaved: bool
    columns_first: bool

    def order(self, head_dim: int) -> Tensor:
        """Index of timm's channel for each of ours, (head_dim,)."""
        theirs = torch.arange(head_dim)
        pairs = theirs.view(-1, 2).T if self.interleaved else theirs.view(2, -1)
        by_axis = pairs.reshape(2, 2, -1)
        return (by_axis.flip(1) if self.columns_first else by_axis).flatten()


def reorder_rotary_channels(
    state: Mapping[str, Tensor], rotary_order: RotaryOrder, num_heads: int
) -> State:
    """Permute queries and keys of each head to our order; attention scores do not change."""
    ordered = dict(state)
    for name, tensor in state.items():
        if re.fullmatch(r"blocks\.\d+\.attn\.qkv\.(weight|bias)", name):
            parts = tensor.reshape(3, num_heads, -1, *tensor.shape[1:])
            order = rotary_order.order(parts.shape[2]).to(tensor.device)
            permuted = parts[:2].index_select(2, order)
            ordered[name] = torch.cat([permuted, parts[2:]]).flatten(0, 2)
        elif re.fullmatch(r"blocks\.\d+\.attn\.[qk]_norm\.(weight|bias)", name):
            ordered[name] = tensor[rotary_order.order(len(tensor)).to(tensor.device)]
    return ordered


VIT = """num_classes in_chans num_features head_hidden_size embed_dim feature_info pretrained_cfg
    pretrained_model_args default_cfg num_prefix_tokens dynamic_img_size no_embed_class
    global_pool patch_embed cls_token reg_token pos_embed pos_drop patch_drop norm_pre blocks norm
    attn_pool fc_norm head_drop head"""
NORM = "normalized_shape eps elementwise_affine weight bias"
ATTENTION = """num_heads head_dim attn_dim scale fused_attn qkv q_norm k_norm attn_drop proj
    proj_drop"""
RELATIVE = "window_size relative_position_bias_table relative_position_index"
BIASES = "qkv_bias_separate q_bias k_bias v_bias"
ROTARY_ATTENTION = f"""{ATTENTION} num_kv_heads num_kv_groups kv_dim num_prefix_tokens rotate_half
    q_proj k_proj v_proj"""
BLOCK = "norm1 attn drop_path1 norm2 mlp drop_path2"
MLP = "fc1 act drop1 fc2 drop2"
AXES = """dim feat_shape temperature grid_indexing rotate_half grid_offset normalize_coords
    shift_coords jitter_coords rescale_coords aug_active"""
KNOWN_ATTRIBUTES: dict[str, str] = {
    "VisionTransformer": f"{VIT} num_reg_tokens has_class_token weight_init_mode fix_init",
    "Eva": f"{VIT} cls_embed rope rope_mixed head_init_scale",
    "Beit": f"{VIT} rel_pos_bias head_init_scale",
    "VisionTransformerRelPos": f"{VIT} shared_rel_pos weight_init_mode fix_init",
    "PatchEmbed": "patch_size img_size grid_size num_patches flatten output_fmt strict_img_size"
    " proj",
    "Conv2d": "in_channels out_channels kernel_size stride padding dilation output_padding groups"
    " padding_mode weight bias",
    "Linear": "in_features out_features weight bias",
    "LayerNorm": NORM,
    "LayerNormFp32": NORM,
    "RmsNorm": NORM,
    "RmsNormFp32": NORM,
    "Block": f"{BLOCK} ls1 ls2 init_values gamma_1 gamma_2",  # also BEiT's
    "EvaBlock": f"{BLOCK} init_values gamma_1 gamma_2",
    "RelPosBlock": f"{BLOCK} ls1 ls2",
    "LayerScale": "init_values inplace gamma",
    "TimmConvStem": "channels patch_size side img_size grid_size num_patches flatten output_fmt"
    " strict_img_size stem stem_eps convs norms pools proj",
    "BatchNorm": "eps momentum updates_statistics weight bias running_mean running_var",
    "ChannelLayerNorm": f"{NORM} training",  # of a stem, not of tokens
    "MaxPool2d": "kernel_size stride padding dilation return_indices ceil_mode",
    "Attention": f"{ATTENTION} {BIASES} {RELATIVE} num_relative_distance",
    "EvaAttention": f"{ROTARY_ATTENTION} {BIASES}",
    "RelPosAttention": f"{ATTENTION} rel_pos",
    "RelativePositionBias": f"{RELATIVE} window_area",
    "RelPosBias": f"{RELATIVE} window_area prefix_tokens bias_shape",
    "AttentionRope": ROTARY_ATTENTION,
    "Mlp": MLP,
    "GluMlp": f"{MLP} chunk_dim",
    "SwiGLU": "fc1_g fc1_x act drop1 fc2 drop2",
    "AttentionPoolLatent": "num_heads head_dim feat_size scale pool fused_attn latent_dim"
    " latent_len latent out_features q kv q_norm k_norm proj proj_drop norm mlp",
    "RotaryEmbeddingCat": f"{AXES} max_res ref_feat_shape grid_type bands pos_embed",
    "RotaryEmbeddingDinoV3": f"{AXES} periods pos_embed_cached",
    "GELU": "approximate",
    "GELUTanh": "",
    "QuickGELU": "",
    "ReLU": "inplace",
    "SiLU": "inplace",
    "Identity": "",
    "Dropout": "p inplace",
    "DropPath": "drop_prob scale_by_keep",
}
KNOWN = {kind: frozenset(names.split()) for kind, names in KNOWN_ATTRIBUTES.items()}
INERT_MODULES = (nn.Identity, nn.Dropout)
# Descriptions of unsupported modules, for error messages.
DESCRIPTIONS = {
    "VisionTransformerDistilled": "has two heads (a distilled DeiT)",
    "RotaryEmbeddingMixed": "learns its rotary frequencies (rope_type='mixed')",
    "RelPosMlp": "computes relative positions by a small network (rel_pos_type='mlp')",
    "ResPostRelPosBlock": "normalises after attention and feed-forward (ResPostRelPosBlock)",
    "EvaBlockPostNorm": "normalises after attention and feed-forward (EvaBlockPostNorm)",
    "ParallelThingsBlock": "runs attentions side by side (ParallelThingsBlock)",
}


class UnsupportedNetwork(Exception):
    """A part that our network does not have; the message follows the name of the network."""


def check_module(path: str, module: nn.Module) -> None:
    """Raise UnsupportedNetwork if `module`, or an attribute that it uses, is unknown."""
    kind = type(module).__name__
    if isinstance(module, nn.Sequential | nn.ModuleList):
        return
    if kind not in KNOWN:
        raise UnsupportedNetwork(DESCRIPTIONS.get(kind, f"uses {kind}"))
    here = {name: value for name, value in vars(module).items() if name[0] != "_"}
    parts = (module._modules, module._parameters, module._buffers, here)
    for name, value in [item for part in parts for item in part.items()]:
        if name not in KNOWN[kind] and name != "training" and is_active(value):
            shown = "" if isinstance(value, nn.Module | Tensor) else f"={value!r}"
            raise UnsupportedNetwork(f"has {path}{'.' * bool(path)}{name}{shown}")


def is_active(value: object) -> bool:
    """Whether an attribute of a module changes the computation."""
    if isinstance(value, nn.Module):
        return not isinstance(value, INERT_MODULES)
    return isinstance(value, Tensor) or bool(value)


def is_norm(module: nn.Module) -> bool:
    return KNOWN.get(type(module).__name__) == KNOWN["LayerNorm"]


def config_from_timm(model: nn.Module, name: str, image_size: int) -> ModelConfig:
    """ModelConfig of timm's network `model`.

    Args:
        image_size: Side of its images in pixels, a multiple of the patch size.
    """
    try:
        for path, module in model.named_modules():
            check_module(path, module)
        return ModelConfig(**_settings(model), image_size=image_size)
    except UnsupportedNetwork as error:
        reason = f"{error}, which this network does not have"
        raise WeightsError(f"{printable(name)} (timm) {reason}") from None
    except ConfigError as error:
        raise WeightsError(f"{printable(name)} (timm) {error}") from None


def rotary_order(model: nn.Module) -> RotaryOrder | None:
    """Channel order of the rotary embedding of `model`; None without one."""
    rope: Any = getattr(model, "rope", None)
    if rope is None:
        return None
    return RotaryOrder(not rope.rotate_half, rope.grid_indexing == "xy")


def _settings(model: Any) -> dict[str, Any]:
    blocks = [_block(block) for block in model.blocks]
    if any(block != blocks[0] for block in blocks):
        raise UnsupportedNetwork("has blocks that differ from each other")
    if model.global_pool not in POOLINGS:
        raise UnsupportedNetwork(f"pools by global_pool={model.global_pool!r}")
    norm, norm_eps = _one_norm(model)
    stem_eps = getattr(model.patch_embed, "stem_eps", norm_eps)
    if stem_eps != norm_eps:
        raise UnsupportedNetwork(f"has eps={stem_eps:g} in its stem and {norm_eps:g} elsewhere")
    settings = {
        **_patches(model),
        **blocks[0],
        **_position(model),
        "num_classes": model.num_classes,
        "dim": model.embed_dim,
        "depth": len(blocks),
        "class_token": model.cls_token is not None,
        "registers": _registers(model),
        "norm": norm,
        "norm_eps": norm_eps,
        "norm_pre": is_active(getattr(model, "norm_pre", None)),
        "pooling": POOLINGS[model.global_pool],
    }
    if settings["pooling"] == "attention":
        _check_pool(model, settings)
    elif getattr(model, "attn_pool", None) is not None:
        raise UnsupportedNetwork("has an attention pool that it does not use")
    return {**settings, "final_norm": _final_norm(model, settings["pooling"])}


def _registers(model: Any) -> int:
    token = getattr(model, "reg_token", None)
    return 0 if token is None else int(token.shape[1])


def _patches(model: Any) -> dict[str, Any]:
    patches: Any = model.patch_embed
    side, (rows, columns) = patches.patch_size[0], patches.img_size
    if rows != columns:
        raise UnsupportedNetwork(f"has images of {rows} x {columns} pixels")
    if isinstance(model.patch_embed, ConvStem):  # of timm_conv_stem.py
        return {"stem": "conv", "patch_size": side, "channels": patches.channels, **patches.stem}
    projection = patches.proj
    sizes = {tuple(patches.patch_size), projection.kernel_size, projection.stride}
    if sizes != {(side, side)}:
        raise UnsupportedNetwork(f"has patches of {patches.patch_size} pixels")
    return {
        "patch_size": side,
        "channels": projection.in_channels,
        "patch_bias": projection.bias is not None,
    }


def _block(block: Any) -> dict[str, Any]:
    if not (is_norm(block.norm1) and is_norm(block.norm2)):
        raise UnsupportedNetwork("has blocks without a norm")
    attention = _attention(block.attn, block.norm1.normalized_shape[0])
    feedforward, bias = _feedforward(block.mlp)
    if bias != (block.attn.proj.bias is not None):
        raise UnsupportedNetwork("has biases in only one of attention and feed-forward")
    return {**attention, **feedforward, "proj_bias": bias, "layer_scale": _scale(block)}


def _attention(attn: Any, dim: int) -> dict[str, Any]:
    heads = attn.num_heads
    head_dim = getattr(attn, "head_dim", None) or attn.qkv.out_features // (3 * heads)
    if heads * head_dim != dim or getattr(attn, "num_kv_heads", heads) != heads:
        raise UnsupportedNetwork(
            "has heads that do not share the width equally, or keys that heads share"
        )
    if not isclose(attn.scale, head_dim**-0.5):
        raise UnsupportedNetwork(f"scales its scores by {attn.scale}")
    first = attn.qkv if attn.qkv is not None else attn.q_proj
    normed, key_normed = (is_norm(getattr(attn, name, nn.Identity())) for name in NORMED)
    if normed != key_normed:
        raise UnsupportedNetwork("normalises queries but not keys, or keys but not queries")
    bias = first.bias is not None or getattr(attn, "q_bias", None) is not None
    return {"num_heads": heads, "qkv_bias": bias, "qk_norm": normed}


def _feedforward(mlp: Any) -> tuple[dict[str, Any], bool]:
    """Settings, and whether there are biases."""
    kind, activation = type(mlp).__name__, _activation(mlp.act)
    first = mlp.fc1_g if kind == "SwiGLU" else mlp.fc1
    if (first.bias is None) != (mlp.fc2.bias is None):
        raise UnsupportedNetwork("has a bias in only one matrix of its feed-forward part")
    gated = kind != "Mlp"
    if gated != (activation == "silu"):
        raise UnsupportedNetwork(f"uses {activation} in {kind}")
    settings = {
        "hidden_dim": mlp.fc2.in_features,
        "feedforward": "swiglu" if gated else "mlp",
        "activation": "gelu" if gated else activation,
    }
    return settings, mlp.fc2.bias is not None


def _activation(module: nn.Module) -> str:
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    kind = type(module).__name__
    if kind not in ACTIVATIONS:
        raise UnsupportedNetwork(f"uses {kind} as an activation")
    return ACTIVATIONS[kind]


def _scale(block: Any) -> float:
    """Initial value of the layer scales; 0 without any."""
    if hasattr(block, "gamma_1"):
        scales, start = [block.gamma_1, block.gamma_2], block.init_values
    else:
        scales = [getattr(part, "gamma", None) for part in (block.ls1, block.ls2)]
        start = getattr(block.ls1, "init_values", None)
    absent = [scale is None for scale in scales]
    if any(absent) != all(absent):
        raise UnsupportedNetwork("has a layer scale on only one branch of a block")
    return 0.0 if all(absent) else float(start or SMALL_SCALE)


def _position(model: Any) -> dict[str, Any]:
    rope, table = getattr(model, "rope", None), getattr(model, "pos_embed", None) is not None
    if _relative(model):
        if table:
            raise UnsupportedNetwork("has positions of tokens beside relative ones")
        return {"position": "relative"}
    names = {(False, False): "none", (True, False): "learned"}
    names |= {(False, True): "rotary", (True, True): "learned_rotary"}
    settings: dict[str, Any] = {"position": names[table, rope is not None]}
    registers = _registers(model) > 0
    if table:
        all_placed = "all" if registers else "class_token"
        placed = "none" if getattr(model, "no_embed_class", False) else all_placed
        settings["prefix_positions"] = _auto_if_default(
            placed, "none" if registers else "class_token"
        )
    if model.cls_token is None and not registers:
        settings["prefix_positions"] = "auto"
    return settings | (_rotary(model, rope) if rope is not None else {})


def _relative(model: Any) -> bool:
    """Whether there is a relative position bias, per block or shared."""
    shared = [getattr(model, name, None) for name in ("rel_pos_bias", "shared_rel_pos")]
    names = ("relative_position_bias_table", "rel_pos")
    own = [getattr(block.attn, name, None) for block in model.blocks for name in names]
    return any(part is not None for part in (*shared, *own))


def _rotary(model: Any, rope: Any) -> dict[str, Any]:
    if rope.grid_offset and model.num_prefix_tokens:
        raise UnsupportedNetwork(f"counts rotary places from {rope.grid_offset}")
    halves = {block.attn.rotate_half for block in model.blocks}
    if halves != {rope.rotate_half}:
        raise UnsupportedNetwork("rotates other channels than its angles are for")
    if type(rope).__name__ == "RotaryEmbeddingDinoV3":
        if rope.normalize_coords != "separate" or rope.temperature is None:
            raise UnsupportedNetwork(f"uses normalize_coords={rope.normalize_coords!r}")
        return {"rotary_grid": "centred", "rotary_temperature": float(rope.temperature)}
    reference = rope.ref_feat_shape
    if rope.grid_type != "index" or (reference and reference[0] != reference[1]):
        raise UnsupportedNetwork(
            f"uses a rotary grid of type {rope.grid_type}, reference {reference}"
        )
    return {
        "rotary_grid": "index",
        "rotary_temperature": float(rope.temperature),
        "rotary_reference": reference[0] if reference else None,
    }


def _check_pool(model: Any, settings: dict[str, Any]) -> None:
    pool = model.attn_pool
    if type(model).__name__ == "Eva" and model.num_prefix_tokens:
        raise UnsupportedNetwork("pools by attention over the class token and registers too")
    feedforward, _ = _feedforward(pool.mlp)
    same = {"num_heads": pool.num_heads, **feedforward}
    other = [name for name, value in same.items() if settings[name] != value]
    if other:
        raise UnsupportedNetwork(
            f"has an attention pool whose {', '.join(other)} differ from the blocks'"
        )
    if pool.latent_len != 1 or not is_norm(pool.norm) or pool.q.bias is None:
        raise UnsupportedNetwork(
            "has an attention pool with several queries, or without norm or biases"
        )
    if is_active(pool.q_norm) or is_active(pool.k_norm) or pool.kv.bias is None:
        raise UnsupportedNetwork("has an attention pool that normalises queries, or has no biases")


def _final_norm(model: Any, pooling: str) -> str:
    before, after = is_active(model.norm), is_active(model.fc_norm)
    if before and after:
        raise UnsupportedNetwork("normalises both before and after pooling")
    place = "tokens" if before else "pooled" if after else "none"
    return _auto_if_default(place, "pooled" if pooling == "mean" else "tokens")


def _auto_if_default(value: str, usual: str) -> str:
    return "auto" if value == usual else value


def _one_norm(model: nn.Module) -> tuple[str, float]:
    """Type and epsilon of all norms, which must be equal."""
    found = set()
    module: Any
    for module in model.modules():
        if is_norm(module):
            if not isinstance(module.weight, Tensor):
                raise UnsupportedNetwork("has norms without weights")
            rms = "Rms" in type(module).__name__
            if not rms and module.bias is None:
                raise UnsupportedNetwork("has LayerNorms without a bias")
            found.add(("rmsnorm" if rms else "layernorm", float(module.eps)))
    if len(found) != 1:
        raise UnsupportedNetwork(f"mixes norms: {sorted(found)}")
    return found.pop()
