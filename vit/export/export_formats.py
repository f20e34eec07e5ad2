"""Export formats: ONNX, OpenVINO and torch.export."""

import json
from pathlib import Path
from typing import Any

import torch

from vit.errors import ConfigError, VitError, printable
from vit.export import export_classifier
from vit.export.export_onnx import (
    Exported,
    Notify,
    PathLike,
    check_output_path,
    classifier_file,
    export_onnx,
)
from vit.export.export_openvino import convert
from vit.export.export_options import Options
from vit.export.onnx_graph import difference
from vit.weights.load_model import load_model, print_to_stderr
from vit.weights.safetensors_io import atomic_write
from vit.weights.saved_model import LoadedRun


def export_openvino(
    run: PathLike,
    out: PathLike,
    *,
    overwrite: bool = False,
    notify: Notify | None = print_to_stderr,
    **options: Any,
) -> Exported:
    """Write a classifier as OpenVINO's NAME.xml and NAME.bin, by way of the file of ONNX.

    Args:
        run, overwrite, say, options: As for `export_onnx`.
        out: NAME.xml.

    Raises:
        VitError: As `export_onnx`, or OpenVINO is not installed.
    """
    asked, path = Options(**options), Path(out)
    weights = path.with_suffix(".bin")
    check_output_path(path, overwrite=overwrite, suffix=".xml")
    check_output_path(weights, overwrite=overwrite, suffix=".bin")
    loaded = _classifier(run, notify, "openvino")
    between = path.with_suffix(".onnx")
    with classifier_file(loaded, run, between, asked, notify=notify) as (
        checked,
        difference,
        accuracy,
    ):
        convert(checked, path)
    files = tuple((file, file.stat().st_size) for file in (path, weights))
    return Exported(files, difference, accuracy)


def export_torch(
    run: PathLike,
    out: PathLike,
    *,
    overwrite: bool = False,
    notify: Notify | None = print_to_stderr,
    **options: Any,
) -> Exported:
    """Write a classifier as a program of torch.export, NAME.pt2, for any number of images.

    Its input is bytes (batch, height, width, 3) of the network's own size:
    `Preprocessing.resize_and_crop` stays outside, and what it needs is in the file's extra files
    preprocessing.json and classes.json; multi-label models also have thresholds.json.

    Args:
        run, overwrite, say: As for `export_onnx`.
        out: NAME.pt2.
        options: Of those of `export_onnx`, tokens.

    Raises:
        VitError: It cannot be exported or written.
    """
    asked, path = Options(**options), Path(out)
    asked.check_unused("a program of torch has no such choice", "tokens")
    check_output_path(path, overwrite=overwrite, suffix=".pt2")
    loaded = _classifier(run, notify, "torch")
    part = export_classifier.part_of(loaded, tokens=asked.tokens)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        program = torch.export.export(
            part.module, part.examples[0], dynamic_shapes=({0: batch},), strict=False
        )
        computed = program.module()
        largest = max(
            difference(part, part.module(*x), [y.numpy() for y in computed(*x)])
            for x in part.examples
        )
    said = {"preprocessing.json": json.dumps(loaded.preprocessing.to_dict())}
    if loaded.thresholds is not None:
        said["thresholds.json"] = json.dumps(loaded.thresholds)
    said["classes.json"] = json.dumps(list(loaded.classes), ensure_ascii=False)

    def save(beside: Path) -> None:
        with open(beside, "wb") as file:
            torch.export.save(program, file, extra_files=said)

    atomic_write(path, save)
    return Exported(((path, path.stat().st_size),), largest)


def _classifier(run: PathLike, notify: Notify | None, to: str) -> LoadedRun:
    loaded = load_model(run, notify=notify)
    if loaded.tokenizer is not None:
        raise ConfigError(f"to={to!r}: {printable(run)} writes captions, and becomes onnx alone")
    return loaded


TARGETS = {"onnx": export_onnx, "openvino": export_openvino, "torch": export_torch}


def export(run: PathLike, out: PathLike, *, to: str = "onnx", **options: Any) -> Exported:
    """Write `run` as one of TARGETS; see their functions.

    Raises:
        VitError: It cannot be done; the message says why.
    """
    if to not in TARGETS:
        raise VitError(f"to={to!r}: choose one of {', '.join(TARGETS)}")
    return TARGETS[to](run, out, **options)
