"""Devices of a run, and their floating-point precision."""

import atexit
import datetime
import os

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from torch.optim import Optimizer

from vit.config import RunConfig
from vit.errors import ConfigError, RunError
from vit.precision import Precision, resolve_device, resolve_precision
from vit.training.distributed.fsdp import shard_on_cpus

# accelerate's mixed precisions; the others are configured by `configure_precision`
MIXED = {"bf16": "bf16", "fp16": "fp16"}
# processes wait while one of them reads a large dataset
PROCESS_TIMEOUT = datetime.timedelta(hours=1)
AMPERE = (8, 0)
DYNAMO_DISABLED = "__dynamo_disable"
"""Attribute in which torch keeps a function that its compiler leaves alone."""


def make_accelerator(config: RunConfig) -> Accelerator:
    """Create the accelerator: the devices of this process, in their precision."""
    chosen = None if config.device == "auto" else config.device
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if chosen and ":" in chosen and started > 1:
        raise ConfigError(
            f"device={chosen!r}: {started} processes use a device each; give --device cuda or cpu"
        )
    if started > 1 and chosen == "cuda" and torch.cuda.is_available():
        # not the first GPU for all: each would hold some of its memory
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if not config.compile:
        defer_compiler_import()
    device = resolve_device(chosen)
    if chosen and device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    # accelerate connects processes on CPUs only with cpu=True, whatever the environment says
    on_cpu = device.type == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    precision = arithmetic(config.precision, torch.device("cpu") if on_cpu else device)
    configure_precision(precision, deterministic=config.deterministic)
    reconnect("gloo" if on_cpu else "nccl")
    # an earlier training in this Python process may have had another device or precision
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=MIXED.get(precision, "no"),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PROCESS_TIMEOUT)],
    )
    if on_cpu and accelerator.num_processes > 1:
        atexit.unregister(leave_process_group)
        atexit.register(leave_process_group)
        # gloo is ready in one process before the others: one that ends at once, with an error in
        # the data, would end them while they connect (torch 2.15: 3 of 150 starts)
        accelerator.wait_for_everyone()
    shard_on_cpus(
        accelerator, requested=os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    )
    if accelerator.num_processes != started:
        raise RunError(
            f"{started} processes were started, and {accelerator.num_processes} can work together "
            f"on device={config.device}: start one, or give --device"
        )
    return accelerator


def leave_process_group() -> None:
    """Destroy the process group before Python exits.

    Otherwise threads of gloo sometimes abort the process during its C++ shutdown (torch 2.15: one
    exit in six of an empty program).
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def reconnect(backend: str) -> None:
    """Create the process group after torch's launcher has restarted the processes.

    The launcher reuses its store, which still has the addresses of the old processes (torch 2.15):
    each attempt gets a prefix of its own.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not attempt or torch.distributed.is_initialized():
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=PROCESS_TIMEOUT)
        torch.distributed.init_process_group(
            backend,
            store=PrefixStore(f"attempt {attempt}", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=PROCESS_TIMEOUT,
        )


def arithmetic(name: str, device: torch.device) -> str:
    """Resolve `--precision name` on `device` to fp32, tf32, bf16, fp16 or fp64."""
    if name == "tf32":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < AMPERE:
            raise ConfigError(
                "precision='tf32': needs an NVIDIA GPU of compute capability 8 or more; use fp32"
            )
        return name
    if name == "fp64":
        if device.type == "mps":
            raise ConfigError("precision='fp64': MPS has none; use fp32, or --device cpu")
        return name
    precision = resolve_precision(name, device)
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError("precision='fp16': has no loss scaling on a CPU; use bf16 or fp32")
    return precision


def configure_precision(precision: str, *, deterministic: bool) -> None:
    """Configure torch for `precision`, and for reproducible kernels if `deterministic`."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if deterministic:
        # read when cuBLAS starts; required by PyTorch's notes on reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)  # imports torch's compiler, for a second
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # the order of sums in their backward passes is not deterministic
    torch.backends.cuda.enable_mem_efficient_sdp(not deterministic)
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)


def defer_compiler_import() -> None:
    """Let optimisers be built without importing torch's compiler, which takes more than a second.

    torch imports it (2.8 to 2.15) to exclude these methods from compilation, even where nothing is
    compiled. AdamW still imports it in its first step; Muon does not.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, DYNAMO_DISABLED):
            setattr(method, DYNAMO_DISABLED, method)


def inference_precision(name: str, device: torch.device) -> Precision:
    """The precision of inference that is closest to training in `name`."""
    return "fp32" if name in ("tf32", "fp64") else resolve_precision(name, device)
