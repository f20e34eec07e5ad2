"""Calibration of a network's scores: fitted on validation images, stored with the network.

    probabilities = softmax(-((max z - z) / temperature)^exponent)     z: logits
                  = sigmoid(z / temperature)                           of a multi-label network
    unknown       = confidence < threshold, or distance > farthest
    confidence    = the highest probability
                  = the product over classes of the probability of the decision, if multi-label
    set           = the classes whose score (`inclusion_scores`) is at most the level of a coverage

vit/evaluation/fit_calibration.py fits it, with the sources of threshold and sets. config.json of a
run folder has it under "vit", "calibration", exported files in their metadata. The order of the
classes does not change, so the answers stay the same.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import takewhile
from typing import Any

from vit.class_tree import TARGET
from vit.config.settings import from_plain
from vit.errors import ConfigError

SCALING = ("temperature", "images", "exponent")
"""Fields that every calibration has."""
OPTIONAL = ("class_thresholds", "class_set_levels", "multilabel", "groups")
"""Fields that are stored only if they have a value, so most calibrations lack them."""
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
        exponent: Power of the gaps between the best logit and the others, above 0; 1 of a
            multi-label network.
        target_precision: Share of the answers from `threshold` on that is right; None of a
            multi-label network of an older version, which has none of the fields below.
        threshold: Lowest confidence of an answer; None if the images prove none.
        farthest: Largest distance of an image (vit/model/feature_distance.py) that is like those of
            training; None without distances.
        set_levels: Level of the prediction sets for each of COVERAGES; None for all classes.
        class_thresholds: Lowest confidence of answers of single classes, by name, each of which
            keeps `target_precision` on its own; None if the images prove none. `threshold` is then
            of the answers of the other classes.
        class_set_levels: For each of COVERAGES the level of each class, if the sets cover each
            class on its own; None if they cover all classes together. Empty without sets.
        groups: Number of groups of the images, for new ones of which threshold and sets hold; None
            of independent images.
    """

    temperature: float
    images: int
    exponent: float = 1.0
    target_precision: float | None = None
    threshold: float | None = None
    answered: float = 0.0
    farthest: float | None = None
    set_levels: tuple[float | None, ...] | None = None
    class_thresholds: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    class_set_levels: tuple[tuple[float | None, ...] | None, ...] = ()
    multilabel: bool = False
    groups: int | None = None

    @property
    def scales(self) -> bool:
        """Whether it changes scores: where no temperature is better, raw ones are kept."""
        return (self.temperature, self.exponent) != (1.0, 1.0)

    @property
    def rejects(self) -> bool:
        """Whether answers of any class are proven to keep the target precision."""
        thresholds = (self.threshold, *self.class_thresholds.values())
        return any(threshold is not None for threshold in thresholds)

    @property
    def promise(self) -> str:
        """How many of the answers with `reject` are right."""
        if not self.rejects:
            return "how many of the answers are right is not proven"
        new = "" if self.groups is None else ", in a new group"
        return f"at least {100 * (self.target_precision or 0):.4g}% of the answers are right{new}"

    def without_selection(self) -> "ScoreCalibration":
        """The same scaling of logits, without threshold and prediction sets."""
        return ScoreCalibration(**{name: getattr(self, name) for name in SCALING})

    def reject_reason(
        self, confidence: float, distance: float | None = None, answer: str | None = None
    ) -> str | None:
        """Why an answer of this probability is not given, or None."""
        if self.farthest is not None and distance is not None and not distance <= self.farthest:
            return UNLIKE
        if not self.rejects:
            return None
        threshold = self.threshold
        if answer is not None and answer in self.class_thresholds:
            threshold = self.class_thresholds[answer]
        return UNCERTAIN if threshold is None or confidence < threshold else None

    def prediction_set(
        self, order: Sequence[int], probabilities: Sequence[float], coverage: float
    ) -> list[int]:
        """Classes in the prediction set of an image, the most probable first.

        It is never empty, except of a multi-label network, whose image may have no class.
        """
        scores = zip(order, self.inclusion_scores(probabilities), strict=True)
        place = coverage_place(coverage)
        if place is not None and place < len(self.class_set_levels):
            levels = self.class_set_levels[place]
            if levels is not None:  # the sets cover each class on its own
                return [index for index, score in scores if is_within(score, levels[index])]
        level = self.set_level(coverage)
        return [index for index, _ in takewhile(lambda pair: is_within(pair[1], level), scores)]

    def inclusion_scores(self, probabilities: Iterable[float]) -> Iterator[float]:
        """Score of each class, which rises; of `probabilities`, the highest first.

        The sum of the probabilities before a class and a penalty of its rank, or for a multi-label
        network 1 minus its probability.
        """
        before = 0.0
        for rank, probability in enumerate(probabilities):
            if self.multilabel:
                yield 1 - probability
            else:
                yield before + SET_PENALTY * max(0, rank - FREE_CLASSES)
            before += probability

    def set_level(self, coverage: float) -> float | None:
        """Level of the next higher coverage that has one; None for the set of all classes."""
        place = coverage_place(coverage)
        return None if self.set_levels is None or place is None else self.set_levels[place]

    def select(
        self,
        classes: Sequence[str],
        order: Sequence[int],
        probabilities: Sequence[float],
        distance: float | None,
        *,
        thresholds: Sequence[float] | None = None,
        reject: bool = False,
        sets: float | None = None,
    ) -> dict[str, Any]:
        """Fields of a Prediction: the reason if its answer is `unknown`, and its prediction set."""
        found: dict[str, Any] = {}
        if reject:
            confidence, answer = probabilities[0], classes[order[0]]
            if thresholds is not None:
                ordered = [thresholds[index] for index in order]
                confidence = decision_confidence(probabilities, ordered)
            found["unknown"] = self.reject_reason(confidence, distance, answer)
        if sets is not None:
            places = self.prediction_set(order, probabilities, sets)
            found["prediction_set"] = tuple(classes[index] for index in places)
        return found

    def check_classes(self, classes: Sequence[str]) -> None:
        """Check that the calibration is of a network with `classes`."""
        rows = [row for row in self.class_set_levels if row is not None]
        if not self.class_thresholds.keys() <= {*classes} or any(
            len(row) != len(classes) for row in rows
        ):
            raise ValueError("calibration is of other classes")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; inverse of `from_dict`."""
        if self.target_precision is None:
            return {name: getattr(self, name) for name in SCALING}
        values = {**asdict(self), "set_levels": list(self.set_levels or ())}
        values["class_thresholds"] = dict(self.class_thresholds)
        values["class_set_levels"] = [
            None if row is None else list(row) for row in self.class_set_levels
        ]
        return {name: one for name, one in values.items() if name not in OPTIONAL or one}

    @staticmethod
    def from_dict(values: Any) -> "ScoreCalibration":
        """Parse what `to_dict` returned."""
        optional = {field.name for field in fields(ScoreCalibration)} - {*SCALING}
        if isinstance(values, dict) and values.keys() > {*SCALING}:
            optional = {*OPTIONAL}
        found = from_plain(ScoreCalibration, values, "calibration", optional=optional)
        found.check_ranges()
        return found

    def check_ranges(self) -> None:
        """Refuse numbers that no calibration measures."""
        shares = [self.target_precision, self.threshold, *self.class_thresholds.values()]
        rows = [row for row in self.class_set_levels if row is not None]
        levels = [level for row in (self.set_levels or (), *rows) for level in row]
        valid = (
            self.temperature > 0
            and self.exponent > 0
            and self.images >= 0
            and (self.groups is None or self.groups >= 1)
            and (self.target_precision is None) == (self.set_levels is None)
            and all(share is None or 0 <= share <= 1 for share in (self.answered, *shares))
            and all(level is None or level >= 0 for level in levels)
            and all(len(row) > 1 for row in rows)  # of classes
            and all(
                len(table) in (0, len(COVERAGES))
                for table in (self.set_levels or (), self.class_set_levels)
            )
        )
        if not valid:
            raise ConfigError(
                "calibration must have a temperature and an exponent above 0, shares from 0 to 1, "
                f"and {len(COVERAGES)} levels of sets"
            )


def node_threshold(calibration: ScoreCalibration | None) -> float:
    """Least probability of a node that is an answer: the target, where none is proven."""
    if calibration is None:
        return TARGET
    found = (calibration.threshold, calibration.target_precision, TARGET)
    return next(one for one in found if one is not None)


def check_selection(
    calibration: ScoreCalibration | None, *, reject: bool, sets: float | None
) -> None:
    """Check that a network can answer `unknown`, or with sets of the coverage `sets`."""
    if not reject and sets is None:
        return
    flag = "reject" if reject else f"sets={sets:g}"
    if sets is not None and not 0 < sets <= COVERAGES[-1]:
        raise ConfigError(f"sets={sets:g}: a coverage above 0 and at most {COVERAGES[-1]:g}")
    if calibration is None or calibration.set_levels is None:
        raise ConfigError(
            f"{flag}: these scores have no calibration with a threshold and sets; "
            "`vit calibrate RUN DATA` measures it on 50 labelled images or more that the network "
            "was not trained on, for its own patch size and without merging of tokens"
        )
    units, number = "images", calibration.images
    if calibration.groups is not None:
        units, number = "groups of images", calibration.groups
    if reject and not calibration.rejects and calibration.farthest is None:
        raise ConfigError(
            "reject: no score is proven to be right for "
            f"{100 * (calibration.target_precision or 0):.4g}% of the answers by the "
            f"{number} {units} of the calibration; vit calibrate RUN DATA with more {units}, or "
            "with a lower --target-precision; without --reject, --threshold P hides unsure answers"
        )


def check_decisions(
    thresholds: Sequence[float] | None, *, reject: bool, threshold: float | None
) -> None:
    """Check that `reject` is for the decisions of a multi-label network it was proven for."""
    if reject and thresholds is not None and threshold is not None:
        raise ConfigError(
            f"reject with threshold={threshold:g}: what is right was measured at the thresholds of "
            "the network's classes; leave one of the two out"
        )


def is_within(score: float, level: float | None) -> bool:
    """Whether a class of this score is in a set of this level."""
    return level is None or score <= level + ROUNDING


def coverage_place(coverage: float) -> int | None:
    """Place in COVERAGES of the next one that is at least `coverage`, or None."""
    return next((n for n, one in enumerate(COVERAGES) if one >= coverage - ROUNDING), None)


def decision_confidence(probabilities: Iterable[float], thresholds: Iterable[float]) -> float:
    """Probability that all classes of a multi-label answer are right, were they independent."""
    pairs = zip(probabilities, thresholds, strict=True)
    return math.prod(one if one >= least else 1 - one for one, least in pairs)


def rescale_thresholds(thresholds: Sequence[float], factor: float) -> tuple[float, ...]:
    """Thresholds of sigmoid(logits) that decide as `thresholds` of sigmoid(logits / factor).

    sigmoid(z / T) >= t is the same as sigmoid(z) >= sigmoid(T logit(t)).
    """
    return tuple(
        value if value in (0.0, 1.0) else 1 / (1 + ((1 - value) / value) ** factor)
        for value in thresholds
    )
