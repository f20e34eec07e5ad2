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

from vit.config import Config, ModelConfig
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, RunError, WeightsError, printable
from vit.model.build import assemble
from vit.model.classifier import VisionTransformer
from vit.settings import all_settings, convert
from vit.weights.formats.names import check_fit
from vit.weights.formats.timm import from_timm, to_timm
from vit.weights.tensorfile import read_tensors, write_tensors, write_text
from vit.weights.timm_config import timm_config

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CONFIG_DIGEST = "config_sha256"
VERSION = 1
MOST_BYTES = 50_000_000
# settings that every run folder has; what came later has a default that changes nothing
FIRST_SETTINGS = {
    *("image_size", "patch_size", "channels", "num_classes", "dim", "depth", "num_heads"),
    *("hidden_dim", "class_token", "registers", "position", "norm", "norm_order", "qk_norm"),
    *("feedforward", "activation", "layer_scale", "pooling"),
    *("dropout", "attention_dropout", "drop_path"),
}


@dataclass(frozen=True)
class LoadedRun:
    """Everything that prediction needs.

    Args:
        model: In evaluation mode, on the CPU, float32.
        classes: Names, by output of the network.
        preprocessing: What turns a picture into the network's input.
        config: What the network was built from.
        stretches: As in Pretrained.
    """

    model: VisionTransformer
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    config: ModelConfig
    stretches: bool = True


@dataclass(frozen=True)
class Packed:
    """A network ready to be written, checked: nothing is left but bytes and a disk."""

    config: str
    """config.json."""
    tensors: dict[str, Tensor]
    """Of model.safetensors, by timm's names."""

    def write(self, folder: Path) -> None:
        """Write to `folder`; what was there before stays whole until the new files are.

        Raises:
            RunError: The disk is full, or the folder cannot be written.
        """
        # The settings first: they are the same for every save of a run, the weights are not.
        write_text(folder / CONFIG_FILE, self.config)
        notes = {"format": "pt", CONFIG_DIGEST: _sha256(self.config.encode())}
        write_tensors(folder / WEIGHTS_FILE, self.tensors, notes)


def save_model(
    folder: str | os.PathLike[str],
    model: VisionTransformer,
    *,
    config: Config,
    classes: Sequence[str],
    preprocessing: Preprocessing,
) -> None:
    """Write `model` to `folder`.

    Raises:
        WeightsError: The weights are not finite, or the other arguments do not describe them.
        RunError: The disk is full, or the folder cannot be written.
    """
    state = model.state_dict()
    pack(state, config=config, classes=classes, preprocessing=preprocessing).write(Path(folder))


def pack(
    weights: Mapping[str, Tensor],
    *,
    config: Config,
    classes: Sequence[str],
    preprocessing: Preprocessing,
    terms: str | None = None,
) -> Packed:
    """Make a network ready to be written.

    Raises:
        WeightsError: The weights are not finite, or the other arguments do not describe them.
    """
    settings = config.model
    check_classes(classes, settings)
    state = {name: tensor.detach().float() for name, tensor in weights.items()}
    check_fit(state, empty_model(settings))
    own = {
        "version": VERSION,
        "config": asdict(settings),
        "preprocessing": preprocessing.to_dict(),
        "classes": list(classes),
    }
    content = {**timm_config(settings, classes, preprocessing), "vit": own}
    if terms is not None:
        content["pretrained_cfg"]["license"] = terms
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    tensors = to_timm(state, settings)
    return Packed(text, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


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
        return _assemble(json.loads(raw), state)
    except (ValueError, TypeError, RuntimeError) as error:  # also of torch, JSON and recursion
        raise WeightsError(f"{printable(where)}: {printable(error)}") from None


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
    if own.keys() != {"version", "config", "preprocessing", "classes"}:
        raise WeightsError(f"{CONFIG_FILE} has the keys {sorted(own)} under 'vit'")
    return own


def _assemble(content: Any, state: dict[str, Tensor]) -> LoadedRun:
    own = _own_part(content)
    config = model_config(own["config"])
    classes = check_classes(own["classes"], config)
    preprocessing = Preprocessing.from_dict(own["preprocessing"])
    if config.depth > len(state):
        raise WeightsError(f"depth={config.depth}, but there are only {len(state)} tensors")
    model = empty_model(config)
    renamed = from_timm(state, packed=config.feedforward == "swiglu_packed")
    state = {name: tensor.float() for name, tensor in renamed.items()}
    check_fit(state, model)
    model.load_state_dict(state, assign=True)
    return LoadedRun(model.eval(), classes, preprocessing, config)


def model_config(values: Any) -> ModelConfig:
    """The inverse of `asdict`, with every name and type checked.

    Raises:
        ConfigError: A setting is unknown or missing, has the wrong type, or contradicts another.
    """
    known = {name: s.kind for name, s in all_settings().items() if s.section == "model"}
    if not isinstance(values, dict) or not FIRST_SETTINGS <= values.keys() <= known.keys():
        raise ConfigError(f"the model's settings must be exactly {', '.join(known)}")
    return ModelConfig(**{name: convert(known[name], values[name], name) for name in values})


def check_classes(classes: Any, config: ModelConfig) -> tuple[str, ...]:
    """`classes` as a tuple, where they are distinct names and as many as the outputs.

    Raises:
        WeightsError: They are not.
    """
    names = tuple(classes) if isinstance(classes, list | tuple) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise WeightsError("classes must be a list of names")
    if len(set(names)) != len(names):
        raise WeightsError("two classes have the same name")
    if len(names) != config.num_classes:
        raise WeightsError(f"{len(names)} class names for num_classes={config.num_classes}")
    return names


def empty_model(config: ModelConfig) -> VisionTransformer:
    """The network of `config` with shapes but without values; costs no memory."""
    with torch.device("meta"):
        return assemble(config)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
