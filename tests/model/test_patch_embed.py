"""Patches of several sizes: one matrix serves all, as networks built at those sizes would."""

import pytest
import torch
from timm.layers.patch_embed import resample_patch_embed

from vit.config import Config, ModelConfig, TrainingConfig
from vit.errors import ConfigError
from vit.model.build import build_classifier
from vit.model.patch_embed import FlexiblePatchEmbedding, PatchEmbedding
from vit.model.relative_position_bias import resize_bias_table

SMALL = {"image_size": 48, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": 4, "num_classes": 3}
SIZES = (4, 12, 16)


def network(**changes):
    torch.manual_seed(0)
    model = build_classifier(ModelConfig(**{**SMALL, "patch_sizes": SIZES, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("position", ["learned", "sinusoidal_2d", "rotary", "relative"])
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_a_flexible_network_equals_one_built_at_that_patch_size(size, position):
    model, images = network(position=position).double(), torch.randn(2, 3, 48, 48).double()
    built = network(position=position, patch_size=size, patch_sizes=()).double().eval()
    state = model.state_dict()
    kernel = state["patch_embed.proj.weight"].unflatten(1, (3, 8, 8))
    state["patch_embed.proj.weight"] = resample_patch_embed(kernel, [size, size]).flatten(1)
    if position == "learned":
        side = 48 // size
        state["pos_embed"] = model.positions.resized_table(state["pos_embed"], (side, side))
    elif position == "sinusoidal_2d":
        state["pos_embed"] = built.pos_embed
    for name in [name for name in state if name.endswith("relative_position_bias_table")]:
        state[name] = resize_bias_table(
            state[name], (6, 6), (48 // size, 48 // size), num_prefix_rows=3
        )
    built.load_state_dict(state)
    model.patch_embed.current_patch_size = size
    torch.testing.assert_close(model.train()(images), built(images), atol=1e-5, rtol=1e-5)


def test_evaluation_uses_the_default_patch_size_and_saves_no_other_weights():
    model, plain = network(), network(patch_sizes=())
    assert type(plain.patch_embed) is PatchEmbedding
    assert model.state_dict().keys() == plain.state_dict().keys()
    images = torch.randn(2, 3, 48, 48)
    model.patch_embed.current_patch_size = 16
    assert torch.equal(model.eval()(images), plain.eval()(images))
    assert not torch.allclose(model.train()(images), plain(images))
    model.patch_embed.current_patch_size = 8
    assert torch.equal(model(images), plain(images))


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_all_patch_sizes_reach_the_projection(size):
    patches = FlexiblePatchEmbedding(1, 8, 4, patch_sizes=SIZES).double()
    patches.current_patch_size, images = size, torch.randn(1, 1, 48, 48).double()

    def tokens(weight):
        return torch.func.functional_call(patches, {"proj.weight": weight}, images)[0]

    weight = patches.proj.weight.detach().requires_grad_()
    assert torch.autograd.gradcheck(tokens, (weight,), fast_mode=True)


@pytest.mark.slow
def test_flexible_patches_compile_as_one_graph_for_each_size():
    model = network(depth=1).train()
    compiled, images = (
        torch.compile(model, backend="eager", fullgraph=True),
        torch.randn(2, 3, 48, 48),
    )
    for size in (8, *SIZES):
        model.patch_embed.current_patch_size = size
        torch.testing.assert_close(compiled(images), model(images))


def test_growing_images_are_refused_with_several_patch_sizes():
    with pytest.raises(ConfigError, match="start_image_size=24: the patches of patch_sizes must"):
        Config(
            model=ModelConfig(**SMALL, patch_sizes=SIZES),
            training=TrainingConfig(start_image_size=24),
        )


def test_patch_embedding_equals_the_convolution():
    embed = PatchEmbedding(3, 4, 32)
    conv = torch.nn.Conv2d(3, 32, 4, stride=4)
    conv.weight.data = embed.proj.weight.data.reshape(32, 3, 4, 4)
    conv.bias.data = embed.proj.bias.data
    images = torch.randn(2, 3, 8, 12)
    patches, grid = embed(images)
    torch.testing.assert_close(patches, conv(images).flatten(2).transpose(1, 2))
    assert grid == (2, 3)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 8, 10), "width=10 is not a multiple of patch_size=4; resize or pad the images"),
        ((1, 3, 7, 8), "height=7 is not a multiple"),
        ((1, 3, 0, 8), "height=0 is not a multiple"),
        ((1, 4, 8, 8), "images have 4 channels; this network takes 3"),
    ],
)
@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_embeddings_refuse_other_images(shape, message, stem):
    settings = {**SMALL, "image_size": 16, "patch_size": 4, "stem": stem}
    with pytest.raises(ValueError, match=message):
        build_classifier(ModelConfig(**settings)).patch_embed(torch.zeros(shape))
