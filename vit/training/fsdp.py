"""Weights and optimiser state in pieces over the processes: torch's FSDP, through accelerate.

What is saved is always whole, so a checkpoint knows nothing of how many processes wrote it.

Source: Zhao et al., "PyTorch FSDP", arXiv:2304.11277; Rajbhandari et al., "ZeRO", arXiv:1910.02054.
"""

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn

from vit.config import Config
from vit.errors import ConfigError

# their update of a piece is the piece of their update
OPTIMIZERS = ("adamw",)
PLAIN = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether each process holds a piece of the network only."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def require_shardable(accelerator: Accelerator, config: Config) -> None:
    """Refuse what accelerate was configured for and cannot be kept exact here.

    Raises:
        ConfigError: DeepSpeed and the like, FSDP of the first version, or FSDP with a setting that
            does not go with it.
    """
    kind = accelerator.distributed_type
    if not is_sharded(accelerator):
        if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ConfigError(f"{kind.value} is not supported: configure FSDP instead")
        return
    if not accelerator.is_fsdp2:
        raise ConfigError(
            "FSDP of version 1 is not supported: write `fsdp_version: 2` in accelerate's file"
        )
    if config.training.optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer={config.training.optimizer!r}: under FSDP use {', '.join(OPTIMIZERS)}"
        )
    if config.training.captions:
        raise ConfigError(
            "captions are written by whole networks: under FSDP use --task classify, or train "
            "captions without FSDP"
        )
    if config.finetune.method == "probe" or config.finetune.probe_first:
        raise ConfigError(
            "a probe needs the whole network on each device: under FSDP choose --method full, "
            "linear or lora, and --no-probe-first"
        )
    if accelerator.mixed_precision == "fp16":
        raise ConfigError("precision='fp16': under FSDP use bf16 or fp32")


def shard_on_cpus(accelerator: Accelerator, *, asked: bool) -> None:
    """Take FSDP's configuration on CPUs too, where accelerate passes over it without a word.

    torch shards there as well, so a run on GPUs can be tried, and tested, without any.
    """
    if asked and accelerator.distributed_type == DistributedType.MULTI_CPU:
        plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`; where it is in pieces, every process must ask for it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def pieces_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """This process's piece of the whole `tensor`, cut as `reference` is."""
    if not hasattr(reference, "full_tensor") or tensor.shape != reference.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(reference, DTensor)
    local = tensor.to(reference.device, reference.dtype)
    return distribute_tensor(local, reference.device_mesh, reference.placements)


def copies(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Whole copies on the CPU, which training goes on without touching.

    Args:
        tensors: In pieces or not.
        keep: False on processes that only help to put the pieces together.
    """
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if keep:
            here = full.clone() if full.device.type == "cpu" else full.cpu()
            found[name] = here.contiguous()
    return found


def forget_gathered(model: nn.Module) -> None:
    """Leave pieces only: FSDP keeps some weights whole after a pass without a backward one."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()
