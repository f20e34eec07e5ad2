"""Rotary positions against the formula, one pair of channels at a time, in complex numbers."""

import cmath
import math

import pytest
import torch

from vit.model.rotary_embedding import (
    RotaryEmbedding,
    Rotation,
    centred_coordinates,
    index_coordinates,
)

HEAD_DIM, TEMPERATURE = 12, 50.0


def rotary(coordinates, prefix: int = 0) -> RotaryEmbedding:
    return RotaryEmbedding(
        HEAD_DIM, coordinates=coordinates, temperature=TEMPERATURE, prefix=prefix
    )


def turned_by_hand(x: list[float], row: float, col: float) -> list[float]:
    """One token's channels, each pair (i, i + half) as a complex number that is turned."""
    half, waves = HEAD_DIM // 2, HEAD_DIM // 4
    pairs = []
    for pair in range(half):
        place = row if pair < waves else col
        angle = place * TEMPERATURE ** (-(pair % waves) / waves)
        pairs.append(complex(x[pair], x[pair + half]) * cmath.exp(1j * angle))
    return [z.real for z in pairs] + [z.imag for z in pairs]


@pytest.mark.parametrize(
    ("context", "at"),
    [
        (index_coordinates, lambda i, _: i),
        (centred_coordinates, lambda i, side: 2 * math.pi * (2 * (i + 0.5) / side - 1)),
    ],
)
def test_rope_rotates_each_pair_by_its_angle_and_no_prefix_token(context, at):
    rows, cols, prefix = 3, 5, 2
    x = torch.randn(1, 1, prefix + rows * cols, HEAD_DIM, dtype=torch.float64)
    y = rotary(context, prefix)((rows, cols), x)(x)
    assert torch.equal(y[..., :prefix, :], x[..., :prefix, :])
    for token in range(rows * cols):
        row, col = divmod(token, cols)
        by_hand = turned_by_hand(x[0, 0, prefix + token].tolist(), at(row, rows), at(col, cols))
        torch.testing.assert_close(y[0, 0, prefix + token], torch.tensor(by_hand).double())


def test_a_reference_grid_scales_the_coordinates_of_other_grids():
    assert torch.equal(
        index_coordinates(8, reference=4), index_coordinates(4).repeat_interleave(2) + OFFSETS
    )


OFFSETS = torch.tensor([0, 0.5] * 4, dtype=torch.float64)


def test_a_rotation_keeps_norms_and_the_dtype():
    x = torch.randn(1, 2, 9, HEAD_DIM).bfloat16()
    y = rotary(index_coordinates)((3, 3), x)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float().norm(dim=-1), x.float().norm(dim=-1), atol=0.05, rtol=0)
    assert torch.equal(Rotation(torch.zeros(9, HEAD_DIM // 2))(x), x)
