"""`--weights auto`: a permissive list, rules that follow the time, no download unannounced."""

import dataclasses
import json
from pathlib import Path

import pytest
import timm
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import save_file

import vit
from tests.training.test_plan import PHOTOS, TINY
from vit.commands.main import main
from vit.config import ModelConfig
from vit.config.setting_layers import make_config
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError, WeightsError
from vit.evaluation.model_summary import cost_of
from vit.training import plan_weights as rules
from vit.training.plan import length_of, summary_lines
from vit.training.plan_rules import make_plan
from vit.training.plan_weights import (
    BASE,
    DINO_SMALL,
    FOR_PROBES,
    FOR_STEPS,
    SMALL,
    ListedWeights,
    choose_weights,
    find_on_disk,
)
from vit.training.plan_weights import TINY as AUGREG_TINY
from vit.weights import hub
from vit.weights.formats import timm_network
from vit.weights.formats.timm_network import unproven_config

GPU = dataclasses.replace(PHOTOS, device="cuda", flops=30e12)
EVERYTHING = {weights: f"timm/{weights.name}" for weights in FOR_STEPS}


def chosen(facts, given=(), on_disk=(), **options) -> rules.WeightsChoice:
    """What the rules choose where the hub answers."""
    mine = {weights: EVERYTHING[weights] for weights in on_disk}
    return choose_weights(facts, dict(given), on_disk=mine, on_hub=lambda: EVERYTHING, **options)


@pytest.mark.usefixtures("flops_alone")
@pytest.mark.parametrize("weights", FOR_STEPS, ids=lambda weights: weights.name)
def test_the_list_is_permissive_and_true(weights: ListedWeights):
    entry = timm_network.find_entry(weights.name)
    assert entry is not None
    assert (entry.name, entry.hub_id) == (weights.name, weights.repository.name)
    assert timm_network.is_supported(weights.name)
    assert entry.license == weights.license
    assert weights.license in rules.PERMISSIVE
    with torch.device("meta"):
        size = weights.size(224)
        network = timm.create_model(weights.name, num_classes=0, img_size=size)
    millions = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    if "dinov2" not in weights.name:  # whose positions here are of fewer patches
        assert millions == pytest.approx(weights.parameters, abs=0.06)
    config = unproven_config(network, size)
    for name in ("dim", "depth", "patch_size"):
        assert getattr(config, name) == getattr(weights, name)
    counted = cost_of(config, batch_size=1).flops
    assert weights.flops(size) == pytest.approx(counted, rel=0.01)
    assert weights.gflops == pytest.approx(weights.flops(size) / 1e9, abs=0.06)


def test_both_orders_have_the_whole_list():
    assert set(FOR_STEPS) == set(FOR_PROBES)
    assert min(FOR_STEPS, key=lambda weights: weights.gflops) == FOR_STEPS[0] == FOR_PROBES[0]


def test_more_time_never_chooses_a_smaller_network_at_the_same_method():
    facts = dataclasses.replace(PHOTOS, images=3000)
    times = [30.0 * 2**n for n in range(16)]
    choices = [chosen(dataclasses.replace(facts, seconds=seconds)) for seconds in times]
    for method in ("probe", "full"):
        costs = [c.weights.flops(c.image_size) for c in choices if c.method == method]
        assert costs
        assert costs == sorted(costs)
    assert [c.method for c in choices] == sorted((c.method for c in choices), reverse=True)
    assert choices[-1].weights == BASE


@pytest.mark.parametrize(
    ("facts", "weights", "method", "size"),
    [
        (PHOTOS, AUGREG_TINY, "probe", 224),  # 252 s of two cores
        (dataclasses.replace(PHOTOS, seconds=1600.0), AUGREG_TINY, "full", 224),
        (dataclasses.replace(PHOTOS, seconds=7200.0), SMALL, "full", 224),
        (GPU, BASE, "full", 224),
        (dataclasses.replace(GPU, images=200, validation=50), rules.DINO_BASE, "probe", 224),
        (dataclasses.replace(TINY, flops=1e12), AUGREG_TINY, "full", 128),
        (dataclasses.replace(TINY, seconds=60.0), AUGREG_TINY, "probe", 96),  # nothing fits
    ],
)
def test_what_is_chosen(facts, weights, method, size):
    choice = chosen(facts)
    assert (choice.weights, choice.method, choice.image_size) == (weights, method, size)


def test_a_dinov2_network_sees_whole_patches():
    choice = chosen(GPU, on_disk=[DINO_SMALL])
    assert (choice.weights, choice.image_size % 14) == (DINO_SMALL, 0)


def test_what_is_on_the_disk_goes_first_and_the_better_one_is_named():
    choice = chosen(GPU, on_disk=[AUGREG_TINY, SMALL])
    assert (choice.weights, choice.here) == (SMALL, True)
    assert choice.better == f"timm/{BASE.name}"
    assert choice.better in rules.weights_reason(choice)
    assert chosen(GPU).here is False

    def offline():
        raise WeightsError("HF_HUB_OFFLINE is set")

    slow = dataclasses.replace(PHOTOS, seconds=5.0)
    mine = {BASE: f"timm/{BASE.name}"}
    assert choose_weights(slow, {}, on_disk=mine, on_hub=offline).fits is False
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set; leave --weights out.*hf downl"):
        choose_weights(GPU, {}, on_disk={}, on_hub=offline)


def test_what_was_given_is_a_fact():
    assert chosen(PHOTOS, {"method": "lora"}).method == "lora"
    assert chosen(PHOTOS, {"mixup": 0.2}).method == "full"  # of which a probe has no use
    assert chosen(PHOTOS, {"image_size": 64}).image_size == 64
    assert chosen(PHOTOS, one_class=False).method == "linear"
    with pytest.raises(ConfigError, match="image_size=50: none"):
        chosen(PHOTOS, {"image_size": 50})
    plan = rules.plan_weights(GPU, {"lr": 1e-3}, chosen(GPU, {"lr": 1e-3}))
    assert plan.chosen["lr"] == 1e-3
    assert "lr" not in plan.settings
    assert plan.settings["batch_size"] == 64


@pytest.mark.parametrize("facts", [PHOTOS, TINY, GPU, dataclasses.replace(GPU, seconds=None)])
@pytest.mark.parametrize("given", [{}, {"method": "lora"}, {"folds": 3}, {"epochs": 3}])
def test_settings_of_a_plan_fit_together(facts, given):
    given = {"time": "5m", **given} if facts.seconds and "folds" not in given else given
    plan = rules.plan_weights(facts, given, chosen(facts, given))
    config = make_config({"data": "photos", **plan.chosen, **plan.settings})
    assert all(choice.reason for choice in plan.choices.values())
    assert config.finetune.weights.startswith("timm/")
    if config.finetune.method == "probe" or "folds" in given:
        assert config.training.time is None


# ----------------------------------------------------------------------------- with files


@pytest.fixture
def tiny_list(monkeypatch, tmp_path) -> ListedWeights:
    """A list of one small entry of timm's registry, and an empty cache of the hub, offline."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return AUGREG_TINY


def write_timm(folder: Path, terms: str = "apache-2.0") -> None:
    """Random weights of timm's network, small, as its repository on the hub has them."""
    name, _, tag = AUGREG_TINY.name.partition(".")
    arguments = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2}
    network = timm.create_model(name, num_classes=3, **arguments)
    folder.mkdir(parents=True)
    save_file(network.state_dict(), folder / "model.safetensors")
    about = {"tag": tag, "license": terms, "input_size": [3, 32, 32], "num_classes": 3}
    config = {"architecture": name, "num_classes": 3, "pretrained_cfg": about}
    config["model_args"] = arguments
    (folder / "config.json").write_text(json.dumps(config))


def put_in_cache(**options) -> None:
    home = AUGREG_TINY.repository.cache
    write_timm(home / "snapshots" / "0123abc", **options)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0123abc")


def test_the_cache_and_folders_are_seen_offline(tiny_list):
    assert find_on_disk() == {}
    put_in_cache()
    assert find_on_disk() == {AUGREG_TINY: f"timm/{AUGREG_TINY.name}"}
    # an unfinished download is not taken, and a folder as `hf download` makes it is
    (AUGREG_TINY.repository.cache / "snapshots" / "0123abc" / "model.safetensors").unlink()
    assert find_on_disk() == {}
    write_timm(Path(AUGREG_TINY.name))
    assert find_on_disk() == {AUGREG_TINY: AUGREG_TINY.name}


def test_a_folder_under_other_terms_is_not_taken(tiny_list):
    put_in_cache(terms="cc-by-nc-4.0")
    assert find_on_disk() == {}


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_auto_trains_and_resumes_and_is_planned(tiny_list, photos, tmp_path, capsys):
    put_in_cache()
    source, size = f"timm/{AUGREG_TINY.name}", ["--image-size", "32"]
    assert main(["plan", str(photos), "--weights", "auto", *size, "--save", "my plan.yaml"]) == 0
    printed = capsys.readouterr().out
    assert source in printed
    assert "Apache-2.0" in printed
    assert "train it: vit train -c 'my plan.yaml'" in printed
    assert yaml.safe_load(Path("my plan.yaml").read_text())["weights"] == source

    words = ["train", str(photos), "--weights", "auto", *size, "-j", "0", "--epochs", "1"]
    out = ["--out", str(tmp_path / "run")]
    assert main([*words, *out]) == 0
    assert f"weights=auto: {source} (Apache-2.0" in capsys.readouterr().err
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["weights"], config["method"], config["depth"]) == (source, "full", 1)
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    hub_cache = AUGREG_TINY.repository.cache
    hub_cache.rename(hub_cache.with_name("gone"))  # a resumed run has its weights already
    assert main([*words, *out, "--resume"]) == 0
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "other")]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "none of the weights that it chooses from is on this disk" in line
    assert "leave --weights out to train from scratch" in line


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_a_short_time_fits_a_head_alone_from_python(tiny_list, photos, tmp_path):
    put_in_cache()
    chosen = {"data": str(photos), "weights": "auto", "time": "20s", "image_size": 32, "workers": 0}
    chosen["feature_cache"] = str(tmp_path / "f")
    result = vit.train(make_config(chosen), tmp_path / "run")
    config = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert (config["method"], config["time"]) == ("probe", None)
    assert config["weights"] == f"timm/{AUGREG_TINY.name}"


@pytest.mark.auto_precision
@pytest.mark.parametrize("words", [["--model", "vit_tiny_patch16_224"], ["--task", "caption"]])
def test_what_leaves_nothing_to_choose_is_refused(tiny_list, photos, capsys, words):
    assert main(["train", str(photos), "--weights", "auto", *words]) == 2
    assert "weights=auto chooses" in capsys.readouterr().err


def test_the_size_of_a_download_is_announced():
    line = hub.download_message(hub.Repository("o/n"), [2_000_000, 500_000])
    assert "/o/n: 2 files, 2.5 MB, to " in line
    assert "does not say" in hub.download_message(hub.Repository("o/n"), [None])


# ----------------------------------------------------------------------------- after pretraining

PRETRAINED = {"image_size": 32, "patch_size": 8, "dim": 64, "depth": 2, "num_heads": 2}
PRETRAINED |= {"hidden_dim": None, "stem": "linear", "position": "sinusoidal_2d"}
PRETRAINED |= {"pooling": "mean", "class_token": False}


@pytest.mark.parametrize("stride", [None, 1])
@pytest.mark.parametrize("images", [100, 5000])
def test_a_convolutional_stem_stays_as_it_was_pretrained(images, stride):
    sizes = {"patch_size": 16, "dim": 64, "num_heads": 2}
    model = ModelConfig(stem="conv", stem_depth=4, stem_stride=stride, **sizes)
    network = rules.architecture_settings(model, Preprocessing(image_size=(224, 224)))
    facts = dataclasses.replace(PHOTOS, images=images)
    plan = rules.plan_after_pretraining(facts, {}, network)
    assert plan.passes > 0
    assert {n: plan.settings[n] for n in network} == network
    assert (network["stem_width"], network["stem_stride"]) == (None, stride)


@pytest.mark.parametrize(
    ("images", "given", "scratch"),
    [
        (40_000, {"epochs": 20}, True),
        (rules.MANY_LABELS, {"epochs": 20}, True),
        (rules.MANY_LABELS - 1, {"epochs": 20}, False),
        (40_000, {"epochs": 1}, True),
        (40_000, {"epochs": 20, "lr": 1e-4}, True),
        (40_000, {"epochs": 20, "optimizer": "adamw"}, True),
    ],
)
def test_many_labels_train_a_pretrained_network_as_from_scratch(images, given, scratch):
    facts = dataclasses.replace(TINY, images=images)
    plan = rules.plan_after_pretraining(facts, given, PRETRAINED)
    usual = make_plan(facts, {**PRETRAINED, **given}).settings
    names = {"optimizer", "lr", "batch_size", "weight_decay", "min_crop"}
    expected = {"batch_size": 64}
    if scratch:
        expected = {name: usual[name] for name in names & set(usual)}
        full = make_config({"data": "x", **usual, **given, **plan.settings}).training
        from_scratch = make_config({"data": "x", **usual, **given}).training
        assert full == from_scratch
        expected |= {"lr": full.lr} if "lr" not in given else {}
    assert {name: plan.settings[name] for name in names & set(plan.settings)} == expected
    assert plan.settings["probe_first"] is not scratch
    assert {name: plan.settings[name] for name in PRETRAINED} == PRETRAINED
    assert plan.chosen == given
    assert all(choice.reason for choice in plan.choices.values())


@pytest.mark.parametrize(
    "given", [{"weight_column": "w"}, {"freeze_epochs": 2, "epochs": 9}], ids=str
)
def test_no_probe_is_planned_beside_what_it_does_not_know(given):
    assert chosen(PHOTOS, given).method == "full"
    assert chosen(PHOTOS, {"freeze_epochs": 2}, one_class=False).method == "full"
    plans = [rules.plan_weights(GPU, given, chosen(GPU, given))]
    plans += [
        rules.plan_after_pretraining(dataclasses.replace(TINY, images=500), given, PRETRAINED)
    ]
    for plan in plans:
        assert "probe_first" not in plan.settings
        assert plan.settings["method"] == "full"


def test_images_that_a_teacher_labels_are_no_labels():
    facts = dataclasses.replace(TINY, images=40_000, taught=39_700)
    plan = rules.plan_after_pretraining(facts, {"time": "5m"}, PRETRAINED)
    assert plan.settings["probe_first"]
    assert plan.choices["method"].reason.startswith("300 labels are few")
    divided = dataclasses.replace(facts, divided=True)
    for given, hint in (({"weights": "x"}, True), ({"weights": "x", "folds": 5}, False)):
        plan = rules.plan_after_pretraining(divided, given, PRETRAINED)
        lines = summary_lines(plan)
        every = 300 + facts.validation
        assert (f"note: --folds 5 measures with all {every:,} labels" in "".join(lines)) == hint


def test_few_labels_are_learned_no_longer_than_they_bear():
    facts = dataclasses.replace(PHOTOS, images=300, seconds=1200.0)
    plan = rules.plan_after_pretraining(facts, {"time": "20m"}, PRETRAINED)
    assert (plan.settings["epochs"], plan.settings["time"]) == (rules.MOST_PASSES, None)
    assert plan.choices["time"].reason == "20m has room for more epochs"
    assert plan.passes == rules.MOST_PASSES
    assert length_of(plan) == "about 50 passes (20m has room for more epochs, which gain nothing)"
    short = dataclasses.replace(facts, seconds=12.0)
    for some, given, one_class in (
        (short, {"time": "12s"}, True),
        (facts, {"time": "20m", "epoch_steps": 1000}, True),
        (facts, {"time": "20m"}, False),
        (facts, {"time": "20m", "epochs": 9}, True),
    ):
        plan = rules.plan_after_pretraining(some, given, PRETRAINED, one_class=one_class)
        assert not {"epochs", "time", "schedule"} & {*plan.settings}


@pytest.mark.parametrize(("flops", "epochs"), [(PHOTOS.flops, 50), (PHOTOS.flops / 1e4, 12)])
def test_few_labels_without_a_time_are_learned_longer_where_that_is_quick(flops, epochs):
    facts = dataclasses.replace(PHOTOS, images=300, seconds=None, flops=flops, timed=())
    plan = rules.plan_after_pretraining(facts, {}, PRETRAINED)
    assert plan.settings["epochs"] == plan.passes == epochs
    plan = rules.plan_after_pretraining(facts, {"epoch_steps": 9}, PRETRAINED)
    assert plan.settings["epochs"] == 12


def test_validation_images_are_held_out_of_the_labelled_ones():
    facts = dataclasses.replace(PHOTOS, images=100_000, divided=True, seconds=1200.0)
    assert make_plan(facts, {}).settings["val_share"] < 0.1
    few = dataclasses.replace(facts, taught=99_700)
    assert "val_share" not in make_plan(few, {}).settings  # 20 % of 300


def test_images_of_several_classes_have_no_probe():
    plan = rules.plan_after_pretraining(TINY, {}, PRETRAINED, one_class=False)
    assert plan.settings == {**PRETRAINED, "epochs": 12, "batch_size": 64, "method": "full"}


@pytest.mark.parametrize(
    ("images", "given", "batch"), [(31, {}, 28), (40_000, {}, 60), (31, {"accumulate": 4}, 16)]
)
def test_processes_and_micro_batches_divide_the_planned_batch(images, given, batch):
    facts = dataclasses.replace(TINY, images=images, processes=2 if images == 31 else 3)
    given = {**given, "method": "full"}
    assert rules.plan_weights(facts, given, chosen(facts, given)).settings["batch_size"] == batch
    plan = rules.plan_after_pretraining(facts, given, PRETRAINED, one_class=False)
    assert plan.settings["batch_size"] % plan.parts == 0


def test_as_many_images_are_held_out_as_the_time_allows():
    many = dataclasses.replace(PHOTOS, images=40_000, validation=10_000, seconds=36_000.0)
    shares = []
    for flops in (3e12, 3e10):
        facts = dataclasses.replace(many, flops=flops)
        shares.append(rules.plan_weights(facts, {}, chosen(facts)).settings["val_share"])
    assert shares[0] == 0.1
    assert shares[1] < 0.1
