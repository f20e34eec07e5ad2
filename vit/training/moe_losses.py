"""Mixture-of-experts training: load-balancing loss, router z-loss, and expert usage.

    loss = cross-entropy + balance_loss * Σ E Σ f_e P_e + router_z_loss * Σ mean logsumexp²

where the outer sums are over the MoE layers. f, the share of each expert, is that of the whole
micro-batch over all processes; P is linear in the tokens, so each process adds its own.

Source: Fedus et al., equation 4, arXiv:2101.03961; Zoph et al., equation 6, arXiv:2202.08906; f
over all processes: Qiu et al., "Demons in the Detail", section 3.1, arXiv:2501.11873.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vit.model.moe import MixtureOfExperts, balance_loss, collect_routing, z_loss
from vit.training.distributed.collectives import widest_float

MAX_DROPPED = 0.1
"""Share of assignments that a layer drops, above which a note is logged."""
MIN_LOAD = 0.1
"""Load of an expert relative to an equal share, below which a note is logged."""


def moe_layers(network: nn.Module) -> dict[int | str, MixtureOfExperts]:
    """MoE layers by the number of their block, from 1; `decoder 1` in a decoder."""
    layers: dict[int | str, MixtureOfExperts] = {}
    for name, module in network.named_modules():
        if isinstance(module, MixtureOfExperts):
            *where, number = name.partition(".mlp")[0].split(".")
            block = int(number) + 1
            layers[f"decoder {block}" if "decoder" in where else block] = module
    return layers


def router_losses(accelerator: Accelerator | None, network: nn.Module, *, images: int) -> Tensor:
    """Balance loss and z-loss of the last forward pass, (2,), with gradients.

    Multiplied by the number of images, as a sum of cross-entropies is; the losses of all processes
    add up to that of the micro-batch.

    Args:
        accelerator: The processes, which must all make this call; None for a single process.
        images: Images of this process in the pass; it may have 0 while other processes have some.
    """
    own = collect_routing(network)
    here = float(images > 0)
    counts = torch.stack([torch.cat([r.counts, r.tokens.view(1)]) for r in own]).to(own[0].z) * here
    message = torch.cat([counts.flatten(), counts.new_full((1,), images)])
    summed = message if accelerator is None else accelerator.reduce(message, "sum")
    totals, seen = summed[:-1].view_as(counts), summed[-1]
    losses = [
        torch.stack([balance_loss(f, r.probabilities, n, top_k), z_loss(r.z, n)])
        for r, f, n, top_k in zip(
            own,
            totals[:, :-1],
            totals[:, -1].clamp(min=1),
            [layer.top_k for layer in moe_layers(network).values()],
            strict=True,
        )
    ]
    scaled: Tensor = torch.stack(losses).sum(0) * seen * here
    return scaled


@contextmanager
def track_expert_usage(network: nn.Module) -> Iterator["ExpertUsage | None"]:
    """Inside, routers record their choices; yields None for a network without experts."""
    layers = moe_layers(network)
    for layer in layers.values():
        layer.record_routing = True
    try:
        yield ExpertUsage(layers) if layers else None
    finally:
        for layer in layers.values():
            layer.record_routing, layer.routing = False, None


class ExpertUsage:
    """Accumulates the routing of forward passes, of `layers` by block."""

    def __init__(self, layers: dict[int | str, MixtureOfExperts]) -> None:
        self.layers = layers
        self.sums: Tensor | None = None

    def add(self, images: int) -> None:
        """Add the last forward pass, with its number of images on this process."""
        rows = torch.stack([_row(layer, images) for layer in self.layers.values()])
        self.sums = rows if self.sums is None else self.sums + rows

    def describe(self, accelerator: Accelerator) -> list[dict[str, Any]]:
        """One entry per layer, over all processes.

        `load`: share of the assignments by expert; `entropy`: mean over tokens, relative to
        log(experts); `dropped`: share of assignments beyond the capacity.
        """
        assert self.sums is not None
        rows = accelerator.reduce(self.sums, "sum").tolist()
        found = []
        for (block, layer), (tokens, entropy, dropped, *counts) in zip(
            self.layers.items(), rows, strict=True
        ):
            assigned, highest = max(tokens * layer.top_k, 1.0), math.log(len(counts)) or 1.0
            found.append(
                {
                    "block": block,
                    "load": [round(count / assigned, 5) for count in counts],
                    "entropy": round(entropy / max(tokens, 1.0) / highest, 5),
                    "dropped": round(dropped / assigned, 5),
                }
            )
        return found


def expert_imbalance(routers: Sequence[Mapping[str, Any]]) -> str | None:
    """A log line if a layer drops many assignments or hardly uses an expert; None otherwise."""
    parts = []
    worst = max(routers, key=lambda layer: layer["dropped"], default=None)
    if worst is not None and worst["dropped"] > MAX_DROPPED:
        parts.append(
            f"block {worst['block']} dropped {worst['dropped']:.0%} of its choices (raise "
            "--capacity-factor)"
        )
    least = min(routers, key=lambda layer: min(layer["load"]) * len(layer["load"]), default=None)
    if least is not None and min(least["load"]) * len(least["load"]) < MIN_LOAD:
        parts.append(
            f"an expert of block {least['block']} got {min(least['load']):.1%} of the choices, an "
            f"equal share is {1 / len(least['load']):.1%} (raise --balance-loss)"
        )
    return f"note: the experts are used unevenly: {'; '.join(parts)}" if parts else None


def _row(layer: MixtureOfExperts, images: int) -> Tensor:
    """Tokens, entropy, dropped assignments and counts of a layer; zeros without images."""
    routing, device = layer.routing, layer.router.weight.device
    wide = widest_float(device)
    if routing is None or not images:
        return torch.zeros(3 + layer.router.out_features, dtype=wide, device=device)
    heads = torch.stack(
        [part.to(wide) for part in (routing.tokens, routing.entropy, routing.dropped)]
    )
    return torch.cat([heads, routing.counts.to(wide)])
