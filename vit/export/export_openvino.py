"""OpenVINO export: an ONNX file converted to NAME.xml and NAME.bin.

Precision and metadata are kept. Outputs are compared with onnxruntime's before the files get their
names.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vit.atomic_files import atomic_file
from vit.errors import VitError
from vit.export.classifier_graph import random_inputs
from vit.export.export_onnx import classifier_file
from vit.export.export_request import Exported, ExportJob
from vit.exported import openvino_session as runtime
from vit.exported.onnx_session import Array, OnnxSession

SUFFIX, WEIGHTS = ".xml", ".bin"
TOLERANCES = {"fp32": 2e-2, "fp16": 3e-2, "int8": 8e-2}
"""Largest difference of an output to onnxruntime's by precision, as a share of the largest value
(at least 1). OpenVINO resizes images in float32 where the graph has float64, so some bytes are
rounded the other way, and so are activations in 8 bits."""
REMEDIES = {
    "int8": "; where a CPU has no VNNI, OpenVINO's int8 products overflow: make the file on one "
    "that has it, or as .onnx"
}
"""Advice in the error about a difference, by precision."""
SIZES = ((1, 40, 61), (2, 150, 90), (5, 33, 33))
"""Batch size, height and width of the random images that are compared."""


def write_openvino(job: ExportJob) -> Exported:
    """Write a classifier as OpenVINO's NAME.xml and NAME.bin, converted from its ONNX file."""
    path, between = job.path, job.path.with_suffix(".onnx")
    with classifier_file(replace(job, path=between, overwrite=True)) as (staged, exported):
        preprocessing = job.run.preprocessing
        images = None
        if not preprocessing.in_graph:
            images = [batch[0] for batch in random_inputs(preprocessing)]
        largest = exported.difference + convert(staged, path, images=images)
    files = tuple((file, file.stat().st_size) for file in (path, path.with_suffix(WEIGHTS)))
    return replace(exported, files=files, difference=largest)


def convert(graph: Path | bytes, path: Path, *, images: Sequence[Array] | None = None) -> float:
    """Convert an ONNX file, or its bytes, to NAME.xml and NAME.bin beside it.

    Both engines are compared on `images`, uint8 (height, width, 3), or on noise; returns the
    largest difference, as TOLERANCES measures it.
    """
    model = runtime.read_model(runtime.openvino_core(), graph)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}.") as folder:
        beside = Path(folder) / f"model{SUFFIX}"
        _save(model, beside)
        difference = _difference(graph, beside, images)
        # the weights first: their digest then differs from that in an older .xml
        for suffix in (WEIGHTS, SUFFIX):
            source = beside.with_suffix(suffix)
            with atomic_file(path.with_suffix(suffix), source.stat().st_size) as target:
                shutil.copyfile(source, target)
    return difference


def _save(model: Any, path: Path) -> None:
    """Write both files; the .xml holds the digest of the .bin."""
    import openvino

    weights = path.with_suffix(WEIGHTS)
    openvino.save_model(model, path, compress_to_fp16=False)
    digest = runtime.file_sha256(weights)
    model.set_rt_info(digest, [*runtime.DIGEST_KEY])
    openvino.save_model(model, path, compress_to_fp16=False)
    if runtime.file_sha256(weights) != digest:
        raise VitError("OpenVINO writes the same weights as other bytes; nothing was written")


def _difference(
    graph: Path | bytes, converted: Path, input_images: Sequence[Array] | None
) -> float:
    """Largest difference of both engines; raises VitError if it exceeds TOLERANCES."""
    ours, theirs = runtime.OpenVINOSession(converted), OnnxSession(graph)
    if (ours.inputs, ours.outputs) != (theirs.inputs, theirs.outputs):
        raise VitError("OpenVINO names other inputs or outputs; nothing was written")
    precision = theirs.metadata["precision"]
    (name,), largest = ours.inputs, 0.0
    batches = _noise() if input_images is None else (x[None] for x in input_images)
    for images in batches:
        answers = zip(ours({name: images}), theirs({name: images}), strict=True)
        for output, (found, expected) in zip(ours.outputs, answers, strict=True):
            share = np.inf
            if found.shape == expected.shape:
                share = np.abs(found - expected).max() / max(1.0, np.abs(expected).max())
            if not share <= TOLERANCES[precision]:  # also where it is not a number
                raise VitError(
                    f"OpenVINO differs from onnxruntime: {output} by {share:.2g} on an image of "
                    f"{images.shape[1]} x {images.shape[2]}, and {TOLERANCES[precision]:g} is "
                    f"allowed; nothing was written{REMEDIES.get(precision, '')}"
                )
            largest = max(largest, float(share))
    return largest


def _noise() -> Iterator[Array]:
    """Random images of SIZES."""
    for number, size in enumerate(SIZES):
        random = np.random.default_rng(number)
        yield random.integers(0, 256, (*size, 3), dtype=np.uint8)
