"""ONNX export of a run, with the same outputs without torch.

A classifier becomes one file, NAME.onnx (classifier_graph.py). A captioner becomes two: the
encoder NAME.onnx and the decoding step NAME.decoder.onnx (captioner_graph.py). Each graph is
written to a temporary file and compared with torch before the file gets its name.

    NAME.onnx        the graph, with weights below 2 GB
    NAME.onnx.data   larger weights, as external data of the graph
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vit.atomic_files import explain_write_errors, rename_file, write_bytes
from vit.errors import ConfigError, RunError
from vit.export import captioner_graph, classifier_graph
from vit.export.export_accuracy import compare
from vit.export.export_request import OPSET, Exported, ExportJob, check_output_path
from vit.export.float16 import convert_to_float16
from vit.export.onnx_tracing import (
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
from vit.text import printable

DATA = ".data"
SMALL_BYTES = 1024
"""Tensors up to this size stay in the graph if the weights are external data."""
TOLERANCES = {"fp32": 1e-4, "fp16": 0.02, "int8": float("inf")}
"""Largest difference to torch on random images; of int8 only the accuracy is checked."""


def write_onnx(job: ExportJob) -> Exported:
    """Write a classifier as one file, a captioner as two."""
    if job.run.tokenizer is not None:
        return _write_captioner(job)
    with classifier_file(job) as (staged, exported):
        return replace(exported, files=publish(staged, job.path))


@contextmanager
def classifier_file(job: ExportJob) -> Iterator[tuple[Path, Exported]]:
    """A checked ONNX file under a temporary name beside `job.path`, and what was measured."""
    run, options, path = job.run, job.options, job.path
    part = classifier_graph.part_of(run, tokens=options.tokens)
    external = sum(part.nbytes for part in run.model.parameters()) > MAX_GRAPH_BYTES
    if external and data_beside(path).exists() and not job.overwrite:
        name = printable(data_beside(path))
        raise RunError(f"{name} exists; choose another name, or add --overwrite")
    samples = validation_samples(job)
    images = calibration_images(job, samples)
    calibrated = {*images.paths}
    samples = tuple(sample for sample in samples if sample.path not in calibrated)
    with staged_file(path, build_classifier(part, job, images), external=external) as staged:
        session = OnnxSession(staged)
        tolerance = TOLERANCES[options.precision]
        difference = classifier_graph.check_images(part, session, run.preprocessing, tolerance)
        accuracy = compare(run, session, samples, job.notify) if samples else None
        if accuracy is not None:
            job.notify(accuracy.line())
            accuracy.check(options.max_drop, str(path))
        yield staged, Exported((), difference, accuracy)


def build_classifier(part: Part, job: ExportJob, images: SampleImages) -> Any:
    """The whole graph in the requested precision, as an onnx.ModelProto."""
    options = job.options
    onnx, opset = libraries(), options.opset or OPSET
    proto = trace_module(part, opset)
    if options.precision == "fp16":
        proto = convert_to_float16(proto, units=job.run.answers is not None)
    classifier_graph.prepend_preprocessing(proto, job.run.preprocessing)
    metadata = classifier_graph.metadata_of(
        job.run, printable(job.source), precision=options.precision, opset=opset
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


def _write_captioner(job: ExportJob) -> Exported:
    job.options.check_unused("a captioner is exported in fp32 with its usual outputs", "precision")
    if job.options.precision != "fp32":
        raise ConfigError(
            f"precision={job.options.precision!r}: a captioner is exported in fp32; leave it out"
        )
    decoder = job.path.with_name(f"{job.path.stem}.decoder{job.path.suffix}")
    check_output_path(decoder, job.overwrite, decoder.suffix)
    parts = captioner_graph.parts_of(job.run)
    metadata = captioner_graph.metadata_of(job.run, printable(job.source))
    contents, difference = [], 0.0
    for part in parts:
        contents.append(to_onnx(part, metadata[part.name]).SerializeToString())
        difference = max(difference, check_equal(part, contents[-1]))
    files = tuple(zip((job.path, decoder), map(len, contents), strict=True))
    for (path, _), content in zip(files, contents, strict=True):
        write_bytes(path, content)
    return Exported(files, difference)


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
    """Move a staged graph and its external data to `path`; returns files and sizes in bytes.

    A crash in between leaves no graph with the weights of another one.
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
