"""Answers of a file of `vit export` for an evaluation, as `Predictor` returns those of a run."""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from vit.errors import BadImage, ConfigError
from vit.exported.load_exported import exported_engine, load_exported
from vit.exported.onnx_classifier import OUTPUT, ExportedClassifier
from vit.inference.predictor import ImageOutput, PathLike, Predictor
from vit.output.prediction_results import Prediction, resolve_top_k
from vit.precision import Precision
from vit.tasks.task import get_task
from vit.text import Notify, printable
from vit.weights.saved_model import CONFIG_FILE, LoadedRun

TASKS = {"softmax": "classify", "sigmoid": "multilabel"}
"""Activation in the metadata of a file -> the task that evaluates it."""


class ExportedPredictor:
    """The part of `Predictor` that an evaluation needs, computed by an exported classifier.

    The numbers are those of `vit predict` with the file.

    Attributes:
        source: Folder of the run that the file was exported from; None where it is not here.
    """

    n_best, caption_generator = 0, None
    device = torch.device("cpu")
    precision: Precision = "fp32"
    """Of the arithmetic of metrics; the file has its own."""

    def __init__(self, path: PathLike, *, notify: Notify, **settings: Any) -> None:
        name = os.fspath(path)
        network = load_exported(name, **settings)
        if not isinstance(network, ExportedClassifier):
            raise ConfigError(
                f"{printable(name)} writes captions, which are measured with the run: vit evaluate "
                "RUN DATA"
            )
        self.network = network
        activation = network.metadata.get("activation", "softmax")
        if activation not in TASKS:
            raise ConfigError(
                f"{printable(name)}: its outputs are no probabilities of classes; evaluate the run "
                "that it was exported from"
            )
        self.task = get_task(TASKS[activation])
        self.classes, self.thresholds = network.classes, network.thresholds
        self.shares, self.calibration = network.shares, network.calibration
        source = Path(network.metadata.get("source_run", ""))
        self.source = source if (source / CONFIG_FILE).is_file() else None
        if self.source is None:
            notify(
                f"note: the run that {printable(name)} was exported from, {printable(source)}, is "
                "not here: images of its training are not left out"
            )

    def batches(self, images: Sequence[str]) -> Iterator[list[ImageOutput]]:
        """Iterate over the outputs of images by their paths, in order."""
        named = zip(images, self.network.probabilities(images), strict=True)
        while part := [*islice(named, self.network.batch_size)]:
            yield [
                ImageOutput(path, None, row.reason)
                if isinstance(row, BadImage)
                else ImageOutput(path, torch.from_numpy(row).double())
                for path, row in part
            ]

    def to_predictions(
        self, outputs: Iterable[ImageOutput], top_k: int | None = None
    ) -> list[Prediction]:
        """Predictions of the outputs of a batch."""
        most, thresholds = resolve_top_k(self.classes, self.thresholds, top_k, None)
        return [
            Prediction(output.image, error=output.error)
            if output.probabilities is None
            else self.network.to_prediction(
                output.image, {OUTPUT: output.probabilities.numpy()}, most, thresholds
            )
            for output in outputs
        ]


def open_evaluated(
    model: PathLike | LoadedRun, *, notify: Notify, **settings: Any
) -> Predictor | ExportedPredictor:
    """Open a network whose answers are measured."""
    if not isinstance(model, LoadedRun) and (engine := exported_engine(model)):
        return ExportedPredictor(model, engine=engine, notify=notify, **settings)
    return Predictor(model, notify=notify, **settings)
