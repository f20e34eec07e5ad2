"""Blocks against torch's and timm's."""

from functools import partial

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

from vit.config import ModelConfig
from vit.model.attention import AttentionContext, SelfAttention
from vit.model.blocks import (
    DecoderBlock,
    DropPath,
    LayerScale,
    ParallelBlock,
    PostNormBlock,
    PostNormDecoderBlock,
    PreNormBlock,
    PreNormDecoderBlock,
    SandwichNormBlock,
)
from vit.model.decoder import causal_mask
from vit.model.mlp import MLP

DIM, HEADS, HIDDEN = 32, 4, 48
SMALL = ModelConfig(dim=DIM, num_heads=HEADS)
NORM = partial(nn.LayerNorm, eps=1e-6)


@torch.no_grad()
def stir(block: nn.Module) -> None:
    for parameter in block.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock])
def test_block_equals_torch(kind, tokens):
    block = kind(
        SelfAttention(SMALL),
        MLP(DIM, HIDDEN),
        norm=partial(NORM, DIM),
        scales=(nn.Identity(), nn.Identity()),
    )
    stir(block)
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
    scales = (LayerScale(DIM, 0.5), LayerScale(DIM, 2.0))
    block = ParallelBlock(
        SelfAttention(SMALL), MLP(DIM, 4 * DIM), norm=partial(NORM, DIM), scales=scales
    )
    stir(block)
    block.ls1.gamma.data.copy_(block.ls2.gamma)  # theirs has one scale for the sum of both parts
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
    scales = (nn.Identity(), nn.Identity())
    block = SandwichNormBlock(
        SelfAttention(SMALL), MLP(DIM, HIDDEN), norm=partial(NORM, DIM), scales=scales
    )
    block.double()
    stir(block)
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


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("kind", "norm_first"), [(PreNormDecoderBlock, True), (PostNormDecoderBlock, False)]
)
def test_decoder_blocks_equal_torch_s_decoder_layer(
    kind: type[DecoderBlock], norm_first: bool, padded: bool, cross_attention_like
):
    theirs = nn.TransformerDecoderLayer(
        DIM, HEADS, HIDDEN, activation="gelu", batch_first=True, norm_first=norm_first
    ).eval()
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter, mean=float(".norm" in f".{name}"), std=0.3)
    attention = SelfAttention(SMALL)
    ours = kind(
        attention,
        MLP(DIM, HIDDEN),
        cross_attn=cross_attention_like(theirs.multihead_attn, DIM),
        norm=lambda: nn.LayerNorm(DIM),
        scales=(nn.Identity(), nn.Identity(), nn.Identity()),
    ).eval()
    attention.qkv.weight.data = theirs.self_attn.in_proj_weight.data
    attention.qkv.bias.data = theirs.self_attn.in_proj_bias.data
    pairs = {
        attention.proj: theirs.self_attn.out_proj,
        ours.norm1: theirs.norm1,
        ours.norm_cross: theirs.norm2,
        ours.norm2: theirs.norm3,
        ours.mlp.fc1: theirs.linear1,
        ours.mlp.fc2: theirs.linear2,
    }
    for part, their_part in pairs.items():
        part.load_state_dict(their_part.state_dict())
    x, memory = torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)
    mask = causal_mask(0, 5, x.device)
    assert mask is not None
    context = AttentionContext(mask=mask, memory_kv=ours.cross_attn.project_kv(memory))
    padding = torch.arange(7) >= torch.tensor([[3], [7]]) if padded else None
    if padding is not None:
        context = context.replace(memory_mask=~padding[:, None, None])
    expected = theirs(
        x, memory, tgt_mask=~mask, tgt_is_causal=True, memory_key_padding_mask=padding
    )
    torch.testing.assert_close(ours(x, context)[0], expected, rtol=0, atol=1e-10)
