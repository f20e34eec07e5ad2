"""A run folder on disk: config.json and model.safetensors, which are enough to predict.

The tensors carry a SHA-256 of themselves and one of config.json: damage, and files of two runs
mixed up, are noticed before anything is predicted.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.config import Config, DecoderConfig, ModelConfig
from vit.data.captioning.tokenizer import Tokenizer
from vit.data.preprocessing import Preprocessing
from vit.errors import WeightsError, printable
from vit.model.build import assemble
from vit.model.build_captioner import assemble_captioner
from vit.model.classifier import VisionTransformer
from vit.weights.described import (
    check_classes,
    check_thresholds,
    decoder_config,
    model_config,
)
from vit.weights.formats.names import check_fit
from vit.weights.formats.timm import from_timm, to_timm
from vit.weights.run_config import (
    CONFIG_DIGEST,
    CONFIG_FILE,
    TOKENIZER_FILE,
    USUAL,
    VERSION,
    WEIGHTS_FILE,
    own_part,
    read_config,
    read_tokenizer,
    sha256,
)
from vit.weights.tensorfile import read_tensors, write_tensors, write_text
from vit.weights.timm_config import UNKNOWN, timm_config

TOKENIZER_DIGEST = "tokenizer_sha256"
DECODER = "decoder."


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
        thresholds: Of each class, the probability from which on it is said, where a picture may
            have several and probabilities are sigmoids; None where it has one.
    """

    model: VisionTransformer
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    config: ModelConfig
    stretches: bool = True
    decoder: DecoderConfig | None = None
    tokenizer: Tokenizer | None = None
    thresholds: tuple[float, ...] | None = None


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
    if config.training.several:
        own["thresholds"] = [USUAL] * len(classes)
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
        if "decoder" in own_part(content):
            tokenizer = read_tokenizer(where, notes.get(TOKENIZER_DIGEST))
        return _assemble(content, state, tokenizer)
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
        return model_config(own_part(json.loads(raw))["config"])
    except (ValueError, RecursionError) as error:  # also of JSON
        raise WeightsError(f"{printable(folder)}: {printable(error)}") from None


def _assemble(content: Any, state: dict[str, Tensor], tokenizer: Tokenizer | None) -> LoadedRun:
    own = own_part(content)
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
    thresholds = check_thresholds(own["thresholds"], classes) if "thresholds" in own else None
    encoder, words = split_decoder(state)
    model = empty_model(config, decoder)
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


def empty_model(config: ModelConfig, decoder: DecoderConfig | None = None) -> VisionTransformer:
    """The network of `config` with shapes but without values; costs no memory."""
    with torch.device("meta"):
        return assemble(config) if decoder is None else assemble_captioner(config, decoder)
