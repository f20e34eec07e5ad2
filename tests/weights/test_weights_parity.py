"""The same weights give the same logits in timm."""

import pytest
import timm
import torch
from torch import Tensor, nn

from vit.config import ModelConfig
from vit.config.presets import preset
from vit.model.vision_transformer import VisionTransformer
from vit.weights.formats.state_dict_names import check_fit
from vit.weights.formats.timm_weights import from_timm, to_timm
from vit.weights.saved_model import meta_model

TOLERANCE = 1e-4
SMALL = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 2, "num_heads": 4}


def load(state: dict[str, Tensor], **settings) -> VisionTransformer:
    model = meta_model(ModelConfig(**settings))
    check_fit(state, model)
    model.load_state_dict(state, assign=True)
    return model.eval()


@torch.no_grad()
def compare(ours: nn.Module, theirs: nn.Module, image_size: int, *, batch: int = 1) -> None:
    images = torch.randn(batch, 3, image_size, image_size)
    mine, other = ours(images), theirs.eval()(images)
    assert mine.std() > 0.1, "logits without any spread show nothing"
    torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch16_224",
        pytest.param("vit_base_patch16_224", marks=pytest.mark.slow),
        pytest.param("vit_large_patch16_224", marks=pytest.mark.slow),
        "vit_base_patch32_224",
        "vit_small_patch16_384",
    ],
)
def test_equals_timm(name, randomise):
    with torch.device("meta"):
        theirs = timm.create_model(name)
    state = randomise(theirs.state_dict())
    theirs.load_state_dict(state, assign=True)
    settings = preset(name)
    compare(load(from_timm(state), **settings), theirs, settings["image_size"])


@pytest.mark.parametrize("size", [24, 48])
def test_other_image_sizes_equal_timm(randomise, size):
    theirs = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_heads=4,
        num_classes=5,
        dynamic_img_size=True,
    )
    state = randomise(theirs.state_dict())
    theirs.load_state_dict(state)
    compare(load(from_timm(state), **SMALL, num_classes=5), theirs, size, batch=3)


def test_to_timm_is_the_inverse_of_from_timm(randomise):
    config = ModelConfig(**SMALL, channels=4)
    state = randomise(meta_model(config).state_dict())
    theirs = to_timm(state, config)
    assert theirs["patch_embed.proj.weight"].shape == (48, 4, 8, 8)
    back = from_timm(theirs)
    assert all(torch.equal(back[name], state[name]) for name in state)
