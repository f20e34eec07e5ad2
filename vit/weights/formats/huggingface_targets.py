"""Which class of transformers computes what our network does.

Each class is a row of what it needs; a network becomes the first class whose needs it meets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vit.config import ModelConfig
from vit.weights.formats.huggingface_config import gated_width
from vit.weights.ours_alone import only_ours

WIDEST = 64

Traits = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A class of transformers that our network may become.

    Args:
        architecture: Its name.
        model_type: Its family.
        needs: Allowed values, by trait of our network.
    """

    architecture: str
    model_type: str
    needs: Mapping[str, tuple[Any, ...]]

    def obstacles(self, traits: Traits) -> list[str]:
        """Which traits are other than this class needs them, with what it needs."""
        return [
            f"{' or '.join(_phrase(name, value) for value in allowed)}, not {traits[name]}"
            for name, allowed in self.needs.items()
            if traits[name] not in allowed
        ]


def _phrase(name: str, value: object) -> str:
    return str(value) if name in ("head", "width") else f"{name}={value}"


MULTIPLE = "a feed-forward part of a whole multiple of dim"


BASE: dict[str, tuple[Any, ...]] = {
    "norm": ("layernorm",),
    "norm_order": ("pre",),
    "qk_norm": (False,),
    "position": ("learned",),
    "norm_pre": (False,),
    "class_token": (True,),
    "registers": (0,),
    "feedforward": ("mlp",),
    "layer_scale": (False,),
    "pooling": ("class_token",),
    "final_norm": ("tokens",),
    "head": ("a head",),
}
SCALED = {"layer_scale": (True, False), "feedforward": ("mlp", "swiglu")}
DINO_HEAD = {"pooling": ("class_token", "class_token_mean", "mean")}
NO_HEAD = {"head": ("no head",)}
MANY = (1, "several")
BEIT = {
    **BASE,
    "position": ("learned", "relative"),
    "layer_scale": (True, False),
    "pooling": ("mean",),
    "final_norm": ("pooled",),
}
DINOV2 = {**BASE, **SCALED, "width": (MULTIPLE,)}
TARGETS = (
    Target("ViTForImageClassification", "vit", BASE),
    Target(
        "DeiTForImageClassification",
        "deit",
        {**BASE, "registers": (1,), "prefix_positions": ("all",)},
    ),
    Target("BeitForImageClassification", "beit", BEIT),
    Target("BeitModel", "beit", {**BEIT, **NO_HEAD}),
    Target("Dinov2ForImageClassification", "dinov2", {**DINOV2, **DINO_HEAD}),
    Target("Dinov2Model", "dinov2", {**DINOV2, **NO_HEAD}),
    Target(
        "Dinov2WithRegistersForImageClassification",
        "dinov2_with_registers",
        {**DINOV2, **DINO_HEAD, "registers": MANY},
    ),
    Target(
        "Dinov2WithRegistersModel",
        "dinov2_with_registers",
        {**DINOV2, **NO_HEAD, "registers": MANY},
    ),
    Target(
        "DINOv3ViTModel",
        "dinov3_vit",
        {**BASE, **SCALED, **NO_HEAD, "position": ("rotary (centred)",), "registers": (0, *MANY)},
    ),
    Target(
        "CLIPForImageClassification",
        "clip",
        {
            **BASE,
            "norm_pre": (True,),
            "patch_bias": (False,),
            "pooling": ("mean",),
            "final_norm": ("none",),
        },
    ),
    Target(
        "CLIPVisionModel",
        "clip_vision_model",
        {**BASE, **NO_HEAD, "norm_pre": (True,), "patch_bias": (False,)},
    ),
    Target(
        "SiglipForImageClassification",
        "siglip",
        {**BASE, "class_token": (False,), "pooling": ("mean",)},
    ),
    Target(
        "SiglipVisionModel",
        "siglip_vision_model",
        {**BASE, **NO_HEAD, "class_token": (False,), "pooling": ("attention",)},
    ),
)


def huggingface_refusal(config: ModelConfig) -> str | None:
    """Why no class of transformers computes what `config` does; None where one does."""
    if config.num_classes == 1:
        return "it takes a single output for yes or no, not for a class"
    alone = only_ours(config)
    if config.stem == "conv":
        return None  # of a class that we register
    if alone is not None:
        return f"none has {alone}"
    target = target_of(config)
    obstacles = target.obstacles(traits_of(config))
    if not obstacles:
        return None
    return f"its nearest class, {target.architecture}, needs {'; '.join(obstacles)}"


def target_of(config: ModelConfig) -> Target:
    """The class of transformers that `config` is, or else the one that it is nearest to."""
    traits = traits_of(config)
    return min(TARGETS, key=lambda target: len(target.obstacles(traits)))


def traits_of(config: ModelConfig) -> Traits:
    """What decides which class can be this network."""
    table = {"rotary": f"rotary ({config.rotary_grid})", "learned_rotary": "learned and rotary"}
    table["relative"] = "relative"
    same = ("norm", "norm_order", "qk_norm", "norm_pre", "class_token", "feedforward")
    return {
        **{name: getattr(config, name) for name in (*same, "pooling", "patch_bias")},
        "registers": config.registers if config.registers < 2 else "several",
        "position": table.get(config.position, "learned"),
        "layer_scale": config.layer_scale > 0,
        "final_norm": config.last_norm,
        "head": "a head" if config.num_classes else "no head",
        "prefix_positions": "all" if _all_placed(config) else "not all",
        "width": MULTIPLE if mlp_ratio(config) else f"hidden_dim={config.feedforward_dim}",
    }


def _all_placed(config: ModelConfig) -> bool:
    return config.num_placed_tokens == config.num_prefix_tokens


def mlp_ratio(config: ModelConfig) -> int | None:
    """The whole number by which DINOv2 makes the feed-forward part this wide, if there is one."""
    for ratio in range(1, WIDEST + 1):
        width = config.dim * ratio
        if config.feedforward_dim == (
            gated_width(width) if config.feedforward == "swiglu" else width
        ):
            return ratio
    return None
