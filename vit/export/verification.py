"""Verification of an exported file: three implementations of the same model, compared.

by hand      the saved preprocessing and the network in torch, image by image
predictor    `vit predict RUN`, in float32
file         the exported file, without torch
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vit.errors import BadImage, DataError, RunError, VitError, WeightsError
from vit.export.export_request import PathLike
from vit.export.sample_images import comparison_images
from vit.exported.engine import exported_engine
from vit.exported.onnx_session import Array
from vit.generation.generate import generate_captions
from vit.generation.generation_config import Search
from vit.inference.prediction_job import find_images, input_paths
from vit.inference.predictor import Predictor
from vit.model.captioner import Captioner
from vit.number_answers import NumberAnswers
from vit.output.prediction_results import Prediction
from vit.paths import did_you_mean, path_argument
from vit.tasks.task import calibrated_activation
from vit.text import Notify, printable
from vit.weights.load_model import load_model
from vit.weights.resolve_source import SUFFIXES, locate_weights
from vit.weights.saved_model import LoadedRun

REFERENCE, PREDICTOR = "by hand", "predictor"


class Limits(NamedTuple):
    """Allowed deviation from the reference."""

    agreement: float
    """Least share of images with the same answer."""
    difference: float
    """Largest difference of two probabilities."""


LIMITS = {
    "fp32": Limits(0.995, 0.02),
    "fp16": Limits(0.98, 0.05),
    "int8": Limits(0.9, 0.5),
}
"""By the precision of the file; for fp16 and int8 the limit of the difference is generous."""


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of a network for one image; the probabilities, (classes,) float64, are empty without
    a classification head."""

    probabilities: Array
    caption: str | None = None
    likelihood: float = 1.0
    thresholds: tuple[float, ...] | None = None
    answers: NumberAnswers | None = None
    """The targets that they are probabilities and standardised numbers of."""

    def agreement(self, other: "ModelOutputs") -> float:
        """1 if the first class and the caption are equal, else 0.

        Of a multi-label network: classes that both name, as a share of those that either names; of
        one with targets 1 if the best class of each choice is equal.
        """
        first, second = (one.probabilities for one in (self, other))
        if self.thresholds is not None and other.thresholds is not None:
            ours, theirs = first >= self.thresholds, second >= other.thresholds
            named = (ours | theirs).sum()
            return float((ours & theirs).sum() / named) if named else 1.0
        if self.answers is not None:
            return float(self.answers.best(first) == self.answers.best(second))
        return float(
            self.caption == other.caption
            and (not len(first) or bool(first.argmax() == second.argmax()))
        )

    def difference(self, other: "ModelOutputs") -> float:
        """The largest difference of two probabilities."""
        differences = np.abs(self.probabilities - other.probabilities)
        return max(abs(self.likelihood - other.likelihood), float(differences.max(initial=0.0)))


Outputs = list[ModelOutputs | str]


@torch.inference_mode()
def by_reference_code(run: LoadedRun, images: Sequence[str]) -> Outputs:
    """The saved preprocessing and the network in float32, one image at a time, on the CPU."""
    outputs: Outputs = []
    for path in images:
        try:
            pixels = run.preprocessing(run.preprocessing.read(path)).unsqueeze(0)
        except BadImage as error:
            outputs.append(error.reason)
            continue
        batch, model, caption = run.preprocessing.normalise(pixels), run.model, None
        if isinstance(model, Captioner):
            assert run.tokenizer is not None, "a captioner has a tokenizer"
            logits, memory = model.encode_images(batch)
            ((caption, *_),) = generate_captions(model.decoder, memory, run.tokenizer, Search())
        else:
            logits = model(batch)
        probabilities = calibrated_activation(run)(logits.double())[0].numpy()
        if not np.isfinite(probabilities).all():
            outputs.append("the network overflowed in float32")
        elif caption is None:
            outputs.append(comparable(probabilities, run.answers, run.thresholds))
        else:
            outputs.append(ModelOutputs(probabilities, caption.text, math.exp(caption.score)))
    return outputs


def by_predictor(run: LoadedRun, images: Sequence[str]) -> Outputs:
    """Outputs of the Predictor in float32, as `vit predict` with the run."""
    predictor = Predictor(run, device="cpu", precision="fp32")
    return _all_outputs(predictor, images, run.classes, predictor.thresholds)


def by_file(runner: Predictor, images: Sequence[str], classes: Sequence[str]) -> Outputs:
    """Outputs of an exported file for the run's `classes`; 0 for a class that it lacks."""
    thresholds = None
    if runner.thresholds is not None:
        own = dict(zip(runner.classes, runner.thresholds, strict=True))
        thresholds = tuple(own.get(name, 1.0) for name in classes)
    return _all_outputs(runner, images, classes, thresholds)


def _all_outputs(
    predictor: Predictor,
    images: Sequence[str],
    classes: Sequence[str],
    thresholds: tuple[float, ...] | None,
) -> Outputs:
    """Outputs with the scores of all `classes`; numbers are standardised, as scores are alike."""
    if (answers := predictor.answers) is not None:
        return [
            str(one.error) if one.probabilities is None else comparable(one.probabilities, answers)
            for batch in predictor.batches(images)
            for one in batch
        ]
    found = predictor.stream(images, top_k=max(1, len(predictor.classes)), threshold=-math.inf)
    return [_outputs_of(one, classes, thresholds) for one in found]


def comparable(
    values: Array, answers: NumberAnswers | None, thresholds: tuple[float, ...] | None = None
) -> ModelOutputs:
    """Outputs whose numbers are standardised, so that they differ as probabilities do."""
    values = values if answers is None else answers.comparable(values)
    return ModelOutputs(values, thresholds=thresholds, answers=answers)


def _outputs_of(
    prediction: Prediction, classes: Sequence[str], thresholds: tuple[float, ...] | None
) -> ModelOutputs | str:
    if prediction.error is not None:
        return prediction.error
    scores = dict(prediction.predictions)
    probabilities = np.array([scores.get(name, 0.0) for name in classes], dtype=np.float64)
    if prediction.score is None:
        return ModelOutputs(probabilities, thresholds=thresholds)
    return ModelOutputs(probabilities, prediction.caption, math.exp(prediction.score))


@dataclass(frozen=True)
class Comparison:
    """Deviation of one implementation from the reference; `worst` is the image of the
    difference."""

    name: str
    images: int
    top1_agreement: float
    max_probability_difference: float
    worst: str | None
    limits: Limits

    @property
    def agrees(self) -> bool:
        """Whether the deviation is within the limits."""
        return (
            self.top1_agreement >= self.limits.agreement
            and self.max_probability_difference <= self.limits.difference
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self)
        least, most = values.pop("limits")
        bounds = {"least_agreement": least, "most_difference": most}
        return {**values, **bounds, "agrees": self.agrees}

    def line(self) -> str:
        """Deviation and limits as text."""
        least, most = self.limits
        return (
            f"same answer {self.top1_agreement:.2%} (at least {least:.1%}), largest difference "
            f"{self.max_probability_difference:.2g} (at most {most:g})"
        )

    def complaint(self) -> str:
        """Text of a deviation beyond the limits."""
        wrong = round((1 - self.top1_agreement) * self.images)
        return (
            f"{printable(self.name)} is not the network of the run: another answer for {wrong} of "
            f"{self.images} images, probabilities differ by up to "
            f"{self.max_probability_difference:.3f}, most on {printable(self.worst)}"
        )


@dataclass(frozen=True)
class Verification:
    """Result of a verification, with limits by the precision in the metadata of the file."""

    images: int
    paths: tuple[Comparison, ...]
    failures: tuple[dict[str, str], ...] = ()
    causes: tuple[str, ...] = ()
    precision: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether outputs and metadata agree."""
        return all(path.agrees for path in self.paths) and not self.causes

    @property
    def top1_agreement(self) -> float:
        """The least of all implementations."""
        return min(path.top1_agreement for path in self.paths)

    @property
    def max_probability_difference(self) -> float:
        """The largest of all implementations."""
        return max(path.max_probability_difference for path in self.paths)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit verify`."""
        return {
            "images": self.images,
            "top1_agreement": self.top1_agreement,
            "max_probability_difference": self.max_probability_difference,
            "agrees": self.agrees,
            "precision": self.precision,
            "paths": [path.to_dict() for path in self.paths],
            "causes": list(self.causes),
            "failed": list(self.failures),
        }

    def lines(self) -> list[str]:
        first, *others = self.paths
        width = max(len(printable(path.name)) for path in self.paths)
        lines = [f"{'images':<{width}}  {self.images}"]
        lines.append(f"{first.name:<{width}}  the saved preprocessing and the network, in float32")
        lines += [f"{printable(path.name):<{width}}  {path.line()}" for path in others]
        if self.precision is not None:
            lines.append(f"{'':<{width}}  its limits are those of {self.precision}, as it says")
        failed = len({failure["image"] for failure in self.failures})
        if not self.agrees:
            return [*lines, "they do not agree"]
        if failed:
            return [*lines, f"{self.images} agree, and {failed} could not be compared"]
        return [*lines, "all agree"]

    def complaints(self) -> list[str]:
        """Text of each deviation beyond its limits, and of the likely causes."""
        lines = [path.complaint() for path in self.paths if not path.agrees]
        return lines + [f"likely cause: {cause}" for cause in self.causes]


def verify(
    model: PathLike,
    images: PathLike | Sequence[PathLike] | None = None,
    *,
    run: PathLike | None = None,
    engine: str | None = None,
    batch_size: int | None = None,
    notify: Notify = lambda _note: None,
) -> Verification:
    """Compare the outputs of a run, the predictor and an exported file on images: `vit verify`.

    Args:
        model: X.onnx or X.xml; or a run folder, or of a classifier any other source of weights
            with a head, which is compared with the predictor only.
        images: Files, folders or patterns; by default up to 50 validation images of the run's
            data, or drawn ones without data.
        run: The run, or other weights, that the exported file is compared with; by default the one
            that its metadata name.
        engine: Engine of the file: onnx or openvino; by its suffix by default.
        batch_size: Batch size of the engine.
        notify: Called with a note on which images are used.

    Raises:
        VitError: The run, the file or the engine cannot be used.
        DataError: No image has an output of every implementation.
    """
    model = path_argument("model", model, "a run folder, weights, or an exported file")
    listed = None if images is None else input_paths(images)
    found = find_images(listed, notify=notify) if listed else listed
    exported = None if is_source(model) else model
    for name, value in (("run", run), ("engine", engine)):
        if exported is None and value is not None:
            raise VitError(f"{name}={value}: MODEL is a run already; give X.onnx")
    runner = None if exported is None else open_exported(exported, engine, batch_size)
    source = model if runner is None else run or named_source(model, runner)
    loaded = load_model(source, notify=notify)
    scaled = runner is not None and runner.answers is not None and runner.answers.scaling
    if runner is not None and runner.calibration is None and not scaled:
        loaded = loaded.without_calibration()  # as --no-calibration exported it
    with comparison_images(Path(source), loaded, found, notify) as paths:
        reference = by_reference_code(loaded, paths)
        outputs = {REFERENCE: reference, PREDICTOR: by_predictor(loaded, paths)}
        precision, causes = None, []
        limits = {REFERENCE: LIMITS["fp32"], PREDICTOR: LIMITS["fp32"]}
        if runner is not None:
            precision = runner.metadata.get("precision", "fp32")
            if precision not in LIMITS:
                raise WeightsError(
                    f"precision={precision!r} in the metadata: expected "
                    f"{', '.join(LIMITS)}; export it again"
                )
            file = os.path.basename(os.fspath(model))
            outputs[file] = by_file(runner, paths, loaded.classes)
            limits[file] = LIMITS[precision]
            causes = metadata_differences(loaded, runner)
    comparisons = tuple(
        compare(name, paths, reference, outputs[name], limits[name]) for name in outputs
    )
    if not comparisons[1].agrees:
        causes.append("the predictor differs from its own parts: please report it")
    failures = failures_of(paths, outputs)
    return Verification(
        images=len(paths) - len({failure["image"] for failure in failures}),
        paths=comparisons,
        failures=failures,
        causes=tuple(causes),
        precision=precision,
    )


def is_source(model: PathLike) -> bool:
    """Whether `model` is a run folder or another source of weights, and not an exported file."""
    name = os.fspath(model)
    if os.path.isdir(name) or exported_engine(name):
        return os.path.isdir(name)
    if os.path.exists(name):
        return name.lower().endswith(SUFFIXES)
    return not name.startswith((".", "/", "~")) and ("/" in name or ":" in name)


def open_exported(exported: PathLike, engine: str | None, batch_size: int | None) -> Predictor:
    """Open an exported file with `engine`, by default that of its suffix."""
    engine = engine or exported_engine(exported)
    if engine is None and not os.path.exists(exported):
        remedy = did_you_mean(exported) or "; give X.onnx or X.xml, or a run folder"
        raise WeightsError(f"{exported} is not there{remedy}")
    if engine is None:
        raise WeightsError(f"{exported} is no exported file: give X.onnx or X.xml, or a run folder")
    return Predictor(exported, engine=engine, batch_size=batch_size)


def named_source(exported: PathLike, runner: Predictor) -> str:
    """The source of weights in the metadata of an exported file."""
    source: str | None = runner.metadata.get("source_run")
    if source is None:
        raise RunError(f"{exported} names no run; give it with --run RUN")
    try:
        locate_weights(source)
    except VitError:
        raise RunError(
            f"{exported} was exported from {source}, which is not here; give the run with --run RUN"
        ) from None
    return source


def metadata_differences(run: LoadedRun, runner: Predictor) -> list[str]:
    """A sentence that names what the metadata of the file have otherwise than the run."""
    ours, theirs = (_described(one) for one in (run, runner))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [f"its metadata differ from the run in {', '.join(names)}"] if names else []


def _described(model: LoadedRun | Predictor) -> dict[str, Any]:
    scores = {} if model.calibration is None else model.calibration.to_dict()
    return {
        **model.preprocessing.to_dict(),
        "classes": tuple(model.classes),
        "thresholds": model.thresholds,
        **{f"calibration {name}": value for name, value in scores.items()},
    }


def compare(
    name: str, images: Sequence[str], reference: Outputs, found: Outputs, limits: Limits
) -> Comparison:
    """Compare outputs with the reference, on the images that have both."""
    rows = [
        (one.agreement(other), one.difference(other), path)
        for path, one, other in zip(images, reference, found, strict=True)
        if isinstance(one, ModelOutputs) and isinstance(other, ModelOutputs)
    ]
    if not rows:
        error = reference[0] if isinstance(reference[0], str) else found[0]
        raise DataError(
            f"none of {len(images)} images can be compared; the first, {images[0]}: {error}"
        )
    agreements, differences, paths = zip(*rows, strict=True)
    most = max(differences)
    worst = paths[differences.index(most)] if most > 0 else None
    return Comparison(name, len(rows), sum(agreements) / len(rows), most, worst, limits)


def failures_of(
    images: Sequence[str], outputs: Mapping[str, Outputs]
) -> tuple[dict[str, str], ...]:
    """Images without an output, by implementation; an error that all share is listed once."""
    failures = []
    for index, image in enumerate(images):
        errors = {name: x[index] for name, x in outputs.items() if isinstance(x[index], str)}
        if len(errors) == len(outputs) and len(set(errors.values())) == 1:
            errors = {"all": next(iter(errors.values()))}
        failures += [
            {"image": image, "path": name, "error": str(error)} for name, error in errors.items()
        ]
    return tuple(failures)
