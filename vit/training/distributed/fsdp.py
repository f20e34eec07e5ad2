"""FSDP: weights and optimiser state sharded over the processes, through accelerate.

Files hold full tensors, so a checkpoint does not depend on the number of processes.

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

# element-wise optimisers: updating a shard equals a shard of the update
OPTIMIZERS = ("adamw",)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether each process holds only a shard of the network."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def require_shardable(accelerator: Accelerator, config: Config) -> None:
    """Refuse distributed configurations of accelerate that are not supported."""
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
    if config.data.tiles:
        raise ConfigError(f"tiles={config.data.tiles}: not supported under FSDP; leave one out")
    if config.training.captions:
        raise ConfigError(
            "captions cannot be generated under FSDP: use --task classify, or train "
            "captions without FSDP"
        )
    if config.finetune.method == "probe" or config.finetune.probe_first:
        raise ConfigError(
            "a probe needs the whole network on each device: under FSDP choose --method full, "
            "linear or lora, and --no-probe-first"
        )
    if accelerator.mixed_precision == "fp16":
        raise ConfigError("precision='fp16': under FSDP use bf16 or fp32")


def shard_on_cpus(accelerator: Accelerator, *, requested: bool) -> None:
    """Apply FSDP's configuration on CPUs, where accelerate silently ignores it.

    torch shards there as well, so a run for GPUs can be tested without them.
    """
    # the state of processes is shared: after a plan it already has the type set here
    several_cpus = accelerator.device.type == "cpu" and accelerator.num_processes > 1
    if requested and several_cpus:
        plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor; if it is sharded, every process must make this call."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def shard_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """This process's shard of the full `tensor`, sharded like `reference`."""
    if not hasattr(reference, "full_tensor") or tensor.shape != reference.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(reference, DTensor)
    local = tensor.to(reference.device, reference.dtype)
    return distribute_tensor(local, reference.device_mesh, reference.placements)


def full_copies(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Copy full tensors to the CPU; without `keep`, a process only contributes its shards."""
    found = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor.detach())
        if keep:
            here = full.clone() if full.device.type == "cpu" else full.cpu()
            found[name] = here.contiguous()
    return found


def reshard(model: nn.Module) -> None:
    """Reshard the weights: FSDP keeps some gathered after a forward pass without a backward."""
    for module in model.modules():
        reshard_module: Any = getattr(module, "reshard", None)
        if reshard_module is not None:
            reshard_module()
