"""ONNX export of a run, with the same outputs without torch.

A classifier becomes one file, NAME.onnx (export_classifier.py). A captioner becomes two: the
encoder NAME.onnx and the decoding step NAME.decoder.onnx (export_captioner.py). Each graph is
written to a temporary file and compared with torch before the file gets its name.

    NAME.onnx        the graph, with weights below 2 GB
    NAME.onnx.data   larger weights, as external data of the graph
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.errors import ConfigError, RunError, printable
from vit.export import export_captioner, export_classifier
from vit.export.export_accuracy import Accuracy, compare
from vit.export.export_options import MAX_DROP, OPSET, Options
from vit.export.float16 import convert_to_float16
from vit.export.onnx_graph import (
    MOST_BYTES,
    check_equal,
    check_size,
    libraries,
    to_onnx,
    trace_module,
    write,
)
from vit.export.quantization import quantize
from vit.export.sample_images import SampleImages, calibration_images, validation_samples
from vit.exported.onnx_session import OnnxSession
from vit.weights.load_model import load_model, print_to_stderr
from vit.weights.safetensors_io import atomic_write, explain_write_errors
from vit.weights.saved_model import LoadedRun

DATA = ".data"
SMALL = 1024  # bytes of tensors that stay in the graph


def data_beside(path: Path) -> Path:
    """Where the weights of the graph `path` are, if they are not in it."""
    return path.with_name(path.name + DATA)


@contextmanager
def staged_file(path: Path, proto: Any, *, external: bool) -> Iterator[Path]:
    """`proto` in a folder of its own beside `path`, under the same name, checked by onnx's checker.

    Args:
        path: Where it is to be.
        proto: An onnx.ModelProto.
        external: Whether its weights are a file of their own.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    onnx, size = libraries(), sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    with explain_write_errors(path, size):
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with explain_write_errors(path, size):
            onnx.save_model(
                proto,
                folder / path.name,
                save_as_external_data=external,
                location=path.name + DATA,
                size_threshold=SMALL,
            )
        onnx.checker.check_model(folder / path.name, full_check=True)
        yield folder / path.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(checked: Path, path: Path) -> tuple[tuple[Path, int], ...]:
    """Give a staged graph its name.

    A crash in between leaves no graph with the weights of another one.

    Returns:
        What was written, and its bytes.

    Raises:
        RunError: The disk is full, or the folder cannot be written.
    """
    old, new = data_beside(path), data_beside(checked)
    written = []
    if old.exists() or new.exists():
        with explain_write_errors(path):
            path.unlink(missing_ok=True)
    if new.exists():
        written.append((old, new.stat().st_size))
        atomic_write(old, new.replace)
    elif old.exists():
        with explain_write_errors(old):
            old.unlink()
    written.insert(0, (path, checked.stat().st_size))
    atomic_write(path, checked.replace)
    return tuple(written)


PathLike = str | os.PathLike[str]
Notify = Callable[[str], object]

SUFFIX = ".onnx"
DECODER = ".decoder"
TOLERANCES = {"fp32": 1e-4, "fp16": 0.02, "int8": float("inf")}
"""Largest difference to torch on noise; int8 is judged by what it says of images."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        files: Their paths and their sizes in bytes.
        difference: Largest difference to torch on noise, as a share of the largest value.
        accuracy: Of the file and of the run, where there were images for that.
    """

    files: tuple[tuple[Path, int], ...]
    difference: float
    accuracy: Accuracy | None = None


def export_onnx(
    run: PathLike,
    out: PathLike,
    *,
    overwrite: bool = False,
    notify: Notify | None = print_to_stderr,
    **options: Any,
) -> Exported:
    """Write a run as ONNX: a classifier as one file, a captioner as two.

    Args:
        run: Its folder, or of a classifier any other source of weights with a head.
        out: NAME.onnx; the decoder of a captioner becomes NAME.decoder.onnx beside it.
        overwrite: Replace files that exist.
        say: Told what was assumed of weights and found about data; None to hear nothing.
        options: The fields of `vit.export.export_options.Options`; a captioner takes none.

    Raises:
        ConfigError: The run has what cannot be exported, or an option is impossible.
        RunError: The run or the place to write cannot be used.
        VitError: A library is missing, a graph does not compute what torch does, or the file
            loses more than `max_drop`.
    """
    asked, path = Options(**options), Path(out)
    check_output_path(path, overwrite=overwrite)
    loaded = load_model(run, notify=notify)
    if loaded.tokenizer is None:
        with classifier_file(
            loaded, run, path, asked, notify=notify, overwrite=overwrite
        ) as built_graph:
            checked, difference, accuracy = built_graph
            return Exported(publish(checked, path), difference, accuracy)
    asked.check_unused("a captioner is exported in fp32 with its usual outputs", "precision")
    if asked.precision != "fp32":
        raise ConfigError(
            f"precision={asked.precision!r}: a captioner is exported in fp32; leave it out"
        )
    return _captioner(loaded, printable(run), path, overwrite=overwrite)


@contextmanager
def classifier_file(
    run: LoadedRun,
    source: PathLike,
    path: Path,
    asked: Options,
    *,
    notify: Notify | None,
    overwrite: bool = True,
) -> Iterator[tuple[Path, float, Accuracy | None]]:
    """A checked file that is still without its name, its difference to torch, and its accuracy.

    Args:
        run: The network.
        source: Where it comes from.
        path: What the file is to be called.
        asked: How it is made.
        say: Told notes on the data.
        overwrite: Whether weights that lie beside `path` may be replaced.

    Raises:
        VitError: As `export_onnx`.
    """
    hear = notify or (lambda _line: None)
    part = export_classifier.part_of(run, tokens=asked.tokens)
    external = asked.external_data or sum(x.nbytes for x in run.model.parameters()) > MOST_BYTES
    if external and data_beside(path).exists() and not overwrite:
        name = printable(data_beside(path))
        raise RunError(f"{name} exists; choose another name, or add --overwrite")
    samples = validation_samples(
        source, asked.measured_on, run.classes, hear, thresholds=run.thresholds
    )
    images = calibration_images(asked, run.classes, samples)
    proto = built_graph(part, run, source, asked, images)
    with staged_file(path, proto, external=external) as checked:
        session = OnnxSession(checked)
        tolerance = TOLERANCES[asked.precision]
        difference = export_classifier.check_images(part, session, run.preprocessing, tolerance)
        accuracy = compare(run, session, samples) if samples else None
        if accuracy is not None:
            hear(accuracy.line())
            drop = MAX_DROP if asked.max_drop is None else asked.max_drop
            accuracy.check(drop, str(path))
        yield checked, difference, accuracy


def built_graph(
    part: Any, run: LoadedRun, source: PathLike, asked: Options, images: SampleImages
) -> Any:
    """The whole graph in the precision that was asked for, as an onnx.ModelProto."""
    opset = asked.opset or OPSET
    proto = trace_module(part, opset)
    if asked.precision == "fp16":
        proto = convert_to_float16(proto)
    export_classifier.with_pixels(proto, run.preprocessing)
    metadata = export_classifier.metadata_of(
        run, printable(source), precision=asked.precision, opset=opset
    )
    onnx = libraries()
    if asked.precision == "int8":
        check_size(part)
        onnx.checker.check_model(proto, full_check=True)
        content = quantize(proto.SerializeToString(), images, dynamic=asked.dynamic)
        proto = onnx.load_from_string(content)
        metadata["opset"] = str(next(x.version for x in proto.opset_import if not x.domain))
        metadata["calibration"] = json.dumps(
            {"dynamic": True}
            if asked.dynamic
            else {"dynamic": False, "data": printable(asked.calibration), "samples": len(images)},
            ensure_ascii=False,
        )
    onnx.helper.set_model_props(proto, dict(sorted(metadata.items())))
    return proto


def _captioner(run: LoadedRun, source: str, path: Path, *, overwrite: bool) -> Exported:
    paths = {"encoder": path, "decoder": decoder_beside(path)}
    check_output_path(paths["decoder"], overwrite=overwrite)
    parts, metadata = export_captioner.parts_of(run), export_captioner.metadata_of(run, source)
    for part in parts:
        check_size(part)
    contents, difference = {}, 0.0
    for part in parts:
        content = to_onnx(part, metadata[part.name]).SerializeToString()
        difference = max(difference, check_equal(part, content))
        contents[part.name] = content
    for name, content in contents.items():
        write(paths[name], content)
    sizes = tuple((paths[name], len(content)) for name, content in contents.items())
    return Exported(sizes, difference)


def decoder_beside(path: Path) -> Path:
    """Where the decoder of the encoder `path` is."""
    return path.with_name(f"{path.stem}{DECODER}{path.suffix}")


def check_output_path(path: Path, *, overwrite: bool, suffix: str = SUFFIX) -> None:
    """Refuse, before any work is done, a file that could not be written at the end.

    Raises:
        RunError: It has another suffix, exists and `overwrite` is off, or its folder is missing.
    """
    name = printable(path)
    if path.suffix != suffix:
        raise RunError(
            f"{name}: name it {suffix}, such as {printable(path.stem or 'model')}{suffix}"
        )
    if path.exists() and not path.is_file():
        raise RunError(f"{name} is no ordinary file; give another name")
    if path.exists() and not overwrite:
        raise RunError(f"{name} exists; choose another name, or add --overwrite")
    if not path.parent.is_dir():
        raise RunError(f"{name}: there is no folder {printable(path.parent)}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise RunError(f"{name}: the folder {printable(path.parent)} cannot be written")
