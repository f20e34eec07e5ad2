"""Sizes of a network that follow from its settings."""

from vit.config import ModelConfig


def test_hidden_dim_is_four_times_dim_unless_set():
    assert ModelConfig(dim=48, num_heads=3).feedforward_dim == 192
    assert ModelConfig(dim=48, num_heads=3, hidden_dim=10).feedforward_dim == 10
