"""Pooling: the tokens that each reads."""

import pytest
import torch

from vit.model.attention import AttentionContext
from vit.model.pooling import ClassTokenPooling, MeanPooling

DIM = 32


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(3, 7, DIM)


def test_pooling_returns_the_class_token_or_the_mean_patch(tokens):
    assert torch.equal(ClassTokenPooling()(tokens, AttentionContext()), tokens[:, 0])
    torch.testing.assert_close(MeanPooling(2)(tokens, AttentionContext()), tokens[:, 2:].mean(1))
