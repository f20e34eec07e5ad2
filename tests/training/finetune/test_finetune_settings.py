"""Pretrained weights in, a run of one's own out: what each method changes, and what it leaves."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image

from tests.training import children
from tests.training.children import complete
from tests.training.runs import (
    ON_CPU,
    SHORT,
    SIZES,
    cut_and_continued,
    equal_models,
    events,
    last_weights,
    read_report,
)
from vit.config.setting_layers import make_config, read_settings
from vit.data.dataloader import TrainingLoader
from vit.data.sources.split_file import read_split
from vit.errors import VitError
from vit.inference.evaluate import evaluate
from vit.inference.predictor import Predictor
from vit.stop_signals import Interrupted
from vit.training import plan
from vit.training.finetune import finetune_settings
from vit.training.train import train
from vit.training.trainer import Trainer
from vit.weights.saved_model import load_run

SLOW_LORA = pytest.param(
    {"method": "lora", "lora_rank": 2, "ema": 0.5}, marks=pytest.mark.slow, id="lora"
)
BODY = ("blocks.0.attn.qkv.weight", "patch_embed.proj.weight", "norm.bias")


@pytest.fixture(scope="module")
def backbone(colour_data, tmp_path_factory) -> Path:
    """A run that has learnt something, on classes of other names."""
    place = tmp_path_factory.mktemp("backbone")
    data = shutil.copytree(colour_data, place / "data")
    for split in ("train", "val"):
        (data / split / "blue").rename(data / split / "azure")
    settings = {**SIZES, **ON_CPU, "epochs": 3, "lr": 3e-3, "crop_share": 0.8}
    return train(make_config({"data": str(data), **settings}), place / "run").folder


@pytest.fixture
def fine(colour_data, backbone, tmp_path):
    """Fine-tunes into a folder; answers with it."""

    def run(name: str = "run", **chosen) -> Path:
        usual = ON_CPU if chosen.get("method") == "probe" else {**ON_CPU, "epochs": 2}
        given = {"data": str(colour_data), "weights": str(backbone), **usual, **chosen}
        given["feature_cache"] = str(tmp_path / "features")
        return train(make_config(given), tmp_path / name).folder

    return run


def same(one: Path, other: Path, names=BODY) -> bool:
    first, second = (load_run(folder).model.state_dict() for folder in (one, other))
    return all(torch.equal(first[name], second[name]) for name in names)


@pytest.mark.auto_precision
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("full", {}),
        ("linear", {}),
        pytest.param("lora", {"lora_rank": 2}, marks=pytest.mark.slow),
        ("lora", {"lora_rank": 2, "lora_targets": "fc1, fc2", "ema": 0.5}),
        pytest.param("lora", {"lora_rank": 2, "probe_first": True}, marks=pytest.mark.slow),
        ("probe", {}),
    ],
)
def test_every_method_leaves_an_ordinary_run(fine, backbone, colour_data, method, settings):
    folder = fine(method=method, **settings)
    run = load_run(folder)
    assert run.classes == ("blue", "green", "red")
    assert run.preprocessing.crop_share == 0.8  # the backbone's
    frozen = method in ("linear", "probe")
    if not settings.get("probe_first"):  # which may well remain the best
        assert same(folder, backbone, names=(BODY[0],)) is (frozen or "lora_targets" in settings)
    assert same(folder, backbone, names=BODY[1:]) is (frozen or method == "lora")
    assert not any("lora" in name for name in run.model.state_dict())
    timm.create_model(f"local-dir:{folder}", pretrained=True)
    best = max(event["val_top1"] for event in events(folder))
    measured = evaluate(folder, str(colour_data), precision="fp32", device="cpu")
    assert measured["top1"] == pytest.approx(best)
    assert (folder / "report.html").is_file()


def test_without_a_method_the_probe_comes_first_and_is_epoch_0(fine, capfd):
    probed = fine("probe", method="probe")
    said = capfd.readouterr().err
    assert "0 of 36 images from the cache, 36 made" in said
    assert "will be forgotten, without images here: azure; to keep them" in said
    folder = fine()
    said = capfd.readouterr().err
    assert "36 of 36 images from the cache, 0 made" in said
    assert "probe: " in said
    assert " 0 img/s" not in said
    assert "going on from that head with method=full" in said
    stored = read_settings(folder / "config.yaml")
    chosen = {"method": "full", "probe_first": True, "layer_decay": 0.75, "drop_path": 0.1}
    assert {name: stored[name] for name in chosen} == chosen
    assert [event["epoch"] for event in events(folder)] == [0, 1, 2]
    assert [event["step"] for event in events(folder)] == [0, 3, 6]
    first, (own,) = events(folder)[0], events(probed)
    assert max(event["val_top1"] for event in events(folder)) >= first["val_top1"]
    assert own["val_top1"] == first["val_top1"]
    for name in ("val_loss", "train_loss"):
        assert own[name] == pytest.approx(first[name], rel=1e-5)
    # resuming from Python needs no settings that the weights decided
    before = (folder / "model.safetensors").read_bytes()
    few = {name: stored[name] for name in ("data", "weights", "epochs", "batch_size", "precision")}
    train(make_config(few), folder, resume=True)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("settings", [SLOW_LORA, {}, {"method": "probe"}], ids=str)
def test_the_written_config_repeats_the_run(fine, tmp_path, settings):
    first = fine("first", **settings)
    stored = read_settings(first / "config.yaml")
    assert equal_models(first, train(make_config(stored), tmp_path / "again").folder)


@pytest.mark.parametrize("settings", [{}, SLOW_LORA], ids=str)
def test_an_interrupted_run_goes_on_without_the_weights_it_began_from(
    fine, backbone, tmp_path, settings
):
    whole = fine("whole", **settings)
    cut = cut_and_continued(fine, tmp_path, backbone, **settings)
    first, second = last_weights(whole), last_weights(cut)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [e["val_loss"] for e in events(whole)] == [e["val_loss"] for e in events(cut)]


def test_rows_of_the_head_are_kept_by_name(fine, backbone, capfd):
    folder = fine(method="full", lr=1e-12, min_lr=0.0, layer_decay=1.0)
    assert "head: 2 of 3 classes kept by name; new: blue" in capfd.readouterr().err
    ours, theirs = load_run(folder), load_run(backbone)
    for name in ("green", "red"):
        one = ours.model.head.weight[ours.classes.index(name)]
        other = theirs.model.head.weight[theirs.classes.index(name)]
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    new = ours.model.head.weight[ours.classes.index("blue")]
    torch.testing.assert_close(new, theirs.model.head.weight.mean(0), atol=1e-6, rtol=0)


@pytest.fixture
def four_colours(colour_data, tmp_path) -> Path:
    """The data of `backbone` with another class, which is lighter."""
    data = shutil.copytree(colour_data, tmp_path / "more")
    for split in ("train", "val"):
        shutil.copytree(data / split / "blue", data / split / "azure")
        for path in (data / split / "blue").iterdir():
            Image.eval(Image.open(path), lambda value: 255 - value).save(path)
    return data


@pytest.mark.slow
def test_an_added_class_takes_few_epochs_and_a_table_of_recall(
    four_colours, backbone, tmp_path, capfd, monkeypatch
):
    images = sum(1 for _ in four_colours.glob("train/*/*.png"))
    monkeypatch.setattr(finetune_settings, "ADDED_CLASS_STEPS", 2 * (images // 12) + 1)
    given = {"data": str(four_colours), "weights": str(backbone), **ON_CPU}
    given["feature_cache"] = str(tmp_path / "features")
    folder = train(given, tmp_path / "new").folder
    told = capfd.readouterr().err
    assert "1 new class (blue): epochs=3 after the probe, with the optimizer" in told
    assert [event["epoch"] for event in events(folder)] == [0, 1, 2, 3]
    mine, theirs = (read_settings(run / "config.yaml") for run in (folder, backbone))
    assert [mine[name] for name in ("lr", "min_crop", "smoothing")] == [3e-3, 0.08, 0.1]
    assert mine["layer_decay"] == theirs["layer_decay"] == 1.0
    # by code of its own: what each network gets right of the same images
    counts = {}
    for run in (backbone, folder):
        answers = Predictor(run, precision="fp32")(sorted(four_colours.glob("val/*/*.png")))
        for one in answers:
            right = one.predictions[0][0] == Path(one.image).parent.name
            counts.setdefault((run, Path(one.image).parent.name), []).append(right)
    old = ("azure", "green", "red")
    before, now = (sum(sum(counts[run, name]) for name in old) / 21 for run in (backbone, folder))
    table = [line.split() for line in told[told.index("recall") :].splitlines()]
    assert table[1] == ["3", "old", "classes", "21", f"{before:.1%}", f"{now:.1%}"]
    blue = f"{sum(counts[folder, 'blue']) / 7:.1%}"
    assert table[2] == ["1", "new", "class", "7", "-", blue]
    assert table[-2][0] == "blue" or ["blue", "7", "-", blue] in table
    assert "Old and new classes" in read_report(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_a_training_goes_on_with_the_share_and_the_cache_of_the_run(
    colour_data, tmp_path, monkeypatch, memory
):
    """The cache where the plan finds room for one, since the data may have grown."""
    monkeypatch.setattr(plan, "free_shared_memory", lambda _accelerator: memory)
    usual = {**ON_CPU, "data": str(colour_data / "train"), "epochs": 1, "batch_size": 6}
    usual["feature_cache"] = str(tmp_path / "features")
    old = train({**SIZES, **usual, "cache": "ram", "val_share": 0.4}, tmp_path / "old").folder
    new = train({**usual, "weights": str(old)}, tmp_path / "new").folder
    mine = read_settings(new / "config.yaml")
    assert (mine["cache"], mine["val_share"]) == ("ram" if memory else "none", 0.4)
    assert read_split(new).val == read_split(old).val


def test_a_flag_switches_off_what_depends_on_it_in_the_recipe_of_the_old_run(monkeypatch):
    recipe = {"mixup": 0.8, "mix_probability": 0.5, "min_crop": 0.4, "smoothing": 0.2}
    monkeypatch.setattr(finetune_settings, "recipe_of_run", lambda _weights: recipe)
    settings = {"data": "photos", "weights": "runs/old", "method": "full", "probe_first": True}
    config = make_config({**settings, "mixup": 0.0})
    source = SimpleNamespace(classes=("heron", "stork"), origin="run runs/old")
    classes = ("crane", "heron", "stork")
    found = finetune_settings.complete_for_added_classes(
        config, source, classes, 100, lambda _note: None
    )
    assert (found.augment.mixup, found.augment.mix_probability) == (0.0, 1.0)
    assert (found.augment.min_crop, found.training.smoothing) == (0.4, 0.2)


def test_a_probe_starts_no_loader_of_training_batches(fine, monkeypatch):
    monkeypatch.setattr(TrainingLoader, "epoch", lambda *_: pytest.fail("a probe makes no step"))
    assert [event["epoch"] for event in events(fine(method="probe"))] == [1]


def test_other_sizes_are_adapted_to(fine, capfd):
    folder = fine(method="linear", image_size=32, patch_size=8)
    assert "pos_embed 2x2 -> 4x4" in capfd.readouterr().err
    assert load_run(folder).config.image_size == 32


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"method": "probe", "mixup": 0.2}, "mixup=0.2: method=probe does not read it; method=lin"),
        ({"method": "probe", "probe_first": True}, "method=probe does that already"),
        ({"data": "nowhere"}, "nowhere"),
        ({"model": "vit_small_patch16_224"}, "has dim=384, but the weights .* have 16"),
        ({"depth": 3}, "depth"),
        ({"method": "lora", "lora_targets": "query"}, "has no query here; choose from qkv"),
        ({"method": "lora", "lora_rank": 64}, "choose one from 1 to 15"),
        ({"weights": "nowhere/at/all.pth"}, "nowhere"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_written(
    fine, tmp_path, chosen, message
):
    with pytest.raises(VitError, match=message) as caught:
        fine(**chosen)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


SEEN = "held out by the training of"


@pytest.mark.slow
def test_validation_images_that_the_weights_may_have_learned_are_counted(
    fine, backbone, colour_data, tmp_path, capfd
):
    data, copy = shutil.copytree(colour_data / "train", tmp_path / "data"), tmp_path / "copy"
    first = fine("first", data=str(data), method="probe")
    fine("same", data=str(data), weights=str(first), method="probe")
    (data / "new").mkdir()  # of which the run has learned no label
    for path in (data / "red").iterdir():
        with Image.open(path) as image:
            image.rotate(90).save(data / "new" / path.name)
    fine("added", data=str(data), weights=str(first), method="probe")
    assert SEEN not in capfd.readouterr().err
    shutil.rmtree(data / "new")
    half = {"weights": str(first), "method": "probe", "folds": 2, "fold": 1}
    fold = fine("fold", data=str(data), **half)
    held, now = (json.loads((run / "split.json").read_text())["val"] for run in (first, fold))
    number = len({*now} - {*held})
    assert 0 < number < len(now)
    printed = capfd.readouterr().err
    assert f"note: {number} of {len(now)} validation images were not {SEEN} {first}: " in printed
    assert "scores are not calibrated" in printed
    assert f"takes 50 validation images, and there are {len(now)}" in printed
    shutil.copytree(data, copy)
    fine("of a copy", data=str(copy), **half)
    assert f"note: {number} of {len(now)} validation images were" in capfd.readouterr().err


@pytest.mark.slow
def test_a_signal_while_epoch_0_is_measured_loses_nothing(fine, tmp_path):
    whole, cut, measure = fine("whole"), tmp_path / "cut", Trainer.measure_start

    def cut_short(self):
        self.run.interruption.number = 15
        measure(self)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(Trainer, "measure_start", cut_short)
        fine("cut")
    train(make_config(read_settings(cut / "config.yaml")), cut, resume=True)
    for name in ("val_loss", "train_loss"):
        assert [event[name] for event in events(whole)] == [event[name] for event in events(cut)]
    assert equal_models(whole, cut)


@pytest.mark.slow
def test_an_average_begins_with_the_probe_s_head(fine):
    for precision in ("fp32", "fp64"):
        folder = fine(precision, precision=precision, ema=0.9)
        assert [event["epoch"] for event in events(folder)] == [0, 1, 2]


@pytest.mark.slow
def test_the_terms_of_the_weights_go_on(fine, backbone, tmp_path, capfd):
    first = fine("first", method="probe", license="cc-by-nc-4.0")
    capfd.readouterr()
    second = fine("second", method="probe", weights=str(first))
    assert "license: cc-by-nc-4.0" in capfd.readouterr().err
    assert read_settings(second / "config.yaml")["license"] == "cc-by-nc-4.0"
    config = json.loads((second / "config.json").read_text())
    assert config["pretrained_cfg"]["license"] == "cc-by-nc-4.0"


@pytest.mark.auto_precision
def test_scores_of_a_file_in_a_run_are_those_of_the_run(tiny_config, tmp_path, colour_data):
    data = shutil.copytree(colour_data / "train", tmp_path / "flat")
    folder = train(tiny_config(**SHORT, data=str(data)), tmp_path / "run").folder
    names = (folder, folder / "model.safetensors")
    counts = [evaluate(name, str(data), device="cpu", precision="fp32")["count"] for name in names]
    assert counts[0] == counts[1] < 36


def test_a_soup_of_a_network_with_a_table_that_does_not_learn(tiny_config, tmp_path):
    config = tiny_config(soup=True, keep_best=2, position="sinusoidal_2d", ema=0.0)
    folder = train(config, tmp_path / "run").folder
    assert "soup" in (folder / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_two_processes_start_from_the_same_head(fine, backbone, colour_data, tmp_path):
    alone = fine("alone", drop_path=0.0)
    words = {"data": str(colour_data), "weights": str(backbone), **ON_CPU, "epochs": 2}
    words |= {"drop_path": 0.0, "feature_cache": str(tmp_path / "others")}
    complete(
        children.train, make_config(words), tmp_path / "two", log=tmp_path / "log", processes=2
    )
    for one, two in zip(events(alone), events(tmp_path / "two"), strict=True):
        assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-4)
        assert two["train_loss"] == pytest.approx(one["train_loss"], abs=1e-3)
