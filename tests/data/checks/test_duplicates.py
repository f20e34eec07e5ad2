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
        shown = [*map(thumbnail, images), *(thumbnail(one[kind]) for one in changed)]
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

    def counted(rows, top, left, table, scale):
        compared.append(len(rows) * len(table))
        return search(rows, top, left, table, scale)

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


def test_images_between_which_the_camera_has_moved_are_found_where_asked():
    images = [scene(seed) for seed in range(20)]
    shown = [thumbnail(image.crop((0, 0, 88, 68))) for image in images]
    shown += [thumbnail(image.crop((8, 4, 96, 72))) for image in images]
    found = find_near_duplicates(shown, [68] * 40, max_overhang=duplicates.MAX_MOVED)
    assert [pair[:2] for pair in found] == [(at, at + 20) for at in range(20)]
    assert find_near_duplicates(shown, [68] * 40) == []


def test_two_images_of_one_scene_are_enough():
    shown = [thumbnail(scene(4)), thumbnail(scene(4).crop((0, 0, 90, 72)))]
    assert [pair[:2] for pair in find_near_duplicates(shown, [72, 72])] == [(0, 1)]


def test_candidates_among_many_similar_images_are_bounded_to_the_nearest():
    torch.manual_seed(0)
    table = torch.nn.functional.normalize(torch.randn(64, 5) * 0.1 + 1, dim=1)
    row, column, _ = duplicates._search_rows([table, table], 0, 64).T
    similar = (table @ table.T).fill_diagonal_(-2)
    expected = similar.topk(duplicates.NEAREST, dim=1).indices.sort(dim=1).values
    assert row.bincount().tolist() == [duplicates.NEAREST] * 64
    assert torch.equal(column.view(64, -1).sort(dim=1).values, expected)


def test_candidates_equal_brute_force(monkeypatch):
    monkeypatch.setattr(duplicates, "ROWS", 48)
    monkeypatch.setattr(duplicates, "COLUMNS", 64)
    torch.manual_seed(0)
    tables = [torch.nn.functional.normalize(torch.randn(150, 9), dim=1) for _ in range(2)]
    with duplicates.single_core_threads(2) as pool:
        pairs, scales = duplicates.candidate_pairs(tables, pool)
    similar = torch.stack([tables[0] @ table.T for table in tables])
    similar[0] = similar[0].triu(1)
    similar[1].fill_diagonal_(0)
    highest, scale = similar.max(0)
    values, column = highest.topk(duplicates.NEAREST, dim=1)
    expected = {
        (row, other, int(scale[row, other]))
        for row in range(150)
        for value, other in zip(values[row].tolist(), column[row].tolist(), strict=True)
        if value > duplicates.MIN_SIMILARITY
    }
    found = [*zip(*pairs.T.tolist(), scales.tolist(), strict=True)]
    assert sorted(found) == sorted(expected)
    assert len({which for *_, which in expected}) == 2


def test_the_usual_spectrum_is_that_of_noise_with_falling_power():
    side = duplicates.THUMBNAIL_SIDE
    frequency = torch.fft.fftfreq(side, 1 / side)
    amplitude = (frequency[:, None] ** 2 + frequency**2).clamp(min=1).rsqrt()
    amplitude[0, 0] = 0
    torch.manual_seed(0)
    noise = torch.fft.ifft2(torch.fft.fft2(torch.randn(4000, side, side)) * amplitude).real
    measured = torch.fft.rfft2(noise * duplicates.window()).abs().square().mean(0).sqrt()
    expected = duplicates.usual_spectrum(duplicates.window())
    ratio = (measured / expected)[:7, :7]
    assert torch.allclose(ratio, ratio.mean().expand(7, 7), rtol=0.06)
