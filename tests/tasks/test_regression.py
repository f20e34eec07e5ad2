"""Numbers: `--target COLUMN` is trained, predicted and evaluated in units, with intervals."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import vit
from tests.tasks.conftest import TINY
from vit.commands.main import main
from vit.data.dataset_types import Sample, Splits
from vit.errors import ConfigError, DataError
from vit.number_answers import NumberAnswers
from vit.tasks.regression import Regression, Units, scale_of
from vit.weights.saved_model import load_run

SIZE = {"model": "vit_tiny_patch16_224", **TINY, "patch_size": 8, "depth": 1, "batch_size": 8}
SIZE |= {"lr": 1e-2, "warmup_epochs": 1}  # with a network, no plan is measured


def splits_of(rows, names, units=None):
    rows = [tuple(map(float, row)) for row in rows]
    samples = tuple(Sample(f"{n}.png", -1, numbers=row) for n, row in enumerate(rows))
    units = units or ("",) * len(names)
    return Splits((), samples, samples, (), True, None, targets=names, units=units)


@pytest.fixture(scope="module")
def grey_list(tmp_path_factory):
    """Grey images, with their brightness in percent and its square, which one of them lacks."""
    root, random = tmp_path_factory.mktemp("grey"), np.random.default_rng(0)
    with (root / "greys.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "split", "light", "square", "shade"])
        for number in range(80):
            light = random.uniform(10, 90)
            noise = random.integers(-20, 20, size=(18, 20, 3))
            pixels = np.clip(2.55 * light + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"{number}.png")
            split = "train" if number < 40 else "val"
            square = "" if number == 3 else light**2 / 100
            table.writerow(
                [f"{number}.png", split, f"{light:.3f} %", square, "dark" if light < 50 else "pale"]
            )
    return root / "greys.csv"


@pytest.fixture(scope="module")
def run(grey_list, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "light"
    return vit.train(str(grey_list), out, target=("light",), epochs=20, **SIZE)


def read(grey_list, column):
    with grey_list.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "val"]
    return [str(grey_list.parent / row["image"]) for row in rows], [row[column] for row in rows]


def test_what_a_column_holds_decides_the_task(run, grey_list):
    stored = json.loads((run.folder / "config.json").read_text())["vit"]
    assert (stored["task"], stored["classes"]) == ("regression", ["light"])
    assert stored["answers"]["units"] == ["%"]
    out = run.folder.parent / "shade"
    assert vit.train(str(grey_list), out, target=("shade",), epochs=2, **SIZE).classes == (
        "dark",
        "pale",
    )
    with pytest.raises(ConfigError, match="task=regression: say which column"):
        vit.train(str(grey_list), run.folder.parent / "none", task="regression", **SIZE)


def test_predictions_are_numbers_in_units_with_the_intervals_of_the_run(run, grey_list):
    images, cells = read(grey_list, "light")
    wanted = np.array([float(cell.removesuffix(" %")) for cell in cells])
    predictor = vit.Predictor(run.folder, device="cpu", precision="fp32")
    answers = [one.answers for one in predictor(images)]
    values, low, high = (
        np.array([one[f"light{end}"] for one in answers]) for end in ("", "_low", "_high")
    )
    assert np.abs(values - wanted).mean() < 6  # the mean of the training images: 20
    # these images measured it: the 37th of 41 residuals in order
    edge = 1e-4  # labels are float32
    assert ((low - edge <= wanted) & (wanted <= high + edge)).sum() == 37
    np.testing.assert_allclose(high - values, np.sort(np.abs(values - wanted))[36], rtol=1e-5)
    narrow = predictor(images[:1], sets=0.5)[0].answers
    assert narrow["light_high"] - narrow["light_low"] < (high - low)[0]
    with pytest.raises(ConfigError, match=r"sets=0.77: the intervals of this network are for 0.5"):
        predictor(images[:1], sets=0.77)


def test_an_evaluation_equals_the_validation_of_the_best_epoch(run, grey_list, tmp_path):
    rows = tmp_path / "rows.jsonl"
    found = vit.evaluate(run.folder, grey_list, device="cpu", precision="fp32", out=str(rows))
    assert found["mae"] == pytest.approx(run.scores["mae"], abs=1e-4)
    assert (found["count"], found["failed"]) == (40, [])
    assert found["coverage"] == pytest.approx(37 / 40, abs=0.03)
    first = json.loads(rows.read_text().splitlines()[0])
    assert first["true_light"] == pytest.approx(float(first["list_light"].removesuffix(" %")))
    assert {"light", "light_low", "light_high"} < first.keys()


def test_numbers_in_another_unit_are_refused(run, grey_list, tmp_path):
    (tmp_path / "other.csv").write_text("image,light\n0.png,3 lux\n1.png,4 lux\n")
    with pytest.raises(DataError, match="lux"):
        vit.evaluate(
            run.folder,
            tmp_path / "other.csv",
            images=grey_list.parent,
            device="cpu",
            precision="fp32",
        )


def test_several_columns_are_questions_and_an_empty_cell_counts_for_nothing(grey_list, tmp_path):
    target = ("light", "square")
    run = vit.train(str(grey_list), tmp_path / "two", target=target, epochs=2, **SIZE)
    found = vit.evaluate(run.folder, grey_list, device="cpu", precision="fp32")
    assert found["mae"] == pytest.approx(run.scores["mae"], abs=1e-4)
    assert {*found["questions"]} == {*target}
    task = Regression(load_run(run.folder).answers)
    outputs, labels = torch.zeros(2, 2), torch.tensor([[30.0, 9.0], [30.0, torch.nan]])
    both, one = task.losses(outputs, labels)
    wanted = task.standardised(labels)[0]
    first, second = F.huber_loss(
        torch.zeros(2), wanted.float(), reduction="none", delta=0.25
    ).tolist()
    assert both.item() == pytest.approx((first + second) / 2)
    assert one.item() == pytest.approx(first / 2)


def test_skewed_positive_numbers_are_learned_as_logarithms(tmp_path):
    random = np.random.default_rng(0)
    weights, heights = np.exp(random.normal(0, 1, 200)), random.normal(0, 1, 200)
    answers = scale_of(splits_of(np.stack([weights, heights], 1), ("weight", "height")))
    assert answers.log == (True, False)
    assert answers.mean[0] == pytest.approx(np.log(weights).mean())
    values = torch.tensor(np.stack([weights, heights], 1))
    standard = torch.from_numpy(answers.standardise(values.numpy()))
    torch.testing.assert_close(Units(answers).double()(standard), values, rtol=1e-6, atol=1e-6)
    low, high = answers.interval(0, 2.0, np.log(1.5))
    assert (low, high) == (pytest.approx(2 / 1.5), pytest.approx(3.0))
    with pytest.raises(DataError, match="target age: is 4 in all training images"):
        scale_of(splits_of([[4], [4]], ("age",)))


def test_answers_are_stored_as_json():
    fields = ("a",), ("cm",), (1.0,), (2.0,), (True,)
    answers = NumberAnswers(*fields, half_widths={0.9: (0.3,)})
    text = json.dumps([answers.to_dict(), answers.half_widths])
    assert NumberAnswers.from_dict(*json.loads(text)) == answers


@pytest.mark.auto_precision
def test_a_run_has_a_report_an_evaluation_a_page_and_it_is_not_compared(
    run, grey_list, tmp_path, capsys
):
    report = run.folder / "report.html"
    first = report.read_text(encoding="utf-8")
    assert "The band is the interval of 90%" in first
    report.unlink()
    assert main(["report", str(run.folder)]) == 0
    assert "The band is the interval of 90%" in report.read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    words = [str(run.folder), str(grey_list), "--device", "cpu", "--precision", "fp32"]
    assert main(["evaluate", *words, "--html", str(page)]) == 0
    (printed,) = re.findall(r"^MAE +(\S+)", capsys.readouterr().out, re.MULTILINE)
    assert float(printed) == pytest.approx(run.scores["mae"], rel=1e-4)
    assert f">{printed}<" in page.read_text(encoding="utf-8")
    assert main(["compare", str(run.folder), *words]) == 2
    assert "only classifiers are compared" in capsys.readouterr().err
    assert main(["report", str(run.folder), "--corruptions"]) == 2
    assert "corruptions: measures classifiers" in capsys.readouterr().err
