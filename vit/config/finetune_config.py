"""Settings of fine-tuning and distillation: weights, trained parameters, and a teacher."""

from dataclasses import dataclass
from typing import Literal

from vit.config.config_section import LABEL_TASKS, ON, Other, Section, setting
from vit.config.model_config import ModelConfig

AUTO_WEIGHTS = "auto"
"""Value of `weights`: choose them from a list by data, time and device."""
TAUGHT, CLASSIFIED = {"teacher": ON}, ("classify", "multilabel")
LORA, PRETRAINED = ({"method": ("lora",)},), ({"weights": ON},)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Section):
    """Pretrained weights, and how they are fine-tuned."""

    weights: str | None = setting(None, "--pretrained", decided_by="plan")
    """Pretrained weights: auto, timm/NAME, hf/OWNER/NAME, a run, a file or folder of a library."""
    method: Literal["full", "linear", "lora", "probe"] | None = setting(
        None, read_by=PRETRAINED, tasks=LABEL_TASKS, off=("full",), decided_by="weights"
    )
    """Trained parameters: all, head or LoRA; probe fits a head alone; empty: LP-FT or the plan."""
    probe_first: bool | None = setting(
        None, read_by=PRETRAINED, tasks=("classify",), off=(False,), decided_by="weights"
    )
    """Initialise the head with a linear probe; when left empty, if no method is chosen."""
    lora_rank: int = setting(8, least=1, read_by=LORA)
    """Rank of LoRA's update of a weight matrix."""
    lora_alpha: float = setting(16.0, above=0, read_by=LORA)
    """Scale of LoRA's update, which is divided by the rank."""
    lora_targets: str = setting("qkv,proj", read_by=LORA)
    """Matrices with a LoRA update, of qkv, proj, fc1, fc2 (swiglu: fc1_g, fc1_x, fc2)."""
    license: str | None = setting(None, decided_by="weights")
    """License of the trained weights; that of the pretrained weights when left empty."""
    feature_cache: str | None = setting(None, resumable=True)
    """Folder of cached probe features; in the user's cache folder when left empty."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        self.check_ranges()


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section):
    """A teacher, whose answers for the training images are learned beside their labels."""

    teacher: str | None = setting(
        None, before_plan=True, read_by=({"method": Other(("probe",))},), tasks=CLASSIFIED
    )
    """Classifier to learn from: a run, timm/NAME, hf/OWNER/NAME, or a file."""
    distillation_type: Literal["soft", "hard"] = setting(
        "soft", read_by=(TAUGHT,), tasks=("classify",)
    )
    """Learn its probabilities (arXiv:1503.02531), or its best class (arXiv:2012.12877)."""
    distillation_alpha: float = setting(0.5, above=0, most=1, read_by=(TAUGHT,))
    """Share of the loss that compares with the teacher; the labels have the rest."""
    distillation_tau: float = setting(
        2.0, above=0, read_by=(TAUGHT, {"distillation_type": ("soft",)})
    )
    """soft: temperature of both answers; higher shows more of the classes that are not the best."""
