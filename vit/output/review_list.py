"""Lists that a person edits: CSV for spreadsheets, JSON lines or an Excel workbook."""

from collections.abc import Sequence
from itertools import chain

from vit.atomic_files import open_atomic
from vit.data.workbook import is_workbook, write_sheet
from vit.output.output_file import open_output, resolve_link
from vit.output.prediction_results import csv_row, json_cell, to_json
from vit.text import csv_mark, csv_text


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
