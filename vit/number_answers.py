"""What a network answers with numbers and choices: the columns of a row.

    age, age_low, age_high               a number, in units, and its interval where one was measured
    colour, colour_score, colour_set     a choice: the best class, its probability, and on request
                                         the classes of its prediction set

Stored in config.json of a run and in the metadata of exported files. Needs no torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.config.data_config import CHOICE_ENDS, ENDS
from vit.config.settings import from_plain
from vit.errors import ConfigError

Array = NDArray[Any]
Answer = float | str | tuple[str, ...]
"""A cell of a row: a number, a class, or the classes of a set."""

COVERAGE = 0.9
"""Coverage of the intervals in rows, unless another is asked for."""
ROUNDING = 1e-9


@dataclass(frozen=True)
class NumberAnswers:
    """Numbers and choices that a network answers with, the targets.

    Of a number, a network computes (value - mean) / std, or the same of the logarithm of the value.
    An interval is the value plus and minus its half width, or its logarithm plus and minus it. Of a
    choice it computes a logit for each class; a set has the classes that are more probable than 1 -
    `half_width`. Both are split conformal prediction, Lei et al., arXiv:1604.04173; Sadinle et al.,
    arXiv:1609.00451.

    Args:
        names: Of the targets.
        units: Of each target, or "".
        log: Whether the logarithm of a target is learned.
        half_widths: Coverage -> half the width of the interval of each target.
        classes: Of each target; empty of a number, and without choices.
        scaling: Temperature and exponent of the logits of each target; empty without a calibration.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    log: tuple[bool, ...]
    half_widths: Mapping[float, tuple[float, ...]] = field(default_factory=dict, hash=False)
    classes: tuple[tuple[str, ...], ...] = ()
    scaling: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        each = [self.units, self.mean, self.std, self.log, *self.half_widths.values()]
        counts = {*map(len, [*each, *filter(None, (self.classes, self.scaling))])}
        if not self.names or counts != {len(self.names)} or not all(one > 0 for one in self.std):
            raise ConfigError("answers must have a unit, mean, deviation and log for each target")

    @property
    def kind(self) -> str:
        """What the network does, for errors about options of classifiers."""
        if self.classes:
            return "answers several questions, and this is for classes of one"
        return "answers with numbers and has no classes"

    @property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """The classes of each target, none of a number."""
        return self.classes or ((),) * len(self.names)

    @property
    def parts(self) -> list[slice]:
        """The outputs of the network for each target."""
        ends = np.cumsum([len(one) or 1 for one in self.choices]).tolist()
        return [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Name of each output of the network."""
        pairs = zip(self.names, self.choices, strict=True)
        return tuple(
            output
            for name, classes in pairs
            for output in ([f"{name}={one}" for one in classes] or [name])
        )

    def check_coverage(self, coverage: float | None) -> None:
        """Refuse a coverage that the intervals were not measured for."""
        if coverage is not None and coverage not in self.half_widths:
            known = ", ".join(f"{one:g}" for one in self.half_widths) or "none"
            raise ConfigError(
                f"sets={coverage:g}: the intervals of this network are for {known}; validation "
                "images decide which"
            )

    def columns(self, coverage: float | None = None) -> dict[str, str]:
        """Name of each column of a row -> its unit."""
        ends = ENDS if (coverage or COVERAGE) in self.half_widths else ()
        of_choices = CHOICE_ENDS[: 1 if coverage is None else 2]
        targets = zip(self.names, self.units, self.choices, strict=True)
        return {
            column: unit
            for name, unit, classes in targets
            for column in (name, *_ends_of(name, of_choices if classes else ends))
        }

    def row(self, values: Sequence[float], coverage: float | None = None) -> dict[str, Answer]:
        """Column -> cell, of the values of an image: numbers in units, probabilities of classes."""
        widths = self.half_widths.get(coverage or COVERAGE)
        cells: dict[str, Answer] = {}
        for n, (name, part, classes) in enumerate(
            zip(self.names, self.parts, self.choices, strict=True)
        ):
            found = [float(value) for value in values[part]]
            if classes:
                best = max(range(len(found)), key=found.__getitem__)
                cells |= {name: classes[best], f"{name}_score": found[best]}
                if coverage is not None and widths is not None:
                    cells[f"{name}_set"] = self.prediction_set(n, found, widths[n])
                continue
            cells[name] = found[0]
            if widths is not None:
                low, high = self.interval(n, found[0], widths[n])
                cells |= zip(_ends_of(name, ENDS), (low, high), strict=True)
        return cells

    def prediction_set(
        self, target: int, probabilities: Sequence[float], level: float
    ) -> tuple[str, ...]:
        """The classes of at least 1 - `level`, the most probable first, which is in every set."""
        order = sorted(range(len(probabilities)), key=lambda one: -probabilities[one])
        within = [one for one in order if 1 - probabilities[one] <= level + ROUNDING]
        return tuple(self.choices[target][one] for one in within or order[:1])

    def truth(self, target: int, number: float) -> float | str | None:
        """A label as a cell of a row; None where the image has none."""
        if math.isnan(number):
            return None
        return self.choices[target][int(number)] if self.choices[target] else number

    def interval(self, target: int, value: float, half_width: float) -> tuple[float, float]:
        """Both ends, in units."""
        if self.log[target]:
            return value * math.exp(-half_width), value * math.exp(half_width)
        return value - half_width, value + half_width

    def standardise(self, values: Array) -> Array:
        """Units (..., targets) -> what the network computes; a logarithm of no number above 0 is
        not a number. Indices of classes stay as they are."""
        logs = np.log(np.where(values > 0, values, np.nan))
        scaled = np.where(self.log, logs, values)
        standard: Array = (scaled - np.array(self.mean)) / np.array(self.std)
        return standard

    def comparable(self, values: Array) -> Array:
        """Outputs in units, (outputs,) -> the same, whose numbers are standardised: they then
        differ as probabilities do."""
        found = np.array(values, dtype=np.float64)
        firsts = [part.start for part in self.parts]  # of a choice a class, which stays as it is
        found[firsts] = self.standardise(found[firsts])
        return found

    def best(self, values: Array) -> list[int]:
        """The output of each target, (outputs,), of a choice that of the best class."""
        return [part.start + int(np.argmax(values[part])) for part in self.parts]

    def describe(self) -> list[dict[str, Any]]:
        """Name and unit of each target, and the range of most training images or the classes, for
        JSON."""
        middles = [
            math.exp(one) if log else one for one, log in zip(self.mean, self.log, strict=True)
        ]
        ranges = [self.interval(n, one, 2 * self.std[n]) for n, one in enumerate(middles)]
        return [
            {"name": name, "classes": [*classes]}
            if classes
            else {"name": name, "unit": unit, "range": [*ends]}
            for name, unit, ends, classes in zip(
                self.names, self.units, ranges, self.choices, strict=True
            )
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without what is measured after the training."""
        measured, some = ("half_widths", "scaling"), {**vars(self)}
        if not self.classes:
            del some["classes"]
        return {name: list(value) for name, value in some.items() if name not in measured}

    def to_json(self) -> str:
        """Arguments of `from_dict`, for the metadata of a file."""
        scaling = [self.scaling] if self.scaling else []
        return json.dumps([self.to_dict(), self.half_widths, *scaling], ensure_ascii=False)

    @staticmethod
    def from_dict(values: Any, intervals: Any = None, scaling: Any = ()) -> "NumberAnswers":
        """Parse what `to_dict` returned, `half_widths` by coverage as text, and `scaling`."""
        optional = ("half_widths", "classes", "scaling")
        found = from_plain(NumberAnswers, values, "answers", optional=optional)
        widths = {float(key): (*one,) for key, one in (intervals or {}).items()}
        scales = tuple((float(a), float(b)) for a, b in scaling)
        return replace(found, half_widths=widths, scaling=scales)


def _ends_of(name: str, ends: Sequence[str]) -> list[str]:
    return [f"{name}_{end}" for end in ends]
