"""Differences of the outputs of networks with the same weights."""

import torch
from torch import Tensor, nn

from vit.model.build import assemble_model
from vit.weights.formats.pretrained import Pretrained


def build(found: Pretrained) -> nn.Module:
    """The network of weights that were read."""
    with torch.device("meta"):
        model = assemble_model(found.config)
    model.load_state_dict(found.state, assign=True)
    return model


@torch.no_grad()
def output_difference(ours: nn.Module, theirs: nn.Module, images: Tensor) -> float:
    """Largest difference of outputs, also relative to the largest output below 1."""
    expected = theirs.eval()(images)
    found = ours.eval()(images)
    assert expected.std() > 0.1, "outputs without any spread show nothing"
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp(max=1))


def parity_error(found: Pretrained, theirs: nn.Module, *, image_size: int = 0) -> float:
    """`output_difference` between weights that were read and the network that they are of."""
    size = image_size or found.config.image_size
    images = torch.randn(2 if size < 100 else 1, found.config.channels, size, size)
    return output_difference(build(found), theirs, images)
