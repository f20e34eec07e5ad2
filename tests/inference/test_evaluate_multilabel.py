"""What a network says of images with several classes: all over their thresholds, best first."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.inference.answers import direct_logits
from vit.commands.main import main
from vit.errors import ConfigError, VitError
from vit.inference.attribution import classes_to_explain
from vit.inference.evaluate import evaluate
from vit.inference.predictor import Predictor
from vit.output.prediction_results import FORMATS, Layout, Prediction
from vit.weights.saved_model import check_thresholds, load_run

pytestmark = pytest.mark.auto_precision

THRESHOLDS = {"blue": 0.3, "green": 0.5, "red": 0.7}
TOLERANCES = {"fp32": 1e-6, "bf16": 0.01}  # bf16 has 8 bits
precisions = pytest.mark.parametrize("precision", TOLERANCES)


@pytest.fixture
def images(several_list):
    return [str(path) for path in sorted(several_list.parent.glob("*.png"))]


@pytest.fixture
def by_hand(several_run, images):
    """Sigmoids of each image, computed without the predictor."""
    run = load_run(several_run)
    rows = direct_logits(run, images).sigmoid().tolist()
    return [dict(zip(run.classes, row, strict=True)) for row in rows]


@precisions
def test_classes_above_their_thresholds_are_named_best_first(
    several_run, images, by_hand, precision
):
    predictor = Predictor(several_run, device="cpu", precision=precision)
    found, unlimited = predictor(images), predictor(images, threshold=0.0)
    for prediction, every, expected in zip(found, unlimited, by_hand, strict=True):
        named, scores = dict(prediction.predictions), dict(every.predictions)
        assert scores == pytest.approx(expected, abs=TOLERANCES[precision])
        assert named == {n: score for n, score in scores.items() if score >= THRESHOLDS[n]}
        assert [*named.values()] == sorted(named.values(), reverse=True)
    assert len({len(prediction.predictions) for prediction in found}) > 1
    assert any(sum(dict(p.predictions).values()) > 1.01 for p in found)  # not shares of one


def test_top_k_and_threshold_limit_the_classes(several_run, images, by_hand):
    predictor = Predictor(several_run, device="cpu", precision="fp32")
    assert {len(one.predictions) for one in predictor(images, top_k=1)} <= {0, 1}
    for prediction, scores in zip(predictor(images, threshold=0.45), by_hand, strict=True):
        assert {n for n, _ in prediction.predictions} == {n for n in scores if scores[n] >= 0.45}


def test_vit_predict_writes_multilabel_rows_in_every_format(several_run, images, capfd):
    def predict(*words):
        assert main(["predict", str(several_run), *images[:6], "--device", "cpu", *words]) == 0
        return capfd.readouterr().out

    found = Predictor(several_run, device="cpu")(images[:6])
    named = [[name for name, _ in prediction.predictions] for prediction in found]
    rows = [json.loads(line) for line in predict("--format", "jsonl").splitlines()]
    assert [[pair["label"] for pair in row["predictions"]] for row in rows] == named
    none = predict("--format", "jsonl", "--threshold", "1")
    assert all(json.loads(line)["predictions"] == [] for line in none.splitlines())
    table = list(csv.DictReader(io.StringIO(predict("--format", "csv"))))
    assert [*table[0]] == ["image", "labels", "scores", "error"]
    assert [row["labels"] for row in table] == ["|".join(names) for names in named]
    assert all(row["scores"].count("|") == row["labels"].count("|") for row in table)
    lines = predict().splitlines()
    for line, names in zip(lines[1:], named, strict=True):
        assert line.split()[1::2] == (names or ["-"])


def test_a_label_with_the_csv_separator_is_refused():
    layout = Layout(2, ("a|b", "c"), ["x.png"], multilabel=True)
    with pytest.raises(ConfigError, match=r"a\|b has a \|"):
        FORMATS["csv"](layout)
    _, line = FORMATS["csv"](Layout(2, ("=a", "c"), ["x.png"], multilabel=True))
    assert line(Prediction("x.png", (("=a", 0.5),))) == "x.png,'=a,0.5,\r\n"


def test_several_classes_are_not_sorted_into_folders(several_run, images, tmp_path, capfd):
    words = ["predict", str(several_run), *images[:2], "--sort-into", str(tmp_path / "s")]
    assert main(words) == 2
    assert "this network is multi-label" in capfd.readouterr().err
    assert not (tmp_path / "s").exists()


@precisions
@pytest.mark.parametrize("flags", [[], ["--threshold", "0"]], ids=["own", "one"])
def test_explain_plots_the_named_classes(several_run, images, tmp_path, capfd, precision, flags):
    """Explanations are in float32 whatever the precision of the predictions (docs/explain.md)."""
    words = ["predict", str(several_run), images[3], "--explain", str(tmp_path / "e")]
    words += ["--device", "cpu", "--precision", precision, "--format", "jsonl"]
    assert main([*words, *flags]) == 0
    (row,) = map(json.loads, capfd.readouterr().out.splitlines())
    (drawn,) = (json.loads(path.read_text()) for path in (tmp_path / "e").glob("*.json"))
    named = {pair["label"]: pair["score"] for pair in row["predictions"]}
    assert (len(named) == len(THRESHOLDS)) == bool(flags)
    explained = {each["label"]: each["probability"] for each in drawn["classes"]}
    assert explained == pytest.approx(named, abs=max(TOLERANCES[precision], 1e-5))
    scores = np.array([0.2, 0.6, 0.9])
    assert classes_to_explain(scores, (0.1, 0.1, 0.95)) == [1, 0]
    assert classes_to_explain(scores, (0.99, 0.99, 0.99)) == [2]  # none is named: the best
    assert classes_to_explain(scores, None) == [2, 1]


def test_scores_equal_those_counted_from_predictions(several_run, several_list, capfd):
    assert main(["evaluate", str(several_run), str(several_list), "--device", "cpu"]) == 0
    assert "mAP " in capfd.readouterr().out
    scores = evaluate(several_run, str(several_list), device="cpu")
    true = dict(csv.reader(several_list.read_text().splitlines()[1:]))
    found = Predictor(several_run, device="cpu")([several_list.parent / name for name in true])
    right = [
        {name for name, _ in prediction.predictions} == {n for n in labels.split("|") if n}
        for prediction, labels in zip(found, true.values(), strict=True)
    ]
    assert (scores["count"], scores["failed"]) == (32, [])
    assert scores["subset_accuracy"] == pytest.approx(sum(right) / 32)
    assert "top1" not in scores


def test_a_multilabel_model_is_evaluated_on_single_label_images(several_run, tmp_path):
    for name in THRESHOLDS:
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.new("RGB", (18, 18), name).save(tmp_path / "val" / name / "0.png")
    scores = evaluate(several_run, str(tmp_path), device="cpu")
    assert [row["count"] for row in scores["per_class"]] == [1, 1, 1]


def test_a_single_label_model_is_not_evaluated_on_several_labels(tiny_run, several_list, tmp_path):
    shutil.copy(several_list.parent / "01.png", tmp_path)
    (tmp_path / "own.csv").write_text("image,labels\n01.png,apple|class2\n")
    with pytest.raises(ConfigError, match="this network gives each one"):
        evaluate(tiny_run, str(tmp_path / "own.csv"), device="cpu")


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 2], [0.5, 0.5, "x"], None, 3])
def test_damaged_thresholds_are_refused(values):
    with pytest.raises(VitError, match="thresholds"):
        check_thresholds(values, ("a", "b", "c"))
