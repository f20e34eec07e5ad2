"""DINO's loss and centring against a reference view by view, and its teacher."""

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vit.errors import ConfigError
from vit.tasks.dino import ITERATIONS, MOMENTUM, distillation_losses, sinkhorn_knopp
from vit.tasks.pretraining import random_views, view_layout
from vit.training.checkpoint.run_folder import stored_config
from vit.training.distributed.devices import make_accelerator
from vit.training.setup import make_training
from vit.training.train import train
from vit.weights.safetensors_io import read_tensors


def test_the_loss_is_the_mean_over_pairs_of_different_views():
    torch.manual_seed(0)
    targets = torch.randn(2, 5, 7, dtype=torch.float64).softmax(dim=-1)
    views = torch.randn(6, 5, 7, dtype=torch.float64).clamp(-1, 1)
    expected = torch.zeros(5, dtype=torch.float64)
    for image in range(5):
        terms = []
        for first, second in itertools.product(range(2), range(6)):
            if first == second:
                continue
            exponentials = [math.exp(x / 0.1) for x in views[second, image].tolist()]
            total = sum(exponentials)
            terms.append(
                -sum(
                    float(p) * math.log(e / total)
                    for p, e in zip(targets[first, image], exponentials, strict=True)
                )
            )
        expected[image] = sum(terms) / len(terms)
    torch.testing.assert_close(distillation_losses(targets, views), expected, rtol=1e-9, atol=0)


ALONE = SimpleNamespace(sum_over_processes=lambda mine: mine)


def test_prototypes_are_used_alike():
    torch.manual_seed(0)
    logits = torch.randn(2, 40, 8, dtype=torch.float64) + torch.arange(8) / 2
    expected = np.exp(logits.numpy().reshape(80, 8))
    expected /= expected.sum(axis=1, keepdims=True)
    for _ in range(ITERATIONS):
        for prototype in range(8):
            expected[:, prototype] /= expected[:, prototype].sum()
        for row in range(80):
            expected[row] /= expected[row].sum()
    found = sinkhorn_knopp(ALONE, logits)
    torch.testing.assert_close(found, torch.from_numpy(expected).view(2, 40, 8), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        found.mean(dim=(0, 1)), torch.full((8,), 1 / 8).double(), rtol=0.01, atol=0
    )
    unused = torch.zeros(2, 3, 4)
    unused[..., 2] = -200.0  # its probabilities are 0 in float32
    assert sinkhorn_knopp(ALONE, unused).isfinite().all()


def test_prototypes_are_used_alike_by_the_images_of_all_processes():
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 4, dtype=torch.float64)
    sums: list[torch.Tensor] = []  # of one process alone, of all images

    def note(mine):
        sums.append(mine)
        return mine

    whole = sinkhorn_knopp(SimpleNamespace(sum_over_processes=note), logits)
    for part in (slice(0, 2), slice(2, 6), slice(6, 6)):  # the last has no image
        totals = iter(sums)
        process = SimpleNamespace(sum_over_processes=lambda _mine, totals=totals: next(totals))
        torch.testing.assert_close(sinkhorn_knopp(process, logits[:, part]), whole[:, part])


def test_the_teacher_is_the_average_without_dropout(config_of):
    """Loss and gradients are those of a second network with the average as a teacher."""
    config = config_of("dino", num_classes=0, ema=0.5, drop_path=0.5, dropout=0.5, stem="conv")
    run = make_training(config, make_accelerator(config.run), 10, epoch_steps=5)
    network, task = run.network, run.task
    with torch.no_grad():
        for value in network.parameters():
            value += 0.1 * torch.randn_like(value)  # the average has those before
    teacher = copy.deepcopy(network)
    teacher.load_state_dict(run.average.state_dict(), strict=False)
    teacher.eval()
    images = torch.randn(6, 3, *view_layout(config, 16).image_size)
    weights, average = (
        {n: v.clone() for n, v in one.state_dict().items()} for one in (network, run.average)
    )

    network.train()
    torch.manual_seed(1)
    loss = task.loss(run, SimpleNamespace(), images, 0)
    found = torch.autograd.grad(loss, [*network.parameters()])
    assert all(module.training for module in network.modules())
    for one, before in ((network, weights), (run.average, average)):
        for name, value in one.state_dict().items():
            if "running_" not in name:
                assert torch.equal(value, before[name]), name

    layout = view_layout(config, 16)
    with torch.no_grad():
        answers = teacher((layout.split(images)[0],))[0].view(2, 6, -1)
        targets = sinkhorn_knopp(ALONE, answers / config.pretraining.teacher_temperature)
    torch.manual_seed(1)
    expected = distillation_losses(targets, random_views(run, images)).sum()
    torch.testing.assert_close(loss[0], expected)
    own = torch.autograd.grad(expected, [*network.parameters()])
    for ours, theirs in zip(found, own, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_teacher_has_a_momentum(config_of, tmp_path):
    assert config_of("dino").training.ema == 0
    folder = train(config_of("dino"), tmp_path / "run").folder
    assert stored_config(folder).training.ema == MOMENTUM
    only, _ = read_tensors(folder / "pretraining.safetensors")
    assert only["projector.prototypes.weight"].shape == (32, 8)
    with pytest.raises(ConfigError, match="ema=0: task=dino has the average as its teacher"):
        train(config_of("dino", ema=0.0), tmp_path / "none")
