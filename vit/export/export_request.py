"""The job of an export, which all formats write, and the files that it leaves."""

import os
from dataclasses import dataclass
from pathlib import Path

from vit.config.inference_config import ExportOptions
from vit.errors import RunError
from vit.export.export_accuracy import Accuracy
from vit.output.output_file import check_output
from vit.text import Notify
from vit.weights.saved_model import LoadedRun

PathLike = str | os.PathLike[str]

OPSET = 20
"""Of classifiers: the first one with Gelu. onnxruntime reads it since 1.17, OpenVINO since 2024;
later ones add nothing that these networks need."""


@dataclass(frozen=True)
class ExportJob:
    """A run that is loaded, and what a format makes of it in the file `path`."""

    run: LoadedRun
    source: PathLike
    path: Path
    options: ExportOptions
    notify: Notify
    overwrite: bool


@dataclass(frozen=True)
class Exported:
    """Files that were written, with their sizes in bytes; `difference` is the largest deviation
    from torch on random inputs, as a share of the largest value."""

    files: tuple[tuple[Path, int], ...]
    difference: float
    accuracy: Accuracy | None = None


def check_output_path(path: Path, overwrite: bool, suffix: str) -> None:
    """Check, before any work is done, that a file with `suffix` can be written."""
    if path.suffix != suffix:
        raise RunError(f"{path}: name it {suffix}, such as {path.stem or 'model'}{suffix}")
    check_output(os.fspath(path), overwrite=overwrite)
