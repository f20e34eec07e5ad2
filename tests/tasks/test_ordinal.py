"""Grades: `--order` is held from the list to the report, and kappa ranks epochs."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics
from torch.nn import functional as F

import vit
from tests.tasks.conftest import TINY
from vit.commands.command_parser import CommandParser, add_fields, settings_from_args
from vit.commands.main import main
from vit.config import DataConfig
from vit.config.setting_layers import Settings, make_config
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import open_splits
from vit.errors import ConfigError, DataError
from vit.tasks.ordinal import GradeTally
from vit.training.plan import with_target_task

GRADES = ("poor", "fair", "good", "best")
SIZE = {**TINY, "patch_size": 8, "depth": 1, "lr": 1e-2, "batch_size": 8}


def write_list(path, labels):
    random = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "split", "grade"])
        for number, label in enumerate(labels):
            light = 100 + 12 * (number % len(GRADES)) + random.integers(-99, 99, size=(16, 16, 3))
            pixels = light.clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(path.parent / f"{number}.png")
            split = "train" if number < len(labels) // 2 else "val"
            table.writerow([f"{number}.png", split, label])
    return path


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    return write_list(tmp_path_factory.mktemp("grades") / "list.csv", GRADES * 40)


@pytest.fixture(scope="module")
def run(graded, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "grade"
    flags = [f"--{n.replace('_', '-')}={v}" for n, v in SIZE.items() if n != "workers"]
    command = ["train", str(graded), "--target", "grade", "--order", ",".join(GRADES)]
    assert (
        main(
            [
                *command,
                *flags,
                "--out",
                str(out),
                "-j0",
                "--epochs=4",
                "--model",
                "vit_tiny_patch16_224",
            ]
        )
        == 0
    )
    return out


def test_the_order_is_held_in_the_run_and_its_report(run, graded, tmp_path):
    stored = json.loads((run / "config.json").read_text())["vit"]
    assert (stored["task"], tuple(stored["classes"])) == ("ordinal", GRADES)
    assert "\nsmoothing: 0.1\n" in (run / "config.yaml").read_text()  # as of classes
    report = (run / "report.html").read_text()
    assert "Grades are in their order" in report
    assert "Weighted kappa over 4 epochs" in report
    assert "Top-1 over" not in report
    heads = [report.index(f'<th title="{name}"><span class="up">') for name in GRADES]
    assert heads == sorted(heads)

    rows = tmp_path / "rows.jsonl"
    scores = vit.evaluate(run, graded, device="cpu", precision="fp32", out=str(rows))
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert all({one["label"] for one in row["predictions"]} == {*GRADES} for row in found)
    true, answers = (
        [GRADES.index(name) for name in names]
        for names in zip(
            *((one["label"], one["predictions"][0]["label"]) for one in found), strict=True
        )
    )
    kappa = metrics.cohen_kappa_score(true, answers, weights="quadratic")
    assert scores["kappa"] == pytest.approx(kappa)
    low, high = scores["kappa_interval"]
    assert 0.2 < low < kappa < high < 1
    assert [*scores["confusion"]] == [*GRADES]
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ranked = [one for one in logged if one["event"] == "epoch"]
    assert max(one["val_kappa"] for one in ranked) == pytest.approx(kappa)
    assert {one["chosen_by"] for one in ranked} == {"val_kappa"}


@pytest.mark.slow
def test_an_exported_file_has_kappa_and_the_order(run, graded, tmp_path):
    pytest.importorskip("onnxruntime")
    assert main(["export", str(run), "--out", str(tmp_path / "grade.onnx")]) == 0
    exported = vit.evaluate(tmp_path / "grade.onnx", graded)
    own = vit.evaluate(run, graded, device="cpu", precision="fp32")
    assert exported["kappa"] == pytest.approx(own["kappa"], abs=0.02)
    assert [*exported["confusion"]] == [*GRADES]


def test_kappa_of_batches_equals_scikit_learn():
    torch.manual_seed(0)
    logits, labels = torch.randn(60, 5), torch.randint(0, 5, (60,))
    tally = GradeTally(5)
    for part in (slice(0, 25), slice(25, 60)):
        tally.count(logits[part], labels[part])
    config = make_config({"task": "ordinal", "order": "numbers"})
    scores = tally.scores(type("Run", (), {"config": config}), tally.sums.tolist())
    expected = metrics.cohen_kappa_score(labels, logits.argmax(1), weights="quadratic")
    assert scores["val_kappa"] == pytest.approx(expected)
    assert scores["val_loss"] == pytest.approx(float(F.cross_entropy(logits, labels)))


def test_grades_without_names_are_sorted_as_numbers(tmp_path):
    path = write_list(tmp_path / "list.csv", ["10", "2", "0,5", "-1"] * 4)
    spec = DatasetSpec(str(path), label_column="grade", order=("numbers",))
    assert open_splits(spec, val_share=0.2, seed=0).classes == ("-1", "0,5", "2", "10")
    parser = CommandParser()
    add_fields(parser, DataConfig)
    given = settings_from_args(parser.parse(["--target=grade", "--order", "--val-share=0.1"]))
    assert with_target_task(Settings(call={**given, "data": str(path)}))["task"] == "ordinal"
    assert tuple(given["order"]) == spec.order


@pytest.mark.parametrize(
    ("labels", "order", "message"),
    [
        (
            ["poor", "fair"] * 3 + ["god"] * 2,
            "poor,fair,good",
            r"line 8: the grade 'god' is not in",
        ),
        (
            ["poor", "fair"] * 4,
            "numbers",
            r"line 2: the grade 'poor' is no number; .*--order fair,poor",
        ),
        (["poor", "fair"] * 4, "poor,fair,good", "no training image is good"),
        (["1", "1.0", "2", "3"] * 2, "numbers", "1, 1.0 are one number"),
        (["0", "1", "0", "1", "0", "0", "0", "0"], "numbers", "all have one grade"),
    ],
)
def test_a_wrong_grade_is_one_line_with_its_place(tmp_path, labels, order, message):
    path = write_list(tmp_path / "list.csv", labels)
    with pytest.raises(DataError, match=message):
        vit.train(str(path), tmp_path / "run", target="grade", order=order, **SIZE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "poor"}, "all grades, each once"),
        ({"order": "poor,fair,poor"}, "all grades, each once"),
        ({"task": "ordinal"}, "give the grades in their order"),
        ({"task": "classify", "order": "poor,fair"}, "order"),
        ({"order": "poor,fair", "teacher": "run"}, "teacher"),
    ],
)
def test_orders_that_say_nothing_are_refused(graded, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        vit.train(str(graded), tmp_path / "run", **settings, **SIZE)
