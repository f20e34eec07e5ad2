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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.atomic_files import explain_write_errors, rename_file, write_bytes
from vit.errors import ConfigError, RunError
from vit.export import export_captioner, export_classifier
from vit.export.export_accuracy import Accuracy, compare
from vit.export.export_options import MAX_DROP, OPSET, Options
from vit.export.float16 import convert_to_float16
from vit.export.onnx_graph import (
    MAX_GRAPH_BYTES,
    Part,
    check_equal,
    check_size,
    libraries,
    to_onnx,
    trace_module,
)
from vit.export.quantization import quantize
from vit.export.sample_images import SampleImages, calibration_images, validation_samples
from vit.exported.onnx_session import OnnxSession
from vit.text import Notify, print_to_stderr, printable
from vit.weights.load_model import load_model
from vit.weights.saved_model import LoadedRun

PathLike = str | os.PathLike[str]

SUFFIX = ".onnx"
DATA = ".data"
DECODER = ".decoder"
SMALL_BYTES = 1024
"""Tensors up to this size stay in the graph if the weights are external data."""
TOLERANCES = {"fp32": 1e-4, "fp16": 0.02, "int8": float("inf")}
"""Largest difference to torch on random images; of int8 only the accuracy is checked."""


@dataclass(frozen=True)
class Exported:
    """Files that were written.

    Args:
        files: Paths and sizes in bytes.
        difference: Largest difference to torch on random inputs, as a share of the largest value.
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
        run: A run folder, or of a classifier any other source of weights with a head.
        out: NAME.onnx; the decoder of a captioner becomes NAME.decoder.onnx beside it.
        overwrite: Replace files that exist.
        notify: Called with notes on weights and data, if not None.
        options: The fields of `vit.export.export_options.Options`; a captioner takes none.

    Raises:
        ConfigError: The run has a setting that cannot be exported, or an option is impossible.
        RunError: The run or the output folder cannot be used.
        VitError: A library is missing, the graph differs from torch, or the file loses more
            accuracy than `max_drop`.
    """
    settings, path = Options(**options), Path(out)
    check_output_path(path, overwrite=overwrite)
    loaded = load_model(run, notify=notify)
    if loaded.tokenizer is None:
        loaded = loaded.without_calibration() if settings.no_calibration else loaded
        with classifier_file(loaded, run, path, settings, notify=notify, overwrite=overwrite) as (
            staged,
            difference,
            accuracy,
        ):
            return Exported(publish(staged, path), difference, accuracy)
    settings.check_unused("a captioner is exported in fp32 with its usual outputs", "precision")
    if settings.precision != "fp32":
        raise ConfigError(
            f"precision={settings.precision!r}: a captioner is exported in fp32; leave it out"
        )
    return _export_captioner(loaded, printable(run), path, overwrite=overwrite)


def load_classifier(
    run: PathLike, notify: Notify | None, to: str, *, no_calibration: bool
) -> LoadedRun:
    """Load a run for a format that captioners cannot be written to."""
    loaded = load_model(run, notify=notify)
    if loaded.tokenizer is not None:
        raise ConfigError(f"to={to!r}: {printable(run)} writes captions, and becomes onnx alone")
    return loaded.without_calibration() if no_calibration else loaded


@contextmanager
def classifier_file(
    run: LoadedRun,
    source: PathLike,
    path: Path,
    options: Options,
    *,
    notify: Notify | None,
    overwrite: bool = True,
) -> Iterator[tuple[Path, float, Accuracy | None]]:
    """A checked ONNX file under a temporary name, its difference to torch, and its accuracy.

    Args:
        notify: Called with notes on the data, if not None.
        overwrite: Whether external data beside `path` may be replaced.
    """
    notify = notify or (lambda _line: None)
    part = export_classifier.part_of(run, tokens=options.tokens)
    size = sum(parameter.nbytes for parameter in run.model.parameters())
    external = options.external_data or size > MAX_GRAPH_BYTES
    if external and data_beside(path).exists() and not overwrite:
        name = printable(data_beside(path))
        raise RunError(f"{name} exists; choose another name, or add --overwrite")
    samples = validation_samples(source, run, options.measured_on, notify)
    images = calibration_images(
        options,
        run.classes,
        samples,
        run.preprocessing.intensity_range,
        task=run.task_name,
        source=source,
        notify=notify,
    )
    calibrated = {*images.paths}
    samples = tuple(sample for sample in samples if sample.path not in calibrated)
    proto = build_classifier(part, run, source, options, images)
    with staged_file(path, proto, external=external) as staged:
        session = OnnxSession(staged)
        tolerance = TOLERANCES[options.precision]
        difference = export_classifier.check_images(part, session, run.preprocessing, tolerance)
        accuracy = compare(run, session, samples, notify) if samples else None
        if accuracy is not None:
            notify(accuracy.line())
            drop = MAX_DROP if options.max_drop is None else options.max_drop
            accuracy.check(drop, str(path))
        yield staged, difference, accuracy


def build_classifier(
    part: Part, run: LoadedRun, source: PathLike, options: Options, images: SampleImages
) -> Any:
    """The whole graph in the requested precision, as an onnx.ModelProto."""
    onnx, opset = libraries(), options.opset or OPSET
    proto = trace_module(part, opset)
    if options.precision == "fp16":
        proto = convert_to_float16(proto)
    export_classifier.prepend_preprocessing(proto, run.preprocessing)
    metadata = export_classifier.metadata_of(
        run, printable(source), precision=options.precision, opset=opset
    )
    if options.precision == "int8":
        check_size(part)
        onnx.checker.check_model(proto, full_check=True)
        content = quantize(proto.SerializeToString(), images, static=options.static)
        proto = onnx.load_from_string(content)
        metadata["opset"] = str(next(x.version for x in proto.opset_import if not x.domain))
        calibration: dict[str, Any] = {"dynamic": options.dynamic, "static": options.static}
        if not options.dynamic:
            calibration |= {"data": printable(options.calibration), "samples": len(images)}
        metadata["calibration"] = json.dumps(calibration, ensure_ascii=False)
    onnx.helper.set_model_props(proto, dict(sorted(metadata.items())))
    return proto


def _export_captioner(run: LoadedRun, source: str, path: Path, *, overwrite: bool) -> Exported:
    paths = {"encoder": path, "decoder": path.with_name(f"{path.stem}{DECODER}{path.suffix}")}
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
        write_bytes(paths[name], content)
    sizes = tuple((paths[name], len(content)) for name, content in contents.items())
    return Exported(sizes, difference)


def data_beside(path: Path) -> Path:
    """The external data of the graph `path`, if it has any."""
    return path.with_name(path.name + DATA)


@contextmanager
def staged_file(path: Path, proto: Any, *, external: bool) -> Iterator[Path]:
    """Write `proto` into a temporary folder beside `path`, under the same name, and check it."""
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
                size_threshold=SMALL_BYTES,
            )
        onnx.checker.check_model(folder / path.name, full_check=True)
        yield folder / path.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(staged: Path, path: Path) -> tuple[tuple[Path, int], ...]:
    """Move a staged graph and its external data to `path`.

    A crash in between leaves no graph with the weights of another one.

    Returns:
        The files and their sizes in bytes.
    """
    old, new = data_beside(path), data_beside(staged)
    written = [(path, staged.stat().st_size)]
    if old.exists() or new.exists():
        with explain_write_errors(path):
            path.unlink(missing_ok=True)
    if new.exists():
        written.append((old, new.stat().st_size))
        rename_file(new, old)
    elif old.exists():
        with explain_write_errors(old):
            old.unlink()
    rename_file(staged, path)
    return tuple(written)


def check_output_path(path: Path, *, overwrite: bool, suffix: str = SUFFIX) -> None:
    """Check, before any work is done, that `path` can be written."""
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
