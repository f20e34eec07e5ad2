"""Device and precision of training and inference: resolving `auto`, and autocast."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import torch

from vit.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# names in torch.cpu.get_capabilities and /proc/cpuinfo: matrix units (AMX), then ARM
FAST_BF16 = frozenset({"amx_bf16", "bf16", "sve_bf16"})
AMD = frozenset({"AMD", "AuthenticAMD"})


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """`x`, in float32 if it is in half precision: for losses, whose sums are long."""
    return x.float() if x.dtype.itemsize < 4 else x


def resolve_device(name: torch.device | str | None = None) -> torch.device:
    """The device called `name`; by default the best available: CUDA, then MPS, then CPU."""
    here = usable_devices()
    if name is None:
        return torch.device(here[0])
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        raise ConfigError(
            f"device={str(name)!r} cannot be used on this machine, which has {', '.join(here)}; "
            "leave it out for the best one"
        ) from None
    return device


def usable_devices() -> list[str]:
    """Available devices, the fastest type first."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*cuda, *mps, "cpu"]


def resolve_precision(name: str, device: torch.device | str) -> Precision:
    """The precision of `name` on `device`; `auto` is bf16 if the hardware supports it, else fp32.

    Emulated bf16 is slower than float32 and less precise, so `auto` never chooses it. An explicit
    precision is returned unchanged, or refused.
    """
    if name == "auto":
        return "bf16" if has_bf16(torch.device(device)) else "fp32"
    apple = name == "bf16" and torch.device(device).type == "mps"
    if apple and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise ConfigError("precision='bf16': MPS has it from macOS 14 on; use fp32")
    for known in DTYPES:
        if name == known:
            return known
    raise ConfigError(f"precision={name!r}: choose one of auto, {', '.join(DTYPES)}")


def should_benchmark_bf16(device: torch.device | str) -> bool:
    """Whether bf16 on `device` may be faster or slower than float32, so that it must be measured.

    True for CPUs with AVX512-BF16 or AMX: on some bf16 is twice as fast, on others half, and a
    virtual machine may hide AMX. A GPU with bf16 is always faster with it.
    """
    cpu = torch.device(device).type == "cpu"
    return cpu and has_onednn() and bool(cpu_features() & (FAST_BF16 | {"avx512_bf16"}))


def has_onednn() -> bool:
    """Whether torch has oneDNN, without which it does not use a CPU's bf16 instructions."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def autocast(precision: Precision, device: torch.device | str) -> AbstractContextManager[object]:
    """Context manager that runs matrix products in `precision`; fp32 disables autocast."""
    kind = torch.device(device).type
    if precision == "fp32":
        return torch.autocast(kind, enabled=False)
    return torch.autocast(kind, dtype=DTYPES[precision])


def has_bf16(device: torch.device) -> bool:
    """Whether `device` has bf16 matrix products in hardware that are faster than float32."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and has_onednn() and _cpu_has_fast_bf16()


def _cpu_has_fast_bf16() -> bool:
    words = cpu_features()
    # AVX512-BF16 runs at twice the rate of float32 on Zen 4, but at half of it on Intel, whose
    # AMX a virtual machine may hide (80 against 140 GFLOP/s on a core of Emerald Rapids)
    return bool(words & FAST_BF16) or ("avx512_bf16" in words and bool(words & AMD))


def cpu_features() -> set[str]:
    """Feature flags and vendor name of the CPU."""
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        features = {name for name, here in found.items() if here is True}
        return features | set(str(found.get("cpu_name", "")).split())
    cpuinfo = Path("/proc/cpuinfo")  # torch before 2.11, on Linux
    return set(cpuinfo.read_text(encoding="utf-8").split()) if cpuinfo.exists() else set()
