"""Several questions of an image: `--target colour,shade,light` in one run."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, balanced_accuracy_score, r2_score

import vit
from tests.tasks.test_regression import SIZE, splits_of
from vit.commands.main import main
from vit.data.dataset_types import Sample
from vit.errors import ConfigError, DataError
from vit.number_answers import NumberAnswers
from vit.tasks.attributes import Attributes, AttributeTally
from vit.tasks.regression import Units, scale_of
from vit.weights.saved_model import load_run

TARGET = ("colour", "shade", "light")
TONES = {"red": (1.0, 0.2, 0.2), "green": (0.2, 1.0, 0.2), "none": (1.0, 1.0, 1.0)}
CPU = {"device": "cpu", "precision": "fp32"}
FP32 = ["--device", "cpu", "--precision", "fp32"]
MIXED = NumberAnswers(
    ("age", "kind"), ("y", ""), (3.0, 0.0), (2.0, 1.0), (False, False), {}, ((), ("a", "b", "c"))
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Coloured images: colour and shade are texts, the light a number; some lack one."""
    root, random = tmp_path_factory.mktemp("tones"), np.random.default_rng(0)
    rows = [["image", "split", *TARGET]]
    for number in range(140):
        light, colour = random.uniform(30, 90), str(random.choice([*TONES]))
        noise = random.integers(-20, 20, size=(18, 20, 3))
        pixels = (2.55 * light * np.array(TONES[colour]) + noise).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / f"{number}.png")
        cells = [colour, "dark" if light < 60 else "pale", f"{light:.3f} %"]
        if number % 10 < 3:
            cells[number % 10] = ""
        rows.append([f"{number}.png", "train" if number < 70 else "val", *cells])
    with (root / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return root / "list.csv"


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tones"
    return vit.train(str(images), out, target=TARGET, epochs=15, **SIZE)


@pytest.fixture(scope="module")
def measured(run, images):
    """The rows of the validation images, and the scores of `vit.evaluate`."""
    rows = run.folder / "rows.jsonl"
    scores = vit.evaluate(run.folder, images, out=str(rows), **CPU)
    return [json.loads(line) for line in rows.read_text().splitlines()], scores


def test_the_run_stores_the_classes_of_each_target(run):
    stored = json.loads((run.folder / "config.json").read_text())["vit"]
    assert stored["task"] == "attributes"
    assert stored["classes"] == [
        *("colour=green", "colour=none", "colour=red", "shade=dark", "shade=pale", "light")
    ]
    assert stored["answers"]["classes"] == [["green", "none", "red"], ["dark", "pale"], []]
    assert len(stored["scaling"]) == 3
    answers = load_run(run.folder).answers
    assert NumberAnswers.from_dict(*json.loads(answers.to_json())) == answers
    assert NumberAnswers.from_dict(*json.loads(answers.to_json())).scaling == answers.scaling


def test_scores_equal_scikit_learn_and_the_validation_of_the_best_epoch(run, measured):
    rows, scores = measured
    assert (scores["count"], {*scores["questions"]}) == (70, {*TARGET})
    means = []
    for name in TARGET:
        true, found = zip(
            *((row[f"true_{name}"], row[name]) for row in rows if row[f"true_{name}"] is not None),
            strict=True,
        )
        own = scores["questions"][name]
        assert own["count"] == len(true) == 63
        if name == "light":
            means.append(r2_score(true, found))
            assert own["r2"] == pytest.approx(means[-1])
            continue
        means.append(accuracy_score(true, found))
        assert own["top1"] == pytest.approx(means[-1])
        assert own["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(true, found))
        low, high = own["top1_interval"]
        assert low <= own["top1"] <= high
    assert scores["score"] == pytest.approx(np.mean(means))
    assert scores["score"] == pytest.approx(run.scores["score"], abs=1e-4)
    assert scores["score"] > 0.8  # by chance about 0.3
    (best,) = [
        one
        for one in map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
        if one["event"] == "epoch" and one["epoch"] == run.epoch
    ]
    assert [best[f"val_{name}"] for name in ("top1_colour", "top1_shade", "r2_light")] == (
        pytest.approx(means, abs=1e-4)
    )


def test_a_row_has_classes_with_probabilities_and_sets_on_request(run, measured):
    rows, scores = measured
    ends = {"colour": ("", "_score"), "shade": ("", "_score"), "light": ("", "_low", "_high")}
    columns = [f"{name}{end}" for name in TARGET for end in ends[name]]
    assert [name for name in rows[0] if name.startswith(TARGET)] == columns
    images = [row["image"] for row in rows]
    predictor = vit.Predictor(run.folder, **CPU)
    outputs = np.stack([one.probabilities for batch in predictor.batches(images) for one in batch])
    np.testing.assert_allclose(outputs[:, :3].sum(1), 1)
    np.testing.assert_allclose(outputs[:, 3:5].sum(1), 1)
    held = []
    for row, output, one in zip(rows, outputs, predictor(images, sets=0.9), strict=True):
        names = dict(zip(("green", "none", "red"), output[:3].tolist(), strict=True))
        assert row["colour"] == max(names, key=names.get)
        assert row["colour_score"] == pytest.approx(names[row["colour"]])
        found = one.answers["colour_set"]
        assert found[0] == row["colour"]
        assert [*found] == sorted(found, key=names.get, reverse=True)
        held += [row["true_colour"] in found] * (row["true_colour"] is not None)
    assert np.mean(held) == pytest.approx(scores["questions"]["colour"]["set_coverage"])
    assert np.mean(held) >= 0.85  # of the images that measured it


def test_the_loss_equals_one_by_hand():
    task, random = Attributes(MIXED), np.random.default_rng(0)
    outputs = random.normal(size=(4, 4))
    labels = np.array([[4.0, 1], [np.nan, 2], [3.2, np.nan], [7.0, 0]])
    shares = np.exp(outputs[:, 1:]) / np.exp(outputs[:, 1:]).sum(1, keepdims=True)
    expected = []
    for output, p, (age, kind) in zip(outputs, shares, labels, strict=True):
        error = abs(output[0] - (age - 3) / 2)
        huber = 2 * error**2 if error < 0.25 else error - 0.125  # by delta
        target = 0.9 * np.eye(3)[int(kind)] + 0.1 / 3 if kind == kind else np.zeros(3)
        expected.append((np.nan_to_num(huber) - (target * np.log(p)).sum()) / 2)
    found = task.losses(torch.tensor(outputs), torch.tensor(labels), 0.1)
    np.testing.assert_allclose(found.numpy(), expected)


def test_the_tally_adds_batches_up_and_an_unknown_score_is_none():
    tally, random = AttributeTally(Attributes(MIXED)), np.random.default_rng(0)
    outputs = torch.tensor(random.normal(size=(40, 4)))
    values = Units(MIXED).double()(outputs)
    labels = torch.tensor(np.stack([random.normal(3, 2, 40), random.integers(0, 3, 40)], 1))
    labels[3, 0] = labels[5, 1] = torch.nan
    parts = [
        torch.cat([tally.moments(n, values[some], labels[some, n]) for n in (0, 1)])
        for some in (slice(0, 9), slice(9, 40))
    ]
    totals = [8.0, *(parts[0] + parts[1]).tolist(), 40.0]
    scores = tally.scores(None, totals)
    there = ~labels.isnan()
    r2 = r2_score(labels[there[:, 0], 0].numpy(), values[there[:, 0], 0].numpy())
    top1 = accuracy_score(labels[there[:, 1], 1], values[there[:, 1], 1:].argmax(1))
    assert scores == {
        "val_loss": 0.2,
        "val_score": pytest.approx((max(r2, 0) + top1) / 2),
        "val_r2_age": pytest.approx(r2),
        "val_top1_kind": pytest.approx(top1),
    }
    samples = [Sample("a.png", -1, numbers=tuple(row)) for row in labels.tolist()]
    task = Attributes(MIXED)
    assert task.score(values.numpy(), samples) == pytest.approx(scores["val_score"])
    nothing = tally.scores(None, [0.0] * 9 + [1.0])
    assert (nothing["val_top1_kind"], nothing["val_score"]) == (None, 0.0)


def test_what_is_for_one_question_is_refused_in_one_line(run, images, tmp_path, capsys):
    for words, said in (
        (["--reject"], "answers several questions"),
        (["--threshold", "0.5"], "answers several questions"),
        (["--sort-into", "x"], "answers several questions"),
        (["--sets", "0.77"], "are for 0.5, 0.8, 0.9"),
    ):
        image = str(images.parent / "1.png")
        assert main(["predict", str(run.folder), image, *words, *FP32]) == 2
        assert said in capsys.readouterr().err
    for words, said in (
        (["--order", "red,green"], "order"),
        (["--mixup", "0.2"], "mixup"),
        (["--balance", "loss"], "balance"),
        (["--teacher", str(run.folder)], "teacher"),
        (["--method", "probe"], "probe"),
    ):
        out = str(tmp_path / "out")
        words = ["--target", "colour,shade", *words, *FP32, "--out", out]
        assert main(["train", str(images), *words]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
        assert said in line
    with pytest.raises(DataError, match="target colour: is red in all training images"):
        some = splits_of([[0, 1], [0, 2]], ("colour", "age"))
        scale_of(type(some)(**{**vars(some), "target_classes": (("red",), ())}))
    with pytest.raises(ConfigError, match="task=attributes: say which column"):
        vit.train(str(images), tmp_path / "none", task="attributes", **SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear", "lora"])
def test_the_encoder_of_a_run_learns_other_questions(run, images, tmp_path, method):
    settings = {"method": method, "weights": str(run.folder), "epochs": 1, **CPU, "batch_size": 8}
    found = vit.train(str(images), tmp_path / "new", target=("shade", "light"), **settings)
    assert found.classes == ("shade=dark", "shade=pale", "light")


def test_a_report_and_a_page_show_each_question(run, images, tmp_path):
    page = tmp_path / "page.html"
    words = [str(run.folder), str(images), *FP32, "--html", str(page)]
    assert main(["evaluate", *words]) == 0
    for path in (run.folder / "report.html", page):
        text = path.read_text(encoding="utf-8")
        for said in ("colour</bdi>: classes", "colour</bdi>: what is taken for what", "Spearman"):
            assert said in text
    assert "the surest mistakes" in (run.folder / "report.html").read_text(encoding="utf-8")
