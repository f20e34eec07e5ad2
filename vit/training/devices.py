"""The devices of a run and the arithmetic on them."""

import atexit
import datetime
import os

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState

from vit.config import RunConfig
from vit.errors import ConfigError, RunError
from vit.precision import Precision, resolve_device, resolve_precision
from vit.training.fsdp import shard_on_cpus

# accelerate's names; what is not mixed is set up in `set_arithmetic`
MIXED = {"bf16": "bf16", "fp16": "fp16"}
# one process looks at a large data set while the others wait for it
PATIENCE = datetime.timedelta(hours=1)
AMPERE = (8, 0)


def make_accelerator(config: RunConfig) -> Accelerator:
    """The devices of this process, in the arithmetic that they are good at.

    Raises:
        ConfigError: The device is unknown or absent, or cannot compute in that precision.
        RunError: Several processes were started, and they cannot meet.
    """
    chosen = None if config.device == "auto" else config.device
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if chosen and ":" in chosen and started > 1:
        raise ConfigError(
            f"device={chosen!r}: {started} processes take a device each; say --device cuda or cpu"
        )
    if started > 1 and chosen == "cuda" and torch.cuda.is_available():
        # not the first GPU for all: each would hold some of its memory
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    device = resolve_device(chosen)
    if chosen and device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    # What launchers say stands in the environment; accelerate joins processes on CPUs only where
    # it is told that they are CPUs.
    on_cpu = device.type == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    precision = arithmetic(config.precision, torch.device("cpu") if on_cpu else device)
    set_arithmetic(precision, deterministic=config.deterministic)
    meet_again("gloo" if on_cpu else "nccl")
    # an earlier training in this Python process may have had another device or precision
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=MIXED.get(precision, "no"),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    if on_cpu and accelerator.num_processes > 1:
        atexit.unregister(leave)
        atexit.register(leave)
    shard_on_cpus(accelerator, asked=os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true")
    if accelerator.num_processes != started:
        raise RunError(
            f"{started} processes were started, and {accelerator.num_processes} can work together "
            f"on device={config.device}: start one, or give --device"
        )
    return accelerator


def leave() -> None:
    """Part from the other processes before Python ends.

    Threads of gloo that run on until the C++ part of the process is taken down abort it, now and
    then, after everything was done (torch 2.15: one exit in six of an empty program).
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def meet_again(backend: str) -> None:
    """Join the other processes where torch's launcher has started all of them anew.

    It hands the new ones the store of the old ones, in which the addresses of the dead still stand
    (torch 2.15): those of each attempt get a prefix of their own.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not attempt or torch.distributed.is_initialized():
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=PATIENCE)
        torch.distributed.init_process_group(
            backend,
            store=PrefixStore(f"attempt {attempt}", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=PATIENCE,
        )


def arithmetic(name: str, device: torch.device) -> str:
    """What `--precision name` trains in on `device`: fp32, tf32, bf16, fp16 or fp64.

    Raises:
        ConfigError: The device cannot.
    """
    if name == "tf32":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < AMPERE:
            raise ConfigError(
                "precision='tf32': is for NVIDIA GPUs of compute capability 8 or more; use fp32"
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


def set_arithmetic(precision: str, *, deterministic: bool) -> None:
    """Switch this process to `precision`, and to kernels that repeat themselves bit by bit."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if deterministic:
        # read when cuBLAS starts; PyTorch's documentation on reproducibility asks for it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # their backward passes add in an order that changes from run to run
    torch.backends.cuda.enable_mem_efficient_sdp(not deterministic)
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)


def inference_precision(name: str, device: torch.device) -> Precision:
    """The arithmetic of prediction that is nearest to that of a training in `name`."""
    return "fp32" if name in ("tf32", "fp64") else resolve_precision(name, device)
