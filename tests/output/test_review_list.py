"""Lists to edit: CSV on standard output, and cells that a spreadsheet does not run."""

import json

import pytest

from vit.data.workbook import read_sheet
from vit.output.review_list import write_review_list
from vit.text import printable


def test_a_list_without_a_file_is_csv_and_a_formula_is_text(tmp_path, capsys):
    rows = [("=a.png", ""), ("b.png", "cat")]
    write_review_list(None, ("image", "label"), rows)
    assert capsys.readouterr().out.splitlines() == ["image,label", "'=a.png,", "b.png,cat"]
    write_review_list(str(tmp_path / "list.jsonl"), ("image", "label"), rows)
    lines = (tmp_path / "list.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"image": "=a.png", "label": ""},
        {"image": "b.png", "label": "cat"},
    ]


@pytest.mark.parametrize("name", ["a\udcff.png", "a\x01.png"])
def test_a_workbook_shows_escapes_for_what_it_cannot_hold(tmp_path, name):
    path = str(tmp_path / "list.xlsx")
    write_review_list(path, ("image", "label"), [(name, "cat")])
    text = [[str(cell) for cell in row] for row in read_sheet(path)]
    assert text == [["image", "label"], [printable(name), "cat"]]
