"""`vit evaluate`: numbers for people and for programs, equal to what `vit predict` answers."""

import json
import shutil
from pathlib import Path

import pytest

from vit.commands.main import main
from vit.inference.evaluate import evaluate

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
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    right = [row["predictions"][0]["label"] == Path(row["image"]).parent.name for row in rows]
    found = json.loads(scores.read_text(encoding="utf-8"))
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
    assert f"{scores['top1']:.2%}" in captured.out
    assert "weakest classes" in captured.out
    assert captured.err == ""


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


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nothing"], "nothing"),
        (["{data}", "--split", "test"], "test"),
        (["{data}", "--json", "no/such/folder.json"], "no folder"),
        (["{data}", "--device", "gpu"], "device='gpu'"),
        ([], "DATA"),
    ],
)
def test_invalid_arguments_are_one_line_errors(tiny_run, tiny_data, capsys, words, reason):
    words = [word.format(data=tiny_data) for word in words]
    assert main(["evaluate", str(tiny_run), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert reason in captured.err
