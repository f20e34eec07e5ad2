"""Model soup: the mean of the weights of several networks with the same parameters.

    soup = 1/K sum_k weights_k

Source: Wortsman et al., arXiv:2203.05482.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def average_weights(weights: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of each tensor over `weights`, computed in float64 and cast to its dtype.

    Args:
        weights: Tensors of each network by name; one network at a time is in memory.
    """
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for count, each in enumerate(weights, 1):
        for name, tensor in each.items():
            if count == 1:
                sums[name], dtypes[name] = tensor.double().clone(), tensor.dtype
            else:
                sums[name] += tensor
    return {name: (total / count).to(dtypes[name]) for name, total in sums.items()}
