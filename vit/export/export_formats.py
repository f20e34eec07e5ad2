"""Export formats: ONNX, OpenVINO, torch.export and Triton, verified after they are written."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vit.atomic_files import open_atomic
from vit.errors import VitError
from vit.export import export_classifier
from vit.export.export_onnx import (
    Exported,
    PathLike,
    check_output_path,
    export_onnx,
    load_classifier,
)
from vit.export.export_openvino import export_openvino
from vit.export.export_options import Options
from vit.export.export_triton import export_triton
from vit.export.onnx_graph import difference
from vit.export.verification import Verification, verify
from vit.paths import path_argument
from vit.text import Notify, print_to_stderr


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """An exported file and its comparison with the run.

    Args:
        verification: Outputs of the file and the run on images; None for torch.export.
    """

    run: str
    to: str
    precision: str
    exported: Exported
    verification: Verification | None

    @property
    def agrees(self) -> bool:
        """Whether file and run have the same outputs."""
        return self.verification is None or self.verification.agrees

    def lines(self) -> list[str]:
        """Text of the report."""
        largest = f"{self.exported.difference:.1e}"
        lines = [f"same as torch up to {largest} of the largest value, on random inputs"]
        if self.verification is not None:
            lines += [*self.verification.lines(), *self.verification.complaints()]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit export`."""
        files, accuracy = self.exported.files, self.exported.accuracy
        return {
            "run": self.run,
            "to": self.to,
            "precision": self.precision,
            "files": [{"path": str(path), "bytes": size} for path, size in files],
            "difference": self.exported.difference,
            "accuracy": None if accuracy is None else asdict(accuracy),
            "verification": None if self.verification is None else self.verification.to_dict(),
        }


def export_model(
    run: PathLike,
    out: PathLike,
    *,
    to: str | None = None,
    notify: Notify | None = print_to_stderr,
    on_written: Callable[[Exported], None] = lambda _: None,
    **options: Any,
) -> ExportReport:
    """Export a run and compare the file with it: `vit export`.

        report = vit.export_model("runs/photos", "photos.onnx")
        assert report.agrees

    Args:
        run, notify, options: As for `export_onnx`.
        out: The file to write; for triton the folder REPOSITORY/NAME.
        to: onnx, openvino, torch or triton; by the suffix of `out` by default.
        on_written: Called when the files are complete and in place, before they are verified.

    Raises:
        VitError: It cannot be exported, written or compared.
    """
    suffix = Path(path_argument("out", out, "the file to write, such as NAME.onnx")).suffix.lower()
    to = to or next((name for name, (end, _) in FORMATS.items() if end == suffix), "onnx")
    if to not in FORMATS:
        raise VitError(f"to={to!r}: choose one of {', '.join(FORMATS)}")
    exported = FORMATS[to][1](run, out, notify=notify, **options)
    on_written(exported)
    return ExportReport(
        run=os.fspath(run),
        to=to,
        precision=options.get("precision", "fp32"),
        exported=exported,
        verification=None if to == "torch" else verify(exported.files[0][0], run=run),
    )


def export_torch(
    run: PathLike,
    out: PathLike,
    *,
    overwrite: bool = False,
    notify: Notify | None = print_to_stderr,
    **options: Any,
) -> Exported:
    """Write a classifier as a program of torch.export, NAME.pt2, for any number of images.

    The input is bytes (batch, height, width, 3) of the network's own size; resize and crop are not
    part of the program. Its extra files are preprocessing.json, classes.json and, of a multi-label
    model, thresholds.json; of calibrated scores, score_calibration.json; of weights with a known
    licence, license.txt.
    """
    settings, path = Options(**options), Path(out)
    settings.check_unused("a program of torch has no such choice", "tokens", "no_calibration")
    check_output_path(path, overwrite=overwrite, suffix=".pt2")
    loaded = load_classifier(run, notify, "torch", no_calibration=settings.no_calibration)
    part = export_classifier.part_of(loaded, tokens=settings.tokens)
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
    extra_files = {"preprocessing.json": json.dumps(loaded.preprocessing.to_dict())}
    if loaded.thresholds is not None:
        extra_files["thresholds.json"] = json.dumps(loaded.thresholds)
    if loaded.calibration is not None:
        extra_files["score_calibration.json"] = json.dumps(loaded.calibration.to_dict())
    if loaded.license is not None:
        extra_files["license.txt"] = loaded.license
    extra_files["classes.json"] = json.dumps(list(loaded.classes), ensure_ascii=False)

    with open_atomic(path) as file:
        torch.export.save(program, file, extra_files=extra_files)
    return Exported(((path, path.stat().st_size),), largest)


FORMATS: dict[str, tuple[str | None, Callable[..., Exported]]] = {
    "onnx": (".onnx", export_onnx),
    "openvino": (".xml", export_openvino),
    "torch": (".pt2", export_torch),
    "triton": (None, export_triton),
}
"""Name -> suffix of the file, if it has one, and function; the graph is the first file."""
