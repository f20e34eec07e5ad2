"""OpenVINO export: an ONNX file converted to NAME.xml and NAME.bin.

The graph keeps its precision and metadata, and its outputs are compared with onnxruntime's before
the files get their names.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.errors import RunError, VitError, WeightsError, printable
from vit.exported import openvino_session as runtime
from vit.exported.onnx_session import Array, OnnxSession
from vit.weights.safetensors_io import atomic_write

SUFFIX, WEIGHTS = ".xml", ".bin"
TOLERANCES = {"fp32": 2e-2, "fp16": 3e-2, "int8": 8e-2}
"""Largest difference to onnxruntime by precision, of probabilities; as a share of the largest
value where that is more than 1. OpenVINO fits images in float32 where the graph says float64, and
rounds some bytes to the other side; so it is with activations in 8 bits."""
REMEDIES = {
    "int8": "; where a CPU has no VNNI, OpenVINO's int8 products overflow: make the file on one "
    "that has it, or as .onnx"
}
"""What may be done about a difference, by precision."""
SIZES = ((1, 40, 61), (2, 150, 90), (5, 33, 33))
"""Numbers, heights and widths of images of noise that are compared."""


def convert(
    graph: str | os.PathLike[str] | bytes,
    out: str | os.PathLike[str],
    *,
    images: Sequence[Array] | None = None,
) -> float:
    """Write the ONNX file `graph` as `out`, NAME.xml, and NAME.bin beside it.

    Args:
        graph: The file, or its bytes; its metadata say its precision.
        out: NAME.xml; files of these names are replaced.
        images: That both are compared on, uint8 (height, width, 3); noise when left out.

    Returns:
        The largest difference to onnxruntime, as TOLERANCES counts it.

    Raises:
        RunError: `out` has another suffix, or cannot be written.
        WeightsError: `graph` is no usable ONNX file.
        VitError: OpenVINO is not installed, or computes something else.
    """
    path = Path(out)
    if path.suffix != SUFFIX:
        raise RunError(f"{printable(path)}: name it {SUFFIX}, such as model{SUFFIX}")
    core = runtime.openvino_core()
    model = runtime.read_model(core, graph)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}.") as folder:
        beside = Path(folder) / f"model{SUFFIX}"
        _save(model, beside)
        difference = _difference(graph, beside, images)
        # the weights first: an older .xml then says that they are not its own
        for suffix in (WEIGHTS, SUFFIX):
            built_graph = beside.with_suffix(suffix)
            copied = partial(shutil.copyfile, built_graph)
            atomic_write(path.with_suffix(suffix), copied, built_graph.stat().st_size)
    return difference


def _save(model: Any, path: Path) -> None:
    """Write both files; the first says of which bytes the second one is."""
    import openvino

    weights = path.with_suffix(WEIGHTS)
    openvino.save_model(model, path, compress_to_fp16=False)
    found = runtime.file_sha256(weights)
    model.set_rt_info(found, [*runtime.DIGEST_KEY])
    openvino.save_model(model, path, compress_to_fp16=False)
    if runtime.file_sha256(weights) != found:
        raise VitError("OpenVINO writes the same weights as other bytes; nothing was written")


def _difference(
    graph: str | os.PathLike[str] | bytes, built_graph: Path, input_images: Sequence[Array] | None
) -> float:
    """Largest difference of both engines.

    Raises:
        VitError: It is more than TOLERANCES allow, or a name or shape differs.
    """
    ours, theirs = runtime.OpenVINOSession(built_graph), OnnxSession(graph)
    if (ours.inputs, ours.outputs) != (theirs.inputs, theirs.outputs):
        raise VitError("OpenVINO names other inputs or outputs; nothing was written")
    precision = theirs.metadata.get("precision", "fp32")
    if precision not in TOLERANCES:
        raise WeightsError(
            f"precision={printable(precision)}: choose one of {', '.join(TOLERANCES)}"
        )
    (name,), largest = ours.inputs, 0.0
    batches = (
        _noise(ours.signature[name][1]) if input_images is None else (x[None] for x in input_images)
    )
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


def _noise(axes: Sequence[int | None]) -> Iterator[Array]:
    """Images of SIZES, where the graph takes any."""
    for number, size in enumerate(SIZES):
        shape = [own or wanted for own, wanted in zip(axes, (*size, 3), strict=True)]
        random = np.random.default_rng(number)
        yield random.integers(0, 256, shape, dtype=np.uint8)
