"""What timm knows of a network is read from the cache, and is what timm says."""

import sys

import pytest
import timm

from vit.weights.formats import timm_cache, timm_weights
from vit.weights.formats.timm_weights import read_timm

SMALL = {"embed_dim": 64, "depth": 1, "num_heads": 4, "img_size": 32, "patch_size": 8}
ROTARY = {"embed_dim": 64, "depth": 1, "num_heads": 2, "img_size": 32, "patch_size": 8}


@pytest.fixture
def without_timm(monkeypatch, tmp_path):
    """An empty cache, and a process that looks as if it had not imported timm."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm")
    asked = []
    ask = timm_weights.timm_facts

    def counted(*args, **options):
        asked.append(args[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "timm", timm)
            return ask(*args, **options)

    monkeypatch.setattr(timm_weights, "timm_facts", counted)
    return asked


@pytest.mark.parametrize(
    ("name", "args"),
    [("vit_tiny_patch16_224", SMALL), ("eva02_tiny_patch14_224", ROTARY)],
)
def test_a_second_reading_is_equal_and_asks_timm_nothing(without_timm, name, args):
    about = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7), "crop_pct": 0.9, "license": "mit"}
    state = timm.create_model(name, **args, num_classes=3).state_dict()

    def read(**changes):
        options = {"model_args": args, "pretrained_cfg": about, "where": "x", **changes}
        return read_timm(state, architecture=name, **options)

    first, second = read(), read()
    assert without_timm == [name]
    assert first.config == second.config
    assert (first.preprocessing, first.notes) == (second.preprocessing, second.notes)
    assert first.state.keys() == second.state.keys()
    assert all(bool((first.state[key] == second.state[key]).all()) for key in first.state)
    assert read(pretrained_cfg={**about, "crop_pct": 0.8}).preprocessing != first.preprocessing
    assert without_timm == [name, name]


def test_a_tag_names_the_same_classes_from_the_cache(without_timm):
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=1000)
    first, second = (
        read_timm(model.state_dict(), architecture=name, model_args={"depth": 1}, where="x")
        for _ in range(2)
    )
    assert without_timm == [name]
    assert first.classes == second.classes
    assert len(first.classes) == 1000


def test_a_damaged_file_and_another_version_of_timm_are_computed_again(
    without_timm, monkeypatch, tmp_path
):
    state = timm.create_model("vit_tiny_patch16_224", **SMALL).state_dict()

    def read():
        options = {"model_args": SMALL, "where": "x"}
        return read_timm(state, architecture="vit_tiny_patch16_224", **options)

    read()
    (file,) = tmp_path.rglob("*.json")
    file.write_text(file.read_text()[:-20])
    read()
    read()
    assert len(without_timm) == 2
    monkeypatch.setattr(timm_cache, "version", lambda _name: "0")
    read()
    assert len(without_timm) == 3


def test_a_cache_that_cannot_be_written_changes_nothing(without_timm, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    state = timm.create_model("vit_tiny_patch16_224", **SMALL).state_dict()
    for _ in range(2):
        read_timm(state, architecture="vit_tiny_patch16_224", model_args=SMALL, where="x")
    assert len(without_timm) == 2
