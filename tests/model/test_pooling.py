"""Pooling: the tokens that each reads."""

import torch

from vit.model.attention import AttentionContext
from vit.model.pooling import ClassTokenPooling, MeanPooling


def test_pooling_returns_the_class_token_or_the_mean_patch(tokens):
    assert torch.equal(ClassTokenPooling()(tokens, AttentionContext()), tokens[:, 0])
    torch.testing.assert_close(MeanPooling(2)(tokens, AttentionContext()), tokens[:, 2:].mean(1))
