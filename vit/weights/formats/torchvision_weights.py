"""Reads torchvision's VisionTransformer: vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14.

A file has tensors only. Settings follow from their shapes, except the number of heads, which is
that of torchvision's own network of the same width. Images are prepared as for torchvision's own
weights of these sizes.
"""

from collections.abc import Mapping

from torch import Tensor

from vit.config import ModelConfig
from vit.data.preprocessing import IMAGENET_COLOURS, Preprocessing
from vit.errors import ConfigError, WeightsError
from vit.model.build import check_fit, meta_model
from vit.weights.formats.infer_architecture import infer_config
from vit.weights.formats.pretrained import Pretrained
from vit.weights.formats.state_dict_names import (
    FAULTS,
    Table,
    flatten_patches,
    rename,
    to_float32,
)

NAMES: Table = (
    (r"class_token", "cls_token"),
    (r"encoder.pos_embedding", "pos_embed"),
    (r"conv_proj.{p}", "patch_embed.proj.{p}"),
    (r"{l}ln_1.{p}", "blocks.{b}.norm1.{p}"),
    (r"{l}self_attention.in_proj_{p}", "blocks.{b}.attn.qkv.{p}"),
    (r"{l}self_attention.out_proj.{p}", "blocks.{b}.attn.proj.{p}"),
    (r"{l}ln_2.{p}", "blocks.{b}.norm2.{p}"),
    # linear_1 and linear_2 until torchvision 0.12
    (r"{l}mlp.(?:0|linear_1).{p}", "blocks.{b}.mlp.fc1.{p}"),
    (r"{l}mlp.(?:3|linear_2).{p}", "blocks.{b}.mlp.fc2.{p}"),
    (r"encoder.ln.{p}", "norm.{p}"),
    # `model.heads = nn.Linear(...)` is common in fine-tuning scripts
    (r"heads.(?:head.|0.)?{p}", "head.{p}"),
)
TABLE: Table = tuple(
    (theirs.replace("{l}", "encoder.layers.encoder_layer_{b}."), ours) for theirs, ours in NAMES
)
USUAL = {"norm_eps": 1e-6, "activation": "gelu", "layer_scale": 0.0}
"""Settings of torchvision's networks that tensors do not determine."""
WIDTHS = (768, 1024, 1280)
SOURCE = "torchvision's VisionTransformer"
IMAGENET = 1000
RESIZED = {(768, 16): 256, (768, 32): 256, (1024, 16): 242, (1024, 32): 256}
"""Pixels before the crop to 224, by width and patch, of the weights IMAGENET1K_V1. All others, of
SWAG, have no margin and are resized bicubically; ViT_*_Weights.transforms() has both."""


def looks_like_torchvision(state: Mapping[str, Tensor]) -> bool:
    """Whether `state` has the names of torchvision's VisionTransformer."""
    return "class_token" in state and "encoder.pos_embedding" in state


def read_torchvision(state: Mapping[str, Tensor], where: str) -> Pretrained:
    try:
        _refuse(state)
        ours = to_float32(rename(state, TABLE, SOURCE))
        config, _ = infer_config(ours, USUAL)
        ours = flatten_patches(ours)
        check_fit(ours, meta_model(config))
        if config.dim not in WIDTHS:
            raise WeightsError(
                f"the file does not say how many heads there are, and no network of torchvision "
                f"has the width {config.dim}; they have {', '.join(map(str, WIDTHS))}"
            )
    except (ConfigError, WeightsError, *FAULTS) as error:
        raise WeightsError(f"{where}: {error}") from None
    classes, notes = _classes(config.num_classes)
    prepared, on_images = _preprocessing(config)
    return Pretrained(
        state=ours,
        config=config,
        classes=classes,
        preprocessing=prepared,
        origin=f"torchvision VisionTransformer {config.dim}/{config.patch_size}",
        notes=(
            f"{config.num_heads} heads, as torchvision's own networks of width {config.dim}",
            *notes,
            on_images,
        ),
    )


def _refuse(state: Mapping[str, Tensor]) -> None:
    if any(name.startswith("heads.pre_logits.") for name in state):
        raise WeightsError(
            f"{SOURCE} has heads.pre_logits, a layer before its head that this network does not "
            "have; take one that was built without representation_size"
        )
    if any(name.startswith("conv_proj.conv_bn_relu_") for name in state):
        raise WeightsError(
            f"{SOURCE} has a convolutional stem, which this network does not have; take one that "
            "was built without conv_stem_configs"
        )


def _preprocessing(config: ModelConfig) -> tuple[Preprocessing | None, str]:
    """Preprocessing of torchvision's own weights of this size, and a note that it is assumed."""
    unknown, side = "a file of torchvision does not say how images are prepared", config.image_size
    if config.channels != 3:
        return None, unknown
    mean, std = IMAGENET_COLOURS
    full = RESIZED.get((config.dim, config.patch_size), side) if side == 224 else side
    found = Preprocessing(
        image_size=(side, side),
        crop_share=side / full,
        interpolation="bicubic" if full == side else "bilinear",
        mean=mean,
        std=std,
    )
    return found, (
        f"{unknown}; assumed, as for its own weights: shorter side resized to {full} px by "
        f"{found.interpolation}, the middle {side} px, ImageNet's mean and std"
    )


def _classes(count: int) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """ImageNet class names for 1000 outputs, and notes for the user."""
    if count != IMAGENET:
        return None, ("a file of torchvision has no names for the classes",) if count else ()
    from torchvision.models import ViT_B_16_Weights

    names = ViT_B_16_Weights.IMAGENET1K_V1.meta["categories"]
    return tuple(map(str, names)), ("1000 outputs: taken for the classes of ImageNet-1k",)
