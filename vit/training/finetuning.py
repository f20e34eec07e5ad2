"""From pretrained weights to a network that is ready to learn a task of its own.

    weights -> settings they decide -> network with a new head -> the part that learns

Linear probing, then fine-tuning: Kumar et al., arXiv:2202.10054. Layer-wise decay of the learning
rate: Bao et al. (BEiT), arXiv:2106.08254.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vit.config import AugmentConfig, Config, ModelConfig
from vit.config.parser import flatten, make_config
from vit.config.presets import preset
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError
from vit.model.vision_transformer import VisionTransformer
from vit.training.freezing import freeze_backbone, share_line
from vit.training.lora import add_lora, lora_line, merged
from vit.weights.adapt_weights import implied_settings
from vit.weights.pretrained import Pretrained, PretrainedDecoder
from vit.weights.sparse_upcycling import check_feedforward, is_upcycled

# Defaults of a method where nobody chose: those of training from scratch are wrong by far.
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
# What a probe has no use for: it is one fit to images that are not varied.
NOT_OF_A_PROBE = (
    *("epochs", "time", "lr", "fallback_lr", "min_lr", "warmup_epochs", "optimizer"),
    *("weight_decay", "betas"),
    *("layer_decay", "clip_grad", "smoothing", "ema", "start_image_size", "patience", "soup"),
    *("dropout", "attention_dropout", "drop_path", "patch_dropout", "patch_sizes"),
    *("router_jitter", "balance_loss", "router_z_loss", "balance"),
    *(field.name for field in dataclasses.fields(AugmentConfig)),
)
# What changes nothing under a method: of linear, the routers do not learn.
IGNORED = {"probe": NOT_OF_A_PROBE, "linear": ("balance_loss", "router_z_loss", "encoder_lr")}
FROM_PREPROCESSING = ("resize", "crop_share", "interpolation", "mean", "std")


def complete_for_weights(config: Config, source: Pretrained, given: Sequence[str]) -> Config:
    """The settings that pretrained weights and the method decide, where nobody chose otherwise.

    Args:
        config: As asked for, with `finetune.weights`.
        source: Those weights.
        given: Names of the settings that somebody chose.

    Raises:
        ConfigError: Settings that were chosen contradict the weights or the method.
        WeightsError: The weights do not become the feed-forward part that was chosen.
    """
    if "feedforward" in given:
        check_feedforward(source, config.model.feedforward)
    chosen = flatten(config)
    method = config.finetune.method or "full"
    first = config.finetune.probe_first
    found: dict[str, Any] = {**dataclasses.asdict(source.config), **DEFAULTS[method]}
    if config.augment.random_crop == "simple":  # which keeps all of the short side
        found.pop("min_crop", None)
    found["num_classes"] = config.model.num_classes
    if source.preprocessing is not None:
        found |= {name: getattr(source.preprocessing, name) for name in FROM_PREPROCESSING}
        found |= usual_size(source.config, source.preprocessing)
    found |= sizes_of_preset(config, source, given)
    found |= of_captions(config, source, method, given)
    found["method"] = method
    one_class = not config.training.captions and not config.training.multilabel
    usual_first = config.finetune.method is None and one_class
    found["probe_first"] = usual_first if first is None else first
    refuse_what_is_ignored(method, chosen, given, usual={**flatten(make_config({})), **found})
    found["license"] = source.license
    given = [name for name in given if (name, chosen[name]) != ("license", None)]
    kept = {name: chosen[name] for name in given if name not in ("method", "probe_first")}
    found |= implied_settings(source.config, {**found, **kept})
    completed = make_config({**chosen, **found, **kept}, complete=True)
    if method != "full" and is_upcycled(source.config, completed.model):
        raise ConfigError(
            f"method={method}: experts do not learn by it, and those made of an mlp would stay "
            "equal; use --method full, or leave --feedforward out"
        )
    return completed


def of_captions(
    config: Config, source: Pretrained, method: str, given: Sequence[str]
) -> dict[str, Any]:
    """What follows where captions are learned: a new decoder learns faster than an encoder.

    A decoder that comes with the weights goes on, unless other words are asked for.
    """
    training = config.training
    if not training.captions:
        return {}
    found = dict(CAPTION_DEFAULTS.get(method, {}))
    if not training.classifies:
        found |= {"num_classes": 0, "pooling": "none"}
        if source.config.last_norm == "pooled":
            found["final_norm"] = "tokens"
    if "lr" in given and "encoder_lr" in found:  # whatever is chosen, the encoder learns slower
        found["encoder_lr"] = config.training.lr / 10
    if source.decoder is not None and not other_words(config, source.decoder, given):
        found |= dataclasses.asdict(source.decoder.config)
        if method == "full":
            found |= {"lr": 3e-4}
    return found


def other_words(config: Config, decoder: PretrainedDecoder, given: Sequence[str]) -> bool:
    """Whether somebody chose other words than those of a decoder that comes with the weights.

    Its own settings, as config.yaml of a run has them, are no choice of others.
    """
    theirs, mine = decoder.config, config.decoder
    return ("tokenizer" in given and mine.tokenizer != theirs.tokenizer) or (
        "vocab_size" in given and mine.vocab_size not in (None, theirs.vocab_size)
    )


def refuse_what_is_ignored(
    method: str, chosen: Mapping[str, Any], given: Sequence[str], usual: Mapping[str, Any]
) -> None:
    """Refuse settings that were chosen, and that would change nothing under `method`.

    Args:
        method: What learns.
        chosen: Every setting, as lists where there are several values.
        given: Names of those that somebody chose.
        usual: What they are where nobody chooses.

    Raises:
        ConfigError: There is one.
    """
    for name in IGNORED.get(method, ()):
        left_out = list(usual[name]) if isinstance(usual[name], tuple) else usual[name]
        if name in given and chosen[name] != left_out:
            others = [each for each in ("linear", "lora") if name not in IGNORED.get(each, ())]
            raise ConfigError(
                f"{name}={chosen[name]!r}: method={method} has no use for it; leave it out, or use "
                f"--method {', '.join(others)} or full"
            )


def usual_size(config: ModelConfig, preprocessing: Preprocessing) -> dict[str, int]:
    """The side of images that weights are used at, which may not be that of their positions.

    transformers' DINOv2 has positions for 518 pixels, and prepares images of 224.
    """
    height, width = preprocessing.image_size
    fits = height == width and height % config.patch_size == 0
    return {"image_size": height} if fits else {}


def sizes_of_preset(config: Config, source: Pretrained, given: Sequence[str]) -> dict[str, int]:
    """The image and patch size that a chosen --model asks the weights to be adapted to.

    Raises:
        ConfigError: The preset is another network than that of the weights.
    """
    if "model" not in given:
        return {}
    name, sizes = config.training.model, preset(config.training.model)
    for setting in ("dim", "depth", "num_heads"):
        has = getattr(source.config, setting)
        if sizes[setting] != has and setting not in given:
            raise ConfigError(
                f"model={name!r} has {setting}={sizes[setting]}, but the weights ({source.origin}) "
                f"have {has}: leave --model out, or give weights of that size"
            )
    return {setting: sizes[setting] for setting in ("image_size", "patch_size")}


def choose_what_learns(network: VisionTransformer, config: Config) -> str | None:
    """Freeze what the method leaves as it is, and add what it adds; a line that says so.

    Raises:
        ConfigError: LoRA is to be added to matrices that the blocks do not have.
    """
    settings = config.finetune
    if settings.method == "lora":
        rank, alpha = settings.lora_rank, settings.lora_alpha
        add_lora(network, rank=rank, alpha=alpha, targets=settings.targets)
        return lora_line(network, rank=rank, targets=settings.targets)
    if settings.method in ("linear", "probe"):
        freeze_backbone(network)
        answers = {"classify": "the head", "caption": "the decoder"}
        return share_line(f"{answers.get(config.training.task, 'head and decoder')} alone", network)
    return None


def as_saved(weights: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Weights as an ordinary network has them: LoRA's additions are in the matrices."""
    if config.finetune.method != "lora":
        return dict(weights)
    return merged(weights, rank=config.finetune.lora_rank, alpha=config.finetune.lora_alpha)
