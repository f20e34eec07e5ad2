"""Loads a network that `vit export` wrote: X.onnx with onnxruntime, X.xml with OpenVINO."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit.errors import ConfigError
from vit.exported.onnx_metadata import PathLike, read_metadata
from vit.text import printable

if TYPE_CHECKING:
    from vit.exported.onnx_captioner import ExportedCaptioner
    from vit.exported.onnx_classifier import ExportedClassifier

EXPORTED = {".onnx": "onnx", ".xml": "openvino"}
"""File suffix -> default engine."""


def exported_engine(model: object) -> str | None:
    """The default engine of `model` if it names a file of `vit export`, by its suffix."""
    if not isinstance(model, str | os.PathLike):
        return None
    name = os.fspath(model).lower()
    return next((engine for suffix, engine in EXPORTED.items() if name.endswith(suffix)), None)


def exported_files(path: PathLike) -> list[Path]:
    """Files of the network that `path` names, which may keep weights or a decoder beside it."""
    file = Path(path)
    decoder = file.with_suffix(f".decoder{file.suffix}")
    beside = file.with_suffix(".bin") if file.suffix == ".xml" else Path(f"{file}.data")
    return sorted(one for one in (file, beside, decoder) if one.is_file())


def load_exported(
    path: PathLike,
    *,
    engine: str = "onnx",
    batch_size: int | None = None,
    workers: int | None = None,
    threads: int | None = None,
    search: Any = None,
    intensity_range: tuple[float, float] | None = None,
    no_calibration: bool = False,
    **settings: Any,
) -> "ExportedClassifier | ExportedCaptioner":
    """Load an exported network; settings of the torch Predictor that it lacks are refused.

    Args:
        search: A vit.generation Search, or None; only min_tokens and max_tokens may differ from
            their defaults.
        settings: Other settings of the Predictor; each must have its default value.
    """
    if engine not in EXPORTED.values():
        raise ConfigError(f"engine={engine!r}: choose one of {', '.join(EXPORTED.values())}")
    if no_calibration:
        raise ConfigError(
            "no_calibration: the scores of an exported network are calibrated inside; export it "
            "with --no-calibration, or give the run"
        )
    precision = _check_settings(settings)
    if engine == "onnx" and read_metadata(path).get("graph") in ("encoder", "decoder"):
        _check_precision(precision, "fp32")
        return _load_captioner(path, batch_size, workers, threads, search, intensity_range)
    if search is not None:
        changed = _changed_settings(search)
        names = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        raise ConfigError(f"{names or 'search'}: this network writes no captions; leave it out")
    from vit.exported.onnx_classifier import ExportedClassifier

    if engine == "openvino":
        from vit.exported.openvino_session import OpenVINOSession

        classifier = ExportedClassifier(
            OpenVINOSession(path, threads=threads),
            batch_size=batch_size,
            workers=workers,
            intensity_range=intensity_range,
        )
    else:
        classifier = ExportedClassifier(
            path,
            batch_size=batch_size,
            workers=workers,
            threads=threads,
            intensity_range=intensity_range,
        )
    _check_precision(precision, classifier.precision)
    return classifier


def _check_settings(settings: dict[str, Any]) -> str | None:
    """Refuse settings that an exported network lacks; return the requested precision."""
    for name, value in settings.items():
        if name == "device" and value not in (None, "cpu"):
            raise ConfigError(
                f"device={printable(value)!r}: exported networks run on the CPU; leave it out, or "
                "give the run"
            )
        if name not in ("device", "precision") and value not in (None, False, "auto"):
            given = name if value is True else f"{name}={value!r}"
            raise ConfigError(
                f"{given}: not supported by an exported network; give the run it was exported from"
            )
    precision: str | None = settings.get("precision")
    return precision


def _check_precision(requested: str | None, exported: str) -> None:
    if requested not in (None, "auto", exported):
        raise ConfigError(
            f"precision={requested!r}: the exported network computes in {printable(exported)}; "
            "export it again with another --precision"
        )


def _changed_settings(search: Any) -> dict[str, Any]:
    """Settings of a Search that differ from their defaults."""
    default = type(search)()
    return {name: x for name, x in asdict(search).items() if x != getattr(default, name)}


def _load_captioner(
    path: PathLike,
    batch_size: int | None,
    workers: int | None,
    threads: int | None,
    search: Any,
    intensity_range: tuple[float, float] | None,
) -> "ExportedCaptioner":
    from vit.exported.onnx_captioner import ExportedCaptioner

    changed = {} if search is None else _changed_settings(search)
    limits = {name: changed.pop(name) for name in ("min_tokens", "max_tokens") if name in changed}
    for name, value in changed.items():
        raise ConfigError(
            f"{name}={value!r}: an exported network decodes greedily only; give the run"
        )
    return ExportedCaptioner(
        path,
        batch_size=batch_size,
        workers=workers,
        threads=threads,
        intensity_range=intensity_range,
        **limits,
    )
