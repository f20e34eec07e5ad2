"""A run folder on disk: config.json and model.safetensors, which are enough to predict.

The tensors carry a SHA-256 of themselves and one of config.json: damage, and files of two runs
mixed up, are noticed before anything is predicted.
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
from vit.data.preprocessing import Preprocessing
from vit.data.tokenizer import Tokenizer
from vit.errors import RunError, WeightsError, printable
from vit.model.build import assemble
from vit.model.build_captioner import assemble_captioner
from vit.model.classifier import VisionTransformer
from vit.weights.described import check_classes, decoder_config, model_config
from vit.weights.formats.names import check_fit
from vit.weights.formats.timm import from_timm, to_timm
from vit.weights.tensorfile import read_tensors, write_tensors, write_text
from vit.weights.timm_config import UNKNOWN, timm_config

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_DIGEST = "config_sha256"
TOKENIZER_DIGEST = "tokenizer_sha256"
DECODER = "decoder."
VERSION = 1
MOST_BYTES = 50_000_000


@dataclass(frozen=True)
class LoadedRun:
    """Everything that prediction needs.

    Args:
        model: In evaluation mode, on the CPU, float32.
        classes: Names, by output of the network.
        preprocessing: What turns a picture into the network's input.
        config: What the network was built from.
        stretches: As in Pretrained.
        decoder: What the decoder was built from, where the model is a Captioner.
        tokenizer: Of its captions.
    """

    model: VisionTransformer
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    config: ModelConfig
    stretches: bool = True
    decoder: DecoderConfig | None = None
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class Packed:
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
        notes = {"format": "pt", CONFIG_DIGEST: _sha256(self.config.encode())}
        if self.tokenizer is not None:
            write_text(folder / TOKENIZER_FILE, self.tokenizer)
            notes[TOKENIZER_DIGEST] = _sha256(self.tokenizer.encode())
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
    packed = pack(
        state, config=config, classes=classes, preprocessing=preprocessing, tokenizer=tokenizer
    )
    packed.write(Path(folder))


def pack(
    weights: Mapping[str, Tensor],
    *,
    config: Config,
    classes: Sequence[str],
    preprocessing: Preprocessing,
    terms: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> Packed:
    """Make a network ready to be written.

    Args:
        weights: Of a VisionTransformer, or of a Captioner where there is a tokenizer.
        config: What it was built from.
        classes: Names by output.
        preprocessing: What turns a picture into the network's input.
        terms: Under which terms the weights are given.
        tokenizer: Of the captions.

    Raises:
        WeightsError: The weights are not finite, or the other arguments do not describe them.
    """
    settings = config.model
    check_classes(classes, settings)
    decoder = None if tokenizer is None else config.decoder
    state = {name: tensor.detach().float() for name, tensor in weights.items()}
    check_fit(state, empty_model(settings, decoder))
    own: dict[str, Any] = {
        "version": VERSION,
        "config": asdict(settings),
        "preprocessing": preprocessing.to_dict(),
        "classes": list(classes),
    }
    theirs = timm_config(settings, classes, preprocessing)
    if decoder is not None:
        own["decoder"] = asdict(decoder)
        theirs["architecture"] = UNKNOWN  # timm has no network with a decoder
    content = {**theirs, "vit": own}
    if terms is not None:
        content["pretrained_cfg"]["license"] = terms
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    encoder, words = split_decoder(state)
    tensors = {**to_timm(encoder, settings), **words}
    return Packed(
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
    raw = _read_config(where)
    weights = where / WEIGHTS_FILE
    if not weights.is_file():
        raise WeightsError(
            f"{printable(weights)} is missing: the training saved no model yet, or a copy is "
            "incomplete"
        )
    state, notes = read_tensors(weights)
    if notes.get(CONFIG_DIGEST) != _sha256(raw):
        raise WeightsError(
            f"{printable(where)}: {CONFIG_FILE} is damaged, edited, or of another run than "
            f"{WEIGHTS_FILE}; restore both from one copy"
        )
    try:
        content = json.loads(raw)
        tokenizer = None
        if "decoder" in _own_part(content):
            tokenizer = read_tokenizer(where, notes.get(TOKENIZER_DIGEST))
        return _assemble(content, state, tokenizer)
    except WeightsError as error:
        told = printable(error)
        there = "" if told.startswith(printable(where)) else f"{printable(where)}: "
        raise WeightsError(f"{there}{told}") from None
    except (ValueError, TypeError, RuntimeError) as error:  # also of torch, JSON and recursion
        raise WeightsError(f"{printable(where)}: {printable(error)}") from None


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
    if digest is not None and digest != _sha256(text.encode()):
        raise WeightsError(
            f"{printable(path)} is damaged, edited, or of another run than {WEIGHTS_FILE}; restore "
            "both from one copy"
        )
    return Tokenizer.from_json(text)


def read_model_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """What network is in a run folder; its weights are not read.

    Raises:
        RunError: `folder` is no run folder.
        WeightsError: Its config.json is damaged.
    """
    raw = _read_config(Path(folder))
    try:
        return model_config(_own_part(json.loads(raw))["config"])
    except (ValueError, RecursionError) as error:  # also of JSON
        raise WeightsError(f"{printable(folder)}: {printable(error)}") from None


def _read_config(folder: Path) -> bytes:
    path = folder / CONFIG_FILE
    try:
        if not path.is_file():
            there = "has no config.json" if folder.is_dir() else "is not a folder"
            raise RunError(f"{printable(folder)} {there}; give the run folder of a training")
        if path.stat().st_size > MOST_BYTES:
            raise WeightsError(f"{printable(path)} is larger than {MOST_BYTES:,} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        raise RunError(f"{printable(path)} cannot be read: {printable(error)}") from None


def _own_part(content: Any) -> dict[str, Any]:
    """What config.json says to us; timm reads the rest."""
    own = content.get("vit") if isinstance(content, dict) else None
    if not isinstance(own, dict):
        raise WeightsError(f"{CONFIG_FILE} has no key 'vit': it was not written by vit")
    if own.get("version") != VERSION:
        raise WeightsError(
            f"{CONFIG_FILE} has version {own.get('version')!r}, this vit reads {VERSION}; "
            "install the vit that wrote it"
        )
    if own.keys() - {"decoder"} != {"version", "config", "preprocessing", "classes"}:
        raise WeightsError(f"{CONFIG_FILE} has the keys {sorted(own)} under 'vit'")
    return own


def _assemble(content: Any, state: dict[str, Tensor], tokenizer: Tokenizer | None) -> LoadedRun:
    own = _own_part(content)
    config = model_config(own["config"])
    classes = check_classes(own["classes"], config)
    preprocessing = Preprocessing.from_dict(own["preprocessing"])
    if config.depth > len(state):
        raise WeightsError(f"depth={config.depth}, but there are only {len(state)} tensors")
    decoder = None if tokenizer is None else decoder_config(own["decoder"])
    if decoder is not None and tokenizer is not None and decoder.vocab_size != tokenizer.size:
        raise WeightsError(
            f"vocab_size={decoder.vocab_size}, but {TOKENIZER_FILE} has {tokenizer.size} tokens"
        )
    encoder, words = split_decoder(state)
    model = empty_model(config, decoder)
    renamed = from_timm(encoder, packed=config.feedforward == "swiglu_packed")
    state = {name: tensor.float() for name, tensor in {**renamed, **words}.items()}
    check_fit(state, model)
    model.load_state_dict(state, assign=True)
    return LoadedRun(
        model.eval(), classes, preprocessing, config, decoder=decoder, tokenizer=tokenizer
    )


def empty_model(config: ModelConfig, decoder: DecoderConfig | None = None) -> VisionTransformer:
    """The network of `config` with shapes but without values; costs no memory."""
    with torch.device("meta"):
        return assemble(config) if decoder is None else assemble_captioner(config, decoder)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
