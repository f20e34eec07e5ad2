"""Inference engines of a prediction: torch, onnxruntime, OpenVINO and Ray."""

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vit.errors import ConfigError
from vit.exported.load_exported import EXPORTED, exported_files
from vit.quick_imports import quick_imports
from vit.text import printable, quoted

if TYPE_CHECKING:
    from vit.output.prediction_results import Prediction

ENGINES = ("torch", "onnx", "openvino", "ray")
LIBRARIES = {"torch": "torch", "onnx": "onnxruntime", "openvino": "openvino", "ray": "ray"}
# engine -> suffixes of the models it runs; "" for a folder, or weights by name
SUPPORTED_SUFFIXES = {
    "torch": ("",),
    "onnx": (".onnx",),
    "openvino": (".xml", ".onnx"),
    "ray": ("", ".onnx", ".xml"),
}


class ImagePredictor(Protocol):
    """A Predictor, an ExportedClassifier or an ExportedCaptioner."""

    classes: tuple[str, ...]
    batch_size: int

    @property
    def precision(self) -> str: ...

    @property
    def device(self) -> object: ...

    @property
    def thresholds(self) -> "Sequence[float] | None":
        """Of a multi-label network; None otherwise."""

    @property
    def shares(self) -> bool:
        """Whether scores of classes are probabilities."""

    @property
    def block_size(self) -> int:
        """A list gives the same results when it is continued at a multiple of this."""

    @property
    def n_best(self) -> int: ...

    @property
    def stream(self) -> "Callable[..., Iterator[Prediction]]": ...


def select_engine(model: str, requested: str | None) -> str:
    """Return the requested engine, or the default for the suffix of `model`."""
    suffix = next((end for end in EXPORTED if model.lower().endswith(end)), "")
    engine = requested or EXPORTED.get(suffix, "torch")
    if suffix in SUPPORTED_SUFFIXES[engine]:
        return engine
    name = printable(model)
    if not suffix:
        out = ".onnx" if engine == "onnx" else ".xml"
        raise ConfigError(
            f"engine={engine}: {name} is not an exported network; export it first: "
            f"vit export {quoted(model)} --out model{out}"
        )
    fit = [one for one in ENGINES if suffix in SUPPORTED_SUFFIXES[one]]
    raise ConfigError(
        f"engine={engine}: {name} is an exported network; take --engine {' or '.join(fit)}, or "
        "give the run"
    )


def open_predictor(
    model: str, engine: str, settings: dict[str, Any], images: Sequence[str], *, explain: str | None
) -> ImagePredictor:
    """Open a model; exported networks without importing torch.

    Args:
        explain: Folder of drawings, which exported networks refuse; None for none.
    """
    if engine == "torch":
        with quick_imports():
            from vit.inference.predictor import Predictor

        predictor = Predictor(model, **settings)
        predictor.autotune_precision(images)
        return predictor
    from vit.exported.load_exported import load_exported

    return load_exported(model, engine=engine, explain=explain, **settings)


def library_version(engine: str) -> str:
    """Name and version of the engine's library."""
    library = LIBRARIES[engine]
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return f"{library} not installed"


def model_files(model: str, engine: str, *, offline: bool | None = None) -> list[Path]:
    """Files of the model, for its digest; `offline` as for `locate_weights`."""
    if engine != "torch":
        return exported_files(model)
    from vit.weights.resolve_source import locate_weights

    found = locate_weights(model, offline=offline)
    shards = found.folder.glob("*-of-*") if found.weights.suffix == ".json" else ()
    names = ("tokenizer.json", "distance.safetensors")
    others = (found.config, found.processor, *(found.folder / name for name in names))
    files = [found.weights, *shards, *(one for one in others if one is not None)]
    return sorted(file for file in files if file.is_file())
