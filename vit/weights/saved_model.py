"""Saves and loads the model of a run folder: config.json, model.safetensors, tokenizer.json.

config.json has timm's schema and our own settings under the key "vit"; every name and type is
checked on loading. model.safetensors stores a SHA-256 of itself and of the other files, so that
damage and mixed files of two runs are detected.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vit.atomic_files import write_text
from vit.calibration_reference import CalibrationReference
from vit.config import Config, DecoderConfig, ModelConfig
from vit.config.setting_layers import parse_decoder_config, parse_model_config
from vit.config.settings import PRETRAINING_TASKS
from vit.config.stored_config import run_folder_of
from vit.config.training_config import TASKS
from vit.data.captions.tokenizer import Tokenizer
from vit.data.preprocessing import Preprocessing
from vit.errors import RunError, WeightsError
from vit.json_reader import read_bytes
from vit.model.build import check_fit, meta_model
from vit.model.feature_distance import FeatureDistance
from vit.model.vision_transformer import VisionTransformer
from vit.number_answers import NumberAnswers
from vit.paths import did_you_mean
from vit.score_calibration import ScoreCalibration, rescale_thresholds
from vit.text import printable
from vit.weights.formats.state_dict_names import PATCH_WEIGHT
from vit.weights.formats.timm_config_writer import UNKNOWN_ARCHITECTURE, timm_config
from vit.weights.safetensors_io import read_tensors, write_tensors

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
DISTANCE_FILE = "distance.safetensors"
"""Distance from the training images; timm refuses tensors in WEIGHTS_FILE that it does not know."""
PRETRAINING_FILE = "pretraining.safetensors"
"""What only pretraining uses, apart from the encoder for the same reason."""
CONFIG_DIGEST = "config_sha256"
VERSION = 1
DEFAULT_THRESHOLD = 0.5
"""Threshold of a class until one is chosen on validation data."""
TOKENIZER_DIGEST = "tokenizer_sha256"
DECODER, PROJECTOR = "decoder.", "projector."
CALIBRATION, CALIBRATION_ERROR = "calibration", "calibration_error"
"""Keys of the calibration and of its error in our section of config.json."""
ANSWERS, INTERVALS, SCALING = "answers", "intervals", "scaling"
"""Keys of the numbers that a network answers with, of their intervals, and of the temperatures of
its choices."""
MEASURED = (CALIBRATION, CALIBRATION_ERROR, INTERVALS, SCALING)
"""Keys of what is measured after the training."""


@dataclass(frozen=True)
class LoadedRun:
    """A loaded network with everything that prediction needs.

    Args:
        model: Network in evaluation mode, on the CPU, float32.
        thresholds: Minimum calibrated sigmoid probability per class; None for a single-label one.
    """

    model: VisionTransformer
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    config: ModelConfig
    linear_offsets: bool = True
    decoder: DecoderConfig | None = None
    tokenizer: Tokenizer | None = None
    thresholds: tuple[float, ...] | None = None
    stored_task: str = ""
    calibration: ScoreCalibration | None = None
    distance: FeatureDistance | None = None
    license: str | None = None
    answers: NumberAnswers | None = None

    def without_calibration(self) -> "LoadedRun":
        """The same network with raw scores; of a multi-label one the decisions stay the same."""
        if self.answers is not None and self.answers.scaling:
            raw = dataclasses.replace(self.answers, scaling=(), half_widths={})
            return dataclasses.replace(self, answers=raw)
        if self.calibration is None:
            return self
        thresholds = self.thresholds
        if thresholds is not None:
            thresholds = rescale_thresholds(thresholds, self.calibration.temperature)
        return dataclasses.replace(self, calibration=None, thresholds=thresholds, distance=None)

    @property
    def task_name(self) -> str:
        """Name of the task that the network was trained for."""
        if self.stored_task:
            return self.stored_task
        if self.tokenizer is not None:
            return "classify,caption" if self.classes else "caption"
        return "classify" if self.thresholds is None else "multilabel"


@dataclass(frozen=True)
class SerializedModel:
    """A checked model, serialised in memory."""

    config: str
    tensors: dict[str, Tensor]
    """Tensors of model.safetensors, by timm's names."""
    tokenizer: str | None = None
    """Content of tokenizer.json, for a captioner."""
    pretraining: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of pretraining.safetensors, for a network that learned without labels."""

    def write(self, folder: Path) -> None:
        """Write the files to `folder`, each atomically."""
        # config.json first: unlike the weights, it is the same for every save of a run
        write_text(folder / CONFIG_FILE, self.config)
        notes = {"format": "pt", CONFIG_DIGEST: sha256(self.config.encode())}
        if self.tokenizer is not None:
            write_text(folder / TOKENIZER_FILE, self.tokenizer)
            notes[TOKENIZER_DIGEST] = sha256(self.tokenizer.encode())
        if self.pretraining:
            write_tensors(folder / PRETRAINING_FILE, self.pretraining, {"format": "pt"})
        write_tensors(folder / WEIGHTS_FILE, self.tensors, notes)


def save_model(folder: str | os.PathLike[str], model: VisionTransformer, **about: Any) -> None:
    """Write `model` to `folder`; `about` as for `serialize_model`."""
    serialize_model(model.state_dict(), **about).write(Path(folder))


def serialize_model(
    weights: Mapping[str, Tensor],
    *,
    config: Config,
    classes: Sequence[str],
    preprocessing: Preprocessing,
    terms: str | None = None,
    tokenizer: Tokenizer | None = None,
    task_fields: Mapping[str, Any] | None = None,
) -> SerializedModel:
    """Serialise a network in memory."""
    settings = config.model
    check_classes(classes, settings)
    decoder = None if tokenizer is None else config.decoder
    state = {name: tensor.detach().float() for name, tensor in weights.items()}
    pretraining: dict[str, Tensor] = {}
    if config.training.pretrains:
        state, pretraining = split_decoder(state, PROJECTOR)
    check_fit(state, meta_model(settings, decoder))
    own: dict[str, Any] = {
        "version": VERSION,
        "config": {n: v for n, v in asdict(settings).items() if v or n != "tile_pooling"},
        "preprocessing": preprocessing.to_dict(),
        "classes": list(classes),
    }
    theirs = timm_config(settings, classes, preprocessing)
    if decoder is not None:
        own["decoder"] = asdict(decoder)
        theirs["architecture"] = UNKNOWN_ARCHITECTURE  # timm has no network with a decoder
    content = {**theirs, "vit": own}
    own |= task_fields or {}
    if terms is not None:
        content["pretrained_cfg"]["license"] = terms
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    encoder, decoder_state = split_decoder(state)
    tensors = {**to_timm(encoder, settings), **decoder_state}
    return SerializedModel(
        text,
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
        None if tokenizer is None else tokenizer.to_json(),
        {name: tensor.cpu().contiguous() for name, tensor in pretraining.items()},
    )


def load_run(folder: str | os.PathLike[str]) -> LoadedRun:
    where = Path(folder)
    raw = read_config(where)
    weights = where / WEIGHTS_FILE
    if not weights.is_file():
        raise WeightsError(
            f"{weights} is missing: the training saved no model yet, or a copy is incomplete"
        )
    state, notes = read_tensors(weights)
    with _name_folder(where):
        if sha256(raw) not in notes.get(CONFIG_DIGEST, "").split():
            raise WeightsError(
                f"{CONFIG_FILE} is damaged, edited, or of another run than {WEIGHTS_FILE}; restore "
                "both from one copy"
            )
        content = json.loads(raw)
        tokenizer = None
        if "decoder" in vit_section(content):
            tokenizer = read_tokenizer(where, notes.get(TOKENIZER_DIGEST))
        run = _build_run(content, state, tokenizer)
        if run.calibration is None or run.calibration.farthest is None:
            return run
        return dataclasses.replace(run, distance=_read_distance(where, run.config))


@contextlib.contextmanager
def _name_folder(folder: Path) -> Iterator[None]:
    """Convert errors inside the `with`, also of torch and JSON, to a WeightsError with `folder`."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        reason, where = printable(error), printable(folder)
        prefix = "" if reason.startswith(where) else f"{where}: "
        raise WeightsError(f"{prefix}{reason}") from None


def read_model_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Read the ModelConfig of a run folder, without its weights."""
    raw = read_config(Path(folder))
    with _name_folder(Path(folder)):
        return parse_model_config(vit_section(json.loads(raw))["config"])


def read_pretraining_run(
    source: str | os.PathLike[str],
) -> tuple[ModelConfig, Preprocessing] | None:
    """Read the ModelConfig and the preprocessing of a run of `vit pretrain`, without its weights;
    None for weights of any other kind."""
    folder = run_folder_of(source)
    if not (folder / CONFIG_FILE).is_file():
        return None
    raw = read_config(folder)
    with _name_folder(folder):
        content = json.loads(raw)
        own = content.get("vit") if isinstance(content, dict) else None
        if not isinstance(own, dict) or own.get("task") not in PRETRAINING_TASKS:
            return None
        own = vit_section(content)
        return parse_model_config(own["config"]), Preprocessing.from_dict(own["preprocessing"])


def _build_run(content: Any, state: dict[str, Tensor], tokenizer: Tokenizer | None) -> LoadedRun:
    own = vit_section(content)
    config = parse_model_config(own["config"])
    classes = check_classes(own["classes"], config)
    preprocessing = Preprocessing.from_dict(own["preprocessing"])
    if config.depth > len(state):
        raise WeightsError(f"depth={config.depth}, but there are only {len(state)} tensors")
    task = own.get("task", "")
    if task not in ("", *TASKS):
        raise WeightsError(f"task {task} is not known to this vit: {', '.join(TASKS)}")
    answers = None
    if ANSWERS in own:
        answers = NumberAnswers.from_dict(own[ANSWERS], own.get(INTERVALS), own.get(SCALING, ()))
    decoder = None if tokenizer is None else parse_decoder_config(own["decoder"])
    thresholds = check_thresholds(own["thresholds"], classes) if "thresholds" in own else None
    stored = own.get(CALIBRATION)
    calibration = None if stored is None else ScoreCalibration.from_dict(stored)
    if calibration is not None:
        calibration.check_classes(classes)
    about = content.get("pretrained_cfg")
    terms = about.get("license") if isinstance(about, dict) else None
    encoder, decoder_state = split_decoder(state)
    model = meta_model(config, decoder)
    ours = {**from_timm(encoder, config), **decoder_state}
    state = {name: tensor.float() for name, tensor in ours.items()}
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
        stored_task=task,
        calibration=calibration,
        license=terms if isinstance(terms, str) else None,
        answers=answers,
    )


def to_timm(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Convert our tensors of the network `config` to those of the equivalent timm network."""
    theirs = dict(state)
    if config.stem != "conv":
        matrix, side = theirs[PATCH_WEIGHT], config.patch_size
        theirs[PATCH_WEIGHT] = matrix.reshape(len(matrix), -1, side, side)
    if not config.is_rotary:
        return theirs
    return {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): t for name, t in theirs.items()}


def from_timm(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `to_timm`."""
    ours = {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name): t for name, t in state.items()}
    if config.stem != "conv" and PATCH_WEIGHT in ours:
        ours[PATCH_WEIGHT] = ours[PATCH_WEIGHT].reshape(len(ours[PATCH_WEIGHT]), -1)
    return ours


def split_decoder(
    state: Mapping[str, Tensor], *others: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a state dict into the tensors of the encoder and of the decoder, with those of `others`
    (prefixes of names)."""
    apart = {name: value for name, value in state.items() if name.startswith((DECODER, *others))}
    return {name: tensor for name, tensor in state.items() if name not in apart}, apart


def read_config(folder: Path) -> bytes:
    path = folder / CONFIG_FILE
    if os.path.isfile(path):
        return read_bytes(path)
    there = "has no config.json" if os.path.isdir(folder) else "is not a folder"
    hint = "" if os.path.exists(folder) else did_you_mean(folder)
    raise RunError(f"{folder} {there}{hint or '; give the run folder of a training'}")


def vit_section(content: Any) -> dict[str, Any]:
    """Our section of config.json; timm reads the rest."""
    own = content.get("vit") if isinstance(content, dict) else None
    if not isinstance(own, dict):
        raise WeightsError(f"{CONFIG_FILE} has no key 'vit': it was not written by vit")
    if own.get("version") != VERSION:
        raise WeightsError(
            f"{CONFIG_FILE} has version {own.get('version')!r}, this vit reads {VERSION}; "
            "install the vit that wrote it"
        )
    optional = {"decoder", "thresholds", "task", ANSWERS, *MEASURED}
    if own.keys() - optional != {"version", "config", "preprocessing", "classes"}:
        raise WeightsError(f"{CONFIG_FILE} has the keys {sorted(own)} under 'vit'")
    return own


def update_run(folder: str | os.PathLike[str], changes: Mapping[str, Any]) -> None:
    """Change what was measured after the training in our section of config.json.

    The run is valid at any time, with the old or the new values, because the weight file stores the
    digests of both versions of config.json, and that of the version that training writes again when
    it is resumed. A change to None removes a value.
    """
    where = Path(folder)
    raw = read_config(where)
    content = json.loads(raw)
    stored = dict(vit_section(content))
    initial = {name: value for name, value in stored.items() if name not in MEASURED}
    if "thresholds" in stored:
        initial["thresholds"] = [DEFAULT_THRESHOLD] * len(stored["classes"])
    final = {name: value for name, value in {**stored, **changes}.items() if value is not None}
    texts = [
        json.dumps({**content, "vit": own}, indent=2, allow_nan=False) + "\n"
        for own in (initial, final)
    ]
    tensors, notes = read_tensors(where / WEIGHTS_FILE)
    known = dict.fromkeys([*(sha256(text.encode()) for text in texts), sha256(raw)])
    write_tensors(where / WEIGHTS_FILE, tensors, {**notes, CONFIG_DIGEST: " ".join(known)})
    write_text(where / CONFIG_FILE, texts[1])


def store_calibration(
    folder: str | os.PathLike[str],
    calibration: ScoreCalibration,
    distance: FeatureDistance | None = None,
    error: float | None = None,
    reference: CalibrationReference | None = None,
) -> None:
    """Write a calibration to a run folder, with its error on held-out images, and the distance from
    the training images and the reference if any.

    The run is valid at any time: without a calibration while the distance is written.
    """
    if reference is not None:
        reference.write(Path(folder))
    if calibration.farthest is not None and distance is not None:
        update_run(folder, {CALIBRATION: None, CALIBRATION_ERROR: None})
        write_tensors(Path(folder) / DISTANCE_FILE, distance.state_dict(), {"format": "pt"})
    update_run(folder, {CALIBRATION: calibration.to_dict(), CALIBRATION_ERROR: error})


def _read_distance(folder: Path, config: ModelConfig) -> FeatureDistance:
    tensors, _ = read_tensors(folder / DISTANCE_FILE)
    layers = config.depth * config.repeat_blocks + 1
    with contextlib.suppress(KeyError, ValueError, RuntimeError):
        distance = FeatureDistance.load(tensors).eval()
        shapes = (distance.tokens.mean.shape, distance.pooled.mean.shape)
        if shapes == ((layers, config.dim), (1, config.pooled_dim)):
            return distance
    raise WeightsError(f"{folder / DISTANCE_FILE} is of another network")


def read_tokenizer(folder: Path, digest: str | None = None) -> Tokenizer:
    """Read the tokenizer of a run; `digest` is the expected SHA-256 of the file."""
    path = folder / TOKENIZER_FILE
    raw = read_bytes(path)
    if digest is not None and digest != sha256(raw):
        raise WeightsError(
            f"{path} is damaged, edited, or of another run than {WEIGHTS_FILE}; restore "
            "both from one copy"
        )
    return Tokenizer.from_json(raw.decode())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def check_classes(classes: Any, config: ModelConfig) -> tuple[str, ...]:
    """Check that there is one distinct class name per output, and return them as a tuple."""
    if not isinstance(classes, list | tuple) or not all(isinstance(name, str) for name in classes):
        raise WeightsError("classes must be a list of names")
    if len(set(classes)) != len(classes):
        raise WeightsError("two classes have the same name")
    if len(classes) != config.num_classes:
        raise WeightsError(f"{len(classes)} class names for num_classes={config.num_classes}")
    return tuple(classes)


def check_thresholds(values: Any, classes: Sequence[str]) -> tuple[float, ...]:
    """Check that there is one probability per class, and return them as a tuple."""
    numbers = tuple(values) if isinstance(values, list | tuple) else ()
    plain = all(isinstance(value, int | float) and 0 <= value <= 1 for value in numbers)
    if not plain or len(numbers) != len(classes):
        raise WeightsError("thresholds must be a probability for each class")
    return tuple(map(float, numbers))
