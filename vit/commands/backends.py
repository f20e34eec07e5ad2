"""Inference engines of `vit predict`: torch, onnxruntime, OpenVINO and Ray."""

import argparse
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vit.commands.command_options import search_from_args
from vit.commands.command_output import check_output
from vit.errors import ConfigError, RunError, VitError, printable, quoted
from vit.exported.load_exported import EXPORTED
from vit.version import __version__

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
CHUNK_BYTES = 1 << 20


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
    def block_size(self) -> int:
        """A list gives the same results when it is continued at a multiple of this."""

    @property
    def n_best(self) -> int: ...

    @property
    def stream(self) -> "Callable[..., Iterator[Prediction]]": ...


def select_engine(model: str, asked: str | None) -> str:
    """Return the requested engine, or the default for the suffix of `model`.

    Raises:
        ConfigError: The requested engine does not run this model.
    """
    ending = next((end for end in EXPORTED if model.lower().endswith(end)), "")
    engine = asked or EXPORTED.get(ending, "torch")
    if ending in SUPPORTED_SUFFIXES[engine]:
        return engine
    name = printable(model)
    if not ending:
        out = ".onnx" if engine == "onnx" else ".xml"
        raise ConfigError(
            f"engine={engine}: {name} is not an exported network; export it first: "
            f"vit export {quoted(model)} --out model{out}"
        )
    fit = [one for one in ENGINES if ending in SUPPORTED_SUFFIXES[one]]
    raise ConfigError(
        f"engine={engine}: {name} is an exported network; take --engine {' or '.join(fit)}, or "
        "give the run"
    )


def predictor_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the predictor by the command line."""
    settings = {
        "device": args.device,
        "batch_size": args.batch_size,
        "precision": args.precision,
        "workers": args.workers,
        "keep_aspect": args.keep_aspect,
        "merge_tokens": args.merge_tokens,
        "patch_size": args.patch_size,
        "search": search_from_args(args),
    }
    more = {"tta": args.tta, "compile": args.compile, "embeddings": args.embeddings is not None}
    return settings | {name: value for name, value in more.items() if value}


def open_predictor(
    args: argparse.Namespace,
    engine: str,
    device: str | None,
    precision: str,
    images: Sequence[str],
) -> ImagePredictor:
    """Open the model of the command line; exported networks without importing torch.

    Args:
        args: Parsed arguments.
        engine: From `select_engine`.
        device: Device of this process.
        precision: Of the arithmetic; with auto, it is chosen by a trial on `images`.
        images: The whole list.

    Raises:
        VitError: The model or a setting cannot be used.
    """
    settings = predictor_settings(args) | {"device": device, "precision": precision}
    if engine == "torch":
        from vit.inference.predictor import Predictor

        predictor = Predictor(args.model, **settings)
        predictor.autotune_precision(images)
        return predictor
    from vit.exported.load_exported import load_exported

    return load_exported(args.model, engine=engine, explain=args.explain, **settings)


def embedding_dim(predictor: Any) -> int:
    """Width of the network's embeddings."""
    return int(predictor.model.num_features)


def prediction_settings(
    args: argparse.Namespace, engine: str, predictor: ImagePredictor, images: list[str]
) -> dict[str, Any]:
    """Everything that determines the output; a prediction is resumed only with equal settings.

    Raises:
        RunError: A file of the model cannot be read.
    """
    library = LIBRARIES[engine]
    search = {name[7:]: x for name, x in sorted(vars(args).items()) if name.startswith("search.")}
    names = hashlib.sha256(b"\0".join(map(os.fsencode, images))).hexdigest()
    folder = args.sort_into and os.path.abspath(args.sort_into)
    return {
        "vit": __version__,
        "engine": f"{library} {_version(library)}",
        "model": sha256_of_files(model_files(args.model, engine)),
        "list_of_images": names,
        "images": len(images),
        "batch_size": predictor.batch_size,
        "block": predictor.block_size,
        "device": str(predictor.device).split(":")[0],
        "precision": predictor.precision,
        "keep_aspect": args.keep_aspect,
        "merge_tokens": args.merge_tokens,
        "patch_size": args.patch_size,
        "tta": args.tta,
        "compile": args.compile,
        "search": search,
        "threshold": args.threshold,
        "embeddings": args.embeddings and os.path.abspath(args.embeddings),
        "sort_into": folder,
        "sort_with": (args.sort_with or "copy") if folder else None,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def model_files(model: str, engine: str) -> list[Path]:
    """Files of the model, for its digest."""
    path = Path(model)
    if engine == "torch":
        from vit.weights.resolve_source import locate_weights

        found = locate_weights(model)
        multilabel = found.weights.suffix == ".json"
        shards = found.folder.glob("*-of-*") if multilabel else ()
        others = (found.config, found.processor, found.folder / "tokenizer.json")
        files = [found.weights, *shards, *(one for one in others if one is not None)]
    else:
        decoder = path.with_suffix(f".decoder{path.suffix}")
        beside = path.with_suffix(".bin") if path.suffix == ".xml" else Path(f"{path}.data")
        files = [path, beside, decoder]
    return sorted(file for file in files if file.is_file())


def sha256_of_files(files: list[Path]) -> str:
    """SHA-256 over names and contents of files.

    Raises:
        RunError: A file cannot be read.
    """
    total = hashlib.sha256()
    path = Path()
    try:
        for path in files:
            with open(path, "rb") as file:
                total.update(os.fsencode(path.name) + b"\0" + b"%d\0" % os.path.getsize(path))
                while chunk := file.read(CHUNK_BYTES):
                    total.update(chunk)
    except OSError as error:
        raise RunError(f"{printable(path)} cannot be read: {error.strerror}") from None
    return total.hexdigest()


def check_ray(out: str, style: str, *, overwrite: bool) -> None:
    """Check that Ray is installed and its workers can write `out`.

    Raises:
        VitError: It is not installed, or they cannot.
    """
    if find_spec("ray") is None:
        raise VitError("ray is not installed: pip install 'vit-toolkit[ray]'")
    from vit.inference.remote_files import check_out

    if "://" not in out:
        check_output(out, overwrite=overwrite)
    check_out(out, style, overwrite=overwrite)


def predict_with_ray(
    args: argparse.Namespace, images: list[str], *, style: str, top_k: int, notify: Any
) -> int:
    """Predict with Ray's workers; return how many images failed.

    Raises:
        VitError: A setting is not supported with Ray.
    """
    from vit.inference.ray_inference import predict_with_ray as predict

    settings = predictor_settings(args)
    workers = settings.pop("workers")
    return int(
        predict(
            args.model,
            images,
            args.out,
            style=style,
            top_k=top_k,
            settings=settings,
            workers=workers,
            notify=notify,
        )
    )
