"""x"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vit.config import ModelConfig
from vit.errors import ConfigError, WeightsError, printable
from vit.model.build import assemble
from vit.weights.formats.huggingface_config import (
    MODEL_TYPE,
    MULTILABEL,
    ConfigValues,
    missing_biases,
    model_fields,
    read_custom_model,
    read_vision_config,
)
from vit.weights.formats.huggingface_processor import read_processor
from vit.weights.formats.state_dict_names import (
    BIAS_TABLE,
    PATCH_WEIGHT,
    SHARED_BIAS,
    State,
    Table,
    check_fit,
    deduplicate_names,
    expand_shared_bias,
    fuse_qkv,
    rename,
    some,
)
from vit.weights.pretrained import Pretrained

SHORT = ("q", "k", "v")
BLOCK_BIAS = f"blocks.{{b}}.attn.rel_pos.{BIAS_TABLE}"
Patterns = tuple[tuple[str, str], ...]
"""A pattern for names, and what these tensors are."""

# {m} is the prefix of the encoder, which its own class leaves out; {l} is one block.
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
ATTENTION_INSIDE: Table = (
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
BEIT_INSIDE: Table = (
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
    *ATTENTION_INSIDE,
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
MASKING: Patterns = (
    (r"(\w+\.)?embeddings\.mask_token", "a mask token"),
    (r"decoder\..+", "the decoder of masked images"),
)
INDICES: Patterns = ((r".+\.relative_position_index", "numbers that follow from the grid"),)
TEXT: Patterns = (
    (r"text_model\..+|text_projection\.weight", "the text tower"),
    (r"visual_projection\.weight|logit_scale|logit_bias", "the comparison with texts"),
    (r"(vision_model\.)?embeddings\.position_ids", "numbers from 0 on"),
)


@dataclass(frozen=True)
class TensorNames:
    """How one family spells its tensors.

    Args:
        prefix: What stands before the encoder's names.
        block: What stands before a block's, after the prefix.
        saved: Their names in files -> ours.
        inside: Their other names -> ours.
        block_inside: What else may stand before a block's.
        words: What queries, keys and values are called in `saved`.
        left_out: Tensors that have no part in the answer.
        unread: Those that have none where there is a classifier.
    """

    prefix: str
    block: str
    saved: Table
    inside: Table = ()
    block_inside: str = ""
    words: tuple[str, str, str] = ("query", "key", "value")
    left_out: Patterns = MASKING
    unread: Patterns = ()

    def read(self, state: Mapping[str, Tensor], source: str) -> State:
        """`state` under our names.

        Raises:
            WeightsError: A name is unknown, or a tensor is there twice.
        """
        maybe = f"(?:{self.prefix})?" if self.prefix else ""
        blocks = "|".join(name for name in (self.block, self.block_inside) if name)
        table = _expand_table((*self.saved, *self.inside), maybe, f"{maybe}(?:{blocks})" + "{b}.")
        return rename(state, table, source)

    def write(self, state: Mapping[str, Tensor], source: str) -> State:
        """The inverse of `read`, in the spelling of files."""
        table = _expand_table(self.saved, self.prefix, self.prefix + self.block + "{b}.")
        return rename(state, tuple((ours, theirs) for theirs, ours in table), source)


def _expand_table(table: Table, prefix: str, block: str) -> Table:
    return tuple(
        (theirs.replace("{m}", prefix).replace("{l}", block), ours) for theirs, ours in table
    )


def _vit(name: str, table: Table = VIT, inside: Table = ()) -> TensorNames:
    pooler = (rf"({name}\.)?pooler\.dense\..+", "a pooler of its own")
    return TensorNames(
        f"{name}.",
        "encoder.layer.",
        table,
        (*ATTENTION_INSIDE, *MLP, *inside),
        block_inside="layers.",
        left_out=(*MASKING, *INDICES, pooler),
    )


VIT_NAMES = {
    "vit": _vit("vit"),
    "vit_mae": _vit("vit"),
    "deit": _vit("deit"),
    "beit": _vit("beit", BEIT, BEIT_INSIDE),
    "data2vec-vision": _vit("data2vec_vision", BEIT, BEIT_INSIDE),
}
CLIP_NAMES, SIGLIP_NAMES = (
    TensorNames(
        "vision_model.",
        "encoder.layers.",
        CLIP,
        words=SHORT,
        left_out=TEXT,
        unread=((rf"(vision_model\.)?{part}\..+", what),),
    )
    for part, what in (
        ("post_layernorm", "a norm that its classifier does not use"),
        ("head", "a pooling that its classifier does not use"),
    )
)


def tensor_names(model_type: str, *, gated: bool = False) -> TensorNames:
    """The spelling of a model type of transformers.

    Args:
        model_type: As in config.json.
        gated: Whether the feed-forward part is.
    """
    if model_type in VIT_NAMES:
        return VIT_NAMES[model_type]
    if model_type == "dinov3_vit":
        mlp = GATED if gated else DINOV3_MLP
        return TensorNames("", "layer.", (*DINOV3, *mlp), block_inside="model.layer.", words=SHORT)
    if model_type.startswith("dinov2"):
        saved = (*DINOV2, *(DINOV2_GATED if gated else MLP))
        inside = (*ATTENTION_INSIDE, *(GATED if gated else ()))
        return TensorNames(f"{model_type}.", "encoder.layer.", saved, inside)
    return CLIP_NAMES if model_type.startswith("clip") else SIGLIP_NAMES


def drop_tensors(state: Mapping[str, Tensor], patterns: Patterns) -> tuple[State, tuple[str, ...]]:
    """`state` without the tensors that match, and a line for each kind of these."""
    kept: State = {}
    found: dict[str, list[str]] = {}
    for name, tensor in state.items():
        kinds = (what for pattern, what in patterns if re.fullmatch(pattern, name))
        what = next(kinds, None)
        if what is None:
            kept[name] = tensor
        else:
            found.setdefault(what, []).append(name)
    return kept, tuple(f"left out: {what} ({some(names)})" for what, names in found.items())


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
            found, ours = read_custom_model(config, state)
            with torch.device("meta"):
                check_fit(ours, assemble(found))
            notes: Notes = ()
        else:
            settings = read_vision_config(config)
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
        thresholds=(0.5,) * found.num_classes if config.get("problem_type") == MULTILABEL else None,
        notes=(*notes, *class_notes, *processor_notes),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    """Name of the class that was saved, or of its kind where the file does not say."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return printable(names[0])
    return printable(config.get("model_type"))


def _network(
    settings: ConfigValues, architecture: str, state: Mapping[str, Tensor]
) -> tuple[ModelConfig, State, Notes]:
    """The network's settings and its tensors by our names, and lines for the user."""
    if "cls_classifier.weight" in state:
        raise WeightsError(
            f"{architecture} (transformers) has two heads, and this network has one; take a DeiT "
            "without distillation, or save its encoder alone: .deit.save_pretrained(FOLDER)"
        )
    if architecture.endswith("Backbone") and settings.values.get("apply_layernorm") is False:
        raise settings.invalid("apply_layernorm", "this network normalises its last tokens")
    classifies = any(name.startswith("classifier.") for name in state)
    if architecture.endswith("ForImageClassification") and not classifies:
        raise WeightsError(f"classifier.weight is missing, though this is a {architecture}")
    fields = model_fields(settings, classifies=classifies)
    names = tensor_names(settings.model_type, gated=fields.get("feedforward") == "swiglu")
    kept, notes = drop_tensors(state, names.left_out + (names.unread if classifies else ()))
    renamed = names.read(kept, f"{architecture} (transformers)")
    ours = _convert_tensors(_fill_biases(renamed, missing_biases(settings)))
    classes = len(ours["head.weight"]) if "head.weight" in ours else 0
    config = ModelConfig(num_classes=classes, **fields)
    config, ours, more = _drop_zero_half(config, _fold_class_position(config, ours))
    _check(config, ours)
    return config, ours, (*_assumptions(settings, config), *notes, *more)


def _fill_biases(state: State, without: tuple[str, ...]) -> State:
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


def _convert_tensors(state: State) -> State:
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
        shaped.update(_unpack(name, tensor))
    return fuse_qkv(expand_shared_bias(shaped))


def _unpack(name: str, tensor: Tensor) -> State:
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


def _fold_class_position(config: ModelConfig, state: State) -> State:
    """Beside registers, the position of the class token becomes part of it, as in timm."""
    table = state.get("pos_embed")
    if table is None or not config.registers or config.num_placed_tokens:
        return state
    token, (rows, cols) = state.get("cls_token"), config.grid
    if token is None or token.shape != table[:, :1].shape or table.shape[1] != rows * cols + 1:
        return state  # the check of the shapes will say what is wrong
    return {**state, "cls_token": token + table[:, :1], "pos_embed": table[:, 1:].clone()}


def _drop_zero_half(config: ModelConfig, state: State) -> tuple[ModelConfig, State, Notes]:
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


def _assumptions(settings: ConfigValues, config: ModelConfig) -> Notes:
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
