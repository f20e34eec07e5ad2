"""The engine of exported classifiers: onnxruntime or OpenVINO, without torch.

The graph takes the bytes of images of any size; resizing, normalisation and softmax or sigmoid are
inside. Images of one height and width that are near each other in the list share a batch.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from vit.config.inference_config import InferenceConfig
from vit.data.preprocessing import AnyImage, Preprocessing
from vit.errors import BadImage, RunError, WeightsError
from vit.exported.engine import SHARES
from vit.exported.onnx_session import Array, InferenceSession
from vit.number_answers import NumberAnswers
from vit.process_resources import usable_cores
from vit.score_calibration import ScoreCalibration
from vit.text import printable

INPUT, OUTPUT = "images", "probabilities"
DISTANCE = "distance"
"""Output of the distance from the training images, of a network that has measured it."""
SCORE_CALIBRATION = "score_calibration"
"""Key of the metadata; `calibration` is that of int8."""
WITHOUT_THRESHOLDS = ("softmax", "identity", "units")
"""Values of the metadata's `activation` that go with no thresholds."""
BATCH_SIZE = 16
WINDOW_BATCHES = 8
"""Batches among which images of one size are grouped."""
BATCH_PIXELS = 2**22
"""Maximum pixels of one forward pass: the graph needs 12 bytes and more for each."""


class ExportedEngine:
    """What exported classifiers and captioners share; the threads only read."""

    device, exported = "cpu", True
    keep_aspect = reads_and_computes = False
    remedy = "export it as fp32"
    answers: NumberAnswers | None = None
    preprocessing: Preprocessing
    batch_size: int

    def __init__(self, config: InferenceConfig) -> None:
        self.batch_size = self.block_size = config.batch_size or BATCH_SIZE
        self.workers = config.workers or min(8, usable_cores())

    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.workers, thread_name_prefix="read-image")

    def largest_batch(self, _shape: Sequence[int]) -> int:
        return self.batch_size

    def groups(self, images: Sequence[Any]) -> list[list[int]]:
        """Indices of the readable images of each forward pass: of one shape, in order."""
        by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, image in enumerate(images):
            if not isinstance(image, BadImage):
                by_shape[image.shape].append(index)
        return [
            indices[start : start + size]
            for shape, indices in by_shape.items()
            for size in [self.largest_batch(shape)]
            for start in range(0, len(indices), size)
        ]

    def random_image(self, number: int) -> Array:
        bag = () if self.preprocessing.tiles is None else (1,)
        return self.preprocessing.random_input(number, *bag, *self.preprocessing.image_size)

    def set_preprocessing(self, text: str, config: InferenceConfig) -> None:
        """Read the preprocessing of the metadata; a setting replaces its range."""
        self.preprocessing = Preprocessing.from_dict(json.loads(text))
        if config.intensity_range is not None:
            self.preprocessing = self.preprocessing.with_range(config.intensity_range)


class OnnxClassifier(ExportedEngine):
    """A classifier of `vit export`; an Engine.

    A list gives the same numbers every time; the last digits depend on `batch_size` and on the
    other images. Its `calibration` is inside the graph.
    """

    whole_images, n_best = True, 0

    def __init__(
        self, session: InferenceSession, config: InferenceConfig, name: object = "the graph"
    ) -> None:
        super().__init__(config)
        self.block_size = WINDOW_BATCHES * self.batch_size
        self._name, self._session, self.metadata = printable(name), session, session.metadata
        self._check_graph()
        try:
            self.classes = _parse_classes(self.metadata["classes"])
            self.set_preprocessing(self.metadata["preprocessing"], config)
            self.precision = self.metadata["precision"]
            self.thresholds = _parse_thresholds(self.metadata, self.classes)
            self.shares = self.metadata.get("activation", "softmax") in SHARES
            if (answers := self.metadata.get("answers")) is not None:
                self.answers = NumberAnswers.from_dict(*json.loads(answers))
            stored = json.loads(self.metadata.get(SCORE_CALIBRATION, "null"))
            self.calibration = None if stored is None else ScoreCalibration.from_dict(stored)
            if self.calibration is not None:
                self.calibration.check_classes(self.classes)
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise WeightsError(
                f"{self._name}: its metadata are damaged ({error}); export it again"
            ) from None

        if self.preprocessing.tiles is not None:  # an image is a batch
            if config.batch_size is not None:
                config.refuse("batch_size", "the file takes the tiles of one image; leave it out")
            self.batch_size = self.block_size = 1

    def _check_graph(self) -> None:
        """Refuse a graph that is not a classifier of vit export."""
        kind = self.metadata.get("graph")
        if kind is None:
            raise WeightsError(f"{self._name} was not written by vit export; give a file that was")
        if kind != "classifier":
            raise WeightsError(f"{self._name} is the {kind} of a captioner, not a classifier")
        if self._session.inputs != [INPUT] or OUTPUT not in self._session.outputs:
            names = f"{self._session.inputs} -> {self._session.outputs}"
            raise WeightsError(
                f"{self._name}: computes {names}, expected {INPUT} -> {OUTPUT}; export it again"
            )

    def prepare(self, image: AnyImage) -> Array:
        return self.preprocessing.to_graph_input(image)

    def largest_batch(self, shape: Sequence[int]) -> int:
        return max(1, min(self.batch_size, BATCH_PIXELS // (shape[0] * shape[1])))

    def run(
        self, images: Sequence[Array], *, first: int = 0, rows: int | None = None
    ) -> dict[str, Any]:
        """All outputs of the graph for images of one height and width; `rows` as in Engine."""
        del first
        batch = [*images, *[np.zeros_like(images[0])] * ((rows or 0) - len(images))]
        one = batch[0] if self.preprocessing.tiles is not None else batch[0][None]
        arrays = self._session({INPUT: np.stack(batch) if len(batch) > 1 else one})
        outputs = dict(zip(self._session.outputs, arrays, strict=True))
        outputs[OUTPUT] = outputs[OUTPUT].astype(np.float64)
        if outputs[OUTPUT].shape != (len(batch), len(self.classes)):
            raise RunError(
                f"{self._name}: returns probabilities of shape {list(outputs[OUTPUT].shape)} for "
                f"{len(batch)} images and {len(self.classes)} classes; export it again"
            )
        if DISTANCE in outputs:
            outputs[DISTANCE] = outputs[DISTANCE].astype(np.float64).tolist()
        return outputs


def _parse_classes(text: str) -> tuple[str, ...]:
    """Parse a JSON list of class names."""
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("classes are no list of names")
    if not names or len(set(names)) != len(names):
        raise ValueError("classes are missing, or two have one name")
    return tuple(names)


def _parse_thresholds(metadata: dict[str, str], classes: Sequence[str]) -> tuple[float, ...] | None:
    """Decision thresholds of a multi-label network; None for the others, and for older files."""
    activation = metadata.get("activation", "softmax")
    if activation in WITHOUT_THRESHOLDS:
        return None
    values = json.loads(metadata.get("thresholds", "null"))
    complete = isinstance(values, list) and len(values) == len(classes)
    if activation != "sigmoid" or not complete or not all(0 <= one <= 1 for one in values):
        raise ValueError(f"activation {activation} needs a threshold for each class")
    return tuple(map(float, values))
