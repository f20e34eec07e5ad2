"""Loads a network from any weight source: `from_pretrained`, `load_model`, `open_pretrained`.

SOURCE -> files (resolve_source.py) -> tensors (state_dict_readers.py)
       -> our parameter names and ModelConfig (formats/)
       -> another head, image size or number of channels (adapt_weights.py) -> network
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vit.config import DataConfig, ModelConfig
from vit.config.presets import find_presets
from vit.config.setting_layers import model_settings, read_settings
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, WeightsError
from vit.json_reader import read_json
from vit.model.build import meta_model
from vit.model.vision_transformer import VisionTransformer
from vit.text import Notify, join_names, print_to_stderr
from vit.weights.adapt_weights import adapt_weights, changed_config, fit_preprocessing
from vit.weights.formats.pretrained import Pretrained, PretrainedDecoder
from vit.weights.resolve_source import WeightsLocation, locate_weights
from vit.weights.saved_model import (
    DECODER,
    LoadedRun,
    load_run,
    read_model_config,
    split_decoder,
)
from vit.weights.sparse_upcycling import check_feedforward
from vit.weights.state_dict_readers import StateFile, read_npz, read_state

Source = str | os.PathLike[str]


def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """Names of networks: `vit models`.

    Args:
        pattern: Part of a name, or a pattern such as `vit_*_patch16_*`.
        pretrained: Whether to list timm's pretrained weights, which `from_pretrained` opens,
            instead of the presets of `create_model`.

    Raises:
        VitError: No name matches.
    """
    if not pretrained:
        return [*find_presets(pattern)]
    from vit.weights.formats.timm_network import search

    return [f"timm/{entry.name}" for entry in search(pattern)]


def open_pretrained(source: Source, *, model: str | None = None) -> Pretrained:
    """Read the weights of `source` and everything known about them, without building a network."""
    return _read_weights(locate_weights(source), model)


def read_source_config(source: Source) -> ModelConfig:
    """ModelConfig of `source`, without downloads; of a run folder only config.json is read."""
    found = locate_weights(source, offline=True)
    return read_model_config(found.folder) if found.kind == "run" else _read_weights(found).config


def _read_weights(found: WeightsLocation, model: str | None = None) -> Pretrained:
    """The readers of other libraries are imported here: a run folder needs none of them."""
    if found.kind == "run":
        return _from_run(found)
    where, notes = str(found.weights), found.notes
    if found.kind == "npz":
        from vit.weights.formats.jax_weights import read_jax

        pretrained = read_jax(read_npz(found.weights), where)
    else:
        file = read_state(found.weights)
        notes += file.notes
        if file.integers:
            notes += (f"left out: {join_names(file.integers, 3)} (integers, which are no weights)",)
        config = {} if found.config is None else read_json(found.config)
        if found.kind == "huggingface":
            from vit.weights.formats.huggingface_weights import read_huggingface

            processor = None if found.processor is None else read_json(found.processor)
            pretrained = read_huggingface(config, processor, file.tensors, where)
        else:
            pretrained = _read_bare(found, file, config, model)
    return dataclasses.replace(
        pretrained,
        license=found.license or pretrained.license,
        notes=(*notes, *pretrained.notes),
    )


def _read_bare(
    found: WeightsLocation, file: StateFile, config: dict[str, Any], model: str | None
) -> Pretrained:
    """Weights of timm, with its config.json or without, of torchvision, or of the first authors."""
    from vit.weights.formats.infer_architecture import OPENAI
    from vit.weights.formats.original_checkpoints import read_open_clip_config
    from vit.weights.formats.timm_network import is_timm_model
    from vit.weights.formats.timm_weights import looks_like_timm, read_timm, read_timm_config
    from vit.weights.formats.torchvision_weights import looks_like_torchvision, read_torchvision

    where = str(found.weights)
    if found.kind == "timm":
        about = read_timm_config(config) if config else {}
        if architecture(about.get("architecture")) != architecture(found.name):
            # two networks share a repository, and its config.json describes the other one
            about = {"architecture": found.name}
        return read_timm(file.tensors, **about, where=where)
    if looks_like_torchvision(file.tensors):
        return read_torchvision(file.tensors, where)
    if not looks_like_timm(file.tensors):
        raise WeightsError(
            f"{where} has tensors that no known Vision Transformer has "
            f"({join_names(file.tensors, 3)}); give the folder with its config.json"
        )
    open_clip = read_open_clip_config(config)
    notes: tuple[str, ...] = ()
    read = functools.partial(
        read_timm,
        file.tensors,
        pretrained_cfg=open_clip.pretrained_cfg,
        other_names=(*file.integers, *([OPENAI] if open_clip.quick_gelu else [])),
        where=where,
    )
    named = file.arch or open_clip.timm_model_name
    if model is None and named is not None and is_timm_model(named):
        try:
            return read(architecture=named)
        except WeightsError as error:  # it was built with other arguments
            notes = (f"arch={named} of the file is not used: {error}",)
    pretrained = read(architecture=model)
    return dataclasses.replace(pretrained, notes=(*notes, *pretrained.notes))


def _from_run(found: WeightsLocation) -> Pretrained:
    run = load_run(found.folder)
    encoder, decoder_state = split_decoder(run.model.state_dict())
    decoder = None
    if run.decoder is not None and run.tokenizer is not None:
        own = {name.removeprefix(DECODER): tensor for name, tensor in decoder_state.items()}
        decoder = PretrainedDecoder(own, run.decoder, run.tokenizer)
    return Pretrained(
        state=encoder,
        decoder=decoder,
        config=run.config,
        classes=run.classes,
        preprocessing=run.preprocessing,
        thresholds=run.thresholds,
        answers=run.answers,
        calibration=run.calibration,
        license=run.license,
        origin=f"run {found.folder}",
        linear_offsets=True,
        from_scratch=began_from_scratch(found.folder),
    )


def began_from_scratch(folder: Path) -> bool:
    """Whether the training of a run folder used no other weights; False if that is unknown."""
    try:
        settings = read_settings(folder / "config.yaml")
    except ConfigError:
        return False
    return "weights" in settings and settings["weights"] is None


def architecture(name: str | None) -> str:
    """timm model name without its tag."""
    return (name or "").partition(".")[0]


def describe_source(source: Source, pretrained: Pretrained) -> list[str]:
    """Origin, license and notes of the weights, as lines for the user."""
    line = f"weights: {source} ({pretrained.origin})"
    if pretrained.license or not pretrained.from_scratch:
        terms = pretrained.license if pretrained.license else "unknown; ask the authors"
        line += f", license: {terms}"
    return [line, *(f"note: {note}" for note in pretrained.notes)]


def from_pretrained(
    source: Source,
    *,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
    model: str | None = None,
    notify: Notify | None = print_to_stderr,
    **settings: Any,
) -> VisionTransformer:
    """Build a network with pretrained weights, in evaluation mode; a Captioner for captioning.

    Args:
        source: As for `open_pretrained`.
        num_classes: Outputs of the head; a new head of zeros if the source has another number.
            None: as in the source; 0: no head.
        classes: Class names by output; head rows of the source are kept for equal names.
        model: timm architecture of a file of tensors, if shapes do not determine it.
        notify: Called with each line about origin, license and changes; None for silence.
        settings: Model settings to adapt to: image_size, patch_size, channels, settings without
            weights (drop_path, merge_tokens, capacity_factor), and feedforward="moe", whose
            experts are copies of the source's MLPs. All others must equal the source's.

    Raises:
        WeightsError: As `open_pretrained`, or the weights cannot be adapted.
        ConfigError: A setting is unknown or has an impossible value.
    """
    pretrained = open_pretrained(source, model=model)
    config = _requested_config(pretrained, num_classes, classes, settings)
    state, report = adapt_weights(pretrained, config, classes=classes)
    decoder = pretrained.decoder
    lines = [*describe_source(source, pretrained), *report.lines()]
    if decoder is not None and (num_classes or classes):
        lines.append("left out: the decoder, since classes were given")
        decoder = None
    if notify is not None:
        for line in lines:
            notify(line)
    return build_from_state(config, state, decoder)


def _requested_config(
    pretrained: Pretrained,
    num_classes: int | None,
    classes: Sequence[str] | None,
    settings: dict[str, Any],
) -> ModelConfig:
    config = pretrained.config
    changed = model_settings(settings)
    if classes is not None and num_classes not in (None, len(classes)):
        raise ConfigError(f"num_classes={num_classes}, but there are {len(classes)} names")
    outputs = len(classes) if classes is not None else num_classes
    if outputs is not None:
        changed["num_classes"] = outputs
    check_feedforward(pretrained, changed.get("feedforward", config.feedforward))
    return changed_config(config, changed)


def build_from_state(
    config: ModelConfig, state: dict[str, Tensor], decoder: PretrainedDecoder | None = None
) -> VisionTransformer:
    """Build the network of `config` from `state`, for evaluation; with `decoder` a Captioner."""
    if decoder is None:
        network = meta_model(config)
    else:
        network = meta_model(config, decoder.config)
        state = state | {f"{DECODER}{name}": tensor for name, tensor in decoder.state.items()}
    network.load_state_dict(state, assign=True)
    return network.eval()


def load_model(
    source: Source, *, notify: Notify | None = print_to_stderr, headless: bool = False
) -> LoadedRun:
    """Load a network for prediction, with its class names and preprocessing; lines about the
    weights go to `notify`."""
    found = locate_weights(source)
    if found.kind == "run":
        run = load_run(found.folder)
        if not (headless or run.classes or run.tokenizer):
            raise WeightsError(
                f"{source} was pretrained without classes: vit predict --embeddings "
                f"FILE writes its features, and vit train DATA --weights {source} adds "
                "classes"
            )
        return run
    pretrained = fit_preprocessing(_read_weights(found))
    config, why = pretrained.config, ""
    remedy = "fine-tune it first (vit train DATA --weights ...)"
    if not config.num_classes and not headless:
        why = f"has no head, so it names no classes: {remedy}"
    if config.num_classes == 1 and pretrained.thresholds is None and not headless:
        why = (
            "has one output, a score without another that it competes with, so each image would "
            f"have it by 100%: {remedy}, which makes a new head"
        )
    if config.channels != 3:
        why = f"is for {config.channels} channels whose values nothing describes: {remedy}"
    if why:
        raise WeightsError(f"{source} ({pretrained.origin}) {why}")
    lines = describe_source(source, pretrained)
    preprocessing, line = preprocessing_or_default(pretrained)
    lines += [line] if line else []
    classes = pretrained.classes if config.num_classes else ()
    if classes is None:
        classes = numbered_classes(pretrained)
        lines.append("note: nothing says the names of its classes: they are numbers here")
    if notify is not None:
        for line in lines:
            notify(line)
    return LoadedRun(
        build_from_state(config, pretrained.state),
        classes,
        preprocessing,
        config,
        pretrained.linear_offsets,
        thresholds=pretrained.thresholds,
        license=pretrained.license,
    )


def numbered_classes(pretrained: Pretrained) -> tuple[str, ...]:
    """Output indices as class names, for sources without names."""
    return tuple(str(index) for index in range(pretrained.config.num_classes))


def preprocessing_or_default(pretrained: Pretrained) -> tuple[Preprocessing, str]:
    """Preprocessing of the source; if unknown, the default and a line about it."""
    if pretrained.preprocessing is not None:
        return pretrained.preprocessing, ""
    usual, side = DataConfig(), pretrained.config.image_size
    assumed = Preprocessing.from_config(usual, side)
    return assumed, (
        "note: nothing says how images are prepared for these weights; assumed: resized to "
        f"{side} px by {usual.interpolation}, the middle {usual.crop_share:.0%}, mean and std 0.5"
    )
