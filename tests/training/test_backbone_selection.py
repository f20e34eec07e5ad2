"""`--weights auto` measures: the better network is chosen, or of a tie the smaller one, in time."""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import constants
from PIL import Image
from torch import nn

import vit
from tests.slow_cases import mostly_slow
from tests.training.distributed.test_processes import ROOT, TORCHS
from tests.weights.test_backbone_list import VIT_TINY, write_timm
from vit.commands.main import main
from vit.config import ModelConfig
from vit.config.setting_layers import Settings, make_config
from vit.data.image_io import read_image
from vit.model.build import build_classifier
from vit.training import backbone_selection as selection
from vit.training.backbone_selection import (
    SCRATCH,
    TOO_SLOW,
    PatchFilters,
    Tournament,
    patch_filters,
    read_record,
    shuffle_weights,
    stratified_order,
)
from vit.training.distributed.devices import make_accelerator
from vit.training.finetune.feature_extraction import Extractor
from vit.training.plan_weights import WeightsChoice
from vit.training.settings_from_data import list_data, open_data
from vit.weights import hub
from vit.weights.backbone_list import Backbone

CLASSES, EACH = 4, 60
NOISE = {"good": 0.6, "copy": 0.6, "fair": 1.2, "random": 1e6, "noise": 1e6, "slow": 0.3}
"""Networks of these tests by the noise of their features; the last one takes long."""
SIZES = dict(zip(NOISE, (20.0, 30.0, 10.0, 5.0, 5.0, 40.0), strict=True))
FROM_SCRATCH = 0.5
"""Noise of the features that stand for training from scratch."""


@pytest.fixture
def grey(tmp_path: Path) -> Path:
    """Images of a grey value for each class, each one different."""
    for label, number in itertools.product(range(CLASSES), range(EACH)):
        path = tmp_path / "grey" / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((4, 4, 3), 60 * label, np.uint8)
        pixels[0, 0] = number
        Image.fromarray(pixels).save(path)
    return tmp_path / "grey"


class FakeTournament(Tournament):
    """A tournament of networks that add noise to the class of an image, by a clock of its own."""

    now, kill_after, images = 0.0, 10**9, 0
    twins: ClassVar = {"copy": "good"}
    """Networks with the features of another one."""
    untaught = ""
    """A network that is as good with shuffled weights."""

    def __init__(self, data: Path, cache: Path, names, *, seconds=1000.0, scratch=None):
        chosen = {"data": str(data), "feature_cache": str(cache), "workers": 0}
        chosen = Settings(call={**chosen, "precision": "fp32", "device": "cpu"})
        config = make_config(chosen)
        splits = open_data(config, list_data(config), compare=False)
        choices = [
            WeightsChoice(Backbone(name, "mit", SIZES[name]), "full", 224, 9.0, 1.0, True)
            for name in names
        ]
        accelerator = make_accelerator(config.run)
        path = cache / "record.json"
        super().__init__(
            *(read_record(path) or {"version": selection.VERSION, "speeds": [1.0, []]}, path),
            *(choices, chosen, config, splits, accelerator),
            seconds=seconds,
            scratch=scratch,
            clock=lambda: self.now,
        )

    def open_filters(self):
        return self.open(SCRATCH)

    def open(self, source, *, shuffled=False):
        self.now += 0.1

        def prepare(path):
            pixels, twin = np.asarray(read_image(path)), self.twins.get(source, source)
            twin = "random" if shuffled and source != self.untaught else twin
            digest = hashlib.sha256(pixels.tobytes() + twin.encode()).digest()
            noise = np.random.default_rng([*digest]).normal(size=CLASSES)
            signal = np.eye(CLASSES)[pixels[2, 2, 0] // 60]
            return torch.from_numpy(signal + NOISE.get(twin, FROM_SCRATCH) * noise).float()

        def vectors(images):
            self.images += len(images)
            self.now += len(images) * (1.0 if source == "slow" else 0.01)
            if self.images >= self.kill_after:
                raise KeyboardInterrupt
            return torch.stack([*images])

        identity = {"network": source, "shuffled": shuffled}
        return Extractor("features", identity, prepare, vectors)


def test_the_better_network_is_chosen_and_the_next_best_is_named(grey, tmp_path):
    played = FakeTournament(grey, tmp_path / "c", ["fair", "random", "good"])
    assert played.run().weights.source == "good"
    found = played.summary()
    assert [row["source"] for row in found["networks"]] == ["good", "fair", "random"]
    assert found["sentence"].startswith("good; fair would give -")
    assert "tie" not in found["sentence"]
    for row in found["networks"]:
        low, high = row["interval"]
        assert low < row["accuracy"] < high
    json.dumps(found, allow_nan=False)


def test_a_copy_ties_and_the_smaller_one_is_taken(grey, tmp_path):
    played = FakeTournament(grey, tmp_path / "c", ["copy", "good"])
    assert played.run().weights.source == "good"
    line = played.summary()["sentence"]
    assert line.startswith("a tie of good, copy, so the smallest network wins: good; ")
    assert "+0.0 points" in line


@pytest.mark.parametrize("seconds", [12.0, 1000.0])
def test_networks_that_know_nothing_leave_training_from_scratch(grey, tmp_path, seconds):
    names = ["random", "noise"]
    played = FakeTournament(grey, tmp_path / "c", names, seconds=seconds, scratch=16)
    assert played.run() is None
    found = played.summary()
    assert found["chosen"] == SCRATCH
    assert "no better" in found["networks"][0]["left_out"]
    forced = FakeTournament(grey, tmp_path / "d", names, seconds=seconds)
    assert forced.run() is not None
    better = FakeTournament(grey, tmp_path / "e", [*names, "good"], scratch=16)
    assert better.run().weights.source == "good"


def test_what_is_worse_than_another_with_shuffled_weights_is_not_chosen(grey, tmp_path):
    played = FakeTournament(grey, tmp_path / "c", ["good", "fair"], scratch=16)
    played.untaught = "good"
    assert played.run() is None


def test_where_patches_are_by_far_the_best_it_trains_from_scratch(grey, tmp_path):
    played = FakeTournament(grey, tmp_path / "c", ["fair", "random"], scratch=16)
    played.twins = {SCRATCH: "slow"}
    assert played.run() is None
    found = played.summary()
    assert found["chosen"] == found["networks"][0]["source"] == SCRATCH
    assert found["sentence"].startswith("from scratch; fair would give -")
    again = FakeTournament(grey, tmp_path / "c", ["fair", "random"], scratch=16)
    assert (again.run(), again.images) == (None, 0)
    assert again.summary() == found


def test_from_scratch_it_has_to_be_better_by_far(grey, tmp_path):
    played = FakeTournament(grey, tmp_path / "c", ["good", "fair"], scratch=16)
    assert played.run().weights.source == "good"
    found = played.summary()
    assert found["sentence"].startswith("good; fair would give -")
    rows = {row["source"]: row["accuracy"] for row in found["networks"]}
    assert rows[SCRATCH] > rows["good"]


@pytest.mark.parametrize(("scratch", "chosen"), [("random", "weak"), ("good", None)])
def test_a_network_not_shown_to_know_the_images_has_to_be_ahead_of_patches(
    grey, tmp_path, monkeypatch, scratch, chosen
):
    """More accurate than with shuffled weights, but no test shows it."""
    monkeypatch.setitem(NOISE, "weak", 12.0)
    monkeypatch.setitem(SIZES, "weak", 9.0)
    played = FakeTournament(grey, tmp_path / "c", ["weak", "random"], scratch=16)
    played.twins = {SCRATCH: scratch}
    choice = played.run()
    assert (choice.weights.source if choice else None) == chosen
    assert played.record["networks"]["weak"]["knows"] is False
    rows = {row["source"]: row["left_out"] for row in played.summary()["networks"]}
    assert (rows["weak"], rows["random"]) == (None, "no better than with shuffled weights")


def test_a_smaller_network_that_may_know_nothing_wins_no_tie(grey, tmp_path):
    played = FakeTournament(grey, tmp_path / "c", ["copy", "good"], scratch=16)
    assert played.run().weights.source == "good"
    for source, knows in ("copy", True), ("good", False):
        played.networks[source]["knows"] = knows
    played.record["ranking"] = ["copy", "good"]
    assert played.decide() == "copy"


def test_a_network_that_can_no_longer_be_read_is_not_chosen(grey, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "MIN_IMAGES", 40)
    played = FakeTournament(grey, tmp_path / "c", ["good", "fair", "random", "noise"], seconds=30.0)
    real = played.open

    def open_once(source, **options):
        if source == "good" and played.networks["good"]["right"]:
            played.networks[source]["left_out"] = "gone"
            return None
        return real(source, **options)

    monkeypatch.setattr(played, "open", open_once)
    assert played.run().weights.source == "fair"
    assert played.networks["good"]["left_out"] == "gone"


def test_other_networks_are_compared_anew(grey, tmp_path):
    first = FakeTournament(grey, tmp_path / "c", ["fair", "random"])
    assert first.run().weights.source == "fair"
    second = FakeTournament(grey, tmp_path / "c", ["fair", "random", "good"])
    assert second.run().weights.source == "good"


def test_a_class_of_one_image_says_nothing_about_networks(grey, tmp_path):
    for path in grey.glob("*/*.png"):
        if path.stem not in "01":
            path.unlink()
    labels = "image,label,split\n" + "".join(f"{n}/0.png,{n},train\n" for n in range(CLASSES))
    (grey / "list.csv").write_text(labels + "0/1.png,0,val\n")
    played = FakeTournament(grey / "list.csv", tmp_path / "c", ["copy", "good"])
    assert played.run().weights.source == "good"
    assert played.summary()["networks"][0]["accuracy"] is None


def test_halving_gives_the_better_half_twice_the_images(grey, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "MIN_IMAGES", 40)
    names = ["good", "copy", "fair", "random", "noise"]
    played = FakeTournament(grey, tmp_path / "c", names, seconds=30.0)
    assert played.run().weights.source == "good"
    first, *later = played.record["images"]
    assert later == [2 * first, 4 * first][: len(later)]
    assert later
    counts = [len(played.networks[name]["right"]) for name in names]
    assert counts[:2] == [1 + len(later)] * 2
    assert sorted(counts)[:3] == [1, 1, 2]


@pytest.mark.parametrize("seconds", mostly_slow([8.0, 20.0, 60.0, 4000.0]))
def test_a_quarter_of_the_time_is_enough(grey, tmp_path, seconds):
    names = ["good", "fair", "random", "slow"]
    played = FakeTournament(grey, tmp_path / "c", names, seconds=seconds)
    timed = 0.1 * len(names) + 8 * (1.0 + 0.03)  # the speeds, which are measured first
    played.run()
    assert played.now <= max(0.25 * seconds, timed) + 16.2  # and a batch, as it began
    left_out = played.networks["slow"].get("left_out")
    assert (left_out == TOO_SLOW) == (seconds < 4000)


@pytest.mark.parametrize(
    "kill_after", [150, *(pytest.param(one, marks=pytest.mark.slow) for one in (30, 300, 420))]
)
def test_killed_at_any_moment_the_same_network_wins(grey, tmp_path, kill_after):
    names = ["good", "fair", "random"]
    whole = FakeTournament(grey, tmp_path / "c", names, seconds=60.0)
    whole.run()
    killed = FakeTournament(grey, tmp_path / "d", names, seconds=60.0)
    killed.kill_after = kill_after
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    again = FakeTournament(grey, tmp_path / "d", names, seconds=60.0)
    again.run()
    assert again.record["chosen"] == whole.record["chosen"]
    assert again.record["images"] == whole.record["images"]
    assert {n: one["right"] for n, one in again.networks.items()} == {
        n: one["right"] for n, one in whole.networks.items()
    }


def test_a_second_call_makes_no_features(grey, tmp_path):
    first = FakeTournament(grey, tmp_path / "c", ["good", "fair"])
    first.run()
    second = FakeTournament(grey, tmp_path / "c", ["good", "fair"])
    assert second.run() == first.run()
    assert (second.images, second.now) == (0, 0.0)
    assert second.summary() == first.summary()
    # without the record, which other settings do not find, features are read from the cache
    (tmp_path / "c" / "record.json").unlink()
    third = FakeTournament(grey, tmp_path / "c", ["good", "fair"])
    third.run()
    assert third.images < first.images / 5


def test_filters_answer_to_every_direction_of_patches_alike():
    """Images of little but low frequencies are whitened, and uniform ones give no answer."""
    noise = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = nn.functional.interpolate(noise, scale_factor=2, mode="bilinear")
    filters = patch_filters(images, seed=0)
    network = PatchFilters(filters)
    patches = nn.functional.unfold(images, selection.PATCH).transpose(1, 2).flatten(0, 1)
    deviations = (patches @ filters.flatten(1).T).std(0)
    assert deviations.max() < 2 * deviations.min()
    assert filters.sum((1, 2, 3)).abs().max() < 1e-4  # uniform images have no answer
    assert network.features(images).shape == (64, 8 * selection.FILTERS)
    assert torch.equal(patch_filters(images, seed=0), filters)
    mirrored = network.features(images.flip(3))
    torch.testing.assert_close(network.features(images), mirrored)
    for grey in (torch.zeros(2, 3, 32, 32), torch.ones(2, 3, 6, 6)):
        assert patch_filters(grey, seed=0).isfinite().all()


def test_shuffled_weights_keep_their_values():
    model = build_classifier(
        ModelConfig(image_size=16, patch_size=8, dim=32, depth=1, num_heads=2, num_classes=2)
    )
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    shuffle_weights(model, seed=0)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor.flatten().sort().values, before[name].flatten().sort().values)
    assert not torch.equal(model.blocks[0].attn.qkv.weight, before["blocks.0.attn.qkv.weight"])


def test_images_without_a_label_take_no_part(grey):
    config = make_config({"data": str(grey)})
    samples = open_data(config, list_data(config), compare=False).train
    some = [dataclasses.replace(samples[0], label=-1), *samples[1:]]
    assert len(stratified_order(some, seed=0)) == len(samples) - 1


# ----------------------------------------------------------------------------- with files


@pytest.fixture
def offline(monkeypatch, tmp_path) -> Path:
    """A working folder, without a network and with empty caches."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "here"


def put_in_cache() -> None:
    home = VIT_TINY.repository.cache
    write_timm(home / "snapshots" / "0123abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0123abc")


COMMON = ["--image-size", "32", "-j", "0"]


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_auto_trains_and_resumes_and_is_planned(offline, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Tournament, "knows_images", lambda *_: True)  # noise has nothing to know
    monkeypatch.setattr(Tournament, "needs_no_network", lambda *_: False)
    put_in_cache()
    source = VIT_TINY.source
    plan = ["plan", str(photos), "--weights", "auto", *COMMON, "--save", "my plan.yaml"]
    assert main(plan) == 0
    printed = capsys.readouterr().out
    assert source in printed
    assert "Apache-2.0" in printed
    assert "train it: vit train -c 'my plan.yaml'" in printed
    assert yaml.safe_load(Path("my plan.yaml").read_text())["weights"] == source

    words = ["train", str(photos), "--weights", "auto", *COMMON, "--epochs", "1"]
    out = ["--out", str(tmp_path / "run")]
    assert main([*words, *out]) == 0
    assert f"weights=auto: {source} (Apache-2.0" in capsys.readouterr().err
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["weights"], config["method"], config["depth"]) == (source, "full", 1)
    measured = json.loads((tmp_path / "run" / "backbones.json").read_text())
    assert measured["chosen"] == measured["networks"][0]["source"] == source
    assert measured["sentence"] in (tmp_path / "run" / "report.html").read_text()
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    shutil.move(VIT_TINY.repository.cache, tmp_path / "gone")  # a resumed run has its weights
    assert main([*words, *out, "--resume"]) == 0
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_a_short_time_fits_a_head_alone_from_python(offline, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(Tournament, "knows_images", lambda *_: True)  # noise has nothing to know
    monkeypatch.setattr(Tournament, "needs_no_network", lambda *_: False)
    put_in_cache()
    chosen = {"data": str(photos), "weights": "auto", "time": "20s", "image_size": 32, "workers": 0}
    assert vit.plan({**chosen, "method": "probe"})[0].finetune.weights == VIT_TINY.source
    result = vit.train(make_config(chosen), tmp_path / "run")
    config = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert (config["method"], config["time"]) == ("probe", None)
    assert config["weights"] == VIT_TINY.source


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize("random", [pytest.param(True, marks=pytest.mark.slow), False])
def test_without_a_network_that_knows_something_it_trains_from_scratch(
    offline, photos, tmp_path, capsys, tiny_run, random
):
    if random:
        shutil.copytree(tiny_run, "runs/untrained")
    words = ["train", str(photos), "--weights", "auto:2GB", "--epochs", "1", "-j", "0"]
    assert main([*words, "--out", "runs/new"]) == 0
    printed = capsys.readouterr().err
    assert "weights=auto: nothing is fetched: HF_HUB_OFFLINE is set" in printed
    assert ("training from scratch: no network is better than with shuffled" in printed) == random
    assert yaml.safe_load(Path("runs/new/config.yaml").read_text())["weights"] is None
    assert main([*words, "--out", "runs/new", "--resume"]) == 0
    # it has learned these labels, so it is no candidate, by whichever name the images come
    lines = [f"{path},{path.parent.name}" for path in sorted(photos.rglob("*.*"))]
    (photos / "list.csv").write_text("\n".join(["file_name,label", *lines]))
    assert main(["plan", str(photos / "list.csv"), "--weights", "auto"]) == 0
    (photos / "list.csv").unlink()
    line = "runs/new is left out: it, or a run that it began with, has learned labels of these"
    assert line in capsys.readouterr().err
    assert main(["train", str(photos), "--weights", "auto", "--epochs", "1", "-j", "0"]) == 0
    printed = capsys.readouterr().err
    assert line in printed
    assert "not on this disk: timm/" in printed
    assert main(["models", "--try", str(photos)]) == (0 if random else 2)
    assert main(["models", "vit_*", "--try", str(photos)]) == 2
    lora = ["train", str(photos), "--weights", "auto", "--method", "lora", "--epochs", "1"]
    # which needs weights, whatever they know
    assert main([*lora, "-j", "0", "--out", "runs/lora"]) == (0 if random else 2)


@pytest.mark.slow
@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_one_image_of_a_group_and_none_for_validation_is_compared(
    offline, grey, tmp_path, tiny_run, monkeypatch
):
    shutil.copytree(tiny_run, "runs/untrained")
    paths = sorted(grey.rglob("*.png"))
    lines = [f"{path},{path.parent.name},{int(path.stem) // 3}" for path in paths]
    (grey / "list.csv").write_text("\n".join(["file_name,label,patient", *lines]))
    seen, original = [], selection.Tournament.__init__

    def init(self, *given, **more):
        original(self, *given, **more)
        seen.extend(sample.path for sample in self.samples)

    monkeypatch.setattr(selection.Tournament, "__init__", init)
    monkeypatch.setattr(selection.Tournament, "run", lambda _: None)
    monkeypatch.setattr(selection.Tournament, "summary", lambda _: {})
    words = {"weights": "auto", "group": "patient", "workers": 0, "epochs": 1}
    result = vit.train(grey / "list.csv", out=tmp_path / "run", **words)
    held_out = json.loads((result.folder / "split.json").read_text())["val"]
    patients = [int(Path(path).stem) // 3 for path in seen]
    assert len(patients) == len({*patients}) > 8
    assert not {*patients} & {int(Path(path).stem) // 3 for path in held_out}


@pytest.mark.usefixtures("known_speed")
def test_patches_of_images_are_measured(offline, tmp_path, tiny_run, monkeypatch):
    """Stripes in one of two directions, which a network with random weights hardly tells apart."""
    random = np.random.default_rng(0)
    for number in range(60):
        wave = 40 * np.sin(2 * np.arange(24) + random.uniform(0, 6))
        stripes = np.broadcast_to(wave if number % 2 else wave[:, None], (24, 24))
        pixels = random.uniform(60, 190) + random.normal(0, 20, (24, 24, 3)) + stripes[..., None]
        path = tmp_path / "stripes" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    shutil.copytree(tiny_run, "runs/untrained")
    monkeypatch.setattr(Tournament, "knows_images", lambda *_: True)
    settings = {"weights": "auto", "workers": 0, "precision": "fp32", "device": "cpu"}
    config, plan = vit.plan(tmp_path / "stripes", **settings)
    assert config.finetune.weights is None
    rows = {row["source"]: row["accuracy"] for row in plan.backbones["networks"]}
    assert plan.backbones["chosen"] == SCRATCH
    assert rows[SCRATCH] > 0.95
    assert rows["runs/untrained"] < 0.9


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_many_labels_are_not_shown_to_a_network_of_smaller_images(
    offline, photos, tmp_path, capsys, tiny_run, monkeypatch
):
    monkeypatch.setattr("vit.training.plan.MANY_LABELS", 10)
    shutil.copytree(tiny_run, "runs/untrained")
    assert main(["models", "--try", str(photos)]) == 2
    line = "runs/untrained is left out: training from scratch sees 48 px or more"
    assert line in capsys.readouterr().err


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_a_network_that_cannot_be_read_is_named_and_left_out(
    offline, photos, tmp_path, capsys, tiny_run
):
    shutil.copytree(tiny_run, "runs/damaged")
    weights = Path("runs/damaged/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4])
    shutil.copytree(tiny_run, "runs/untrained")
    assert main(["models", "--try", str(photos), "--json", "found.json"]) == 0
    said = capsys.readouterr()
    assert "weights=auto: runs/damaged is left out: " in said.err
    assert "runs/untrained" in said.out
    rows = {row["source"]: row for row in json.loads(Path("found.json").read_text())["networks"]}
    assert rows["runs/damaged"]["left_out"]
    assert rows["runs/untrained"]["accuracy"] is not None


@pytest.mark.auto_precision
@pytest.mark.usefixtures("known_speed")
def test_numbers_take_the_largest_network_that_fits(offline, photos, tmp_path, capsys, tiny_run):
    shutil.copytree(tiny_run, "runs/untrained")
    put_in_cache()  # 23 MB by the list
    rows = [f"{path},{n}" for n, path in enumerate(sorted(photos.rglob("*.png")))]
    (tmp_path / "list.csv").write_text("\n".join(["image,size", *rows]))
    words = [
        "plan",
        str(tmp_path / "list.csv"),
        "--target",
        "size",
        "--weights",
        "auto",
        "--image-size",
        "32",
    ]
    assert main([*words, "--save", "plan.yaml"]) == 0
    assert "weights=auto: not measured" in capsys.readouterr().err
    planned = yaml.safe_load(Path("plan.yaml").read_text())
    assert (planned["weights"], planned["method"]) == (VIT_TINY.source, "full")


@pytest.mark.slow
def test_two_processes_choose_as_one(offline, photos, tmp_path, tiny_run):
    shutil.copytree(tiny_run, "runs/untrained")
    words = [str(photos), "--weights", "auto", "--method", "full", "--epochs", "1", "-j", "0"]
    words += ["--precision", "fp32", "--device", "cpu"]
    found = []
    for processes in ("1", "2"):
        cache = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / processes), "HF_HUB_OFFLINE": "1"}
        line = [*TORCHS[:-1], processes, str(ROOT / "train.py"), *words, "--out", processes]
        done = subprocess.run(line, env=cache, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(Path(processes, "backbones.json").read_text()))
        assert (offline / processes / "model.safetensors").is_file()
    one, two = ([(row["source"], row["accuracy"]) for row in o["networks"]] for o in found)
    assert (found[0]["chosen"], one) == (found[1]["chosen"], two)
    assert one[0][0] == "runs/untrained"


@pytest.mark.auto_precision
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model", "vit_tiny_patch16_224"], "weights=auto chooses"),
        (["--task", "caption"], "weights=auto chooses"),
        (["--weights", "auto:2"], "weights=auto:2: write a size in MB or GB, such as auto:500MB"),
    ],
)
def test_what_leaves_nothing_to_choose_is_refused(offline, photos, capsys, words, line):
    assert main(["train", str(photos), "--weights", "auto", *words]) == 2
    assert line in capsys.readouterr().err


def test_a_time_without_images_to_try_is_refused(capsys):
    assert main(["models", "--time", "5m"]) == 2
    assert "--time is for --try DATA" in capsys.readouterr().err


def test_the_size_of_a_download_is_announced():
    line = hub.download_message(hub.Repository("o/n"), [2_000_000, 500_000])
    assert "/o/n: 2 files, 2.5 MB, to " in line
    assert "does not say" in hub.download_message(hub.Repository("o/n"), [None])
