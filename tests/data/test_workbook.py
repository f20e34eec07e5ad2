"""Workbooks: what is written comes back, formulas do not run, and damage is one line."""

import datetime
import zipfile

import openpyxl
import pytest

from vit.data import workbook
from vit.data.workbook import check_size, read_sheet, write_sheet
from vit.errors import DataError, VitError


@pytest.fixture
def save(tmp_path):
    """Saves rows of a sheet, or several sheets, as a workbook."""

    def save(**sheets):
        book = openpyxl.Workbook()
        book.remove(book.active)
        for name, rows in sheets.items():
            sheet = book.create_sheet(name)
            for row in rows:
                sheet.append(row)
        book.save(tmp_path / "a.xlsx")
        return str(tmp_path / "a.xlsx")

    return save


def test_cells_are_text(save):
    day = datetime.date(2026, 2, 1)
    rows = [["image", "label", "n", None], ["a b.jpg", 3, 2.5], [7.0, True, day, None], [], ["x"]]
    found = list(read_sheet(save(list=rows)))
    assert found[0] == ["image", "label", "n"]
    assert found[1] == ["a b.jpg", "3", "2.5"]
    assert found[2] == ["7", "True", "2026-02-01T00:00:00"]
    assert found[3:] == [["", "", ""], ["x", "", ""]]


def test_a_written_sheet_is_text_and_numbers_and_no_formula(tmp_path):
    path = tmp_path / "a.xlsx"
    with open(path, "wb") as file:
        write_sheet(file, [["image", "score"], ["=1+1", 0.25], ["猫", None]], number_format="0.00%")
    assert list(read_sheet(str(path))) == [["image", "score"], ["=1+1", "0.25"], ["猫", ""]]
    sheet = openpyxl.load_workbook(path).active
    assert (sheet["A2"].data_type, sheet["A2"].value) == ("s", "=1+1")
    assert (sheet["B2"].value, sheet["B2"].number_format) == (0.25, "0.00%")
    assert sheet.freeze_panes == "A2"


def test_empty_sheets_do_not_matter_and_several_lists_do(save):
    assert list(read_sheet(save(a=[], b=[["x"]], c=[]))) == [["x"]]
    with pytest.raises(DataError, match=r"2 sheets with content \(a, b\); give a workbook"):
        list(read_sheet(save(a=[["x"]], b=[["y"]])))
    with pytest.raises(DataError, match="no content"):
        list(read_sheet(save(a=[])))


@pytest.mark.parametrize("content", [b"", b"image,label\n", b"PK\x03\x04" + bytes(60)])
def test_what_is_no_workbook_is_told(tmp_path, content):
    (tmp_path / "a.xlsx").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.xlsx is no Excel workbook"):
        list(read_sheet(str(tmp_path / "a.xlsx")))


def test_a_damaged_workbook_is_told(save):
    import zipfile

    path = save(list=[["x"]])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("[Content_Types].xml", "<broken")
    with pytest.raises(DataError, match="not a readable workbook"):
        list(read_sheet(path))


def test_a_missing_library_has_its_remedy(save, monkeypatch):
    path = save(list=[["x"]])
    monkeypatch.setattr(workbook, "find_spec", lambda _name: None)
    remedy = r"pip install 'vit-toolkit\[xlsx\]'"
    with pytest.raises(DataError, match=rf"{remedy}, or save it as CSV .*CSV UTF-8"):
        list(read_sheet(path))
    with pytest.raises(VitError, match=f"format=xlsx needs openpyxl: {remedy}; or write a .csv"):
        check_size(3, 3, what="format=xlsx")


def test_more_rows_than_excel_takes_are_refused():
    check_size(1_048_575, 3, what="x")
    with pytest.raises(VitError, match="more than Excel's"):
        check_size(1_048_576, 3, what="x")


def test_rows_beyond_the_stated_size_are_read(save, tmp_path):
    path = save(list=[["image", "label"], *([f"{n}.jpg", n] for n in range(30))])
    stated = tmp_path / "stated.xlsx"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(stated, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, content.replace(b'ref="A1:B31"', b'ref="A1:B10"'))
    assert [row[0] for row in read_sheet(str(stated))][1:] == [f"{n}.jpg" for n in range(30)]
