"""Two processes on the CPU train the same network as one, and count each image once."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.training.children import Job, command, complete
from tests.training.runs import assert_equal_runs, read_events
from vit.commands.main import requested_processes
from vit.config import Config
from vit.config.setting_layers import write_settings
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.training.train import train

CPU = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}
ROOT = Path(__file__).parents[3]
TORCHS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PIPES: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True}
PIPES["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}


def words_of(config: Config, folder: Path) -> list[str]:
    """The command line of a training up to its folder, with settings that are written."""
    write_settings(folder / "settings.yaml", config)
    return ["-c", str(folder / "settings.yaml"), "--out"]


def refusal_of_two(words: list[str], log: Path) -> str:
    """The line by which two processes of a training say that it failed."""
    with Job(command, words, log=log, processes=2) as job:
        assert all(job.wait()), job.said()
        lines = [line for line in job.said().splitlines() if line.startswith("vit train")]
    assert len(lines) == 1, job.said()
    return lines[0]


def launch(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
    line += ["--num_processes", str(processes), "--num_machines", "1"]
    line += ["--mixed_precision", "no", "--dynamo_backend", "no", str(ROOT / "train.py"), *words]
    return subprocess.run(line, stdout=subprocess.PIPE, timeout=300, **PIPES)


@pytest.mark.slow
def test_two_processes_equal_one(tiny_config, tmp_path):
    config = tiny_config(
        num_classes=3, dropout=0, drop_path=0, batch_size=8, epochs=2, accumulate=2, workers=1
    )
    train(config, tmp_path / "one")
    done = launch(2, *words_of(config, tmp_path), str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert "2 x cpu" in done.stderr
    assert "of 21 images" in done.stderr  # 21 does not divide by 2
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-4, rtol=0)
    first, second = (read_events(tmp_path / name) for name in ("one", "two"))
    assert len(first) == len(second) == 2 * 4 + 2
    for ours, theirs in zip(first, second, strict=True):
        assert ours.keys() == theirs.keys()
        for name in {"loss", "train_loss", "val_loss"} & ours.keys():
            assert abs(ours[name] - theirs[name]) < 1e-4
        for name in {"event", "step", "epoch", "lr", "val_images"} & ours.keys():
            assert ours[name] == theirs[name]


def test_the_environment_of_torchs_launcher_needs_no_device(tiny_config, tmp_path):
    config = tiny_config(device="auto", num_classes=3, epochs=1, warmup_epochs=0)
    words = ["train", *words_of(config, tmp_path), str(tmp_path / "run")]
    torchs = {"ACCELERATE_USE_CPU": None, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    said = complete(command, words, log=tmp_path / "log", processes=2, variables=torchs)
    assert "2 x cpu" in said


def test_both_processes_stop_at_a_bad_image_of_one(tiny_config, tmp_path, data_with_a_bad_image):
    config = tiny_config(device="auto", data=str(data_with_a_bad_image), num_classes=3)
    words = ["train", *words_of(config, tmp_path), str(tmp_path / "run")]
    assert "red/3.png" in refusal_of_two(words, tmp_path / "log")
    assert find_checkpoints(tmp_path / "run/checkpoints")


@pytest.mark.auto_precision
def test_one_of_two_processes_prints_the_error(tmp_path):
    words = ["train", "nowhere", "--out", str(tmp_path / "run")]
    assert "nowhere: no such folder" in refusal_of_two(words, tmp_path / "log")


@pytest.mark.slow
def test_torchs_launcher_restarts_a_killed_process(tiny_config, tmp_path):
    config = tiny_config(device="auto", num_classes=3, epochs=12, checkpoint_steps=2)
    line = [*TORCHS, "--max-restarts", "1", str(ROOT / "train.py"), "--resume"]
    line += words_of(config, tmp_path)
    whole = subprocess.run([*line, str(tmp_path / "whole")], timeout=300, **PIPES)
    assert whole.returncode == 0, whole.stderr
    assert "2 x cpu" in whole.stderr
    folder = tmp_path / "parts"
    with subprocess.Popen([*line, str(folder)], **PIPES) as launcher:
        while not find_checkpoints(folder / "checkpoints") and launcher.poll() is None:
            time.sleep(0.01)
        processes = psutil.Process(launcher.pid).children()
        assert len(processes) == 2
        processes[1].kill()
        said = launcher.communicate(timeout=300)[1]
    assert launcher.returncode == 0, said
    assert "resuming at step" in said
    assert_equal_runs(tmp_path / "whole", folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_counts_once(tiny_config, tmp_path, number):
    # long steps, so that the launcher's signal comes before the first one was heeded
    slow = {"image_size": 224, "dim": 64, "depth": 4, "batch_size": 24}
    config = tiny_config(device="auto", num_classes=3, epochs=1500, checkpoint_steps=2, **slow)
    line = [*TORCHS, str(ROOT / "train.py"), *words_of(config, tmp_path), str(tmp_path / "run")]
    with subprocess.Popen(line, **PIPES) as launcher:
        while not find_checkpoints(tmp_path / "run/checkpoints") and launcher.poll() is None:
            time.sleep(0.01)
        # as systemd and `scancel --full` do; the launcher then sends it once more
        for process in (*psutil.Process(launcher.pid).children(), launcher):
            process.send_signal(number)
        said = launcher.communicate(timeout=300)[1]
    told = re.search(r"vit train: interrupted at step (\d+) of 1500", said)
    assert told, said
    newest = find_checkpoints(tmp_path / "run/checkpoints")[0]
    assert newest.name == f"step-{int(told[1]):08d}.safetensors"


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
def test_the_number_of_processes_comes_from_the_environment(environment, parent, count):
    assert requested_processes(environment, parent) == count
