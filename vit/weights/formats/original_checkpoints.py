"""Renames checkpoints of the original repositories to timm's names.

DINOv2 (github.com/facebookresearch/dinov2), DINOv3 (.../dinov3), DeiT III (.../deit), MAE
(.../mae), EVA (github.com/baaivision/EVA), CLIP (github.com/openai/CLIP) and OpenCLIP
(github.com/mlfoundations/open_clip).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vit.errors import WeightsError
from vit.text import join_names
from vit.weights.formats.state_dict_names import (
    PATCH_WEIGHT,
    WRAPPERS,
    State,
    from_naflex,
    substitute,
    wrapper_prefix,
)

# Prefixes of the image tower in an image-text model, and of the encoder in other trainings.
TRUNKS = ("visual.trunk.", "vision_encoder.", "visual.")
ENCODERS = ("backbone.", "encoder.")
# Parts that are only used in pre-training.
LEFT_OUT = {
    "mask_token": "the mask token of pre-training",
    "decoder_": "the decoder of pre-training",
    "local_cls_norm.": "a norm of pre-training only",
    "projectors.": "projections of pre-training",
    "rope.": "tables of rotary positions, which are computed",
}
SIMPLE = (
    (r"(blocks\.\d+)\.gamma_([12])", r"\1.ls\2.gamma"),
    (r"(blocks\.\d+\.mlp)\.w12\.", r"\1.fc1."),
    (r"(blocks\.\d+\.mlp)\.w1\.", r"\1.fc1_g."),
    (r"(blocks\.\d+\.mlp)\.w2\.", r"\1.fc1_x."),
    (r"(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
    (r"^storage_tokens$", "reg_token"),
)
CLIP = (
    (r"^class_embedding$", "cls_token"),
    (r"^positional_embedding$", "pos_embed"),
    (r"^conv1\.", "patch_embed.proj."),
    (r"^ln_pre\.", "norm_pre."),
    (r"^ln_post\.", "norm."),
    (r"^transformer\.resblocks\.", "blocks."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.ls_([12])\.", r".ls\1."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
ROTARY_FREQUENCIES = "rope.freqs"


@dataclass(frozen=True)
class OpenCLIPConfig:
    """What open_clip_config.json says of the image tower; `pretrained_cfg` has timm's names."""

    pretrained_cfg: Mapping[str, Any]
    timm_model_name: str | None
    quick_gelu: bool


def read_open_clip_config(content: Mapping[str, Any]) -> OpenCLIPConfig:
    """Parse open_clip_config.json; whatever is missing is unknown."""
    model, prepare = content.get("model_cfg"), content.get("preprocess_cfg")
    model = model if isinstance(model, Mapping) else {}
    vision = model.get("vision_cfg")
    name = vision.get("timm_model_name") if isinstance(vision, Mapping) else None
    about: dict[str, Any] = {}
    if isinstance(prepare, Mapping) and {"mean", "std"} <= prepare.keys():
        modes = {"shortest": "center", "squash": "squash"}
        mode = prepare.get("resize_mode") or "shortest"
        about = {
            **{key: prepare[key] for key in ("mean", "std", "interpolation") if key in prepare},
            "crop_pct": 1.0,
            "crop_mode": modes.get(mode, mode),
        }
    return OpenCLIPConfig(
        about, name if isinstance(name, str) else None, model.get("quick_gelu") is True
    )


def to_timm_names(state: Mapping[str, Tensor]) -> tuple[State, tuple[str, ...]]:
    """Rename `state` to the names of timm's VisionTransformer; also notes on dropped parts."""
    notes: list[str] = []
    start = wrapper_prefix(state, (*WRAPPERS, "model."))  # Lightning's
    plain = _image_tower({name.removeprefix(start): t for name, t in state.items()}, notes)
    plain = _from_clip(plain, notes) if "class_embedding" in plain else plain
    for start, meaning in LEFT_OUT.items():
        names = [name for name in plain if name.startswith(start) and name != ROTARY_FREQUENCIES]
        plain = _drop(plain, names, meaning, notes)
    # the first ViT on ImageNet-21k
    if head := [name for name in plain if name.startswith("pre_logits.")]:
        head += [name for name in plain if name.startswith("head.")]
        plain = _drop(plain, head, "a head of two layers", notes, limit=4)
    renamed = substitute(_apply_bias_masks(from_naflex(plain)), SIMPLE)
    return _fold_class_position(renamed), tuple(notes)


def _drop(state: State, names: list[str], meaning: str, notes: list[str], limit: int = 3) -> State:
    if not names:
        return state
    notes.append(f"left out: {join_names(names, limit)} ({meaning})")
    return {name: tensor for name, tensor in state.items() if name not in names}


def _image_tower(state: State, notes: list[str]) -> State:
    """Select the image tower of an image-text model, or the encoder without its training head."""
    tower = next((p for p in TRUNKS if any(name.startswith(p) for name in state)), None)
    encoder = None
    if PATCH_WEIGHT not in state:
        encoder = next((p for p in ENCODERS if f"{p}{PATCH_WEIGHT}" in state), None)
    if (start := tower or encoder) is None:
        return state
    others = [name for name in state if not name.startswith(start)]
    what = "not of the tower of images" if tower else f"outside of {start[:-1]}"
    inside = _drop(state, others, what, notes)
    return {name.removeprefix(start): tensor for name, tensor in inside.items()}


def _from_clip(state: State, notes: list[str]) -> State:
    plain = substitute(state, CLIP)
    if plain.pop("proj", None) is not None:
        notes.append("left out: proj (CLIP's projection to the space of texts)")
    plain["cls_token"] = plain["cls_token"].reshape(1, 1, -1)
    if "pos_embed" in plain:
        plain["pos_embed"] = plain["pos_embed"].unsqueeze(0)
    return plain


def _apply_bias_masks(state: State) -> State:
    """Multiply the qkv biases of DINOv3 by their masks of ones and zeros."""
    masked = dict(state)
    for name in [name for name in state if name.endswith(".bias_mask")]:
        bias, mask = name.removesuffix("_mask"), masked.pop(name)
        if bias not in masked or not bool(((mask == 0) | (mask == 1)).all()):
            raise WeightsError(f"{name} is not a mask of ones and zeros for {bias}")
        masked[bias] = torch.where(mask == 1, masked[bias], torch.zeros_like(masked[bias]))
    return masked


def _fold_class_position(state: State) -> State:
    """Add the position of the class token to the token itself, as timm does beside registers."""
    if "register_tokens" not in state:
        return state
    placed = dict(state)
    placed["reg_token"] = placed.pop("register_tokens")
    if "pos_embed" in placed and "cls_token" in placed:
        placed["cls_token"] = placed["cls_token"] + placed["pos_embed"][:, :1]
        placed["pos_embed"] = placed["pos_embed"][:, 1:]
    return placed
