"""Settings of fine-tuning: pretrained weights, and which parameters are trained."""

from dataclasses import dataclass
from typing import Literal

from vit.config.config_section import Section, setting
from vit.config.model_config import ModelConfig

AUTO_WEIGHTS = "auto"
"""Value of `weights`: choose them from a list by data, time and device."""


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Section):
    """Pretrained weights, and how they are fine-tuned."""

    weights: str | None = setting(None, "--pretrained")
    """Pretrained weights: auto, timm/NAME, hf/OWNER/NAME, a run, a file or folder of a library."""
    method: Literal["full", "linear", "lora", "probe"] | None = None
    """Trained parameters: all, head or LoRA; probe fits a head alone; empty: LP-FT or the plan."""
    probe_first: bool | None = None
    """Initialise the head with a linear probe; when left empty, if no method is chosen."""
    lora_rank: int = 8
    """Rank of LoRA's update of a weight matrix."""
    lora_alpha: float = 16.0
    """Scale of LoRA's update, which is divided by the rank."""
    lora_targets: str = "qkv,proj"
    """Matrices with a LoRA update, of qkv, proj, fc1, fc2 (swiglu: fc1_g, fc1_x, fc2)."""
    license: str | None = None
    """License of the trained weights; that of the pretrained weights when left empty."""
    feature_cache: str | None = None
    """Folder of cached probe features; in the user's cache folder when left empty."""

    def __post_init__(self) -> None:
        self.check_at_least(1, "lora_rank")
        self.check_above(0, "lora_alpha")
        if self.method != "lora":
            for name in ("lora_rank", "lora_alpha", "lora_targets"):
                if getattr(self, name) != getattr(FinetuneConfig, name):
                    self.refuse(name, "only applies when method=lora")
        if self.weights is None and self.method not in (None, "full"):
            self.refuse("method", "needs pretrained weights: give --weights SOURCE")
        if self.weights is None and self.probe_first:
            self.refuse("probe_first", "needs pretrained weights: give --weights SOURCE")
        if self.probe_first and self.method == "probe":
            self.refuse("probe_first", "method=probe does that already")

    @property
    def targets(self) -> tuple[str, ...]:
        """`lora_targets` as names."""
        return tuple(name.strip() for name in self.lora_targets.split(",") if name.strip())


@dataclass(frozen=True, kw_only=True)
class PartialModelConfig(ModelConfig):
    """Model settings of the user; the others will come from pretrained weights.

    Values are checked one by one here, and together when all are known.
    """

    def __post_init__(self) -> None:
        self.check_each()
