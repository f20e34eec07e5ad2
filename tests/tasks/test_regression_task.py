"""A fourth task is one class and one line in TASKS: a number is learned, predicted and exported."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from tests.tasks.conftest import TINY
from tests.training.runs import events
from vit.config.setting_layers import make_config
from vit.config.training_config import TASKS
from vit.data.sources.open_dataset import read_source
from vit.export.export_formats import export_onnx
from vit.export.verification import verify
from vit.inference.evaluate import evaluate
from vit.inference.predictor import Predictor
from vit.output.prediction_results import Layout, json_lines
from vit.tasks.task import Evaluation, Task, forward, get_task
from vit.training.train import train
from vit.weights.saved_model import load_run

BRIGHTNESS = ("0", "0.25", "0.5", "1")


class Regression(Task):
    """The number that is the name of an image's class; mean squared error."""

    metric = "val_mae"
    higher_is_better = False

    def __init__(self, numbers: tuple[float, ...] = ()) -> None:
        self.numbers = torch.tensor(numbers)

    def output_names(self, splits):
        return ("brightness",)

    def with_data(self, config, splits):
        return Regression(tuple(map(float, splits.classes)))

    def loss(self, run, batch, images, epoch):
        targets = self.numbers[batch.labels].to(images)
        return F.mse_loss(forward(run, images)[:, 0], targets, reduction="sum").view(1)

    def tally(self, samples):
        return RegressionTally(self.numbers)

    def label_names(self, spec, outputs):
        index = read_source(dataclasses.replace(spec, all_splits=True))
        records = itertools.chain(*index.splits.values())
        return tuple(sorted({label for record in records for label in record.labels}))

    def evaluation(self, model, samples, notify):
        return RegressionEvaluation(samples)

    def write_report(self, run):
        failed: dict[str, str] = {}
        rows = [
            f"{run.splits.val[index].path} {value:.3f}"
            for batch, outputs in run.logits(run.splits.val, failed)
            for index, value in zip(batch.indices.tolist(), outputs[:, 0].tolist(), strict=True)
        ]
        (run.folder / "report.html").write_text("\n".join(rows))


class RegressionEvaluation(Evaluation):
    def __init__(self, samples):
        super().__init__(samples)
        self.errors = []

    def add(self, outputs, first):
        for sample, output in zip(self.samples[first:], outputs, strict=False):
            if output.probabilities is not None:
                number = float(Path(sample.path).parent.name)
                self.errors.append(abs(float(output.probabilities[0]) - number))

    def scores(self):
        count = len(self.errors)
        return {"count": count, "mae": sum(self.errors) / count} if count else {}


class RegressionTally:
    def __init__(self, numbers):
        self.numbers = numbers
        self.sums = torch.zeros(3, dtype=torch.float64)

    def add(self, run, batch, images):
        errors = forward(run, images)[:, 0].double().cpu() - self.numbers[batch.labels]
        counts = torch.tensor([len(errors)])
        self.sums += torch.cat([errors.square().sum()[None], errors.abs().sum()[None], counts])

    def scores(self, run, totals):
        squared, absolute, count = totals
        return {"val_loss": squared / count, "val_mae": absolute / count, "chosen_by": "val_mae"}


@pytest.fixture(scope="module")
def grey_images(tmp_path_factory):
    """Noisy grey images, in folders that are called as their brightness."""
    root, random = tmp_path_factory.mktemp("grey"), np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 4)):
        for name in BRIGHTNESS:
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                noise = random.integers(-30, 30, size=(18, 20, 3))
                pixels = np.clip(255 * float(name) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def run(grey_images, tmp_path_factory):
    """The result of a short training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "brightness", f"{__name__}:Regression")
        model = {**TINY, "patch_size": 8, "depth": 1}
        run = {"task": "brightness", "data": str(grey_images), "epochs": 6, "batch_size": 8}
        config = make_config({**model, **run, "lr": 1e-2, "warmup_epochs": 1})
        yield train(config, tmp_path_factory.mktemp("runs") / "grey")


def test_the_best_epoch_has_the_smallest_error(run):
    errors = [event["val_mae"] for event in events(run.folder)]
    assert len(errors) == 6
    assert run.epoch == 1 + errors.index(min(errors))
    assert run.scores["mae"] == min(errors) < 0.15
    assert run.classes == ("brightness",)


def test_the_run_folder_names_the_task_and_its_output(run):
    stored = json.loads((run.folder / "config.json").read_text())["vit"]
    assert (stored["task"], stored["classes"]) == ("brightness", ["brightness"])
    assert isinstance(get_task(load_run(run.folder).task_name), Regression)
    assert len((run.folder / "report.html").read_text().splitlines()) == 16


@pytest.fixture
def predictions(run, grey_images):
    """Paths and predictions of the validation images."""
    paths = sorted(map(str, (grey_images / "val").rglob("*.png")))
    predictor = Predictor(run.folder, device="cpu", precision="fp32")
    return paths, predictor(paths)


def test_a_prediction_is_the_number(predictions):
    for path, prediction in zip(*predictions, strict=True):
        ((name, number),) = prediction.predictions
        assert name == "brightness"
        assert number == pytest.approx(float(Path(path).parent.name), abs=0.3)
        _, line = json_lines(Layout(1, ("brightness",), (path,)))
        row = json.loads(line(prediction))
        assert row["predictions"] == [{"label": "brightness", "score": number}]


def test_an_evaluation_equals_the_validation_of_the_best_epoch(run, grey_images, tmp_path):
    (tmp_path / "grey").symlink_to(grey_images)
    for data in (grey_images, tmp_path / "grey"):
        found = evaluate(run.folder, str(data), device="cpu", precision="fp32")
        assert found["mae"] == pytest.approx(run.scores["mae"], abs=1e-5)
        assert (found["count"], found["failed"]) == (16, [])


@pytest.mark.slow
def test_an_exported_file_returns_the_same_numbers(run, predictions, tmp_path):
    paths, expected = predictions
    path = tmp_path / "grey.onnx"
    export_onnx(run.folder, path, notify=None)
    runner = Predictor(path)
    assert runner.metadata["activation"] == "identity"
    for one, other in zip(runner(paths), expected, strict=True):
        ((name, number),) = one.predictions
        assert (name, number) == ("brightness", pytest.approx(other.predictions[0][1], abs=1e-5))
    checked = verify(path)
    assert checked.agrees
    assert checked.images == len(paths)
