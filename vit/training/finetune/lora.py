"""LoRA: low-rank adapters of frozen linear layers; freezing of all other parameters.

    y = x Wᵀ + b + (alpha / rank) (x Aᵀ) Bᵀ      A: (rank, in), B: (out, rank), B = 0 at first

Source: Hu et al., "LoRA", section 4.1, arXiv:2106.09685. A is initialised as in its code,
Kaiming-uniform with a = sqrt(5), which is uniform in +-1 / sqrt(in).
"""

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from vit.errors import ConfigError
from vit.model.moe import MixtureOfExperts
from vit.model.vision_transformer import VisionTransformer
from vit.text import format_parameters

HEAD = ("head.", "decoder.", "tile_pool.")
"""Prefixes of the head's parameters; all others are the backbone's."""
A, B = "lora_a", "lora_b"


class LoRALinear(nn.Linear):
    """A frozen linear layer plus a trainable low-rank difference."""

    def __init__(self, linear: nn.Linear, *, rank: int, alpha: float) -> None:
        # on the meta device, since the parameters exist already
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.rank, self.alpha = rank, alpha
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        narrow = F.linear(x, self.lora_a) * (self.alpha / self.rank)
        return F.linear(x, self.weight, self.bias) + F.linear(narrow, self.lora_b)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha}"


def add_lora(
    network: VisionTransformer, *, rank: int, alpha: float, targets: Sequence[str]
) -> None:
    """Add LoRA to the target projections of every block; only it and the head are trained.

    Parameter names do not change; `lora_a` and `lora_b` are added to those of a projection. A is
    drawn from torch's global generator, in the order of the blocks. Call it before the network is
    compiled or given to an optimiser. Targets are qkv, proj, fc1, fc2; with SwiGLU fc1_g and fc1_x
    for fc1, with experts only qkv and proj.
    """
    found = projections(network)
    here = list(dict.fromkeys(_last(path) for path in found))
    absent = [target for target in targets if target not in here]
    if absent or not targets:
        what = f"has no {', '.join(absent)}" if absent else "needs a projection"
        where = "here" if any(".mlp." in path for path in found) else "beside stacked experts"
        raise ConfigError(f"LoRA {what} {where}; choose from {', '.join(here)}")
    chosen = [module for path, module in found.items() if _last(path) in targets]
    full = min(min(module.in_features, module.out_features) for module in chosen)
    if rank >= full:
        raise ConfigError(f"LoRA's rank={rank}: choose one from 1 to {full - 1}, such as 8")
    for path, linear in found.items():
        if _last(path) in targets:
            parent = network.get_submodule(path.rpartition(".")[0])
            setattr(parent, _last(path), LoRALinear(linear, rank=rank, alpha=alpha))
    freeze_except(network, lambda name: _last(name) in (A, B) or name.startswith(HEAD))


def projections(network: VisionTransformer) -> dict[str, nn.Linear]:
    """Linear layers of the blocks by path; with experts, only those of attention.

    The matrices of experts are stacked, and fc1 is in some blocks and shared experts only.
    """
    experts = any(isinstance(module, MixtureOfExperts) for module in network.modules())
    return {
        f"blocks.{path}": module
        for path, module in network.blocks.named_modules()
        if isinstance(module, nn.Linear) and not (experts and ".mlp." in path)
    }


def freeze_backbone(network: nn.Module) -> None:
    """Freeze all parameters but those of the head, the decoder and the pooling of tiles."""
    if not any(name.startswith(HEAD) for name, _ in network.named_parameters()):
        raise ConfigError("num_classes=0: there is no head, and nothing else is to learn")
    freeze_except(network, lambda name: name.startswith(HEAD))


def freeze_except(network: nn.Module, trainable: Callable[[str], bool]) -> None:
    """Freeze all parameters but those that `trainable` selects."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(trainable(name))


def trainable_line(what: str, network: nn.Module) -> str:
    """Line with the share of trainable parameters: `the head: 3,850 of 21.7 M parameters learn`."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in network.parameters()]
    learn, everything = sum(size for size, learns in sizes if learns), sum(s for s, _ in sizes)
    percent = 100 * learn / everything
    digits = f"{percent:.1f}" if percent >= 1 else f"{percent:.2g}"
    counts = f"{format_parameters(learn)} of {format_parameters(everything)}"
    return f"{what}: {counts} parameters learn ({digits} %)"


def merge_lora(state: Mapping[str, Tensor], *, rank: int, alpha: float) -> dict[str, Tensor]:
    """Weights of the equivalent network without LoRA, W + (alpha / rank) B A, summed in float64,
    returned in float32; those without LoRA are returned unchanged."""
    plain = {name: tensor for name, tensor in state.items() if _last(name) not in (A, B)}
    for path in {name.rpartition(".")[0]: None for name in state if name not in plain}:
        a, b, weight = (state[f"{path}.{name}"] for name in (A, B, "weight"))
        difference = alpha / rank * (b.double() @ a.double())
        plain[f"{path}.weight"] = (weight.double() + difference).float()
    return plain


def _last(path: str) -> str:
    return path.rpartition(".")[2]
