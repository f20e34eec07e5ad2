"""Reference outputs: answers of a run by each implementation, to compare an export with."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vit.data.image_io import read_image
from vit.errors import BadImage
from vit.exported.onnx_captioner import ExportedCaptioner
from vit.exported.onnx_classifier import ExportedClassifier
from vit.exported.onnx_session import Array
from vit.generation.generate import generate_captions
from vit.generation.generation_config import Search
from vit.inference.predictor import Predictor
from vit.model.captioner import Captioner
from vit.output.prediction_results import Prediction
from vit.weights.saved_model import LoadedRun

Runner = ExportedClassifier | ExportedCaptioner


@dataclass(frozen=True)
class ModelOutputs:
    """What one way says of one image.

    Args:
        probabilities: Of the run's classes, (classes,) float64; of none from a mere captioner.
        caption: What it writes, or None.
        likelihood: The probability of the caption, by the network.
        thresholds: From which a class is named, where an image may have several; or None.
    """

    probabilities: Array
    caption: str | None = None
    likelihood: float = 1.0
    thresholds: tuple[float, ...] | None = None

    def agreement(self, other: "ModelOutputs") -> float:
        """1 where both name the same class first, and write the same; else 0.

        Where an image may have several classes, the share that both name of those that one does.
        """
        first, second = (one.probabilities for one in (self, other))
        if self.thresholds is not None and other.thresholds is not None:
            ours, theirs = first >= self.thresholds, second >= other.thresholds
            named = (ours | theirs).sum()
            return float((ours & theirs).sum() / named) if named else 1.0
        return float(
            self.caption == other.caption
            and (not len(first) or bool(first.argmax() == second.argmax()))
        )

    def difference(self, other: "ModelOutputs") -> float:
        """The largest difference of two probabilities."""
        apart = np.abs(self.probabilities - other.probabilities)
        return max(abs(self.likelihood - other.likelihood), float(apart.max(initial=0.0)))


Answers = list[ModelOutputs | str]
"""Of each image, or why there is none."""


@torch.inference_mode()
def by_reference_code(
    run: LoadedRun, images: Sequence[str], *, reversed_channels: bool = False
) -> Answers:
    """The saved preprocessing and the network, one image at a time, without the predictor.

    Args:
        run: On the CPU; computed in float32.
        images: Paths.
        reversed_channels: Take blue for red, as files of other tools may.
    """
    said: Answers = []
    for path in images:
        try:
            pixels = run.preprocessing(read_image(path)).unsqueeze(0)
        except BadImage as error:
            said.append(error.reason)
            continue
        said.append(_see(run, pixels.flip(1) if reversed_channels else pixels))
    return said


def _see(run: LoadedRun, pixels: Tensor) -> ModelOutputs | str:
    """Of bytes, (1, channels, height, width)."""
    batch, model = run.preprocessing.normalise(pixels), run.model
    caption = None
    if isinstance(model, Captioner):
        assert run.tokenizer is not None, "a captioner has a tokenizer"
        logits, memory = model.encode_images(batch)
        ((caption, *_),) = generate_captions(model.decoder, memory, run.tokenizer, Search())
    else:
        logits = model(batch)
    exact = logits[0].double()
    probabilities = (exact.softmax(dim=0) if run.thresholds is None else exact.sigmoid()).numpy()
    if not np.isfinite(probabilities).all():
        return "the network overflowed in float32"
    if caption is None:
        return ModelOutputs(probabilities, thresholds=run.thresholds)
    return ModelOutputs(probabilities, caption.text, math.exp(caption.score))


def by_predictor(run: LoadedRun, images: Sequence[str]) -> Answers:
    """What `vit predict` with the run says, in float32."""
    predictor = Predictor(run, device="cpu", precision="fp32")
    said = predictor.stream(images, top_k=max(1, len(run.classes)), threshold=0.0)
    return _named(said, run.classes, predictor.thresholds)


def by_file(runner: Runner, images: Sequence[str], classes: Sequence[str]) -> Answers:
    """What an exported file says of the run's `classes`; nothing of one that it does not know."""
    top_k = max(1, len(runner.classes))
    if isinstance(runner, ExportedCaptioner):
        return _named(runner.stream(images, top_k=top_k), classes, None)
    said = runner.stream(images, top_k=top_k, threshold=0.0)
    return _named(said, classes, thresholds_of(runner, classes))


def thresholds_of(runner: ExportedClassifier, classes: Sequence[str]) -> tuple[float, ...] | None:
    """Those of the file for `classes`; 1 for one that it does not know."""
    if runner.thresholds is None:
        return None
    own = dict(zip(runner.classes, runner.thresholds, strict=True))
    return tuple(own.get(name, 1.0) for name in classes)


def _named(
    predictions: Iterable[Prediction],
    classes: Sequence[str],
    thresholds: tuple[float, ...] | None,
) -> Answers:
    return [_said(prediction, classes, thresholds) for prediction in predictions]


def _said(
    prediction: Prediction, classes: Sequence[str], thresholds: tuple[float, ...] | None
) -> ModelOutputs | str:
    if prediction.error is not None:
        return prediction.error
    scores = dict(prediction.predictions)
    probabilities = np.array([scores.get(name, 0.0) for name in classes], dtype=np.float64)
    if prediction.score is None:
        return ModelOutputs(probabilities, thresholds=thresholds)
    return ModelOutputs(probabilities, prediction.caption, math.exp(prediction.score))
