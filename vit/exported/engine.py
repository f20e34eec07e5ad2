"""Engines of a prediction, torch, onnxruntime, OpenVINO and Ray, and what a Predictor needs of one.

Exported networks are opened here, without torch.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vit.config.inference_config import InferenceConfig
from vit.errors import ConfigError
from vit.exported.onnx_metadata import PathLike, read_metadata
from vit.text import printable, quoted

if TYPE_CHECKING:  # for --help
    from vit.data.preprocessing import AnyImage, Preprocessing
    from vit.exported.onnx_session import InferenceSession

ENGINES = ("torch", "onnx", "openvino", "ray")
LIBRARIES = {"torch": "torch", "onnx": "onnxruntime", "openvino": "openvino", "ray": "ray"}
EXPORTED = {".onnx": "onnx", ".xml": "openvino"}
"""File suffix -> default engine."""
SHARES = ("softmax", "sigmoid")
"""Activations whose outputs are probabilities."""
# engine -> suffixes of the models it runs; "" for a folder, or weights by name
SUPPORTED_SUFFIXES = {
    "torch": ("",),
    "onnx": (".onnx",),
    "openvino": (".xml", ".onnx"),
    "ray": ("", ".onnx", ".xml"),
}
EXPORTED_SETTINGS = {
    *("batch_size", "workers", "intensity_range", "search", "device", "precision"),
    "no_calibration",
}
"""Settings that exported networks have, or that have a refusal of their own."""


class Engine(Protocol):
    """A network that is loaded: prepared images in, arrays out.

    Attributes:
        shares: Whether scores of classes are probabilities, which tables show in percent.
        thresholds: Probability from which on each class is named, of a multi-label network.
        answers: The numbers that it answers with; None of a classifier or captioner.
        n_best: Captions of an image; 0 of a classifier.
        whole_images: Whether the network resizes images itself, and until then they are in memory
            as they are.
        reads_and_computes: Whether each thread of the pool reads and computes whole batches; else
            the threads only read.
        block_size: A list gives the same results when it is continued at a multiple of this.
        remedy: What helps if the network overflows.
    """

    classes: tuple[str, ...]
    preprocessing: "Preprocessing"
    thresholds: Any
    calibration: Any
    answers: Any
    shares: bool
    precision: str
    device: Any
    batch_size: int
    block_size: int
    workers: int
    exported: bool
    keep_aspect: bool
    whole_images: bool
    reads_and_computes: bool
    remedy: str

    @property
    def n_best(self) -> int: ...

    @property
    def prepare(self) -> "Callable[[AnyImage], Any]":
        """Makes of an upright RGB image what `run` takes."""

    def pool(self) -> Executor:
        """Threads that read, and compute if they do."""

    def groups(self, images: Sequence[Any]) -> list[list[int]]:
        """Indices of the images of each forward pass."""

    def largest_batch(self, shape: Sequence[int]) -> int:
        """Most images of this shape in a forward pass."""

    def random_image(self, number: int) -> Any:
        """Random pixels, the same ones for the same number."""

    def run(
        self, images: Sequence[Any], *, first: int = 0, rows: int | None = None
    ) -> dict[str, Any]:
        """Outputs of one forward pass by name, each with one entry an image.

        `probabilities` are (images, classes) float64; `captions`, `embedding`, `distance`, `memory`
        and `pixels` where the engine offers them.

        Args:
            images: Prepared ones; of torch also BadImages, in whose places are blank images.
            first: Index of the first image in the whole list.
            rows: Size of the batch with the blank images that pad it.
        """


def exported_suffix(model: object) -> str:
    """`.onnx` or `.xml` if `model` names a file of `vit export`, else ""."""
    name = os.fspath(model).lower() if isinstance(model, str | os.PathLike) else ""
    return next((suffix for suffix in EXPORTED if name.endswith(suffix)), "")


def exported_engine(model: object) -> str | None:
    """The default engine of `model` if it names a file of `vit export`, by its suffix."""
    return EXPORTED.get(exported_suffix(model))


def exported_files(path: PathLike) -> list[Path]:
    """Files of the network that `path` names, which may keep weights or a decoder beside it."""
    file = Path(path)
    decoder = file.with_suffix(f".decoder{file.suffix}")
    beside = file.with_suffix(".bin") if file.suffix == ".xml" else Path(f"{file}.data")
    return sorted(one for one in (file, beside, decoder) if one.is_file())


def select_engine(model: object, requested: str | None) -> str:
    """Return the requested engine, or the default for the suffix of `model`."""
    suffix = exported_suffix(model)
    engine = requested or EXPORTED.get(suffix, "torch")
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r}: choose one of {', '.join(ENGINES)}")
    if suffix in SUPPORTED_SUFFIXES[engine]:
        return engine
    name = printable(model)
    if not suffix:
        out = ".onnx" if engine == "onnx" else ".xml"
        raise ConfigError(
            f"engine={engine}: {name} is not an exported network; export it first: "
            f"vit export {quoted(str(model))} --out model{out}"
        )
    fit = [one for one in ENGINES if suffix in SUPPORTED_SUFFIXES[one]]
    raise ConfigError(
        f"engine={engine}: {name} is an exported network; take --engine {' or '.join(fit)}, or "
        "give the run"
    )


def library_version(engine: str) -> str:
    library = LIBRARIES[engine]
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return f"{library} not installed"


def open_exported(
    path: PathLike, engine: str, config: InferenceConfig, threads: int | None = None
) -> Engine:
    """Open X.onnx in onnxruntime, or X.xml or X.onnx in OpenVINO."""
    check_exported_settings(config)
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: must be at least 1")
    opened: Engine
    if engine == "onnx" and read_metadata(path).get("graph") in ("encoder", "decoder"):
        from vit.exported.exported_captioner import OnnxCaptioner

        opened = OnnxCaptioner(path, config, threads)
    else:
        from vit.exported.exported_classifier import OnnxClassifier

        if config.search is not None:
            raise ConfigError(f"{config.search}: this network writes no captions; leave it out")
        opened = OnnxClassifier(open_session(path, engine, threads), config, path)
    if config.precision not in ("auto", opened.precision):
        raise ConfigError(
            f"precision={config.precision!r}: the exported network computes in "
            f"{opened.precision}; export it again with another --precision"
        )
    return opened


def open_session(path: PathLike, engine: str, threads: int | None) -> "InferenceSession":
    if engine == "openvino":
        from vit.exported.openvino_session import OpenVINOSession

        return OpenVINOSession(path, threads=threads)
    from vit.exported.onnx_session import OnnxSession

    return OnnxSession(path, threads=threads)


def check_exported_settings(config: InferenceConfig) -> None:
    """Refuse settings that an exported network lacks."""
    if config.no_calibration:
        raise ConfigError(
            "no_calibration: the scores of an exported network are calibrated inside; export it "
            "with --no-calibration, or give the run"
        )
    if config.device not in (None, "cpu"):
        raise ConfigError(
            f"device={config.device!r}: exported networks run on the CPU; leave it out, "
            "or give the run"
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in EXPORTED_SETTINGS and value != field.default:
            given = field.name if value is True else f"{field.name}={value!r}"
            raise ConfigError(
                f"{given}: not supported by an exported network; give the run it was exported from"
            )
