"""Charts of a report: curves, scatter plots and reliability diagrams; a template draws the SVG."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vit.evaluation.metric_rows import metric_of

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Marks of an axis of shares."""
BINS = 15
"""Bins of `vit.evaluation.classification_metrics.reliability`."""
STYLES = ("val", "train")
"""Classes in the page's style: of the last curve, and of one to compare it with."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What the macro `chart` draws, in pixels from the upper left corner.

    Args:
        curves: Label, class in the page's style, and the (x, y) of each value.
        notes: A text for each point, shown under the pointer; empty without.
        band: The corners of an area behind the points.
    """

    width: ClassVar = 420
    height: ClassVar = 260
    left: ClassVar = 54
    right: ClassVar = 402
    top: ClassVar = 46
    bottom: ClassVar = 220
    dot: ClassVar[float] = 5

    title: str
    description: str
    ticks: Sequence[tuple[float, str]]
    marks: Sequence[tuple[float, object]]
    axis: str
    best: float | None = None
    curves: Sequence[tuple[str, str, Sequence[tuple[float, float]]]] = ()
    points: Sequence[tuple[float, float, str]] = ()
    notes: Sequence[str] = ()
    lines: Sequence[tuple[float, float, float, float, str]] = ()
    bars: Sequence[tuple[float, float, float, float]] = ()
    band: Sequence[tuple[float, float]] = ()


class SquareChart(Chart):
    """A chart of many points, as high as wide."""

    height: ClassVar = 434
    bottom: ClassVar = 394
    dot: ClassVar = 2.5


def line_chart(
    title: str,
    epochs: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    *,
    best: int,
    unit: str = "",
) -> Chart:
    values = [value for curve in curves.values() for value in curve]
    low = 0.0 if 0 <= min(values) < 0.6 * max(values) else min(values)
    ticks = [tick for tick in nice_ticks(low, max(values)) if unit != "%" or 0 <= tick <= 1]
    to_y = _scale(min(ticks[0], low), max(ticks[-1], *values), Chart.bottom, Chart.top)
    to_x = _scale(epochs[0], epochs[-1], Chart.left, Chart.right)
    x = [to_x(epoch) for epoch in epochs]
    ends = (f"{label}: {_label(curve[-1], unit)} at the end" for label, curve in curves.items())
    return Chart(
        title=title,
        description=f"{title} over {epochs[-1]} epochs; " + "; ".join(ends),
        ticks=[(to_y(tick), _label(tick, unit)) for tick in ticks],
        marks=[(to_x(epoch), epoch) for epoch in epoch_ticks(epochs[0], epochs[-1])],
        axis="epoch",
        best=to_x(best),
        curves=[
            (label, style, [*zip(x, map(to_y, curve), strict=True)])
            for (label, curve), style in zip(
                curves.items(), STYLES[: len(curves)][::-1], strict=True
            )
        ],
    )


def reliability_chart(
    title: str,
    bins: Sequence[tuple[int, float, float, tuple[float, float]]],
) -> Chart:
    """Accuracy against confidence with intervals, and the share of the images in each of the `bins`
    of `vit.evaluation.classification_metrics.reliability`."""
    to_x = _scale(0, 1, Chart.left, Chart.right)
    described = ", ".join(f"{mean:.0%}: {hits:.0%} of {count}" for count, mean, hits, _ in bins)
    total = sum(count for count, *_ in bins)
    bars = []
    for count, mean, *_ in bins:
        place = max(math.ceil(mean * BINS - 1e-9) - 1, 0)
        x, y = to_x(place / BINS), share_to_y(count / total)
        bars.append((x + 1, y, round(to_x((place + 1) / BINS) - x - 2, 1), Chart.bottom - y))
    return Chart(
        title=title,
        description=f"{title}, by score: {described}",
        ticks=share_ticks(),
        marks=[(to_x(share), f"{share:.0%}") for share in SHARES],
        axis="score",
        points=[(to_x(mean), share_to_y(hits), "val") for _, mean, hits, _ in bins],
        notes=[
            f"score {mean:.1%}: {hits:.1%} of {count:,} (95% interval {low:.1%} to {high:.1%})"
            for count, mean, hits, (low, high) in bins
        ],
        bars=bars,
        lines=[
            (to_x(0), share_to_y(0), to_x(1), share_to_y(1), "train"),
            *(
                (to_x(mean), share_to_y(low), to_x(mean), share_to_y(high), "val")
                for _, mean, _, (low, high) in bins
            ),
        ],
    )


def scatter_chart(
    true: Sequence[float], predicted: Sequence[float], *, half_width: float | None, log: bool
) -> Chart:
    """Predicted against true numbers, with the line on which they are equal, and a band of
    `half_width` around it; with `log` on logarithmic axes, of numbers above 0."""
    scale = math.log if log else float
    numbers = [*true, *predicted] or [1.0]
    first, last = min(numbers), max(numbers)
    low, high = scale(first), scale(last)
    ticks = (log_ticks if log else nice_ticks)(first, last)
    marks = [tick for tick in ticks if first <= tick <= last]
    to_x = _scale(low, high, Chart.left, Chart.right)
    to_y = _scale(low, high, SquareChart.bottom, Chart.top)
    band = []
    if half_width is not None:
        above, below = min(low + half_width, high), max(high - half_width, low)
        edge = [(low, low), (low, above), (below, high), (high, high)]
        edge += [(high, below), (above, low)]
        band = [(to_x(x), to_y(y)) for x, y in edge]
    return SquareChart(
        title="Predicted against true",
        description=f"Predicted against true: {len(true)} images, {first:.4g} to {last:.4g}",
        ticks=[(to_y(scale(mark)), _label(mark, "")) for mark in marks],
        marks=[(to_x(scale(mark)), _label(mark, "")) for mark in marks],
        axis="true",
        points=[
            (to_x(scale(x)), to_y(scale(y)), "dot") for x, y in zip(true, predicted, strict=True)
        ],
        lines=[(to_x(low), to_y(low), to_x(high), to_y(high), "train")],
        band=band,
    )


def robustness_charts(robustness: Mapping[str, Any] | None) -> list[Chart]:
    """A curve of the score for each corruption, from images as they are to severity 5."""
    if robustness is None or robustness["mean"] is None:
        return []
    score, curves = robustness["score"], dict[str, list[float]]()
    for row in robustness["corruptions"]:
        curves.setdefault(row["corruption"], [robustness["clean"]]).append(row[score])
    charts = []
    for name, values in curves.items():
        title = name.replace("_", " ")
        to_x = _scale(0, len(values) - 1, Chart.left, Chart.right)
        described = ", ".join(f"{place}: {value:.1%}" for place, value in enumerate(values))
        points = [(to_x(place), share_to_y(value)) for place, value in enumerate(values)]
        chart = Chart(
            title=title,
            description=f"{title}, by severity: {described}",
            ticks=share_ticks(),
            marks=[(to_x(place), place) for place in range(len(values))],
            axis="severity",
            curves=[(metric_of(score).title, "val", points)],
        )
        charts.append(chart)
    return charts


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The linear map of [low, high] to [start, end]; a range of one value lies in the middle."""

    def place(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(start + share * (end - start), 1)

    return place


def share_to_y(share: float) -> float:
    """The y of a share in [0, 1]."""
    return _scale(0, 1, Chart.bottom, Chart.top)(share)


def share_ticks() -> list[tuple[float, str]]:
    """Ticks of an axis from 0 to 1."""
    return [(share_to_y(share), f"{share:.0%}") for share in SHARES]


def _label(value: float, unit: str) -> str:
    return f"{100 * value:.4g}%" if unit == "%" else f"{value:.4g}"


def nice_ticks(low: float, high: float, limit: int = 7) -> list[float]:
    """At most `limit` round numbers, evenly spaced, that span `low` to `high`."""
    if not high > low:
        margin = abs(low) / 10 or 1.0
        low, high = low - margin, high + margin
    power = 10.0 ** math.floor(math.log10((high - low) / limit))
    for step in (power * factor for factor in (1, 2, 5, 10, 20)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < limit:
            break
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, limit: int = 7) -> list[float]:
    """At most `limit` round numbers for a logarithmic axis from `low` to `high`, both above 0."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= limit:
            break
    return ticks[:: math.ceil(len(ticks) / limit)] if len(ticks) > 2 else nice_ticks(low, high)


def epoch_ticks(first: int, last: int) -> list[int]:
    """Whole epochs to mark on the axis, the first and the last among them."""
    if last - first < 8:
        return list(range(first, last + 1))
    step = max(round(nice_ticks(0, last - first)[1]), 1)
    inner = [at for at in range(step, last, step) if first + step / 2 < at < last - step / 2]
    return [first, *inner, last]
