"""Every setting of a run: its name, type, default, and one sentence of help.

Frozen dataclasses, checked when built; the flags of the command line and the keys of a YAML file
are the fields' names. Imports no torch, so `--help` is instant.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vit.config.data_config import (
    WEIGHED,
    WITH_NATIVE,
    WITH_PAD,
    AugmentConfig,
    DataConfig,
    SourceConfig,
)
from vit.config.decoder_config import DecoderConfig
from vit.config.model_config import ModelConfig, PartialModelConfig
from vit.config.settings import LABEL_TASKS, Other, Section, check_read, refuse
from vit.config.training_config import (
    DistillationConfig,
    FinetuneConfig,
    PretrainingConfig,
    RunConfig,
    TrainingConfig,
)
from vit.config.user_code import UserCode, name_of
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


STEPS: Mapping[str, tuple[Any, ...]] = {"method": Other(("probe",))}
WITH_USER_CODE: dict[str, Mapping[str, tuple[Any, ...]]] = {
    "loss": {**STEPS, "task": WEIGHED, "smoothing": (0.0,), "balance": ("none", "sampler")},
    "transform": {**STEPS, "task": LABEL_TASKS, "cache": Other(("device",)), "tiles": (None,)},
}
"""Argument of `vit.train` -> values of settings beside it: a loss takes the place of smoothing and
class weights, and a transform gets single images on a CPU."""


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
    user_code: UserCode = field(default=UserCode(), compare=False, repr=False)
    """Of a Python call; no file has it."""

    def __post_init__(self) -> None:
        self._check_repeats()
        self._check_device_cache()
        self._check_beside()
        if self.finetune.method == "probe" and not self.training.single_label:
            raise ConfigError(
                f"method=probe: a probe fits one class an image, not task={self.training.task}; "
                "use method=linear or full"
            )
        if self.distillation.teacher is not None and self.training.balance == "logit-adjust":
            raise ConfigError(
                "balance=logit-adjust: shifts the logits that are compared with those of the "
                "teacher; use --balance loss or sampler"
            )
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

    def get(self, name: str) -> Any:
        """The value of a setting, as of `Settings`."""
        return self.values()[name]

    def with_user_code(self, code: UserCode) -> "Config":
        """The config with `code`, without planned settings that are not read beside it."""
        training, data = self.training, self.data
        if code.loss is not None and not self.chosen("smoothing"):
            training = replace(training, smoothing=0.0)
        if code.transform is not None and data.cache == "device" and not self.chosen("cache"):
            data = replace(data, cache="none", cache_folder=None)
        return replace(self, training=training, data=data, user_code=code)

    def values(self) -> dict[str, Any]:
        """Every setting by name."""
        return {
            name: value
            for section in SECTIONS
            for name, value in vars(getattr(self, section)).items()
        }

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

    def _check_beside(self) -> None:
        """Refuse what does not work with a resize or with the user's own code."""
        rules = {"pad": WITH_PAD, "native": WITH_NATIVE}.get(self.data.resize, {})
        beside = [(f"resize={self.data.resize}", rules)]
        for argument, code in self.user_code.items():
            beside.append((f"{argument}={name_of(code)}", WITH_USER_CODE.get(argument, {})))
        values = self.values()
        for what, rules in beside:
            for name, accepted in rules.items():
                if (values[name] in accepted) == isinstance(accepted, Other):
                    remedy = "give full" if name == "method" else "leave it out"
                    refuse(name, values[name], f"does not work with {what}; {remedy}")

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
    if field.name not in ("origins", "user_code")
}
