"""Charts of a report: curves as SVG, a confusion matrix as a shaded table."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vit.evaluation.html_page import Html, called, join, table, tag

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 54, 18, 46, 40
MOST_DOTS = 40
RIGHT_SHADE, WRONG_SHADE = "29 78 216", "194 65 12"  # red green blue
STRONG = 0.75  # shade above which only white letters can be read

Confusion = Mapping[tuple[int, int], int]
"""Number of images by (true class, answered class); pairs without one may be missing."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Args:
        label: Its name in the legend.
        style: Class in the page's style: `train` or `val`.
        values: One for each of the chart's epochs.
    """

    label: str
    style: str
    values: Sequence[float]


def nice_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """At most `most` round numbers, evenly spaced, that span `low` to `high`."""
    if not high > low:
        room = abs(low) / 10 or 1.0
        low, high = low - room, high + room
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * factor for factor in (1, 2, 5, 10, 20)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [round(index * step, 12) for index in range(first, last + 1)]


def epoch_ticks(first: int, last: int) -> list[int]:
    """Whole epochs to mark on the axis, the first and the last among them."""
    if last - first < 8:
        return list(range(first, last + 1))
    step = max(round(nice_ticks(0, last - first)[1]), 1)
    inner = [at for at in range(step, last, step) if first + step / 2 < at < last - step / 2]
    return [first, *inner, last]


def curves(
    title: str, epochs: Sequence[int], lines: Sequence[Curve], *, best: int, unit: str = ""
) -> Html:
    """A chart of `lines` over `epochs`, with the best epoch marked.

    Args:
        title: What is drawn.
        epochs: At least one, rising.
        lines: The curves.
        best: Epoch to mark.
        unit: `%` where the values are shares.
    """
    drawn = [value for line in lines for value in line.values]
    low = 0.0 if min(drawn) >= 0 and min(drawn) < 0.6 * max(drawn) else min(drawn)
    ticks = [tick for tick in nice_ticks(low, max(drawn)) if unit != "%" or 0 <= tick <= 1]
    bottom, top = min(ticks[0], low), max(ticks[-1], *drawn)
    span = max(epochs[-1] - epochs[0], 1)
    single = epochs[-1] == epochs[0]

    def across(epoch: float) -> float:
        share = 0.5 if single else (epoch - epochs[0]) / span
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def up(value: float) -> float:
        share = (value - bottom) / (top - bottom)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    name = f"{title} over {epochs[-1]} epochs; " + "; ".join(
        f"{line.label}: {shown(line.values[-1], unit)} at the end" for line in lines
    )
    return tag(
        "svg",
        tag("text", title, x=0, y=15, class_="title"),
        *_axes(ticks, {at: at for at in epoch_ticks(epochs[0], epochs[-1])}, across, up, unit),
        tag("line", x1=across(best), x2=across(best), y1=TOP, y2=HEIGHT - BOTTOM, class_="best"),
        *(_line(line, epochs, across, up) for line in lines),
        *_legend(lines),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=name,
    )


def scatter(
    title: str,
    points: Sequence[tuple[float, float, str]],
    marks: Mapping[float, object],
    *,
    name: str,
    unit: str = "",
) -> Html:
    """A chart of points.

    Args:
        title: What is drawn.
        points: At least one: place on the axis, value, and class in the page's style.
        marks: What is written at places on the axis.
        name: Of the axis.
        unit: `%` where the values are shares.
    """
    values = [value for _, value, _ in points]
    ticks = [tick for tick in nice_ticks(min(values), max(values)) if unit != "%" or 0 <= tick <= 1]
    bottom, top = min(ticks[0], *values), max(ticks[-1], *values)
    places = [*(place for place, *_ in points), *marks]
    first, span = min(places), max(places) - min(places)

    def across(place: float) -> float:
        share = 0.06 + 0.88 * (place - first) / span if span else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def up(value: float) -> float:
        share = (value - bottom) / (top - bottom)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    return tag(
        "svg",
        tag("text", title, x=0, y=15, class_="title"),
        *_axes(ticks, marks, across, up, unit, name),
        *(
            tag("circle", cx=across(place), cy=up(value), r=5, class_=style)
            for place, value, style in points
        ),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}: {len(points)} points from {shown(min(values), unit)} to "
        f"{shown(max(values), unit)}",
    )


def shown(value: float, unit: str) -> str:
    """A value as the axis has it: a share in percent, anything else in a few digits."""
    return f"{100 * value:.4g}%" if unit == "%" else f"{value:.4g}"


def _axes(
    ticks: Sequence[float],
    marks: Mapping[float, object],
    across: Callable[[float], float],
    up: Callable[[float], float],
    unit: str,
    name: str = "epoch",
) -> list[Html]:
    parts = []
    for tick in ticks:
        y = up(tick)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        label = shown(tick, unit)
        parts.append(tag("text", label, x=LEFT - 7, y=round(y + 4.5, 1), text_anchor="end"))
    base = HEIGHT - BOTTOM + 18
    parts += [
        tag("text", mark, x=across(at), y=base, text_anchor="middle") for at, mark in marks.items()
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", name, x=middle, y=HEIGHT - 4, text_anchor="middle"))
    return parts


def _line(
    line: Curve,
    epochs: Sequence[int],
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> Html:
    places = [(across(e), up(v)) for e, v in zip(epochs, line.values, strict=True)]
    points = " ".join(f"{x},{y}" for x, y in places)
    path = tag("polyline", points=points, class_=f"line {line.style}")
    if len(places) > MOST_DOTS:
        return path
    dots = [tag("circle", cx=x, cy=y, r=2.6, class_=line.style) for x, y in places]
    return join(path, *dots)


def _legend(lines: Sequence[Curve]) -> list[Html]:
    parts, x = [], LEFT
    for line in lines:
        parts.append(tag("line", x1=x, x2=x + 24, y1=32, y2=32, class_=f"line {line.style}"))
        parts.append(tag("text", line.label, x=x + 31, y=36.5))
        x += 56 + 7 * len(line.label)
    return parts


def heat_table(confusion: Confusion, classes: Sequence[str]) -> Html:
    """True classes down, answers across; a cell is as dark as its share of the row."""
    head = [tag("th", tag("span", called(name), class_="up"), title=name) for name in classes]
    rows = []
    for label, name in enumerate(classes):
        counts = [confusion.get((label, answer), 0) for answer in range(len(classes))]
        total = max(sum(counts), 1)
        cells = [
            _shaded(count, math.sqrt(count / total), right=answer == label)
            for answer, count in enumerate(counts)
        ]
        rows.append([tag("th", called(name), title=name), *cells])
    return table([tag("th", "true ↓  answer →"), *head], rows, class_="heat")


def _shaded(count: int, shade: float, *, right: bool) -> Html:
    if not count:
        return tag("td", "·", class_="none")
    colour = RIGHT_SHADE if right else WRONG_SHADE
    style = f"background: rgb({colour} / {shade:.2f})"
    return tag("td", f"{count:,}", style=style, class_="strong" if shade > STRONG else None)
