"""The list of `--weights auto`: true to timm, permissive, and every network of it loads here."""

import dataclasses
import json
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from vit.errors import WeightsError
from vit.evaluation.model_summary import cost_of
from vit.weights import backbone_list, hub
from vit.weights.backbone_list import LISTED, PERMISSIVE, fetch_backbones, find_backbones
from vit.weights.formats import timm_network
from vit.weights.formats.timm_network import unproven_config
from vit.weights.load_model import build_from_state, open_pretrained


def name_of(weights) -> str:
    return weights.source.removeprefix("timm/")


FAMILIES = {"vit_tiny", "eva02_tiny", "vit_pe_core_tiny"}
FAST = {next(one for one in LISTED if name_of(one).startswith(family)) for family in FAMILIES}
FAST |= {next(one for one in LISTED if "reg4_dinov2" in one.source)}
SOME_SLOW = [
    pytest.param(o, marks=() if o in FAST else pytest.mark.slow, id=name_of(o)) for o in LISTED
]


@pytest.mark.parametrize("weights", SOME_SLOW)
def test_the_list_is_permissive_and_true(weights):
    name = name_of(weights)
    entry = timm_network.find_entry(name)
    assert (entry.name, entry.hub_id) == (name, weights.repository.name)
    assert timm_network.is_supported(name)
    assert timm.models.get_pretrained_cfg(name).license == entry.license == weights.license
    assert weights.license in PERMISSIVE
    with torch.device("meta"):
        network = timm.create_model(name)
    numbers = sum(tensor.numel() for tensor in network.state_dict().values())
    assert weights.megabytes == pytest.approx(4 * numbers / 1e6, abs=0.6)
    assert weights.patch_size == network.patch_embed.patch_size[0]


@pytest.mark.usefixtures("flops_alone")
@pytest.mark.parametrize("weights", sorted(FAST, key=name_of), ids=name_of)
def test_the_cost_of_a_network_is_about_right(weights):
    size = weights.size(224)
    with torch.device("meta"):
        network = timm.create_model(name_of(weights), num_classes=0, img_size=size)
    counted = cost_of(unproven_config(network, size), batch_size=1).flops
    assert weights.flops(size) == pytest.approx(counted, rel=0.15)


@pytest.mark.parametrize("weights", SOME_SLOW)
def test_each_network_gives_the_answers_of_timm(weights, tmp_path, monkeypatch):
    """Of two blocks, and random weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = name_of(weights)
    architecture, _, tag = name.partition(".")
    arguments = {"depth": 2, "num_classes": 5, "img_size": weights.size(112)}
    torch.manual_seed(0)
    network = timm.create_model(architecture, **arguments).eval()
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    about = {**timm.models.get_pretrained_cfg(name).to_dict(), "tag": tag, "num_classes": 5}
    about["input_size"] = [3, arguments["img_size"], arguments["img_size"]]
    config = {"architecture": architecture, "num_classes": 5, "pretrained_cfg": about}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_args": arguments}))
    found = open_pretrained(tmp_path)
    assert found.license == weights.license
    ours = build_from_state(found.config, found.state)
    images = torch.randn(2, 3, arguments["img_size"], arguments["img_size"])
    with torch.inference_mode():
        expected = network(images)
        largest = expected.abs().max()
        torch.testing.assert_close(ours(images) / largest, expected / largest, atol=1e-4, rtol=0)


def test_the_list_has_each_network_once():
    assert 15 <= len(LISTED) == len({one.source for one in LISTED}) <= 25


# ----------------------------------------------------------------------------- at hand

VIT_TINY = next(one for one in LISTED if "vit_tiny" in one.source)


@pytest.fixture
def here(monkeypatch, tmp_path) -> Path:
    """A working folder, without a network and with an empty cache of the hub."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "here"


def write_timm(folder: Path, terms: str | None = "apache-2.0") -> None:
    """Random weights of a small network of timm, as its repository on the hub has them."""
    name, _, tag = name_of(VIT_TINY).partition(".")
    arguments = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2}
    network = timm.create_model(name, num_classes=3, **arguments)
    folder.mkdir(parents=True)
    save_file(network.state_dict(), folder / "model.safetensors")
    about = {"tag": tag, "license": terms, "input_size": [3, 32, 32], "num_classes": 3}
    config = {"architecture": name, "num_classes": 3, "pretrained_cfg": about}
    (folder / "config.json").write_text(json.dumps({**config, "model_args": arguments}))


def test_the_cache_and_folders_are_seen_offline(here):
    assert find_backbones("photos", Path("photos")) == ([], [])
    home = VIT_TINY.repository.cache
    write_timm(home / "snapshots" / "0123abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0123abc")
    assert find_backbones("photos", Path("photos")) == ([VIT_TINY], [])
    # an unfinished download is not taken, and a folder as `hf download` makes it is
    (home / "snapshots" / "0123abc" / "model.safetensors").unlink()
    assert find_backbones("photos", Path("photos")) == ([], [])
    write_timm(Path(name_of(VIT_TINY)))
    assert find_backbones("photos", Path("photos"))[0] == [
        dataclasses.replace(VIT_TINY, source=name_of(VIT_TINY))
    ]


def test_a_folder_under_other_terms_is_not_taken(here):
    write_timm(Path(name_of(VIT_TINY)), terms="cc-by-nc-4.0")
    write_timm(Path("runs/theirs"), terms="cc-by-nc-4.0")
    write_timm(Path("runs/unknown"), terms=None)
    write_timm(Path("runs/mine"))
    Path("runs/other").mkdir()
    found, lines = find_backbones("photos", Path("photos"))
    assert [(one.source, one.image_size, one.license) for one in found] == [
        ("runs/mine", 32, "apache-2.0")
    ]
    assert lines == [
        "runs/theirs is left out: its licence is cc-by-nc-4.0",
        "runs/unknown is left out: its licence is unknown",
    ]


def test_downloads_stay_within_their_limit_and_a_failure_is_named(monkeypatch):
    asked = []

    def locate(source):
        asked.append(source)
        if len(asked) == 2:
            raise WeightsError("fetching failed")

    monkeypatch.setattr(backbone_list, "locate_weights", locate)
    monkeypatch.setattr(hub, "offline_reason", lambda **_: None)
    monkeypatch.setattr(hub, "unreachable_reason", lambda: None)
    found, lines = fetch_backbones(LISTED, 200_000_000)
    assert lines == [f"{asked[1]} is left out: fetching failed"]
    assert [one.source for one in found] == [asked[0], *asked[2:]]
    assert 150 < sum(one.megabytes for one in found) <= 200
    monkeypatch.setattr(hub, "unreachable_reason", lambda: "the hub cannot be reached")
    assert fetch_backbones(LISTED, 10**9) == ([], ["nothing is fetched: the hub cannot be reached"])
    assert fetch_backbones(LISTED, 10**6)[1] == [
        "nothing is fetched: the list has no other of 1 MB"
    ]
