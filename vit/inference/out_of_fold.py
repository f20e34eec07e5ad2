"""Out-of-fold predictions of a cross-validation, and the label errors that they show.

    fold-1/rows.jsonl, fold-2/rows.jsonl, ...    each image by the network that has not seen it
    rows.jsonl           all of them, one row an image, with the number of the fold
    label_errors.csv     suspected labels, the least probable first

Source: vit/evaluation/confident_learning.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vit.atomic_files import open_atomic
from vit.config.merge_settings import LABEL_ERRORS_FILE, ROWS_FILE
from vit.config.stored_config import stored_config
from vit.evaluation.confident_learning import (
    SuspectRow,
    find_suspect_rows,
    read_labeled_rows,
    weak_predictions,
)
from vit.inference.evaluate import evaluate_held_out
from vit.output.prediction_results import csv_row, to_json
from vit.text import csv_mark, csv_text, plural, printable, quoted

COLUMNS = ("image", "label", "label_score", "likely", "likely_score", "margin")


def evaluate_fold(run: Path) -> dict[str, Any]:
    """Evaluate the run of a fold on its held-out images, and write their rows.

    With several labels an image the rows have the score of every class: predictions end at the
    thresholds, which differ between folds.
    """
    config = stored_config(run)
    several = config.training.multilabel
    return evaluate_held_out(run, out=run / ROWS_FILE, all_scores=several)


def join_folds(folder: Path, folds: int, data: str, labels: str | None = None) -> list[str]:
    """Write rows.jsonl and, with one class an image, label_errors.csv of a cross-validation.

    Args:
        folder: Folder of the finished runs fold-1, fold-2, ...

    Returns:
        Lines for the user.
    """
    single = True
    with open_atomic(folder / ROWS_FILE, "w", encoding="utf-8", newline="") as out:
        for fold in range(1, folds + 1):
            rows = folder / f"fold-{fold}" / ROWS_FILE
            if not rows.is_file():  # of an earlier version
                evaluate_fold(rows.parent)
            with open(rows, encoding="utf-8") as file:
                for line in file:
                    record = json.loads(line)
                    single = single and ("error" in record or "label_score" in record)
                    out.write(to_json({**record, "fold": fold}) + "\n")
    path, errors = folder / ROWS_FILE, folder / LABEL_ERRORS_FILE
    lines = [f"out-of-fold predictions: {printable(path)}"]
    if not single:
        return lines
    found = read_labeled_rows(path)
    suspects = find_suspect_rows(found)
    write_label_errors(errors, suspects)
    listed = "" if labels is None else f" --labels {quoted(labels)}"
    weak = weak_predictions(found)
    return [
        *lines,
        f"label errors: {len(suspects):,} of {plural(len(found), 'image')} are suspected, the most "
        f"certain first in {printable(errors)}; as images: vit check {quoted(data)}"
        f"{listed} --rows {quoted(path)} --html FILE",
        *([] if weak is None else [f"note: {weak}"]),
    ]


def write_label_errors(path: Path, suspects: Sequence[SuspectRow]) -> None:
    """Write suspected labels as CSV, with a byte order mark where Excel needs it."""
    names = (text for one in suspects for text in (one.row.image, one.row.label, one.likely))
    with open_atomic(path, "w", encoding="utf-8", newline="") as out:
        out.write(csv_mark(names) + csv_row(COLUMNS))
        for one in suspects:
            texts = [csv_text(one.row.image), csv_text(one.row.label)]
            likely = [csv_text(one.likely), repr(one.likely_score), repr(one.margin)]
            out.write(csv_row([*texts, repr(one.row.label_score), *likely]))
