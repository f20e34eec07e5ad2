"""What run folders hold, runs that are cut, and the settings of small ones."""

import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from vit.config.setting_layers import make_config, read_settings
from vit.stop_signals import Interrupted
from vit.training import training_loop
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.training.train import train
from vit.training.trainer import Trainer
from vit.weights.safetensors_io import read_tensors

SIZES = {"image_size": 16, "patch_size": 8, "dim": 16, "depth": 2, "num_heads": 2}
ON_CPU = {"device": "cpu", "workers": 0, "precision": "fp32", "batch_size": 12}
SHORT: dict[str, Any] = {"epochs": 1, "warmup_epochs": 0}


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [*map(json.loads, lines)]


def events(folder: Path, kind: str = "epoch") -> list[dict[str, Any]]:
    """The events of one kind in metrics.jsonl."""
    return [event for event in read_events(folder) if event["event"] == kind]


def read_report(folder: Path) -> str:
    """The page of a run."""
    return (folder / "report.html").read_text(encoding="utf-8")


def last_weights(folder: Path) -> dict[str, Tensor]:
    """Tensors of the newest checkpoint, those of the optimiser too."""
    return read_tensors(find_checkpoints(folder / "checkpoints")[0])[0]


def equal_models(*folders: Path) -> bool:
    """Whether runs answer with the same weights, to the byte."""
    return len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1


def assert_equal_runs(one: Path, other: Path) -> None:
    """Equal weights, and equal events but for their times."""
    times = {"images_per_second", "data_wait", "seconds"}
    assert equal_models(one, other)
    first, second = (
        [{name: event[name] for name in event.keys() - times} for event in read_events(folder)]
        for folder in (one, other)
    )
    assert first == second


@contextlib.contextmanager
def signalled_at(
    step: int, number: int = signal.SIGTERM
) -> Iterator[pytest.ExceptionInfo[Interrupted]]:
    """A training in it gets a signal in a given step, once, and stops."""
    set_lr, steps = training_loop.set_lr, itertools.count(1)

    def signalling(optimizer, lr):
        if next(steps) == step:
            os.kill(os.getpid(), number)
        set_lr(optimizer, lr)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Interrupted) as stopped:
        patched.setattr(training_loop, "set_lr", signalling)
        yield stopped


def cut_and_continued(fine: Callable[..., Path], folder: Path, source: Path, **settings) -> Path:
    """The run `fine("cut")` in `folder`, cut after an epoch, and continued without its `source`."""
    copy = shutil.copytree(source, folder / "source")
    finish = Trainer.finish_epoch

    def interrupted(self, *arguments):
        finish(self, *arguments)
        if self.epoch == 1:
            self.checkpoints.wait()
            raise Interrupted("stopped", 15)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(Trainer, "finish_epoch", interrupted)
        fine("cut", weights=str(copy), **settings)
    shutil.rmtree(copy)
    stored = read_settings(folder / "cut/config.yaml")
    return train(make_config(stored), folder / "cut", resume=True).folder
