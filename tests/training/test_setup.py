"""Building a training: what is compiled, and how often."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo.config as dynamo
from accelerate import Accelerator
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from vit.config.setting_layers import make_config
from vit.data.dataset_types import Sample, Splits
from vit.model.blocks import DropPath
from vit.training.setup import make_training, schedule_warnings, steps_line


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


# torch's compiler looks at the gradient of a block's input; in a process that does not raise
# warnings nothing is seen of it
NON_LEAF = "ignore:The .grad attribute of a Tensor that is not a leaf"


def test_durations_beyond_the_end_of_a_run_are_warned_of():
    settings = {"data": "photos", "epochs": 5, "schedule": "wsd", "start_image_size": 112}
    assert schedule_warnings(make_config({**settings, "cooldown_epochs": 5})) == []
    assert schedule_warnings(
        make_config({**settings, "cooldown_epochs": 20, "growth_epochs": 5.5})
    ) == [
        "warning: growth_epochs=5.5 is more than epochs=5: images never reach image_size",
        "warning: cooldown_epochs=20 is more than epochs=5: the learning rate never reaches lr",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings(NON_LEAF)
def test_each_patch_size_compiles_once(monkeypatch, tiny_config):
    settings = {"image_size": 120, "patch_size": 60, "depth": 1}
    settings["patch_sizes"] = (4, 5, 6, 8, 10, 12, 15, 20, 24, 30)
    config = tiny_config(**settings, drop_path=0.0, compile=True)
    graphs = CompileCounter()  # runs them as they are
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
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


@pytest.mark.slow
@pytest.mark.filterwarnings(NON_LEAF)
@pytest.mark.parametrize(
    ("options", "kinds"), [({}, 1), ({"feedforward": "moe"}, 2), ({"position": "rotary"}, 1)]
)
def test_one_graph_of_a_block_serves_all_blocks_at_each_size(
    monkeypatch, tiny_config, options, kinds
):
    settings = {"image_size": 32, "patch_size": 8, "depth": 4, "drop_path": 0.2, **options}
    config = tiny_config(**settings, start_image_size=16, compile=True)
    graphs = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    counts = []
    with dynamo.patch(fail_on_recompile_limit_hit=True):
        run = make_training(config, Accelerator(cpu=True), 10)
        run.model.train()
        for side in (16, 24, 32, 16, 32):
            run.model(torch.rand(2, 3, side, side)).sum().backward()
            counts.append(graphs.frame_count)
        run.model.eval()
        with torch.inference_mode():
            found = run.model(images := torch.rand(2, 3, 32, 32))
    assert counts == [kinds, 2 * kinds, 3 * kinds, 3 * kinds, 3 * kinds]
    torch.compiler.reset()
    for block in run.network.blocks:
        del block.forward
    with torch.inference_mode():
        torch.testing.assert_close(found, run.model(images))


def test_compiled_drop_path_skips_as_many_branches_as_it_should():
    torch.manual_seed(0)
    layer = DropPath(0.25).train()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    found = compiled(torch.ones(4000, 2, 3))
    torch.compiler.reset()
    assert found.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (found.flatten(1).std(dim=1) == 0).all()  # all of an image or nothing
    assert found.mean() == pytest.approx(1, abs=0.03)
