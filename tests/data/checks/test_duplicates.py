"""Near duplicates: which copies are found, and which different images are not."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from vit.data.checks import duplicates
from vit.data.checks.duplicates import find_near_duplicates
from vit.data.checks.image_stats import downscaled, encode_thumbnail


def scene(seed: int, width: int = 96, height: int = 72) -> Image.Image:
    """An image with waves of all lengths, as photographs have them; two are never alike."""
    noise = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for cells in (3, 6, 12, 24, 48):
        coarse = noise.integers(0, 256, (cells, cells, 3)).astype(np.uint8)
        layer = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        total += np.asarray(layer) / cells**0.7
    total -= total.min()
    return Image.fromarray((total * (255 / total.max())).astype(np.uint8))


def variants(image: Image.Image, draw: random.Random) -> dict[str, Image.Image]:
    """Copies of an image that people would call the same."""
    width, height = image.size
    factor = draw.uniform(0.5, 2)
    left, top, right, bottom = (draw.uniform(0, 0.1) for _ in range(4))
    box = (left * width, top * height, (1 - right) * width, (1 - bottom) * height)
    return {
        "size": image.resize((round(width * factor), round(height * factor))),
        "cut": image.crop(tuple(map(round, box))),
        "bright": ImageEnhance.Brightness(image).enhance(draw.uniform(0.85, 1.15)),
    }


def thumbnail(image: Image.Image) -> bytes:
    return encode_thumbnail(np.asarray(downscaled(image), dtype=np.int16))


def test_resized_cropped_and_brightened_copies_are_found_and_no_other_pairs():
    draw = random.Random(0)
    images = [scene(seed) for seed in range(30)]
    changed = [variants(image, draw) for image in images]
    for kind in changed[0]:
        shown = [thumbnail(image) for image in images] + [thumbnail(one[kind]) for one in changed]
        pairs = {pair[:2] for pair in find_near_duplicates(shown, [72] * 60)}
        expected = {(at, at + 30) for at in range(30)}
        assert pairs <= expected
        assert len(pairs) >= 28


def test_known_images_are_not_compared_with_each_other(monkeypatch):
    shown = [thumbnail(scene(seed)) for seed in range(69)]
    bright = [thumbnail(ImageEnhance.Brightness(scene(seed)).enhance(1.1)) for seed in (1, 65)]
    shown += bright  # of two known ones, and of a known and a new one
    sides = [72] * len(shown)
    compared = []
    search = duplicates._similar_in_block

    def counted(rows, top, left, table, window):
        compared.append(len(rows) * len(table))
        return search(rows, top, left, table, window)

    monkeypatch.setattr(duplicates, "ROWS", 8)
    monkeypatch.setattr(duplicates, "_similar_in_block", counted)
    assert {pair[:2] for pair in find_near_duplicates(shown, sides)} == {(1, 69), (65, 70)}
    whole = sum(compared)
    compared.clear()
    found = find_near_duplicates(shown, sides, known=70)
    assert [pair[:2] for pair in found] == [(65, 70)]
    assert sum(compared) < whole / 2
    # a new image that is not compared leaves known ones alone
    flat = thumbnail(Image.new("RGB", (72, 72), (9, 9, 9)))
    assert find_near_duplicates([*shown[:32], flat], [72] * 33, known=32) == []


def drawn(seed: int, side: int) -> Image.Image:
    """A grainy disc on a plain ground, at about the same place as all others."""
    noise = np.random.default_rng(seed)
    y, x = np.mgrid[0:64, 0:64]
    pil_image = np.zeros((64, 64, 3)) + noise.integers(95, 110, 3)
    middle, radius = noise.integers(28, 36, 2), noise.integers(12, 16)
    pil_image[np.hypot(x - middle[0], y - middle[1]) < radius] = noise.integers(190, 210, 3)
    pil_image = np.clip(pil_image + noise.normal(0, 8, pil_image.shape), 0, 255)
    return Image.fromarray(pil_image.astype(np.uint8)).resize((side, side))


@pytest.mark.parametrize("side", [64, 32])
def test_similar_drawings_are_not_near_duplicates(side):
    discs = [drawn(seed, side) for seed in range(30)]
    assert find_near_duplicates([thumbnail(disc) for disc in discs], [side] * 30) == []
    buffer = io.BytesIO()
    discs[3].save(buffer, "JPEG", quality=80)
    shown = [thumbnail(disc) for disc in [*discs, Image.open(buffer).convert("RGB")]]
    assert [pair[:2] for pair in find_near_duplicates(shown, [side] * 31)] == [(3, 30)]


def test_images_without_details_are_not_compared():
    """Digits of 8 pixels are alike without being copies."""
    small = [thumbnail(scene(1, 8, 8)), thumbnail(scene(1, 9, 9))]
    flat = thumbnail(Image.new("RGB", (40, 40), "red"))
    for shown, sides in ((small, [8, 9]), ([flat, flat], [40, 40]), ([], []), (small[:1], [72])):
        assert find_near_duplicates(shown, sides) == []


def test_candidates_among_many_similar_images_are_bounded_to_the_nearest(monkeypatch):
    tables = [torch.nn.functional.normalize(torch.randn(64, 5) * 0.1 + 1, dim=1)]
    row, column, window = duplicates._search_rows(tables, 0, 64)
    similar = tables[0] @ tables[0].T
    similar.fill_diagonal_(-2)
    expected = similar.topk(duplicates.NEAREST, dim=1).indices.sort(dim=1).values
    assert not window.any()
    assert row.bincount().tolist() == [duplicates.NEAREST] * 64
    assert torch.equal(column.view(64, -1).sort(dim=1).values, expected)


def test_candidates_among_few_similar_images_are_all_found():
    tables = [torch.nn.functional.normalize(torch.randn(64, 40), dim=1) for _ in range(2)]
    tables[1][9] = tables[0][40]
    row, column, window = duplicates._search_rows(tables, 0, 64)
    assert (row.tolist(), column.tolist(), window.tolist()) == ([40], [9], [1])
