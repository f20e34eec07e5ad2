"""The prediction of one image, and its formats: JSON lines, CSV, an Excel workbook, a table.

Names of files and classes, and captions, are untrusted: each format escapes what a terminal, a
spreadsheet or a JSON parser would interpret.

JSON has fractions with all digits, CSV fractions with four, and the table and the workbook show
percentages.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

from vit.atomic_files import open_atomic
from vit.class_tree import COLUMNS
from vit.config.inference_config import EvaluationConfig, PredictionConfig
from vit.data.workbook import check_size, is_workbook, write_sheet
from vit.errors import ConfigError
from vit.output.output_file import open_output, resolve_link
from vit.text import BOM, csv_mark, csv_text, plural, printable

if TYPE_CHECKING:
    from vit.data.instrument_images import Array
    from vit.generation.generation_config import Caption
    from vit.number_answers import Answer

# raw, these break a line-by-line reader, act on a terminal, or cannot be encoded: C1 controls,
# line separators, direction marks, lone surrogates (bytes of a name that are not UTF-8)
UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
ROW_COLUMN = re.compile(
    "image|predictions|error|captions?|(caption_)?scores?|labels|ended|unknown|reason|set|fold|"
    r"(label|caption|caption_score|score)_\d+|(class_score|list)_.*|file_?name",
    re.DOTALL | re.IGNORECASE,
)
"""Names of columns that rows may have in some format, beside `Prediction.truth`, and of those that
a list of images is read by before `image`."""
NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?")
"""A cell that is no formula although it may begin like one."""
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t"}
CSV_DIGITS = 4
WIDEST_CELL = 60
NUMBER_WIDTH = 9
NO_CLASS = "-"
BETWEEN = "|"
UNKNOWN = "unknown"
TOP_K = 5
"""Default number of classes in a row."""
CAPTIONS = "writes captions and has no classes"
"""What a captioner does."""


@dataclass(frozen=True)
class ImageOutput:
    """What a network gives for one image, or its error; a Predictor makes a Prediction of it.

    Args:
        probabilities: (classes,) float64, empty without a head; None on an error.
        captions: The best first; empty from a classifier.
        memory: The captioner's image tokens, (tokens, dim) on the device.
        pixels: Input of the encoder, uint8 (channels, height, width).
        embedding: Input of the head, (dim,) float32, if requested.
    """

    image: str
    probabilities: "Array | None"
    error: str | None = None
    captions: "tuple[Caption, ...]" = ()
    memory: Any = None
    pixels: Any = None
    embedding: Any = None
    distance: float | None = None


@dataclass(frozen=True)
class Prediction:
    """The prediction of one image.

    Args:
        predictions: (label, probability) pairs, the most probable first; empty if the image cannot
            be read, and from a network without classes.
        answers: Numbers by column of a row, in units, with the ends of their intervals; choices
            with their probabilities and sets; or the node of a tree and its probability, None if
            unknown. Empty if the image cannot be read, and from another network.
        error: Reason of a failure, or None; that of an explanation leaves the predictions.
        captions: The best first; empty if the image cannot be read, and from a classifier.
        embedding: Input of the network's head, if requested; never in a row.
        truth: Ground truth of the image, in rows of an evaluation: `label`, and the
            probability of it, `label_score`; `true_labels` if there may be several; `references`,
            captions. After these, on request, the score of each class, `class_score_NAME`.
        unknown: Reason why the best class is no answer, with `reject`; None if it is one.
        prediction_set: Classes that contain the true one with the requested coverage, the most
            probable first; empty if not requested.
    """

    image: str
    predictions: tuple[tuple[str, float], ...] = ()
    error: str | None = None
    captions: "tuple[Caption, ...]" = ()
    embedding: Any = field(default=None, repr=False, compare=False)
    truth: "Mapping[str, Truth]" = field(default_factory=dict, repr=False, hash=False)
    answers: "Mapping[str, Answer | None]" = field(default_factory=dict, hash=False)
    unknown: str | None = None
    prediction_set: tuple[str, ...] = ()

    @property
    def best(self) -> str | None:
        """The class of the image, or its node in a tree; None if unknown, and of other networks."""
        if self.unknown is not None or not self.predictions:
            return None
        found = self.answers.get(COLUMNS[0], self.predictions[0][0])
        return found if isinstance(found, str) else None

    @property
    def caption(self) -> str | None:
        """The best caption, or None."""
        return self.captions[0].text if self.captions else None

    @property
    def score(self) -> float | None:
        """Sum of the log probabilities of the caption's tokens, the end included, or None."""
        return self.captions[0].score if self.captions else None


def check_top_k(top_k: int | None) -> None:
    """Raise ConfigError if `top_k` is no whole number of at least 1."""
    if top_k is not None and not (isinstance(top_k, int) and top_k >= 1):
        raise ConfigError(f"top_k={top_k!r}: must be at least 1, a whole number")


def check_classes(classes: Sequence[str], kind: str = CAPTIONS, **flags: Any) -> None:
    """Refuse values of `flags` that need classes, of a network of this kind without any."""
    for flag, value in flags.items():
        if value not in (None, False) and not classes:
            captions = ", or ask for several captions with --beams and --n-best"
            raise ConfigError(
                f"{flag}={value}: this network {kind}; "
                f"leave it out{captions if flag == 'top_k' and kind == CAPTIONS else ''}"
            )


def classes_per_row(
    classes: Sequence[str], thresholds: Sequence[float] | None, top_k: int | None
) -> int:
    """Classes in a row: `top_k`, by default 5, or all of a multi-label network; at most all."""
    return min(top_k or (TOP_K if thresholds is None else len(classes)), len(classes))


@dataclass(frozen=True)
class Layout:
    """Columns of the output, known before the first prediction; CSV has `digits` decimals, or
    all."""

    top_k: int
    classes: Sequence[str]
    images: Sequence[str]
    n_best: int = 0
    multilabel: bool = False
    truth: Sequence[str] = ()
    shares: bool = True
    separator: str = ","
    separator_chosen: bool = False
    digits: int | None = None
    reject: bool = False
    sets: bool = False
    answers: Mapping[str, str] = field(default_factory=dict, hash=False)
    cells: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, hash=False)

    @cached_property
    def list_columns(self) -> dict[str, str]:
        """The columns of the lists, and their names in rows: `list_NAME` where a row has NAME."""
        names = dict.fromkeys(chain.from_iterable(self.cells.values()))
        own = {name for name in names if ROW_COLUMN.fullmatch(name.strip())}
        own |= {*self.truth, *self.answers}
        return {name: f"list_{name}" if name in own else name for name in names}

    def list_cells(self, image: str) -> dict[str, Any]:
        """The cells that lists have of an image, by their names in rows; infinite ones are null."""
        text = json.dumps(self.cells.get(image, {}))
        cells = json.loads(text, parse_constant=lambda _name: None)
        return {self.list_columns[name]: value for name, value in cells.items()}

    def list_texts(self, image: str) -> list[str]:
        """The same as texts, for each of `list_columns`."""
        cells = self.list_cells(image)
        found = (cells.get(name) for name in self.list_columns.values())
        return [
            one if isinstance(one, str) else "" if one is None else to_json(one) for one in found
        ]

    @property
    def caption_columns(self) -> list[tuple[str, str]]:
        """Names of the columns of each caption and of its score; no two columns have one name."""
        score = "caption_score" if self.top_k else "score"
        if self.n_best == 1:
            return [("caption", score)]
        return [(f"caption_{place}", f"{score}_{place}") for place in range(1, self.n_best + 1)]


def csv_settings(
    config: PredictionConfig | EvaluationConfig, style: str, *, remedy: str = "add --format csv"
) -> dict[str, Any]:
    """The fields of a Layout of CSV, `separator` to `digits`."""
    for name in ("csv_separator", "csv_digits"):
        if getattr(config, name) is not None and style != "csv":
            config.refuse(name, f"the format is {style}; {remedy}")
    digits = CSV_DIGITS if config.csv_digits is None else config.csv_digits
    return {
        "separator": SEPARATORS[config.csv_separator or "comma"],
        "separator_chosen": config.csv_separator is not None,
        "digits": None if digits == "full" else digits,
    }


def byte_order_mark(layout: Layout) -> str:
    """BOM before a CSV file for a spreadsheet, or "".

    Without the mark Excel reads UTF-8 as the machine's old code page.
    """
    free_text = layout.n_best > 0 or "references" in layout.truth
    if layout.separator_chosen or free_text:
        return BOM
    cells = chain.from_iterable(map(layout.list_texts, layout.cells))
    return csv_mark((*layout.classes, *layout.images, *layout.list_columns, *cells))


Line = Callable[[Prediction], str]
Truth = str | float | Sequence[str] | None


def json_lines(layout: Layout) -> tuple[str, Line]:
    """No header; a line is {"image", "error"}, or {"image"} and the prediction:

    "predictions": [{"label", "score"}], "caption", "score", and where several were requested
    "captions": [{"caption", "score"}]. A caption that did not come to its end has "ended": false.
    After the image come the cells of a list, and `Prediction.truth`. With `reject` there is
    "unknown", true or false, and its "reason"; with `sets` the class names of the "set".
    """

    def line(prediction: Prediction) -> str:
        record: dict[str, Any] = {"image": prediction.image}
        record |= {**layout.list_cells(prediction.image), **prediction.truth}
        if prediction.error is not None:
            return to_json({**record, "error": prediction.error}) + "\n"
        captions = [caption_record(caption) for caption in prediction.captions]
        if captions:
            record |= captions[0]
        if layout.n_best > 1:
            record["captions"] = captions
        record |= prediction.answers
        if prediction.predictions or layout.top_k or not (captions or layout.answers):
            pairs = prediction.predictions
            record["predictions"] = [{"label": label, "score": score} for label, score in pairs]
        if layout.reject:
            record["unknown"] = prediction.unknown is not None
            if prediction.unknown is not None:
                record["reason"] = prediction.unknown
        if layout.sets:
            record["set"] = list(prediction.prediction_set)
        return to_json(record) + "\n"

    return "", line


def caption_record(caption: "Caption") -> dict[str, Any]:
    cut = {} if caption.ended else {"ended": False}
    return {"caption": caption.text, "score": caption.score, **cut}


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON in readable UTF-8; a parser returns any string unchanged."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


Cell = str | float | tuple[float, ...] | None
"""A cell of a spreadsheet; several scores share one, with | between them."""


def spreadsheet_cells(layout: Layout) -> tuple[list[str], Callable[[Prediction], list[Cell]]]:
    """The header and the cells of a row, all of the same length.

    image, label_1, score_1, ..., label_K, score_K, error

    Captions are caption, score, or caption_1, score_1, ...; after classes, caption_score. Where an
    image may have several classes: labels, scores, both with | between them. After the image come
    the cells of a list, and `Prediction.truth`; before the error `unknown` and `set`.
    """
    if layout.sets or layout.multilabel or any(one.endswith("_set") for one in layout.answers):
        for name in layout.classes:
            if BETWEEN in name:
                raise ConfigError(
                    f"format=csv: the class {name} has a {BETWEEN}, which parts classes "
                    "there; use --format jsonl"
                )
    header = ["image", *layout.list_columns.values(), *layout.truth, *layout.answers]
    first = len(header)
    if layout.multilabel:
        header += ["labels", "scores"]
    else:
        for place in range(1, layout.top_k + 1):
            header += [f"label_{place}", f"score_{place}"]
        header += chain(*layout.caption_columns)
    more = ["unknown"] * layout.reject + ["set"] * layout.sets

    def cells(prediction: Prediction) -> list[Cell]:
        found = (prediction.truth.get(name) for name in layout.truth)
        truth = (
            value if isinstance(value, str | float | None) else BETWEEN.join(value)
            for value in found
        )
        row: list[Cell] = [prediction.image, *layout.list_texts(prediction.image), *truth]
        answers = prediction.answers.values()
        row += [BETWEEN.join(one) if isinstance(one, tuple) else one for one in answers]
        row += [None] * (first - len(row))  # of an image that failed
        if layout.multilabel:
            row.append(BETWEEN.join(label for label, _ in prediction.predictions))
            row.append(tuple(score for _, score in prediction.predictions))
        else:
            row += chain(*prediction.predictions)
            row += [None] * (first + 2 * layout.top_k - len(row))  # of classes that were not named
            for caption in prediction.captions:
                row += [caption.text, caption.score]
            row += [None] * (len(header) - len(row))
        row += [prediction.unknown] * layout.reject
        row += [BETWEEN.join(prediction.prediction_set)] * layout.sets
        return [*row, prediction.error]

    return [*header, *more, "error"], cells


def csv_lines(layout: Layout) -> tuple[str, Line]:
    """RFC 4180; the columns are those of `spreadsheet_cells`."""
    header, cells = spreadsheet_cells(layout)

    def text(cell: Cell) -> str:
        if cell is None or isinstance(cell, str):
            return cell if cell and NUMBER.fullmatch(cell) else csv_text(cell or "")
        if isinstance(cell, tuple):
            return BETWEEN.join(map(text, cell))
        small = abs(cell) < 1 and not layout.top_k
        kind = "g" if layout.answers and small else "f"  # 0.00002 m is not 0
        number = repr(cell) if layout.digits is None else f"{cell:.{layout.digits}{kind}}"
        return number.replace(".", ",") if layout.separator == ";" else number

    def line(prediction: Prediction) -> str:
        return csv_row([text(cell) for cell in cells(prediction)], layout.separator)

    return csv_row([csv_text(name) for name in header], layout.separator), line


def xlsx_lines(layout: Layout) -> tuple[str, Line]:
    """The cells of each row as a JSON list, of which `write_workbook` makes the file."""
    header, cells = spreadsheet_cells(layout)
    check_size(len(layout.images), len(header), what="format=xlsx")

    def line(prediction: Prediction) -> str:
        return to_json([json_cell(cell) for cell in cells(prediction)]) + "\n"

    return to_json([json_cell(name) for name in header]) + "\n", line


def json_cell(cell: Cell) -> str | float | None:
    """A cell of a workbook: text on one line, a number, or nothing."""
    if isinstance(cell, tuple):
        return BETWEEN.join(f"{part:.{CSV_DIGITS}f}" for part in cell)
    return printable(cell) if isinstance(cell, str) else cell


def write_workbook(file: BinaryIO, lines: Iterable[bytes], *, shares: bool = True) -> None:
    """Write the lines of `xlsx_lines`, the header first, as a workbook."""
    write_sheet(file, map(json.loads, lines), number_format="0.00%" if shares else "0.0000")


def unended_note(unended: int, captions: int) -> str:
    """How many captions were cut off."""
    return f"{unended} of {plural(captions, 'caption')} cut off at the maximum length"


def csv_row(cells: Sequence[str], separator: str = ",") -> str:
    """A row of RFC 4180; white space at an end of a cell, which readers may drop, is in quotes."""
    special = re.compile(rf'[{separator}"\r\n]|^\s|\s$')
    quoted = (
        '"' + cell.replace('"', '""') + '"' if special.search(cell) else cell for cell in cells
    )
    return separator.join(quoted) + "\r\n"


def table_lines(layout: Layout) -> tuple[str, Line]:
    """Columns for reading: the image, label and probability of each place, captions and scores.

    An image of no probable class has a dash. Column widths come from the names alone, so that
    rows can be written as they are made; a name or a caption longer than its column pushes the
    rest of its row to the right. Where an image may have several classes, each of them adds a
    label and its probability. Instead of a rejected answer there is `unknown`, with the reason at
    the end of the row; a prediction set is at the end too, and before them the cells of a list.
    """
    image_width = column_width("image", *layout.images)
    label_width = column_width("label", *layout.classes, *([UNKNOWN] if layout.reject else []))
    units = (f" ({unit})" if unit else "" for unit in layout.answers.values())
    numbers = [printable(f"{name}{unit}") for name, unit in zip(layout.answers, units, strict=True)]
    answer_widths = [
        max(display_width(name), label_width if name == COLUMNS[0] else NUMBER_WIDTH)
        for name in numbers
    ]
    listed = [*layout.list_columns.values()]
    texts = zip(listed, *map(layout.list_texts, layout.cells), strict=True)
    widths = [column_width(*column) for column in texts]

    def line(prediction: Prediction) -> str:
        cells = [pad(printable(prediction.image), image_width)]
        found = zip(prediction.answers.values(), answer_widths, strict=False)
        cells += [answer_text(value, width) for value, width in found]
        for place, (label, score) in enumerate(prediction.predictions):
            rejected = place == 0 and prediction.unknown is not None and not layout.multilabel
            cells += [
                pad(UNKNOWN if rejected else printable(label), label_width),
                f"{score:7.2%}" if layout.shares else f"{score:7.4g}",
            ]
        if prediction.error is None:
            most = 1 if layout.multilabel else layout.top_k
            for place in range(len(prediction.predictions), most):
                cells += [pad("" if place else NO_CLASS, label_width), " " * 7]
        for caption in prediction.captions:
            cells += [pad(printable(caption.text), WIDEST_CELL), f"{caption.score:8.3f}"]
        if prediction.error is not None:
            cells.append(f"error: {printable(prediction.error)}")
        cells += map(pad, map(printable, layout.list_texts(prediction.image)), widths)
        if prediction.unknown is not None:
            cells.append(f"{UNKNOWN}: {prediction.unknown}")
        if prediction.prediction_set:
            cells.append(f"set: {printable(BETWEEN.join(prediction.prediction_set))}")
        return "  ".join(cells).rstrip() + "\n"

    header = [pad("image", image_width), *map(pad_left, numbers, answer_widths)]
    header += [pad("label", label_width), "score  "] * (1 if layout.multilabel else layout.top_k)
    for caption, score in layout.caption_columns:
        header += [pad(caption, WIDEST_CELL), f"{score:>8}"]
    header += map(pad, map(printable, listed), widths)
    return "  ".join(header).rstrip() + "\n", line


def answer_text(value: "Answer | None", width: int) -> str:
    """A number, classes, a node or `unknown` in a table, at the right of the column."""
    if isinstance(value, float):
        return f"{value:{width}.5g}"
    text = BETWEEN.join(value) if isinstance(value, tuple) else value or UNKNOWN
    return pad_left(printable(text), width)


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


def pad_left(text: str, width: int) -> str:
    return " " * (width - display_width(text)) + text


# name of --format -> header line and the function that writes one answer
FORMATS: dict[str, Callable[[Layout], tuple[str, Line]]] = {
    "table": table_lines,
    "jsonl": json_lines,
    "csv": csv_lines,
    "xlsx": xlsx_lines,
}


def write_review_list(
    path: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]], separator: str = ","
) -> None:
    """Write a list that `vit train` reads as --labels, --corrections or --exclude.

    Args:
        path: JSON lines if it ends in .jsonl, a workbook in .xlsx, else CSV, with the byte order
            mark that Excel needs for names that are not ASCII; None: CSV to standard output.
    """
    if path is not None and is_workbook(path):
        with open_atomic(resolve_link(path)) as book:
            cells = ([json_cell(cell) for cell in row] for row in [columns, *rows])
            write_sheet(book, cells, number_format="General")
        return
    with open_output(path) as out:
        if path is not None and path.lower().endswith(".jsonl"):
            out.writelines(to_json(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
        else:
            out.write(csv_mark(chain.from_iterable(rows)) + csv_row(columns, separator))
            out.writelines(csv_row([csv_text(cell) for cell in row], separator) for row in rows)
