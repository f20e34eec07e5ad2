"""Options of an export, the job that all formats write, and the files that it leaves."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from vit.config.config_section import Section
from vit.errors import RunError
from vit.export.export_accuracy import Accuracy
from vit.text import Notify, printable
from vit.weights.saved_model import LoadedRun

PathLike = str | os.PathLike[str]

PRECISIONS = ("fp32", "fp16", "int8")
OPSETS = (18, 19, 20, 21, 22, 23)
OPSET = 20
"""Of classifiers: the first one with Gelu. onnxruntime reads it since 1.17, OpenVINO since 2024;
later ones add nothing that these networks need."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Section):
    """Options of an export.

    Args:
        max_drop: Largest loss of top-1 (of mAP if multi-label) there; 0.01 by default.
    """

    precision: str = "fp32"
    tokens: bool = False
    opset: int | None = None
    calibration: str | None = None
    samples: int | None = None
    dynamic: bool = False
    static: bool = False
    validation: str | None = None
    max_drop: float | None = None
    no_calibration: bool = False

    def __post_init__(self) -> None:
        int8 = self.precision == "int8"
        calibrated = int8 and not self.dynamic
        unread = f"precision={self.precision} does not read it; choose int8"
        alone = "only int8 without --dynamic is calibrated; leave it out"
        ranges = "its ranges are those of calibration images; give --calibration DATA"
        rules = (
            (
                "precision",
                self.precision not in PRECISIONS,
                f"choose one of {', '.join(PRECISIONS)}",
            ),
            (
                "opset",
                self.opset not in (None, *OPSETS),
                f"choose one of {OPSETS[0]} to {OPSETS[-1]}",
            ),
            ("samples", self.samples is not None and self.samples < 1, "must be at least 1"),
            (
                "max_drop",
                self.max_drop is not None and not 0 <= self.max_drop <= 1,
                "a share, from 0 to 1",
            ),
            ("dynamic", self.dynamic and not int8, unread),
            ("static", self.static and not int8, unread),
            ("static", self.static and (self.dynamic or self.calibration is None), ranges),
            (
                "opset",
                self.static and (self.opset or OPSET) > OPSET,
                "onnxruntime cannot open static int8 of it on CPUs without VNNI; choose "
                f"{OPSETS[0]} to {OPSET}",
            ),
            (
                "precision",
                calibrated and self.calibration is None,
                "it is calibrated with images: give --calibration DATA, such as the data of the "
                "training, or --dynamic",
            ),
            ("calibration", self.calibration is not None and not calibrated, alone),
            ("samples", self.samples is not None and not calibrated, alone),
            (
                "max_drop",
                self.max_drop is not None and self.measured_on is None,
                "nothing is measured without validation data; give --validation DATA",
            ),
        )
        for name, refused, why in rules:
            if refused:
                self.refuse(name, why)

    @property
    def measured_on(self) -> str | None:
        """Data for the comparison of the accuracy."""
        return self.validation or self.calibration

    def check_unused(self, why: str, *read: str) -> None:
        """Raise ConfigError if an option that is not in `read` differs from its default."""
        for field in fields(self):
            if field.name not in read and getattr(self, field.name) != field.default:
                self.refuse(field.name, f"{why}; leave it out")


@dataclass(frozen=True)
class ExportJob:
    """A run that is loaded, and what a format makes of it.

    Args:
        source: The run folder or source of weights, as the metadata name it.
        path: The file to write, which `check_output_path` has allowed.
    """

    run: LoadedRun
    source: PathLike
    path: Path
    options: ExportOptions
    notify: Notify
    overwrite: bool


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


Writer = Callable[[ExportJob], Exported]
"""Writes the files of one format."""
OutputCheck = Callable[[Path, ExportOptions, bool], None]
"""Checks, before any work is done, that a path can be written, and replaced if the last is True."""


def check_output_path(path: Path, _: ExportOptions, overwrite: bool, *, suffix: str) -> None:
    """The OutputCheck of an ordinary file with `suffix`."""
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
