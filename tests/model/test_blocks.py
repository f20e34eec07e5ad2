"""Norms, feed-forwards, blocks and patches against torch's and timm's."""

from functools import partial

import pytest
import timm.layers
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

from vit.model.attention import AttentionContext, SelfAttention
from vit.model.blocks import (
    DropPath,
    LayerScale,
    ParallelBlock,
    PostNormBlock,
    PreNormBlock,
    SandwichNormBlock,
)
from vit.model.mlp import MLP, PackedSwiGLU, QuickGELU, SwiGLU
from vit.model.patch_embed import PatchEmbedding
from vit.model.pooling import ClassTokenPooling, MeanPooling
from vit.model.rms_norm import RMSNorm

DIM, HEADS, HIDDEN = 32, 4, 48
NORM = partial(nn.LayerNorm, eps=1e-6)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(3, 7, DIM)


@pytest.mark.parametrize("reference", [nn.RMSNorm(DIM, eps=1e-6), timm.layers.RmsNorm(DIM)])
def test_rmsnorm_equals_the_others(reference, tokens):
    norm = RMSNorm(DIM)
    nn.init.normal_(norm.weight)
    reference.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm(tokens), reference(tokens))


def test_rmsnorm_keeps_the_type_and_computes_in_float32():
    norm = RMSNorm(2)
    large = torch.tensor([3e4, 4e4], dtype=torch.float16)  # its square has no float16
    assert norm(large).dtype == torch.float16
    torch.testing.assert_close(norm(large), torch.tensor([0.8485, 1.1312], dtype=torch.float16))


def test_swiglu_equals_timm(tokens):
    ours, theirs = SwiGLU(DIM, HIDDEN), timm.layers.SwiGLU(DIM, HIDDEN)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(tokens), theirs(tokens))


def test_packed_swiglu_equals_timm_and_the_separate_one(tokens):
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


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock])
def test_block_equals_torch(kind, tokens):
    block = kind(
        SelfAttention(DIM, HEADS),
        MLP(DIM, HIDDEN),
        norm=partial(nn.LayerNorm, DIM, eps=1e-6),
        scales=(nn.Identity(), nn.Identity()),
    )
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    reference = nn.TransformerEncoderLayer(
        DIM,
        HEADS,
        HIDDEN,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=1e-6,
        batch_first=True,
        norm_first=kind is PreNormBlock,
    )
    names = {
        "attn.qkv.weight": "self_attn.in_proj_weight",
        "attn.qkv.bias": "self_attn.in_proj_bias",
        "attn.proj": "self_attn.out_proj",
        "mlp.fc1": "linear1",
        "mlp.fc2": "linear2",
    }
    state = block.state_dict()
    for ours, theirs in names.items():
        state = {name.replace(ours, theirs): tensor for name, tensor in state.items()}
    reference.load_state_dict(state)
    torch.testing.assert_close(block(tokens, AttentionContext())[0], reference(tokens))


def test_parallel_block_equals_timm(tokens):
    norm = partial(nn.LayerNorm, DIM, eps=1e-6)
    scales = (LayerScale(DIM, 0.5), LayerScale(DIM, 2.0))
    block = ParallelBlock(SelfAttention(DIM, HEADS), MLP(DIM, 4 * DIM), norm=norm, scales=scales)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        # theirs has one scale for the sum of both parts
        block.ls1.gamma.copy_(block.ls2.gamma)
    theirs = ParallelScalingBlock(
        DIM, HEADS, qkv_bias=True, init_values=1.0, norm_layer=NORM, fuse_out_proj=True
    )
    wide, narrow = block.mlp.fc1, block.attn.qkv
    state = {
        "in_norm.weight": block.norm1.weight,
        "in_norm.bias": block.norm1.bias,
        "in_proj.weight": torch.cat([wide.weight, narrow.weight]),
        "in_proj.bias": torch.cat([wide.bias, narrow.bias]),
        "out_proj.weight": torch.cat([block.attn.proj.weight, block.mlp.fc2.weight], dim=1),
        "out_proj.bias": block.attn.proj.bias + block.mlp.fc2.bias,
        "ls.gamma": block.ls1.gamma,
    }
    theirs.load_state_dict(state)
    torch.testing.assert_close(block(tokens, AttentionContext())[0], theirs(tokens))


def test_sandwich_block_normalises_before_and_after_each_part(tokens):
    norm = partial(nn.LayerNorm, DIM, eps=1e-6)
    scales = (nn.Identity(), nn.Identity())
    block = SandwichNormBlock(SelfAttention(DIM, HEADS), MLP(DIM, HIDDEN), norm=norm, scales=scales)
    block.double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    state = block.state_dict()

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (var + 1e-6).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    x = tokens.double()
    reference = nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64)
    reference.in_proj_weight.data, reference.in_proj_bias.data = block.attn.qkv.parameters()
    reference.out_proj.load_state_dict(block.attn.proj.state_dict())
    y = normed(x, "norm1")
    x = x + normed(reference(y, y, y)[0], "norm1_post")
    hidden = nn.functional.gelu(
        normed(x, "norm2") @ state["mlp.fc1.weight"].T + state["mlp.fc1.bias"]
    )
    x = x + normed(hidden @ state["mlp.fc2.weight"].T + state["mlp.fc2.bias"], "norm2_post")
    torch.testing.assert_close(block(tokens.double(), AttentionContext())[0], x)


def test_drop_path_skips_whole_images_and_keeps_the_mean():
    drop = DropPath(0.3)
    dropped = drop(torch.ones(20_000, 2, 3))
    per_image = dropped.flatten(1)
    assert torch.equal(per_image, per_image[:, :1].expand(-1, 6))
    values = dropped.unique()
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.7]))
    assert abs((dropped == 0).float().mean() - 0.3) < 0.015  # 4.6 standard deviations
    assert abs(dropped.mean() - 1) < 0.02
    assert torch.equal(drop.eval()(dropped), dropped)


def test_layer_scale_scales_channels(tokens):
    scale = LayerScale(DIM, 0.5)
    torch.testing.assert_close(scale(tokens), tokens / 2)


def test_patch_embedding_equals_the_convolution():
    embed = PatchEmbedding(3, 4, DIM)
    conv = nn.Conv2d(3, DIM, 4, stride=4)
    conv.weight.data = embed.proj.weight.data.reshape(DIM, 3, 4, 4)
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
def test_patch_embedding_refuses_other_images(shape, message):
    with pytest.raises(ValueError, match=message):
        PatchEmbedding(3, 4, DIM)(torch.zeros(shape))


def test_pooling_reads_what_it_says(tokens):
    assert torch.equal(ClassTokenPooling()(tokens, AttentionContext()), tokens[:, 0])
    torch.testing.assert_close(MeanPooling(2)(tokens, AttentionContext()), tokens[:, 2:].mean(1))
