"""FSDP, on two CPU processes: the weights of the whole run, checkpoints that any number reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.children import Job, command
from tests.training.runs import read_events
from vit.config import Config
from vit.config.setting_layers import write_settings
from vit.config.stored_config import stored_config
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.training.train import train

FSDP = {
    "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "PreNormBlock",
}
ROUNDING = 1e-10 if torch.__version__ >= "2.9" else 1e-6  # up to 4e-8 was seen
PLAIN = {"dropout": 0, "drop_path": 0, "batch_size": 8, "precision": "fp64", "num_classes": 3}


def launch(config: Config, out: Path, *words: str, **variables: str) -> tuple[list[int], str]:
    """The exit codes of two processes of `vit train` under FSDP, and what they wrote."""
    settings, log = out.with_suffix(".yaml"), out.with_suffix(".log")
    write_settings(settings, config)
    line = ["train", "-c", str(settings), "--out", str(out), *words]
    with Job(command, line, log=log, processes=2, variables={**FSDP, **variables}) as job:
        return job.wait(), job.said()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(find_checkpoints(folder / "checkpoints")[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"position": "learned"},
        {"position": "sinusoidal_2d"},
        {"patch_sizes": [2, 4]},
        {"stem": "conv", "ema": 0.9},
        {"feedforward": "moe", "num_experts": 4, "moe_every": 1, "balance_loss": 0.1},
    ],
    ids=str,
)
def test_a_sharded_run_trains_like_a_whole_one(tiny_config, tmp_path, settings):
    assert_same(tiny_config(**PLAIN, **settings, accumulate=2), tmp_path)


@pytest.mark.slow
def test_a_sharded_multilabel_run_trains_like_a_whole_one(tiny_config, several_list, tmp_path):
    multilabel = {"data": str(several_list), "task": "multilabel"}
    assert_same(tiny_config(**PLAIN, **multilabel), tmp_path)


@pytest.mark.slow
def test_a_sharded_teacher_answers_like_a_whole_one(tiny_config, tmp_path):
    pretraining = {"task": "dino", "prototypes": 32, "num_classes": 0, "ema": 0.9}
    network = {"pooling": "mean", "class_token": False, "mixup": 0, "cutmix": 0}
    assert_same(tiny_config(**{**PLAIN, **pretraining, **network}), tmp_path)


def assert_same(config, tmp_path) -> None:
    """One process and two that have a piece each see the same losses, and end alike."""
    train(config, tmp_path / "one")
    codes, said = launch(config, tmp_path / "two")
    assert codes == [0, 0], said
    assert "FSDP" in said
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=ROUNDING, rtol=0)
    first, second = (read_events(tmp_path / name) for name in ("one", "two"))
    for ours, theirs in zip(first, second, strict=True):
        assert ours.keys() == theirs.keys()
        for name in {"loss", "grad_norm", "val_loss", "train_loss", "val_map"} & ours.keys():
            assert theirs[name] == pytest.approx(ours[name], rel=10 * ROUNDING)


@pytest.mark.slow
def test_a_planned_run_may_be_sharded(colour_data, tmp_path):
    """The plan measures whole networks, and chooses an optimiser that needs no whole matrix."""
    out, log = tmp_path / "run", tmp_path / "log"
    sizes = ["--image-size", "16", "--patch-size", "8", "--dim", "32", "--depth", "2"]
    line = ["train", str(colour_data), *sizes, "--num-heads", "2", "--epochs", "1"]
    words = [*line, "--out", str(out), "--device", "cpu", "--precision", "fp32"]
    with Job(command, words, log=log, processes=2, variables=FSDP) as job:
        codes, said = job.wait(), job.said()
    assert codes == [0, 0], said
    assert "in pieces (FSDP)" in said
    assert stored_config(out).training.optimizer == "adamw"


@pytest.mark.slow
def test_sharded_and_whole_runs_resume_each_other(tiny_config, tmp_path):
    config = tiny_config(**PLAIN)
    train(config, tmp_path / "whole")

    codes, said = launch(config, tmp_path / "mixed")
    assert codes == [0, 0], said
    # what two processes left after the second epoch, one goes on from, and the other way round
    for path in find_checkpoints(tmp_path / "mixed/checkpoints")[:1]:
        path.unlink()
    train(config, tmp_path / "mixed", resume=True)
    for path in find_checkpoints(tmp_path / "mixed/checkpoints")[:1]:
        path.unlink()
    codes, said = launch(config, tmp_path / "mixed", "--resume")
    assert codes == [0, 0], said
    assert said.count("resuming at step 8") == 1
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "mixed")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("change", "variables", "message"),
    [
        ({"optimizer": "muon"}, {}, "optimizer='muon': under FSDP use adamw"),
        ({}, {"FSDP_VERSION": "1"}, "FSDP of version 1 is not supported"),
    ],
)
def test_settings_without_fsdp_support_are_refused(
    tiny_config, tmp_path, change, variables, message
):
    codes, said = launch(tiny_config(**{**PLAIN, **change}), tmp_path / "run", **variables)
    assert all(codes)
    (line,) = (line for line in said.splitlines() if line.startswith("vit train"))
    assert message in line
