"""What run folders hold, and a run that is cut and continued."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from vit.config.setting_layers import make_config, read_settings
from vit.stop_signals import Interrupted
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.training.train import train
from vit.training.trainer import Trainer
from vit.weights.safetensors_io import read_tensors


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [*map(json.loads, lines)]


def events(folder: Path, kind: str = "epoch") -> list[dict[str, Any]]:
    """The events of one kind in metrics.jsonl."""
    return [event for event in read_events(folder) if event["event"] == kind]


def last_weights(folder: Path) -> dict[str, Tensor]:
    """Tensors of the newest checkpoint, those of the optimiser too."""
    return read_tensors(find_checkpoints(folder / "checkpoints")[0])[0]


def cut_and_continued(fine: Callable[..., Path], folder: Path, source: Path, **settings) -> Path:
    """The run `fine("cut")` in `folder`, cut after an epoch, and continued without its `source`.

    Args:
        fine: Fine-tunes a copy of the weights `source` to `folder`/NAME.
    """
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
