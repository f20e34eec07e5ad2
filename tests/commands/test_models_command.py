"""`vit models` names every preset, with the numbers of the network that is built."""

import pytest
import torch

from vit.commands.main import main
from vit.commands.models import count_parameters, matching
from vit.model.build import create_model
from vit.presets import PRESETS
from vit.weights import registry


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_network(name):
    with torch.device("meta"):
        model = create_model(name, num_classes=10)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(PRESETS[name], num_classes=10) == built


def test_lists_every_preset(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *PRESETS]
    small = next(line for line in lines if line.startswith("vit_small_patch16_224"))
    assert small.split() == [*("vit_small_patch16_224", "22.1", "M", "224", "16", "384", "12", "6")]


@pytest.mark.parametrize("pattern", ["SMALL_patch16", "vit_small_patch16_*"])
def test_a_pattern_narrows_the_list(pattern):
    assert matching(pattern) == ["vit_small_patch16_224", "vit_small_patch16_384"]


def test_no_match_names_the_nearest(capsys):
    assert main(["models", "vit_smal_patch16_224"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "vit_small_patch16_224" in captured.err
    assert len(captured.err.splitlines()) == 1


def test_pretrained_names_have_a_size_and_a_licence(capsys):
    assert main(["models", "--pretrained", "vit_small_patch16_*augreg_in21k*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "image", "license"]
    words = ["timm/vit_small_patch16_224.augreg_in21k_ft_in1k", "224x224", "apache-2.0"]
    assert words in [line.split() for line in lines]
    assert all("vit_small_patch16_" in line for line in lines[1:])


def test_every_pretrained_name_is_one_of_timm(capsys):
    assert main(["models", "--pretrained"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) > 200
    for line in lines:
        name, size, license_ = line.split(maxsplit=2)
        entry = registry.find(name.removeprefix("timm/"))
        assert f"timm/{entry.name}" == name
        assert size == "{}x{}".format(*entry.image_size)
        assert license_ == (entry.license or "not stated")


def test_what_cannot_be_loaded_is_not_listed(monkeypatch, capsys):
    monkeypatch.setattr(registry, "supported", lambda name: ".dino" in name)
    assert main(["models", "--pretrained", "timm/vit_small"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines
    assert all(".dino" in line for line in lines)


def test_what_this_network_cannot_compute_is_not_listed(capsys):
    assert registry.supported("vit_so400m_patch14_siglip_384.webli")
    assert not registry.supported("vit_base_patch16_rpn_224.sw_in1k")
    assert main(["models", "--pretrained", "vit_base_patch16_rpn_224"]) == 2
    assert "computes none of timm's" in capsys.readouterr().err


def test_no_pretrained_match_names_the_nearest(capsys):
    assert main(["models", "--pretrained", "vit_smal_patch16_224"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "timm/vit_small_patch16_224." in captured.err
    assert len(captured.err.splitlines()) == 1
