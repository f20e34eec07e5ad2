"""Export formats: ONNX and OpenVINO, verified after they are written, and torch.export."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vit.atomic_files import open_atomic
from vit.config.inference_config import ExportOptions
from vit.config.settings import split_settings
from vit.errors import ConfigError, VitError
from vit.export import classifier_graph
from vit.export.export_onnx import write_onnx
from vit.export.export_openvino import write_openvino
from vit.export.export_request import (
    Exported,
    ExportJob,
    PathLike,
    check_output_path,
)
from vit.export.onnx_tracing import difference
from vit.export.verification import Verification, verify
from vit.paths import path_argument
from vit.text import Notify, print_to_stderr
from vit.weights.load_model import load_model


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """An exported file and its comparison with the run, which a program of torch.export lacks."""

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
        largest = f"{self.exported.difference:.1e}"
        lines = [f"same as torch up to {largest} of the largest value, on random inputs"]
        if self.verification is not None:
            lines += [*self.verification.lines(), *self.verification.complaints()]
        return lines

    def to_dict(self) -> dict[str, Any]:
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
        out: The file to write.
        to: onnx, openvino or torch; by the suffix of `out` by default.
        on_written: Called when the files are complete and in place, before they are verified.

    Raises:
        VitError: It cannot be exported, written or compared.
    """
    suffix = Path(path_argument("out", out, "the file to write, such as NAME.onnx")).suffix.lower()
    to = to or next((name for name, one in FORMATS.items() if one.suffixes[0] == suffix), "onnx")
    if to not in FORMATS:
        raise VitError(f"to={to!r}: choose one of {', '.join(FORMATS)}")
    exported = export(run, out, to=to, notify=notify, **options)
    on_written(exported)
    return ExportReport(
        run=os.fspath(run),
        to=to,
        precision=options.get("precision", "fp32"),
        exported=exported,
        verification=None if to == "torch" else verify(exported.files[0][0], run=run),
    )


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
        options: The fields of `vit.config.inference_config.ExportOptions`; a captioner takes none.

    Raises:
        ConfigError: The run has a setting that cannot be exported, or an option is impossible.
        RunError: The run cannot be used.
        VitError: A library is missing, the file cannot be written, the graph differs from torch, or
            the file loses more accuracy than `max_drop`.
    """
    return export(run, out, to="onnx", overwrite=overwrite, notify=notify, **options)


def export(
    run: PathLike,
    out: PathLike,
    *,
    to: str,
    overwrite: bool = False,
    notify: Notify | None = print_to_stderr,
    **options: Any,
) -> Exported:
    """Write a run in the format `to`; the other arguments are those of `export_onnx`."""
    settings: ExportOptions = split_settings(options, "an export", ExportOptions)[0]
    path = Path(out)
    graph, *others = FORMATS[to].suffixes
    check_output_path(path, overwrite, graph)
    for suffix in others:
        check_output_path(path.with_suffix(suffix), overwrite, suffix)
    if to == "torch":
        settings.check_unused("a program of torch has no such choice", "tokens", "no_calibration")
    loaded = load_model(run, notify=notify)
    if to == "torch" and loaded.preprocessing.native:
        raise ConfigError("resize=native: a program of torch has one size; export it as .onnx")
    if loaded.tokenizer is not None and to != "onnx":
        raise ConfigError(f"to={to!r}: {run} writes captions, and becomes onnx alone")
    channels = loaded.config.channels
    if channels != loaded.preprocessing.num_channels:
        raise ConfigError(
            f"channels={channels}: weights without a run say nothing of the values of such images; "
            "train a run with them"
        )
    if channels != 3 and loaded.tokenizer is not None:
        raise ConfigError(f"channels={channels}: captioners of RGB images are exported")
    if loaded.preprocessing.channels is not None and settings.precision == "fp16":
        raise ConfigError("precision='fp16' is too coarse for values of instruments; take fp32")
    if loaded.preprocessing.tiles is not None:
        if to != "onnx":
            raise ConfigError(f"to={to!r}: a network of tiles becomes onnx alone")
        why = "a network of tiles is exported in fp32 with its usual outputs"
        settings.check_unused(why, "no_calibration", "opset")
    if settings.no_calibration:
        loaded = loaded.without_calibration()
    silent = notify or (lambda _line: None)
    return FORMATS[to].write(ExportJob(loaded, run, path, settings, silent, overwrite))


def write_torch(job: ExportJob) -> Exported:
    """Write a classifier as a program of torch.export, NAME.pt2, for any number of images.

    The input is bytes (batch, height, width, 3) of the network's own size; resize and crop are not
    part of the program. Its extra files are preprocessing.json, classes.json and, of a multi-label
    model, thresholds.json; of calibrated scores, score_calibration.json; of numbers, answers.json;
    of weights with a known licence, license.txt.
    """
    run = job.run
    part = classifier_graph.part_of(run, tokens=job.options.tokens)
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
    extra_files = {"preprocessing.json": json.dumps(run.preprocessing.to_dict())}
    if run.thresholds is not None:
        extra_files["thresholds.json"] = json.dumps(run.thresholds)
    if run.calibration is not None:
        extra_files["score_calibration.json"] = json.dumps(run.calibration.to_dict())
    if run.answers is not None:
        extra_files["answers.json"] = run.answers.to_json()
    if run.license is not None:
        extra_files["license.txt"] = run.license
    extra_files["classes.json"] = json.dumps(list(run.classes), ensure_ascii=False)

    with open_atomic(job.path) as file:
        torch.export.save(program, file, extra_files=extra_files)
    return Exported(((job.path, job.path.stat().st_size),), largest)


class Format(NamedTuple):
    """A format that runs are exported to."""

    suffixes: tuple[str, ...]
    """Suffixes of its files; the first is that of the graph, and chooses the format."""
    write: Callable[[ExportJob], Exported]


FORMATS = {
    "onnx": Format((".onnx",), write_onnx),
    "openvino": Format((".xml", ".bin"), write_openvino),
    "torch": Format((".pt2",), write_torch),
}
