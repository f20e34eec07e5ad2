"""Devices and precisions are set up and logged; unsupported ones are refused."""

import pytest
import torch

from tests.training.runs import SHORT, equal_models
from vit.errors import ConfigError
from vit.training.checkpoint.checkpoint import find_checkpoints
from vit.training.distributed.devices import arithmetic, inference_precision
from vit.training.train import train
from vit.weights.safetensors_io import read_tensors

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("tf32", "precision='tf32': needs an NVIDIA GPU"),
        ("fp16", "precision='fp16': has no loss scaling on a CPU"),
    ],
)
def test_a_precision_that_cpus_lack_is_refused(tiny_config, tmp_path, precision, message):
    with pytest.raises(ConfigError, match=message):
        train(tiny_config(precision=precision), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_float64_is_logged_and_stored(tiny_config, tmp_path, capsys):
    train(tiny_config(precision="fp64", **SHORT), tmp_path / "run")
    assert "1 x cpu, fp64, batch 12" in capsys.readouterr().err
    tensors, _ = read_tensors(find_checkpoints(tmp_path / "run/checkpoints")[0])
    floats = [name for name, tensor in tensors.items() if not name.endswith("/step")]
    assert all(tensors[name].dtype == torch.float64 for name in floats)
    model, _ = read_tensors(tmp_path / "run/model.safetensors")
    assert {tensor.dtype for tensor in model.values()} == {torch.float32}


def test_inference_uses_the_nearest_precision():
    assert arithmetic("fp64", CPU) == "fp64"
    assert inference_precision("fp64", CPU) == inference_precision("tf32", CPU) == "fp32"
    assert inference_precision("bf16", CPU) == "bf16"


def test_deterministic_is_set_for_its_run_only(tiny_config, tmp_path, capsys):
    train(tiny_config(**SHORT, deterministic=True), tmp_path / "a")
    assert torch.are_deterministic_algorithms_enabled()
    assert "fp32, deterministic, batch 12" in capsys.readouterr().err
    train(tiny_config(**SHORT), tmp_path / "b")
    assert not torch.are_deterministic_algorithms_enabled()
    assert equal_models(tmp_path / "a", tmp_path / "b")  # on a CPU it changes nothing


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_deterministic_gpu_repeats_itself(tiny_config, tmp_path, precision):
    config = tiny_config(device="cuda", precision=precision, deterministic=True, dim=64)
    train(config, tmp_path / "a")
    train(config, tmp_path / "b")
    assert equal_models(tmp_path / "a", tmp_path / "b")
