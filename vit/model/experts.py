"""Many MLPs of one shape, each for the tokens that are sent to it.

MLP_e(x) = activation(x W1_e + b1_e) W2_e + b2_e
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit.operators import grouped
from vit.operators.grouped import autocasted, grouped_linear, is_exporting, regroup


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
        grouped.register_flops()
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
