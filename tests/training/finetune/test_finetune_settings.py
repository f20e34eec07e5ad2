"""Pretrained weights in, a run of one's own out: what each method changes, and what it leaves."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image

from tests.training.children import complete
from tests.training.runs import cut_and_continued, events, last_weights
from vit.config.setting_layers import make_config, read_settings
from vit.data.dataloader import TrainingLoader
from vit.data.sources.split_file import read_split
from vit.errors import ConfigError, VitError
from vit.inference.evaluate import evaluate
from vit.inference.predictor import Predictor
from vit.stop_signals import Interrupted
from vit.training import plan
from vit.training.finetune import finetune_settings
from vit.training.train import train
from vit.training.trainer import Trainer
from vit.weights.saved_model import load_run

BODY = ("blocks.0.attn.qkv.weight", "patch_embed.proj.weight", "norm.bias")


@pytest.fixture(scope="module")
def backbone(colour_data, tmp_path_factory) -> Path:
    """A run that has learnt something, on classes of other names."""
    place = tmp_path_factory.mktemp("backbone")
    data = place / "data"
    shutil.copytree(colour_data, data)
    for split in ("train", "val"):
        (data / split / "blue").rename(data / split / "azure")
    tiny = {"image_size": 16, "patch_size": 8, "dim": 16, "depth": 2, "num_heads": 2}
    settings = {"epochs": 3, "batch_size": 12, "lr": 3e-3, "device": "cpu", "workers": 0}
    settings["precision"] = "fp32"
    config = make_config({"data": str(data), **tiny, **settings, "crop_share": 0.8})
    train(config, place / "run")
    return place / "run"


@pytest.fixture
def fine(colour_data, backbone, tmp_path):
    """Fine-tunes into a folder; answers with it."""

    def run(name: str = "run", **chosen) -> Path:
        usual = {"device": "cpu", "workers": 0, "precision": "fp32", "batch_size": 12}
        if chosen.get("method") != "probe":
            usual["epochs"] = 2
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
        ("lora", {"lora_rank": 2}),
        ("lora", {"lora_rank": 2, "lora_targets": "fc1, fc2", "ema": 0.5}),
        ("lora", {"lora_rank": 2, "probe_first": True}),
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
    folder = fine()
    said = capfd.readouterr().err
    assert "probe: " in said
    assert " 0 img/s" not in said
    assert "going on from that head with method=full" in said
    settings = read_settings(folder / "config.yaml")
    chosen = {
        name: settings[name] for name in ("method", "probe_first", "layer_decay", "drop_path")
    }
    assert chosen == {
        "method": "full",
        "probe_first": True,
        "layer_decay": 0.75,
        "drop_path": 0.1,
    }
    assert [event["epoch"] for event in events(folder)] == [0, 1, 2]
    assert [event["step"] for event in events(folder)] == [0, 3, 6]
    assert max(event["val_top1"] for event in events(folder)) >= events(folder)[0]["val_top1"]


def test_the_head_before_the_first_step_is_the_probe_s(fine):
    probed, tuned = fine("probe", method="probe"), fine("tuned")
    first = events(tuned)[0]
    assert events(probed)[0]["val_loss"] == pytest.approx(first["val_loss"], rel=1e-5)
    assert events(probed)[0]["train_loss"] == pytest.approx(first["train_loss"], rel=1e-5)
    assert events(probed)[0]["val_top1"] == first["val_top1"]


def test_features_are_made_once(fine, capfd, backbone, colour_data):
    fine("one", method="probe")
    assert "0 of 36 images from the cache, 36 made" in capfd.readouterr().err
    fine("two", method="probe")
    assert "36 of 36 images from the cache, 0 made" in capfd.readouterr().err


def test_the_written_config_repeats_the_run(fine, tmp_path):
    lora = {"method": "lora", "lora_rank": 2}
    for name, settings in (("lora", lora), ("default", {}), ("probe", {"method": "probe"})):
        first = fine(name, **settings)
        stored = read_settings(first / "config.yaml")
        second = train(make_config(stored), tmp_path / f"{name} again").folder
        assert (first / "model.safetensors").read_bytes() == (
            second / "model.safetensors"
        ).read_bytes()


@pytest.mark.parametrize("settings", [{}, {"method": "lora", "lora_rank": 2, "ema": 0.5}], ids=str)
def test_an_interrupted_run_goes_on_without_the_weights_it_began_from(
    fine, backbone, tmp_path, settings
):
    whole = fine("whole", **settings)
    cut = cut_and_continued(fine, tmp_path, backbone, **settings)
    first, second = last_weights(whole), last_weights(cut)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [e["val_loss"] for e in events(whole)] == [e["val_loss"] for e in events(cut)]


def test_resuming_from_python_needs_no_settings_that_the_weights_decided(fine):
    folder = fine()
    before = (folder / "model.safetensors").read_bytes()
    stored = read_settings(folder / "config.yaml")
    few = {name: stored[name] for name in ("data", "weights", "epochs", "batch_size", "precision")}
    train(make_config(few), folder, resume=True)
    assert (folder / "model.safetensors").read_bytes() == before


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
    data = tmp_path / "more"
    shutil.copytree(colour_data, data)
    for split in ("train", "val"):
        shutil.copytree(data / split / "blue", data / split / "azure")
        for path in (data / split / "blue").iterdir():
            Image.eval(Image.open(path), lambda value: 255 - value).save(path)
    return data


def test_an_added_class_takes_few_epochs_and_a_table_of_recall(
    four_colours, backbone, tmp_path, capfd, monkeypatch
):
    images = sum(1 for _ in four_colours.glob("train/*/*.png"))
    monkeypatch.setattr(finetune_settings, "ADDED_CLASS_STEPS", 2 * (images // 12) + 1)
    given = {"data": str(four_colours), "weights": str(backbone), "batch_size": 12}
    given |= {"device": "cpu", "workers": 0, "precision": "fp32"}
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
    assert "Old and new classes" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_a_training_goes_on_with_the_share_and_the_cache_of_the_run(
    colour_data, tmp_path, monkeypatch, memory
):
    """The cache where the plan finds room for one, since the data may have grown."""
    monkeypatch.setattr(plan, "free_shared_memory", lambda _accelerator: memory)
    few = {"image_size": 16, "patch_size": 8, "dim": 16, "depth": 1, "num_heads": 2, "epochs": 1}
    few |= {"device": "cpu", "workers": 0, "precision": "fp32", "batch_size": 6}
    data = {"data": str(colour_data / "train"), "feature_cache": str(tmp_path / "features")}
    old = train({**few, **data, "cache": "ram", "val_share": 0.4}, tmp_path / "old").folder
    chosen = {name: few[name] for name in ("device", "workers", "precision", "batch_size")}
    chosen |= {"weights": str(old), "epochs": 1}
    new = train({**chosen, **data}, tmp_path / "new").folder
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
    def unused(*_):
        raise AssertionError("a probe makes no step")

    monkeypatch.setattr(TrainingLoader, "epoch", unused)
    assert [event["epoch"] for event in events(fine(method="probe"))] == [1]


def test_forgotten_classes_are_named(fine, capfd):
    fine(method="probe")
    assert "will be forgotten, without images here: azure; to keep them" in capfd.readouterr().err


def test_other_sizes_are_adapted_to(fine, capfd):
    folder = fine(method="linear", image_size=32, patch_size=8)
    assert "pos_embed 2x2 -> 4x4" in capfd.readouterr().err
    assert load_run(folder).config.image_size == 32


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"method": "probe", "mixup": 0.2}, "mixup=0.2: method=probe does not read it; method=lin"),
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


def test_validation_images_that_the_weights_may_have_learned_are_counted(
    fine, backbone, colour_data, tmp_path, capfd
):
    data = tmp_path / "data"
    shutil.copytree(colour_data / "train", data)
    first = fine("first", data=str(data), method="probe")
    assert SEEN not in capfd.readouterr().err
    fine("same", data=str(data), weights=str(first), method="probe")
    assert SEEN not in capfd.readouterr().err
    (data / "new").mkdir()  # of which the run has learned no label
    for path in (data / "red").iterdir():
        with Image.open(path) as image:
            image.rotate(90).save(data / "new" / path.name)
    fine("added", data=str(data), weights=str(first), method="probe")
    assert SEEN not in capfd.readouterr().err
    shutil.rmtree(data / "new")
    fold = fine("fold", data=str(data), weights=str(first), method="probe", folds=2, fold=1)
    held = {*json.loads((first / "split.json").read_text())["val"]}
    now = json.loads((fold / "split.json").read_text())["val"]
    number = sum(name not in held for name in now)
    assert 0 < number < len(now)
    printed = capfd.readouterr().err
    assert f"note: {number} of {len(now)} validation images were not {SEEN} {first}: " in printed
    # few images: nothing is calibrated
    assert f"needs 50 validation images, and there are {len(now)}" in printed
    shutil.copytree(data, tmp_path / "copy")
    copied = {"data": str(tmp_path / "copy"), "weights": str(first), "method": "probe"}
    fine("of a copy", **copied, folds=2, fold=1)
    assert f"note: {number} of {len(now)} validation images were" in capfd.readouterr().err


def test_a_probe_is_not_made_twice():
    with pytest.raises(ConfigError, match="method=probe does that already"):
        make_config({"method": "probe", "probe_first": True, "weights": "x"})


def test_a_signal_while_epoch_0_is_measured_loses_nothing(fine, tmp_path, monkeypatch):
    whole = fine("whole")

    measure = Trainer.measure_start

    def cut_short(self):
        self.run.interruption.number = 15
        measure(self)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(Trainer, "measure_start", cut_short)
        fine("cut")
    stored = read_settings(tmp_path / "cut/config.yaml")
    train(make_config(stored), tmp_path / "cut", resume=True)
    first, second = events(whole), events(tmp_path / "cut")
    assert [event["val_loss"] for event in first] == [event["val_loss"] for event in second]
    assert [event["train_loss"] for event in first] == [event["train_loss"] for event in second]
    assert (whole / "model.safetensors").read_bytes() == (
        tmp_path / "cut/model.safetensors"
    ).read_bytes()


def test_an_average_begins_with_the_probe_s_head(fine):
    for precision in ("fp32", "fp64"):
        folder = fine(precision, precision=precision, ema=0.9)
        assert [event["epoch"] for event in events(folder)] == [0, 1, 2]


def test_the_terms_of_the_weights_go_on(fine, backbone, tmp_path, capfd):
    first = fine("first", method="probe", license="cc-by-nc-4.0")
    capfd.readouterr()
    second = fine("second", method="probe", weights=str(first))
    assert "license: cc-by-nc-4.0" in capfd.readouterr().err
    assert read_settings(second / "config.yaml")["license"] == "cc-by-nc-4.0"
    config = json.loads((second / "config.json").read_text())
    assert config["pretrained_cfg"]["license"] == "cc-by-nc-4.0"


@pytest.mark.auto_precision
def test_scores_of_a_file_in_a_run_are_those_of_the_run(backbone, tmp_path, colour_data):
    data = tmp_path / "flat"
    shutil.copytree(colour_data / "train", data)
    tiny = {"image_size": 16, "patch_size": 8, "dim": 16, "depth": 1, "num_heads": 2}
    settings = {"epochs": 1, "batch_size": 9, "device": "cpu", "workers": 0, "warmup_epochs": 0}
    folder = train(make_config({"data": str(data), **tiny, **settings}), tmp_path / "run").folder
    names = (folder, folder / "model.safetensors")
    counts = [evaluate(name, str(data), device="cpu", precision="fp32")["count"] for name in names]
    assert counts[0] == counts[1] < 36


def test_a_soup_of_a_network_with_a_table_that_does_not_learn(tiny_config, tmp_path):
    config = tiny_config(soup=True, keep_best=2, position="sinusoidal_2d", ema=0.0)
    folder = train(config, tmp_path / "run").folder
    assert "soup" in (folder / "metrics.jsonl").read_text()


def tune(words: dict, folder: Path) -> None:
    """What each of several processes does."""
    torch.set_num_threads(1)
    train(make_config(words), folder)


@pytest.mark.slow
def test_two_processes_start_from_the_same_head(fine, backbone, colour_data, tmp_path):
    alone = fine("alone", drop_path=0.0)
    usual = {"device": "cpu", "workers": 0, "precision": "fp32", "batch_size": 12, "epochs": 2}
    words = {"data": str(colour_data), "weights": str(backbone), **usual, "drop_path": 0.0}
    words["feature_cache"] = str(tmp_path / "others")
    complete(tune, words, tmp_path / "two", log=tmp_path / "log", processes=2)
    for one, two in zip(events(alone), events(tmp_path / "two"), strict=True):
        assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-4)
        assert two["train_loss"] == pytest.approx(one["train_loss"], abs=1e-3)
