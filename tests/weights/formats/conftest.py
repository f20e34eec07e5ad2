"""Small networks of timm with random weights."""

import pytest
import timm
from torch import Tensor, nn

SMALL = {"embed_dim": 128, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8}
State = dict[str, Tensor]


@pytest.fixture
def build(randomise):
    """A small network of timm by name, with random weights, and their copy."""

    def draw(name: str, **args) -> tuple[nn.Module, State]:
        model = timm.create_model(name, **{**SMALL, **args}).eval()
        model.load_state_dict(randomise(model.state_dict()))
        return model, dict(model.state_dict())

    return draw
