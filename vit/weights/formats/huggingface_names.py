"""What the families of transformers call their tensors, in files of all its versions.

transformers 5 renamed modules inside, but its files still have the names of version 4. `saved` is
what files say; `inside` is what a state dict in memory says, which some files say too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from vit.weights.formats.state_dict_names import BIAS_TABLE, SHARED_BIAS, State, Table, rename, some

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
class Names:
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
        table = _filled((*self.saved, *self.inside), maybe, f"{maybe}(?:{blocks})" + "{b}.")
        return rename(state, table, source)

    def write(self, state: Mapping[str, Tensor], source: str) -> State:
        """The inverse of `read`, in the spelling of files."""
        table = _filled(self.saved, self.prefix, self.prefix + self.block + "{b}.")
        return rename(state, tuple((ours, theirs) for theirs, ours in table), source)


def _filled(table: Table, prefix: str, block: str) -> Table:
    return tuple(
        (theirs.replace("{m}", prefix).replace("{l}", block), ours) for theirs, ours in table
    )


def _vit(name: str, table: Table = VIT, inside: Table = ()) -> Names:
    pooler = (rf"({name}\.)?pooler\.dense\..+", "a pooler of its own")
    return Names(
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
    Names(
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


def names_of(model_type: str, *, gated: bool = False) -> Names:
    """The spelling of a model type of transformers.

    Args:
        model_type: As in config.json.
        gated: Whether the feed-forward part is.
    """
    if model_type in VIT_NAMES:
        return VIT_NAMES[model_type]
    if model_type == "dinov3_vit":
        mlp = GATED if gated else DINOV3_MLP
        return Names("", "layer.", (*DINOV3, *mlp), block_inside="model.layer.", words=SHORT)
    if model_type.startswith("dinov2"):
        saved = (*DINOV2, *(DINOV2_GATED if gated else MLP))
        inside = (*ATTENTION_INSIDE, *(GATED if gated else ()))
        return Names(f"{model_type}.", "encoder.layer.", saved, inside)
    return CLIP_NAMES if model_type.startswith("clip") else SIGLIP_NAMES


def split_off(state: Mapping[str, Tensor], patterns: Patterns) -> tuple[State, tuple[str, ...]]:
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
