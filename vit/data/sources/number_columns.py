"""Numbers in columns of lists: `12.5`, `12,5`, `12 cm`; the cells of a column are read together."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from vit.data.sources.table_reader import json_kind
from vit.text import without_formula_guards

NUMBER = re.compile(
    r"([-+\u2212]?(?:[0-9]+(?:[.,][0-9]*)?|[.,][0-9]+)(?:[eE][-+]?[0-9]+)?)"
    r"\s*((?:[^\W\d_]|[%‰°'\"$€£¥])\S{0,11})?"
)
THOUSANDS = re.compile(r"[-+\u2212]?[1-9][0-9]{0,2},[0-9]{3}")
"""A number whose comma may separate thousands."""
NO_VALUE = {"nan", "na", "n/a", "null", "none", "inf", "+inf", "-inf", "infinity"}
INFINITE = 3.4e38
"""From here on, a number is infinite in float32."""


class NumberCell(NamedTuple):
    """What a cell says."""

    number: str | float | None
    """As it is written, without the unit; None of an empty cell or a text."""
    unit: str = ""
    error: str = ""
    """Why it cannot be learned, unless the cell is empty."""


class NumberColumn(NamedTuple):
    """The numbers of a column of a list."""

    values: list[float]
    """Of each row; NaN where the cell is empty or wrong."""
    errors: dict[int, str]
    """By row, from 0."""
    unit: str | None
    """Of all cells, or empty; None of an empty column."""
    decimal_commas: bool


def split_cell(value: Any, *, is_table: bool) -> NumberCell:
    """The number and the unit in a cell of a table, or the number of a value of JSON."""
    if value is None:
        return NumberCell(None)
    if not is_table:
        if isinstance(value, bool) or not isinstance(value, int | float):
            remedy = "expected a number without quotes, or null"
            return NumberCell(None, error=f"{json_kind(value)}; {remedy}")
        return NumberCell(float(value) if abs(value) < INFINITE else math.inf)
    text = without_formula_guards(value).strip()
    if not text:
        return NumberCell(None)
    if found := NUMBER.fullmatch(text):
        return NumberCell(found[1].replace("\u2212", "-"), found[2] or "")
    if text.lower() in NO_VALUE:
        return NumberCell(math.nan, error=f"{text}; leave the cell empty where it is not known")
    return NumberCell(None, error=f"{text[:40]!r} is no number; write digits such as 1234.5")


def constant_target(
    name: str, values: Sequence[float] | NDArray[Any], classes: Sequence[str]
) -> str | None:
    """What is wrong with a target whose training images all have one number, or class, or none."""
    if len({*values}) > 1:
        return None
    only = "empty"
    if len(values):
        only = classes[int(values[0])] if classes else f"{values[0]:g}"
    return f"target {name}: is {only} in all training images; nothing to learn"


def read_numbers(values: Sequence[Any], lines: Sequence[int], *, is_table: bool) -> NumberColumn:
    """The numbers of a column with the cells `values` in these `lines` of its list.

    All cells have one unit, or none has. A comma is a decimal comma, where no cell has a point and
    one shows that it does not separate thousands.
    """
    cells = [split_cell(value, is_table=is_table) for value in values]
    errors = {row: cell.error for row, cell in enumerate(cells) if cell.error}
    filled = [row for row, cell in enumerate(cells) if cell.number is not None and not cell.error]
    unit = next(iter(Counter(cells[row].unit for row in filled).most_common(1)), (None,))[0]
    for row in filled:
        if (own := cells[row].unit) != unit:
            first = next(lines[one] for one in filled if cells[one].unit == unit)
            both = f"{own or 'no unit'} here, and {unit or 'none'} in line {first}"
            errors[row] = f"{both}; write all numbers of the column in one unit, or none"
    texts = {row: text for row in filled if isinstance(text := cells[row].number, str)}
    commas = [row for row, text in texts.items() if "," in text]
    point = next((row for row, text in texts.items() if "." in text), None)
    why = "a comma before three digits in each cell that has one, of thousands or of decimals"
    if point is not None:
        why = f"a comma here, and a point in line {lines[point]}"
    elif any(not THOUSANDS.fullmatch(texts[row]) for row in commas):
        why = ""
    for row in commas if why else ():
        errors[row] = f"{why}; write 1234.5, without commas"
    numbers = [math.nan] * len(cells)
    for row in filled:
        number = float(str(cells[row].number).replace(",", "."))
        if not abs(number) < INFINITE:
            errors[row] = "an infinite number; correct it, or leave the cell empty"
        elif row not in errors:
            numbers[row] = number
    return NumberColumn(numbers, errors, unit, bool(commas))
