"""Verification of an exported file: three implementations of the same model, compared.

by hand      the saved preprocessing and the network in torch, image by image
predictor    `vit predict RUN`, in float32
file         the exported file, without torch
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vit.errors import DataError, RunError, VitError, WeightsError, printable
from vit.export.mismatch_diagnosis import diagnose, metadata_differences
from vit.export.reference_outputs import (
    Answers,
    ModelOutputs,
    Runner,
    by_file,
    by_predictor,
    by_reference_code,
)
from vit.export.sample_images import comparison_images
from vit.exported.load_exported import EXPORTED, load_exported
from vit.paths import did_you_mean
from vit.weights.load_model import load_model
from vit.weights.resolve_source import SUFFIXES, locate_weights

HAND, PREDICTOR = "by hand", "predictor"


class Limits(NamedTuple):
    """What two ways may differ by."""

    agreement: float
    """Share of the images that must have the same answer."""
    difference: float
    """Largest difference of two probabilities."""


LIMITS = {
    "fp32": Limits(0.995, 0.02),
    "fp16": Limits(0.98, 0.05),
    "int8": Limits(0.9, 0.5),
}
"""By the arithmetic of the file; of fp16 and int8 the agreement decides, the other is a fuse."""


@dataclass(frozen=True)
class Compared:
    """How far one way is from that by hand.

    Args:
        name: Of the way.
        images: Images that both have answered.
        top1_agreement: Share of them with the same first class, and the same caption. Where a
            image may have several classes, the mean share that both name of those that one does.
        max_probability_difference: The largest difference of two probabilities.
        worst: The image of that difference, or None where there is none.
        limits: What is allowed.
    """

    name: str
    images: int
    top1_agreement: float
    max_probability_difference: float
    worst: str | None
    limits: Limits

    @property
    def agrees(self) -> bool:
        """Whether it is within its limits."""
        return (
            self.top1_agreement >= self.limits.agreement
            and self.max_probability_difference <= self.limits.difference
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "images": self.images,
            "top1_agreement": self.top1_agreement,
            "max_probability_difference": self.max_probability_difference,
            "worst": self.worst,
            "least_agreement": self.limits.agreement,
            "most_difference": self.limits.difference,
            "agrees": self.agrees,
        }

    def line(self) -> str:
        """How far it is from that by hand, and how far it may be."""
        least, most = self.limits
        return (
            f"same answer {self.top1_agreement:.2%} (at least {least:.1%}), largest difference "
            f"{self.max_probability_difference:.2g} (at most {most:g})"
        )

    def complaint(self) -> str:
        """By how much it differs, and on which image most."""
        wrong = round((1 - self.top1_agreement) * self.images)
        return (
            f"{printable(self.name)} is not the network of the run: another answer for {wrong} of "
            f"{self.images} images, probabilities differ by up to "
            f"{self.max_probability_difference:.3f}, most on {printable(self.worst)}"
        )


@dataclass(frozen=True)
class Verification:
    """What came of a comparison.

    Args:
        images: Images that every way has answered.
        paths: The ways; the first is what the others are compared with.
        failures: Images that a way did not answer, each {"image", "path", "error"}.
        causes: What is not as it must be, one sentence each.
        precision: What the file says that it computes in, which sets its limits; None without one.
    """

    images: int
    paths: tuple[Compared, ...]
    failures: tuple[dict[str, str], ...] = ()
    diagnose: tuple[str, ...] = ()
    precision: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether the answers are the same, and the file says of itself what the run says."""
        return all(path.agrees for path in self.paths) and not self.diagnose

    @property
    def top1_agreement(self) -> float:
        """The least of all ways."""
        return min(path.top1_agreement for path in self.paths)

    @property
    def max_probability_difference(self) -> float:
        """The largest of all ways."""
        return max(path.max_probability_difference for path in self.paths)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "images": self.images,
            "top1_agreement": self.top1_agreement,
            "max_probability_difference": self.max_probability_difference,
            "agrees": self.agrees,
            "precision": self.precision,
            "paths": [path.to_dict() for path in self.paths],
            "causes": list(self.diagnose),
            "failed": list(self.failures),
        }

    def lines(self) -> list[str]:
        """The numbers for reading."""
        first, *others = self.paths
        width = max(len(printable(path.name)) for path in self.paths)
        lines = [f"{'images':<{width}}  {self.images}"]
        lines.append(f"{first.name:<{width}}  the saved preprocessing and the network, in float32")
        lines += [f"{printable(path.name):<{width}}  {path.line()}" for path in others]
        if self.precision is not None:
            lines.append(f"{'':<{width}}  its limits are those of {self.precision}, as it says")
        return [*lines, self.conclusion]

    @property
    def conclusion(self) -> str:
        """The last line: what somebody reads who reads one."""
        if not self.agrees:
            return "they do not agree"
        left_out = len({failure["image"] for failure in self.failures})
        if left_out:
            return f"{self.images} agree, and {left_out} could not be compared"
        return "all agree"

    def complaints(self) -> list[str]:
        """What is wrong, a line each: which way, by how much, where; then likely causes."""
        lines = [path.complaint() for path in self.paths if not path.agrees]
        return lines + [f"likely cause: {cause}" for cause in self.diagnose]


PathLike = str | os.PathLike[str]


def verify(
    model: PathLike,
    images: Sequence[str] | None = None,
    *,
    run: PathLike | None = None,
    engine: str | None = None,
    batch_size: int | None = None,
    notify: Callable[[str], object] = lambda _note: None,
) -> Verification:
    """Compare the outputs of a run, the predictor and an exported file on the same images.

    Args:
        model: X.onnx or X.xml; or a run folder, or of a classifier any other source of weights
            with a head, which is compared with the predictor only.
        images: Paths; by default up to 50 validation images of the run's data, or drawn ones if
            there are none.
        run: The run, or other weights, that the exported file is compared with; by default the one
            that its metadata name.
        engine: Engine of the file: onnx or openvino; by its suffix by default.
        batch_size: Batch size of the engine.
        notify: Called with a note on which images are used.

    Raises:
        VitError: The run, the file or the engine cannot be used.
        DataError: No image has an output of every implementation.
    """
    exported = None if is_source(model) else model
    for name, value in (("run", run), ("engine", engine)):
        if exported is None and value is not None:
            raise VitError(f"{name}={printable(value)}: MODEL is a run already; give X.onnx")
    runner = None if exported is None else opened(exported, engine, batch_size)
    source = model if runner is None else run or source_of(model, runner)
    loaded = load_model(source, notify=notify)
    with comparison_images(Path(source), loaded, images, notify) as paths:
        ways = {HAND: by_reference_code(loaded, paths), PREDICTOR: by_predictor(loaded, paths)}
        if runner is None:
            return verdict(paths, ways, None, [])
        file = os.path.basename(os.fspath(exported or ""))
        ways[file] = by_file(runner, paths, loaded.classes)
        precision = precision_of(runner)
        found = metadata_differences(loaded, runner)
        agrees = compare(file, paths, ways[HAND], ways[file], LIMITS[precision]).agrees
        if not agrees and {*runner.classes} == {*loaded.classes}:  # by other names nothing compares
            found += diagnose(loaded, runner, paths, ways[HAND], ways[file])
        return verdict(paths, ways, precision, found)


def is_source(model: PathLike) -> bool:
    """Whether `model` is a run folder or another source of weights, and not an exported file."""
    name = os.fspath(model)
    if os.path.isdir(name) or name.lower().endswith(tuple(EXPORTED)):
        return os.path.isdir(name)
    if os.path.exists(name):
        return name.lower().endswith(SUFFIXES)
    return not name.startswith((".", "/", "~")) and ("/" in name or ":" in name)


def opened(exported: PathLike, engine: str | None, batch_size: int | None) -> Runner:
    """The runner of an exported file.

    Raises:
        VitError: It cannot be opened.
    """
    suffix = Path(exported).suffix.lower()
    engine = engine or EXPORTED.get(suffix)
    if engine is None and not os.path.exists(exported):
        remedy = did_you_mean(exported) or "; give X.onnx or X.xml, or a run folder"
        raise WeightsError(f"{printable(exported)} is not there{remedy}")
    if engine is None:
        raise WeightsError(
            f"{printable(exported)} is no exported file: give X.onnx or X.xml, or a run folder"
        )
    return load_exported(exported, engine=engine, batch_size=batch_size)


def source_of(exported: PathLike, runner: Runner) -> str:
    """The run folder, or other source of weights, that an exported file names.

    Raises:
        RunError: It names none, or one that is not here.
    """
    source = runner.metadata.get("source_run")
    if source is None:
        raise RunError(f"{printable(exported)} names no run; give it with --run RUN")
    try:
        locate_weights(source)
    except VitError:
        raise RunError(
            f"{printable(exported)} was exported from {printable(source)}, which is not here; give "
            "the run with --run RUN"
        ) from None
    return source


def precision_of(runner: Runner) -> str:
    """What the file says that it computes in; a captioner is always of float32.

    Raises:
        WeightsError: It computes in what this version does not know.
    """
    precision = runner.metadata.get("precision", "fp32")
    if precision not in LIMITS:
        raise WeightsError(
            f"precision={printable(precision)!r} in the metadata: expected {', '.join(LIMITS)}; "
            "export it again"
        )
    return precision


def verdict(
    images: Sequence[str], ways: dict[str, Answers], precision: str | None, found: list[str]
) -> Verification:
    """All ways compared with the first; that of a file has the limits of its `precision`."""
    usual = LIMITS["fp32"]
    limits = LIMITS[precision or "fp32"]
    compared = tuple(
        compare(name, images, ways[HAND], said, usual if name in (HAND, PREDICTOR) else limits)
        for name, said in ways.items()
    )
    if not compared[1].agrees:
        found = [*found, "the predictor differs from its own parts: please report it"]
    failures = failures_of(images, ways)
    return Verification(
        images=len(images) - len({failure["image"] for failure in failures}),
        paths=compared,
        failures=failures,
        diagnose=tuple(found),
        precision=precision,
    )


def compare(
    name: str, images: Sequence[str], hand: Answers, said: Answers, limits: Limits
) -> Compared:
    """How far `said` is from what was computed by `hand`, on the images that both answered.

    Raises:
        DataError: There is none.
    """
    rows = [
        (one.agreement(other), one.difference(other), path)
        for path, one, other in zip(images, hand, said, strict=True)
        if isinstance(one, ModelOutputs) and isinstance(other, ModelOutputs)
    ]
    if not rows:
        error = hand[0] if isinstance(hand[0], str) else said[0]
        raise DataError(
            f"none of {len(images)} images can be compared; the first, {printable(images[0])}: "
            f"{printable(error)}"
        )
    same, apart, paths = zip(*rows, strict=True)
    most = max(apart)
    worst = paths[apart.index(most)] if most > 0 else None
    return Compared(name, len(rows), sum(same) / len(rows), most, worst, limits)


def failures_of(images: Sequence[str], ways: dict[str, Answers]) -> tuple[dict[str, str], ...]:
    """Images without an answer, and which way says so; once where all say the same."""
    failures = []
    for place, image in enumerate(images):
        errors = {name: said[place] for name, said in ways.items() if isinstance(said[place], str)}
        if len(errors) == len(ways) and len(set(errors.values())) == 1:
            errors = {"all": next(iter(errors.values()))}
        failures += [
            {"image": image, "path": name, "error": str(error)} for name, error in errors.items()
        ]
    return tuple(failures)
