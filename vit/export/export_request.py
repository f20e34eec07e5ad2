"""The job of an export, which all formats write, and the files that it leaves."""

import os
from dataclasses import dataclass
from pathlib import Path

from vit.config.inference_config import ExportOptions
from vit.errors import RunError
from vit.export.export_accuracy import Accuracy
from vit.text import Notify, printable
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
    name, folder = printable(path), printable(path.parent)
    if path.suffix != suffix:
        raise RunError(f"{name}: name it {suffix}, such as {path.stem or 'model'}{suffix}")
    if path.exists() and not path.is_file():
        raise RunError(f"{name} is no ordinary file; give another name")
    if path.exists() and not overwrite:
        raise RunError(f"{name} exists; choose another name, or add --overwrite")
    if not path.parent.is_dir():
        raise RunError(f"{name}: there is no folder {folder}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise RunError(f"{name}: the folder {folder} cannot be written")
