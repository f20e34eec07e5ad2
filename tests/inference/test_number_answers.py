"""Networks of numbers in what reads saved runs: rows, files, explanations, exports."""

import csv
import json
import os
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.conftest import save_untrained
from vit.commands.main import main
from vit.inference.attribution import class_maps
from vit.inference.predictor import Predictor
from vit.number_answers import NumberAnswers
from vit.tasks.regression import Regression
from vit.weights.saved_model import ANSWERS, INTERVALS, SCALING, update_run

WIDTHS = {0.8: (0.25, 0.5), 0.9: (0.5, 1.0)}
FP32 = ("--precision", "fp32")
SCALE = NumberAnswers(("year", "weight"), ("", "kg"), (2000.0, -9.0), (5.0, 1.0), (False, True))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An untrained network of a year and of a tiny weight, whose logarithm is learned."""

    def change(head: nn.Linear) -> None:
        nn.init.normal_(head.weight, std=0.5)

    folder = tmp_path_factory.mktemp("runs") / "numbers"
    save_untrained(folder, SCALE.names, "regression", change)
    update_run(folder, {"task": "regression", ANSWERS: SCALE.to_dict(), INTERVALS: WIDTHS})
    return folder


@pytest.fixture(scope="module")
def images(tiny_data):
    return [str(path) for path in sorted(tiny_data.rglob("*.png"))[:4]]


def rows_of(capsys: Any, model: Any, images: list[str], *words: str) -> list[dict[str, Any]]:
    assert main(["predict", str(model), *images, *words, "--format", "jsonl"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_all_formats_have_the_same_columns(run, tiny_data, images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tiny_data)
    images = [os.path.relpath(image) for image in images]  # names that fit their column
    rows = rows_of(capsys, run, images, *FP32)
    columns = [f"{name}{end}" for name in SCALE.names for end in ("", "_low", "_high")]
    assert [*rows[0]] == ["image", *columns]
    assert main(["predict", str(run), *images, *FP32]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert "weight (kg)  weight_low (kg)" in header
    assert all(len(line) == len(header) for line in lines)  # numbers end below their names
    out = tmp_path / "rows.csv"
    assert main(["predict", str(run), *images, *FP32, "--format", "csv", "--out", str(out)]) == 0
    with out.open(newline="") as file:
        cells = [[float(row[name]) for name in columns] for row in csv.DictReader(file)]
    np.testing.assert_allclose(cells, [[row[name] for name in columns] for row in rows], rtol=1e-3)


def test_sets_choose_the_interval_and_the_flags_of_classes_are_refused(run, images, capsys):
    narrow, wide = (
        rows_of(capsys, run, images[:1], *FP32, "--sets", one)[0] for one in ("0.8", "0.9")
    )
    assert wide["year_high"] - wide["year"] == pytest.approx(0.5)
    assert narrow["year_high"] - narrow["year"] == pytest.approx(0.25)
    assert np.log(narrow["weight_high"] / narrow["weight"]) == pytest.approx(0.5)
    for words in (["--top-k", "2"], ["--threshold", "0.5"], ["--reject"], ["--sort-into", "x"]):
        assert main(["predict", str(run), *images[:1], *FP32, *words]) == 2
        assert "this network answers with numbers and has no classes" in capsys.readouterr().err
    whole = rows_of(capsys, run, images[:1], *FP32, "--keep-aspect")[0]
    assert [*whole] == ["image", *SCALE.names]  # intervals were measured on square crops


def test_views_are_averaged_in_units(run, images):
    whole = Predictor(run, device="cpu", precision="fp32")
    pixels = whole.preprocessing.read(images[0])
    views = [np.asarray(pixels), np.asarray(pixels)[:, ::-1].copy()]
    plain = [one.answers["weight"] for one in whole(views)]
    both = Predictor(run, device="cpu", precision="fp32", tta="flip")(views[:1])
    assert both[0].answers["weight"] == pytest.approx(np.mean(plain), rel=1e-5)


def test_a_map_is_of_what_makes_a_number_larger(run, images):
    predictor = Predictor(run, device="cpu", precision="fp32")
    ((output,),) = predictor.batches(images[:1])
    maps = class_maps(predictor, output)
    assert [index for index, _ in maps] == [0, 1]
    assert all(float(weights.sum()) == pytest.approx(1) for _, weights in maps)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_exported_file_answers_in_units(run, images, precision, tmp_path, capsys):
    out = tmp_path / "net.onnx"
    assert main(["export", str(run), "--out", str(out), "--precision", precision]) == 0
    capsys.readouterr()
    expected = rows_of(capsys, run, images, *FP32)
    found = rows_of(capsys, out, images)
    assert [*found[0]] == [*expected[0]]
    tolerance = {"fp32": 1e-3, "fp16": 0.02}[precision]  # float16 has no year between 2000 and 2001
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["year"] == pytest.approx(theirs["year"], abs=tolerance)
        assert ours["weight_low"] == pytest.approx(theirs["weight_low"], rel=tolerance)


def test_the_score_of_an_export_is_r2(run):
    from sklearn.metrics import r2_score

    from vit.data.dataset_types import Sample

    random = np.random.default_rng(0)
    true, noise = random.normal(size=(2, 30, 2))
    samples = [Sample("a.png", -1, numbers=tuple(row)) for row in true.tolist()]
    scale = (("a", "b"), ("", ""), (0.0, 0.0), (1.0, 1.0), (False, False))
    task, outputs = Regression(NumberAnswers(*scale)), true + 0.3 * noise
    assert task.score(outputs, samples) == pytest.approx(r2_score(true, outputs))
    assert task.score(true[::-1].copy(), samples) == 0.0


def test_commands_of_classes_refuse_numbers(run, tiny_data, tmp_path, capsys):
    data = str(tiny_data)
    for words, said in (
        (["calibrate", str(run), data], "only scores of classifiers are calibrated"),
        (["compare", str(run), str(run), data, *FP32], "only classifiers are compared"),
        (
            ["suggest", f"{data}/val", "--weights", str(run), "--order", "uncertain", *FP32],
            "has no classes",
        ),
        (["convert", str(run), "--to", "timm", "--out", str(tmp_path / "x")], "their scale has no"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


MIXED = NumberAnswers(
    names=("kind", "year"),
    units=("", ""),
    mean=(0.0, 2000.0),
    std=(1.0, 5.0),
    log=(False, False),
    classes=(("a", "b", "c"), ()),
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """An untrained network of a choice and a year."""

    def change(head: nn.Linear) -> None:
        nn.init.normal_(head.weight, std=0.5)

    folder = tmp_path_factory.mktemp("runs") / "mixed"
    save_untrained(folder, MIXED.outputs, "attributes", change)
    scaling, widths = [(0.5, 1.5), (1.0, 1.0)], {0.9: (0.7, 2.0)}
    fields = {"task": "attributes", ANSWERS: MIXED.to_dict(), INTERVALS: widths, SCALING: scaling}
    update_run(folder, fields)
    return folder


def test_choices_have_their_temperature_their_sets_and_a_map_of_the_best_class(mixed, images):
    calibrated = Predictor(mixed, device="cpu", precision="fp32")
    raw = Predictor(mixed, device="cpu", precision="fp32", no_calibration=True)
    for one, other, row in zip(
        *(next(each.batches(images)) for each in (calibrated, raw)),
        calibrated(images, sets=0.9),
        strict=True,
    ):
        gaps = np.log(other.probabilities[:3]) - np.log(other.probabilities[:3].max())
        shares = np.exp(-((-gaps / 0.5) ** 1.5))
        shares /= shares.sum()
        np.testing.assert_allclose(one.probabilities[:3], shares, rtol=1e-4)
        best = int(shares.argmax())
        assert row.answers["kind"] == "abc"[best]
        assert row.answers["kind_score"] == pytest.approx(shares[best], rel=1e-4)
        assert {*row.answers["kind_set"]} == {
            name for name, share in zip("abc", shares, strict=True) if share >= 0.3
        } | {"abc"[best]}
        assert row.answers["year_high"] - row.answers["year"] == pytest.approx(2)
        assert [index for index, _ in class_maps(calibrated, one)] == [best, 3]


def test_a_spreadsheet_has_a_column_for_each_cell(mixed, images, capsys):
    assert main(["predict", str(mixed), *images, *FP32, "--sets", "0.9", "--format", "csv"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header == "image,kind,kind_score,kind_set,year,year_low,year_high,error"
    assert all(line.count(",") == header.count(",") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--no-calibration",)])
def test_an_exported_file_answers_with_choices(mixed, images, words, tmp_path, capsys):
    out = tmp_path / "net.onnx"
    assert main(["export", str(mixed), "--out", str(out), *words]) == 0  # which verifies it
    capsys.readouterr()
    for ours, theirs in zip(
        rows_of(capsys, mixed, images, *FP32, *words), rows_of(capsys, out, images), strict=True
    ):
        assert [*ours] == [*theirs]
        assert ours["kind"] == theirs["kind"]
        assert ours["kind_score"] == pytest.approx(theirs["kind_score"], abs=1e-5)
        assert ours["year"] == pytest.approx(theirs["year"], abs=1e-3)
