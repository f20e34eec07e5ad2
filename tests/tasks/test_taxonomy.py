"""Taxonomies: from nested folders to answers that are nodes, in runs, files, reports and rows."""

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from tests.tasks.conftest import TINY
from vit.class_tree import ClassTree, answer_of, distance, is_at_or_above
from vit.commands.main import main
from vit.config.setting_layers import make_config
from vit.evaluation.fit_calibration import fit_calibration, node_confidences
from vit.evaluation.temperature_scaling import fit_temperature
from vit.score_calibration import ScoreCalibration
from vit.tasks.taxonomy import NodeOutcomes, NodeTally

COLORS = {
    "animals/mammals/cat": (200, 40, 40),
    "animals/mammals/dog": (200, 80, 40),
    "animals/mammals": (200, 60, 90),
    "animals/crow": (120, 40, 160),
    "plants/rose": (40, 200, 40),
    "plants/oak": (40, 160, 90),
}
CLASSES = tuple(sorted(COLORS))
SIZE = {**TINY, "patch_size": 8, "depth": 1, "lr": 1e-2, "batch_size": 16, "epochs": 6}


def write_images(root: Path, colors, images: int) -> None:
    random = np.random.default_rng([*root.name.encode()])
    for name, color in colors.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(images):
            tone = np.array(color) + random.normal(0, 22, 3)
            pixels = (tone + random.normal(0, 9, (16, 16, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("nested")
    write_images(root / "train", COLORS, 16)
    write_images(root / "val", COLORS, 25)
    write_images(root / "test", {"animals/mammals/cat": (200, 40, 40)}, 3)
    write_images(root / "test", {"animals/mammals/wolf": (200, 70, 40)}, 4)
    return root


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tree"
    vit.train(str(data), out, task="taxonomy", **SIZE)
    return out


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    pytest.importorskip("onnxruntime")
    file = tmp_path_factory.mktemp("exported") / "tree.onnx"
    assert main(["export", str(run), "--out", str(file)]) == 0
    return file


def images_of(data):
    return sorted(map(str, (data / "val").rglob("*.png")))


def by_hand(run, data):
    """The answer of each image by the probabilities of all classes, and by sums over prefixes."""
    stored = json.loads((run / "config.json").read_text())["vit"]
    threshold = stored["calibration"]["threshold"] or stored["calibration"]["target_precision"]
    predictor = vit.Predictor(run, device="cpu", precision="fp32")
    nodes = {"/".join(n.split("/")[:k]) for n in CLASSES for k in (1, 2, 3)}
    found = []
    for one in predictor(images_of(data), top_k=len(CLASSES)):
        scores = dict(one.predictions)

        def mass(node, scores=scores):
            return sum(p for n, p in scores.items() if f"{n}/".startswith(f"{node}/"))

        answer, children = None, [node for node in nodes if "/" not in node]
        while children:
            best = max(children, key=mass)
            if mass(best) < threshold or scores.get(answer, 0) > mass(best):
                break
            answer = best
            children = [node for node in nodes if node.rpartition("/")[0] == answer]
        found.append((answer, one.answers))
    return found


def test_the_run_learns_the_tree_and_says_what_it_promises(run, data):
    stored = json.loads((run / "config.json").read_text())["vit"]
    assert (stored["task"], tuple(stored["classes"])) == ("taxonomy", CLASSES)
    assert stored["calibration"]["target_precision"] == 0.95
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [one for one in events if one["event"] == "epoch"][-1]
    assert last["val_level1"] > 0.9 > last["val_top1"]
    assert last["val_distance"] > 0
    report = (run / "report.html").read_text()
    assert "The tree" in report
    assert '<th class="name">\u2003\u2003<bdi>cat' in report


def test_answers_are_the_deepest_nodes_that_reach_the_threshold(run, data):
    found = by_hand(run, data)
    assert [answer for answer, _ in found] == [cells["answer"] for _, cells in found]
    kinds = {None if answer is None else answer.count("/") for answer, _ in found}
    assert {0, 1} <= kinds


@pytest.mark.slow
def test_an_exported_file_gives_the_same_answers_without_the_run(run, exported, data):
    own = vit.Predictor(run, device="cpu", precision="fp32")(images_of(data))
    theirs = vit.Predictor(exported)(images_of(data))
    assert [one.answers["answer"] for one in theirs] == [one.answers["answer"] for one in own]
    scores = ([one.answers["answer_score"] for one in many] for many in (own, theirs))
    pairs = [pair for pair in zip(*scores, strict=True) if None not in pair]
    np.testing.assert_allclose(*zip(*pairs, strict=True), atol=1e-5)
    first, second = (
        vit.evaluate(model, data, precision="fp32") for model in (run, exported)
    )  # fmt: skip
    intervals = [scores["answers"].pop("precision_interval") for scores in (first, second)]
    assert intervals[0] == pytest.approx(intervals[1])
    assert first["answers"] == pytest.approx(second["answers"])
    assert first["levels"] == second["levels"]


@pytest.mark.parametrize("style", ["jsonl", "csv", "table"])
def test_rows_have_the_answer_and_its_probability(run, data, style, capsys, tmp_path):
    calibration = json.loads((run / "config.json").read_text())["vit"]["calibration"]
    threshold = calibration["threshold"] or calibration["target_precision"]
    unsure = tmp_path / "unsure.png"
    Image.new("RGB", (16, 16), (120, 120, 60)).save(unsure)
    files = [images_of(data)[0], str(unsure)]
    expected = [one.answers for one in vit.Predictor(run, device="cpu", precision="fp32")(files)]
    words = ["predict", str(run), *files, "--top-k", "2", "--precision", "fp32"]
    assert main([*words, "--format", style]) == 0
    text = capsys.readouterr().out
    if style == "jsonl":
        rows = [json.loads(line) for line in text.splitlines()]
        assert [row["answer"] for row in rows] == [one["answer"] for one in expected]
        assert [[*row][:3] for row in rows] == [["image", "answer", "answer_score"]] * 2
    elif style == "csv":
        rows = [*csv.DictReader(io.StringIO(text))]
        assert [row["answer"] for row in rows] == [one["answer"] or "" for one in expected]
        assert [*rows[0]][:4] == ["image", "answer", "answer_score", "label_1"]
        assert all(len(row["score_1"]) == 6 for row in rows)
    else:
        heads, *lines = text.splitlines()
        assert heads.split()[1:3] == ["answer", "answer_score"]
        for line, one in zip(lines, expected, strict=True):
            assert line.split()[1] == (one["answer"] or "unknown")
    for one in expected:
        assert (one["answer"] is None) == (one["answer_score"] is None)
        assert one["answer"] is None or one["answer_score"] >= threshold


def test_images_unlike_those_of_training_are_unknown_with_reject(run, data):
    predictor = vit.Predictor(run, device="cpu", precision="fp32")
    predictor.engine.calibration = ScoreCalibration(
        **{**vars(predictor.calibration), "threshold": 0.4, "farthest": -1.0}
    )
    for one in predictor(images_of(data)[:3], reject=True):
        assert one.answers == {"answer": None, "answer_score": None}
        assert one.unknown == "unlike the training images"
        assert one.best is None
    assert all(one.answers["answer"] for one in predictor(images_of(data)[:3]))
    predictor.engine.calibration = ScoreCalibration(
        **{**vars(predictor.calibration), "threshold": None, "target_precision": 0.999}
        | {"farthest": 1e9}
    )
    for one in predictor(images_of(data)[:3], reject=True):
        assert (one.answers["answer"], one.unknown) == (None, "uncertain")  # nothing is proven


def test_an_evaluation_equals_sums_over_rows(run, data, tmp_path):
    rows = tmp_path / "rows.jsonl"
    scores = vit.evaluate(
        run, data, device="cpu", precision="fp32", out=str(rows), top_k=len(CLASSES)
    )
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    pairs = [(row["answer"] or "", row["label"]) for row in found]
    given = [pair for pair in pairs if pair[0]]
    right = sum(is_at_or_above(*pair) for pair in given)
    answers = scores["answers"]
    assert answers["precision"] == pytest.approx(right / len(given))
    assert answers["unknown"] == pytest.approx(1 - len(given) / len(pairs))
    leaves = [pair for pair in given if pair[0] in CLASSES and pair[0] != "animals/mammals"]
    assert answers["leaves"] == pytest.approx(len(leaves) / len(pairs))
    assert answers["distance"] == pytest.approx(np.mean([distance(*pair) for pair in pairs]))
    flat = [distance(row["predictions"][0]["label"], row["label"]) for row in found]
    assert answers["class_distance"] == pytest.approx(np.mean(flat))
    top = [{one["label"]: one["score"] for one in row["predictions"]} for row in found]
    animals = [sum(p for name, p in row.items() if name.startswith("animals")) for row in top]
    hits = [
        (share > 0.5) == row["label"].startswith("animals")
        for share, row in zip(animals, found, strict=True)
    ]
    first = scores["levels"][0]
    assert (first["level"], first["nodes"], first["count"]) == (1, 2, len(found))
    assert first["accuracy"] == pytest.approx(np.mean(hits))
    assert [row["count"] for row in scores["levels"]] == [150, 150, 50]


def test_a_leaf_that_training_lacks_counts_in_the_tree_and_not_in_top1(run, data, capsys):
    command = ["evaluate", str(run), str(data), "--split", "test", "--precision", "fp32"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "4 images of classes that the model lacks count in its tree only" in said.err
    assert "level 2" in said.out
    scores = vit.evaluate(run, data, split="test", device="cpu", precision="fp32")
    assert scores["count"] == 3
    assert [row["count"] for row in scores["levels"]] == [7, 7, 3]


def test_a_calibration_with_another_target_and_none(run, data, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    found = vit.calibrate(copy, str(data), device="cpu", precision="fp32", target_precision=0.8)
    lower = found["calibration"]["threshold"]
    assert vit.calibrate(copy, str(data), device="cpu", precision="fp32")["calibration"][
        "target_precision"
    ] == pytest.approx(0.95)
    first = json.loads((run / "config.json").read_text())["vit"]["calibration"]["threshold"]
    assert lower < (first or 0.95)
    words = ["--precision", "fp32", "--device", "cpu"]
    assert main(["calibrate", str(copy), str(data), "--target-precision", "0.9999", *words]) == 2
    said = capsys.readouterr().err
    assert "keeps its calibration: no score from which on 99.99% of the answers" in said


def test_images_are_sorted_into_the_folders_of_the_tree(run, data, tmp_path):
    out = tmp_path / "sorted"
    command = ["predict", str(run), str(data / "val"), "--sort-into", str(out), "--out"]
    assert main([*command, str(tmp_path / "rows.jsonl"), "--precision", "fp32"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    placed = {path.parent.relative_to(out).as_posix() for path in out.rglob("*.png")}
    assert placed == {row["answer"] or "_unsure" for row in rows}
    assert sum(1 for _ in out.rglob("*.png")) == len(rows)


def test_plain_names_are_measured_by_the_last_part_of_a_path(run, tmp_path):
    write_images(tmp_path, {name.rpartition("/")[2]: COLORS[name] for name in CLASSES}, 2)
    scores = vit.evaluate(run, tmp_path, device="cpu", precision="fp32")
    assert scores["count"] == 2 * len(CLASSES)


def test_a_batch_counts_levels_and_distances():
    torch.manual_seed(0)
    logits, labels = torch.randn(60, len(CLASSES)), torch.randint(0, len(CLASSES), (60,))
    tree = ClassTree(CLASSES)
    tally = NodeTally(tree)
    for part in (slice(0, 25), slice(25, 60)):
        tally.count(logits[part], labels[part])
    config = make_config({"task": "taxonomy"})
    scores = tally.scores(type("Run", (), {"config": config}), tally.sums.tolist())
    nodes = NodeOutcomes(tree, 0.5)
    names = [CLASSES[label] for label in labels]
    nodes.add(logits.softmax(1), names)
    assert scores["val_distance"] == pytest.approx(nodes.answer_scores()["class_distance"])
    assert scores["val_level1"] == pytest.approx(nodes.level_scores()[0]["accuracy"])
    assert scores["val_top1"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))


@pytest.mark.slow
def test_the_threshold_keeps_its_promise_and_gives_more_answers_than_classes_alone():
    tree, kept, more = ClassTree(CLASSES), 0, 0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, len(CLASSES), (3000,), generator=generator)
        logits = torch.randn(3000, len(CLASSES), generator=generator).double()
        for node in tree.nodes:  # siblings are alike
            under = torch.tensor([is_at_or_above(node, name) for name in CLASSES])
            logits += 1.2 * (under & under[labels].unsqueeze(1))
        half = logits[:1500], labels[:1500]
        scaling = fit_temperature(*half)
        fitted, flat = (
            fit_calibration(*half, fitted=scaling, target_precision=0.95, tree=one)
            for one in (tree, None)
        )
        calibration, threshold = fitted.calibration, fitted.calibration.threshold
        rows = (logits[1500:] / calibration.temperature).softmax(1)
        answers = [answer_of(path, threshold)[0] for path in tree.paths(rows.numpy())]
        pairs = [*zip(answers, [CLASSES[n] for n in labels[1500:]], strict=True)]
        given = [pair for pair in pairs if pair[0]]
        kept += np.mean([is_at_or_above(*pair) for pair in given]) >= 0.95
        more += calibration.answered > flat.calibration.answered + 0.2
    assert kept == more == 4
    distances = torch.arange(1500.0).double()  # far images are answered without --reject
    fitted = fit_calibration(
        *half, fitted=scaling, target_precision=0.95, tree=tree, distances=distances
    )
    assert (fitted.calibration.threshold, fitted.calibration.farthest) == (threshold, 1485)


def test_confidences_of_nodes_are_thresholds():
    generator = torch.Generator().manual_seed(0)
    tree = ClassTree(CLASSES)
    table = torch.rand(40, len(CLASSES), generator=generator).double().pow(4)
    table /= table.sum(1, keepdim=True)
    labels = torch.randint(0, len(CLASSES), (40,), generator=generator)
    paths = tree.paths(table.numpy())
    answered, wrong, ends = node_confidences(paths, [CLASSES[label] for label in labels])
    for n, path in enumerate(paths):
        for threshold in np.linspace(0, 1, 23):
            answer, _ = answer_of(path, threshold)
            assert bool(answer) == (threshold <= answered[n])
            assert is_at_or_above(answer, CLASSES[labels[n]]) == (threshold > wrong[n])
            assert (answer == path[-1][0]) == (threshold <= ends[n])
