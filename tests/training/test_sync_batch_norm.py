"""BatchNorm's statistics: the same over two processes, averaged, kept, saved, and frozen."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.slow_cases import mostly_slow
from tests.training.children import Job, command
from tests.training.runs import SHORT, SIZES, read_events
from vit.config import ModelConfig
from vit.config.setting_layers import write_settings
from vit.errors import BadImage
from vit.model.build import build_classifier
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.training.ema import ExponentialMovingAverage, swapped_weights
from vit.training.sync_batch_norm import (
    frozen_running_stats,
    local_batch_norm,
    running_stats,
    sync_batch_norm,
)
from vit.training.train import train

STEM = {"stem": "conv", "stem_depth": 2, "num_classes": 3}
SMALL = ModelConfig(**SIZES, num_classes=3, stem="conv")


def weights(folder):
    return load_file(find_checkpoints(folder / "checkpoints")[0])


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stop_at_a_bad_image_keeps_them(
    tiny_config, colour_data, tmp_path, data_with_a_bad_image, accumulate
):
    """The step is made again on resume, with the other images of it."""
    data = data_with_a_bad_image
    config = tiny_config(**STEM, data=str(data), epochs=2, accumulate=accumulate)
    with pytest.raises(BadImage, match=r"red/3\.png"):
        train(config, tmp_path / "cut")
    shutil.copy(colour_data / "train/red/3.png", data / "train/red/3.png")
    train(config, tmp_path / "cut", resume=True)
    train(config, tmp_path / "whole")
    cut, whole = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(cut[name], value) for name, value in whole.items())


@pytest.mark.parametrize("batch_size", [pytest.param(8, marks=pytest.mark.slow), 2])
def test_two_processes_equal_one(tiny_config, tmp_path, data_with_a_bad_image, batch_size):
    """With two images a step, the bad one leaves one process without any."""
    plain = {"dropout": 0, "drop_path": 0, "mixup": 0, "cutmix": 0, "precision": "fp64"}
    plain |= {"data": str(data_with_a_bad_image), "on_bad_image": "skip"}
    config = tiny_config(**STEM, **plain, **SHORT, batch_size=batch_size)
    train(config, tmp_path / "one")
    write_settings(tmp_path / "settings.yaml", config)
    words = ["train", "-c", str(tmp_path / "settings.yaml"), "--out", str(tmp_path / "two")]
    with Job(command, words, log=tmp_path / "log", processes=2) as job:
        assert any(job.wait()), job.said()  # a failure code, of the bad image
        said = job.said()
    assert "report: " in said, said
    assert "2 x cpu" in said
    assert "red/3.png" in said
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    statistics = [name for name in one if "running_" in name]
    assert len(statistics) == 2 * 2 * 2  # mean and variance of two norms, in model and average
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-10, rtol=0)
    first, second = (read_events(tmp_path / name) for name in ("one", "two"))
    for ours, theirs in zip(first, second, strict=True):
        for name in {"loss", "grad_norm", "val_loss"} & ours.keys():
            assert theirs[name] == pytest.approx(ours[name], rel=1e-9)


def test_the_run_answers_with_averaged_statistics(tiny_config, tmp_path):
    config = tiny_config(**STEM, **SHORT)
    train(config, tmp_path / "run")
    saved, kept = load_file(tmp_path / "run/model.safetensors"), weights(tmp_path / "run")
    names = [name for name in saved if "running_" in name]
    assert len(names) == 4
    for name in names:
        assert torch.equal(saved[name], kept[f"ema/{name}"])
        assert not torch.equal(saved[name], kept[f"model/{name}"])


def test_averages_follow_and_are_exchanged():
    torch.manual_seed(0)
    model = build_classifier(SMALL).train()
    average = ExponentialMovingAverage(model, 0.9)
    before = {name: tensor.clone() for name, tensor in running_stats(model).items()}
    model(torch.randn(4, 3, 16, 16))
    average.update(10**6)
    now = {name: tensor.clone() for name, tensor in running_stats(model).items()}
    assert len(now) == 6
    for name, tensor in now.items():
        torch.testing.assert_close(average.average[name], 0.9 * before[name] + 0.1 * tensor)
    averaged = {name: tensor.clone() for name, tensor in average.average.items()}
    with swapped_weights(model, average.average):
        for name, tensor in running_stats(model).items():
            assert torch.equal(tensor, averaged[name])
    for name, tensor in running_stats(model).items():
        assert torch.equal(tensor, now[name])


def test_neither_frozen_statistics_nor_unreadable_images_count():
    model = build_classifier(SMALL).train()
    with frozen_running_stats(model):  # of images that cannot be read
        model(torch.ones(1, 3, 16, 16))
    assert not any(norm.running_mean.any() for norm in model.patch_embed.norms)
    assert all(norm.updates_statistics for norm in model.patch_embed.norms)
    model.patch_embed.requires_grad_(False)
    assert running_stats(model) == {}
    assert not any("running" in name for name in ExponentialMovingAverage(model, 0.9).average)


@pytest.mark.parametrize("method", mostly_slow(["linear", "lora"], 2))
def test_a_frozen_encoder_keeps_its_statistics(tiny_config, tmp_path, method):
    train(tiny_config(**STEM, **SHORT), tmp_path / "first")
    settings = {**STEM, **SHORT, "weights": str(tmp_path / "first")}
    train(tiny_config(**settings, method=method), tmp_path / "second")
    first, second = (
        load_file(tmp_path / f"{name}/model.safetensors") for name in ("first", "second")
    )
    names = [name for name in first if name.startswith("patch_embed.")]
    assert len(names) == 2 + 2 * 4
    for name in names:
        assert torch.equal(first[name], second[name])
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_one_process_shares_with_nobody():
    model = build_classifier(SMALL)
    sync_batch_norm(model, 1)
    assert all(norm.sum_over_processes is None for norm in model.patch_embed.norms)
    sync_batch_norm(model, 2)
    norms = model.patch_embed.norms
    assert all(norm.sum_over_processes is not None for norm in norms)
    with local_batch_norm(model):
        model.train()(torch.randn(2, 3, 16, 16))  # waits for nobody
    assert all(norm.sum_over_processes is not None for norm in norms)
