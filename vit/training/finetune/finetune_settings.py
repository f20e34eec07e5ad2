"""Fine-tuning: settings that follow from pretrained weights, and the method applied to the network.

    weights -> settings they decide -> network with a new head -> the part that is trained

Linear probing, then fine-tuning: Kumar et al., arXiv:2202.10054. Layer-wise learning rate decay:
Bao et al. (BEiT), arXiv:2106.08254.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.config import AugmentConfig, Config
from vit.config.data_config import CHANNEL_SETTINGS, WHOLE
from vit.config.presets import preset
from vit.config.setting_layers import all_settings, flatten, make_config, with_effect
from vit.config.settings import refuse, why_unread
from vit.config.stored_config import has_stored_config, run_folder_of, stored_config
from vit.config.training_config import NO_PROBE
from vit.data.dataset_types import Splits
from vit.data.sources.split_file import HeldOutSplit, read_split
from vit.errors import ConfigError
from vit.evaluation.classification_metrics import ClassChange
from vit.model.vision_transformer import VisionTransformer
from vit.tasks.task import get_task
from vit.text import Notify, join_names, plural
from vit.training.finetune.lora import (
    add_lora,
    freeze_backbone,
    merge_lora,
    trainable_line,
)
from vit.weights.adapt_weights import implied_settings
from vit.weights.formats.pretrained import Pretrained, PretrainedDecoder
from vit.weights.sparse_upcycling import check_feedforward, is_upcycled

# Defaults of fine-tuning methods, which differ much from those of training from scratch.
SHARED: dict[str, Any] = {"batch_size": 64, "min_crop": 0.9, "smoothing": 0.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "full": {**SHARED, "epochs": 12, "lr": 2e-4, "layer_decay": 0.75, "drop_path": 0.1},
    "lora": {**SHARED, "epochs": 12, "lr": 1e-3, "weight_decay": 0.0},
    "linear": {**SHARED, "epochs": 12, "lr": 3e-3, "weight_decay": 0.0},
    "probe": {"epochs": 1, "warmup_epochs": 0.0},
}
CAPTION_DEFAULTS: dict[str, dict[str, Any]] = {
    "full": {"lr": 1e-3, "encoder_lr": 1e-4, "smoothing": 0.1},
    "lora": {"smoothing": 0.1},
    "linear": {"lr": 1e-3, "weight_decay": 0.05, "smoothing": 0.1},
}
ADDED_CLASS_EPOCHS, ADDED_CLASS_STEPS = 2, 250
"""Epochs, and steps, after the probe where classes are added, at least (measured:
docs/fine-tuning.md)."""
OPTIMIZER_SETTINGS = ("optimizer", "lr", "weight_decay", "betas", "clip_grad", "layer_decay")
RECIPE = (
    *(*OPTIMIZER_SETTINGS, "smoothing", "balance", "drop_path"),
    *(field.name for field in dataclasses.fields(AugmentConfig)),
)
"""Settings that a training with added classes takes from the run whose weights it begins with;
not `fallback_lr`, with which the head that the probe has fitted changed too much (measured)."""
FROM_PREPROCESSING = ("resize", "crop_share", "interpolation", "mean", "std")


def complete_for_weights(
    config: Config, source: Pretrained, notify: Notify = lambda _line: None
) -> Config:
    if config.chosen("feedforward"):
        check_feedforward(source, config.model.feedforward)
    chosen = flatten(config)
    method = config.finetune.method or "full"
    first = config.finetune.probe_first
    usual = {} if config.training.pretrains else DEFAULTS[method]
    found: dict[str, Any] = {**dataclasses.asdict(source.config), **usual}
    if config.augment.random_crop == "simple":  # which keeps all of the short side
        found.pop("min_crop", None)
    found["num_classes"] = config.model.num_classes
    found["channels"] = config.model.channels  # the data decide it
    if config.training.steps is not None:  # which decide the epochs
        found["epochs"] = config.training.epochs
    if source.preprocessing is not None:
        found |= {name: getattr(source.preprocessing, name) for name in FROM_PREPROCESSING}
        height, width = source.preprocessing.image_size  # maybe not that of the position embedding
        if height == width and height % source.config.patch_size == 0:
            found["image_size"] = height
    channels = channel_settings(config, source, notify)
    if {**found, **{name: chosen[name] for name in config.settled}}.get("resize") in WHOLE:
        found["crop_share"] = 1.0
    found |= preset_sizes(config, source)
    found |= caption_settings(config, source, method)
    found["method"] = method
    usual_first = config.finetune.method is None and config.training.single_label
    usual_first = usual_first and not any(map(chosen.get, NO_PROBE))
    found["probe_first"] = usual_first if first is None else first
    check_unused_settings(config, method, usual={**flatten(make_config({})), **found})
    found["license"] = source.license
    settled = {*config.settled} - {"method", "probe_first"}
    kept = {name: chosen[name] for name in settled}
    found |= implied_settings(source.config, {**found, **kept})
    before = run_of(str(config.finetune.weights))
    if before and os.path.realpath(before[1].data.data) == os.path.realpath(config.data.data):
        found["val_share"] = before[1].data.val_share  # so that its validation images stay unseen
    every = {**chosen, **found, **kept, **channels}
    origins = {**config.origins, **dict.fromkeys(channels, "weights")}
    completed = with_defaults(every, {*usual} - settled, origins, notify)
    if method != "full" and is_upcycled(source.config, completed.model):
        raise ConfigError(
            f"method={method}: experts do not learn by it, and those made of an mlp would stay "
            "equal; use --method full, or leave --feedforward out"
        )
    return completed


def channel_settings(config: Config, source: Pretrained, notify: Notify) -> dict[str, Any]:
    """How the run `source` reads images of instruments, unless others of their channels are chosen;
    they are measured once, so that its weights see what they have learned."""
    before = None if source.preprocessing is None else source.preprocessing.channels
    if before is None or config.data.tiles or config.origins.get("channel_ranges") == "data":
        return {}
    order, words = config.data.channel_order, tuple(map(str, before.order))
    theirs = ",".join(before.names or words)
    if order not in ((), words, before.names):
        if before.names and len(order) == len(words) and not all(map(str.isdecimal, order)):
            raise ConfigError(f"--channels {','.join(order)}: the weights take {theirs}")
        notify(f"note: --channels is measured anew; the weights took {theirs}")
        return {}
    ranges = [*zip(before.low, before.high, strict=True)]
    if config.chosen("axes") and config.data.axes != before.axes:
        config.data.refuse("axes", f"the weights read axes={before.axes!r}; leave it out")
    if config.data.intensity_range is not None and {*ranges} != {config.data.intensity_range}:
        config.data.refuse("intensity_range", "the weights have ranges of channels; leave it out")
    notify(
        f"note: channels {theirs} of {before.value_type}, with the ranges, mean and deviation of "
        f"{source.origin}"
    )
    kept = (words, before.names, before.axes, before.value_type, before.count)
    moments = (tuple(itertools.chain(*ranges)), before.mean, before.std)
    return dict(zip(CHANNEL_SETTINGS, (*kept, *moments), strict=True))


def with_defaults(
    settings: Mapping[str, Any],
    defaults: Collection[str],
    origins: Mapping[str, str],
    notify: Notify,
) -> Config:
    """Settings, without those `defaults` of a method that do not suit the others."""
    try:
        return make_config(settings, origins=origins)
    except ConfigError as error:
        if error.setting not in defaults:
            raise
        notify(f"note: without the default {error}")
        left, left_origins = dict(settings), dict(origins)
        del left[error.setting]
        left_origins.pop(error.setting, None)
        return with_defaults(left, {*defaults} - {error.setting}, left_origins, notify)


def complete_for_added_classes(
    config: Config,
    source: Pretrained,
    classes: Sequence[str],
    images: int,
    notify: Notify,
) -> Config:
    """Settings of a short training, if the data add classes to those that a run has learned.

    The head of the probe, on features of old and new images, has all classes before the first
    step. A few epochs follow with the optimiser and augmentation that trained the network, on all
    images, so that no class is forgotten.
    """
    change = ClassChange.between(source.classes, classes)
    if not change.kept or not config.training.single_label:
        return config
    if change.lost:
        notify(
            f"note: {plural(len(change.lost), 'class', 'classes')} of {source.origin} will be "
            f"forgotten, without images here: {join_names(change.lost)}; to keep them, put images "
            "of them into the data"
        )
        return config
    if not change.added or config.finetune.method != "full" or not config.finetune.probe_first:
        return config
    chosen = flatten(config)
    found = recipe_of_run(str(config.finetune.weights))
    if config.chosen("optimizer"):  # with another one, its learning rate means something else
        found = {name: found[name] for name in found if name not in OPTIMIZER_SETTINGS}
    if config.training.steps is None and config.training.time is None:
        steps = max(images // config.data.batch_size, 1)
        found["epochs"] = max(ADDED_CLASS_EPOCHS, math.ceil(ADDED_CLASS_STEPS / steps))
    kept = {name: chosen[name] for name in config.settled if name in found}
    read = with_effect({**chosen, **found, **kept})  # without what a flag switches off
    found = {name: value for name, value in found.items() if name in read}
    defaults = {name: value for name, value in chosen.items() if name in read}
    config = make_config({**defaults, **found, **kept}, origins=config.origins)
    notify(
        f"note: {plural(len(change.added), 'new class', 'new classes')} "
        f"({join_names(change.added)}): epochs={config.training.epochs} after the probe, with "
        "the optimizer and augmentation of the old run; --epochs and other flags change it"
    )
    return config


def run_of(weights: str) -> tuple[Path, Config] | None:
    """The folder and settings of the run that `weights` names; None for other weights."""
    run = run_folder_of(weights)
    return (run, stored_config(run)) if has_stored_config(run) else None


def seen_images_note(
    weights: str, splits: Splits, known: Sequence[str] | None = None
) -> str | None:
    """A note where the run `weights` may have learned labels of validation images of `splits`.

    Its training images are all labelled ones of the same folder, or of data with images that it
    held out, but those, and those of classes that are not among the `known` ones.
    """
    found = run_of(weights) if splits.made else None
    if found is None or found[1].training.pretrains:
        return None
    path = Path(found[1].data.data).resolve()
    # without split.json it learned from all training images
    split = read_split(found[0]) or HeldOutSplit(path if path.is_dir() else path.parent, [])
    held_out = split.find((one.path for one in (*splits.train, *splits.val)), splits.root).paths
    if not held_out and split.root != splits.root.resolve():
        return None
    new = {n for n, name in enumerate(splits.classes) if known is not None and name not in known}
    other = sum(one.path not in held_out and one.label not in new for one in splits.val)
    if not other:
        return None
    return (
        f"note: {other:,} of {plural(len(splits.val), 'validation image')} "
        f"{'was' if other == 1 else 'were'} not held out by the training of {weights}: "
        "if it learned their labels, the scores here are too good"
    )


def recipe_of_run(weights: str) -> dict[str, Any]:
    """Optimiser and augmentation that trained the run `weights`; empty for other weights."""
    found = run_of(weights)
    if found is None:
        return {}
    settings = flatten(found[1])
    return {name: settings[name] for name in RECIPE}


def caption_settings(config: Config, source: Pretrained, method: str) -> dict[str, Any]:
    """Settings of captioning: a new decoder has a larger learning rate than the encoder.

    A pretrained decoder is kept, unless another vocabulary is given.
    """
    training = config.training
    if not training.captions:
        return {}
    found = dict(CAPTION_DEFAULTS.get(method, {}))
    if not training.classifies:
        found |= {"num_classes": 0, "pooling": "none"}
        if source.config.last_norm == "pooled":
            found["final_norm"] = "tokens"
    if config.chosen("lr") and "encoder_lr" in found:  # the encoder learns slower
        found["encoder_lr"] = config.training.lr / 10
    if source.decoder is not None and not wants_other_vocabulary(config, source.decoder):
        found |= dataclasses.asdict(source.decoder.config)
        if method == "full":
            found |= {"lr": 3e-4}
    return found


def wants_other_vocabulary(config: Config, decoder: PretrainedDecoder) -> bool:
    """Whether the user gave a vocabulary other than that of the pretrained decoder.

    Its own settings, as config.yaml of a run has them, do not count.
    """
    theirs, mine = decoder.config, config.decoder
    return (config.chosen("tokenizer") and mine.tokenizer != theirs.tokenizer) or (
        config.chosen("vocab_size") and mine.vocab_size not in (None, theirs.vocab_size)
    )


def check_unused_settings(config: Config, method: str, usual: Mapping[str, Any]) -> None:
    """Raise if a chosen setting has no effect under `method`."""
    chosen = flatten(config)
    for name in config.settled:
        unused_by = all_settings()[name].properties.unused_by
        left_out = list(usual[name]) if isinstance(usual[name], tuple) else usual[name]
        if method in unused_by and chosen[name] != left_out:
            methods = tuple(each for each in ("linear", "lora", "full") if each not in unused_by)
            refuse(name, chosen[name], why_unread({"method": method}, {"method": methods}))


def preset_sizes(config: Config, source: Pretrained) -> dict[str, int]:
    """Image and patch size of a given --model, to which the weights are adapted."""
    if not config.chosen("model"):
        return {}
    name, sizes = config.training.model, preset(config.training.model)
    for setting in ("dim", "depth", "num_heads"):
        has = getattr(source.config, setting)
        if sizes[setting] != has and not config.chosen(setting):
            raise ConfigError(
                f"model={name!r} has {setting}={sizes[setting]}, but the weights ({source.origin}) "
                f"have {has}: leave --model out, or give weights of that size"
            )
    return {setting: sizes[setting] for setting in ("image_size", "patch_size")}


def apply_finetune_method(network: VisionTransformer, config: Config) -> str | None:
    """Freeze parameters or add LoRA layers, by the method; returns a line for the log."""
    settings = config.finetune
    if settings.method == "lora":
        rank, alpha = settings.lora_rank, settings.lora_alpha
        add_lora(network, rank=rank, alpha=alpha, targets=settings.targets)
        return trainable_line(f"LoRA of rank {rank} on {', '.join(settings.targets)}", network)
    if settings.method in ("linear", "probe"):
        freeze_backbone(network)
        return trainable_line(f"{get_task(config.training.task).trained_head} alone", network)
    return None


def merged_state_dict(weights: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """State dict of an ordinary network, with LoRA merged into the matrices."""
    if config.finetune.method != "lora":
        return dict(weights)
    return merge_lora(weights, rank=config.finetune.lora_rank, alpha=config.finetune.lora_alpha)
