"""Triton export: a classifier as one model of a model repository of NVIDIA's Triton server.

    REPOSITORY/NAME/config.pbtxt    tensors, batching, warm-up
    REPOSITORY/NAME/labels.txt      a class a line, for Triton's extension `classification`
    REPOSITORY/NAME/1/model.onnx    the file of export_onnx, version 1

Source: model_config.proto of triton-inference-server/common, and Triton's user guide on model
repositories and model configuration.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

from vit.atomic_files import explain_write_errors, write_bytes
from vit.config.inference_config import ExportOptions
from vit.errors import ConfigError, RunError
from vit.export.export_onnx import classifier_file, publish
from vit.export.export_options import Exported, ExportJob
from vit.exported.onnx_classifier import OUTPUT
from vit.exported.onnx_session import OnnxSession
from vit.text import printable

CONFIG, LABELS, GRAPH, VERSION = "config.pbtxt", "labels.txt", "model.onnx", "1"
MAX_BATCH = 32
"""Most images that Triton puts into one batch; only images of one size share a batch."""
TYPES = {"tensor(uint8)": "TYPE_UINT8", "tensor(float)": "TYPE_FP32"}
"""Types of onnxruntime -> DataType of model_config.proto."""


def write_triton(job: ExportJob) -> Exported:
    """Write a classifier as a model of a Triton model repository, with its ONNX file."""
    folder, run = job.path, job.run
    graph, created = folder / VERSION / GRAPH, _first_missing(folder)
    labels = "".join(f"{printable(name)}\n" for name in run.classes)
    try:
        with explain_write_errors(folder):
            graph.parent.mkdir(parents=True, exist_ok=True)
        with classifier_file(replace(job, path=graph, overwrite=True)) as (staged, exported):
            config = model_config(folder.name, OnnxSession(staged), run.preprocessing.image_size)
            files = publish(staged, graph)
        for name, text in ((LABELS, labels), (CONFIG, config)):
            content = text.encode()
            write_bytes(folder / name, content)
            files += ((folder / name, len(content)),)
    except BaseException:
        if created is not None:
            shutil.rmtree(created, ignore_errors=True)
        raise
    return replace(exported, files=files)


def model_config(name: str, session: OnnxSession, image_size: tuple[int, int]) -> str:
    """The text of config.pbtxt."""
    (images,) = session.inputs
    element, _ = session.signature[images]
    size = f"{image_size[0]}, {image_size[1]}, 3"
    warmup = f"data_type: {TYPES[element]} dims: [ {size} ] zero_data: true"
    parts = [
        f"name: {json.dumps(name)}",
        'backend: "onnxruntime"',
        f"max_batch_size: {MAX_BATCH}",
        f"input {{ {_tensor(session, images)} }}",
        *(f"output {{ {_tensor(session, output)} }}" for output in session.outputs),
        "dynamic_batching { }",
        f'model_warmup {{ name: "blank image" batch_size: 1 inputs {{ key: "{images}" '
        f"value {{ {warmup} }} }} }}",
    ]
    return "".join(f"{part}\n" for part in parts)


def _tensor(session: OnnxSession, name: str) -> str:
    """Fields of an input or output; its axes follow that of the batch."""
    element, (_, *axes) = session.signature[name]
    dims = ", ".join(str(axis if isinstance(axis, int) else -1) for axis in axes)
    fields = [f'name: "{name}"', f"data_type: {TYPES[element]}", f"dims: [ {dims or 1} ]"]
    if not axes:  # Triton has no tensors without axes
        fields.append("reshape { shape: [ ] }")
    if name == OUTPUT:
        fields.append(f'label_filename: "{LABELS}"')
    return " ".join(fields)


def check_repository_folder(folder: Path, _: ExportOptions, overwrite: bool) -> None:
    """Check, before any work is done, that `folder` can be a model of a repository."""
    shown = printable(folder)
    suffix = folder.suffix.lower()
    if suffix in (".onnx", ".xml", ".pt2") or not re.fullmatch(r"[\w.-]*\w", folder.name, re.ASCII):
        raise ConfigError(
            f"{shown}: give the folder REPOSITORY/NAME, such as triton/photos; NAME, of letters, "
            "digits and . _ -, is the name of the model"
        )
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{shown} is no folder; give another name")
    if (folder / CONFIG).exists():
        if not overwrite:
            raise RunError(f"{shown} exists; choose another name, or add --overwrite")
    elif folder.is_dir() and any(folder.iterdir()):
        raise RunError(f"{shown} has other files, and no {CONFIG}; give another name")


def _first_missing(folder: Path) -> Path | None:
    """The outermost of `folder` and its parents that does not exist."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    return missing[-1] if missing else None
