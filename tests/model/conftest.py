"""Fixtures of the network's tests."""

import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from vit.config import ModelConfig
from vit.model.attention import CrossAttention


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tokens() -> torch.Tensor:
    """Tokens of width 32, (3, 7, 32)."""
    return torch.randn(3, 7, 32)


@pytest.fixture(autouse=True)
def _forget_graphs():
    """torch gives up on a function that was compiled for many networks in one process."""
    yield
    if "torch._dynamo" in sys.modules:
        with warnings.catch_warnings():  # the first time imports the rest of the compiler
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.compiler.reset()


@pytest.fixture
def float64() -> Iterator[None]:
    """float64 as the default type."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def cross_attention_like() -> Callable[[nn.MultiheadAttention, int], CrossAttention]:
    """Makes a CrossAttention with the weights of torch's attention: (attention, memory_dim)."""

    def make(theirs: nn.MultiheadAttention, memory_dim: int) -> CrossAttention:
        dim = theirs.embed_dim
        config = ModelConfig(dim=dim, num_heads=theirs.num_heads)
        ours = CrossAttention(config, memory_dim=memory_dim).eval()
        weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
        query, key, value = theirs.in_proj_weight.chunk(3) if weights[0] is None else weights
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
        ours.q.weight.data, ours.kv.weight.data = query.data, torch.cat([key, value]).data
        ours.q.bias.data, ours.kv.bias.data = theirs.in_proj_bias.data.split([dim, 2 * dim])
        ours.proj.load_state_dict(theirs.out_proj.state_dict())
        return ours

    return make
