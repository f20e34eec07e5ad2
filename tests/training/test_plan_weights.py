"""How pretrained weights are trained: method, size and settings that fit the time."""

import dataclasses

import pytest

from tests.training.test_plan import PHOTOS, TINY
from vit.config import ModelConfig
from vit.config.setting_layers import make_config
from vit.data.preprocessing import Preprocessing
from vit.training import plan_weights as rules
from vit.training.plan import length_of, summary_lines
from vit.training.plan_rules import make_plan
from vit.training.plan_weights import Rules, WeightsChoice
from vit.weights.backbone_list import LISTED, Backbone

GPU = dataclasses.replace(PHOTOS, device="cuda", flops=30e12)
BY_NAME = {one.source.split("/")[1].partition(".")[0]: one for one in LISTED}
SMALL, TINY_VIT = BY_NAME["vit_small_patch16_224"], BY_NAME["vit_tiny_patch16_224"]
DINO_BASE = BY_NAME["vit_base_patch14_reg4_dinov2"]


def chosen(facts, given=(), weights: Backbone = SMALL, **options) -> WeightsChoice:
    choice = Rules(facts, dict(given), **options).choose(weights)
    assert choice is not None
    return choice


@pytest.mark.parametrize("weights", [TINY_VIT, SMALL, DINO_BASE], ids=lambda one: one.source)
def test_more_time_never_chooses_a_worse_method_or_smaller_images(weights):
    facts = dataclasses.replace(PHOTOS, images=3000)
    times = [30.0 * 2**n for n in range(16)]
    choices = [chosen(dataclasses.replace(facts, seconds=one), weights=weights) for one in times]
    assert [c.method for c in choices] == sorted((c.method for c in choices), reverse=True)
    assert [c.image_size for c in choices] == sorted(c.image_size for c in choices)
    assert [c.fits for c in choices] == sorted(c.fits for c in choices)
    assert (choices[0].fits, choices[-1].method, choices[-1].fits) == (False, "full", True)


@pytest.mark.parametrize(
    ("facts", "weights", "method", "size", "fits"),
    [
        (PHOTOS, TINY_VIT, "probe", 224, True),  # 252 s of two cores
        (PHOTOS, DINO_BASE, "probe", 126, False),
        (dataclasses.replace(PHOTOS, seconds=1600.0), TINY_VIT, "full", 224, True),
        (dataclasses.replace(PHOTOS, seconds=7200.0), SMALL, "full", 224, True),
        (dataclasses.replace(GPU, images=200, validation=50), DINO_BASE, "probe", 224, True),
        (dataclasses.replace(TINY, flops=1e12), TINY_VIT, "full", 128, True),
        (dataclasses.replace(TINY, seconds=60.0), TINY_VIT, "probe", 96, False),
        (PHOTOS, Backbone("runs/mine", "own", 3.6, image_size=80), "full", 80, True),
    ],
)
def test_how_weights_are_trained(facts, weights, method, size, fits):
    choice = chosen(facts, weights=weights)
    assert (choice.method, choice.image_size, choice.fits) == (method, size, fits)


def test_what_was_given_is_a_fact():
    assert chosen(PHOTOS, {"method": "lora"}).method == "lora"
    assert chosen(PHOTOS, {"mixup": 0.2}).method == "full"  # of which a probe has no use
    assert chosen(PHOTOS, {"image_size": 64}).image_size == 64
    assert chosen(PHOTOS, one_class=False).method == "linear"
    assert Rules(PHOTOS, {"image_size": 50}).choose(SMALL) is None
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
