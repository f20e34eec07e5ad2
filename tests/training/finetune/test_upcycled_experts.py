"""A dense run in, a run with experts out: upcycled, trained, cut and resumed."""

from pathlib import Path

import pytest
import torch

from tests.training import children
from tests.training.children import complete
from tests.training.runs import (
    ON_CPU,
    SIZES,
    cut_and_continued,
    equal_models,
    events,
    last_weights,
)
from vit.config.setting_layers import make_config, read_settings
from vit.errors import ConfigError, VitError
from vit.model.build import build_classifier
from vit.training.finetune.lora import add_lora
from vit.training.train import train
from vit.weights.saved_model import load_run

USUAL = {**ON_CPU, "epochs": 2}
EXPERTS = {"feedforward": "moe", "num_experts": 4}


@pytest.fixture(scope="module")
def dense(colour_data, tmp_path_factory) -> Path:
    """A run without experts that has learnt something."""
    settings = {"data": str(colour_data), **SIZES, **ON_CPU, "epochs": 3, "lr": 3e-3}
    return train(make_config(settings), tmp_path_factory.mktemp("dense") / "run").folder


@pytest.fixture
def fine(colour_data, dense, tmp_path):
    """Fine-tunes into a folder; answers with it."""

    def run(name: str = "run", **chosen) -> Path:
        given = {"data": str(colour_data), "weights": str(dense), **USUAL, **EXPERTS, **chosen}
        given = {name: value for name, value in given.items() if value is not None}
        given["feature_cache"] = str(tmp_path / "features")
        return train(make_config(given), tmp_path / name).folder

    return run


@pytest.mark.slow
def test_experts_start_equal_to_the_dense_run_and_diverge(fine, dense, capfd):
    one = fine("dense", feedforward=None, num_experts=None)
    assert "upcycled" not in capfd.readouterr().err
    other = fine("experts")
    said = capfd.readouterr().err
    assert "upcycled: the mlp of block 2 into 4 equal experts" in said
    start, expected = events(other)[0], events(one)[0]
    assert start["epoch"] == 0  # what the probe found, before the first step
    for name in ("train_loss", "val_loss"):
        assert start[name] == pytest.approx(expected[name], rel=1e-5)
    moe = last_weights(other)
    stacks = [tensor for name, tensor in moe.items() if name.endswith("mlp.experts.fc1_weight")]
    assert stacks
    assert all(len(stack.flatten(1).unique(dim=0)) == 4 for stack in stacks)
    assert load_run(other).config.feedforward == "moe"


def test_a_run_resumes_exactly_without_the_dense_one(fine, dense, tmp_path):
    whole = fine("whole", method="full")
    cut = cut_and_continued(fine, tmp_path, dense, method="full")
    first, second = last_weights(whole), last_weights(cut)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_the_written_config_repeats_the_run(fine, tmp_path):
    first = fine(layer_decay=0.5, shared_expert=True)
    stored = read_settings(first / "config.yaml")
    assert equal_models(first, train(make_config(stored), tmp_path / "again").folder)


@pytest.mark.slow
def test_two_processes_train_as_one(fine, dense, colour_data, tmp_path):
    still = {"drop_path": 0.0, "method": "full"}
    alone = fine("alone", **still)
    words = {"data": str(colour_data), "weights": str(dense), **USUAL, **EXPERTS, **still}
    complete(
        children.train, make_config(words), tmp_path / "two", log=tmp_path / "log", processes=2
    )
    for one, two in zip(events(alone), events(tmp_path / "two"), strict=True):
        assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        *(
            (
                {"method": method, "epochs": None if method == "probe" else 1},
                f"^method={method}: experts do not learn by it, .* stay equal; use --method full",
            )
            for method in ("probe", "linear", "lora")
        ),
        ({"top_k": 1}, "softmax with top_k=1 of num_experts=4: .* use top_k=2$"),
        ({"hidden_dim": 32}, "hidden_dim=32: run .* has hidden_dim=64; leave it out, or start"),
    ],
)
def test_impossible_experts_are_refused_before_anything_is_written(fine, tmp_path, chosen, message):
    with pytest.raises(VitError, match=message) as caught:
        fine(**chosen)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_with_experts_is_a_source_of_weights(fine, capfd):
    """The methods that leave experts alone have their use once the experts differ."""
    source = fine("experts", method="full", epochs=1)
    capfd.readouterr()
    settings = {"feedforward": None, "num_experts": None, "weights": str(source), "epochs": 1}
    tuned = fine("lora", method="lora", lora_rank=2, **settings)
    assert "upcycled" not in capfd.readouterr().err
    before, after = (load_run(folder).model.state_dict() for folder in (source, tuned))
    assert before.keys() == after.keys()
    for name in before:
        if ".mlp." in name:
            assert torch.equal(before[name], after[name]), name
    with pytest.raises(VitError, match=r"^feedforward=mlp: run .* has feedforward=moe, and one"):
        fine("back", **{**settings, "feedforward": "mlp"})
    with pytest.raises(VitError, match=r"^num_experts=2: run .* has num_experts=4; leave it out"):
        fine("other", **{**settings, "feedforward": "moe", "num_experts": 2})


@pytest.mark.parametrize("target", ["fc1", "fc2", "router"])
def test_lora_refuses_what_experts_would_ignore(target):
    config = make_config({**SIZES, **EXPERTS, "shared_expert": True})
    message = f"LoRA has no {target} beside stacked experts; choose from qkv, proj$"
    with pytest.raises(ConfigError, match=message):
        add_lora(build_classifier(config.model), rank=2, alpha=4.0, targets=["qkv", target])
