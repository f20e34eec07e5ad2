"""Differences of the outputs of networks with the same weights."""

import torch
from torch import Tensor, nn

from vit.config import ModelConfig
from vit.model.build import check_fit, meta_model
from vit.model.vision_transformer import VisionTransformer
from vit.weights.formats.pretrained import Pretrained


def build(state: dict[str, Tensor], config: ModelConfig) -> VisionTransformer:
    """The network of weights."""
    model = meta_model(config)
    check_fit(state, model)
    model.load_state_dict(state, assign=True)
    return model.eval()


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
    shape = (2 if size < 100 else 1, found.config.channels, size, size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return output_difference(build(found.state, found.config), theirs, images)
