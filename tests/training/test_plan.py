"""The plan: sensible for every kind of data, monotone in time, and open about its reasons."""

import dataclasses
import functools
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from PIL import Image

import vit
from tests.training.runs import equal_models
from vit.commands.main import main
from vit.config import Config
from vit.config.setting_layers import flatten, make_config
from vit.data.dataset_types import Sample
from vit.data.sources import dataset_warnings, image_folder, open_dataset
from vit.errors import ConfigError, RunError
from vit.evaluation.model_summary import FlopCounter, cost_of
from vit.model.captioner import Captioner
from vit.tasks.task import get_task
from vit.training import plan as planning
from vit.training import trial_training
from vit.training.distributed import collectives
from vit.training.plan import (
    PROBE,
    is_planned,
    look_at_images,
    notes_of,
    plan_training,
    with_speeds,
)
from vit.training.plan_rules import (
    PHOTO_NETWORKS,
    TINY_NETWORKS,
    TINY_SIDE,
    CaptionStats,
    Facts,
    TimedNetwork,
    counted_passes,
    decoder_depth,
    even_batch,
    flops_of,
    flops_with_captions,
    make_plan,
    network_settings,
)
from vit.training.settings_from_data import list_data, open_data
from vit.training.trial_training import measure_speed, probe_network

PHOTOS = Facts(
    images=3000,
    classes=10,
    side=160,
    grey=False,
    validation=600,
    divided=True,
    device="cpu",
    flops=80e9,
    memory=8 * 2**30,
    seconds=252.0,
)
TINY = dataclasses.replace(PHOTOS, images=40_000, side=32, validation=10_000, seconds=571.0)
DIGITS = dataclasses.replace(PHOTOS, images=1442, side=8, grey=True, validation=355, seconds=None)
CAPTIONED = dataclasses.replace(
    PHOTOS,
    classes=0,
    captions=CaptionStats(total=15_000, tokens=12.0, longest=40, vocab_size=3000, most_vocab=8192),
)


def planned(facts: Facts, **given) -> Config:
    """The settings of a plan, which must fit together."""
    return make_config({"data": "photos", **given, **make_plan(facts, given).settings})


def work(facts: Facts) -> float:
    """FLOPs of the planned network, forward."""
    return make_plan(facts, {}).flops


COLOUR = {"hflip": 0.5, "min_crop": 0.35}
SMALLEST = {"image_size": 64, "patch_size": 16, "dim": 128, "depth": 4}
USUAL = {**SMALLEST, "image_size": 96}
LARGEST = {"image_size": 224, "patch_size": 16, "dim": 768, "depth": 12}
GPU = {"device": "cuda", "flops": 60e12}
NAMED = ["--model", "vit_tiny_patch16_224"]
MANY = {"images": 40_000, "validation": 10_000}
FEW = {"images": 57, "validation": 15}


def timed(*speeds: float) -> tuple[TimedNetwork, ...]:
    """The first networks for tiny images, as if they were measured."""
    networks = zip(TINY_NETWORKS, speeds, strict=False)
    return tuple(TimedNetwork(flops_of(row, {}), speed) for row, speed in networks)


# What a folder is like, and the main choices for it.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "photographs of 12 megapixels": (
        {"side": 3000},
        {**USUAL, **COLOUR, "batch_size": 64, "cache": "ram", "start_image_size": 48},
    ),
    "two hundred images": (
        {"images": 160, "validation": 40, "seconds": None},
        {**USUAL, "batch_size": 16, "time": "50s", "val_share": 0.2},
    ),
    "two images a class": (
        {"images": 10, "validation": 10, "seconds": None},
        {"image_size": 128, "dim": 128, "batch_size": 10, "time": "50s", "val_share": 0.2},
    ),
    "a batch that leaves few out": (FEW, {"batch_size": 14}),
    "the same on four GPUs": ({**FEW, "processes": 4, **GPU}, {"batch_size": 56}),
    "a thousand classes": (
        {**MANY, "classes": 1000},
        {**SMALLEST, "batch_size": 128, "val_share": 0.1},  # five images a class
    ),
    "ten thousand classes": (
        {"images": 400_000, "validation": 100_000, "classes": 10_000},
        {**SMALLEST, "batch_size": 256, "val_share": 0.1},
    ),
    "grey microscope images": (
        {"grey": True, "side": 500},
        {**USUAL, **COLOUR, "rotate": 0.0, "translate": 0.0},
    ),
    "portraits and panoramas": ({"side": 200, "aspect": 4.7}, {**USUAL, **COLOUR}),
    "strips of 3,000 x 40": (
        {"side": 40, "aspect": 75.0},
        {"image_size": 40, "patch_size": 8, "dim": 128, "min_crop": 1.0},
    ),
    "images of 8 px": ({"side": 8}, {"image_size": 16, "patch_size": 4, "hflip": 0.5}),
    "characters": (
        {"images": 1442, "side": 8, "grey": True, "seconds": None},
        {"image_size": 16, "hflip": 0.0, "min_crop": 1.0, "rotate": 10.0},
    ),
    "larger than tiny by a pixel": ({"side": 49}, {"image_size": 48, "patch_size": 8}),
    "1.3 million images on a GPU for a day": (
        {"images": 1_280_000, "side": 375, "classes": 1000, "seconds": 86_400.0, **GPU},
        {"image_size": 224, "patch_size": 16, "dim": 768, "batch_size": 1024, "cache": "none"},
    ),
    "tiny photographs, few passes": (
        {**MANY, "side": 32, "seconds": 285.0},
        {"image_size": 32, "patch_size": 8, "hidden_dim": 256, "stem_stride": 1, "min_crop": 1.0},
    ),
    "the same in twice the time, where matrix products are fast": (
        {**MANY, "side": 32, "seconds": 571.0, "timed": timed(140e9, 260e9, 260e9)},
        {"image_size": 32, "patch_size": 4, "dim": 128, "min_crop": 1.0, "translate": 0.07},
    ),
    "the same where matrix products are slow": (
        {**MANY, "side": 32, "seconds": 571.0, "timed": timed(70e9, 45e9, 40e9)},
        {"image_size": 32, "patch_size": 8, "dim": 128},
    ),
    "a minute": ({"seconds": 60.0}, SMALLEST),
    "days": ({"seconds": 3 * 86_400.0}, {"image_size": 160, "dim": 512}),
    "days on a GPU": ({"seconds": 3 * 86_400.0, "side": 375, **GPU}, LARGEST),
    "their own validation images": ({"divided": False, "images": 90_000}, {"val_share": 0.2}),
    "no shared memory": ({"memory": 0}, {"cache": "none"}),
}


def test_the_plan_counts_on_the_least_shared_memory_of_all_processes(monkeypatch):
    """Otherwise processes on two machines may choose other settings."""
    others = [5 * 2**30, 2 * 2**30]
    monkeypatch.setattr(planning, "free_bytes", lambda *_, **__: 3 * 2**30)
    monkeypatch.setattr(
        collectives, "max_over_processes", lambda _, mine: float(max(mine, *(-n for n in others)))
    )
    monkeypatch.setattr(planning, "SHARED_MEMORY", Path("/"))
    assert planning.free_shared_memory(SimpleNamespace()) == 2 * 2**30


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_data_gets_sensible_settings_that_fit_together(case):
    different, expected = CASES[case]
    facts = dataclasses.replace(PHOTOS, **different)
    config = planned(facts)
    chosen = flatten(config)
    assert {name: chosen[name] for name in expected} == expected
    assert 1 <= config.data.batch_size <= facts.images
    assert config.data.batch_size % facts.processes == 0
    assert config.model.image_size <= max(facts.side * 2, 48)
    assert all(choice.reason for choice in make_plan(facts, {}).choices.values())


DEVICES = [("cpu", 8e9), ("cpu", 80e9), ("cuda", 60e12)]
GIVEN = [{}, {"dim": 192}, {"image_size": 96}, {"patch_size": 8}, {"depth": 6}, {"batch_size": 32}]
EVERY = [(device, classes, given) for device in DEVICES for classes in (2, 1000) for given in GIVEN]
# in the default suite: few classes, and each setting on one device
QUICK = [case for case in EVERY if case[1] == 2 and (not case[2] or case[0] == DEVICES[1])]


@pytest.mark.parametrize(
    ("device", "classes", "given"),
    [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow, id=str(c)) for c in EVERY],
)
def test_more_time_never_plans_less(device, classes, given):
    """Of 200 to 1.3 million images of 28 to 500 px, from one minute to 35 days."""
    name, flops = device
    numbers = (200, 1000, 3000, 10_000, 40_000, 200_000, 1_280_000)
    pairs = [*itertools.product(numbers, (28, 32, 48, 49, 64, 100, 160, 224, 375, 500))]
    # every third, and other ones with few classes than with many
    for images, side in pairs[int(classes == 2) :: 3]:
        facts = dataclasses.replace(
            PHOTOS, images=images, classes=classes, side=side, device=name, flops=flops
        )
        times = [60.0 * 3 ** (n / 4) for n in range(40)]
        plans = [make_plan(dataclasses.replace(facts, seconds=seconds), given) for seconds in times]
        every = [{**plan.settings, **given} for plan in plans]
        for one in every:  # smaller patches may come with a block less
            one["tokens x depth"] = (one["image_size"] // one["patch_size"]) ** 2 * one["depth"]
        for setting in ("image_size", "dim", "tokens x depth"):
            values = [one[setting] for one in every]
            assert values == sorted(values), (facts, setting)
        costs = [plan.flops for plan in plans]
        assert costs == sorted(costs), facts
        steps = [
            plan.passes * images / one["batch_size"] for plan, one in zip(plans, every, strict=True)
        ]
        for at in range(len(times) - 1):
            same = costs[at + 1] == costs[at]
            assert not same or steps[at + 1] > steps[at], facts
            assert min(steps[at:]) > steps[at] / 4, facts  # a larger network begins with fewer


def test_all_folds_of_one_command_have_epochs_and_no_time():
    folds = make_plan(dataclasses.replace(PHOTOS, seconds=None), {"folds": 3}).settings
    assert folds["epochs"] >= 10
    assert "time" not in folds
    one = make_plan(dataclasses.replace(PHOTOS, seconds=None), {"folds": 3, "fold": 1}).settings
    assert "time" in one
    assert "epochs" not in one


def test_settings_that_were_chosen_are_reckoned_with():
    huge = make_plan(PHOTOS, {"dim": 768, "depth": 12, "image_size": 224})
    usual = make_plan(PHOTOS, {})
    assert huge.passes < usual.passes / 20
    assert huge.passes < 1
    assert make_plan(PHOTOS, {"epochs": 7}).passes == 7
    assert make_plan(PHOTOS, {"epochs": 7, "time": "20m"}).passes == usual.passes  # of the time
    assert make_plan(PHOTOS, {"steps": 100, "batch_size": 30}).passes == 1


@pytest.mark.parametrize(
    ("passes", "text"),
    [(68.4, "68 passes"), (1.44, "1.4 passes"), (0.97, "1.0 passes"), (0.0123, "0.012 passes")],
)
def test_few_passes_are_not_rounded_to_none(passes, text):
    assert counted_passes(passes) == text


@pytest.mark.parametrize(
    ("images", "size", "parts", "batch"),
    [
        *((57, 16, 1, 14), (26, 16, 1, 13), (72, 16, 1, 14), (160, 16, 1, 16), (7, 64, 1, 7)),
        *((57, 16, 2, 12), (5, 16, 4, 4), (3, 16, 4, 4), (3000, 64, 1, 64), (1442, 64, 1, 64)),
    ],
)
def test_a_batch_leaves_few_of_a_small_data_set_out(images, size, parts, batch):
    assert even_batch(images, size, parts) == batch


def test_long_images_and_weights_for_labels_are_noted():
    plan = make_plan(dataclasses.replace(PHOTOS, side=40, aspect=75.0), {})
    (note,) = notes_of(plan)
    assert "75.0 times as long as wide" in note
    assert "middle 1%" in note
    assert "--resize native shows all of it" in note
    captions = CaptionStats(total=9, tokens=5.0, longest=9, vocab_size=20, most_vocab=20)
    captioned = dataclasses.replace(plan.facts, captions=captions)
    assert "--resize squash" in notes_of(make_plan(captioned, {"task": "caption"}))[0]
    assert not notes_of(make_plan(plan.facts, {"resize": "squash"}))
    assert "--weights auto" in notes_of(make_plan(PHOTOS, {}))[0]
    assert not notes_of(make_plan(PHOTOS, {"task": "mae"}))


def test_the_short_side_of_native_images_is_as_long_as_that_of_a_crop():
    facts = dataclasses.replace(PHOTOS, aspect=4 / 3, seconds=None)
    crop, native = (
        make_plan(facts, {"resize": resize, "epochs": 9}) for resize in ("crop", "native")
    )
    most = crop.get("image_size") * (4 / 3) ** 0.5
    assert native.get("image_size") - native.get("patch_size") < most <= native.get("image_size")
    assert "crop_share" not in native.choices


def test_a_faster_machine_gets_the_network_of_more_time():
    slow = dataclasses.replace(PHOTOS, seconds=4000.0)
    fast = dataclasses.replace(PHOTOS, seconds=400.0, flops=800e9)
    assert work(fast) == pytest.approx(work(slow), rel=0.5)


def test_a_task_with_several_views_an_image_gets_a_smaller_network_and_fewer_passes():
    views = dataclasses.replace(PHOTOS, seconds=900.0, pass_cost=2.0, passes_factor=2.0)
    usual = make_plan(dataclasses.replace(views, pass_cost=1.0, passes_factor=1.0), {})
    plan = make_plan(views, {})
    assert plan.flops < usual.flops
    twice = make_plan(views, {name: plan.settings[name] for name in ("image_size", "dim", "depth")})
    same = dataclasses.replace(views, pass_cost=1.0)
    once = make_plan(same, {name: plan.settings[name] for name in ("image_size", "dim", "depth")})
    assert once.passes == pytest.approx(2 * twice.passes)
    simclr = get_task("simclr")
    assert (simclr.pass_cost, simclr.passes_factor, simclr.tiny_passes_factor) == (2.0, 12.0, 2.0)


PRETRAINED = dataclasses.replace(CAPTIONED, captions=None)
WIDE = dataclasses.replace(PHOTOS, side=120, seconds=4000.0)
HOUR, DAY = (dataclasses.replace(PHOTOS, seconds=seconds) for seconds in (3600.0, 86_400.0))
SLOW_CAPTIONS = dataclasses.replace(CAPTIONED, seconds=10_000.0)
GREY_CAPTIONS = dataclasses.replace(CAPTIONED, side=28, grey=True)
MEAN = {"pooling": "mean", "class_token": False}


@pytest.mark.parametrize(
    ("facts", "given", "expected"),
    [
        (
            PHOTOS,
            {"dim": 96, "patch_size": 14, "image_size": 70, "optimizer": "adamw", "epochs": 3},
            {"stem": "linear", "fallback_lr": None, "time": None},  # convolutions are of 4 and 16
        ),
        *(
            (PHOTOS, {"image_size": side}, {"patch_size": patch, "stem": "linear"})
            for side, patch in ((225, 15), (250, 10), (299, 13), (300, 15), (1000, 20), (50, 10))
        ),
        *(
            (PHOTOS, {"image_size": side}, {"patch_size": patch, "stem": "conv"})
            for side, patch in ((100, 4), (224, 16))
        ),
        (PHOTOS, {"image_size": 300, "stem": "conv"}, {"patch_size": 4}),
        *(
            (TINY, {"image_size": side}, {"patch_size": patch})
            for side, patch in ((8, 4), (10, 2), (12, 4), (18, 3), (28, 4))
        ),
        (WIDE, {}, {"image_size": 112}),
        (WIDE, {"patch_sizes": [8, 32]}, {"image_size": 128}),
        # many passes vary colours
        (dataclasses.replace(PHOTOS, seconds=60.0), {}, {"auto_augment": "none"}),
        (PHOTOS, {}, {"auto_augment": "none", "cache": "ram"}),
        (HOUR, {}, {"auto_augment": "three"}),
        (DAY, {}, {"auto_augment": "three"}),
        (HOUR, {"color_jitter": 0.0}, {"auto_augment": "none"}),
        (HOUR, {"auto_augment": "augmix"}, {}),
        (DIGITS, {}, {"auto_augment": "none"}),  # characters
        # a cache that does not fit
        (dataclasses.replace(PHOTOS, memory=2**20), {}, {"cache": "none"}),
        (dataclasses.replace(PHOTOS, images=10**7), {}, {"cache": "none"}),
        # a pretraining pools like the classifier that it begins
        *((PRETRAINED, {"task": task}, MEAN) for task in ("simclr", "lejepa", "dino", "mae")),
        (
            CAPTIONED,
            {"task": "caption"},
            {"decoder_depth": 3, "vocab_size": 8192, "stem": "conv", "optimizer": "muon"}
            | {"decoder_dim": None, "hflip": 0.0, "min_crop": 1.0, "auto_augment": "none"},
        ),
        (
            CAPTIONED,
            {"task": "caption", "min_crop": 0.9, "decoder_depth": 1, "tokenizer": "words.json"},
            {"vocab_size": None},
        ),
        (GREY_CAPTIONS, {"task": "caption"}, {"rotate": 0.0, "min_crop": 0.5}),  # no characters
        (SLOW_CAPTIONS, {"task": "caption"}, {"min_crop": 0.5, "auto_augment": "none"}),
        (dataclasses.replace(CAPTIONED, classes=4), {"task": "classify,caption"}, MEAN),
    ],
)
def test_what_was_given_stays_and_the_rest_adapts(facts, given, expected):
    config, wanted = planned(facts, **given), {**given, **expected}
    chosen = flatten(config)
    assert {name: chosen[name] for name in wanted} == wanted
    assert config.model.dim % config.model.num_heads == 0


def test_an_image_size_that_no_patch_divides_is_refused():
    with pytest.raises(ConfigError, match=r"image_size=331: no patches of 4 .*; give 320 or 336"):
        planned(PHOTOS, image_size=331)


def test_longer_trainings_have_less_weight_decay():
    times = [60.0, 600.0, 6000.0, 600_000.0]
    decays = [
        planned(dataclasses.replace(TINY, seconds=each)).training.weight_decay for each in times
    ]
    assert decays == sorted(decays, reverse=True)
    assert decays[0] == 0.5
    assert decays[-1] == 0.02
    assert planned(TINY, lr=1e-3).training.weight_decay > planned(TINY).training.weight_decay
    assert make_plan(TINY, {"lr": 0.0}).settings["weight_decay"] == 0.5


def test_large_data_holds_out_a_smaller_share_and_small_data_a_fifth():
    long = dataclasses.replace(TINY, seconds=7200.0)
    assert planned(long).data.val_share == pytest.approx(0.1)  # 5,000 images
    short = dataclasses.replace(TINY, seconds=200.0)
    assert 0.02 < planned(short).data.val_share < 0.1  # as many as 2 s measure
    assert planned(PHOTOS).data.val_share == 0.2
    theirs = dataclasses.replace(TINY, divided=False)
    assert planned(theirs).data.val_share == 0.2  # they have their own validation images


def test_without_a_time_the_plan_has_one_under_an_hour_for_five_thousand_photographs():
    facts = dataclasses.replace(PHOTOS, images=5000, seconds=None)
    seconds = planned(facts).training.seconds
    assert seconds is not None
    assert 600 < seconds < 3600
    assert planned(facts, epochs=4).training.time is None


@pytest.mark.usefixtures("flops_alone")
def test_flops_of_the_rules_are_those_of_the_network():
    for facts, ladder in ((PHOTOS, PHOTO_NETWORKS[1:4:2]), (TINY, TINY_NETWORKS[:3:2])):
        for network in ladder:
            config = planned(facts, **network_settings(network))
            counted = cost_of(config.model, batch_size=1).flops
            assert flops_of(network, {}) == pytest.approx(counted, rel=0.05)


def test_more_captions_get_a_deeper_decoder():
    depths = [
        decoder_depth(CAPTIONED.captions._replace(total=total))
        for total in (10, 4999, 5000, 600_000, 10**6, 10**9)
    ]
    assert depths == [2, 2, 3, 3, 6, 6]


@pytest.mark.parametrize("seconds", [60.0, 250.0, 1000.0, 4000.0, 40_000.0])
def test_a_decoder_costs_passes_and_more_time_never_plans_less(seconds):
    facts = dataclasses.replace(CAPTIONED, seconds=seconds)
    plan = make_plan(facts, {})
    alone = make_plan(dataclasses.replace(facts, captions=None, classes=10), {})
    assert plan.flops <= 1.6 * alone.flops  # the network is no larger for its decoder
    assert plan.passes < alone.passes or plan.settings["dim"] < alone.settings["dim"]
    assert work(facts) <= work(dataclasses.replace(facts, seconds=2 * seconds))


def test_a_decoder_that_was_chosen_is_reckoned_with():
    deeper = make_plan(CAPTIONED, {"decoder_depth": 12, "decoder_dim": 512, **USUAL})
    assert deeper.flops > 3 * make_plan(CAPTIONED, USUAL).flops


def test_flops_of_the_rules_are_those_of_the_captioner():
    stats = CaptionStats(total=100, tokens=9.0, longest=20, vocab_size=500, most_vocab=8192)
    for row in (PHOTO_NETWORKS[1], TINY_NETWORKS[0]):
        network = probe_network(row, stats).eval()
        images, ids = torch.zeros(1, 3, row.side, row.side), torch.zeros(1, 9, dtype=torch.int64)
        with torch.no_grad(), FlopCounter() as counter:
            network(images, ids)
        assert flops_with_captions(row, {}, stats) == pytest.approx(counter.total, rel=0.1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"depth": 3, "time": "5m"}, True),
        ({"model": "vit_tiny_patch16_224"}, False),
        ({"weights": "timm/x"}, False),
        ({"task": "caption"}, True),
        ({"task": "classify,caption", "decoder_depth": 2}, True),
        ({"task": "caption", "weights": "timm/x"}, False),
        ({"task": "multilabel"}, True),
    ],
)
def test_a_model_or_weights_leave_no_plan_to_make(given, expected):
    assert is_planned(given) is expected


def test_images_are_looked_at(photos):
    samples = [Sample(str(path), 0) for path in sorted(photos.glob("*/*.png"))]
    assert look_at_images(samples) == (60, False, 1.5)
    grey = [sample for sample in samples if sample.path[-5] in "024"]
    assert look_at_images([*grey, Sample("missing.png", 0)]) == (60, True, 1.5)
    assert look_at_images([Sample("missing.png", 0)]) == (224, True, 1.0)


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_the_plan_is_printed_and_saved_and_trains(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [str(photos), "--epochs", "1", "--dim", "32", "--depth", "1"]
    assert main(["plan", *words, "--save", "plan.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "stem " in printed
    assert "given" in printed
    saved = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert (saved["dim"], saved["stem"]) == (32, "conv")
    assert main(["plan", *words, "--save", "plan.yaml"]) == 2  # it is there
    assert "--overwrite" in capsys.readouterr().err
    assert main(["plan", *words, "--task", "mae"]) == 0  # which fixes some settings itself
    reasons = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert reasons["dim"].endswith("given")
    assert reasons["drop_path"].endswith("for task=mae")
    assert main(["train", *words, "--out", "run", "-j", "0"]) == 0
    trained = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    different = {name for name in saved if saved[name] != trained[name]}
    assert different <= {"num_classes", "workers", "accumulate"}
    assert main(["train", "-c", "run/config.yaml", "--out", "again"]) == 0
    assert equal_models(tmp_path / "run", tmp_path / "again")


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_the_command_that_began_a_run_resumes_it(photos, tmp_path, capsys):
    words = ["train", str(photos), "--dim", "32", "--depth", "1", "-j", "0"]
    out = ["--out", str(tmp_path / "run")]
    assert main([*words, *out, "--steps", "2"]) == 0
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert main([*words, *out, "--time", "1h", "--resume"]) == 0  # time decided the steps
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    again = [*words[:1], "-c", str(tmp_path / "run" / "config.yaml"), "--time", "1s"]
    assert main([*again, "--out", str(tmp_path / "again")]) == 2
    assert "time=1s: start, one step" in capsys.readouterr().err  # not the steps of the file


def test_a_warmup_that_a_flag_chose_stays_and_is_refused(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("epochs: 30\nwarmup_epochs: 3\n")
    words = ["train", "digits", "-c", str(tmp_path / "recipe.yaml"), "--epochs", "1"]
    assert main([*words, "--warmup-epochs", "2"]) == 2
    assert "warmup_epochs=2.0: must be less than epochs=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", *NAMED, "--in-chans", "4"], "channels=4: the data decide it"),
        (["plan", "--in-chans", "4"], "channels=4: the data decide it"),
        (["plan", *NAMED], "leave out --model"),
    ],
)
def test_what_no_plan_is_made_for_is_refused_before_the_data_are_opened(words, message, capsys):
    assert main([*words, "nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
def test_planning_keeps_every_setting_that_was_chosen(photos, monkeypatch):
    monkeypatch.setattr("vit.training.trial_training.PROBE_STEPS", 1)
    chosen = {"data": str(photos), "epochs": 2, "hflip": 0.0, "seed": 3, "norm": "rmsnorm"}
    chosen["precision"] = "fp32"
    config, plan = plan_training(chosen)
    flat = flatten(config)
    assert {name: flat[name] for name in chosen} == chosen
    assert plan.facts.images + plan.facts.validation == 12
    assert all(math.isfinite(one.flops) and one.flops > 1e6 for one in plan.facts.timed)
    assert len(plan.facts.timed) == 3  # of networks that ran here


@pytest.mark.usefixtures("known_speed")
def test_all_folds_have_one_plan_and_a_fold_that_is_none_is_refused(photos, monkeypatch):
    monkeypatch.setattr("vit.training.plan.free_bytes", lambda *_, **__: 2**30)
    chosen = {"data": str(photos), "folds": 3, "precision": "fp32"}
    plans = [plan_training({**chosen, "fold": fold}) for fold in (1, 2, 3)]
    assert plans[0][1].facts == plans[1][1].facts == plans[2][1].facts
    assert [config.data.fold for config, _ in plans] == [1, 2, 3]
    with pytest.raises(ConfigError, match="fold=9"):
        plan_training({**chosen, "fold": 9})


@pytest.mark.usefixtures("known_speed")
def test_small_images_and_photographs_have_their_own_factor_of_passes(photos, monkeypatch):
    task = get_task("simclr")
    chosen = {"data": str(photos), "task": "simclr", "precision": "fp32"}
    for side, factor in ((160, task.passes_factor), (TINY_SIDE, task.tiny_passes_factor)):
        monkeypatch.setattr("vit.training.plan.look_at_images", lambda *_, s=side: (s, False, 1.0))
        assert plan_training(chosen)[1].facts.passes_factor == factor


def test_labels_that_do_not_fit_the_task_are_refused_before_anything_is_timed(photos, monkeypatch):
    monkeypatch.setattr("vit.training.plan.measure_speed", lambda *_: pytest.fail("timed"))
    rows = [f"{path.relative_to(photos)},a|b" for path in sorted(photos.glob("*/*.png"))]
    (photos / "list.csv").write_text("\n".join(["image,label", *rows]) + "\n")
    with pytest.raises(ConfigError, match="use --task multilabel"):
        plan_training({"data": str(photos / "list.csv"), "task": "classify", "precision": "fp32"})


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize("given", [{}, {"task": "regression"}])
def test_nothing_that_alters_numbers_is_planned_for_them(photos, given):
    paths = sorted(photos.glob("*/*.png"))
    rows = [f"{path.relative_to(photos)},{place}" for place, path in enumerate(paths)]
    (photos / "list.csv").write_text("\n".join(["image,age", *rows]) + "\n")
    chosen = {"data": str(photos / "list.csv"), "target": ("age",), "epochs": 100, **given}
    flat = flatten(plan_training({**chosen, "precision": "fp32"})[0])
    kept = get_task("regression").planned_settings
    assert {name: flat[name] for name in kept} == {**kept}
    config, _ = plan_training({**chosen, "random_crop": "resized", "precision": "fp32"})
    assert config.augment.random_crop == "resized"  # what is chosen wins


@pytest.fixture
def timed_networks(monkeypatch):
    """The networks that a plan times, which all have the same speed."""
    timed_networks = []

    def speed(_config, _accelerator, row, _captions):
        timed_networks.append(row)
        return TimedNetwork(flops_of(row, {}), 1e9)

    monkeypatch.setattr("vit.training.plan.measure_speed", speed)
    return timed_networks


@pytest.mark.usefixtures("timed_networks")
def test_networks_that_are_out_of_reach_are_not_timed(photos):
    counts = []
    for seconds in ("20s", "100h"):
        _, plan = plan_training({"data": str(photos), "time": seconds, "precision": "fp32"})
        counts.append(len(plan.facts.timed))
    assert counts[0] < counts[1] == 3


def launch_bound(network, captions, batch=64, *, holds=10**6):
    """A GPU on which a step takes 10 ms for any network of up to 100 TFLOP/s."""
    fits, cost = min(batch, holds), flops_of(network, {})
    step = max(0.010, 3 * fits * cost / 100e12)
    return TimedNetwork(cost, 3 * fits * cost / step, fits if fits < batch else None)


ON_GPU = dataclasses.replace(PHOTOS, **{**GPU, "seconds": 60.0})


def recorded(measure):
    """`measure`, and a list of the networks and batches that it is called with."""
    seen = []

    def recorder(network, captions, batch=64):
        seen.append((network, batch))
        return measure(network, captions, batch)

    return recorder, seen


def test_a_gpu_is_timed_with_planned_batches_and_networks_up_to_the_first_out_of_reach():
    measure, seen = recorded(launch_bound)
    facts = with_speeds(ON_GPU, {}, measure)
    plan = make_plan(facts, {})
    assert {batch for _, batch in seen} == {256}
    assert 4 <= len(facts.timed) < len(PHOTO_NETWORKS)
    # as many images a second, of a larger network
    assert facts.timed[3].flops > 3 * facts.timed[0].flops
    assert plan.settings["dim"] > 128
    # what a CPU plans with, the speed of small networks, would choose a smaller one
    few = dataclasses.replace(facts, timed=facts.timed[:1])
    assert make_plan(few, {}).flops < plan.flops
    # a time chooses what is timed where nobody gave one
    longest = dataclasses.replace(ON_GPU, seconds=None)
    assert len(with_speeds(longest, {}, launch_bound).timed) >= 4


@pytest.mark.parametrize(
    ("given", "changes", "batch"),
    [
        ({"batch_size": 24}, {}, 24),
        ({"batch_size": 512, "accumulate": 4}, {}, 128),
        ({}, {"processes": 8}, 32),
        ({"batch_size": 128}, {"pass_cost": 2.0}, 256),  # two views of an image
    ],
)
def test_a_gpu_is_timed_with_its_share_of_the_batch(given, changes, batch):
    measure, seen = recorded(launch_bound)
    facts = with_speeds(dataclasses.replace(ON_GPU, **changes), given, measure)
    assert {size for _, size in seen} == {batch}
    assert {one.fits for one in facts.timed} == {None}
    assert "accumulate" not in make_plan(facts, given).settings


@pytest.mark.parametrize(
    ("given", "images", "holds", "expected"),
    [
        ({}, 3000, 128, (256, 2)),
        ({}, 2510, 128, (248, 2)),  # without division 251
        ({}, 3000, 40, (256, 8)),
        ({"batch_size": 250}, 3000, 128, (250, 2)),
        ({"batch_size": 250}, 3000, 60, (250, 5)),
        ({"batch_size": 251}, 3000, 128, (251, 251)),
    ],
)
def test_a_batch_that_a_gpu_cannot_hold_is_divided(given, images, holds, expected):
    measure = functools.partial(launch_bound, holds=holds)
    facts = with_speeds(dataclasses.replace(ON_GPU, images=images), given, measure)
    assert {one.fits for one in facts.timed} == {holds}
    every = {**make_plan(facts, given).settings, **given}
    assert (every["batch_size"], every["accumulate"]) == expected
    assert make_config({"data": "photos", **every}).data.micro_batches == expected[1]
    # one that somebody divided is left alone
    divided = {**given, "accumulate": 2}
    assert "accumulate" not in make_plan(with_speeds(facts, divided, measure), divided).settings


@pytest.mark.parametrize(
    ("images", "device", "batch"),
    [(3000, "cpu", 128), (300, "cpu", 100), (500_000, "cpu", 128), (40_000, "cuda", 512)],
)
def test_a_task_that_compares_images_has_a_batch_of_its_own(images, device, batch):
    task_batch = get_task("simclr").planned_batch
    facts = dataclasses.replace(TINY, images=images, device=device, task_batch=task_batch)
    plan = make_plan(facts, {"task": "simclr"})
    assert plan.settings["batch_size"] == batch
    assert plan.choices["batch_size"].reason == f"its images learn from each other, on {device}"


@pytest.mark.parametrize(
    ("changes", "given", "cache"),
    [
        ({}, {}, "device"),
        ({}, {"auto_augment": "three", "translate": 0.1}, "device"),
        ({}, {"auto_augment": "randaugment"}, "ram"),
        ({}, {"erase": 0.25}, "ram"),
        ({"side": 28, "grey": True}, {"cache": "device"}, "device"),  # then without rotation
        ({"side": 28, "grey": True}, {}, "ram"),  # characters are rotated
        ({"device_memory": 2**26}, {}, "ram"),
        ({"device": "cpu", "device_memory": 0}, {}, "ram"),
        ({"memory": 0}, {}, "none"),
        ({}, {"cache": "none"}, "none"),
    ],
)
def test_images_are_kept_on_a_gpu_that_can_augment_them(changes, given, cache):
    facts = dataclasses.replace(PHOTOS, **{**GPU, "device_memory": 2**36, **changes})
    assert planned(facts, **given).data.cache == cache


@pytest.mark.parametrize(("holds", "batch"), [(10**6, 512), (400, 128), (600, 256), (100, 128)])
def test_a_batch_of_compared_images_is_made_smaller_before_it_is_divided(holds, batch):
    simclr = {"task_batch": 128, "pass_cost": 2.0, "images": 40_000}
    measure = functools.partial(launch_bound, holds=holds)
    facts = with_speeds(dataclasses.replace(ON_GPU, **simclr), {"task": "simclr"}, measure)
    settings = make_plan(facts, {"task": "simclr"}).settings
    assert settings["batch_size"] == batch
    assert settings.get("accumulate", 1) == (4 if holds == 100 else 1)


def test_networks_that_a_gpu_cannot_hold_at_all_are_not_chosen():
    def measure(network, captions, batch=64):
        if network.dim > 200:
            return TimedNetwork(flops_of(network, {}), 0.0, 0)
        return launch_bound(network, captions, batch)

    facts = with_speeds(dataclasses.replace(ON_GPU, seconds=36_000.0), {}, measure)
    assert [one.flops > 0 for one in facts.timed] == [True] * 4 + [False]
    assert make_plan(facts, {}).settings["dim"] == 192
    with pytest.raises(RunError, match="not one image of this network fits"):
        with_speeds(ON_GPU, {"dim": 4096}, measure)
    with pytest.raises(RunError, match="no memory left"):
        with_speeds(ON_GPU, {}, lambda *_, **__: TimedNetwork(1.0, 0.0, 0))


@pytest.mark.parametrize(
    ("most", "batch", "fits"), [(70, 256, 64), (70, 70, None), (0, 256, 0)], ids=str
)
def test_a_gpu_is_timed_with_as_many_images_as_fit(monkeypatch, most, batch, fits):
    def seconds(_config, _accelerator, _row, _captions, batch):
        if batch > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return 0.5

    monkeypatch.setattr(trial_training, "max_over_processes", lambda _, number: number)
    monkeypatch.setattr(trial_training, "step_seconds", seconds)
    gpu = torch.device("cuda")
    accelerator = SimpleNamespace(device=gpu, num_processes=2, free_memory=lambda: None)
    network = PHOTO_NETWORKS[0]
    speed = measure_speed(make_config({"data": "photos"}), accelerator, network, batch=batch)
    assert speed.fits == fits
    images = batch if fits is None else fits
    assert speed.flops == pytest.approx(3 * images * flops_of(network, {}) * 2 / 0.5)


@pytest.mark.parametrize(
    "given", [{"dim": 100, "depth": 5, "image_size": 64}, {"dim": 32}], ids=str
)
def test_a_chosen_network_is_timed_on_a_gpu(given):
    measure, seen = recorded(launch_bound)
    with_speeds(dataclasses.replace(ON_GPU, seconds=3600.0), given, measure)
    for network, _ in seen[1:]:
        assert given.items() <= {**network._asdict(), "image_size": network.side}.items()
        assert probe_network(network, None).num_features == given["dim"]


def test_weights_for_a_gpu_are_chosen_by_the_speed_of_one_of_their_networks():
    measure, seen = recorded(launch_bound)
    facts = with_speeds(ON_GPU, {"weights": "auto"}, measure)
    assert [(one.side, one.dim, one.depth) for one, _ in seen[1:]] == [(224, 384, 12)]
    assert facts.timed[0].flops > 10 * facts.flops


def test_a_time_for_tiny_images_needs_no_network_of_photographs_timed(timed_networks):
    plan_training({"data": "digits", "time": "20s", "precision": "fp32"})
    assert timed_networks
    assert {row.patch for row in timed_networks} <= {2, 4, 8}
    plan_training({"data": "digits", "precision": "fp32"})
    assert PROBE.patch in {row.patch for row in timed_networks}


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_a_planned_training_lists_its_data_once(photos, tmp_path, monkeypatch, capsys):
    walk = mock.Mock(side_effect=image_folder.read_classes)
    compare = mock.Mock(side_effect=dataset_warnings.equal_notes)
    monkeypatch.setattr(image_folder, "read_classes", walk)
    monkeypatch.setattr(open_dataset, "equal_notes", compare)
    words = [str(photos), "--steps", "1", "--dim", "32", "--depth", "1"]
    assert main(["plan", *words]) == 0
    assert (walk.call_count, compare.call_count) == (1, 0)  # whose notes nobody would read
    assert main(["train", *words, "-j", "0", "--out", str(tmp_path / "run")]) == 0
    assert (walk.call_count, compare.call_count) == (2, 1)
    assert "only 10 training images" in capsys.readouterr().err  # the notes are said


def test_a_listing_is_used_only_where_the_same_was_asked_for(photos):
    config = make_config({"data": str(photos), "val_share": 0.2})
    listing = list_data(config)
    assert open_data(config, listing) == open_data(config)
    more = make_config({"data": str(photos), "val_share": 0.4, "seed": 3})
    assert open_data(more, listing) == open_data(more)
    (photos / "c").mkdir()
    Image.new("RGB", (60, 60)).save(photos / "c" / "0.png")
    assert open_data(config, listing).classes == ("a", "b")  # it is not listed again
    multilabel = make_config({"data": str(photos), "task": "multilabel"})
    assert open_data(multilabel, listing).classes == ("a", "b", "c")


@pytest.fixture
def captions(photos):
    """A list of the images, in which some have several captions."""
    paths = sorted(path.relative_to(photos).as_posix() for path in photos.glob("*/*.png"))
    rows = [f"{path},noise of class {path[0]} number {n}" for n, path in enumerate(paths)]
    (photos / "list.csv").write_text("\n".join(["image,caption", *rows, *rows[::3]]) + "\n")
    return photos / "list.csv"


@pytest.mark.slow
def test_the_speed_is_that_of_the_captioner(captions, monkeypatch):
    timed = []

    def recorded(row, stats):
        timed.append(probe_network(row, stats))
        return timed[-1]

    monkeypatch.setattr("vit.training.trial_training.probe_network", recorded)
    monkeypatch.setattr("vit.training.trial_training.PROBE_STEPS", 1)
    chosen = {"data": str(captions), "task": "caption", "time": "20s", "precision": "fp32"}
    config, plan = plan_training(chosen)
    assert {type(network) for network in timed} == {Captioner}
    stats = plan.facts.captions
    assert plan.facts.images <= stats.total <= 16
    assert stats.tokens > 5
    assert len(timed[0].decoder.blocks) == config.decoder.decoder_depth == 2
    assert timed[0].decoder.token_embed.num_embeddings == stats.vocab_size
    assert (config.model.pooling, config.model.num_classes) == ("none", 0)
    assert all(math.isfinite(one.flops) and one.flops > 1e6 for one in plan.facts.timed)


@pytest.mark.slow
@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_the_plan_of_captions_is_printed_and_saved_and_trains(captions, tmp_path, capsys):
    words = [str(captions), "--task", "caption", "--epochs", "1", "--dim", "32", "--depth", "1"]
    file, run, again = str(tmp_path / "plan.yaml"), tmp_path / "run", tmp_path / "again"
    assert main(["plan", *words, "--save", file]) == 0
    printed = capsys.readouterr().out
    assert "captions of " in printed
    assert "decoder_depth " in printed
    assert "weights auto" not in printed
    assert main(["train", *words, "--out", str(run), "-j", "0"]) == 0
    said = capsys.readouterr().err
    assert "note: planned a convolutional stem, 1 block of 32 and 2 of a decoder" in said
    parameters = sum(one.numel() for one in vit.from_pretrained(run).parameters())
    assert f"with the decoder {parameters / 1e6:.1f} M parameters" in printed
    assert main(["train", "-c", file, "--out", str(again), "-j", "0"]) == 0
    assert equal_models(run, again)
