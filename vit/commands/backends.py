"""What computes the answers of `vit predict`: torch, onnxruntime, OpenVINO, or Ray's workers."""

import argparse
import hashlib
import os
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vit.commands.command_options import search_given
from vit.commands.command_output import check_output
from vit.errors import ConfigError, RunError, VitError, printable, quoted
from vit.exported.load_exported import EXPORTED
from vit.version import __version__

if TYPE_CHECKING:
    from vit.output.prediction_results import Prediction

ENGINES = ("torch", "onnx", "openvino", "ray")
LIBRARIES = {"torch": "torch", "onnx": "onnxruntime", "openvino": "openvino", "ray": "ray"}
# engine -> endings of what it takes; a folder, or weights by name, has none of them
TAKES = {
    "torch": ("",),
    "onnx": (".onnx",),
    "openvino": (".xml", ".onnx"),
    "ray": ("", ".onnx", ".xml"),
}
PIECE = 1 << 20


class Answers(Protocol):
    """A Predictor, or a runner of exported networks."""

    classes: tuple[str, ...]
    batch_size: int

    @property
    def n_best(self) -> int: ...

    @property
    def stream(self) -> "Callable[..., Iterator[Prediction]]": ...


def engine_of(model: str, asked: str | None) -> str:
    """What computes `model`: what was asked for, else what its ending says.

    Raises:
        ConfigError: The two do not go together.
    """
    ending = next((end for end in EXPORTED if model.lower().endswith(end)), "")
    engine = asked or EXPORTED.get(ending, "torch")
    if ending in TAKES[engine]:
        return engine
    name = printable(model)
    if not ending:
        out = ".onnx" if engine == "onnx" else ".xml"
        raise ConfigError(
            f"engine={engine}: {name} is no exported network; export it first: "
            f"vit export {quoted(model)} --out model{out}"
        )
    fit = [one for one in ENGINES if ending in TAKES[one]]
    raise ConfigError(
        f"engine={engine}: {name} is an exported network; take --engine {' or '.join(fit)}, or "
        "give the run"
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the predictor, as they were typed."""
    settings = {
        "device": args.device,
        "batch_size": args.batch_size,
        "precision": args.precision,
        "workers": args.workers,
        "keep_aspect": args.keep_aspect,
        "merge_tokens": args.merge_tokens,
        "patch_size": args.patch_size,
        "search": search_given(args),
    }
    more = {"tta": args.tta, "compile": args.compile, "embeddings": args.embeddings is not None}
    return settings | {name: value for name, value in more.items() if value}


def opened(args: argparse.Namespace, engine: str, device: str | None) -> Answers:
    """What answers: an exported network without torch, or one that torch computes.

    Args:
        args: Of the command line.
        engine: From `engine_of`.
        device: Of this process; that of `args` where it is alone.

    Raises:
        VitError: It cannot be used as asked.
    """
    settings = settings_of(args) | {"device": device}
    if engine == "torch":
        from vit.inference.predictor import Predictor

        return Predictor(args.model, **settings)
    from vit.exported.load_exported import load_exported

    runner: Answers = load_exported(args.model, engine=engine, explain=args.explain, **settings)
    return runner


def block_of(predictor: Answers) -> int:
    """Images of which the answers depend on each other alone, from the start of a list on."""
    return int(getattr(predictor, "block_size", predictor.batch_size))


def width_of(predictor: Any) -> int:
    """Numbers of an embedding: what the head of a network gets."""
    return int(predictor.model.num_features)


def asked_for(
    args: argparse.Namespace, engine: str, predictor: Answers, images: list[str]
) -> dict[str, Any]:
    """All that decides what is written, for comparison with what an unfinished file was asked.

    Raises:
        RunError: A file of the model cannot be read.
    """
    library = LIBRARIES[engine]
    device = getattr(predictor, "device", None)
    search = {name[7:]: x for name, x in sorted(vars(args).items()) if name.startswith("search.")}
    names = hashlib.sha256(b"\0".join(map(os.fsencode, images))).hexdigest()
    folder = args.sort_into and os.path.abspath(args.sort_into)
    return {
        "vit": __version__,
        "engine": f"{library} {_version(library)}",
        "model": digest_of(model_files(args.model, engine)),
        "list_of_images": names,
        "images": len(images),
        "batch_size": predictor.batch_size,
        "block": block_of(predictor),
        "device": None if device is None else getattr(device, "type", str(device)),
        "precision": str(getattr(predictor, "precision", args.precision)),
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
    """The files that the answers come from."""
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


def digest_of(files: list[Path]) -> str:
    """sha256 of the contents and the names.

    Raises:
        RunError: One cannot be read.
    """
    total = hashlib.sha256()
    path = Path()
    try:
        for path in files:
            with open(path, "rb") as file:
                total.update(os.fsencode(path.name) + b"\0" + b"%d\0" % os.path.getsize(path))
                while piece := file.read(PIECE):
                    total.update(piece)
    except OSError as error:
        raise RunError(f"{printable(path)} cannot be read: {error.strerror}") from None
    return total.hexdigest()


def check_ray(out: str, style: str, *, overwrite: bool) -> None:
    """Refuse, before any work is done, what Ray's workers could not write.

    Raises:
        VitError: It is so, or Ray is not installed.
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
    """Let Ray's workers answer; returns how many images failed.

    Raises:
        VitError: Ray cannot do what was asked.
    """
    from vit.inference.ray_inference import predict_with_ray as predict

    settings = settings_of(args)
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
