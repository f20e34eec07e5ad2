"""Settings of knowledge distillation: the teacher, and how its answers enter the loss."""

from dataclasses import dataclass
from typing import Literal

from vit.config.config_section import ON, Section, setting

TAUGHT = {"teacher": ON}


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section):
    """A teacher, whose answers for the training images are learned beside their labels."""

    teacher: str | None = None
    """Classifier to learn from: a run, timm/NAME, hf/OWNER/NAME, a file, or an exported .onnx."""
    distillation_type: Literal["soft", "hard"] = setting("soft", read_by=(TAUGHT,))
    """Learn its probabilities (arXiv:1503.02531), or its best class (arXiv:2012.12877)."""
    distillation_alpha: float = setting(0.5, above=0, most=1, read_by=(TAUGHT,))
    """Share of the loss that compares with the teacher; the labels have the rest."""
    distillation_tau: float = setting(
        2.0, above=0, read_by=(TAUGHT, {"distillation_type": ("soft",)})
    )
    """soft: temperature of both answers; higher shows more of the classes that are not the best."""
