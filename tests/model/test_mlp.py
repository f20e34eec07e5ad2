"""Feed-forward layers against timm's."""

import pytest
import timm.layers
import torch

from vit.config import ModelConfig
from vit.model.build import build_classifier
from vit.model.mlp import MLP, PackedSwiGLU, QuickGELU, SwiGLU

DIM, HIDDEN = 32, 48


def test_swiglu_equals_timm(tokens):
    ours, theirs = SwiGLU(DIM, HIDDEN), timm.layers.SwiGLU(DIM, HIDDEN)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(tokens), theirs(tokens))


def test_packed_swiglu_equals_timm_and_swiglu(tokens):
    ours = PackedSwiGLU(DIM, HIDDEN)
    theirs = timm.layers.SwiGLUPacked(DIM, 2 * HIDDEN)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(tokens), theirs(tokens))
    separate = SwiGLU(DIM, HIDDEN)
    gate, value = (linear.chunk(2) for linear in (ours.fc1.weight, ours.fc1.bias))
    halves = zip(gate, value, strict=True)
    for linear, (weight, bias) in zip((separate.fc1_g, separate.fc1_x), halves, strict=True):
        linear.weight.data, linear.bias.data = weight.data, bias.data
    separate.fc2.load_state_dict(ours.fc2.state_dict())
    torch.testing.assert_close(ours(tokens), separate(tokens))


def test_mlp_equals_timm(tokens):
    ours, theirs = MLP(DIM, HIDDEN), timm.layers.Mlp(DIM, HIDDEN)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(tokens), theirs(tokens))


def test_quick_gelu_equals_timm(tokens):
    torch.testing.assert_close(
        QuickGELU()(tokens), timm.layers.get_act_layer("quick_gelu")()(tokens)
    )


@pytest.mark.parametrize("feedforward", ["mlp", "swiglu", "swiglu_packed", "moe"])
def test_every_kind_drops_activations_in_training(feedforward, tokens):
    settings = {"dim": DIM, "num_heads": 2, "depth": 2, "num_classes": 2, "dropout": 0.5}
    config = ModelConfig(image_size=16, patch_size=8, feedforward=feedforward, **settings)
    layer = build_classifier(config).blocks[1].mlp.train()
    assert not torch.equal(layer(tokens), layer(tokens))
    assert torch.equal(layer.eval()(tokens), layer(tokens))
