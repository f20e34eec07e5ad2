"""Reference outputs: a run computed by each implementation, to compare an export with."""

import math
from collections.abc import Sequence
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
from vit.tasks.task import calibrated_activation
from vit.weights.saved_model import LoadedRun

Runner = ExportedClassifier | ExportedCaptioner


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of a network for one image.

    Args:
        probabilities: (classes,) float64; empty without a classification head.
        caption: The caption, or None.
        thresholds: Decision thresholds of a multi-label network, or None.
    """

    probabilities: Array
    caption: str | None = None
    likelihood: float = 1.0
    thresholds: tuple[float, ...] | None = None

    def agreement(self, other: "ModelOutputs") -> float:
        """1 if the first class and the caption are equal, else 0.

        Of a multi-label network: classes that both name, as a share of those that either names.
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
        differences = np.abs(self.probabilities - other.probabilities)
        return max(abs(self.likelihood - other.likelihood), float(differences.max(initial=0.0)))


Outputs = list[ModelOutputs | str]
"""Outputs of each image, or its error."""


@torch.inference_mode()
def by_reference_code(
    run: LoadedRun, images: Sequence[str], *, reversed_channels: bool = False
) -> Outputs:
    """The saved preprocessing and the network, one image at a time, without the predictor.

    Args:
        run: A run on the CPU; computed in float32.
        reversed_channels: Exchange red and blue, as files of other tools may.
    """
    outputs: Outputs = []
    for path in images:
        try:
            deep = run.preprocessing.intensity_range
            pixels = run.preprocessing(read_image(path, intensity_range=deep)).unsqueeze(0)
        except BadImage as error:
            outputs.append(error.reason)
            continue
        outputs.append(_compute(run, pixels.flip(1) if reversed_channels else pixels))
    return outputs


def _compute(run: LoadedRun, pixels: Tensor) -> ModelOutputs | str:
    """Outputs for bytes, (1, channels, height, width)."""
    batch, model = run.preprocessing.normalise(pixels), run.model
    caption = None
    if isinstance(model, Captioner):
        assert run.tokenizer is not None, "a captioner has a tokenizer"
        logits, memory = model.encode_images(batch)
        ((caption, *_),) = generate_captions(model.decoder, memory, run.tokenizer, Search())
    else:
        logits = model(batch)
    probabilities = calibrated_activation(run)(logits.double())[0].numpy()
    if not np.isfinite(probabilities).all():
        return "the network overflowed in float32"
    if caption is None:
        return ModelOutputs(probabilities, thresholds=run.thresholds)
    return ModelOutputs(probabilities, caption.text, math.exp(caption.score))


def by_predictor(run: LoadedRun, images: Sequence[str]) -> Outputs:
    """Outputs of the Predictor in float32, as `vit predict` with the run."""
    predictor = Predictor(run, device="cpu", precision="fp32")
    predictions = predictor.stream(images, top_k=max(1, len(run.classes)), threshold=-math.inf)
    return [_outputs_of(one, run.classes, predictor.thresholds) for one in predictions]


def by_file(runner: Runner, images: Sequence[str], classes: Sequence[str]) -> Outputs:
    """Outputs of an exported file for the run's `classes`; 0 for a class that it lacks."""
    top_k = max(1, len(runner.classes))
    if isinstance(runner, ExportedCaptioner):
        return [_outputs_of(one, classes, None) for one in runner.stream(images, top_k=top_k)]
    thresholds = None
    if runner.thresholds is not None:
        own = dict(zip(runner.classes, runner.thresholds, strict=True))
        thresholds = tuple(own.get(name, 1.0) for name in classes)
    predictions = runner.stream(images, top_k=top_k, threshold=-math.inf)
    return [_outputs_of(one, classes, thresholds) for one in predictions]


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
