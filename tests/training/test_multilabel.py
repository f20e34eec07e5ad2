"""Images with several classes, or none: from a list to a run that knows its thresholds."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from sklearn.metrics import average_precision_score
from timm.loss import BinaryCrossEntropy
from torch.nn import functional as F

import vit
from tests.conftest import COLOURS, SEVERAL
from tests.training.distributed.test_processes import launch
from tests.training.runs import (
    ON_CPU,
    SHORT,
    SIZES,
    events,
    read_events,
    read_report,
    signalled_at,
)
from vit.commands.main import main
from vit.config.setting_layers import make_config, write_settings
from vit.data.sources.dataset_spec import DatasetSpec
from vit.errors import ConfigError, DataError
from vit.evaluation.multilabel_metrics import choose_thresholds, f1_scores
from vit.evaluation.runs_table import read_run
from vit.inference.evaluate import evaluate
from vit.score_calibration import COVERAGES
from vit.tasks.finished_run import ValidationLogits
from vit.tasks.losses import smoothed_binary_cross_entropy
from vit.tasks.multilabel import MultiLabel
from vit.tasks.task import calibrated_activation
from vit.training.train import train
from vit.weights import saved_model
from vit.weights.convert import best_event, describe_score
from vit.weights.saved_model import load_run

TINY = {"dim": 32, "batch_size": 8, "min_crop": 1.0, "hflip": 0.0, "mixup": 0.0, "cutmix": 0.0}
TINY |= {"dropout": 0.0, "drop_path": 0.0, "ema": 0.0}


@pytest.fixture(scope="module")
def config(several_list, tiny_config):
    return lambda **changes: tiny_config(**{**TINY, "data": str(several_list), **changes})


def test_the_loss_is_torchs_and_timms():
    logits, targets = torch.randn(5, 4), (torch.rand(5, 4) < 0.4).float()
    found = smoothed_binary_cross_entropy(logits, targets, smoothing=0.0)
    theirs = F.binary_cross_entropy_with_logits(logits, targets)
    torch.testing.assert_close(found, 5 * theirs)
    labels = torch.tensor([0, 3, 1, 1, 2])
    found = smoothed_binary_cross_entropy(logits, F.one_hot(labels).float(), smoothing=0.1)
    torch.testing.assert_close(found, 5 * BinaryCrossEntropy(smoothing=0.1)(logits, labels))
    half = smoothed_binary_cross_entropy(logits.half(), targets, smoothing=0.1)
    assert half.dtype == torch.float32


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """A run that nobody told what its images have, with everything that mixes or averages."""
    out = tmp_path_factory.mktemp("multilabel") / "run"
    more = {"mixup": 0.1, "cutmix": 0.1, "ema": 0.5, "keep_best": 3, "soup": True}
    return train(config(epochs=25, **more), out)


@pytest.mark.auto_precision
def test_a_list_of_several_labels_is_learned(trained, several_list):
    folder = trained.folder
    assert yaml.safe_load((folder / "config.yaml").read_text())["task"] == "multilabel"
    epoch = events(folder)[0]
    assert {"val_loss", "val_map", "val_f1"} <= epoch.keys()
    assert "val_top1" not in epoch
    assert trained.scores["map"] > 0.9
    assert trained.val_top1 is None
    kept = json.loads((folder / "config.json").read_text())["vit"]["thresholds"]
    assert list(load_run(folder).thresholds) == kept
    assert len(kept) == 3
    assert "mean average precision" in read_report(folder)
    assert "What is taken for what" not in read_report(folder)
    scores = evaluate(folder, str(several_list), device="cpu")  # on what training held out
    assert scores["count"] == epoch["val_images"]
    assert scores["map"] == pytest.approx(trained.scores["map"], abs=1e-6)
    assert [row["threshold"] for row in scores["per_class"]] == kept


def test_epochs_are_ranked_by_mean_average_precision():
    events = [{"val_map": 0.5, "val_loss": 9.0}, {"val_map": 0.4, "val_loss": 1.0}]
    events.append({"val_map": 0.5, "val_loss": 8.0})
    events = [{**event, "chosen_by": "val_map"} for event in events]
    assert sorted(events, key=MultiLabel().rank, reverse=True) == [events[2], events[0], events[1]]


@pytest.mark.slow
@pytest.mark.usefixtures("known_speed")
def test_without_a_labelled_validation_image_the_loss_ranks_epochs(
    config, several_list, tmp_path, capsys
):
    """Mean average precision is undefined there, and whatever shows it says so."""
    data = shutil.copytree(several_list.parent, tmp_path / "data") / "list.csv"
    rows = [line.split(",") for line in several_list.read_text().splitlines()[1:]]
    lines = [f"{name},{labels},{'train' if labels else 'val'}" for name, labels in rows]
    data.write_text("\n".join(["image,labels,split", *lines]) + "\n")
    run = train(config(data=str(data)), tmp_path / "run")
    epochs = events(run.folder)
    assert {(event["val_map"], event["chosen_by"]) for event in epochs} == {(None, "val_loss")}
    best = min(epochs, key=lambda event: event["val_loss"])
    assert (run.epoch, run.scores["map"]) == (best["epoch"], None)
    assert "val mAP -  F1" in capsys.readouterr().err
    assert "<b>-</b><span>" in read_report(run.folder)
    record = read_run(run.folder, tmp_path)
    assert (record.metric, record.score) == ("val_loss", best["val_loss"])
    assert best_event(run.folder)["epoch"] == best["epoch"]
    assert describe_score(best).startswith("Loss on its validation images: 0.")
    page, file = tmp_path / "page.html", tmp_path / "scores.json"
    words = ["evaluate", str(run.folder), str(data), "--device", "cpu", "--precision", "fp32"]
    assert main([*words, "--corruptions", "--html", str(page), "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "mAP                -\n" in shown
    assert "mean -, of images as they are -" in shown
    scores = json.loads(file.read_text())
    assert (scores["map"], scores["map_interval"]) == (None, None)
    assert {scores["robustness"][name] for name in ("clean", "mean")} == {None}
    assert "<b>-</b><span>mean average precision" in page.read_text()
    with pytest.raises(DataError, match="none of 4 images has a class"):
        vit.compare(run.folder, run.folder, str(data), precision="fp32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "classify", **SIZES}, "task=classify: the images have several classes, or none"),
        ({"method": "probe"}, "method=probe: a probe fits one class an image"),
    ],
)
def test_what_needs_one_class_an_image_is_refused(
    several_list, tiny_run, tmp_path, settings, message
):
    weights = {"weights": str(tiny_run)} if "method" in settings else {}
    asked = {"data": str(several_list), "device": "cpu", "precision": "fp32"}
    with pytest.raises(ConfigError, match=message):
        train(make_config({**asked, **weights, **settings}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_was_not_chosen_is_completed_and_said(config, tmp_path, capfd):
    train(config(**SHORT), tmp_path / "run")
    said = capfd.readouterr().err
    assert "note: images have several labels: task=multilabel" in said
    assert re.search("fewer than 5 validation images have, or lack, class .*: its", said)
    assert load_run(tmp_path / "run").thresholds == (0.5, 0.5, 0.5)


def test_images_and_weights_of_one_class_an_image_may_be_learned_so(
    config, tiny_config, tiny_run, tmp_path
):
    one_class = tiny_config(**SHORT, task="multilabel", num_classes=3)
    tuned = make_config(
        {**ON_CPU, **SHORT, "data": config().data.data, "weights": str(tiny_run), "batch_size": 8}
    )
    for number, asked in enumerate((one_class, tuned)):
        result = train(asked, tmp_path / str(number))
        assert result.scores["map"] > 0
        run = load_run(result.folder)
        assert run.classes == ("blue", "green", "red")
        assert run.thresholds is not None


@pytest.mark.slow
def test_a_resumed_run_is_that_run_byte_for_byte(config, tmp_path):
    asked = config(ema=0.5, mixup=0.2)
    train(asked, tmp_path / "whole")
    with signalled_at(4):
        train(asked, tmp_path / "cut")
    train(asked, tmp_path / "cut", resume=True)
    shutil.copytree(tmp_path / "cut", tmp_path / "again")
    train(asked, tmp_path / "again", resume=True)  # of a run that has ended
    for name in ("config.json", "model.safetensors", "config.yaml"):
        found = {(tmp_path / run / name).read_bytes() for run in ("whole", "cut", "again")}
        assert len(found) == 1, name


def test_a_kill_between_both_files_leaves_a_whole_run(several_run, tmp_path, monkeypatch):
    copy = tmp_path / "run"
    shutil.copytree(several_run, copy)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(saved_model, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        saved_model.update_run(copy, {"thresholds": [0.1, 0.2, 0.3]})
    assert load_run(copy).thresholds == (0.3, 0.5, 0.7)
    monkeypatch.undo()
    saved_model.update_run(copy, {"thresholds": [0.1, 0.2, 0.3]})
    assert load_run(copy).thresholds == (0.1, 0.2, 0.3)


class FakeRun:
    """A finished multi-label run of made-up logits."""

    def __init__(self, folder):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(60, 3, generator=generator)
        labels = torch.bernoulli(logits.sigmoid(), generator=generator).long()
        self.folder, self.lines = folder, []
        self.notify = self.lines.append
        self.splits = SimpleNamespace(classes=("blue", "green", "red"))
        self.validation_logits = ValidationLogits(3 * logits, labels, [], {})


def test_scores_are_calibrated_before_thresholds_are_chosen(several_run, tmp_path):
    shutil.copytree(several_run, tmp_path / "run")
    run = FakeRun(tmp_path / "run")
    MultiLabel().finish(run)
    loaded = load_run(tmp_path / "run")
    assert loaded.calibration.temperature == pytest.approx(3, rel=0.3)
    logits, labels = run.validation_logits.logits, run.validation_logits.labels
    raw, _ = choose_thresholds(logits.double().sigmoid(), labels)
    decided = calibrated_activation(loaded)(logits.double()) >= torch.tensor(loaded.thresholds)
    assert torch.equal(decided, logits.double().sigmoid() >= torch.tensor(raw))
    assert "temperature" in run.lines[0]
    assert loaded.calibration.set_levels != (None,) * len(COVERAGES)
    # groups that cannot be read again prove nothing
    gone = DatasetSpec(str(tmp_path / "gone.csv"), group="patient")
    run.validation_logits = replace(run.validation_logits, paths=[""] * len(labels), data=gone)
    MultiLabel().finish(run)
    calibration = load_run(tmp_path / "run").calibration
    assert (calibration.groups, calibration.threshold) == (1, None)
    assert calibration.set_levels[-1] is None
    (note,) = (line for line in run.lines if "cannot be read again" in line)
    assert "gone.csv" in note


def test_f1_of_validation_is_that_of_one_half():
    logits, labels = torch.tensor([[0.0, -0.1], [3.0, 2.0]]), torch.tensor([[1, 0], [1, 1]])
    assert f1_scores(logits >= 0, labels).tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_two_processes_equal_one(config, tmp_path):
    asked = config(val_share=0.4, epochs=2, task="multilabel", num_classes=3)
    train(asked, tmp_path / "one")
    write_settings(tmp_path / "settings.yaml", asked)
    done = launch(2, "-c", str(tmp_path / "settings.yaml"), "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    first, second = (read_events(tmp_path / name) for name in ("one", "two"))
    for ours, theirs in zip(first, second, strict=True):
        assert ours.keys() == theirs.keys()
        for name in {"loss", "val_loss"} & ours.keys():
            assert abs(ours[name] - theirs[name]) < 1e-4
        for name in {"val_map", "val_f1"} & ours.keys():
            assert ours[name] == theirs[name]  # by the order of the scores alone
    ours, theirs = (load_run(tmp_path / name).thresholds for name in ("one", "two"))
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.auto_precision
def test_the_rows_of_folds_have_the_score_of_every_class(config, tmp_path):
    record = vit.cross_validate(config(folds=2), out=tmp_path / "folds")
    rows = [json.loads(line) for line in (tmp_path / "folds/rows.jsonl").read_text().splitlines()]
    names = sorted(COLOURS)
    assert len(rows) == SEVERAL
    assert {row["fold"] for row in rows} == {1, 2}
    assert all(0 < row[f"class_score_{name}"] < 1 for row in rows for name in names)
    assert not (tmp_path / "folds/label_errors.csv").exists()
    # the mean average precision of a fold, from its rows by scikit-learn
    for fold in (1, 2):
        mine = [row for row in rows if row["fold"] == fold]
        precisions = [
            average_precision_score(
                [name in row["true_labels"] for row in mine],
                [row[f"class_score_{name}"] for row in mine],
            )
            for name in names
        ]
        assert record["scores"][str(fold)]["map"] == pytest.approx(sum(precisions) / 3)
