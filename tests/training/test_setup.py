"""Building a training: a network with several patch sizes compiles once for each."""

from functools import partialmethod
from pathlib import Path

import pytest
import torch
import torch._dynamo.config as dynamo
from accelerate import Accelerator
from torch import nn
from torch._dynamo.testing import CompileCounter

from vit.config.parser import make_config
from vit.data.dataset_types import Sample, Splits
from vit.training.setup import make_training, steps_line


@pytest.mark.parametrize(
    ("settings", "steps", "line"),
    [
        ({"epochs": 3}, 1200, "1,200 steps in 3 epochs"),
        ({"epochs": 1}, 1, "1 step in 1 epoch"),
        (
            {"epochs": 2, "epoch_steps": 10, "batch_size": 4},
            20,
            "20 steps in 2 epochs of 10 steps, 8.0 passes over the images",
        ),
        ({"weights": "runs/x", "method": "probe"}, 0, "a linear probe, which makes no steps"),
    ],
)
def test_steps_of_a_probe_are_not_counted(settings, steps, line):
    samples = (Sample("a.png", 0),) * 10
    splits = Splits(("a", "b"), samples, samples, (), made=False, root=Path())
    assert steps_line(make_config({"data": "photos", **settings}), splits, steps) == line


@pytest.mark.slow
def test_each_patch_size_compiles_once(monkeypatch, tiny_config):
    settings = {"image_size": 120, "patch_size": 60, "depth": 1}
    settings["patch_sizes"] = (4, 5, 6, 8, 10, 12, 15, 20, 24, 30)
    config = tiny_config(**settings, drop_path=0.0, compile=True)
    graphs = CompileCounter()  # runs them as they are
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=graphs))
    sizes, counts = config.model.training_patch_sizes, []
    with dynamo.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        run = make_training(config, Accelerator(cpu=True), 10)
        run.model.train()
        for size in sizes * 3:
            run.network.patch_embed.current_patch_size = size
            run.model(torch.zeros(2, 3, 120, 120))
            counts.append(graphs.frame_count)
    assert counts[: len(sizes)] == list(range(1, len(sizes) + 1))
    assert counts[-1] == counts[2 * len(sizes) - 1]  # torch may compile the first one twice
    torch.compiler.reset()
