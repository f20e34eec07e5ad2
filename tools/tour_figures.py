"""The snippets of docs/tour.md, and its figures, which are drawn from their variables.

python tools/tour_figures.py            write docs/assets/tour-*.svg
python tools/tour_figures.py --print    put the output of each snippet into the page as well
"""

import contextlib
import io
import itertools
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/tour.md"
ASSETS = ROOT / "docs/assets"
COLOURS = ("#3b82f6", "#dd7120", "#2f9e62", "#9a66e0", "#d6457f", "#808a94")
"""Colours of curves, which can be seen on a light and on a dark page."""
INK, GRID = "#76808a", "#76808a55"
SNIPPET = re.compile(
    r"^## (?P<section>[^\n]+)$|^```python\n(?P<code>.*?)^```$"
    r"(?:\n\n(?:<!-- trained: (?P<tolerance>[\d.]+) -->\n\n)?```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


class Snippet(NamedTuple):
    """A Python block of the page."""

    section: str
    """Heading above it; empty for the first lines, which all sections need."""
    code: str
    output: str
    """What the page says that it prints."""
    tolerance: float | None
    """Largest difference of printed numbers, if they come from a training; else None."""


def read_snippets(text: str | None = None) -> list[Snippet]:
    """Snippets in order, of the page or of another text."""
    found, section = [], ""
    for match in SNIPPET.finditer(PAGE.read_text(encoding="utf-8") if text is None else text):
        section = match["section"] or section
        if match["code"]:
            tolerance = match["tolerance"]
            output = match["output"] or ""
            found.append(
                Snippet(section, match["code"], output, float(tolerance) if tolerance else None)
            )
    return found


def run_snippet(snippet: Snippet, names: dict[str, Any]) -> str:
    """Execute a snippet; returns what it prints. `names` are its globals."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(snippet.code, f"<{snippet.section or 'first lines'}>", "exec"), names)
    return printed.getvalue()


# --- figures -------------------------------------------------------------------------------------


def scale(low: float, high: float, start: float, end: float, *, log: bool) -> Any:
    """The function that maps [low, high] to pixels from `start` to `end`."""
    read = math.log if log else float
    bottom, top = read(low), read(high)
    return lambda value: start + (end - start) * (read(value) - bottom) / (top - bottom)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """`places`, moved apart until neighbours are `gap` from each other."""
    order = sorted(range(len(places)), key=places.__getitem__)
    found = list(places)
    for _ in range(200):
        for above, below in itertools.pairwise(order):
            missing = gap - (found[below] - found[above])
            if missing > 1e-6:
                found[above] -= missing / 2
                found[below] += missing / 2
    return found


def draw_chart(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_axis: str,
    y_axis: str,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    log: str = "",
    mark: float | None = None,
) -> str:
    """A line chart as SVG, each curve named at its end.

    Args:
        curves: Points by name.
        title: What is drawn, for screen readers.
        x_axis, y_axis: Names of the axes.
        x_ticks, y_ticks: Values with a label; the first and the last are the ends of the axes.
        log: Axes with a logarithmic scale, such as "xy".
        mark: x with a dashed line.
    """
    left, right, top, bottom = 62, 500, 34, 300
    to_x = scale(x_ticks[0], x_ticks[-1], left, right, log="x" in log)
    to_y = scale(y_ticks[0], y_ticks[-1], bottom, top, log="y" in log)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="350" viewBox="0 0 640 350" '
        f'role="img" font-family="system-ui, sans-serif" font-size="14" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<text x="8" y="18">{escape(y_axis)}</text>',
        f'<text x="{(left + right) / 2:.0f}" y="344" text-anchor="middle">{escape(x_axis)}</text>',
    ]
    for value in y_ticks:
        y = to_y(value)
        lines.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{GRID}"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 5:.1f}" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        text = f'<text x="{to_x(value):.1f}" y="{bottom + 20}" text-anchor="middle">'
        lines.append(f"{text}{value:g}</text>")
    if mark is not None:
        x = f"{to_x(mark):.1f}"
        lines.append(f'<path d="M{x} {top}V{bottom}" stroke="{INK}" stroke-dasharray="4 4"/>')
    ends = spread([to_y(points[-1][1]) for points in curves.values()], 18)
    for (name, points), colour, end in zip(curves.items(), COLOURS, ends, strict=False):
        path = "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in points)
        lines.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        label = f'<text x="{right + 8}" y="{end + 5:.1f}" fill="{colour}">'
        lines.append(f"{label}{escape(name)}</text>")
    return "\n".join([*lines, "</svg>", ""])


def draw_positions(names: Mapping[str, Any]) -> str:
    curves = {
        position: [*zip(names["sizes"], shares, strict=True)]
        for position, shares in names["accuracy"].items()
    }
    return draw_chart(
        curves,
        title="Accuracy against test size by kind of position; training at 16 px",
        x_axis="image size in the test, px (dashed: in training)",
        y_axis="accuracy",
        x_ticks=names["sizes"],
        y_ticks=(0, 0.2, 0.4, 0.6, 0.8, 1),
        mark=16,
    )


def draw_gradients(names: Mapping[str, Any]) -> str:
    curves = {
        f"{order.capitalize()}-LN": [*enumerate(values, start=1)]
        for order, values in names["norms"].items()
    }
    return draw_chart(
        curves,
        title="Gradient norms of the feed-forward parts by block, before training",
        x_axis="block",
        y_axis="norm of the gradient of fc2.weight",
        x_ticks=(1, 4, 8, 12, 16),
        y_ticks=(0.25, 0.5, 1, 2),
        log="y",
    )


def draw_cost(names: Mapping[str, Any]) -> str:
    cost = names["cost"]
    parts = ("scores, values: 4 n²d", "matrices: 24 nd²")
    curves = {
        part: [(n, both[at] / 1e6) for n, both in cost.items()] for at, part in enumerate(parts)
    }
    return draw_chart(
        curves,
        title="FLOPs of a block of width 64 by number of tokens",
        x_axis="tokens (dashed: 6 d)",
        y_axis="MFLOPs",
        x_ticks=[*cost],
        y_ticks=(0.1, 1, 10, 100, 1000),
        log="xy",
        mark=6 * names["d"],
    )


def draw_alignment(names: Mapping[str, Any]) -> str:
    """A square for each letter written (row) and read (column), as opaque as their weight."""
    word, side, left, top = names["word"], 26, 130, 54
    edge = side * len(word)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{top + edge + 12}" '
        f'viewBox="0 0 640 {top + edge + 12}" role="img" font-family="system-ui, sans-serif" '
        f'font-size="14" fill="{INK}">',
        "<title>Attention weights of a copier: letters written, and letters read</title>",
        f'<text x="{left}" y="18">read</text>',
        f'<text x="24" y="{top + side / 2 + 5:.0f}">written</text>',
        f'<path d="M{left} {top}h{edge}v{edge}h-{edge}z" fill="none" stroke="{GRID}"/>',
    ]
    for at, letter in enumerate(word):
        middle = (at + 0.5) * side
        for x, y in ((left + middle, top - 10), (left - 16, top + middle + 5)):
            lines.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle">{letter}</text>')
        for other, weight in enumerate(names["alignment"][at].tolist()):
            lines.append(
                f'<rect x="{left + other * side}" y="{top + at * side}" width="{side}" '
                f'height="{side}" fill="{COLOURS[0]}" fill-opacity="{weight:.2f}"/>'
            )
    return "\n".join([*lines, "</svg>", ""])


FIGURES = {
    "tour-alignment.svg": draw_alignment,
    "tour-positions.svg": draw_positions,
    "tour-gradients.svg": draw_gradients,
    "tour-cost.svg": draw_cost,
}
"""File in docs/assets -> function of the names of the page."""


def with_output(text: str, outputs: Iterable[str]) -> str:
    """The page with these outputs of its snippets."""
    outputs = iter(outputs)

    def replace(match: re.Match[str]) -> str:
        if not match["code"]:
            return match[0]
        printed = next(outputs)
        if match["output"] is None:
            return match[0]
        start, end = (place - match.start() for place in match.span("output"))
        return match[0][:start] + printed + match[0][end:]

    return SNIPPET.sub(replace, text)


def main(arguments: Sequence[str]) -> None:
    names: dict[str, Any] = {}
    outputs = []
    for snippet in read_snippets():
        outputs.append(run_snippet(snippet, names))
        print(f"# {snippet.section}\n{outputs[-1]}", flush=True)
    for file, draw in FIGURES.items():
        (ASSETS / file).write_text(draw(names), encoding="utf-8")
    if "--print" in arguments:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_output(page, outputs), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
