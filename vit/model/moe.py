"""Mixture of experts: a feed-forward layer of many MLPs, of which each token uses top_k.

    p = softmax(x Wr)                             router probabilities
    MLP_e(x) = activation(x W1_e + b1_e) W2_e + b2_e
    y = Σ g_e MLP_e(x)  over the top_k experts    g = p, or p / Σ p over the top_k
    balance = E Σ f_e P_e                         f: share of assignments, P: mean of p
    z = mean of logsumexp(x Wr)²

Source: Shazeer et al., arXiv:1701.06538; Fedus et al., "Switch Transformers", sections 2.1 and 2.2,
arXiv:2101.03961; Riquelme et al., "V-MoE", arXiv:2106.05974; Zoph et al., "ST-MoE", section 3.3,
arXiv:2202.08906.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vit.model.grouped_linear import (
    autocast_device,
    autocasted,
    grouped_linear,
    is_exporting,
    permute_rows,
    register_flops,
)


class Experts(nn.Module):
    """MLPs of one shape with stacked weights.

    Args:
        dim, hidden_dim, activation, bias, dropout: As for MLP, of each expert.
        num_experts: Number of MLPs.
    """

    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        activation: nn.Module | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        register_flops()
        self.act = activation or nn.GELU()
        self.drop = nn.Dropout(dropout)
        for name, fan_in, fan_out in (("fc1", dim, hidden_dim), ("fc2", hidden_dim, dim)):
            bound = fan_in**-0.5  # as nn.Linear
            weight = torch.empty(num_experts, fan_out, fan_in).uniform_(-bound, bound)
            shift = torch.empty(num_experts, fan_out).uniform_(-bound, bound)
            self.register_parameter(f"{name}_weight", nn.Parameter(weight))
            self.register_parameter(f"{name}_bias", nn.Parameter(shift) if bias else None)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the outputs of each token's experts.

        Args:
            x: Tokens, (tokens, dim).
            experts: Indices of each token's experts, (tokens, top_k); num_experts if dropped.
            weights: Weights of the experts' outputs, (tokens, top_k).
        """
        compute = self.loop_over_experts if is_exporting() else self.sort_by_expert
        return compute(x, experts, weights)

    def sort_by_expert(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """`forward` with the assignments sorted by expert, all experts in one grouped product."""
        top_k, numbers = experts.shape[1], torch.arange(len(self.fc1_weight), device=x.device)
        order = experts.flatten().argsort(stable=True)
        inverse = order.argsort()
        counts = (experts.reshape(-1, 1) == numbers).sum(0)
        rows = permute_rows(autocasted(x), order, inverse, top_k)
        rows = self.drop(self.act(grouped_linear(rows, self.fc1_weight, self.fc1_bias, counts)))
        rows = self.drop(grouped_linear(rows, self.fc2_weight, self.fc2_bias, counts))
        outputs = permute_rows(rows, inverse, order, 1).view(*experts.shape, -1)
        weights = weights.masked_fill(experts == len(numbers), 0.0)
        return (outputs * weights.to(outputs.dtype).unsqueeze(-1)).sum(1)

    def loop_over_experts(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """`forward` one expert after the other, each on its own tokens, for export.

        Uses only operators that ONNX has.
        """
        mixed, biases = torch.zeros_like(x), (self.fc1_bias, self.fc2_bias)
        for number in range(len(self.fc1_weight)):
            tokens, choice = (experts == number).nonzero().unbind(1)
            fc1_bias, fc2_bias = (b if b is None else b[number] for b in biases)
            rows = self.drop(self.act(F.linear(x[tokens], self.fc1_weight[number], fc1_bias)))
            rows = self.drop(F.linear(rows, self.fc2_weight[number], fc2_bias))
            mixed = mixed.index_add(0, tokens, rows * weights[tokens, choice, None].to(rows))
        return mixed


class Routing(NamedTuple):
    """Router statistics of one forward pass: sums over tokens, which add up over passes."""

    counts: Tensor
    """Assignments by expert, before any is dropped, (experts,)."""
    probabilities: Tensor
    """Sum over tokens of the router's probabilities, (experts,); has a gradient."""
    tokens: Tensor
    """Number of tokens."""
    z: Tensor
    """Sum over tokens of logsumexp(logits)²; has a gradient."""
    entropy: Tensor
    """Sum over tokens of the entropy of their probabilities, in nats."""
    dropped: Tensor
    """Number of assignments dropped over capacity."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Routing":
        """A copy without gradients: torch does not deep-copy non-leaf tensors."""
        return Routing(*(tensor.detach().clone() for tensor in self))


def balance_loss(counts: Tensor, probabilities: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """E Σ f_e P_e, which is 1 for balanced experts; its gradient is that of P.

    Args:
        counts, probabilities, tokens: As in `Routing`, of one layer, summed over passes or not.
        top_k: Experts of each token.

    Source: Fedus et al., equations 4 to 6, arXiv:2101.03961; f as a share of all assignments.
    """
    shares = counts / (tokens * top_k)
    return len(counts) * (shares * probabilities / tokens).sum()


def z_loss(z: Tensor, tokens: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits)², which keeps a router's logits small.

    Source: Zoph et al., equation 5, arXiv:2202.08906.
    """
    return z / tokens


def collect_routing(model: nn.Module) -> list[Routing]:
    """Routing of the MoE layers of `model` in the last recorded forward pass, by depth."""
    layers = (layer for layer in model.modules() if isinstance(layer, MixtureOfExperts))
    return [layer.routing for layer in layers if layer.routing is not None]


def add_up_routing(model: nn.Module, passes: Sequence[Sequence[Routing]]) -> None:
    """Make the routing of each MoE layer of `model` the sum over the passes of one step.

    Args:
        passes: `collect_routing` after each pass.
    """
    layers = (layer for layer in model.modules() if isinstance(layer, MixtureOfExperts))
    for layer, records in zip(layers, zip(*passes, strict=True), strict=False):
        layer.routing = Routing(*(torch.stack(sums).sum(0) for sums in zip(*records, strict=True)))


class MixtureOfExperts(nn.Module):
    """Sends each token to its top_k experts and adds their weighted outputs.

    In training mode, or if `record_routing` is set, `routing` has the statistics of the last
    forward pass; of the tokens where `counted`, (batch, tokens), is True, or of all if it is None.

    Args:
        experts: The MLPs.
        top_k: Experts of each token.
        weight_fn: Top-k probabilities (..., top_k) -> weights of the experts' outputs.
        capacity_fn: Drops assignments, a partial of `drop_over_capacity`; None drops none.
        jitter: The router's inputs are multiplied by uniform(1 - jitter, 1 + jitter) in training
            (Fedus et al., appendix C).
        shared: Shared expert, used by every token (Dai et al., "DeepSeekMoE", arXiv:2401.06066).
    """

    def __init__(
        self,
        experts: Experts,
        *,
        top_k: int,
        weight_fn: Callable[[Tensor], Tensor] | None = None,
        capacity_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        jitter: float = 0.0,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.jitter = Jitter(jitter) if jitter else nn.Identity()
        num_experts, _, dim = experts.fc1_weight.shape
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.weight_fn, self.capacity_fn = weight_fn or softmax_weights, capacity_fn
        self.experts = experts
        self.shared = shared
        self.record_routing = False
        self.routing: Routing | None = None
        self.counted: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        logits = self.router_logits(x)
        probabilities = logits.softmax(dim=-1)
        chosen, experts = probabilities.topk(self.top_k, dim=-1)
        kept = experts if self.capacity_fn is None else self.capacity_fn(chosen, experts)
        rows = (part.flatten(0, 1) for part in (x, kept, self.weight_fn(chosen)))
        output: Tensor = self.experts(*rows).view_as(x)
        if self.shared is not None:
            output = self.shared(x) + output
        if self.training or self.record_routing:
            routing = _routing(logits, probabilities, experts, kept, self.counted)
            self.routing = self.routing if _is_recomputing() else routing
        return output

    def router_logits(self, x: Tensor) -> Tensor:
        """Logits of the router, (batch, tokens, experts), in float32 also under autocast."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(autocast_device(x), enabled=False):
            return F.linear(self.jitter(x.to(dtype)), self.router.weight.to(dtype))


class Jitter(nn.Module):
    """Multiplies by uniform(1 - size, 1 + size) in training."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """(...) -> (...)"""
        if not self.training:
            return x
        return x * torch.empty_like(x).uniform_(1 - self.size, 1 + self.size)


def softmax_weights(chosen: Tensor) -> Tensor:
    """The probabilities themselves (Switch, V-MoE), so that a router learns even with top_k=1."""
    return chosen


def renormalised_weights(chosen: Tensor) -> Tensor:
    """Probabilities normalised over the top-k experts (GShard, arXiv:2006.16668)."""
    return chosen / chosen.sum(dim=-1, keepdim=True)


def token_order(chosen: Tensor) -> Tensor:
    """First come, first served, (batch, tokens)."""
    batch, tokens, _ = chosen.shape
    return torch.arange(tokens, device=chosen.device).expand(batch, tokens)


def score_order(chosen: Tensor) -> Tensor:
    """Tokens with the largest probability first, (batch, tokens).

    Source: Riquelme et al., batch prioritized routing, section 4.1, arXiv:2106.05974.
    """
    if is_exporting():  # ONNX has one sort, which is stable
        return chosen[..., 0].topk(chosen.shape[1], dim=1).indices
    return chosen[..., 0].argsort(dim=1, descending=True, stable=True)


def drop_over_capacity(
    chosen: Tensor,
    experts: Tensor,
    *,
    num_experts: int,
    factor: float,
    order: Callable[[Tensor], Tensor],
) -> Tensor:
    """`experts` with assignments over capacity replaced by `num_experts`.

    An expert has capacity ceil(top_k * tokens / num_experts * factor) in each image. The papers
    count it over the batch; here the output for an image must not depend on the others. All first
    choices are assigned before any second one (GShard, section 2.2, arXiv:2006.16668).

    Args:
        chosen, experts: Top-k probabilities and their indices, (batch, tokens, top_k).
        order: Priority of tokens, from `chosen`: their indices in order, (batch, tokens).
    """
    tokens, top_k = experts.shape[1:]
    limit = math.ceil(round(top_k * tokens / num_experts * factor, 6))  # 11.0000001 is 11
    turns = order(chosen).unsqueeze(-1).expand_as(experts)
    queue = rearrange(experts.gather(1, turns), "batch tokens top_k -> batch (top_k tokens)")
    number = F.one_hot(queue, num_experts).cumsum(1).gather(2, queue.unsqueeze(-1))
    full = rearrange(number > limit, "batch (top_k tokens) 1 -> batch tokens top_k", top_k=top_k)
    full = torch.empty_like(full).scatter(1, turns, full)
    return experts.masked_fill(full, num_experts)


def _routing(
    logits: Tensor, probabilities: Tensor, experts: Tensor, kept: Tensor, counted: Tensor | None
) -> Routing:
    """Statistics of the tokens that are counted.

    Args:
        logits, probabilities: (batch, tokens, experts).
        experts, kept: (batch, tokens, top_k).
        counted: (batch, tokens); None for all tokens.
    """

    def masked(values: Tensor) -> Tensor:
        if counted is None:
            return values
        return values * counted.view(*counted.shape, *(1,) * (values.ndim - 2))

    numbers = torch.arange(logits.shape[-1], device=logits.device)
    fixed = probabilities.detach()
    every = torch.full((), logits.shape[0] * logits.shape[1], device=logits.device)
    return Routing(
        counts=masked(experts.unsqueeze(-1) == numbers).sum((0, 1, 2)),
        probabilities=masked(probabilities).sum((0, 1)),
        tokens=every if counted is None else counted.sum(),
        z=masked(logits.logsumexp(dim=-1).square()).sum(),
        entropy=-masked(torch.xlogy(fixed, fixed)).sum(),
        dropped=masked(kept == len(numbers)).sum(),
    )


def _is_recomputing() -> bool:
    """Whether activation checkpointing repeats a forward pass inside a backward one.

    Storing its routing would keep activations in memory that checkpointing is to free.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0
