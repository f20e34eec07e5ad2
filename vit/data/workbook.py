"""Excel workbooks (.xlsx): one sheet as rows of text, and rows as a sheet.

Cells are never formulas: text that begins with = stays text, and of a formula its last result is
read.
"""

import datetime
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, BinaryIO

from vit.errors import DataError, VitError, error_text
from vit.text import join_names, printable

SUFFIX = ".xlsx"
MAX_BYTES = 2**30
"""Of all parts of a workbook, unpacked."""
MAX_ROWS, MAX_COLUMNS, MAX_CHARACTERS = 1_048_576, 16_384, 32_767
"""Limits of Excel, the last of a cell."""
INSTALL = "pip install 'vit-toolkit[xlsx]'"


def is_workbook(path: str) -> bool:
    return path.lower().endswith(SUFFIX)


def check_size(rows: int, columns: int, *, what: str) -> None:
    """Refuse a sheet that Excel would not open, or that cannot be written here."""
    if find_spec("openpyxl") is None:
        raise VitError(f"{what} needs openpyxl: {INSTALL}; or write a .csv")
    if rows + 1 > MAX_ROWS or columns > MAX_COLUMNS:
        raise VitError(
            f"{what}: {rows + 1:,} rows of {columns:,} cells are more than Excel's "
            f"{MAX_ROWS:,} x {MAX_COLUMNS:,}; write a .csv"
        )


def read_sheet(path: str) -> Iterator[list[str]]:
    """Yield the rows of the only sheet with content, as text.

    Empty cells at the end of a row are left out, and added up to the width of the first row.
    """
    name = printable(path)
    if find_spec("openpyxl") is None:
        raise DataError(
            f"{name} is an Excel workbook: {INSTALL}, or save it as CSV (File > Save As > CSV "
            "UTF-8 (Comma delimited) (*.csv)) and give that file"
        )
    import openpyxl

    try:
        with open(path, "rb") as file:
            _check_archive(file, name)
            book = openpyxl.load_workbook(file, read_only=True, data_only=True)
            for one in book.worksheets:
                one.reset_dimensions()  # some programs state fewer rows than they write
            sheets = {one.title: one for one in book.worksheets if _has_content(one)}
            if len(sheets) != 1:
                have = f"{len(sheets)} sheets with content ({join_names(sheets)})"
                found = have if sheets else "no content"
                raise DataError(f"{name} has {found}; give a workbook with one list")
            width = 0
            (sheet,) = sheets.values()
            for row in sheet.iter_rows(values_only=True):
                cells = [cell_text(value) for value in row]
                while cells and not cells[-1].strip():
                    cells.pop()
                width = width or len(cells)
                yield cells + [""] * (width - len(cells))
            book.close()
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # any error of a parser
        reason = error_text(error, 120)
        raise DataError(f"{name}: not a readable workbook ({reason}); save it as CSV") from None


def cell_text(value: Any) -> str:
    """The value of a cell as it would be written in a CSV: `3` for 3.0."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def write_sheet(file: BinaryIO, rows: Iterable[Sequence[Any]], *, number_format: str) -> None:
    """Write a workbook with one sheet, whose first row is the header; a number is shown by
    `number_format`, such as `0.00%`."""
    import openpyxl
    from openpyxl.cell import WriteOnlyCell

    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("predictions")
    sheet.freeze_panes = "A2"
    sheet.column_dimensions["A"].width = 40

    def cell(value: Any) -> Any:
        if not isinstance(value, str | float):
            return value
        made = WriteOnlyCell(sheet, value[:MAX_CHARACTERS] if isinstance(value, str) else value)
        if isinstance(value, str):
            made.data_type = "s"  # never a formula
        else:
            made.number_format = number_format
        return made

    for row in rows:
        sheet.append([cell(value) for value in row])
    book.save(file)


def _check_archive(file: BinaryIO, name: str) -> None:
    """Refuse what is no workbook, or would fill the memory."""
    if not os.fstat(file.fileno()).st_size or not zipfile.is_zipfile(file):
        raise DataError(f"{name} is no Excel workbook, whatever its name; give the list as .csv")
    with zipfile.ZipFile(file) as archive:
        if sum(part.file_size for part in archive.infolist()) > MAX_BYTES:
            raise DataError(f"{name} unpacks to more than {MAX_BYTES / 2**30:.0f} GiB; use a .csv")
    file.seek(0)


def _has_content(sheet: Any) -> bool:
    """Whether one of the first rows of a sheet has a cell with content."""
    rows = sheet.iter_rows(values_only=True, max_row=100)
    return any(value is not None for row in rows for value in row)
