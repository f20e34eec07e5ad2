"""What a network answers with numbers: the columns of a row, in units, with intervals.

    age, age_low, age_high      a target, and its interval where one was measured

Stored in config.json of a run and in the metadata of exported files. Needs no torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.config.data_config import ENDS
from vit.config.settings import from_plain
from vit.errors import ConfigError

Array = NDArray[Any]

COVERAGE = 0.9
"""Coverage of the intervals in rows, unless another is asked for."""


@dataclass(frozen=True)
class NumberAnswers:
    """Numbers that a network answers with.

    A network computes (value - mean) / std, or the same of the logarithm of the value. An interval
    is the value plus and minus its half width, or its logarithm plus and minus it: split conformal
    prediction, Lei et al., arXiv:1604.04173.

    Args:
        names: Of the targets.
        units: Of each target, or "".
        log: Whether the logarithm of a target is learned.
        half_widths: Coverage -> half the width of the interval of each target.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    log: tuple[bool, ...]
    half_widths: Mapping[float, tuple[float, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        counts = {len(self.units), len(self.mean), len(self.std), len(self.log)}
        counts |= {len(one) for one in self.half_widths.values()}
        if not self.names or counts != {len(self.names)} or not all(one > 0 for one in self.std):
            raise ConfigError("answers must have a unit, mean, deviation and log for each target")

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
        pairs = zip(self.names, self.units, strict=True)
        return {column: unit for name, unit in pairs for column in (name, *_ends_of(name, ends))}

    def row(self, values: Sequence[float], coverage: float | None = None) -> dict[str, float]:
        """Column -> cell, of the values of an image in units."""
        widths = self.half_widths.get(coverage or COVERAGE)
        cells = {}
        for n, (name, value) in enumerate(zip(self.names, values, strict=True)):
            cells[name] = float(value)
            if widths is not None:
                low, high = self.interval(n, float(value), widths[n])
                cells |= zip(_ends_of(name, ENDS), (low, high), strict=True)
        return cells

    def interval(self, target: int, value: float, half_width: float) -> tuple[float, float]:
        """Both ends, in units."""
        if self.log[target]:
            return value * math.exp(-half_width), value * math.exp(half_width)
        return value - half_width, value + half_width

    def standardise(self, values: Array) -> Array:
        """Units (..., targets) -> what the network computes; a logarithm of no number above 0 is
        not a number."""
        logs = np.log(np.where(values > 0, values, np.nan))
        scaled = np.where(self.log, logs, values)
        standard: Array = (scaled - np.array(self.mean)) / np.array(self.std)
        return standard

    def describe(self) -> list[dict[str, Any]]:
        """Name and unit of each target, and the range of most training images, for JSON."""
        middles = [
            math.exp(one) if log else one for one, log in zip(self.mean, self.log, strict=True)
        ]
        ranges = [self.interval(n, one, 2 * self.std[n]) for n, one in enumerate(middles)]
        return [
            {"name": name, "unit": unit, "range": [*ends]}
            for name, unit, ends in zip(self.names, self.units, ranges, strict=True)
        ]

    def with_intervals(self, half_widths: Mapping[float, Sequence[float]]) -> "NumberAnswers":
        """The same with intervals."""
        return replace(self, half_widths={key: (*one,) for key, one in half_widths.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the intervals."""
        return {name: list(value) for name, value in vars(self).items() if name != "half_widths"}

    def to_json(self) -> str:
        """Arguments of `from_dict`, for the metadata of a file."""
        return json.dumps([self.to_dict(), self.half_widths], ensure_ascii=False)

    @staticmethod
    def from_dict(values: Any, intervals: Any = None) -> "NumberAnswers":
        """Parse what `to_dict` returned, and `half_widths` by coverage as text."""
        found = from_plain(NumberAnswers, values, "answers", optional=("half_widths",))
        return found.with_intervals({float(key): one for key, one in (intervals or {}).items()})


def _ends_of(name: str, ends: Sequence[str]) -> list[str]:
    return [f"{name}_{end}" for end in ends]
