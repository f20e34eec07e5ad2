"""What is written comes back whole from a parser, and names from strangers do nothing."""

import csv
import json
import os

import openpyxl
import pytest

from vit.data.workbook import read_sheet
from vit.errors import ConfigError
from vit.generation.generation_config import Caption
from vit.output.prediction_results import (
    FORMATS,
    Layout,
    Prediction,
    byte_order_mark,
    csv_lines,
    csv_text,
    display_width,
    json_lines,
    table_lines,
    to_json,
    write_review_list,
    write_workbook,
    xlsx_lines,
)
from vit.text import BOM, printable, without_formula_guards

NASTY = [
    *("plain.jpg", 'a,b"c.jpg', "=HYPERLINK(1,2).jpg", "+1.jpg", "-1.jpg", "@SUM(A1).jpg"),
    *("\ttab.jpg", "\rreturn.jpg", "two\nlines.jpg", "\x1b[31mred\x07.jpg", "\u202egpj.exe"),
    *("\x9b31m\x85\u2028\u2029.jpg", "猫 e\u0301.jpg", os.fsdecode(b"\xff\xfe.jpg")),
    "<script>alert(1)</script>.jpg",
]
ANSWERS = [Prediction(name, ((name, 0.75), ("other", 1e-300))) for name in NASTY]
ANSWERS += [Prediction(name, error=f"{name} is not an image") for name in NASTY]
SPEECHES = [
    Prediction(name, captions=(Caption(name, -0.5, (), ended=True), Caption("b", -2.0, (), False)))
    for name in NASTY
]
LAYOUT = Layout(top_k=2, classes=[*NASTY, "other"], images=NASTY)


def json_of(answer, **options):
    _, line = json_lines(Layout(top_k=0, classes=(), images=(), **options))
    return line(answer)


@pytest.mark.parametrize("answer", [*ANSWERS, Prediction("猫.jpg")])
def test_json_gives_every_name_back(answer):
    line = json_of(answer)
    assert line.encode("utf-8").endswith(b"\n")
    assert line[:-1].isprintable()
    assert ("猫" in line) == ("猫" in answer.image)
    record = json.loads(line)
    assert record["image"] == answer.image
    if answer.error is None:
        pairs = tuple((row["label"], row["score"]) for row in record["predictions"])
        assert record.keys() == {"image", "predictions"}
        assert pairs == answer.predictions
    else:
        assert record == {"image": answer.image, "error": answer.error}


@pytest.mark.parametrize("answer", SPEECHES)
def test_json_gives_every_caption_back(answer):
    line = json_of(answer, n_best=2)
    assert line[:-1].isprintable()
    first = {"caption": answer.image, "score": -0.5}
    second = {"caption": "b", "score": -2.0, "ended": False}
    assert json.loads(line) == {"image": answer.image, **first, "captions": [first, second]}
    assert json.loads(json_of(answer)).keys() == {"image", "caption", "score"}


def test_json_refuses_what_is_not_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"loss": float("nan")})


def csv_rows(layout, answers):
    """The rows of answers as a parser reads them, in which no cell is a formula."""
    header, line = csv_lines(layout)
    text = header + "".join(map(line, answers))
    assert text.encode("utf-8").count(b"\r\n") == text.count("\n") == len(answers) + 1
    first, *rows = csv.reader(text.splitlines(keepends=True), strict=True)
    assert {len(row) for row in rows} == {len(first)} == {6}
    for row in rows:
        texts = [cell for cell in row if cell not in ("-0.5", "-2.0")]
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in texts)
        assert all(cell.isprintable() for cell in row)
    return first, rows


def safe_table(layout, answers, score):
    """The rows of a table, of which scores begin in one column."""
    header, line = table_lines(layout)
    rows = [line(answer) for answer in answers]
    for row in [header, *rows]:
        assert row.endswith("\n")
        assert row[:-1].isprintable()
        row.encode("utf-8")
    (start,) = {display_width(row[: row.index(score)]) for row in rows if score in row}
    return header, start


def test_csv_is_whole_and_runs_nothing():
    header, rows = csv_rows(LAYOUT, ANSWERS)
    assert header == ["image", "label_1", "score_1", "label_2", "score_2", "error"]
    for row, answer in zip(rows, ANSWERS, strict=True):
        assert row[0].startswith("'") == (answer.image[0] in "=+-@\t\r")
        assert (row[5] != "") == (answer.error is not None)
        assert [float(cell) for cell in (row[2], row[4]) if cell] == [
            score for _, score in answer.predictions
        ]


def test_table_is_one_safe_line_an_answer():
    header, start = safe_table(LAYOUT, ANSWERS, " 75.00%")
    assert start == display_width(header[: header.index("score")])


def test_captions_are_safe_in_csv_and_in_a_table():
    layout = Layout(top_k=0, classes=(), images=NASTY, n_best=2)
    _, rows = csv_rows(layout, SPEECHES)
    assert {(row[2], row[4]) for row in rows} == {("-0.5", "-2.0")}

    safe_table(layout, SPEECHES, "-0.500")


def test_a_name_wider_than_its_column_is_not_cut():
    long = "x" * 100
    _, line = table_lines(Layout(top_k=1, classes=["cat"], images=[long]))
    assert long in line(Prediction(long, (("cat", 1.0),)))


@pytest.mark.parametrize(
    ("separator", "digits", "expected"),
    [
        (",", 4, "a.jpg,cat,0.1235,"),
        (";", 4, "a.jpg;cat;0,1235;"),
        ("\t", 2, "a.jpg\tcat\t0.12\t"),
        (",", 0, "a.jpg,cat,0,"),
        (",", None, "a.jpg,cat,0.1234567890123,"),
    ],
)
def test_csv_has_the_separator_the_decimal_sign_and_the_digits(separator, digits, expected):
    layout = Layout(1, ["cat"], ["a.jpg"], separator=separator, digits=digits)
    header, line = csv_lines(layout)
    assert header == separator.join(["image", "label_1", "score_1", "error"]) + "\r\n"
    assert line(Prediction("a.jpg", (("cat", 0.1234567890123),))) == expected + "\r\n"


@pytest.mark.parametrize(
    "name", ["x;=1", 'x;"=1', "x,-1", "a;x,@y", "\uff1d1", "x;\uff0b1", "x;\uff0d1", "x,\uff20a"]
)
def test_no_separator_of_any_country_begins_a_formula(name):
    cell = csv_text(name)
    starts = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
    for separator in (",", ";"):
        assert not any(part.strip('"').startswith(starts) for part in cell.split(separator)), cell
    assert csv_text("a-b, c=d (1+1).jpg") == "a-b, c=d (1+1).jpg"


def test_a_workbook_has_names_as_they_are_and_percentages(tmp_path):
    header, line = xlsx_lines(LAYOUT)
    with open(tmp_path / "a.xlsx", "wb") as file:
        write_workbook(file, [row.encode() for row in (header, *map(line, ANSWERS))])
    first, *cells = openpyxl.load_workbook(tmp_path / "a.xlsx").active.iter_rows()
    columns = ["image", "label_1", "score_1", "label_2", "score_2", "error"]
    assert [cell.value for cell in first] == columns
    for row, answer in zip(cells, ANSWERS, strict=True):
        assert row[0].value == printable(answer.image)
        assert {cell.data_type for cell in row} <= {"s", "n"}  # not "f", a formula
        scores = [row[2].value, row[4].value]
        assert scores == ([None, None] if answer.error else [0.75, 1e-300])
    assert cells[0][2].number_format == "0.00%"


def test_unknown_answers_and_sets_are_in_every_format():
    rows = [
        Prediction("a.png", (("cat", 0.6),), unknown="uncertain", prediction_set=("cat", "=dog")),
        Prediction("b.png", (("=dog", 0.9),), prediction_set=("=dog",)),
        Prediction("c.png", error="it is empty"),
    ]
    layout = Layout(1, ("cat", "=dog"), ("a.png", "b.png", "c.png"), reject=True, sets=True)
    formats = {name: FORMATS[name](layout) for name in ("table", "jsonl", "csv")}
    lines = {name: [header, *map(line, rows)] for name, (header, line) in formats.items()}
    first, second, third = (json.loads(line) for line in lines["jsonl"][1:])
    assert (first["unknown"], first["reason"], first["set"]) == (True, "uncertain", ["cat", "=dog"])
    assert first["predictions"] == [{"label": "cat", "score": 0.6}]
    assert (second["unknown"], second["set"]) == (False, ["=dog"])
    assert "reason" not in second
    assert third.keys() == {"image", "error"}
    assert [*csv.reader(lines["csv"])] == [
        ["image", "label_1", "score_1", "unknown", "set", "error"],
        ["a.png", "cat", "0.6", "uncertain", "cat|=dog", ""],
        ["b.png", "'=dog", "0.9", "", "'=dog", ""],
        ["c.png", "", "", "", "", "it is empty"],
    ]
    table = [line.split() for line in lines["table"]]
    assert table[1] == ["a.png", "unknown", "60.00%", "unknown:", "uncertain", "set:", "cat|=dog"]
    assert table[2] == ["b.png", "=dog", "90.00%", "set:", "=dog"]


def test_multilabel_rows_are_unknown_as_a_whole():
    answer = Prediction(
        "a.png",
        (("cat", 0.6), ("dog", 0.5)),
        unknown="uncertain",
        prediction_set=("cat", "dog", "cow"),
    )
    layout = Layout(3, ("cat", "cow", "dog"), ("a.png",), multilabel=True, reject=True, sets=True)
    header, line = csv_lines(layout)
    assert [*csv.reader([header, line(answer)])] == [
        ["image", "labels", "scores", "unknown", "set", "error"],
        ["a.png", "cat|dog", "0.6|0.5", "uncertain", "cat|dog|cow", ""],
    ]
    assert table_lines(layout)[1](answer).split()[1:] == [
        *("cat", "60.00%", "dog", "50.00%", "unknown:", "uncertain", "set:", "cat|dog|cow")
    ]


@pytest.mark.parametrize("names", [("a", "-20 C"), ("-20 C", "a"), ("a,=b", "+c")])
def test_true_and_predicted_classes_are_written_alike_and_read_back(names):
    answer = Prediction("a.png", tuple((name, 0.5) for name in names), truth={"true_labels": names})
    header, line = csv_lines(Layout(2, names, (), multilabel=True, truth=["true_labels"]))
    (row,) = csv.DictReader([header, line(answer)])
    assert row["true_labels"] == row["labels"]
    assert not row["labels"].startswith(("-", "+"))
    assert tuple(without_formula_guards(row["labels"]).split("|")) == names


def test_sets_of_classes_with_the_separator_are_refused_in_csv():
    with pytest.raises(ConfigError, match="parts classes"):
        csv_lines(Layout(1, ("a|b", "c"), (), sets=True))


CELLS = {
    "a.jpg": {"Image": "sub/a.jpg", "site": "=B", "lon": "-5.25", "label": "cat", "error": ""},
    "b.jpg": {"site": "Ä\n1", "boxes": [1, {"x": None}], "area": 1e999, "score_1": 0.5, "n": 0},
}
NAMES = ["list_Image", "site", "lon", "label", "list_error", "boxes", "area", "list_score_1", "n"]


@pytest.mark.parametrize("several", [False, True])
def test_cells_of_a_list_stand_behind_the_image_under_their_own_names(several):
    layout = Layout(1, ["cat"], [*CELLS, "c.jpg"], multilabel=several, cells=CELLS)
    rows = [Prediction(name, (("cat", 0.5),)) for name in ("a.jpg", "c.jpg")]
    rows.insert(1, Prediction("b.jpg", error="gone"))
    header, line = csv_lines(layout)
    columns, *found = csv.reader(header.splitlines() + [line(row).strip("\r\n") for row in rows])
    assert columns[: len(NAMES) + 1] == ["image", *NAMES]
    assert columns[-1] == "error"
    cells = [row[1 : len(NAMES) + 1] for row in found]
    assert cells[0] == ["sub/a.jpg", "'=B", "-5.25", "cat", *[""] * 5]  # numbers are no formulas
    assert cells[1] == ["", "Ä\\n1", "", "", "", '[1, {"x": null}]', "", "0.5", "0"]
    assert cells[2] == [""] * len(NAMES)
    assert [row[-1] for row in found] == ["", "gone", ""]
    assert byte_order_mark(layout) == BOM  # for the cells
    _, line = json_lines(layout)
    one, other, none = (json.loads(line(row)) for row in rows)
    assert one == {
        "image": "a.jpg",
        "list_Image": "sub/a.jpg",
        "site": "=B",
        "lon": "-5.25",
        "label": "cat",
        "list_error": "",
        "predictions": [{"label": "cat", "score": 0.5}],
    }
    assert other == {
        "image": "b.jpg",
        "site": "Ä\n1",
        "boxes": [1, {"x": None}],
        "area": None,
        "list_score_1": 0.5,
        "n": 0,
        "error": "gone",
    }
    assert none.keys() == {"image", "predictions"}
    header, line = table_lines(layout)
    at = header.index("site")
    assert line(rows[0])[at:].startswith("=B ")
    assert "error: gone" in line(rows[1])


def test_columns_of_an_evaluation_come_before_those_of_a_list():
    cells = {"a.jpg": {"label": "Cat", "list_label": "x", "file_name": "a.jpg", "class_score_a": 1}}
    layout = Layout(1, ["cat"], ["a.jpg"], truth=["label"], cells=cells)
    names = ["list_label", "list_list_label", "list_file_name", "list_class_score_a"]
    assert [*layout.list_columns.values()] == names
    row = json.loads(json_lines(layout)[1](Prediction("a.jpg", truth={"label": "cat"})))
    assert (row["label"], row["list_label"]) == ("cat", "Cat")


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
