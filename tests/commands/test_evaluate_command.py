"""`vit evaluate`: numbers for people and for programs, equal to what `vit predict` answers."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.commands.conftest import read_rows
from tests.markers import same_initial_weights
from vit.commands.main import main
from vit.data.corruptions import CORRUPTIONS
from vit.data.workbook import read_sheet
from vit.inference.evaluate import evaluate
from vit.output.prediction_results import Layout, csv_lines

pytestmark = pytest.mark.auto_precision


@pytest.mark.parametrize(
    "settings",
    [
        ["--precision", "auto"],
        ["--precision", "fp32"],
        ["--precision", "bf16"],
        ["--merge-tokens", "1"],
        ["--patch-size", "4"],
    ],
    ids=" ".join,
)
def test_top1_equals_that_counted_from_vit_predict(tiny_run, tiny_data, tmp_path, settings):
    settings = [*settings, "--batch-size", "8"]
    scores, answers = tmp_path / "scores.json", tmp_path / "answers.jsonl"
    words = ["evaluate", str(tiny_run), str(tiny_data), "--json", str(scores)]
    assert main([*words, *settings]) == 0
    words = ["predict", str(tiny_run), str(tiny_data / "val"), "--out", str(answers)]
    assert main([*words, *settings]) == 0
    rows = read_rows(answers)
    right = [row["predictions"][0]["label"] == Path(row["image"]).parent.name for row in rows]
    (found,) = read_rows(scores)
    assert found["count"] == len(rows) == 27
    assert 0 < found["top1"] < 1
    assert found["top1"] == sum(right) / len(right)


def test_the_json_file_has_the_scores_of_the_function(tiny_run, tiny_data, tmp_path, capsys):
    path = tmp_path / "scores.json"
    path.write_text("of an older run")
    assert main(["evaluate", str(tiny_run), str(tiny_data), "--json", str(path)]) == 0
    scores = evaluate(tiny_run, str(tiny_data))
    assert json.loads(path.read_text(encoding="utf-8")) == scores
    assert scores["per_class"][0].keys() == {"label", "count", "precision", "recall", "f1"}
    captured = capsys.readouterr()
    shares = re.findall(r"^(top-1|macro F1) +(\S+%)", captured.out, re.MULTILINE)
    assert shares == [("top-1", f"{scores['top1']:.2%}"), ("macro F1", f"{scores['macro_f1']:.2%}")]
    assert "weakest classes" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("top_k", [2, 5])
def test_rows_are_those_of_vit_predict_with_the_label(tiny_run, tiny_data, tmp_path, top_k):
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    (data / "val" / "apple" / "0.png").write_text("no image")
    out, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    flags = ["--top-k", str(top_k), "--precision", "fp32"]
    words = ["evaluate", str(tiny_run), str(data), "--out", str(out)]
    assert main([*words, *flags, "--json", str(tmp_path / "scores.json")]) == 1
    assert main(["predict", str(tiny_run), str(data / "val"), "--out", str(answers), *flags]) == 1
    rows, expected = read_rows(out), read_rows(answers)
    assert len(rows) == 27
    for row, other in zip(rows, expected, strict=True):
        label, score = row.pop("label"), row.pop("label_score")
        assert row == other
        assert label == Path(row["image"]).parent.name
        if "error" in row:
            assert score is None
        elif (scores := {one["label"]: one["score"] for one in row["predictions"]}).get(label):
            assert score == scores[label]
    (scores,) = read_rows(tmp_path / "scores.json")
    good = [row for row in rows if "error" not in row]
    right = [row["predictions"][0]["label"] == Path(row["image"]).parent.name for row in good]
    assert sum(right) / len(right) == scores["top1"]


def test_rows_as_csv_have_the_label_after_the_image(tiny_run, tiny_data, tmp_path, capsys):
    out = tmp_path / "rows.csv"
    words = ["evaluate", str(tiny_run), str(tiny_data), "--top-k", "1", "--out", str(out)]
    assert main(words) == 0
    rows = read_rows(out)
    assert [*rows[0]] == ["image", "label", "label_score", "label_1", "score_1", "error"]
    right = [row for row in rows if row["label"] == row["label_1"]]
    assert right
    assert all(row["label_score"] == row["score_1"] for row in right)
    book = tmp_path / "rows.xlsx"
    assert main([*words[:-1], str(book)]) == 0
    header, *cells = read_sheet(str(book))
    assert header == [*rows[0]]
    assert [row[:2] for row in cells] == [[row["image"], row["label"]] for row in rows]
    assert all(re.fullmatch(r"[01]\.\d{4}", row["label_score"]) for row in rows)
    assert main([*words, "--csv-digits", "full"]) == 2
    assert "rows.csv exists; choose another name, or add --overwrite" in capsys.readouterr().err
    words = [words[0], "--overwrite", *words[1:]]
    assert main([*words, "--csv-digits", "full"]) == 0
    scores = [float(row["label_score"]) for row in read_rows(out)]
    assert [float(row[2]) for row in cells] == pytest.approx(scores, rel=1e-12)
    assert main([*words, "--csv-separator", "semicolon"]) == 0
    local = out.read_bytes()
    assert local.startswith(b"\xef\xbb\xbfimage;label;label_score;")
    assert f"{scores[0]:.4f}".replace(".", ",").encode() in local


def test_rows_with_several_labels_have_all_of_them(several_run, several_list, tmp_path):
    for name in ("rows.csv", "rows.jsonl"):
        out = tmp_path / name
        assert main(["evaluate", str(several_run), str(several_list), "--out", str(out)]) == 0
    rows, cells = (read_rows(tmp_path / name) for name in ("rows.jsonl", "rows.csv"))
    expected = [row["labels"].split("|") for row in read_rows(several_list)]
    assert [row["true_labels"] or [""] for row in rows] == expected
    assert [row["true_labels"].split("|") for row in cells] == expected
    predicted = ["|".join(one["label"] for one in row["predictions"]) for row in rows]
    assert [row["labels"] for row in cells] == predicted


def test_all_scores_are_those_of_every_class(tiny_run, tiny_data, tmp_path):
    out = tmp_path / "rows.csv"
    words = ["evaluate", str(tiny_run), str(tiny_data), "--out", str(out), "--top-k", "3"]
    assert main([*words, "--all-scores", "--csv-digits", "full", "--precision", "fp32"]) == 0
    rows = read_rows(out)
    assert [*rows[0]][:6] == [
        *("image", "label", "label_score"),
        *(f"class_score_{name}" for name in ("apple", "class10", "class2")),
    ]
    for row in rows:
        ranked = {row[f"label_{n}"]: row[f"score_{n}"] for n in (1, 2, 3)}
        assert ranked == {name: row[f"class_score_{name}"] for name in ranked}
        assert row["label_score"] == row[f"class_score_{row['label']}"]


def test_all_scores_go_below_the_thresholds_of_several_labels(
    several_run, several_list, tmp_path, capsys
):
    out = tmp_path / "rows.jsonl"
    words = ["evaluate", str(several_run), str(several_list), "--out", str(out), "--all-scores"]
    assert main(words) == 0
    rows = read_rows(out)
    predict = ["predict", str(several_run), str(several_list), "--threshold", "0"]
    assert main([*predict, "--format", "jsonl"]) == 0
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()[-len(rows) :]]
    for row, other in zip(rows, expected, strict=True):
        scores = {one["label"]: one["score"] for one in other["predictions"]}
        assert len(scores) == 3
        assert scores == {name: row[f"class_score_{name}"] for name in scores}
    assert any(len(row["predictions"]) < 3 for row in rows)
    # label errors of such rows are not searched for
    words = ["check", str(several_list), "--task", "multilabel", "--rows", str(out)]
    assert main(words) == 2
    assert "line 1: not a row of" in (capsys.readouterr().err)


def test_a_class_name_that_is_a_formula_is_guarded_in_the_header():
    layout = Layout(1, ("a,=1+1",), [], truth=("label", "class_score_a,=1+1"))
    assert csv_lines(layout)[0].startswith("""image,label,"class_score_a,'=1+1",""")


def test_unreadable_images_give_exit_code_1(tiny_run, tiny_data, tmp_path, capsys):
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    (data / "val" / "apple" / "0.png").write_text("no image")
    assert main(["evaluate", str(tiny_run), str(data)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "0.png" in lines[0]
    assert "1 of 27 images failed" in lines[1]


def test_classes_without_images_are_counted_in_the_output(tiny_run, tiny_data, tmp_path, capsys):
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    shutil.rmtree(data / "val" / "class10")
    assert main(["evaluate", str(tiny_run), str(data)]) == 0
    captured = capsys.readouterr()
    assert "1 of the model's classes have no image here" in captured.out
    assert "class10" in captured.err


def test_slices_and_robustness_are_printed_and_in_the_page(
    several_run, several_list, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("vit.evaluation.accuracy_slices.LEVEL", 1.1)  # every slice is flagged
    kept = {name: CORRUPTIONS[name] for name in ("jpeg", "gaussian_blur")}
    monkeypatch.setattr("vit.inference.evaluate.CORRUPTIONS", kept)
    page, scores = tmp_path / "page.html", tmp_path / "scores.json"
    words = ["--html", str(page), "--json", str(scores), "--corruptions", "--device", "cpu"]
    with open(several_list, encoding="utf-8") as file:
        rows = [f"{line.strip()},{'ab'[number % 2]}" for number, line in enumerate(file)]
    listed = tmp_path / "list.csv"
    listed.write_text("\n".join([rows[0][:-1] + "site", *rows[1:]]) + "\n")
    words += ["--images", str(several_list.parent), "--slice", "site"]
    assert main(["evaluate", str(several_run), str(listed), *words]) == 0
    found, printed = json.loads(scores.read_text(encoding="utf-8")), capsys.readouterr().out
    assert {row["slice"] for row in found["slices"]} == {"a", "b"}
    text = page.read_text(encoding="utf-8")
    assert "2 of 2 slices of the images are less accurate than the rest" in printed
    for row in found["slices"]:
        assert f"  {row['sentence']}" in printed
        assert row["sentence"] in text
    curve = [
        row["map"] for row in found["robustness"]["corruptions"] if row["corruption"] == "jpeg"
    ]
    assert len(curve) == 5
    cells = "".join(f"{value:>9.2%}" for value in curve)
    assert f"  jpeg            {cells}" in printed
    assert f"mean {found['robustness']['mean']:.2%}" in printed
    for part in ("jpeg, by severity: 0: ", f"<b>{found['map']:.2%}</b>", "gaussian blur"):
        assert part in text


@same_initial_weights
def test_without_a_worse_slice_there_is_one_line(tiny_run, tiny_data, capsys):
    assert main(["evaluate", str(tiny_run), str(tiny_data), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("none of 2 slices of the images is less accurate than the rest")
