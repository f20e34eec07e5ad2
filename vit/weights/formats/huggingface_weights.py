"""Reads models of transformers: ViT, ViT-MAE, ViT-MSN, I-JEPA, DeiT, BEiT, Data2Vec Vision,
DINOv2, DINOv3, CLIP, MetaCLIP 2, SigLIP, SigLIP 2, TIPSv2, AIMv2.

A bare encoder becomes a network that returns its pooled token, before any projection; a classifier
one that returns logits.

The tables map tensor names of transformers to ours. transformers 5 renamed modules, but its files
keep the names of version 4: `in_files` is the spelling of files, `in_memory` that of a state dict
in memory, which some files have as well.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vit.config import ModelConfig
from vit.errors import WeightsError
from vit.model.build import check_fit, meta_model
from vit.model.position_embedding import sinusoidal_2d
from vit.text import join_names, printable
from vit.weights.formats.huggingface_config import (
    MODEL_TYPE,
    MULTILABEL,
    Values,
    invalid,
    missing_biases,
    model_fields,
    read_custom_model,
    read_processor,
    read_vision_config,
)
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.state_dict_names import (
    BIAS_TABLE,
    FAULTS,
    PATCH_WEIGHT,
    SHARED_BIAS,
    State,
    Table,
    deduplicate_names,
    expand_shared_bias,
    fuse_qkv,
    join_heads,
    rename,
    to_convolution,
    to_float32,
)

MAX_POSITIONS = 2**20
"""Patches of an image above which a configuration is taken to be damaged."""
SHORT = ("q", "k", "v")
BLOCK_BIAS = f"blocks.{{b}}.attn.rel_pos.{BIAS_TABLE}"
Patterns = tuple[tuple[str, str], ...]
"""Pairs of a pattern for tensor names and a description of these tensors."""
# {m} is the prefix of the encoder, which the bare encoder class omits; {l} is that of a block.
HEAD: Table = ((r"classifier.{p}", "head.{p}"),)
EMBEDDINGS: Table = (
    (r"{m}embeddings.cls_token", "cls_token"),
    (r"{m}embeddings.position_embeddings", "pos_embed"),
    (r"{m}embeddings.patch_embeddings.projection.{p}", "patch_embed.proj.{p}"),
    (r"{m}layernorm.{p}", "norm.{p}"),
)
ATTENTION: Table = (
    (r"{l}attention.attention.{qkv}.{p}", "blocks.{b}.attn.{qkv}.{p}"),
    (r"{l}attention.output.dense.{p}", "blocks.{b}.attn.proj.{p}"),
)
ATTENTION_IN_MEMORY: Table = (
    (r"{l}attention.{qkv}_proj.{p}", "blocks.{b}.attn.{qkv}.{p}"),
    (r"{l}attention.o_proj.{p}", "blocks.{b}.attn.proj.{p}"),
)
MLP: Table = ((r"{l}mlp.{fc}.{p}", "blocks.{b}.mlp.{fc}.{p}"),)
GATED: Table = (
    (r"{l}mlp.gate_proj.{p}", "blocks.{b}.mlp.fc1_g.{p}"),
    (r"{l}mlp.up_proj.{p}", "blocks.{b}.mlp.fc1_x.{p}"),
    (r"{l}mlp.down_proj.{p}", "blocks.{b}.mlp.fc2.{p}"),
)
DINO_BLOCK: Table = (
    (r"{l}norm1.{p}", "blocks.{b}.norm1.{p}"),
    (r"{l}norm2.{p}", "blocks.{b}.norm2.{p}"),
    (r"{l}layer_scale1.lambda1", "blocks.{b}.ls1.gamma"),
    (r"{l}layer_scale2.lambda1", "blocks.{b}.ls2.gamma"),
)
VIT: Table = (
    *HEAD,
    *EMBEDDINGS,
    *ATTENTION,
    (r"{m}embeddings.distillation_token", "reg_token"),
    (r"cls_classifier.{p}", "head.{p}"),
    (r"distillation_classifier.{p}", "head_dist.{p}"),
    (r"{l}layernorm_before.{p}", "blocks.{b}.norm1.{p}"),
    (r"{l}layernorm_after.{p}", "blocks.{b}.norm2.{p}"),
    (r"{l}intermediate.dense.{p}", "blocks.{b}.mlp.fc1.{p}"),
    (r"{l}output.dense.{p}", "blocks.{b}.mlp.fc2.{p}"),
)
BEIT: Table = (
    *VIT,
    (r"{m}pooler.layernorm.{p}", "fc_norm.{p}"),
    (r"{l}lambda_1", "blocks.{b}.ls1.gamma"),
    (r"{l}lambda_2", "blocks.{b}.ls2.gamma"),
    (rf"{{l}}attention.attention.relative_position_bias.{BIAS_TABLE}", BLOCK_BIAS),
    (rf"{{m}}encoder.relative_position_bias.{BIAS_TABLE}", SHARED_BIAS),
)
BEIT_IN_MEMORY: Table = (
    (rf"{{l}}relative_position_bias.{BIAS_TABLE}", BLOCK_BIAS),
    (rf"{{m}}shared_position_bias.{BIAS_TABLE}", SHARED_BIAS),
)
DINOV2: Table = (
    *HEAD,
    *EMBEDDINGS,
    *ATTENTION,
    *DINO_BLOCK,
    (r"{m}embeddings.register_tokens", "reg_token"),
)
DINOV2_GATED: Table = (
    (r"{l}mlp.weights_in.{p}", "blocks.{b}.mlp.packed.{p}"),
    (r"{l}mlp.weights_out.{p}", "blocks.{b}.mlp.fc2.{p}"),
)
DINOV3: Table = (
    (r"embeddings.cls_token", "cls_token"),
    (r"embeddings.register_tokens", "reg_token"),
    (r"embeddings.patch_embeddings.{p}", "patch_embed.proj.{p}"),
    (r"norm.{p}", "norm.{p}"),
    *ATTENTION_IN_MEMORY,
    *DINO_BLOCK,
)
DINOV3_MLP: Table = (
    (r"{l}mlp.up_proj.{p}", "blocks.{b}.mlp.fc1.{p}"),
    (r"{l}mlp.down_proj.{p}", "blocks.{b}.mlp.fc2.{p}"),
)
CLIP: Table = (
    *HEAD,
    (r"{m}embeddings.class_embedding", "cls_token"),
    (r"{m}embeddings.position_embedding.weight", "pos_embed"),
    (r"{m}embeddings.patch_embedding.{p}", "patch_embed.proj.{p}"),
    (r"{m}pre_layrnorm.{p}", "norm_pre.{p}"),
    (r"{m}post_layernorm.{p}", "norm.{p}"),
    (r"{l}layer_norm1.{p}", "blocks.{b}.norm1.{p}"),
    (r"{l}layer_norm2.{p}", "blocks.{b}.norm2.{p}"),
    (r"{l}self_attn.{qkv}_proj.{p}", "blocks.{b}.attn.{qkv}.{p}"),
    (r"{l}self_attn.out_proj.{p}", "blocks.{b}.attn.proj.{p}"),
    *MLP,
    (r"{m}head.probe", "attn_pool.latent"),
    (r"{m}head.attention.in_proj_{p}", "attn_pool.packed.{p}"),
    (r"{m}head.attention.out_proj.{p}", "attn_pool.proj.{p}"),
    (r"{m}head.layernorm.{p}", "attn_pool.norm.{p}"),
    (r"{m}head.mlp.{fc}.{p}", "attn_pool.mlp.{fc}.{p}"),
)
# Of these, which are only read, names of files and in memory stand together.
TIPSV2: Table = (
    (r"{m}(?P<same>cls_token|pos_embed|(?:patch_embed.proj|norm).(?:weight|bias))", "{same}"),
    (r"{l}(?P<same>(?:norm[12]|attn.qkv|attn.proj).(?:weight|bias))", "blocks.{b}.{same}"),
    (r"{l}(?P<same>ls[12].gamma)", "blocks.{b}.{same}"),
    *ATTENTION_IN_MEMORY,
    *MLP,
    *GATED,
    *DINOV2,
    (r"{m}register_tokens", "reg_token"),
    (r"{l}mlp.c_fc.{p}", "blocks.{b}.mlp.fc1.{p}"),
    (r"{l}mlp.w12.{p}", "blocks.{b}.mlp.packed.{p}"),
    (r"{l}mlp.(?:c_proj|w3).{p}", "blocks.{b}.mlp.fc2.{p}"),
)
AIMV2: Table = (
    (r"{m}embeddings.patch_embed.{p}", "patch_embed.proj.{p}"),
    (r"{m}embeddings.rms_norm.weight", "patch_embed.norm.weight"),
    (r"{m}embeddings.position_embedding.weight", "pos_embed"),
    (r"{m}rms_norm.weight", "norm.weight"),
    (r"{l}rms_norm(?P<number>[12]).weight", "blocks.{b}.norm{number}.weight"),
    (r"{l}attention.{qkv}_proj.weight", "blocks.{b}.attn.{qkv}.weight"),
    (r"{l}attention.out_proj.weight", "blocks.{b}.attn.proj.weight"),
    *((theirs.replace("{l}mlp", "{l}ffn"), ours) for theirs, ours in GATED),
)
OF_AIMV2 = (r"(vision_model\.)?head\..+", "attention pooling, which is another than the one here")
MASKING: Patterns = (
    (r"(\w+\.)*mask_token", "a mask token"),
    (r"decoder\..+", "the decoder of masked images"),
    (r"lm_head\..+", "the head of masked images"),
)
TEXT: Patterns = (
    (r"text_(model|encoder)\..+|text_projection\.weight", "the text tower"),
    (r"visual_projection\.weight|logit_scale|logit_bias|temperature", "the comparison with texts"),
)
Notes = tuple[str, ...]
PLACEHOLDER = r"LABEL_\d+"
TOKENS = ("cls_token", "reg_token", "pos_embed", "attn_pool.latent")
ANTIALIASED = ("dinov2_with_registers", "siglip2", "tipsv2")  # where positions are resized


@dataclass(frozen=True)
class TensorNames:
    """Tensor names of one family."""

    prefix: str
    block: str
    in_files: Table
    in_memory: Table = ()
    block_in_memory: str = ""
    qkv: tuple[str, str, str] = ("query", "key", "value")
    left_out: Patterns = MASKING
    unused_with_head: Patterns = ()

    def read(self, state: Mapping[str, Tensor], source: str) -> State:
        optional = f"(?:{self.prefix})?" if self.prefix else ""
        blocks = "|".join(name for name in (self.block, self.block_in_memory) if name)
        table = _expand_table(
            (*self.in_files, *self.in_memory), optional, f"{optional}(?:{blocks})" + "{b}."
        )
        return rename(state, table, source)

    def write(self, state: Mapping[str, Tensor], source: str) -> State:
        """The inverse of `read`, with the names of files."""
        table = _expand_table(self.in_files, self.prefix, self.prefix + self.block + "{b}.")
        return rename(state, tuple((ours, theirs) for theirs, ours in table), source)


def _expand_table(table: Table, prefix: str, block: str) -> Table:
    return tuple(
        (theirs.replace("{m}", prefix).replace("{l}", block), ours) for theirs, ours in table
    )


def _vit(name: str, table: Table = VIT, in_memory: Table = ()) -> TensorNames:
    pooler = (rf"({name}\.)?pooler\.dense\..+", "a pooler of its own")
    return TensorNames(
        f"{name}.",
        "encoder.layer.",
        table,
        (*ATTENTION_IN_MEMORY, *MLP, *in_memory),
        block_in_memory="layers.",
        left_out=(*MASKING, pooler),
    )


VIT_NAMES = {
    "vit": _vit("vit"),
    "vit_mae": _vit("vit"),
    "vit_msn": _vit("vit"),
    "ijepa": _vit("ijepa"),
    "deit": _vit("deit"),
    "beit": _vit("beit", BEIT, BEIT_IN_MEMORY),
    "data2vec-vision": _vit("data2vec_vision", BEIT, BEIT_IN_MEMORY),
}
CLIP_NAMES, SIGLIP_NAMES = (
    TensorNames(
        "vision_model.",
        "encoder.layers.",
        CLIP,
        qkv=SHORT,
        left_out=TEXT,
        unused_with_head=((rf"(vision_model\.)?{part}\..+", what),),
    )
    for part, what in (
        ("post_layernorm", "a norm that its classifier does not use"),
        ("head", "a pooling that its classifier does not use"),
    )
)
TOWERS = {
    **dict.fromkeys(("clip", "metaclip_2"), CLIP_NAMES),
    **dict.fromkeys(("siglip", "siglip2"), SIGLIP_NAMES),
    "tipsv2": TensorNames(
        "vision_encoder.|vision_model.",
        "blocks.|encoder.layer.",
        TIPSV2,
        left_out=(*MASKING, *TEXT),
    ),
    "aimv2": TensorNames("vision_model.", "encoder.layers.", AIMV2, left_out=(*TEXT, OF_AIMV2)),
}


def tensor_names(model_type: str, *, gated: bool = False) -> TensorNames:
    if model_type in VIT_NAMES:
        return VIT_NAMES[model_type]
    if model_type == "dinov3_vit":
        mlp = GATED if gated else DINOV3_MLP
        return TensorNames("", "layer.", (*DINOV3, *mlp), block_in_memory="model.layer.", qkv=SHORT)
    if model_type.startswith("dinov2"):
        in_files = (*DINOV2, *(DINOV2_GATED if gated else MLP))
        in_memory = (*ATTENTION_IN_MEMORY, *(GATED if gated else ()))
        return TensorNames(f"{model_type}.", "encoder.layer.", in_files, in_memory)
    return TOWERS[model_type.removesuffix("_vision_model")]


def drop_tensors(state: Mapping[str, Tensor], patterns: Patterns) -> tuple[State, tuple[str, ...]]:
    """Remove the tensors that match `patterns`; also return a note for each description."""
    kept: State = {}
    found: dict[str, list[str]] = {}
    for name, tensor in state.items():
        kinds = (what for pattern, what in patterns if re.fullmatch(pattern, name))
        what = next(kinds, None)
        if what is None:
            kept[name] = tensor
        else:
            found.setdefault(what, []).append(name)
    return kept, tuple(
        f"left out: {what} ({join_names(names, 3)})" for what, names in found.items()
    )


def read_huggingface(
    config: Mapping[str, Any],
    processor: Mapping[str, Any] | None,
    state: Mapping[str, Tensor],
    where: str,
) -> Pretrained:
    """Convert a model of transformers."""
    try:
        if config.get("model_type") == MODEL_TYPE:
            found, ours = read_custom_model(config, state)
            check_fit(ours, meta_model(found))
            notes: Notes = ()
            antialias = True
        else:
            kind, values = read_vision_config(config)
            found, ours, notes = _network(kind, values, _architecture(config), state)
            antialias = kind.startswith(ANTIALIASED)
        classes, class_notes = _classes(config, found.num_classes)
    except FAULTS as error:
        own = " (code of its own, auto_map, is not run: see vit models --pretrained for timm's)"
        raise WeightsError(f"{where}: {error}{own * ('auto_map' in config)}") from None
    preprocessing, processor_notes = read_processor(
        processor, found.image_size, config.get("model_type")
    )
    return Pretrained(
        state=ours,
        config=found,
        classes=classes,
        preprocessing=preprocessing,
        antialias=antialias,
        origin=f"transformers {_architecture(config)}",
        thresholds=(0.5,) * found.num_classes if config.get("problem_type") == MULTILABEL else None,
        notes=(*notes, *class_notes, *processor_notes),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    """Name of the saved class, or the model type if the file has none."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return printable(names[0])
    return printable(config.get("model_type"))


def _network(
    model_type: str, values: Values, architecture: str, state: Mapping[str, Tensor]
) -> tuple[ModelConfig, State, Notes]:
    """Settings, tensors by our names, and notes for the user."""
    if architecture.endswith("Backbone") and values.get("apply_layernorm") is False:
        raise invalid("apply_layernorm", False, "this network normalises its last tokens")
    classifies = any(name.startswith(("classifier.", "cls_classifier.")) for name in state)
    if architecture.endswith("ForImageClassification") and not classifies:
        raise WeightsError(f"classifier.weight is missing, though this is a {architecture}")
    fields = model_fields(model_type, values, classifies=classifies)
    names = tensor_names(model_type, gated=fields.get("feedforward") == "swiglu")
    kept, notes = drop_tensors(
        state, names.left_out + (names.unused_with_head if classifies else ())
    )
    renamed = names.read(kept, f"{architecture} (transformers)")
    if model_type.startswith("siglip2") and PATCH_WEIGHT in renamed:
        renamed[PATCH_WEIGHT] = to_convolution(renamed[PATCH_WEIGHT], values["num_channels"])
    filled = _fill_biases(renamed, missing_biases(model_type, values))
    ours = join_heads(_convert_tensors(filled))
    if "head_dist.weight" in renamed:
        fields["pooling"] = "class_token_registers"
    if fields.get("final_norm") == "pooled" and not classifies and "fc_norm.weight" not in ours:
        # saved without its pooler, which has the norm
        fields["final_norm"] = "tokens" if "norm.weight" in ours else "none"
    classes = len(ours["head.weight"]) if "head.weight" in ours else 0
    config = ModelConfig(num_classes=classes, **fields)
    config, ours, more = _drop_zero_half(config, _fold_class_position(config, ours))
    _check(config, ours)
    return config, ours, (*_assumptions(model_type, config), *notes, *more)


def _fill_biases(state: State, without: tuple[str, ...]) -> State:
    """Add zeros for biases that this architecture lacks and ours has (DINOv3's keys)."""
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


def _convert_tensors(state: State) -> State:
    """Convert tensors to float32 and our shapes: fused qkv, unpacked gates."""
    shaped: State = {}
    for name, tensor in to_float32(state).items():
        if tensor.numel() == 0:
            continue  # the registers of a model without registers are an empty tensor
        if name in TOKENS:
            tensor = tensor.reshape(1, -1, tensor.shape[-1])
        elif name == PATCH_WEIGHT and tensor.ndim > 1:
            tensor = tensor.flatten(1)
        shaped.update(_unpack(name, tensor))
    return fuse_qkv(expand_shared_bias(shaped))


def _unpack(name: str, tensor: Tensor) -> State:
    """Unpack DINOv2's gated MLP, and the query from torch's MultiheadAttention."""
    start, packed, end = name.rpartition(".packed.")
    parts = 3 if start == "attn_pool" else 2
    if not packed:
        return {name: tensor}
    first, *others = (part.clone() for part in tensor.chunk(parts))
    ours = ("q", "kv") if start == "attn_pool" else ("fc1_g", "fc1_x")
    return {f"{start}.{ours[0]}.{end}": first, f"{start}.{ours[1]}.{end}": torch.cat(others)}


def _fold_class_position(config: ModelConfig, state: State) -> State:
    """Add the position of the class token to the token itself, as timm does beside registers."""
    table = state.get("pos_embed")
    if table is None or not config.registers or config.num_positioned_prefix_tokens:
        return state
    token, (rows, cols) = state.get("cls_token"), config.grid
    if token is None or token.shape != table[:, :1].shape or table.shape[1] != rows * cols + 1:
        return state  # check_fit reports the shapes
    return {**state, "cls_token": token + table[:, :1], "pos_embed": table[:, 1:].clone()}


def _drop_zero_half(config: ModelConfig, state: State) -> tuple[ModelConfig, State, Notes]:
    """Drop the half of a DINOv2 head (class token or patch mean) whose weights are all zero."""
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
    """Check `state` against `config`, without building a network of absurd depth; positions that
    are computed are added to it."""
    if config.depth > len(state):
        raise WeightsError(
            f"num_hidden_layers={config.depth}, but there are only {len(state)} tensors"
        )
    positions = math.prod(config.grid)
    if positions > MAX_POSITIONS:
        raise WeightsError(f"config.json asks for an impossible network: {positions:,} patches")
    model = meta_model(config)
    if config.position == "sinusoidal_2d":
        state["pos_embed"] = sinusoidal_2d(config.grid, config.dim).unsqueeze(0)
    check_fit(state, model)


def _assumptions(model_type: str, config: ModelConfig) -> Notes:
    if model_type == "vit_mae":
        return ("every patch is seen: masking was for the pre-training",)
    without = model_type.startswith(("siglip", "aimv2")) or model_type == "ijepa"
    without |= model_type in ("beit", "data2vec-vision") and config.last_norm != "pooled"
    if without and config.pooling == "mean" and not config.num_classes:
        return ("no pooling of its own: the mean of the tokens",)
    return ()


def _classes(config: Mapping[str, Any], count: int) -> tuple[tuple[str, ...] | None, Notes]:
    """Class names by output, if config.json has them, and notes for the user."""
    if not count:
        return None, ()
    labels, kind = config.get("id2label"), config.get("problem_type")
    notes: Notes = ()
    if kind == "regression":
        notes = ("it was trained for regression: here its outputs compete, and one wins",)
    if kind == MULTILABEL:
        notes = (f"{MULTILABEL}: an image may have several classes, each from 0.5 on",)
    unnamed: tuple[None, Notes] = None, (*notes, "config.json has no names for the classes")
    if not isinstance(labels, Mapping):
        return unnamed
    names = [labels.get(str(index), labels.get(index)) for index in range(count)]
    texts = [name for name in names if isinstance(name, str)]
    if len(labels) != count or len(texts) != count:
        raise WeightsError(f"id2label has {len(labels)} names for {count} outputs")
    if all(re.fullmatch(PLACEHOLDER, name) for name in texts):
        return unnamed
    classes, more = deduplicate_names(texts)
    return classes, notes + more
