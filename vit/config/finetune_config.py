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
    """What learns: all, the head, or LoRA; probe fits a head without steps; empty: LP-FT."""
    probe_first: bool | None = None
    """Start from the head that a probe finds; when left empty, where no method is chosen."""
    lora_rank: int = 8
    """Rank of what LoRA adds to a weight matrix."""
    lora_alpha: float = 16.0
    """LoRA's addition is scaled by this, divided by the rank."""
    lora_targets: str = "qkv,proj"
    """Matrices of a block that LoRA adds to, of qkv, proj, fc1, fc2 (swiglu: fc1_g, fc1_x, fc2)."""
    license: str | None = None
    """Terms of the run's weights, kept with them; those of the pretrained ones when left empty."""
    feature_cache: str | None = None
    """Folder of the features that probes have made; when left empty, in the user's cache."""

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
    """Model settings given by the user, where pretrained weights decide the others.

    They are checked together once the settings of the weights are known.
    """

    def __post_init__(self) -> None:
        self.check_each()
