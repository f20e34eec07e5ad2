"""A run folder on disk: config.json and model.safetensors, which are enough to predict.

The tensors carry a SHA-256 of themselves and one of config.json: damage, and files of two runs
mixed up, are noticed before anything is predicted.

The texts of a run folder: config.json, of which the key "vit" is ours, and tokenizer.json.
Settings and class names that a file gives back: every name and type is checked.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.config import Config, DecoderConfig, ModelConfig
from vit.config.parser import all_settings, convert
from vit.data.captions.tokenizer import Tokenizer
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, RunError, WeightsError, printable
from vit.model.build import assemble, assemble_captioner
from vit.model.vision_transformer import VisionTransformer
from vit.paths import did_you_mean
from vit.weights.formats.state_dict_names import check_fit
from vit.weights.formats.timm_config import UNKNOWN_ARCHITECTURE, timm_config
from vit.weights.formats.timm_weights import from_timm, to_timm
from vit.weights.safetensors_io import read_tensors, write_tensors, write_text

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_DIGEST = "config_sha256"
VERSION = 1
MAX_CONFIG_BYTES = 50_000_000
DEFAULT_THRESHOLD = 0.5
"""Threshold of a class while nobody has chosen one."""


def read_config(folder: Path) -> bytes:
    """config.json of a run folder, as it is.

    Raises:
        RunError: There is none.
        WeightsError: It is no such file.
    """
    path = folder / CONFIG_FILE
    try:
        if not path.is_file():
            there = "has no config.json" if folder.is_dir() else "is not a folder"
            hint = "" if folder.exists() else did_you_mean(folder)
            remedy = hint or "; give the run folder of a training"
            raise RunError(f"{printable(folder)} {there}{remedy}")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise WeightsError(f"{printable(path)} is larger than {MAX_CONFIG_BYTES:,} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        raise RunError(f"{printable(path)} cannot be read: {printable(error)}") from None


def vit_section(content: Any) -> dict[str, Any]:
    """What config.json says to us; timm reads the rest.

    Raises:
        WeightsError: It was not written by this version.
    """
    own = content.get("vit") if isinstance(content, dict) else None
    if not isinstance(own, dict):
        raise WeightsError(f"{CONFIG_FILE} has no key 'vit': it was not written by vit")
    if own.get("version") != VERSION:
        raise WeightsError(
            f"{CONFIG_FILE} has version {own.get('version')!r}, this vit reads {VERSION}; "
            "install the vit that wrote it"
        )
    if own.keys() - {"decoder", "thresholds"} != {"version", "config", "preprocessing", "classes"}:
        raise WeightsError(f"{CONFIG_FILE} has the keys {sorted(own)} under 'vit'")
    return own


def set_thresholds(folder: str | os.PathLike[str], thresholds: Sequence[float]) -> None:
    """Write the thresholds of a run whose images may have several classes into its config.json.

    A kill at any moment leaves a whole run, with these thresholds or those from before: the weights
    know the digests of both.

    Raises:
        RunError, WeightsError: The run cannot be read or written.
    """
    where = Path(folder)
    raw = read_config(where)
    content = json.loads(raw)
    texts = []
    for values in ([DEFAULT_THRESHOLD] * len(thresholds), list(thresholds)):
        vit_section(content)["thresholds"] = values
        texts.append(json.dumps(content, indent=2, allow_nan=False) + "\n")
    tensors, notes = read_tensors(where / WEIGHTS_FILE)
    known = dict.fromkeys([*(sha256(text.encode()) for text in texts), sha256(raw)])
    write_tensors(where / WEIGHTS_FILE, tensors, {**notes, CONFIG_DIGEST: " ".join(known)})
    write_text(where / CONFIG_FILE, texts[1])


def read_tokenizer(folder: Path, digest: str | None = None) -> Tokenizer:
    """The tokenizer of a run.

    Args:
        folder: The run folder.
        digest: What the weights say of the file.

    Raises:
        WeightsError: It is missing, damaged, or not the one of the weights.
    """
    path = folder / TOKENIZER_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise WeightsError(f"{printable(path)} cannot be read: {printable(error)}") from None
    if digest is not None and digest != sha256(text.encode()):
        raise WeightsError(
            f"{printable(path)} is damaged, edited, or of another run than {WEIGHTS_FILE}; restore "
            "both from one copy"
        )
    return Tokenizer.from_json(text)


def sha256(content: bytes) -> str:
    """The digest as files have it."""
    return hashlib.sha256(content).hexdigest()


# settings that every run folder has; what came later has a default that changes nothing
REQUIRED_SETTINGS = {
    *("image_size", "patch_size", "channels", "num_classes", "dim", "depth", "num_heads"),
    *("hidden_dim", "class_token", "registers", "position", "norm", "norm_order", "qk_norm"),
    *("feedforward", "activation", "layer_scale", "pooling"),
    *("dropout", "attention_dropout", "drop_path"),
}


def parse_model_config(values: Any) -> ModelConfig:
    """The inverse of `asdict`, with every name and type checked.

    Raises:
        ConfigError: A setting is unknown or missing, has the wrong type, or contradicts another.
    """
    known = {name: s.kind for name, s in all_settings().items() if s.section == "model"}
    if not isinstance(values, dict) or not REQUIRED_SETTINGS <= values.keys() <= known.keys():
        raise ConfigError(f"the model's settings must be exactly {', '.join(known)}")
    return ModelConfig(**{name: convert(known[name], values[name], name) for name in values})


def parse_decoder_config(values: Any) -> DecoderConfig:
    """The inverse of `asdict`, with every name and type checked.

    Raises:
        ConfigError: A setting is unknown or missing, has the wrong type, or contradicts another.
    """
    known = {name: s.kind for name, s in all_settings().items() if s.section == "decoder"}
    if not isinstance(values, dict) or not {"vocab_size", "caption_tokens"} <= values.keys():
        raise ConfigError("the decoder's settings are incomplete")
    if unknown := values.keys() - known.keys():
        raise ConfigError(f"{printable(min(unknown))} is not a setting of the decoder")
    return DecoderConfig(**{name: convert(known[name], values[name], name) for name in values})


def check_classes(classes: Any, config: ModelConfig) -> tuple[str, ...]:
    """`classes` as a tuple, where they are distinct names and as many as the outputs.

    Raises:
        WeightsError: They are not.
    """
    names = tuple(classes) if isinstance(classes, list | tuple) else ()
    if not config.num_classes and isinstance(classes, list | tuple) and not names:
        return ()
    if not names or not all(isinstance(name, str) for name in names):
        raise WeightsError("classes must be a list of names")
    if len(set(names)) != len(names):
        raise WeightsError("two classes have the same name")
    if len(names) != config.num_classes:
        raise WeightsError(f"{len(names)} class names for num_classes={config.num_classes}")
    return names


def check_thresholds(values: Any, classes: Sequence[str]) -> tuple[float, ...]:
    """`values` as a tuple, where they are probabilities and as many as the classes.

    Raises:
        WeightsError: They are not.
    """
    numbers = tuple(values) if isinstance(values, list | tuple) else ()
    plain = all(isinstance(value, int | float) and 0 <= value <= 1 for value in numbers)
    if not plain or len(numbers) != len(classes):
        raise WeightsError("thresholds must be a probability for each class")
    return tuple(map(float, numbers))


TOKENIZER_DIGEST = "tokenizer_sha256"
DECODER = "decoder."


@dataclass(frozen=True)
class LoadedRun:
    """Everything that prediction needs.

    Args:
        model: In evaluation mode, on the CPU, float32.
        classes: Names, by output of the network.
        preprocessing: What turns an image into the network's input.
        config: What the network was built from.
        stretches: As in Pretrained.
        decoder: What the decoder was built from, where the model is a Captioner.
        tokenizer: Of its captions.
        thresholds: Of each class, the probability from which on it is said, where an image may
            have several and probabilities are sigmoids; None where it has one.
    """

    model: VisionTransformer
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    config: ModelConfig
    linear_offsets: bool = True
    decoder: DecoderConfig | None = None
    tokenizer: Tokenizer | None = None
    thresholds: tuple[float, ...] | None = None


@dataclass(frozen=True)
class SerializedModel:
    """A network ready to be written, checked: nothing is left but bytes and a disk."""

    config: str
    """config.json."""
    tensors: dict[str, Tensor]
    """Of model.safetensors, by timm's names."""
    tokenizer: str | None = None
    """tokenizer.json, where there are captions."""

    def write(self, folder: Path) -> None:
        """Write to `folder`; what was there before stays whole until the new files are.

        Raises:
            RunError: The disk is full, or the folder cannot be written.
        """
        # The settings first: they are the same for every save of a run, the weights are not.
        write_text(folder / CONFIG_FILE, self.config)
        notes = {"format": "pt", CONFIG_DIGEST: sha256(self.config.encode())}
        if self.tokenizer is not None:
            write_text(folder / TOKENIZER_FILE, self.tokenizer)
            notes[TOKENIZER_DIGEST] = sha256(self.tokenizer.encode())
        write_tensors(folder / WEIGHTS_FILE, self.tensors, notes)


def save_model(
    folder: str | os.PathLike[str],
    model: VisionTransformer,
    *,
    config: Config,
    classes: Sequence[str],
    preprocessing: Preprocessing,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write `model` to `folder`; a captioner with its `tokenizer`.

    Raises:
        WeightsError: The weights are not finite, or the other arguments do not describe them.
        RunError: The disk is full, or the folder cannot be written.
    """
    state = model.state_dict()
    packed = serialize_model(
        state, config=config, classes=classes, preprocessing=preprocessing, tokenizer=tokenizer
    )
    packed.write(Path(folder))


def serialize_model(
    weights: Mapping[str, Tensor],
    *,
    config: Config,
    classes: Sequence[str],
    preprocessing: Preprocessing,
    terms: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> SerializedModel:
    """Make a network ready to be written.

    Args:
        weights: Of a VisionTransformer, or of a Captioner where there is a tokenizer.
        config: What it was built from.
        classes: Names by output.
        preprocessing: What turns an image into the network's input.
        terms: Under which terms the weights are given.
        tokenizer: Of the captions.

    Raises:
        WeightsError: The weights are not finite, or the other arguments do not describe them.
    """
    settings = config.model
    check_classes(classes, settings)
    decoder = None if tokenizer is None else config.decoder
    state = {name: tensor.detach().float() for name, tensor in weights.items()}
    check_fit(state, meta_model(settings, decoder))
    own: dict[str, Any] = {
        "version": VERSION,
        "config": asdict(settings),
        "preprocessing": preprocessing.to_dict(),
        "classes": list(classes),
    }
    theirs = timm_config(settings, classes, preprocessing)
    if decoder is not None:
        own["decoder"] = asdict(decoder)
        theirs["architecture"] = UNKNOWN_ARCHITECTURE  # timm has no network with a decoder
    content = {**theirs, "vit": own}
    if config.training.multilabel:
        own["thresholds"] = [DEFAULT_THRESHOLD] * len(classes)
    if terms is not None:
        content["pretrained_cfg"]["license"] = terms
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    encoder, words = split_decoder(state)
    tensors = {**to_timm(encoder, settings), **words}
    return SerializedModel(
        text,
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
        None if tokenizer is None else tokenizer.to_json(),
    )


def split_decoder(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the encoder, and those of the decoder, under the names that they have."""
    words = {name: tensor for name, tensor in state.items() if name.startswith(DECODER)}
    return {name: tensor for name, tensor in state.items() if name not in words}, words


def load_run(folder: str | os.PathLike[str]) -> LoadedRun:
    """Open a run folder.

    Raises:
        RunError: `folder` is no run folder.
        WeightsError: One of its files is missing, damaged, or does not fit the other.
    """
    where = Path(folder)
    raw = read_config(where)
    weights = where / WEIGHTS_FILE
    if not weights.is_file():
        raise WeightsError(
            f"{printable(weights)} is missing: the training saved no model yet, or a copy is "
            "incomplete"
        )
    state, notes = read_tensors(weights)
    if sha256(raw) not in notes.get(CONFIG_DIGEST, "").split():
        raise WeightsError(
            f"{printable(where)}: {CONFIG_FILE} is damaged, edited, or of another run than "
            f"{WEIGHTS_FILE}; restore both from one copy"
        )
    try:
        content = json.loads(raw)
        tokenizer = None
        if "decoder" in vit_section(content):
            tokenizer = read_tokenizer(where, notes.get(TOKENIZER_DIGEST))
        return _build_run(content, state, tokenizer)
    except WeightsError as error:
        told = printable(error)
        there = "" if told.startswith(printable(where)) else f"{printable(where)}: "
        raise WeightsError(f"{there}{told}") from None
    except (ValueError, TypeError, RuntimeError) as error:  # also of torch, JSON and recursion
        raise WeightsError(f"{printable(where)}: {printable(error)}") from None


def read_model_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """What network is in a run folder; its weights are not read.

    Raises:
        RunError: `folder` is no run folder.
        WeightsError: Its config.json is damaged.
    """
    raw = read_config(Path(folder))
    try:
        return parse_model_config(vit_section(json.loads(raw))["config"])
    except (ValueError, RecursionError) as error:  # also of JSON
        raise WeightsError(f"{printable(folder)}: {printable(error)}") from None


def _build_run(content: Any, state: dict[str, Tensor], tokenizer: Tokenizer | None) -> LoadedRun:
    own = vit_section(content)
    config = parse_model_config(own["config"])
    classes = check_classes(own["classes"], config)
    preprocessing = Preprocessing.from_dict(own["preprocessing"])
    if config.depth > len(state):
        raise WeightsError(f"depth={config.depth}, but there are only {len(state)} tensors")
    decoder = None if tokenizer is None else parse_decoder_config(own["decoder"])
    if decoder is not None and tokenizer is not None and decoder.vocab_size != tokenizer.size:
        raise WeightsError(
            f"vocab_size={decoder.vocab_size}, but {TOKENIZER_FILE} has {tokenizer.size} tokens"
        )
    thresholds = check_thresholds(own["thresholds"], classes) if "thresholds" in own else None
    encoder, words = split_decoder(state)
    model = meta_model(config, decoder)
    renamed = from_timm(encoder, packed=config.feedforward == "swiglu_packed")
    state = {name: tensor.float() for name, tensor in {**renamed, **words}.items()}
    check_fit(state, model)
    model.load_state_dict(state, assign=True)
    return LoadedRun(
        model.eval(),
        classes,
        preprocessing,
        config,
        decoder=decoder,
        tokenizer=tokenizer,
        thresholds=thresholds,
    )


def meta_model(config: ModelConfig, decoder: DecoderConfig | None = None) -> VisionTransformer:
    """The network of `config` with shapes but without values; costs no memory."""
    with torch.device("meta"):
        return assemble(config) if decoder is None else assemble_captioner(config, decoder)
