"""Settings of knowledge distillation: the teacher, and how its answers enter the loss."""

from dataclasses import dataclass
from typing import Literal

from vit.config.config_section import Section


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section):
    """A teacher, whose answers for the training images are learned beside their labels."""

    teacher: str | None = None
    """Classifier to learn from: a run, timm/NAME, hf/OWNER/NAME, a file, or an exported .onnx."""
    distillation_type: Literal["soft", "hard"] = "soft"
    """Learn its probabilities (arXiv:1503.02531), or its best class (arXiv:2012.12877)."""
    distillation_alpha: float = 0.5
    """Share of the loss that compares with the teacher; the labels have the rest."""
    distillation_tau: float = 2.0
    """soft: temperature of both answers; higher shows more of the classes that are not the best."""

    def __post_init__(self) -> None:
        if self.teacher is None:
            for name in ("distillation_type", "distillation_alpha", "distillation_tau"):
                if getattr(self, name) != getattr(DistillationConfig, name):
                    self.refuse(name, "needs a teacher: give --teacher RUN")
        if not 0 < self.distillation_alpha <= 1:
            self.refuse("distillation_alpha", "must be more than 0 and at most 1")
        self.check_above(0, "distillation_tau")
        usual = DistillationConfig.distillation_tau
        if self.distillation_type == "hard" and self.distillation_tau != usual:
            self.refuse("distillation_tau", "distillation_type=hard has no use for it")
