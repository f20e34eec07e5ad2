"""One way to open whatever `vit export` wrote: the file says what it is."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vit.errors import ConfigError, printable
from vit.exported.onnx_metadata import PathLike, metadata_of

if TYPE_CHECKING:
    from vit.exported.onnx_captioner import CaptionRunner
    from vit.exported.onnx_classifier import ClassRunner

EXPORTED = {".onnx": "onnx", ".xml": "openvino"}
"""Ending of a file -> what computes it, unless another was asked for."""


def runner_like(
    path: PathLike,
    *,
    engine: str = "onnx",
    batch_size: int | None = None,
    workers: int | None = None,
    threads: int | None = None,
    search: Any = None,
    **settings: Any,
) -> "ClassRunner | CaptionRunner":
    """A runner for `vit predict`, whose other settings an exported network does not have.

    Args:
        path: X.onnx of a classifier or a captioner; with openvino also X.xml.
        engine: What computes it: onnx (onnxruntime) or openvino.
        batch_size, workers: As for ClassRunner and CaptionRunner.
        threads: As for ClassRunner.
        search: A vit.generation Search, or None; only its min_tokens and max_tokens can be set.
        settings: Others of the Predictor; each must be as it is when nobody sets it.

    Raises:
        ConfigError: A setting has no effect here; the message names it.
        WeightsError: The file is missing, damaged, or not of vit export.
        VitError: The engine is not installed.
    """
    if engine not in EXPORTED.values():
        raise ConfigError(f"engine={engine!r}: choose one of {', '.join(EXPORTED.values())}")
    precision = _checked(settings)
    captions = engine == "onnx" and metadata_of(path).get("graph") in ("encoder", "decoder")
    if captions:
        _check_precision(precision, "fp32")
        return _captions(path, batch_size, workers, threads, search)
    if search is not None:
        names = ", ".join(f"{name}={value!r}" for name, value in _chosen(search).items())
        raise ConfigError(f"{names or 'search'}: this network writes no captions; leave it out")
    from vit.exported.onnx_classifier import ClassRunner

    runner: ClassRunner
    if engine == "openvino":
        from vit.exported.openvino_session import Session

        graph = Session(path) if threads is None else Session(path, threads=threads)
        runner = ClassRunner(graph, batch_size=batch_size, workers=workers)
    else:
        runner = ClassRunner(path, batch_size=batch_size, workers=workers, threads=threads)
    _check_precision(precision, runner.precision)
    return runner


def _checked(settings: dict[str, Any]) -> str | None:
    """The precision that was asked for; refuses what an exported network cannot do."""
    for name, value in settings.items():
        if name == "device" and value not in (None, "cpu"):
            raise ConfigError(
                f"device={printable(value)!r}: exported networks are computed by the CPU here; "
                "leave it out, or give the run"
            )
        if name not in ("device", "precision") and value not in (None, False, "auto"):
            raise ConfigError(
                f"{name}={value!r}: an exported network cannot do that; give the run it was "
                "exported from"
            )
    precision: str | None = settings.get("precision")
    return precision


def _check_precision(asked: str | None, own: str) -> None:
    if asked not in (None, "auto", own):
        raise ConfigError(
            f"precision={asked!r}: the exported network computes in {printable(own)}; export it "
            "again with another --precision"
        )


def _chosen(search: Any) -> dict[str, Any]:
    """What was chosen of a Search."""
    usual = type(search)()
    return {name: x for name, x in asdict(search).items() if x != getattr(usual, name)}


def _captions(
    path: PathLike, batch_size: int | None, workers: int | None, threads: int | None, search: Any
) -> "CaptionRunner":
    from vit.exported.onnx_captioner import CaptionRunner

    chosen = {} if search is None else _chosen(search)
    limits = {name: chosen.pop(name) for name in ("min_tokens", "max_tokens") if name in chosen}
    for name, value in chosen.items():
        raise ConfigError(
            f"{name}={value!r}: an exported network takes the likeliest word each time; give the "
            "run"
        )
    return CaptionRunner(path, batch_size=batch_size, workers=workers, threads=threads, **limits)
