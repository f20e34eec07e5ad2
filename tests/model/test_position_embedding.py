"""Positions against independent formulas, and their stretching against timm's."""

import copy
import math

import numpy as np
import pytest
import timm.layers
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vit.config import ModelConfig
from vit.model.build import build_classifier
from vit.model.position_embedding import (
    SinusoidalPositions,
    resize_positions,
    sinusoidal_1d,
    sinusoidal_2d,
)

SMALL = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 1, "num_heads": 2, "num_classes": 2}


def test_sinusoidal_2d_equals_timm_with_rows_and_columns_exchanged():
    theirs = timm.layers.build_sincos2d_pos_embed([3, 5], 32, interleave_sin_cos=True)
    by_row, by_col = theirs.chunk(2, dim=1)
    ours = sinusoidal_2d((3, 5), 32)
    torch.testing.assert_close(ours, torch.cat([by_col, by_row], dim=1), atol=1e-6, rtol=0)


def test_sinusoidal_1d_equals_a_plain_loop():
    rows, cols, dim = 2, 4, 6
    expected = np.zeros((rows * cols, dim))
    for place in range(rows * cols):
        for i in range(dim // 2):
            angle = place / 10_000 ** (2 * i / dim)
            expected[place, 2 * i : 2 * i + 2] = math.sin(angle), math.cos(angle)
    np.testing.assert_allclose(sinusoidal_1d((rows, cols), dim).numpy(), expected, atol=1e-7)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("new", [(4, 4), (8, 3), (7, 7)])
def test_resizing_learned_positions_equals_timm(prefix, new):
    table = torch.randn(1, prefix + 25, 8)
    theirs = timm.layers.resample_abs_pos_embed(table, new, (5, 5), num_prefix_tokens=prefix)
    torch.testing.assert_close(resize_positions(table, (5, 5), new, prefix=prefix), theirs)


@pytest.mark.parametrize("grid", [(2, 2), (3, 4)])
def test_registers_have_no_position(grid):
    positions = SinusoidalPositions((2, 2), 8, encode=sinusoidal_2d, prefix=0, unpositioned=2)
    zeros = torch.zeros(1, 2 + grid[0] * grid[1], 8)
    placed = positions(zeros, positions.table(), grid)
    assert not placed[:, :2].any()
    assert torch.equal(placed[0, 2:], sinusoidal_2d(grid, 8))


def test_one_column_is_resized_as_one_row():
    table = torch.rand(1, 64, 4)
    turned = table.view(1, 8, 8, 4).transpose(1, 2).reshape(1, 64, 4)
    row = resize_positions(table, (8, 8), (1, 3), prefix=0)
    torch.testing.assert_close(resize_positions(turned, (8, 8), (3, 1), prefix=0), row)


def test_a_network_without_positions_adds_nothing_to_its_tokens():
    model = build_classifier(
        ModelConfig(image_size=16, patch_size=8, dim=8, depth=1, num_heads=2, position="none")
    )
    images = torch.randn(2, 3, 16, 16)
    tokens, _ = model.embed(images)
    assert model.pos_embed is None
    assert torch.equal(tokens[:, 1:], model.patch_embed(images)[0])
    assert torch.equal(tokens[:, 0], model.cls_token[0].expand(2, -1))


@pytest.mark.parametrize("position", ["sinusoidal_2d", "sinusoidal_1d", "rotary"])
def test_tables_of_another_size_are_made_once(position, monkeypatch):
    network = build_classifier(ModelConfig(**SMALL, position=position))
    small = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        first = network(small)
    fresh = build_classifier(ModelConfig(**SMALL, position=position))
    fresh.load_state_dict(network.state_dict())
    part = network.rotary if position == "rotary" else network.positions
    makes = "padded_angles" if position == "rotary" else "encoded"
    with monkeypatch.context() as patch:
        patch.setattr(part, makes, lambda _: pytest.fail("made again"))
        network(small).sum().backward()  # a table of inference serves training
        torch.testing.assert_close(network(small), first, rtol=0, atol=0)
    torch.testing.assert_close(fresh(small), first, rtol=0, atol=0)
    network.double()
    torch.testing.assert_close(network(small.double()), fresh.double()(small.double()))
    for side in range(16, 16 + 8 * 20, 8):  # prediction at native sizes
        network(torch.randn(1, 3, side, 16, dtype=torch.float64))
    assert len(part.tables.kept) <= part.tables.MOST
    assert set(copy.deepcopy(network).state_dict()) == set(fresh.state_dict())


@pytest.mark.parametrize("position", ["sinusoidal_2d", "rotary"])
def test_nothing_is_kept_of_a_traced_network(position):
    network = build_classifier(ModelConfig(**SMALL, position=position)).eval()
    small = torch.randn(2, 3, 16, 16)
    exported = torch.export.export(network, (small,)).module()
    with FakeTensorMode(allow_non_fake_inputs=True):
        network(torch.empty(2, 3, 24, 24))
    part = network.rotary if position == "rotary" else network.positions
    assert not part.tables.kept
    torch.testing.assert_close(exported(small), network(small))
