"""The images of a calibration as a reference for later ones: answers, best scores and distances.

reference.json of a run folder has them without their images. Later images are counted in bins that
end at quantiles of the reference; an image at the end of a bin is in it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.atomic_files import write_text
from vit.config.settings import from_plain
from vit.errors import ConfigError
from vit.json_reader import read_json
from vit.score_calibration import ScoreCalibration

Array = NDArray[Any]
REFERENCE_FILE = "reference.json"
MAX_IMAGES = 5000
"""Images of a reference; of more a random choice."""
QUANTILES = (0.01, 0.02, 0.05, *(tenth / 10 for tenth in range(1, 10)), 0.95, 0.98, 0.99)
DIGITS = 6
"""Decimal digits of scores and distances, of the reference and of what is counted in its bins."""


@dataclass(frozen=True, kw_only=True)
class CalibrationReference:
    """What a network answered for the images of its calibration.

    Args:
        calibration: `calibration_digest` of the calibration that the scores are of.
        answers: Number of images that each class is the best one of.
        scores: Calibrated probability of the best class of each image, in order of size.
        distances: Distance from the training images, in order of size; empty without one.
    """

    calibration: str
    answers: Mapping[str, int] = field(hash=False)
    scores: tuple[float, ...]
    distances: tuple[float, ...] = ()

    @staticmethod
    def of(
        probabilities: Array,
        distances: Array | None,
        classes: Sequence[str],
        calibration: ScoreCalibration,
    ) -> "CalibrationReference":
        """That of calibrated probabilities, (images, classes), and distances, (images,)."""
        chosen = np.random.default_rng(0).permutation(len(probabilities))[:MAX_IMAGES]
        table = probabilities[chosen]
        answers = np.bincount(table.argmax(axis=1), minlength=len(classes))
        return CalibrationReference(
            calibration=calibration_digest(calibration),
            answers=dict(zip(classes, answers.tolist(), strict=True)),
            scores=in_order(table.max(axis=1)),
            distances=() if distances is None else in_order(distances[chosen]),
        )

    def counts(self) -> dict[str, Any]:
        """What `count` returns of its own images."""
        return {"answers": self.answers, **self._bins(self.scores, self.distances)}

    def count(self, outputs: Sequence[Any]) -> dict[str, Any]:
        """Answers by class, without those of 0, and images in each bin, of a network's outputs."""
        table = np.stack([one.probabilities for one in outputs])
        answers = np.bincount(table.argmax(axis=1), minlength=len(self.answers)).tolist()
        bins = self._bins(table.max(axis=1), [one.distance for one in outputs])
        pairs = zip(self.answers, answers, strict=True)
        return {"answers": {name: count for name, count in pairs if count}, **bins}

    def _bins(self, scores: Sequence[float] | Array, distances: Sequence[float]) -> dict[str, Any]:
        found = {"scores": bin_counts(scores, self.scores)}
        if self.distances:
            found["distances"] = bin_counts(distances, self.distances)
        return found

    def write(self, folder: Path) -> None:
        """Write it to a run folder."""
        write_text(folder / REFERENCE_FILE, json.dumps(asdict(self)) + "\n")


def in_order(values: Array) -> tuple[float, ...]:
    """The values rounded and in order of size."""
    return tuple(np.sort(values.astype(np.float64).round(DIGITS)).tolist())


def bin_edges(reference: Sequence[float]) -> Array:
    """Ends of the bins but the last one: different quantiles of `reference`, which is in order."""
    ranks = [int(share * (len(reference) - 1)) for share in QUANTILES]
    return np.unique([reference[rank] for rank in ranks])


def bin_counts(values: Sequence[float] | Array, reference: Sequence[float]) -> list[int]:
    edges = bin_edges(reference)
    places = np.searchsorted(edges, np.round(np.asarray(values, np.float64), DIGITS))
    counts: list[int] = np.bincount(places, minlength=len(edges) + 1).tolist()
    return counts


def calibration_digest(calibration: ScoreCalibration) -> str:
    """What tells one calibration from another."""
    text = json.dumps(calibration.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_reference(folder: Path, calibration: ScoreCalibration | None) -> CalibrationReference:
    """Read the reference of a run whose `calibration` is that of the network."""
    found = None
    if calibration is not None and (folder / REFERENCE_FILE).is_file():
        values = read_json(folder / REFERENCE_FILE)
        found = from_plain(CalibrationReference, values, REFERENCE_FILE, optional=("distances",))
    if calibration is None or found is None or found.calibration != calibration_digest(calibration):
        raise ConfigError(
            f"{folder} has no reference to compare images with: `vit calibrate RUN DATA` makes one "
            "of 50 labelled images or more that the network was not trained on"
        )
    return found
