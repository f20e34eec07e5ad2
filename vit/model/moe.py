"""A feed-forward part of many experts, of which each token visits a few.

    p = softmax(x Wr)                             one probability an expert
    y = Σ g_e MLP_e(x)  over the top_k experts    g = p, or p / Σ p over the chosen
    balance = E Σ f_e P_e                         f: share of assignments, P: mean of p
    z = mean of logsumexp(x Wr)²

Source: Shazeer et al., arXiv:1701.06538; Fedus et al., "Switch Transformers", sections 2.1 and 2.2,
arXiv:2101.03961; Riquelme et al., "V-MoE", arXiv:2106.05974; Zoph et al., "ST-MoE", section 3.3,
arXiv:2202.08906.

Many MLPs of one shape, each for the tokens that are sent to it.

MLP_e(x) = activation(x W1_e + b1_e) W2_e + b2_e
"""

import math
from collections.abc import Callable
from functools import partial
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
    register_flops,
    regroup,
)


class Experts(nn.Module):
    """MLPs of one shape, whose weights are stacked.

    Args:
        dim: Width of a token.
        hidden_dim: Width inside.
        num_experts: How many.
        activation: Applied inside; the exact GELU by default.
        bias: Whether the projections have one.
        dropout: Probability of dropping an activation, inside and at the end, during training.
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
        """Sum of the answers that each token gets.

        Args:
            x: Tokens, (tokens, dim).
            experts: Whom each visits, (tokens, top_k); the number of experts where nobody.
            weights: Of their answers, (tokens, top_k).
        """
        way = self.by_lists if is_exporting() else self.sorted
        return way(x, experts, weights)

    def sorted(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """`forward` with the assignments sorted by expert, all experts' products together."""
        top_k, numbers = experts.shape[1], torch.arange(len(self.fc1_weight), device=x.device)
        order = experts.flatten().argsort(stable=True)
        places = order.argsort()
        counts = (experts.reshape(-1, 1) == numbers).sum(0)
        rows = regroup(autocasted(x), order, places, top_k)
        rows = self.drop(self.act(grouped_linear(rows, self.fc1_weight, self.fc1_bias, counts)))
        rows = self.drop(grouped_linear(rows, self.fc2_weight, self.fc2_bias, counts))
        answers = regroup(rows, places, order, 1).view(*experts.shape, -1)
        weights = weights.masked_fill(experts == len(numbers), 0.0)
        return (answers * weights.to(answers.dtype).unsqueeze(-1)).sum(1)

    def by_lists(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """`forward` one expert after the other, each on the list of its tokens: what is exported.

        Of plain operators, which ONNX has too; an expert computes its own tokens alone.
        """
        mixed, biases = torch.zeros_like(x), (self.fc1_bias, self.fc2_bias)
        for number in range(len(self.fc1_weight)):
            tokens, choice = (experts == number).nonzero().unbind(1)
            fc1_bias, fc2_bias = (b if b is None else b[number] for b in biases)
            rows = self.drop(self.act(F.linear(x[tokens], self.fc1_weight[number], fc1_bias)))
            rows = self.drop(F.linear(rows, self.fc2_weight[number], fc2_bias))
            mixed = mixed.index_add(0, tokens, rows * weights[tokens, choice, None].to(rows))
        return mixed


Weigh = Callable[[Tensor], Tensor]


class Routing(NamedTuple):
    """What a router did with the tokens of one forward pass: sums, which add up over passes."""

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
    """Number of assignments that found their expert full."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Routing":
        """Numbers without gradients: torch copies no tensor that has a history."""
        return Routing(*(tensor.detach().clone() for tensor in self))


def balance_loss(counts: Tensor, probabilities: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """E Σ f_e P_e, which is 1 where all experts get the same; its gradient is that of P.

    Args:
        counts, probabilities, tokens: As in `Routing`, of one layer, summed over passes or not.
        top_k: Assignments a token.

    Source: Fedus et al., equations 4 to 6, arXiv:2101.03961; f as a share of all assignments.
    """
    shares = counts / (tokens * top_k)
    return len(counts) * (shares * probabilities / tokens).sum()


def z_loss(z: Tensor, tokens: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits)², which keeps a router's logits small.

    Source: Zoph et al., equation 5, arXiv:2202.08906.
    """
    return z / tokens


def routing_of(model: nn.Module) -> list[Routing]:
    """What the routers of `model` did in its last forward pass in training mode, by depth."""
    layers = (layer for layer in model.modules() if isinstance(layer, MixtureOfExperts))
    return [layer.routing for layer in layers if layer.routing is not None]


class MixtureOfExperts(nn.Module):
    """Sends each token to the experts that its router finds most probable, and adds their answers.

    In training mode, and where `tells` is set, `routing` holds what the last forward pass did.

    Args:
        dim: Width of a token.
        hidden_dim: Width inside an expert.
        num_experts: Experts to choose from.
        top_k: Experts that a token visits.
        weigh: Turns the chosen probabilities (..., top_k) into the weights of the answers.
        place: Drops assignments, as `within_capacity`; none by default.
        activation: Applied inside an expert; the exact GELU by default.
        bias: Whether the experts' projections have one.
        dropout: Probability of dropping an activation, inside and at the end, during training.
        jitter: The router's inputs are multiplied by uniform(1 - jitter, 1 + jitter) in training
            (Fedus et al., appendix C).
        shared: What every token visits besides (Dai et al., "DeepSeekMoE", arXiv:2401.06066).
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        num_experts: int,
        top_k: int,
        weigh: Weigh | None = None,
        place: Callable[[Tensor, Tensor], Tensor] | None = None,
        activation: nn.Module | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        jitter: float = 0.0,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.jitter = Jitter(jitter) if jitter else nn.Identity()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.weigh, self.place = weigh or softmax_weights, place or everywhere
        self.experts = Experts(
            dim, hidden_dim, num_experts, activation=activation, bias=bias, dropout=dropout
        )
        self.shared = shared or Nothing()
        self.tells = False
        self.routing: Routing | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, tokens, dim)"""
        logits = self.scores(x)
        probabilities = logits.softmax(dim=-1)
        chosen, experts = probabilities.topk(self.top_k, dim=-1)
        placed = self.place(chosen, experts)
        rows = (part.flatten(0, 1) for part in (x, placed, self.weigh(chosen)))
        mixed: Tensor = self.shared(x) + self.experts(*rows).view_as(x)
        if self.training or self.tells:
            routing = _routing(logits, probabilities, experts, placed)
            self.routing = self.routing if _computing_again() else routing
        return mixed

    def scores(self, x: Tensor) -> Tensor:
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


class Nothing(nn.Module):
    """The shared expert where there is none."""

    def forward(self, x: Tensor) -> Tensor:
        """(...) -> ()"""
        return x.new_zeros(())


def softmax_weights(chosen: Tensor) -> Tensor:
    """The probabilities themselves (Switch, V-MoE): a router learns from a single choice too."""
    return chosen


def renormalised_weights(chosen: Tensor) -> Tensor:
    """Weights that sum to one over the chosen (Lepikhin et al., GShard, arXiv:2006.16668)."""
    return chosen / chosen.sum(dim=-1, keepdim=True)


def everywhere(_chosen: Tensor, experts: Tensor) -> Tensor:
    """Experts without a limit: nothing is dropped."""
    return experts


def token_order(chosen: Tensor) -> Tensor:
    """First come, first served, (batch, tokens)."""
    batch, tokens, _ = chosen.shape
    return torch.arange(tokens, device=chosen.device).expand(batch, tokens)


def score_order(chosen: Tensor) -> Tensor:
    """Tokens with the largest probability first, (batch, tokens).

    Source: Riquelme et al., batch prioritized routing, section 4.1, arXiv:2106.05974.
    """
    if is_exporting():  # ONNX has one sort, which keeps the order of ties
        return chosen[..., 0].topk(chosen.shape[1], dim=1).indices
    return chosen[..., 0].argsort(dim=1, descending=True, stable=True)


def capacity(
    num_experts: int, factor: float, order: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """A limit for `MixtureOfExperts`: each expert has the same number of places in each image."""
    return partial(within_capacity, num_experts=num_experts, factor=factor, order=order)


def within_capacity(
    chosen: Tensor,
    experts: Tensor,
    *,
    num_experts: int,
    factor: float,
    order: Callable[[Tensor], Tensor],
) -> Tensor:
    """`experts` with `num_experts` in place of those that are full.

    An expert has ceil(top_k * tokens / num_experts * factor) places in each image. The papers count
    them over the batch; here an image's answer must not depend on its neighbours. All first choices
    are placed before any second one (GShard, section 2.2, arXiv:2006.16668).

    Args:
        chosen, experts: Probabilities and numbers of the chosen, (batch, tokens, top_k).
        num_experts, factor: As above.
        order: Which tokens are placed first, from `chosen`: their numbers, (batch, tokens).
    """
    tokens, top_k = experts.shape[1:]
    places = math.ceil(round(top_k * tokens / num_experts * factor, 6))  # 11.0000001 is 11
    turns = order(chosen).unsqueeze(-1).expand_as(experts)
    queue = rearrange(experts.gather(1, turns), "batch tokens top_k -> batch (top_k tokens)")
    number = F.one_hot(queue, num_experts).cumsum(1).gather(2, queue.unsqueeze(-1))
    full = rearrange(number > places, "batch (top_k tokens) 1 -> batch tokens top_k", top_k=top_k)
    full = torch.empty_like(full).scatter(1, turns, full)
    return experts.masked_fill(full, num_experts)


def _routing(logits: Tensor, probabilities: Tensor, experts: Tensor, placed: Tensor) -> Routing:
    """Args: logits and probabilities (batch, tokens, experts); the others (batch, tokens, top_k)"""
    numbers = torch.arange(logits.shape[-1], device=logits.device)
    fixed = probabilities.detach()
    return Routing(
        counts=(experts.unsqueeze(-1) == numbers).sum((0, 1, 2)),
        probabilities=probabilities.sum((0, 1)),
        tokens=torch.full((), logits.shape[0] * logits.shape[1], device=logits.device),
        z=logits.logsumexp(dim=-1).square().sum(),
        entropy=-torch.xlogy(fixed, fixed).sum(),
        dropped=(placed == len(numbers)).sum(),
    )


def _computing_again() -> bool:
    """Whether activation checkpointing repeats a forward pass inside a backward one.

    What it would leave in `routing` holds on to activations that were to be given back.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0
