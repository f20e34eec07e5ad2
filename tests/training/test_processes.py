"""Two processes on the CPU train the same network as one, and count each picture once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vit.commands.launching import processes_asked
from vit.settings import write_settings
from vit.training.checkpoint import find_checkpoints
from vit.training.train import train

CPU = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}
ROOT = Path(__file__).parents[2]


def launch(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
    command += ["--num_processes", str(processes), "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", str(ROOT / "train.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_two_processes_equal_one(tiny_config, tmp_path):
    config = tiny_config(
        num_classes=3, dropout=0, drop_path=0, batch_size=8, epochs=2, accumulate=2, workers=1
    )
    train(config, tmp_path / "one")
    write_settings(tmp_path / "settings.yaml", config)
    done = launch(2, "-c", str(tmp_path / "settings.yaml"), "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert "2 x cpu" in done.stderr
    assert "of 21 pictures" in done.stderr  # 21 does not divide by 2
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-4, rtol=0)
    first, second = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(first) == len(second) == 2
    for ours, theirs in zip(first, second, strict=True):
        assert abs(ours["train_loss"] - theirs["train_loss"]) < 1e-4
        assert abs(ours["val_loss"] - theirs["val_loss"]) < 1e-4
        assert ours["lr"] == theirs["lr"]


def test_torchs_launcher_needs_no_device(tiny_config, tmp_path):
    config = tiny_config(device="auto", num_classes=3, epochs=1, warmup_epochs=0)
    write_settings(tmp_path / "settings.yaml", config)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", str(ROOT / "train.py"), "-c", str(tmp_path / "settings.yaml")]
    command += ["--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 x cpu" in done.stderr


def test_both_stop_at_a_bad_picture_that_one_has_met(
    tiny_config, tmp_path, data_with_a_bad_picture
):
    config = tiny_config(device="auto", data=str(data_with_a_bad_picture), num_classes=3)
    write_settings(tmp_path / "settings.yaml", config)
    done = launch(2, "-c", str(tmp_path / "settings.yaml"), "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("vit train")]
    assert len(said) == 1
    assert "red/3.png" in said[0]
    assert find_checkpoints(tmp_path / "run/checkpoints")


def test_one_of_two_processes_says_what_is_wrong(tmp_path):
    done = launch(2, "nowhere", "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("vit train")]
    assert len(said) == 1
    assert "nowhere: no such folder" in said[0]


@pytest.mark.parametrize(
    ("environment", "parent", "count"),
    [
        ({}, ["accelerate", "launch", "--num_processes", "2", "train.py"], 1),
        (CPU, ["bash"], 1),
        (CPU, ["python", "/bin/accelerate", "launch", "--num_processes", "2", "train.py"], 2),
        (CPU, ["accelerate", "launch", "--cpu", "--num_processes=4", "train.py"], 4),
        ({**CPU, "WORLD_SIZE": "2"}, ["accelerate", "launch", "--num_processes", "2"], 1),
    ],
)
def test_how_many_processes_were_asked_for(environment, parent, count):
    assert processes_asked(environment, parent) == count
