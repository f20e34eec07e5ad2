"""Near-duplicate images: copies of another size, quality, brightness or crop.

Each image is compared with all others by the low frequencies of its cosine transform (the idea of
pHash: Zauner, "Implementation and benchmarking of perceptual image hash functions", 2010), as a
whole and in a few crops. The nearest candidates are aligned and compared in detail:

    x of the second = scale * x of the first + shift,    the same for y, each with its own numbers

by Gauss-Newton on the difference of brightness, from blurred to sharp. Source: Lucas and Kanade,
"An iterative image registration technique", IJCAI 1981.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit.data.checks.image_stats import CHROMA_SIDE, THUMBNAIL_SIDE

Numbers = np.ndarray[Any, Any]
NUM_FREQUENCIES = 8
"""Frequencies of the transform: those of fewer half periods, over both sides together."""
WINDOWS = (
    *((0.0, 1.0, 0.0, 1.0), (0.05, 0.95, 0.05, 0.95), (0.1, 0.9, 0.1, 0.9)),
    *((0.0, 0.9, 0.0, 0.9), (0.1, 1.0, 0.0, 0.9), (0.0, 0.9, 0.1, 1.0), (0.1, 1.0, 0.1, 1.0)),
)
"""Crops that are searched for: top, bottom, left, right as shares of the sides."""
SIMILAR = 0.87
"""Minimum correlation of cosine features of a candidate pair."""
NEAREST = 8
"""Candidate pairs per image."""
ROWS, COLUMNS, GROUPS = 512, 4096, 32
"""Block sizes of the comparison: a product that fits the caches of a core."""
PAIRS = 4096
"""Pairs aligned at a time."""
TINY = 12
"""Short side in pixels below which an image has too few details to compare."""
CONTRAST = 3.0
"""Standard deviation of grey below which an image is too flat to compare."""
SHARP = 64
"""Short side in pixels from which on details survive scaling and compression."""


class Pair(NamedTuple):
    """Two images that are nearly the same."""

    first: int
    """Index of the image; less than that of the second."""
    second: int
    score: float
    """Correlation of the aligned images."""


DETAILS = {True: 0.82, False: 0.55}
"""Minimum correlation of details, of large images (True) and small ones (False)."""
WHOLE = 0.94
"""Minimum correlation of the aligned images."""
COLOURS, SPOT = 7.0, 30.0
"""Maximum colour difference in [0, 255]: mean, and anywhere."""
TONE = 0.3
"""Maximum change of brightness or contrast, as a natural logarithm."""
OUTSIDE = 0.02
"""Maximum overhang of each image over the other, as a share of half a side."""


def find_near_duplicates(
    thumbnails: Sequence[bytes],
    short_sides: Sequence[int],
    *,
    workers: int | None = None,
    progress: Callable[[int], object] = lambda _rows: None,
) -> list[Pair]:
    """Find pairs of images that are nearly the same, in the order of the images.

    Args:
        thumbnails: `ImageStats.thumbnail` of each image, without exact duplicates.
        short_sides: Of the images, in pixels.
        workers: Threads; one per core if None.
        progress: Called with the number of images just compared with all others.
    """
    if len(thumbnails) < 2:
        return []
    images = _Thumbnails.of(thumbnails, short_sides)
    flat = torch.cat([some.flatten(1).float().std(1) for some in torch.split(images.grey, 2**13)])
    kept = ((flat >= CONTRAST) & (images.sides >= TINY)).nonzero().squeeze(1)
    progress(len(thumbnails) - len(kept))
    with single_core_threads(workers) as pool:
        pairs, windows = candidate_pairs(images.grey[kept], pool, progress)
        return _verify_pairs(images, kept[pairs], windows, pool)


def verify_near_duplicates(
    thumbnails: Sequence[bytes], short_sides: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> list[Pair]:
    """Those of `pairs` that are nearly the same image.

    Args:
        thumbnails: `ImageStats.thumbnail` of each image.
        short_sides: Of the images, in pixels.
        pairs: Indices of two different images each.
    """
    if not pairs:
        return []
    images, both = _Thumbnails.of(thumbnails, short_sides), torch.tensor(pairs)
    both = both[(images.sides[both] >= TINY).all(1)]
    windows = torch.arange(len(WINDOWS)).repeat_interleave(len(both))
    with single_core_threads(None) as pool:
        return _verify_pairs(images, both.repeat(len(WINDOWS), 1), windows, pool)


class _Thumbnails(NamedTuple):
    grey: Tensor
    colours: Tensor
    sides: Tensor

    @classmethod
    def of(cls, thumbnails: Sequence[bytes], short_sides: Sequence[int]) -> "_Thumbnails":
        find_duplicates = torch.from_numpy(
            np.frombuffer(b"".join(thumbnails), dtype=np.uint8).copy()
        )
        find_duplicates = find_duplicates.view(len(thumbnails), -1)
        grey = find_duplicates[:, : THUMBNAIL_SIDE * THUMBNAIL_SIDE].view(
            -1, THUMBNAIL_SIDE, THUMBNAIL_SIDE
        )
        colours = find_duplicates[:, THUMBNAIL_SIDE * THUMBNAIL_SIDE :].view(
            -1, 2, CHROMA_SIDE, CHROMA_SIDE
        )
        return cls(grey, colours, torch.tensor(short_sides))


def _verify_pairs(
    images: _Thumbnails, pairs: Tensor, windows: Tensor, pool: ThreadPoolExecutor
) -> list[Pair]:
    """Those that are nearly the same, each once, with their best score."""

    def judge(some: tuple[Tensor, Tensor]) -> list[Pair]:
        (first, second), windows = some[0].T, some[1]
        both = images.colours[first], images.colours[second]
        score = compare_aligned(
            images.grey[first], images.grey[second], both, WINDOW_TRANSFORMS[windows]
        )
        sharp = torch.minimum(images.sides[first], images.sides[second]) >= SHARP
        least = torch.where(sharp, DETAILS[True], DETAILS[False])
        alike = (score.whole > WHOLE) & (score.details > least) & (score.tone < TONE)
        alike &= (score.colours < COLOURS) & (score.spot < SPOT) & (score.outside < OUTSIDE)
        values = (first[alike].tolist(), second[alike].tolist(), score.whole[alike].tolist())
        return [
            Pair(min(one, two), max(one, two), value)
            for one, two, value in zip(*values, strict=True)
        ]

    parts = zip(torch.split(pairs, PAIRS), torch.split(windows, PAIRS), strict=True)
    best: dict[tuple[int, int], float] = {}
    for pair in (pair for found in pool.map(judge, parts) for pair in found):
        best[pair[:2]] = max(best.get(pair[:2], 0.0), pair.score)
    return [Pair(*key, value) for key, value in sorted(best.items())]


@contextmanager
def single_core_threads(workers: int | None) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that use one core each; pending work is cancelled on an error."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = ThreadPoolExecutor(workers or cores or 1, initializer=lambda: torch.set_num_threads(1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def candidate_pairs(
    grey: Tensor,
    pool: ThreadPoolExecutor,
    progress: Callable[[int], object] = lambda _rows: None,
) -> tuple[Tensor, Tensor]:
    """Candidate pairs, (pairs, 2), and which of WINDOWS the first image is of the second, (pairs,).

    Args:
        grey: (images, side, side) uint8.
        pool: Runs the comparison.
        progress: As in `find_near_duplicates`.
    """
    # padded with zero features, which are similar to none, to full groups
    room = (0, 0, 0, -len(grey) % GROUPS)
    tables = [F.pad(dct_features(grey, window), room) for window in WINDOWS]
    tops = range(0, len(grey), ROWS)
    pairs, windows = [torch.empty(0, 2, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    blocks = pool.map(lambda top: _search_rows(tables, top, min(ROWS, len(grey) - top)), tops)
    for row, column, window in blocks:
        pairs.append(torch.stack([row, column], dim=1))
        windows.append(window)
        progress(ROWS if len(pairs) <= len(tops) else len(grey) - tops[-1])
    return _without_mirrored(torch.cat(pairs), torch.cat(windows))


def _without_mirrored(pairs: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Without pairs of whole images that are also there in the other order."""
    second, first = pairs.T
    key = pairs.amin(1) * (int(pairs.max()) + 1 if len(pairs) else 1) + pairs.amax(1)
    mirrored = (windows == 0) & (first < second)
    there = torch.isin(key, key[(windows == 0) & ~mirrored])
    keep = ~(mirrored & there)
    return pairs[keep], windows[keep]


def _search_rows(tables: Sequence[Tensor], top: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and window of the NEAREST most similar columns of each of so many rows."""
    rows = tables[0][top : top + number]
    found = [
        _similar_in_block(rows, top, left, table[left : left + COLUMNS], window)
        for left in range(0, len(tables[0]), COLUMNS)
        for window, table in enumerate(tables)
    ]
    return _nearest_per_row(np.concatenate(found, axis=1))


def _similar_in_block(rows: Tensor, top: int, left: int, table: Tensor, number: int) -> Numbers:
    """Row, column, window and similarity of similar pairs of a block, (4, pairs)."""
    similar = rows @ table.T
    groups = similar.view(len(rows), GROUPS, -1)
    row, group = (groups.amax(1) > SIMILAR).nonzero().unbind(1)
    if len(row) > 2 * len(rows):  # crowded: no more than can be needed
        values, column = similar.topk(min(NEAREST + 1, len(table)), dim=1)
        row = torch.arange(len(rows))[:, None].expand_as(column)
    else:
        values = groups[row, :, group]
        column = torch.arange(GROUPS) * groups.shape[2] + group[:, None]
        row = row[:, None].expand_as(column)
    keep = (values > SIMILAR) & (row + top != column + left)
    row, column, values = row[keep], column[keep], values[keep]
    window = torch.full_like(values, number)
    parts = [(row + top).double(), (column + left).double(), window.double(), values.double()]
    return torch.stack(parts).numpy()


def _nearest_per_row(found: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and window of the NEAREST most similar columns of each row."""
    found = found[:, np.argsort(-found[3], kind="stable")]
    # of a pair its best window: whole numbers below 2^26 each
    _, once = np.unique(found[0] * 2**26 + found[1], return_index=True)
    found = found[:, np.sort(once)]
    found = found[:, np.argsort(found[0], kind="stable")]
    _, starts, counts = np.unique(found[0], return_index=True, return_counts=True)
    place = np.arange(found.shape[1]) - np.repeat(starts, counts)
    row, column, window = torch.from_numpy(found[:3, place < NEAREST]).long()
    return row, column, window


def dct_features(grey: Tensor, window: tuple[float, float, float, float]) -> Tensor:
    """Unit-length cosine features of a window: (images, side, side) -> (images, features)"""
    frequency = torch.arange(NUM_FREQUENCIES, dtype=torch.float32)
    total = frequency[:, None] + frequency
    slow = (total > 0) & (total < NUM_FREQUENCIES)
    # natural images have most power at low frequencies; this removes half of that excess
    weight = ((frequency[:, None] ** 2 + frequency**2) ** 0.25)[slow]
    rows, columns = (dct_matrix(*window[at : at + 2]) for at in (0, 2))
    parts = [
        F.normalize((rows @ some.float() @ columns.T)[:, slow] * weight, dim=1)
        for some in torch.split(grey, 2**13)
    ]
    return torch.cat(parts) if parts else torch.empty(0, len(weight))


def dct_matrix(start: float, end: float) -> Tensor:
    """Cosine transform of a part of a line of pixels, (NUM_FREQUENCIES, THUMBNAIL_SIDE)."""
    at = (
        (start + (torch.arange(THUMBNAIL_SIDE) + 0.5) / THUMBNAIL_SIDE * (end - start))
        * THUMBNAIL_SIDE
        - 0.5
    ).clamp(0, THUMBNAIL_SIDE - 1)
    read = (1 - (at[:, None] - torch.arange(THUMBNAIL_SIDE)).abs()).clamp(min=0.0)
    places = (torch.arange(THUMBNAIL_SIDE) + 0.5) / THUMBNAIL_SIDE
    return torch.cos(math.pi * torch.arange(NUM_FREQUENCIES)[:, None] * places) @ read


def _window_transform(window: tuple[float, float, float, float]) -> list[list[float]]:
    top, bottom, left, right = window
    return [[bottom - top, top + bottom - 1], [right - left, left + right - 1]]


WINDOW_TRANSFORMS = torch.tensor([_window_transform(window) for window in WINDOWS])
"""Scale and shift of rows and columns by which a window lies in its image, (windows, 2, 2)."""


# --- alignment ---------------------------------------------------------------------------------

ALIGNMENT_SIDE = 16
"""Side of the downsampled images that are aligned first, in pixels."""
PROMISING = 0.85
"""Minimum correlation of those for a comparison at full size."""
FINE = 1.5
"""Standard deviation in pixels of the blur that separates details from the rest."""
FAINT = 1.0
"""Strength of details, in [0, 255], below which they count less."""
LARGEST = 0.3
"""Maximum change of scale, and maximum shift as a share of a side."""
DAMPING = 1e-2
BLOCK = 256
"""Pairs at a time: their images fit the caches of a core."""


class Likeness(NamedTuple):
    """Similarity of aligned pairs of images over their overlap; each is (pairs,)."""

    whole: Tensor
    """Correlation of the images."""
    details: Tensor
    """Correlation of the details, normalised by their local strength."""
    tone: Tensor
    """The larger change of brightness and contrast, as a natural logarithm."""
    colours: Tensor
    """Mean colour difference at equal contrast, in [0, 255]."""
    spot: Tensor
    """Largest colour difference."""
    outside: Tensor
    """How far each extends beyond the other, as a share of half a side; 0 for a crop."""


def compare_aligned(
    first: Tensor, second: Tensor, colours: Sequence[Tensor], guess: Tensor
) -> Likeness:
    """Align pairs of images and compare them over their overlap.

    Args:
        first: (pairs, side, side) uint8, grey.
        second: The same.
        colours: Colour differences of both, (pairs, 2, smaller side, smaller side) uint8.
        guess: Initial alignment, (pairs, 2, 2): for rows and columns the scale and the shift of
            coordinates in [-1, 1] that map the first image to the second.

    Returns:
        Zeros for pairs that differ at low resolution already.
    """
    found = torch.zeros(len(first), len(Likeness._fields))
    parts = (torch.split(whole, BLOCK) for whole in (first, second, *colours, guess, found))
    for one, other, red, blue, start, score in zip(*parts, strict=True):
        grey, moved = one.float(), other.float()
        small, smaller = downsample(grey), downsample(moved)
        there = align(small, smaller, start, blur=0.7, steps=4)
        rows = image_correlation(small, smaller, there) > PROMISING
        if rows.any():
            grey, moved, there = grey[rows], moved[rows], there[rows]
            there = align(grey, moved, there, blur=0.7, steps=4)
            there = align(grey, moved, there, blur=0.0, steps=4)
            colour = colour_difference(
                red[rows].float(), blue[rows].float(), contrast_gain(grey, moved, there), there
            )
            parts_ = image_correlation(grey, moved, there), detail_correlation(grey, moved, there)
            score[rows] = torch.stack(
                [*parts_, tone_change(grey, moved, there), *colour, overhang(there)], 1
            )
    return Likeness(*found.T)


def tone_change(first: Tensor, second: Tensor, found: Tensor) -> Tensor:
    """The larger change of brightness and contrast over the overlap."""
    mask = overlap(found, first.shape[-1])
    total = mask.sum((1, 2)).clamp(min=1.0)
    values = []
    for image in (first, warp(second, found)):
        mean = (image * mask).sum((1, 2)) / total
        square = ((image - mean[:, None, None]).square() * mask).sum((1, 2)) / total
        values.append(torch.stack([mean + 8, square.sqrt() + 1], dim=1).log())
    return (values[0] - values[1]).abs().amax(1)


def contrast_gain(first: Tensor, second: Tensor, found: Tensor) -> Tensor:
    """Factor from the contrast of the second image to that of the first."""
    mask = overlap(found, first.shape[-1])
    one, other = zero_mean(first, mask), zero_mean(warp(second, found), mask)
    return (one * other).sum((1, 2)) / other.square().sum((1, 2)).clamp(min=1e-3)


def colour_difference(
    first: Tensor, second: Tensor, contrast: Tensor, found: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and largest colour difference over the overlap.

    Args:
        first: (pairs, 2, side, side), in [0, 255]; 128 is grey.
        second: The same.
        contrast: From `contrast_gain`: a change of contrast changes all colours with it.
        found: Alignment, as `guess` in `compare_aligned`.
    """
    mask = overlap(found, first.shape[-1])
    apart = torch.zeros_like(mask)
    for at in range(2):
        other = (warp(second[:, at], found) - 128) * contrast[:, None, None]
        apart += (first[:, at] - 128 - other).abs() * mask / 2
    return apart.sum((1, 2)) / mask.sum((1, 2)).clamp(min=1.0), apart.amax((1, 2))


def overhang(found: Tensor) -> Tensor:
    """How far two images extend beyond each other, (pairs,); 0 if one contains the other."""
    scale, shift = found[:, :, 0], found[:, :, 1].abs()
    first_out = (scale + shift - 1).amax(1).clamp(min=0.0)
    second_out = (1 - (scale - shift)).amax(1).clamp(min=0.0)
    return torch.minimum(first_out, second_out)


def warp(image: Tensor, found: Tensor) -> Tensor:
    """Warp the second image to the first."""
    rows, columns = (interpolation_matrices(found[:, axis], image.shape[-1]) for axis in range(2))
    return rows @ image @ columns.transpose(1, 2)


def downsample(images: Tensor) -> Tensor:
    """(pairs, side, side) -> (pairs, ALIGNMENT_SIDE, ALIGNMENT_SIDE), by averaging blocks."""
    return torch.nn.functional.adaptive_avg_pool2d(images, ALIGNMENT_SIDE)


def align(first: Tensor, second: Tensor, guess: Tensor, *, blur: float, steps: int) -> Tensor:
    """Refine the alignment `guess`, of the same shape.

    Args:
        first: (pairs, side, side).
        second: The same.
        guess: As in `compare_aligned`.
        blur: Standard deviation in pixels; it widens the range of convergence.
        steps: Number of Gauss-Newton steps.
    """
    side, found = first.shape[-1], guess
    place, kernel = pixel_centres(side), blur_matrix(first.shape[-1], blur)
    fixed, moving = kernel @ first @ kernel.T, kernel @ second @ kernel.T
    # gradients with respect to coordinates in [-1, 1]
    steep = [slope * (side / 2) for slope in torch.gradient(moving, dim=(1, 2))]
    for _ in range(steps):
        rows, columns = (interpolation_matrices(found[:, axis], side) for axis in range(2))
        turned = columns.transpose(1, 2)
        warped, mask = rows @ moving @ turned, overlap(found, side)
        down, across = (rows @ slope @ turned for slope in steep)
        slopes = [down * place[:, None], down, across * place, across]
        target, matrix = residual_and_jacobian(fixed, warped, torch.stack(slopes, dim=1), mask)
        found = found + damped_least_squares(matrix, target).view(-1, 2, 2)
        scale = found[:, :, 0].clamp(1 - LARGEST, 1 + LARGEST)
        shift = found[:, :, 1].clamp(-2 * LARGEST, 2 * LARGEST)
        found = torch.stack([scale, shift], dim=2)
    return found


def residual_and_jacobian(
    fixed: Tensor, warped: Tensor, matrix: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Residual, (pairs, pixels), and Jacobian, (pairs, unknowns, pixels).

    Brightness and contrast of the second image are first matched to those of the first.
    """
    fixed, warped, mask = fixed.flatten(1), warped.flatten(1), mask.flatten(1)
    matrix = matrix.flatten(2)
    total = mask.sum(1, keepdim=True).clamp(min=1.0)
    fixed = fixed - (fixed * mask).sum(1, keepdim=True) / total
    warped = warped - (warped * mask).sum(1, keepdim=True) / total
    square = (warped * warped * mask).sum(1, keepdim=True)
    gain = ((fixed * warped * mask).sum(1, keepdim=True) / square.clamp(min=1e-6)).clamp(0.2, 5.0)
    matrix = matrix - (matrix @ mask.unsqueeze(2)) / total.unsqueeze(2)
    return (fixed - gain * warped) * mask, matrix * (gain * mask).unsqueeze(1)


def damped_least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """Damped least squares: (pairs, unknowns, pixels), (pairs, pixels) -> (pairs, unknowns)"""
    normal = matrix @ matrix.transpose(1, 2)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    normal = normal + torch.diag_embed(DAMPING * diagonal + 1e-3)
    solution: Tensor = torch.linalg.solve(normal, matrix @ target.unsqueeze(2))
    return solution.squeeze(2)


def image_correlation(first: Tensor, second: Tensor, found: Tensor) -> Tensor:
    """Correlation of the images over their overlap."""
    return correlation(first, warp(second, found), overlap(found, first.shape[-1]))


def detail_correlation(first: Tensor, second: Tensor, found: Tensor) -> Tensor:
    """Correlation of the details (the image less its blur), divided by their local strength.

    So an edge, which many images share, counts no more than the texture of a plain surface, which
    only copies share. Details weaker than FAINT are compression noise, and count little.
    """
    side = first.shape[-1]
    mask, blur = overlap(found, side), blur_matrix(side, FINE)
    one, other = (image - blur @ image @ blur.T for image in (first, warp(second, found)))
    around = (blur @ mask @ blur.T).clamp(min=1e-3)
    power = blur @ ((one.square() + other.square()) / 2 * mask) @ blur.T / around
    unit = (power + FAINT**2).rsqrt()
    return correlation(one * unit, other * unit, mask)


def correlation(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Correlation of (pairs, side, side) where `mask` is 1; 0 if one of them is constant."""
    first, second = zero_mean(first, mask), zero_mean(second, mask)
    power = first.square().sum((1, 2)) * second.square().sum((1, 2))
    return (first * second).sum((1, 2)) / power.clamp(min=1e-3).sqrt()


def zero_mean(image: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean where `mask` is 1; 0 elsewhere."""
    total = mask.sum((1, 2), keepdim=True).clamp(min=1.0)
    return (image - (image * mask).sum((1, 2), keepdim=True) / total) * mask


def pixel_centres(side: int) -> Tensor:
    """Coordinates of pixel centres, in [-1, 1]."""
    return (torch.arange(side) + 0.5) * (2 / side) - 1


def interpolation_matrices(line: Tensor, side: int) -> Tensor:
    """Matrices of linear interpolation along a line of pixels: (pairs, 2) -> (pairs, side, side)"""
    at = ((line[:, :1] * pixel_centres(side) + line[:, 1:]) + 1) * (side / 2) - 0.5
    distance = at.clamp(0, side - 1).unsqueeze(2) - torch.arange(side)
    return (1 - distance.abs()).clamp(min=0.0)


def overlap(found: Tensor, side: int) -> Tensor:
    """1 where a pixel of the first image lies in the second, (pairs, side, side)."""
    inside = ((found[:, :, :1] * pixel_centres(side) + found[:, :, 1:]).abs() <= 1).float()
    return inside[:, 0, :, None] * inside[:, 1, None, :]


def blur_matrix(side: int, sigma: float) -> Tensor:
    """Matrix of a Gaussian blur along a line of pixels; rows sum to 1."""
    if not sigma:
        return torch.eye(side)
    place = torch.arange(side)
    weights = torch.exp(-((place[:, None] - place).float() ** 2) / (2 * sigma**2))
    return weights / weights.sum(1, keepdim=True)
