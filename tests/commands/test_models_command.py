"""`vit models` names every preset, with the numbers of the network that is built."""

import pytest
import torch

from tests.slow_cases import mostly_slow
from vit.commands.main import main
from vit.config import ModelConfig
from vit.config.presets import PRESETS, count_flops, count_parameters, find_presets
from vit.evaluation.model_summary import cost_of
from vit.model.build import create_model
from vit.weights.formats import timm_network


@pytest.mark.parametrize("name", mostly_slow(PRESETS))
def test_the_computed_parameters_equal_those_of_the_built_network(name):
    with torch.device("meta"):
        model = create_model(name, num_classes=10)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(PRESETS[name], num_classes=10) == built


# the smallest and the largest of each patch size: the formula sees numbers alone
@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch8_224",
        "vit_huge_patch14_224",
        "vit_tiny_patch16_224",
        "vit_large_patch16_384",
        "vit_large_patch32_384",
    ],
)
@pytest.mark.usefixtures("flops_alone")
def test_the_computed_flops_equal_those_of_the_model_summary(name):
    sizes = {**PRESETS[name], "depth": 2, "num_classes": 10}
    cost = cost_of(ModelConfig(**sizes), batch_size=1)
    assert count_flops(sizes, num_classes=10) == cost.flops
    assert count_parameters(sizes, num_classes=10) == cost.parameters


def test_every_preset_is_listed_with_its_size(capsys):
    assert main(["models"]) == 0
    *lines, empty, note = capsys.readouterr().out.splitlines()
    assert not empty
    assert note.startswith("FLOPs of one image: 2 for each multiply-add")
    assert [line.split()[0] for line in lines] == ["name", *PRESETS]
    small = next(line for line in lines if line.startswith("vit_small_patch16_224"))
    words = "vit_small_patch16_224 22.1 M 9.2 G 224 16 384 12 6"
    assert small.split() == words.split()


@pytest.mark.parametrize("pattern", ["SMALL_patch16", "vit_small_patch16_*"])
def test_a_part_of_a_name_or_a_pattern_selects_presets(pattern):
    assert find_presets(pattern) == ["vit_small_patch16_224", "vit_small_patch16_384"]


def test_pretrained_models_are_listed_with_image_size_and_license(capsys):
    assert main(["models", "--pretrained", "vit_small_patch16_*augreg_in21k*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "image", "license"]
    words = ["timm/vit_small_patch16_224.augreg_in21k_ft_in1k", "224x224", "apache-2.0"]
    assert words in [line.split() for line in lines]
    assert all("vit_small_patch16_" in line for line in lines[1:])


@pytest.mark.slow
def test_every_listed_pretrained_model_is_in_timms_registry(capsys):
    assert main(["models", "--pretrained"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) > 200
    for line in lines:
        name, size, license_ = line.split(maxsplit=2)
        entry = timm_network.find_entry(name.removeprefix("timm/"))
        assert f"timm/{entry.name}" == name
        assert size == "{}x{}".format(*entry.image_size)
        assert license_ == (entry.license or "not stated")


def test_unsupported_pretrained_models_are_not_listed(monkeypatch, capsys):
    monkeypatch.setattr(timm_network, "is_supported", lambda name: ".dino" in name)
    assert main(["models", "--pretrained", "timm/vit_small"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines
    assert all(".dino" in line for line in lines)


def test_pretrained_models_of_other_architectures_are_not_listed():
    assert timm_network.is_supported("vit_so400m_patch14_siglip_384.webli")
    assert not timm_network.is_supported("vit_relpos_base_patch16_224.sw_in1k")
