"""The benchmark command: ratios of interleaved rounds, missing libraries, a table of its parts."""

import argparse
import importlib
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from scipy.stats import binom
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from benchmarks import accuracy_by_time, coverage, group_coverage
from benchmarks.__main__ import PARTS
from benchmarks.backbone_selection import Study, lda_accuracy, ridge_accuracy
from benchmarks.timing import Clock, Comparison, Missing, slug, table, take_turns

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def nothing_is_collected(monkeypatch):
    """Between rounds, where the objects of all tests would be passed over."""
    monkeypatch.setattr("benchmarks.timing.gc", SimpleNamespace(collect=lambda: None))


def way(*seconds: float):
    """A way whose runs last so many seconds, in turn."""
    return lambda: cycle(seconds).__next__


def absent(error: Exception):
    def make():
        raise error

    return make


def test_a_ratio_is_the_median_of_those_of_each_round():
    # the machine is three times as slow in the second round; ours takes half of the time
    ways = {"peer": way(1.0, 3.0, 1.0), "ours": way(0.5, 1.5, 0.4)}
    comparison = Comparison(title="Step", ways=ways, count=8, warm_ups=0)
    seconds, missing = take_turns(comparison, 3, Clock(), [])
    assert (seconds, missing) == ({"peer": [1.0, 3.0, 1.0], "ours": [0.5, 1.5, 0.4]}, {})
    rows = table(comparison, seconds, missing, {}).splitlines()
    assert rows[-2] == "| peer | 1,000.0 | 8.0 | 1.00x | 1.00 to 1.00 |"
    assert rows[-1] == "| ours | 500.0 | 16.0 | 2.00x | 2.00 to 2.50 |"


def test_what_is_missing_is_a_row_and_the_reference_is_always_there():
    ways = {
        "peer": way(1.0),
        "other": absent(ImportError("no", name="vit_pytorch")),
        "script": absent(Missing("give timm's repository with --timm-repo")),
        "ours": way(1.0),
    }
    comparison = Comparison(title="Step", ways=ways)
    seconds, missing = take_turns(comparison, 1, Clock(), [])
    assert [*seconds] == ["peer", "ours"]
    text = table(comparison, seconds, missing, {})
    assert "| other | vit_pytorch is not installed | | | |" in text
    assert "--timm-repo" in missing["script"]
    assert [*take_turns(comparison, 1, Clock(), ["nothing"])[0]] == ["peer"]


@pytest.mark.slow
def test_each_way_of_a_step_is_measured_in_its_own_process(tmp_path):
    words = ["small", "-b", "2", "--rounds", "1", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks", *words, "--only", "vit, float32, A"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    [file] = tmp_path.iterdir()
    rows = [line for line in file.read_text(encoding="utf-8").splitlines() if "AdamW" in line]
    assert [row.split(" | ")[0] for row in rows] == [
        *("| timm, float32, AdamW", "| vit, float32, AdamW") * 2
    ]
    assert all(row.count("|") == 6 and "x | " in row for row in rows)


def test_every_part_has_its_row_in_the_documentation_and_its_function():
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    for part in PARTS:
        assert f"\n| `{part}` |" in page
    functions = "forward step small startup accuracy accuracy_by_time coverage calibration groups"
    for part in functions.split():
        assert callable(getattr(importlib.import_module(f"benchmarks.{PARTS[part]}"), part))


@pytest.mark.slow
def test_promises_to_groups_are_simulated():
    tables = [*group_coverage.groups(argparse.Namespace(draws=2))]
    assert len(tables) == 5
    assert all(table.count("\n| ") >= 2 for table in tables)


@pytest.mark.parametrize(
    "classes",
    [{"classes": '["blue", "green", "red"]'}, {"names": "{0: 'blue', 1: 'green', 2: 'red'}"}],
)
def test_files_of_other_toolkits_are_measured_by_the_names_of_their_classes(classes, tmp_path):
    """Each file answers with the strongest channel, of which it sees red first."""
    float32, side = onnx.TensorProto.FLOAT, accuracy_by_time.SIDE
    values = onnx.helper.make_tensor_value_info
    order = onnx.helper.make_tensor("order", onnx.TensorProto.INT64, [3], [2, 1, 0])
    nodes = [
        onnx.helper.make_node("ReduceMean", ["images"], ["means"], axes=[2, 3], keepdims=0),
        onnx.helper.make_node("Gather", ["means", "order"], ["logits"], axis=1),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "channels",
        [values("images", float32, [1, 3, side, side])],
        [values("logits", float32, [1, 3])],
        [order],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, ir_version=9, opset_imports=opset)
    onnx.helper.set_model_props(model, classes)
    onnx.save(model, tmp_path / "channels.onnx")
    for name, colour in {"red": (250, 0, 0), "green": (0, 250, 0), "blue": (0, 0, 250)}.items():
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.new("RGB", (120, 90), colour).save(tmp_path / "val" / name / "1.png")
    (tmp_path / "val" / "red" / "2.png").write_bytes((tmp_path / "val/blue/1.png").read_bytes())
    figure = tmp_path / "figure.svg"
    options = argparse.Namespace(rounds=1, cpu_time=False, figure=figure)
    files = dict.fromkeys(("vit, a, int8", "timm, b"), (tmp_path / "channels.onnx", 60.0))
    text = accuracy_by_time.measure_files(files, tmp_path / "val", options)
    first, second = text.splitlines()[2:]
    assert first.startswith("| vit, a, int8 | 0.0 | 60 | 75.0% (30.1% to 95.4%) | ")
    assert second.startswith("| timm, b | 0.0 | 60 | 75.0% (")
    drawn = ElementTree.parse(figure)
    fills = [one.get("fill") for one in drawn.iter("{http://www.w3.org/2000/svg}circle")]
    assert fills == ["none", accuracy_by_time.COLOURS[1]]


def test_the_name_of_a_machine_fits_into_a_file_name():
    assert slug("Intel(R) Xeon(R) Platinum 8488C") == "intel-xeon-platinum"
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb"


def test_an_unknown_part_is_one_line_with_the_choices():
    command = [sys.executable, "-m", "benchmarks", "forwrd"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "forwrd is not a part: choose of forward, step" in run.stderr


@pytest.mark.slow
def test_coverage_of_saved_predictions_is_counted_per_class(tmp_path):
    random = np.random.default_rng(0)
    labels = np.arange(1200) % 3
    logits = random.normal(size=(1200, 3)) + 2 * np.eye(3)[labels]
    table = {"labels": labels}
    for kind in coverage.KINDS:
        table |= {f"{kind} logits": logits, f"{kind} distances": np.full(1200, np.nan)}
    np.savez(tmp_path / "one.npz", **table)
    options = argparse.Namespace(runs=[Path("one")], predictions=tmp_path)
    (run,) = coverage.read_all(options)
    rows = [line.split(" | ") for line in coverage.sets_table(run, 20).splitlines()[4:]]
    assert [row[0].strip("| ") for row in rows] == ["0.8", "0.9", "0.95", "0.99"] * 2
    for row in rows[4:]:
        assert row[1] == "each class"
        share = 100 * float(row[0].strip("| "))
        assert float(row[3]) > share - 1  # all images
        assert share - 2 < float(row[-1].strip("| ")) <= float(row[3])  # the worst class
    held = coverage.interval_coverage(run, 200, 100)
    assert all(88 <= float(share) <= 100 for share in held)


@pytest.mark.parametrize(("share", "count"), [(0.5, 20), (0.99, 50)])
def test_coverage_of_wilsons_interval_is_exact(share, count):
    inside = [
        hits
        for hits in range(count + 1)
        if coverage.wilson_interval(hits, count)[0]
        <= share
        <= coverage.wilson_interval(hits, count)[1]
    ]
    expected = binom.pmf(inside, count, share).sum()
    assert coverage.wilson_coverage(share, count) == pytest.approx(expected)


def test_scores_of_features_are_those_of_fits_without_the_held_out_images():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 4
    features = torch.randn(40, 6, generator=generator) + 1.2 * torch.eye(6)[labels]
    x = ((features - features.mean(0)) / features.std(0)).double()
    x = torch.cat([x, torch.ones(40, 1)], 1).numpy()
    y = np.eye(4)[labels]
    shares = []
    for power in range(-6, 7):
        model = Ridge(alpha=10.0**power * 40, fit_intercept=False)
        right = [
            model.fit(np.delete(x, n, 0), np.delete(y, n, 0)).predict(x[[n]]).argmax() == labels[n]
            for n in range(40)
        ]
        shares.append(np.mean(right))
    assert ridge_accuracy(features, labels, 4) == pytest.approx(max(shares))
    assert 0.3 < max(shares) < 1
    # far apart classes are found by any discriminant, and labels by chance by none
    apart = features + 20 * torch.eye(6)[labels]
    assert lda_accuracy(apart, labels, 4) == 1
    assert LinearDiscriminantAnalysis().fit(apart, labels).score(apart, labels) == 1
    assert lda_accuracy(torch.randn(400, 6, generator=generator), torch.arange(400) % 4, 4) < 0.4


def test_the_regret_of_a_rule_is_against_the_best_training():
    def rows(target: str, top1: dict[str, float], probe: dict[str, float]):
        at = {"target": target, "seed": 0}
        for name, value in top1.items():
            row = {"kind": "training", **at, "candidate": name, "top1": value}
            yield {**row, "tested": 300, "curve": [value]}
        for name, value in probe.items():
            yield {"kind": "scores", **at, "candidate": name, "rows": [
                {"images": n, **dict.fromkeys(("k-NN", "LDA", "ridge", "probe"), score),
                 "probe's log-loss": -score} for n, score in ((50, 1 - value), (90, value))
            ]}  # fmt: skip

    trained = {"a": 0.9, "b": 0.7, "scratch": 0.5}
    study = Study([
        *rows("one", trained, {"a": 0.8, "b": 0.6, "random": 0.1}),
        *rows("two", {**trained, "scratch": 0.94}, {"a": 0.8, "b": 0.6, "random": 0.1}),
        *rows("unfinished", {"a": 0.9}, {"a": 0.8}),
    ])  # fmt: skip
    assert study.places == [("one", 0), ("two", 0)]
    rules = dict(study.rules())
    assert rules["probe, all images"] == dict.fromkeys(study.places, "a")
    assert rules["probe, 50 images"] == dict.fromkeys(study.places, "random")
    best = rules["validation after 25% of the best two by probe and scratch"]
    assert [*best.values()] == ["a", "scratch"]
    assert study.row("x", rules["probe, all images"]) == "| x | 2.00 | 50% | 50% | 4.0 (two) |"
    assert study.regret(("one", 0), "random") == pytest.approx(40)
