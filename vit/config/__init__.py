"""Every setting of a run: its name, type, default, and one sentence of help.

Frozen dataclasses, checked when built; the flags of the command line and the keys of a YAML file
are the fields' names. Imports no torch, so `--help` is instant.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vit.config.config_section import Section, check_read
from vit.config.data_config import AugmentConfig, DataConfig, SourceConfig
from vit.config.decoder_config import DecoderConfig
from vit.config.finetune_config import DistillationConfig, FinetuneConfig, PartialModelConfig
from vit.config.model_config import ModelConfig
from vit.config.pretraining_config import PretrainingConfig
from vit.config.training_config import RunConfig, TrainingConfig
from vit.errors import ConfigError

__all__ = [
    "SECTIONS",
    "AugmentConfig",
    "Config",
    "DataConfig",
    "DecoderConfig",
    "DistillationConfig",
    "FinetuneConfig",
    "ModelConfig",
    "PartialModelConfig",
    "PretrainingConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "TrainingConfig",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one run."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    pretraining: PretrainingConfig = field(default_factory=PretrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    run: RunConfig = field(default_factory=RunConfig)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where settings come from: call, flag, file, run, plan, task, data or weights."""

    def __post_init__(self) -> None:
        if self.training.soup and self.run.keep_best < 2:
            raise ConfigError(
                f"keep_best={self.run.keep_best}: a soup averages several epochs; set how many"
            )
        self._check_balance()
        self._check_repeats()
        self._check_device_cache()
        self._check_probe()
        self._check_teacher()
        partial = isinstance(self.model, PartialModelConfig)
        if partial and self.finetune.weights is None:
            self.model.check_together()
            partial = False
        values = self.values()
        if partial:  # the weights may bring what reads a setting
            values = {name: value for name, value in values.items() if name not in vars(self.model)}
        for section, kind in SECTIONS.items():
            if not (partial and section == "model"):
                check_read(values, kind)
        if partial:
            return
        self._check_start_size()
        if self.training.captions:
            self.decoder.check_with(self.model)

    def chosen(self, name: str) -> bool:
        """Whether a person chose the setting."""
        return self.origins.get(name, "plan") not in ("plan", "task", "data", "weights")

    @property
    def settled(self) -> list[str]:
        """Names of the settings that a person or the plan chose."""
        return [n for n, origin in self.origins.items() if origin not in ("data", "weights")]

    def values(self) -> dict[str, Any]:
        """Every setting by name."""
        return {
            name: value
            for section in SECTIONS
            for name, value in vars(getattr(self, section)).items()
        }

    def _check_balance(self) -> None:
        balance, task = self.training.balance, self.training.task
        if balance != "none" and not self.training.single_label:
            raise ConfigError(
                f"balance={balance}: class balancing needs a single-label task, not task={task}; "
                "leave it out, or use --task classify, which needs one class an image"
            )

    def _check_repeats(self) -> None:
        repeats, batch_size = self.augment.repeats, self.data.batch_size
        if batch_size % repeats:
            raise ConfigError(
                f"batch_size={batch_size} is not a multiple of repeats={repeats}, the copies of an "
                "image in a batch; change one of them"
            )
        if batch_size == repeats > 1 and self.augment.mixes:
            raise ConfigError(
                f"repeats={repeats} fills batch_size={batch_size} with one image, and MixUp and "
                "CutMix mix different ones; use fewer repeats"
            )

    def _check_device_cache(self) -> None:
        unbatched = self.augment.unbatched
        if self.data.cache == "device" and unbatched is not None:
            raise ConfigError(
                "cache=device: a device has crops, flips, shifts, colour jitter and 3-Augment, but "
                f"not {unbatched}; use --cache ram"
            )

    def _check_probe(self) -> None:
        """Check that a linear probe has a single-label task."""
        if self.training.single_label:
            return
        if self.finetune.method == "probe" or self.finetune.probe_first:
            name = "method" if self.finetune.method == "probe" else "probe_first"
            value = getattr(self.finetune, name)
            why = "one class an image" if self.training.multilabel else "classes"
            raise ConfigError(f"{name}={value}: a probe fits {why}; use method=linear or full")

    def _check_teacher(self) -> None:
        """Check that a teacher has a classifier to teach, by steps and by plain logits."""
        teacher, training = self.distillation.teacher, self.training
        if teacher is None:
            return
        if not (training.single_label or training.multilabel):
            raise ConfigError(
                f"teacher={teacher!r}: distillation is for classifiers, not for "
                f"task={training.task}; leave --teacher out"
            )
        if self.finetune.method == "probe":
            raise ConfigError(
                f"teacher={teacher!r}: method=probe makes no steps that could learn from a "
                "teacher; use --method linear or full"
            )
        if training.balance == "logit-adjust":
            raise ConfigError(
                "balance=logit-adjust: shifts the logits that are compared with those of the "
                "teacher; use --balance loss or sampler"
            )
        if training.multilabel and self.distillation.distillation_type == "hard":
            raise ConfigError(
                "distillation_type=hard: needs one class an image, not task=multilabel; use soft"
            )

    def _check_start_size(self) -> None:
        start, patch_size = self.training.start_image_size, self.model.patch_size
        if start is None:
            return
        if self.model.patch_sizes:
            raise ConfigError(
                f"start_image_size={start}: the patches of patch_sizes must divide images of "
                "every size; leave one of the two out"
            )
        if start % patch_size or not patch_size <= start <= self.model.image_size:
            raise ConfigError(
                f"start_image_size={start}: must be a multiple of patch_size={patch_size} "
                f"from {patch_size} to image_size={self.model.image_size}"
            )


SECTIONS: dict[str, type] = {
    field.name: field.type  # type: ignore[misc]
    for field in fields(Config)
    if field.name != "origins"
}
