"""Every setting of a run: its name, type, default, and one sentence of help.

Frozen dataclasses, checked when built; the flags of the command line and the keys of a YAML file
are the fields' names. Imports no torch, so `--help` is instant.
"""

import itertools
from dataclasses import dataclass, field, fields
from typing import Any

from vit.config.config_section import Section
from vit.config.data_config import AugmentConfig, DataConfig, SourceConfig
from vit.config.decoder_config import DecoderConfig
from vit.config.distillation_config import DistillationConfig
from vit.config.finetune_config import FinetuneConfig, PartialModelConfig
from vit.config.model_config import ModelConfig
from vit.config.pretraining_config import PRETRAINING_TASKS, SETTINGS_OF, PretrainingConfig
from vit.config.run_config import RunConfig
from vit.config.training_config import TrainingConfig
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

    def __post_init__(self) -> None:
        if self.training.soup and self.run.keep_best < 2:
            raise ConfigError(
                f"keep_best={self.run.keep_best}: a soup averages several epochs; set how many"
            )
        self._check_captions()
        self._check_pretraining()
        self._check_balance()
        self._check_repeats()
        self._check_crop_ratio()
        self._check_device_cache()
        self._check_probe()
        self._check_teacher()
        if isinstance(self.model, PartialModelConfig):
            if self.finetune.weights is not None:
                return
            self.model.check_together()
        self._check_routers()
        self._check_start_size()
        if self.training.captions:
            self.decoder.check_with(self.model)

    def _check_routers(self) -> None:
        for name in ONLY_EXPERTS:
            chosen = getattr(self.training, name)
            if chosen != getattr(TrainingConfig, name) and self.model.feedforward != "moe":
                raise ConfigError(
                    f"{name}={chosen}: feedforward={self.model.feedforward} has no router; "
                    "feedforward=moe has"
                )

    def _check_captions(self) -> None:
        """Check that caption settings have a caption task, and a caption task no label mixing."""
        if not self.training.captions:
            for section, names in ONLY_CAPTIONS.items():
                for name in names or [field.name for field in fields(SECTIONS[section])]:
                    chosen = getattr(getattr(self, section), name)
                    if chosen != getattr(SECTIONS[section], name):
                        raise ConfigError(
                            f"{name}={chosen!r}: it only applies to captions; add --task caption"
                        )
            return
        if self.augment.mixes:
            raise ConfigError(
                "mixup and cutmix mix labels, and captions cannot be mixed: leave them out"
            )

    def _check_pretraining(self) -> None:
        """Check that settings of pretraining have their task, and that no others are without use.

        Raises:
            ConfigError: It names the setting.
        """
        task = self.training.task
        for name in dict.fromkeys(itertools.chain(*SETTINGS_OF.values())):
            chosen = getattr(self.pretraining, name)
            if chosen != getattr(PretrainingConfig, name) and name not in SETTINGS_OF.get(task, ()):
                methods = [method for method, names in SETTINGS_OF.items() if name in names]
                raise ConfigError(
                    f"{name}={chosen!r}: it only applies to vit pretrain --method "
                    f"{' or '.join(methods)}"
                )
        if task not in PRETRAINING_TASKS:
            return
        for section, others in NOT_PRETRAINING.items():
            for name, why in others.items():
                chosen = getattr(getattr(self, section), name)
                if chosen not in (getattr(SECTIONS[section], name), *UNUSED.get(name, ())):
                    raise ConfigError(f"{name}={chosen!r}: task={task} {why}; leave it out")

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

    def _check_crop_ratio(self) -> None:
        ratio, views = self.augment.crop_ratio, self.pretraining.local_views
        if ratio != AugmentConfig.crop_ratio and self.augment.min_crop == 1 and not views:
            raise ConfigError(
                f"crop_ratio={ratio}: min_crop=1 switches random crops off; leave it out, or use a "
                "smaller --min-crop"
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


# settings that only apply to captions; () is the whole section
ONLY_CAPTIONS: dict[str, tuple[str, ...]] = {
    "decoder": (),
    "training": ("encoder_lr", "caption_samples"),
}
ONLY_EXPERTS = ("balance_loss", "router_z_loss")
# settings that have no meaning without labels
NOT_PRETRAINING: dict[str, dict[str, str]] = {
    "training": {
        "smoothing": "learns no labels",
        "balance": "learns no labels",
        "patience": "keeps the last epoch, not the best of a score",
        "soup": "keeps the last epoch, not the best of a score",
    },
    "finetune": {
        "method": "trains the whole network",
        "probe_first": "has no classes to probe",
    },
    "augment": dict.fromkeys(("mixup", "cutmix"), "learns no labels that could be mixed"),
    "data": {"folds": "has no score to cross-validate", "labels": "learns no labels"},
    "model": {"num_classes": "builds no head"},
}
# values of them that mean no more than the default
UNUSED: dict[str, tuple[Any, ...]] = {
    "smoothing": (0.0,),
    "method": ("full",),
    "probe_first": (False,),
    "num_classes": (0,),
}
SECTIONS: dict[str, type] = {field.name: field.type for field in fields(Config)}  # type: ignore[misc]
