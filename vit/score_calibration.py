"""Calibration of a network's scores: fitted on validation images, stored with the network.

    probabilities = softmax(-((max z - z) / temperature)^exponent)     z: logits
                  = sigmoid(z / temperature)                           of a multi-label network
    unknown       = highest probability < threshold, or distance > farthest
    set           = the first classes, until the sum of those before exceeds the level of a coverage

vit/evaluation/fit_calibration.py fits it, with the sources of threshold and sets. config.json of a
run folder has it under "vit", "calibration", exported files in their metadata. The order of the
classes does not change, so the answers stay the same.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from vit.errors import ConfigError

SCALING = ("temperature", "images", "exponent")
"""Fields that every calibration has."""
COVERAGES = (*(percent / 100 for percent in range(50, 100)), 0.995, 0.999)
"""Coverages of prediction sets that have a level."""
SET_PENALTY, FREE_CLASSES = 0.01, 5
"""Added to the score of a class for each class before it, beyond the first ones; lambda and k of
RAPS."""
ROUNDING = 1e-9
UNCERTAIN = "uncertain"
UNLIKE = "unlike the training images"
"""Reasons of an answer `unknown`."""


@dataclass(frozen=True, kw_only=True)
class ScoreCalibration:
    """What a calibration measured.

    Args:
        temperature: Divisor of the logits, above 0.
        images: Number of images that it was fitted on.
        exponent: Power of the gaps between the best logit and the others, above 0; 1 of a
            multi-label network.
        target_precision: Share of the answers from `threshold` on that is right; None of a
            multi-label network, which has none of the fields below.
        threshold: Lowest confidence of an answer; None if the images prove none.
        answered: Share of the images that reached it.
        farthest: Largest distance of an image (vit/model/feature_distance.py) that is like those of
            training; None without distances.
        set_levels: Level of the prediction sets for each of COVERAGES; None for all classes.
    """

    temperature: float
    images: int
    exponent: float = 1.0
    target_precision: float | None = None
    threshold: float | None = None
    answered: float = 0.0
    farthest: float | None = None
    set_levels: tuple[float | None, ...] | None = None

    def reject_reason(self, confidence: float, distance: float | None = None) -> str | None:
        """Why an answer of this probability is not given, or None.

        Args:
            confidence: Highest probability.
            distance: Of the image from those of training, if the network has distances.
        """
        if self.farthest is not None and distance is not None and not distance <= self.farthest:
            return UNLIKE
        return UNCERTAIN if self.threshold is None or confidence < self.threshold else None

    def set_size(self, probabilities: Iterable[float], coverage: float) -> int:
        """Number of classes in the prediction set of an image, at least 1.

        Args:
            probabilities: Of all classes, the most probable first.
            coverage: Probability of the true class to be in the set.
        """
        level, before, size = self.set_level(coverage), 0.0, 0
        for rank, probability in enumerate(probabilities):
            score = before + SET_PENALTY * max(0, rank - FREE_CLASSES)
            if level is not None and score > level + ROUNDING:
                break
            before, size = before + probability, rank + 1
        return size

    def set_level(self, coverage: float) -> float | None:
        """Level of the next higher coverage that has one; None for the set of all classes."""
        pairs = zip(COVERAGES, self.set_levels or (), strict=True)
        return next((level for share, level in pairs if share >= coverage - ROUNDING), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; inverse of `from_dict`."""
        if self.target_precision is None:
            return {name: getattr(self, name) for name in SCALING}
        return {**asdict(self), "set_levels": list(self.set_levels or ())}

    @staticmethod
    def from_dict(values: Any) -> "ScoreCalibration":
        """Parse what `to_dict` returned.

        Raises:
            ValueError: A name or a value is not one of a calibration.
        """
        names = {field.name for field in fields(ScoreCalibration)}
        if not isinstance(values, dict) or values.keys() not in (names, {*SCALING}):
            raise ValueError(f"calibration must have {', '.join(sorted(names))}")
        temperature, images, exponent = (values[name] for name in SCALING)
        if not all(_is_number(one) and 0 < one < math.inf for one in (temperature, exponent)):
            raise ValueError("temperature and exponent of a calibration must be numbers above 0")
        if not _is_number(images) or images < 0:
            raise ValueError("calibration must have a number of images")
        plain = ScoreCalibration(
            temperature=float(temperature), images=int(images), exponent=float(exponent)
        )
        if len(values) == len(SCALING):
            return plain
        target, threshold = values["target_precision"], values["threshold"]
        farthest = values["farthest"]
        if farthest is not None and not _is_number(farthest):
            raise ValueError("the farthest distance of a calibration must be a number")
        levels = values["set_levels"]
        shares = [target, values["answered"], *([] if threshold is None else [threshold])]
        if not all(_is_number(share) and 0 <= share <= 1 for share in shares):
            raise ValueError("shares and the threshold of a calibration must be from 0 to 1")
        if not isinstance(levels, list) or len(levels) != len(COVERAGES):
            raise ValueError(f"calibration must have {len(COVERAGES)} levels of sets")
        if not all(level is None or (_is_number(level) and level >= 0) for level in levels):
            raise ValueError("the levels of sets of a calibration must be numbers of at least 0")
        return replace(
            plain,
            target_precision=float(target),
            threshold=None if threshold is None else float(threshold),
            answered=float(values["answered"]),
            farthest=None if farthest is None else float(farthest),
            set_levels=tuple(None if level is None else float(level) for level in levels),
        )


def check_selection(
    calibration: ScoreCalibration | None, *, reject: bool, sets: float | None
) -> None:
    """Check that a network can answer `unknown`, or with sets of the coverage `sets`.

    Raises:
        ConfigError: It has not measured what that needs.
    """
    if not reject and sets is None:
        return
    flag = "reject" if reject else f"sets={sets:g}"
    if sets is not None and not 0 < sets <= COVERAGES[-1]:
        raise ConfigError(f"sets={sets:g}: a coverage above 0 and at most {COVERAGES[-1]:g}")
    if calibration is None or calibration.set_levels is None:
        raise ConfigError(
            f"{flag}: these scores have no calibration with a threshold and sets; for a run of one "
            "class an image, `vit calibrate RUN DATA` measures it"
        )
    if reject and calibration.threshold is None:
        raise ConfigError(
            f"reject: no score is proven to be right {calibration.target_precision:.4g} of the "
            f"time by the {calibration.images} images of the calibration; vit calibrate RUN DATA "
            "with more images, or with a lower --target-precision"
        )


def rescale_thresholds(thresholds: Sequence[float], factor: float) -> tuple[float, ...]:
    """Thresholds of sigmoid(logits) that decide as `thresholds` of sigmoid(logits / factor).

    sigmoid(z / T) >= t is the same as sigmoid(z) >= sigmoid(T logit(t)).
    """
    return tuple(
        value if value in (0.0, 1.0) else 1 / (1 + ((1 - value) / value) ** factor)
        for value in thresholds
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
