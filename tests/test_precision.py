"""One rule for devices and arithmetic."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from tests.processor import sitecustomize as processor
from vit import precision
from vit.errors import ConfigError
from vit.precision import (
    autocast,
    resolve_device,
    resolve_precision,
    should_benchmark_bf16,
    usable_devices,
)


def test_without_a_name_the_first_usable_device_is_taken():
    assert str(resolve_device()) == usable_devices()[0]
    assert usable_devices()[-1] == "cpu"
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", ""])
def test_an_unusable_device_is_refused_with_the_usable_ones(name):
    with pytest.raises(ConfigError, match=f"device='{name}' cannot be used.*cpu"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_named_precision_is_taken_as_it_is(name):
    assert resolve_precision(name, "cpu") == name


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="choose one of auto, fp32, bf16, fp16"):
        resolve_precision("bf17", "cpu")


@pytest.mark.parametrize("macos", [13, 14])
def test_bf16_of_apples_gpu_needs_macos_14(macos, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *least: (macos, 0) >= least)
    assert resolve_precision("auto", "mps") == "fp32"
    with nullcontext() if macos == 14 else pytest.raises(ConfigError, match="from macOS 14 on"):
        assert resolve_precision("bf16", "mps") == "bf16"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("avx512_bf16 AMD EPYC 9R14", "bf16"),
        ("avx512_bf16 vendor_id : AuthenticAMD", "bf16"),
        ("avx512_bf16 amx_bf16 Intel Xeon", "bf16"),
        ("avx512_bf16 Intel Xeon", "fp32"),
        ("neon bf16", "bf16"),
        ("avx2 AMD Ryzen", "fp32"),
        ("", "fp32"),
    ],
)
def test_auto_is_bf16_where_the_cpu_is_faster_in_it(monkeypatch, words, expected):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(precision, "cpu_features", lambda: set(words.split()))
    assert resolve_precision("auto", "cpu") == expected


@pytest.mark.slow
@pytest.mark.auto_precision
def test_a_pretended_processor_is_that_of_processes_too(monkeypatch, processor_asked):
    for kind in ("fp32", "bf16"):
        monkeypatch.setenv(processor.KIND, kind)
        assert resolve_precision("auto", "cpu") == kind
        assert should_benchmark_bf16("cpu") == (kind == "bf16")
    processor_asked.unlink()
    code = "from vit.precision import resolve_precision; print(resolve_precision('auto', 'cpu'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{kind}\n", "")
    assert processor_asked.exists()  # so that a test without the marker fails


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_autocast_decides_the_type_of_products(name):
    layer, inputs = torch.nn.Linear(4, 4), torch.ones(1, 4)
    with autocast("bf16", "cpu"), autocast(name, "cpu"):
        assert layer(inputs).dtype == precision.DTYPES[name]
