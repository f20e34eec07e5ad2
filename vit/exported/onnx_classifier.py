"""Classification with an exported file: onnxruntime or OpenVINO, numpy and Pillow, without torch.

The graph takes the bytes of images of any size; resizing, normalisation and softmax or sigmoid are
inside. This module decodes images, by the code that training used, and batches those of one size.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vit.data.image_io import IntensityRange
from vit.data.image_objects import ImageInput, NamedImage, named_images
from vit.data.preprocessing import Preprocessing
from vit.errors import BadImage, ConfigError, WeightsError, error_text
from vit.exported.image_prefetch import (
    DecodedImage,
    PathLike,
    prefetch_images,
    resolve_batch_and_workers,
)
from vit.exported.onnx_session import Array, InferenceSession, OnnxSession
from vit.output.prediction_results import Prediction, check_top_k, resolve_top_k
from vit.score_calibration import ScoreCalibration, check_decisions, check_selection
from vit.text import Notify, print_to_stderr, printable

INPUT, OUTPUT = "images", "probabilities"
DISTANCE = "distance"
"""Output of the distance from the training images, of a network that has measured it."""
SCORE_CALIBRATION = "score_calibration"
"""Key of the metadata; `calibration` is that of int8."""
WITHOUT_THRESHOLDS = ("softmax", "identity")
"""Values of the metadata's `activation` that go with no thresholds."""
WINDOW_BATCHES = 8
"""Batches among which images of one size are grouped."""
BATCH_PIXELS = 2**22
"""Maximum pixels of one forward pass: the graph needs 12 bytes and more for each."""
OutputRow = dict[str, Array]
"""Outputs of one image by name, without the batch axis."""


class ExportedClassifier:
    """Classifies images with an exported network.

    Images of the same height and width that are near each other in the list share a batch. A list
    gives the same numbers every time; the last digits depend on `batch_size` and on the other
    images.

    Args:
        batch_size: Maximum images per forward pass.
        workers: Threads that decode images; default: one per core, at most 8.
        threads: Compute threads; default: one per core.
        intensity_range: Values of images of more than 8 bits per channel that become black and
            white; default: those of the training.

    Attributes:
        classes: Class names, by output of the network.
        preprocessing: Preprocessing inside the graph.
        precision: fp32, fp16 or int8.
        thresholds: Decision threshold per class of a multi-label network; None for softmax.
        calibration: Calibration of the scores, inside the graph; None where they are raw.
        block_size: A list gives the same results when it is continued at a multiple of this.
        metadata: Metadata of the file.
    """

    device = "cpu"
    n_best = 0
    """Captions per image."""

    def __init__(
        self,
        path: PathLike | InferenceSession,
        providers: Sequence[str] | None = None,
        *,
        batch_size: int | None = None,
        workers: int | None = None,
        threads: int | None = None,
        intensity_range: IntensityRange | None = None,
        notify: Notify = print_to_stderr,
    ) -> None:
        self.notify = notify
        self.batch_size, self.workers = resolve_batch_and_workers(batch_size, workers)
        self.block_size = WINDOW_BATCHES * self.batch_size
        if isinstance(path, str | os.PathLike):
            self._name = printable(path)
            self._session: InferenceSession = OnnxSession(path, providers, threads=threads)
        elif providers is None and threads is None:
            self._name, self._session = "the graph", path
        else:
            raise ConfigError("providers and threads belong to the session that was given")
        self.metadata = self._session.metadata
        self._check_graph()
        try:
            self.classes = _parse_classes(self.metadata["classes"])
            self.preprocessing = Preprocessing.from_dict(json.loads(self.metadata["preprocessing"]))
            self.precision = self.metadata["precision"]
            self.thresholds = _parse_thresholds(self.metadata, self.classes)
            self.shares = self.metadata.get("activation") != "identity"
            stored = json.loads(self.metadata.get(SCORE_CALIBRATION, "null"))
            self.calibration = None if stored is None else ScoreCalibration.from_dict(stored)
            if self.calibration is not None:
                self.calibration.check_classes(self.classes)
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise WeightsError(
                f"{self._name}: its metadata are damaged ({printable(error)}); export it again"
            ) from None
        if intensity_range is not None:
            self.preprocessing = replace(self.preprocessing, intensity_range=intensity_range)
        self._check_signature(getattr(self._session, "signature", {}))

    def _check_graph(self) -> None:
        """Refuse a graph that is not a classifier of vit export."""
        kind = self.metadata.get("graph")
        if kind is None:
            raise WeightsError(f"{self._name} was not written by vit export; give a file that was")
        if kind != "classifier":
            raise WeightsError(
                f"{self._name} is the {printable(kind)} of a captioner, not a classifier; open it "
                "with ExportedCaptioner"
            )
        if self._session.inputs != [INPUT] or OUTPUT not in self._session.outputs:
            names = f"{self._session.inputs} -> {self._session.outputs}"
            raise WeightsError(
                f"{self._name}: computes {printable(names)}, expected {INPUT} -> {OUTPUT}; "
                "export it again"
            )

    def _check_signature(self, signature: dict[str, tuple[str, tuple[Any, ...]]]) -> None:
        """Compare the graph's declared input and output shapes with the expected ones."""
        dtype, shape = signature.get(INPUT, ("tensor(uint8)", (None, None, None, 3)))
        dynamic = len(shape) == 4 and not any(isinstance(side, int) for side in shape[:3])
        if dtype != "tensor(uint8)" or not dynamic or shape[3] != 3:
            raise WeightsError(
                f"{self._name}: takes {dtype} of shape {printable(list(shape))}, expected bytes of "
                "any (batch, height, width, 3); export it again"
            )
        _, shape = signature.get(OUTPUT, ("", (None, len(self.classes))))
        if len(shape) != 2 or shape[1] != len(self.classes):
            raise WeightsError(
                f"{self._name}: returns probabilities of shape {printable(list(shape))}, and names "
                f"{len(self.classes)} classes; export it again"
            )

    def __call__(
        self,
        images: Iterable[ImageInput],
        *,
        top_k: int | None = None,
        threshold: float | None = None,
        reject: bool = False,
        sets: float | None = None,
    ) -> list[Prediction]:
        """Return one prediction per image of `images`, in their order; see `stream`."""
        options = {"top_k": top_k, "threshold": threshold, "reject": reject, "sets": sets}
        return list(self.stream(images, **options))  # type: ignore[arg-type]

    def stream(
        self,
        images: Iterable[ImageInput],
        *,
        top_k: int | None = None,
        threshold: float | None = None,
        reject: bool = False,
        sets: float | None = None,
    ) -> Iterator[Prediction]:
        """Yield predictions in the order of `images`, in bounded memory.

        Args:
            top_k: Most probable classes to return, at most all. Default: 5; for a multi-label
                network all classes above their thresholds.
        """
        check_top_k(top_k)
        check_selection(self.calibration, reject=reject, sets=sets)
        check_decisions(self.thresholds, reject=reject, threshold=threshold)
        top_k, thresholds = resolve_top_k(self.classes, self.thresholds, top_k, threshold)
        has_distance = reject and DISTANCE in self._session.outputs
        names = (OUTPUT, DISTANCE) if has_distance else (OUTPUT,)
        return (
            self.to_prediction(path, row, top_k, thresholds, reject=reject, sets=sets)
            for path, row in self._run(named_images(images), names)
        )

    def to_prediction(
        self,
        name: str,
        row: OutputRow | BadImage,
        top_k: int,
        thresholds: Sequence[float] | None,
        *,
        reject: bool = False,
        sets: float | None = None,
    ) -> Prediction:
        """The prediction of one image, from its outputs; arguments of `resolve_top_k`."""
        if isinstance(row, BadImage):
            return Prediction(name, error=row.reason)
        classes = top_k_classes(self.classes, row[OUTPUT], top_k, thresholds)
        return Prediction(name, classes, **self._select(row, reject=reject, sets=sets))

    def _select(self, row: OutputRow, *, reject: bool, sets: float | None) -> dict[str, Any]:
        """Reason of a rejection and prediction set of an image; empty if neither is requested."""
        calibration, probabilities = self.calibration, row[OUTPUT]
        if calibration is None or not (reject or sets is not None):
            return {}
        order = np.argsort(-probabilities, kind="stable")
        return calibration.select(
            self.classes,
            order.tolist(),
            probabilities[order].tolist(),
            float(row[DISTANCE]) if DISTANCE in row else None,
            thresholds=self.thresholds,
            reject=reject,
            sets=sets,
        )

    def probabilities(self, images: Iterable[ImageInput]) -> Iterator[Array | BadImage]:
        """Yield the probabilities of each image, (classes,) float64, or its error."""
        rows = self._run(named_images(images))
        return (row if isinstance(row, BadImage) else row[OUTPUT] for _, row in rows)

    def outputs(
        self, images: Iterable[ImageInput], names: Sequence[str]
    ) -> Iterator[OutputRow | BadImage]:
        """Yield the outputs `names` of each image, without the batch axis, or its error."""
        for name in names:
            if name not in self._session.outputs:
                raise ConfigError(
                    f"output={name!r}: {self._name} has {', '.join(self._session.outputs)}; export "
                    "it with --tokens"
                )
        return (row for _, row in self._run(named_images(images), names))

    def _run(
        self, paths: Iterator[NamedImage], names: Sequence[str] = (OUTPUT,)
    ) -> Iterator[tuple[str, OutputRow | BadImage]]:
        windows = prefetch_images(
            paths,
            np.asarray,
            workers=self.workers,
            window_size=self.block_size,
            intensity_range=self.preprocessing.intensity_range,
            notify=self.notify,
        )
        for window in windows:
            rows = self._run_window(window, names)
            yield from zip([path for path, _ in window], rows, strict=True)

    def _run_window(
        self, window: list[DecodedImage], names: Sequence[str]
    ) -> list[OutputRow | BadImage]:
        """Run a window of images in batches of equal size, and return rows in its order."""
        rows: dict[int, OutputRow | BadImage] = {}
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, image) in enumerate(window):
            if isinstance(image, BadImage):
                rows[index] = image
            else:
                by_shape[image.shape].append(index)
        for (height, width, _), indices in by_shape.items():
            size = self.most_images(height, width)
            for first in range(0, len(indices), size):
                batch = indices[first : first + size]
                found = self._run_or_explain([window[i] for i in batch], names)
                rows |= zip(batch, found, strict=True)
        return [rows[index] for index in range(len(window))]

    def most_images(self, height: int, width: int) -> int:
        """Most images of this size in one forward pass."""
        return max(1, min(self.batch_size, BATCH_PIXELS // (height * width)))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Outputs that predictions are made of."""
        return tuple(name for name in (OUTPUT, DISTANCE) if name in self._session.outputs)

    def run_batch(
        self, images: Sequence[DecodedImage], names: Sequence[str]
    ) -> list[OutputRow | BadImage]:
        """Run images of one height and width in one forward pass.

        Returns:
            The outputs of each image, or the error of one whose probabilities are not finite.
        """
        return self._to_rows(images, self._compute(images), names)

    def _run_or_explain(
        self, images: Sequence[DecodedImage], names: Sequence[str]
    ) -> list[OutputRow | BadImage]:
        """As `run_batch`, where a failure of the engine is the error of each image."""
        try:
            arrays = self._compute(images)
        except (WeightsError, MemoryError) as error:
            return [BadImage(path, error_text(error)) for path, _ in images]
        return self._to_rows(images, arrays, names)

    def _compute(self, images: Sequence[DecodedImage]) -> list[Array]:
        """All outputs of the graph for a batch."""
        pixels = [np.asarray(image) for _, image in images]
        return self._session({INPUT: np.stack(pixels) if len(pixels) > 1 else pixels[0][None]})

    def _to_rows(
        self, images: Sequence[DecodedImage], arrays: Sequence[Array], names: Sequence[str]
    ) -> list[OutputRow | BadImage]:
        """The outputs `names` of each image of a batch."""
        outputs = dict(zip(self._session.outputs, arrays, strict=True))
        outputs[OUTPUT] = outputs[OUTPUT].astype(np.float64)
        if outputs[OUTPUT].shape != (len(images), len(self.classes)):
            raise WeightsError(
                f"{self._name}: returns probabilities of shape {list(outputs[OUTPUT].shape)} for "
                f"{len(images)} images and {len(self.classes)} classes; export it again"
            )
        finite = [bool(np.isfinite(row).all()) for row in outputs[OUTPUT]]
        overflow = f"the network overflowed in {printable(self.precision)}; export it as fp32"
        return [
            {name: outputs[name][index] for name in names}
            if finite[index]
            else BadImage(path, overflow)
            for index, (path, _) in enumerate(images)
        ]


def top_k_classes(
    classes: Sequence[str],
    probabilities: Array,
    top_k: int,
    thresholds: Sequence[float] | None = None,
) -> tuple[tuple[str, float], ...]:
    """The most probable classes with their probabilities; the first of equal ones.

    Classes below their threshold in `thresholds` are left out.
    """
    best = np.argsort(-probabilities, kind="stable")[:top_k]
    minimum = [-math.inf] * len(classes) if thresholds is None else thresholds
    pairs = ((index, float(probabilities[index])) for index in best)
    return tuple((classes[index], score) for index, score in pairs if score >= minimum[index])


def _parse_classes(text: str) -> tuple[str, ...]:
    """Parse a JSON list of class names."""
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("classes are no list of names")
    if not names or len(set(names)) != len(names):
        raise ValueError("classes are none, or two have one name")
    return tuple(names)


def _parse_thresholds(metadata: dict[str, str], classes: Sequence[str]) -> tuple[float, ...] | None:
    """Decision thresholds of a multi-label network; None for the others, and for older files."""
    activation = metadata.get("activation", "softmax")
    if activation in WITHOUT_THRESHOLDS:
        return None
    values = json.loads(metadata.get("thresholds", "null"))
    complete = isinstance(values, list) and len(values) == len(classes)
    if activation != "sigmoid" or not complete or not all(map(_is_probability, values)):
        raise ValueError(f"activation {printable(activation)} needs a threshold for each class")
    return tuple(map(float, values))


def _is_probability(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1
