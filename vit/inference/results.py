"""One picture's answer, and the three forms it is written in: JSON lines, CSV, a table.

Names of files and classes come from strangers: each form keeps them from being read as anything
else, by a terminal, a spreadsheet or a JSON parser.
"""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vit.errors import printable

# raw, these break a line-by-line reader, act on a terminal, or cannot be encoded: C1 controls,
# line separators, direction marks, lone surrogates (bytes of a name that are not UTF-8)
UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
WIDEST_CELL = 60


@dataclass(frozen=True)
class Prediction:
    """What the model says of one picture.

    Args:
        image: The picture's path, as it was given.
        predictions: (label, probability) pairs, the most probable first; empty on an error.
        error: Why there is no answer, or None.
    """

    image: str
    predictions: tuple[tuple[str, float], ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Layout:
    """What a writer knows before the first answer: the columns and the words in them."""

    top_k: int
    classes: Sequence[str]
    images: Sequence[str]


Line = Callable[[Prediction], str]


def json_lines(layout: Layout) -> tuple[str, Line]:  # noqa: ARG001
    """No header; {"image", "predictions": [{"label", "score"}]} or {"image", "error"} a line."""
    return "", json_line


def json_line(prediction: Prediction) -> str:
    record: dict[str, Any] = {"image": prediction.image}
    if prediction.error is None:
        pairs = prediction.predictions
        record["predictions"] = [{"label": label, "score": score} for label, score in pairs]
    else:
        record["error"] = prediction.error
    return to_json(record) + "\n"


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON in readable UTF-8; any string comes back from a parser as it was.

    Raises:
        ValueError: A number is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def csv_lines(layout: Layout) -> tuple[str, Line]:
    """image,label_1,score_1,...,label_K,score_K,error; RFC 4180, every row of the same length."""
    header = ["image"]
    for place in range(1, layout.top_k + 1):
        header += [f"label_{place}", f"score_{place}"]

    def line(prediction: Prediction) -> str:
        cells = [csv_text(prediction.image)]
        for label, score in prediction.predictions:
            cells += [csv_text(label), repr(score)]
        empty = [""] * (len(header) - len(cells))
        return csv_row([*cells, *empty, csv_text(prediction.error or "")])

    return csv_row([*header, "error"]), line


def csv_text(text: str) -> str:
    """`text` as a cell that a spreadsheet does not run: control characters as escapes, and an
    apostrophe before a start that would make it a formula (OWASP, "CSV Injection")."""
    return ("'" if text.startswith(FORMULA_STARTS) else "") + printable(text)


def csv_row(cells: Sequence[str]) -> str:
    row = io.StringIO()
    csv.writer(row).writerow(cells)
    return row.getvalue()


def table_lines(layout: Layout) -> tuple[str, Line]:
    """Columns for reading: the picture, then label and probability of each place.

    Column widths come from the names alone, so that rows can be written as they are made; a name
    longer than its column pushes the rest of its row to the right.
    """
    image_width = column_width("image", *layout.images)
    label_width = column_width("label", *layout.classes)

    def line(prediction: Prediction) -> str:
        cells = [pad(printable(prediction.image), image_width)]
        for label, score in prediction.predictions:
            cells += [pad(printable(label), label_width), f"{score:6.4f}"]
        if prediction.error is not None:
            cells.append(f"error: {printable(prediction.error)}")
        return "  ".join(cells).rstrip() + "\n"

    header = [pad("image", image_width)]
    header += [pad("label", label_width), "score "] * layout.top_k
    return "  ".join(header).rstrip() + "\n", line


def column_width(*names: str) -> int:
    """Columns that show each of `names`, up to a limit."""
    return min(max(display_width(printable(name)) for name in names), WIDEST_CELL)


def display_width(text: str) -> int:
    """Columns of a terminal that `text` takes: two for East Asian wide, none for combining."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    combining = sum(unicodedata.combining(character) != 0 for character in text)
    return len(text) + wide - combining


def pad(text: str, width: int) -> str:
    return text + " " * (width - display_width(text))


# name of --format -> header line and the function that writes one answer
FORMATS: dict[str, Callable[[Layout], tuple[str, Line]]] = {
    "table": table_lines,
    "jsonl": json_lines,
    "csv": csv_lines,
}
