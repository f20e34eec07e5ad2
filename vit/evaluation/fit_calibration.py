"""Everything that a calibration measures on labelled images: temperature, threshold and sets."""

from typing import NamedTuple

import torch
from torch import Tensor

from vit.evaluation.classification_metrics import calibration_error
from vit.evaluation.conformal_sets import set_levels, set_scores
from vit.evaluation.selective_prediction import (
    TARGET_PRECISION,
    needed_images,
    precision_threshold,
)
from vit.evaluation.temperature_scaling import FittedTemperature, fit_temperature
from vit.score_calibration import COVERAGES, ScoreCalibration
from vit.text import plural

FALSE_ALARMS = 0.01
"""Share of ordinary images that are unlike those of training."""
MIN_DISTANCES = 99
"""Images from which on a distance can be stated that this share exceeds."""


class FittedCalibration(NamedTuple):
    """A calibration, and what it was chosen on."""

    calibration: ScoreCalibration
    temperature: FittedTemperature
    error: float
    """Calibration error (ECE) of scores that the other images calibrated."""


def fit_calibration(
    logits: Tensor,
    targets: Tensor,
    *,
    distances: Tensor | None = None,
    target_precision: float = TARGET_PRECISION,
) -> FittedCalibration | None:
    """Calibrate a network on labelled images; arguments and None as for `fit_temperature`.

    `distances` of the images from those of training, (images,), give a largest one, which
    FALSE_ALARMS of images like these exceed; the threshold is of the images that do not.

    Threshold and sets of a single-label network are learned on scores as a calibration on the other
    images gives them.
    """
    fitted, images = fit_temperature(logits, targets), len(logits)
    if fitted is None:
        return None
    if targets.ndim == 2:
        plain = ScoreCalibration(temperature=fitted.scaling.temperature, images=images)
        decisions = fitted.held_out.sigmoid().flatten(), targets.double().flatten()
        return FittedCalibration(plain, fitted, calibration_error(*decisions))
    probabilities = fitted.held_out.softmax(dim=1)
    confidences, answers = probabilities.max(dim=1)
    error = calibration_error(confidences, answers == targets)
    farthest = None
    if distances is not None:
        (farthest,) = set_levels(distances, [1 - FALSE_ALARMS])
    if distances is not None and farthest is not None:
        confidences = torch.where(distances <= farthest, confidences, -1.0)
    found = precision_threshold(confidences, answers == targets, target_precision)
    calibration = ScoreCalibration(
        temperature=fitted.scaling.temperature,
        exponent=fitted.scaling.exponent,
        images=images,
        target_precision=target_precision,
        threshold=None if found is None else found.threshold,
        answered=0.0 if found is None else found.answered,
        farthest=farthest,
        set_levels=tuple(set_levels(set_scores(probabilities, targets), COVERAGES)),
    )
    return FittedCalibration(calibration, fitted, error)


def describe_calibration(fitted: FittedCalibration) -> list[str]:
    """Log lines about a calibration."""
    calibration, temperature = fitted.calibration, fitted.temperature
    lines = [
        f"calibration: temperature {calibration.temperature:.3f}, exponent "
        f"{calibration.exponent:.3f}; loss of held-out images {temperature.loss_before:.4f} "
        f"before, {temperature.loss_after:.4f} after"
        if temperature.loss_after < temperature.loss_before
        else "calibration: raw scores are kept, since no temperature is better on held-out images"
    ]
    target = calibration.target_precision
    share = "" if target is None else f"{100 * target:.4g}%"
    if target is not None and calibration.threshold is not None:
        lines.append(
            f"--reject answers from a score of {calibration.threshold:.4f} on, where at least "
            f"{share} of the answers are right: {calibration.answered:.1%} of these images"
        )
    elif target is not None:
        lines.append(
            f"note: no score from which on {share} of the answers are proven to be right: that "
            f"takes {needed_images(target):,} answers without a mistake, or more with some; "
            f"vit calibrate with more than these {plural(calibration.images, 'image')}, or a lower "
            "--target-precision"
        )
    return lines
