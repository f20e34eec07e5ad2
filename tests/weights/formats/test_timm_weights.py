"""timm's weights give the same logits here, and config.json's metadata is read."""

from dataclasses import replace

import pytest
import timm
import torch

from tests.weights.parity import build, output_difference
from vit.config import ModelConfig
from vit.config.presets import preset
from vit.data.preprocessing import Preprocessing
from vit.errors import WeightsError
from vit.model.build import assemble_model, check_fit, meta_model
from vit.weights.formats.state_dict_names import flatten_patches
from vit.weights.formats.timm_weights import read_timm, read_timm_config
from vit.weights.saved_model import from_timm, to_timm

SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8}
ABOUT = {
    "input_size": (3, 32, 32),
    "crop_pct": 0.875,
    "interpolation": "bilinear",
    "mean": (0.1, 0.2, 0.3),
    "std": (0.5, 0.6, 0.7),
    "license": "apache-2.0",
}


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return small_state()


def small_state(classes: int = 3) -> dict[str, torch.Tensor]:
    return timm.create_model("vit_tiny_patch16_224", **SMALL, num_classes=classes).state_dict()


def read(state, **options):
    options = {"architecture": "vit_tiny_patch16_224", "model_args": SMALL, **options}
    return read_timm(state, **options, where="x")


def test_metadata_of_config_json_is_read(state):
    found = read(state, pretrained_cfg=ABOUT, label_names=["a", "b", "c"])
    assert found.classes == ("a", "b", "c")
    assert found.license == "apache-2.0"
    assert found.origin == "timm vit_tiny_patch16_224"
    read_as = {"image_size": (32, 32), "crop_share": 0.875, "interpolation": "bilinear"}
    expected = Preprocessing(**read_as, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    assert found.preprocessing == expected
    squashed = read(state, pretrained_cfg={**ABOUT, "crop_mode": "squash"}).preprocessing
    assert squashed == replace(expected, resize="squash")
    assert found.notes == ()


def test_missing_metadata_is_none(state):
    found = read(state)
    assert (found.classes, found.preprocessing, found.license) == (None, None, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"crop_mode": "center-2"}, "crop_mode='center-2'"),
        ({"interpolation": "lanczos"}, "interpolation='lanczos'"),
        ({"crop_pct": 1.2}, "crop_share=1.2"),
        ({"mean": (0.5,)}, "mean="),
        ({"mean": None}, "mean=None"),
    ],
)
def test_unsupported_preprocessing_gives_a_note(state, change, reason):
    found = read(state, pretrained_cfg={**ABOUT, **change})
    assert found.preprocessing is None
    assert any("preprocessing is not known" in note and reason in note for note in found.notes)


@pytest.mark.parametrize(
    ("names", "classes", "reason"),
    [
        ({"1": "b", "0": "a", "2": "c"}, ("a", "b", "c"), ""),
        (["ant", "no", "no"], ("ant", "no (1)", "no (2)"), "several classes have one name"),
        (["a", "b"], None, "2 names for 3 outputs"),
        (["a", "b", 3], None, "no list of names"),
        ("abc", None, "no list of names"),
        ({"0": "a", "2": "c"}, None, "2 names for 3 outputs"),
    ],
)
def test_names_of_classes(state, names, classes, reason):
    for options in ({"label_names": names}, {"pretrained_cfg": {"label_names": names}}):
        found = read(state, **options)
        assert found.classes == classes
        assert reason in " ".join(found.notes)


def test_config_json_of_both_forms(state):
    new = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 3,
        "model_args": SMALL,
        "pretrained_cfg": ABOUT,
        "label_names": ["a", "b", "c"],
    }
    found = read_timm(state, **read_timm_config(new), where="x")
    assert found.classes == ("a", "b", "c")
    old = {"architecture": "vit_tiny_patch16_224", **ABOUT, "labels": ["a", "b", "c"]}
    assert read_timm_config(old)["pretrained_cfg"]["license"] == "apache-2.0"
    assert read_timm_config(old)["label_names"] == ["a", "b", "c"]
    assert read_timm_config(old)["model_args"] == {}
    for broken in ({}, {"architecture": 3}, {**new, "model_args": [1]}):
        with pytest.raises(WeightsError, match="names no architecture"):
            read_timm_config(broken)


def test_imagenet_is_known_by_the_tag():
    state = small_state(1000)
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    found = read(state, architecture=name)
    assert found.classes is not None
    assert (len(found.classes), found.classes[0]) == (1000, "n01440764")
    assert any("imagenet-1k" in note for note in found.notes)
    assert found.preprocessing is not None
    assert found.preprocessing.crop_share == 0.9
    tagged = read(state, pretrained_cfg={"tag": "augreg_in21k_ft_in1k"})
    assert tagged.classes == found.classes
    assert read(state).classes is None
    assert read(state, pretrained_cfg={"tag": "my_in1k"}).classes is None
    assert read(small_state(999), architecture=name).classes is None


TOLERANCE = 1e-4
SMALL_VIT = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 2, "num_heads": 4}


PRESETS = ["vit_tiny_patch16_224", "vit_base_patch16_224", "vit_large_patch16_224"]
PRESETS += ["vit_base_patch32_224", "vit_small_patch16_384"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_shapes_of_timm(name):
    with torch.device("meta"):
        state = timm.create_model(name).state_dict()
        check_fit(flatten_patches(state), assemble_model(ModelConfig(**preset(name))))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_equals_timm(name, randomise):
    """In two of its blocks, of which a network has as many as the shapes say."""
    with torch.device("meta"):
        theirs = timm.create_model(name, depth=2)
    state = randomise(theirs.state_dict())
    theirs.load_state_dict(state, assign=True)
    settings = {**preset(name), "depth": 2}
    images = torch.randn(1, 3, settings["image_size"], settings["image_size"])
    assert (
        output_difference(build(flatten_patches(state), ModelConfig(**settings)), theirs, images)
        < TOLERANCE
    )


def test_to_timm_is_the_inverse_of_from_timm(randomise):
    config = ModelConfig(**SMALL_VIT, channels=4)
    state = randomise(meta_model(config).state_dict())
    theirs = to_timm(state, config)
    assert theirs["patch_embed.proj.weight"].shape == (48, 4, 8, 8)
    back = from_timm(theirs, config)
    assert all(torch.equal(back[name], state[name]) for name in state)
