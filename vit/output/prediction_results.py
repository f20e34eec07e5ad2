"""The prediction of one image, and its formats: JSON lines, CSV, a table.

Names of files and classes, and captions, are untrusted: each format escapes what a terminal, a
spreadsheet or a JSON parser would interpret.
"""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vit.errors import ConfigError, RunError
from vit.text import plural, printable

if TYPE_CHECKING:
    from vit.generation.caption import Caption

# raw, these break a line-by-line reader, act on a terminal, or cannot be encoded: C1 controls,
# line separators, direction marks, lone surrogates (bytes of a name that are not UTF-8)
UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
WIDEST_CELL = 60
NO_CLASS = "-"
BETWEEN = "|"
TOP_K = 5
"""Default number of classes in a row."""


@dataclass(frozen=True)
class Prediction:
    """The prediction of one image.

    Args:
        image: The image's path, as it was given.
        predictions: (label, probability) pairs, the most probable first; empty on an error, and
            from a network without classes.
        error: Reason of a failure, or None.
        captions: The best first; empty on an error, and from a classifier.
        embedding: Input of the network's head, if requested; never in a row.
        truth: What the data say of the image, in rows of an evaluation: `label`, and the
            probability of it, `label_score`; `true_labels` if there may be several; `references`,
            captions.
    """

    image: str
    predictions: tuple[tuple[str, float], ...] = ()
    error: str | None = None
    captions: "tuple[Caption, ...]" = ()
    embedding: Any = field(default=None, repr=False, compare=False)
    truth: "Mapping[str, Truth]" = field(default_factory=dict, repr=False, hash=False)

    @property
    def caption(self) -> str | None:
        """The best caption, or None."""
        return self.captions[0].text if self.captions else None

    @property
    def score(self) -> float | None:
        """Sum of the log probabilities of the caption's tokens, the end included, or None."""
        return self.captions[0].score if self.captions else None


def check_top_k(top_k: int | None) -> None:
    """Raise ConfigError if `top_k` is less than 1."""
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}: must be at least 1")


def resolve_top_k(
    classes: Sequence[str],
    thresholds: Sequence[float] | None,
    top_k: int | None,
    threshold: float | None,
) -> tuple[int, Sequence[float] | None]:
    """Return the number of classes to return per image, and the threshold of each class.

    Args:
        classes: Class names of the network.
        thresholds: Decision thresholds of a multi-label network; None otherwise.
        top_k: Requested number; default: 5, or all classes of a multi-label network.
        threshold: Requested threshold of all classes; default: their own.
    """
    if top_k is None:
        top_k = TOP_K if thresholds is None else max(len(classes), 1)
    return top_k, thresholds if threshold is None else [threshold] * len(classes)


@dataclass(frozen=True)
class Layout:
    """What a writer knows before the first answer: the columns and the words in them.

    Args:
        top_k: Classes of an image; 0 from a network without any.
        classes: Their names.
        images: Paths of the images.
        n_best: Captions of an image; 0 from a network that writes none.
        several: Whether an image may have several classes, or none: how many differs.
        truth: The keys of `Prediction.truth`, in rows of an evaluation.
    """

    top_k: int
    classes: Sequence[str]
    images: Sequence[str]
    n_best: int = 0
    multilabel: bool = False
    truth: Sequence[str] = ()

    @property
    def caption_columns(self) -> list[tuple[str, str]]:
        """Names of the columns of each caption and of its score; no two columns have one name."""
        score = "caption_score" if self.top_k else "score"
        if self.n_best == 1:
            return [("caption", score)]
        return [(f"caption_{place}", f"{score}_{place}") for place in range(1, self.n_best + 1)]


Line = Callable[[Prediction], str]
Truth = str | float | Sequence[str] | None


def json_lines(layout: Layout) -> tuple[str, Line]:
    """No header; a line is {"image", "error"}, or {"image"} and what the network says:

    "predictions": [{"label", "score"}], "caption", "score", and where more than one was asked for
    "captions": [{"caption", "score"}]. A caption that did not come to its end has "ended": false.
    Where no class was probable enough, "predictions" is an empty list. A row of an evaluation has
    `Prediction.truth` after the image.
    """
    multilabel, named = layout.n_best > 1, layout.top_k > 0
    return "", lambda prediction: json_line(prediction, multilabel=multilabel, named=named)


def json_line(prediction: Prediction, *, multilabel: bool = False, named: bool = False) -> str:
    """One line of `json_lines`: with all captions if `multilabel`, of a network with classes if
    `named`."""
    record: dict[str, Any] = {"image": prediction.image, **prediction.truth}
    if prediction.error is not None:
        return to_json({**record, "error": prediction.error}) + "\n"
    captions = [caption_record(caption) for caption in prediction.captions]
    if captions:
        record |= captions[0]
    if multilabel:
        record["captions"] = captions
    if prediction.predictions or named or not captions:
        pairs = prediction.predictions
        record["predictions"] = [{"label": label, "score": score} for label, score in pairs]
    return to_json(record) + "\n"


def caption_record(caption: "Caption") -> dict[str, Any]:
    """A caption as JSON has it."""
    cut = {} if caption.ended else {"ended": False}
    return {"caption": caption.text, "score": caption.score, **cut}


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON in readable UTF-8; any string comes back from a parser as it was.

    Raises:
        ValueError: A number is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def csv_lines(layout: Layout) -> tuple[str, Line]:
    """image,label_1,score_1,...,label_K,score_K,error; RFC 4180, every row of the same length.

    Captions are image,caption,score,error, or image,caption_1,score_1,...; where there are classes
    too, they come after these, and their scores are called caption_score. Where an image may have
    several classes: image,labels,scores,error, both with | between them. A row of an evaluation has
    `Prediction.truth` after the image, a list with | between its parts.

    Raises:
        ConfigError: It may have several, and the name of one has a |.
    """
    if layout.multilabel:
        return _multilabel_in_csv(layout)
    header = ["image", *layout.truth]
    for place in range(1, layout.top_k + 1):
        header += [f"label_{place}", f"score_{place}"]
    header += chain(*layout.caption_columns)

    def line(prediction: Prediction) -> str:
        cells = [csv_text(prediction.image), *truth_cells(prediction, layout)]
        for label, score in prediction.predictions:
            cells += [csv_text(label), repr(score)]
        named = 1 + len(layout.truth) + 2 * layout.top_k
        cells += [""] * (named - len(cells))  # of classes that were not named
        for caption in prediction.captions:
            cells += [csv_text(caption.text), repr(caption.score)]
        empty = [""] * (len(header) - len(cells))
        return csv_row([*cells, *empty, csv_text(prediction.error or "")])

    return csv_row([*header, "error"]), line


def _multilabel_in_csv(layout: Layout) -> tuple[str, Line]:
    """As lists for training have them: the labels of an image in one cell."""
    for name in layout.classes:
        if BETWEEN in name:
            raise ConfigError(
                f"format=csv: the class {printable(name)} has a {BETWEEN}, which parts classes "
                "there; use --format jsonl"
            )

    def line(prediction: Prediction) -> str:
        labels = BETWEEN.join(label for label, _ in prediction.predictions)
        scores = BETWEEN.join(repr(score) for _, score in prediction.predictions)
        cells = [csv_text(prediction.image), *truth_cells(prediction, layout)]
        return csv_row([*cells, csv_text(labels), scores, csv_text(prediction.error or "")])

    return csv_row(["image", *layout.truth, "labels", "scores", "error"]), line


def truth_cells(prediction: Prediction, layout: Layout) -> list[str]:
    """Cells of what the data say of an image."""
    cells = []
    for name in layout.truth:
        value = prediction.truth.get(name)
        if isinstance(value, float):
            cells.append(repr(value))
        else:
            parts = [value] if isinstance(value, str) else value or []
            cells.append(BETWEEN.join(csv_text(part) for part in parts))
    return cells


def unended_note(unended: int, captions: int) -> str:
    """How many captions were cut off."""
    return f"{unended} of {plural(captions, 'caption')} stopped at the longest, before their end"


def csv_text(text: str) -> str:
    """`text` as a cell that a spreadsheet does not run: control characters as escapes, and an
    apostrophe before a start that would make it a formula (OWASP, "CSV Injection")."""
    return ("'" if text.startswith(FORMULA_STARTS) else "") + printable(text)


def csv_row(cells: Sequence[str]) -> str:
    row = io.StringIO()
    csv.writer(row).writerow(cells)
    return row.getvalue()


def table_lines(layout: Layout) -> tuple[str, Line]:
    """Columns for reading: the image, label and probability of each place, captions and scores.

    An image of no probable class has a dash. Column widths come from the names alone, so that
    rows can be written as they are made; a name or a caption longer than its column pushes the
    rest of its row to the right. Where an image may have several classes, each of them adds a
    label and its probability.
    """
    image_width = column_width("image", *layout.images)
    label_width = column_width("label", *layout.classes)

    def line(prediction: Prediction) -> str:
        cells = [pad(printable(prediction.image), image_width)]
        for label, score in prediction.predictions:
            cells += [pad(printable(label), label_width), f"{score:6.4f}"]
        if prediction.error is None:
            most = 1 if layout.multilabel else layout.top_k
            for place in range(len(prediction.predictions), most):
                cells += [pad("" if place else NO_CLASS, label_width), " " * 6]
        for caption in prediction.captions:
            cells += [pad(printable(caption.text), WIDEST_CELL), f"{caption.score:8.3f}"]
        if prediction.error is not None:
            cells.append(f"error: {printable(prediction.error)}")
        return "  ".join(cells).rstrip() + "\n"

    header = [pad("image", image_width)]
    header += [pad("label", label_width), "score "] * (1 if layout.multilabel else layout.top_k)
    for caption, score in layout.caption_columns:
        header += [pad(caption, WIDEST_CELL), f"{score:>8}"]
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


def count_failed_rows(path: Path, style: str, images: Sequence[str]) -> int:
    """Count the error rows of a finished file.

    Args:
        path: The file.
        style: Its format.
        images: The images its rows must belong to, in this order.

    Raises:
        RunError: It has other images or another format, or cannot be read.
    """
    name = printable(path)
    other = "give another --out, or start again with --overwrite"
    try:
        with open(path, "rb") as file:
            rows = sum(1 for _ in file) - (style != "jsonl")
        if rows != len(images):
            raise RunError(
                f"{name} is complete with {plural(rows, 'row')}, and the inputs are "
                f"{plural(len(images), 'image')}: {other}"
            )
        failed = 0
        with open(path, encoding="utf-8", newline="\n") as text:
            for number, (same, error) in enumerate(READERS[style](text, images), 1):
                if not same:
                    raise RunError(f"{name}, row {number} belongs to another image: {other}")
                failed += error
    except OSError as error:
        raise RunError(f"{name} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, csv.Error):
        raise RunError(f"{name} is complete, but not in the format {style}: {other}") from None
    return failed


def _read_json(file: TextIO, images: Sequence[str]) -> Iterator[tuple[bool, bool]]:
    for line, image in zip(file, images, strict=True):
        record = json.loads(line)
        yield record["image"] == image, "error" in record


def _read_csv(file: TextIO, images: Sequence[str]) -> Iterator[tuple[bool, bool]]:
    rows = csv.reader(file)
    next(rows)
    for row, image in zip(rows, images, strict=True):
        yield row[0] == csv_text(image), bool(row[-1])


def _read_table(file: TextIO, images: Sequence[str]) -> Iterator[tuple[bool, bool]]:
    width = column_width("image", *images)
    next(file)
    for line, image in zip(file, images, strict=True):
        start = pad(printable(image), width) + "  "
        yield line.startswith(start), line.startswith("error: ", len(start))


# format -> for each row, whether it belongs to its image, and whether it is an error
READERS: dict[str, Callable[[TextIO, Sequence[str]], Iterator[tuple[bool, bool]]]] = {
    "jsonl": _read_json,
    "csv": _read_csv,
    "table": _read_table,
}
