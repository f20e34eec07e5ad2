"""The image cache does not change a training; the number of loader processes is measured."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests.slow_cases import mostly_slow
from tests.training.runs import equal_models, events, signalled_at
from vit.errors import ConfigError
from vit.training import final_report, loader_autotune
from vit.training.distributed.devices import make_accelerator
from vit.training.setup import make_training
from vit.training.show_batch import show_batch
from vit.training.train import train


def losses(folder) -> list[float]:
    return [event["loss"] for event in events(folder, "step")]


@pytest.mark.parametrize("min_crop", mostly_slow([0.3, 1.0], 2))
def test_a_run_with_a_cache_repeats_exactly(tiny_config, tmp_path, capsys, min_crop):
    settings = {"cache": "disk", "cache_folder": str(tmp_path / "cache"), "min_crop": min_crop}
    config = tiny_config(epochs=2, **settings)
    train(config, tmp_path / "one")
    assert "cache: 36 images" in capsys.readouterr().err
    train(config, tmp_path / "two")
    assert "cache: 36 images" not in capsys.readouterr().err
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert equal_models(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["disk", "device"])
def test_an_interrupted_run_with_a_cache_resumes_to_the_same_result(tiny_config, tmp_path, cache):
    folder = {"cache_folder": str(tmp_path / "cache")} if cache == "disk" else {}
    settings = {"epochs": 2, "cache": cache, "min_crop": 0.3, **folder}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny_config(**settings), whole)
    with signalled_at(4):  # the first of the second epoch
        train(tiny_config(**settings), parts)
    train(tiny_config(**settings, workers=2), parts, resume=True)
    assert equal_models(whole, parts)
    with pytest.raises(ConfigError, match="cache='none' differs"):
        train(tiny_config(epochs=2, min_crop=0.3), parts, resume=True)


@pytest.mark.gpu
def test_trainings_with_images_on_a_gpu_follow_each_other(tiny_config, tmp_path):
    config = tiny_config(epochs=2, cache="device", min_crop=0.3, device="cuda", precision="fp32")
    train(config, tmp_path / "one")
    show_batch(config, tmp_path / "batch.png")
    train(config, tmp_path / "two")
    assert losses(tmp_path / "one") == losses(tmp_path / "two")


def test_loader_processes_are_measured_unless_given(tiny_config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loader_autotune, "time_loading", lambda *_: (0.003, 0.001))
    monkeypatch.setattr(loader_autotune, "default_workers", lambda _: 1)
    monkeypatch.setattr(loader_autotune, "time_network", lambda _run: 0.0)
    counts, original = [], final_report.EvaluationLoader

    def evaluation(*args, workers, **settings):
        counts.append(workers)
        return original(*args, workers=0, **settings)

    monkeypatch.setattr(final_report, "EvaluationLoader", evaluation)
    train(tiny_config(epochs=2, workers=None), tmp_path / "run")
    assert counts == [4, 4]  # the distances and the report are made with as many
    told = capsys.readouterr().err
    assert "loading: 4.0 ms an image, 75% of it to read its file: 4 loader processes" in told


@pytest.mark.parametrize(
    ("network", "cache", "workers"),
    [
        *((0.0105, None, 0), (0.0095, None, 1), (0.0007, None, 2), (0.0001, None, 3)),
        *((0.0105, "ram", 0), (0.0095, "ram", 1), (0.0007, "ram", 2), (0.0, None, 3)),
    ],
)
def test_there_are_no_more_loader_processes_than_needed(
    tiny_config, capsys, monkeypatch, network, cache, workers
):
    monkeypatch.setattr(loader_autotune, "time_loading", lambda *_: (0.0001, 0.0004))
    monkeypatch.setattr(loader_autotune, "time_network", lambda _run: network)
    monkeypatch.setattr(loader_autotune, "default_workers", lambda _: 2)
    accelerator = SimpleNamespace(is_main_process=True)
    run = SimpleNamespace(
        config=tiny_config(workers=None), accelerator=accelerator, processes=1, cache=cache
    )
    assert loader_autotune.choose_workers(run, []) == workers
    told = "loading: 0.5 ms an image, 4.8% of what the network takes: in this process"
    assert (told in capsys.readouterr().err) is (workers == 0)


def test_timing_the_network_changes_no_state(tiny_config):
    config = tiny_config(stem="conv")
    run = make_training(config, make_accelerator(config.run), 1)
    run.network.train()
    before = {name: value.clone() for name, value in run.network.state_dict().items()}
    random = torch.get_rng_state()
    assert 0 < loader_autotune.time_network(run) < 1
    compiled = dataclasses.replace(config, run=dataclasses.replace(config.run, compile=True))
    assert loader_autotune.time_network(dataclasses.replace(run, config=compiled)) == 0
    assert run.network.training
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in run.network.state_dict().items())
