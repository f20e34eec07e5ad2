"""Relative positions against timm's table, a loop over pairs of tokens, and the network around."""

import copy
from itertools import product

import pytest
import torch
from timm.layers import RelPosBias, resize_rel_pos_bias_table_simple
from torch import nn

from vit.config import ModelConfig
from vit.model.attention import AttentionContext, SelfAttention
from vit.model.build import build_classifier
from vit.model.relative_position_bias import RelativePositionBias, resize_bias_table

HEADS = 4
SMALL = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "num_heads": HEADS}
SMALL |= {"num_classes": 3, "position": "relative"}
PREFIXES = (0, 1, 3)


def made(grid: tuple[int, int], prefix: int) -> RelativePositionBias:
    bias = RelativePositionBias(grid, HEADS, prefix=prefix)
    nn.init.normal_(bias.relative_position_bias_table)
    return bias.double()


def one_by_one(table: torch.Tensor, grid: tuple[int, int], prefix: int) -> torch.Tensor:
    """(heads, tokens, tokens), from a table's rows looked up for each pair of tokens."""
    rows, cols = grid
    context = [None] * prefix + list(product(range(rows), range(cols)))
    count = (2 * rows - 1) * (2 * cols - 1)
    result = torch.empty(table.shape[1], len(context), len(context), dtype=table.dtype)
    for (i, query), (j, key) in product(enumerate(context), repeat=2):
        if query and key:
            row = (query[0] - key[0] + rows - 1) * (2 * cols - 1) + query[1] - key[1] + cols - 1
        else:
            row = count + (0 if key else 1 if query else 2)
        result[:, i, j] = table[row]
    return result


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    model = build_classifier(ModelConfig(**SMALL, registers=1))
    for name, parameter in model.named_parameters():
        if name.endswith("bias_table") or name.startswith("head"):
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", [(1, 1), (3, 3), (2, 5), (4, 1)])
def test_relative_bias_equals_a_loop_over_pairs_of_tokens(grid, prefix):
    bias = made(grid, prefix)
    expected = one_by_one(bias.relative_position_bias_table, grid, prefix)
    torch.testing.assert_close(bias(AttentionContext(grid)), expected[None], rtol=0, atol=0)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("grid", [(3, 3), (2, 5)])
def test_relative_bias_equals_timm(grid, prefix):
    theirs = RelPosBias(grid, HEADS, prefix_tokens=prefix)
    ours = made(grid, prefix).float()
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(AttentionContext(grid)), theirs.get_bias(), rtol=0, atol=0)


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("new", [(5, 5), (2, 2), (3, 6)])
def test_resizing_the_bias_table_equals_timm(new, extra):
    table = torch.randn(7 * 7 + extra, HEADS)
    count = (2 * new[0] - 1) * (2 * new[1] - 1) + extra
    expected = resize_rel_pos_bias_table_simple(table, new, (count, HEADS))
    torch.testing.assert_close(
        resize_bias_table(table, (4, 4), new, num_prefix_rows=extra), expected
    )


def test_rows_and_columns_of_the_bias_table_are_resized_independently():
    """A table that knows only rows knows only rows afterwards, as a square one of timm does."""
    line = torch.randn(9, HEADS)
    square = resize_rel_pos_bias_table_simple(
        line.repeat_interleave(9, dim=0), (9, 9), (17 * 17, HEADS)
    )
    wide = resize_bias_table(line.repeat_interleave(13, dim=0), (5, 7), (9, 3), num_prefix_rows=0)
    expected = square.view(17, 17, HEADS)[:, :5].flatten(0, 1)
    torch.testing.assert_close(wide, expected)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_other_grids_use_the_resized_table(prefix):
    bias, grid = made((3, 3), prefix), (4, 6)
    table = resize_bias_table(
        bias.relative_position_bias_table, (3, 3), grid, num_prefix_rows=3 * (prefix > 0)
    )
    torch.testing.assert_close(bias(AttentionContext(grid))[0], one_by_one(table, grid, prefix))


@pytest.mark.parametrize("shape", [(10, 10), (2, 1, 10, 10), (1, HEADS, 10, 10)])
def test_a_mask_is_added_to_the_relative_bias(shape):
    bias, context = made((3, 3), 1), AttentionContext((3, 3))
    mask = torch.rand(shape) < 0.7
    numbers = torch.randn(shape, dtype=torch.float64)
    plain = bias(context)
    torch.testing.assert_close(bias(context._replace(mask=numbers)), plain + numbers)
    hidden = bias(context._replace(mask=mask))
    expected = torch.where(mask, plain, float("-inf"))
    torch.testing.assert_close(hidden, expected)


def test_attention_with_relative_bias_equals_the_formula():
    torch.manual_seed(0)
    bias = made((2, 3), 2)
    attention = SelfAttention(ModelConfig(dim=32, num_heads=HEADS), rel_pos=bias).double().eval()
    tokens = torch.randn(2, 8, 32, dtype=torch.float64)
    query, key, value = attention.qkv(tokens).view(2, 8, 3, HEADS, 8).permute(2, 0, 3, 1, 4)
    table = one_by_one(bias.relative_position_bias_table, (2, 3), 2)
    scores = query @ key.transpose(2, 3) / 8**0.5 + table
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(tokens, AttentionContext((2, 3))), attention.proj(mixed))


def test_each_block_has_its_own_bias_table(network):
    shapes = {name: p.shape for name, p in network.named_parameters() if "rel_pos" in name}
    names = [f"blocks.{index}.attn.rel_pos.relative_position_bias_table" for index in range(2)]
    assert shapes == dict.fromkeys(names, (7 * 7 + 3, HEADS))
    assert not [name for name, _ in network.named_buffers() if "rel_pos" in name]


def test_relative_bias_supports_copies_checkpoints_and_the_meta_device(network):
    images = torch.randn(2, 3, 32, 32)
    network(images).sum().backward()
    torch.testing.assert_close(copy.deepcopy(network)(images), network(images))
    other = build_classifier(ModelConfig(**SMALL, registers=1))
    other.load_state_dict(network.state_dict())
    torch.testing.assert_close(other(images), network(images))
    shapeless = copy.deepcopy(network).to("meta")
    for size in (32, 48):
        assert shapeless(torch.empty(2, 3, size, 32, device="meta")).shape == (2, 3)
