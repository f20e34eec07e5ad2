"""Which modules and attributes of timm's networks are known; anything else is refused.

A name in TABLES is one that `timm_network` reads, or that changes nothing in evaluation. Any other
module, and any other attribute that is switched on, means another network than ours.
"""

from torch import Tensor, nn

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
TABLES: dict[str, str] = {
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
    "BatchNorm": "eps momentum counts weight bias running_mean running_var",
    "ChannelLayerNorm": f"{NORM} training",  # of a stem: no norm of tokens
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
KNOWN = {kind: frozenset(names.split()) for kind, names in TABLES.items()}
INERT = (nn.Identity, nn.Dropout)

# What a kind of module is, for those whose name does not say it.
MEANINGS = {
    "VisionTransformerDistilled": "has two heads (a distilled DeiT)",
    "RotaryEmbeddingMixed": "learns its rotary frequencies (rope_type='mixed')",
    "RelPosMlp": "computes relative positions by a small network (rel_pos_type='mlp')",
    "ResPostRelPosBlock": "normalises after attention and feed-forward (ResPostRelPosBlock)",
    "EvaBlockPostNorm": "normalises after attention and feed-forward (EvaBlockPostNorm)",
    "ParallelThingsBlock": "runs attentions side by side (ParallelThingsBlock)",
}


class Foreign(Exception):
    """What our network does not have; the text goes on after the name of the network."""


def check_known(path: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if isinstance(module, nn.Sequential | nn.ModuleList):
        return
    if kind not in KNOWN:
        raise Foreign(MEANINGS.get(kind, f"uses {kind}"))
    here = {name: value for name, value in vars(module).items() if name[0] != "_"}
    parts = (module._modules, module._parameters, module._buffers, here)
    for name, value in [item for part in parts for item in part.items()]:
        if name not in KNOWN[kind] and name != "training" and switched_on(value):
            shown = "" if isinstance(value, nn.Module | Tensor) else f"={value!r}"
            raise Foreign(f"has {path}{'.' * bool(path)}{name}{shown}")


def switched_on(value: object) -> bool:
    if isinstance(value, nn.Module):
        return not isinstance(value, INERT)
    return isinstance(value, Tensor) or bool(value)


def is_norm(module: nn.Module) -> bool:
    return KNOWN.get(type(module).__name__) == KNOWN["LayerNorm"]
