"""Finds images that are nearly the same: copies of other sizes, quality, brightness, or cuts.

Every image is compared with all others by its coarse waves (a cosine transform, the idea of
pHash: Zauner, "Implementation and benchmarking of perceptual image hash functions", 2010), as it is
and cut in a few ways; the few nearest are laid over each other and compared in detail.

Lays one small grey image over another, as if one were cut out of the other, and compares.

    x of the second = scale * x of the first + shift,    the same for y, each with its own numbers

Gauss-Newton on the difference of brightness, from blurred to sharp. Source: Lucas and Kanade, "An
iterative image registration technique", IJCAI 1981.
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

ALIGNMENT_SIDE = 16
"""Side of the images that are laid over each other first."""
PROMISING = 0.85
"""Correlation of those from which on the larger ones are compared."""
FINE = 1.5
"""Pixels of blur: what it takes away are the details."""
FAINT = 1.0
"""Strength of details, in bytes, below which they count less."""
LARGEST = 0.3
"""Change of scale, and shift as a share of a side, that are still the same image."""
DAMPING = 1e-2
BLOCK = 256
"""Pairs at a time: what is computed stays in the caches of a core."""


class Likeness(NamedTuple):
    """How alike pairs of images are where both show the same; each is (pairs,)."""

    whole: Tensor
    """Correlation of the images."""
    details: Tensor
    """Correlation of what a blur takes away, the faint as much as the strong."""
    tone: Tensor
    """Change of brightness or contrast, whichever is more, as a natural logarithm."""
    colours: Tensor
    """Mean difference of colours of equal contrast, in bytes."""
    spot: Tensor
    """The same where it is largest."""
    outside: Tensor
    """How far each reaches beyond the other, as a share of half a side: a cut does not."""


def compare(first: Tensor, second: Tensor, colours: Sequence[Tensor], guess: Tensor) -> Likeness:
    """How alike pairs of images are where they are laid over each other.

    Args:
        first: (pairs, side, side), grey bytes.
        second: The same.
        colours: Of both, (pairs, 2, smaller side, smaller side) bytes.
        guess: Where the first is on the second: for rows and columns a scale and a shift of places
            from -1 to 1, (pairs, 2, 2).

    Returns:
        Zeros for `whole` and `details` where a coarse look is enough.
    """
    found = torch.zeros(len(first), len(Likeness._fields))
    parts = (torch.split(whole, BLOCK) for whole in (first, second, *colours, guess, found))
    for one, other, red, blue, start, score in zip(*parts, strict=True):
        grey, moved = one.float(), other.float()
        small, smaller = shrunk(grey), shrunk(moved)
        there = align(small, smaller, start, blur=0.7, steps=4)
        rows = whole(small, smaller, there) > PROMISING
        if rows.any():
            grey, moved, there = grey[rows], moved[rows], there[rows]
            there = align(grey, moved, there, blur=0.7, steps=4)
            there = align(grey, moved, there, blur=0.0, steps=4)
            colour = difference(
                red[rows].float(), blue[rows].float(), gain(grey, moved, there), there
            )
            parts_ = whole(grey, moved, there), details(grey, moved, there)
            score[rows] = torch.stack(
                [*parts_, tone(grey, moved, there), *colour, beyond(there)], 1
            )
    return Likeness(*found.T)


def tone(first: Tensor, second: Tensor, found: Tensor) -> Tensor:
    """Change of brightness or contrast over what both show."""
    mask = overlap(found, first.shape[-1])
    total = mask.sum((1, 2)).clamp(min=1.0)
    values = []
    for image in (first, resampled(second, found)):
        mean = (image * mask).sum((1, 2)) / total
        square = ((image - mean[:, None, None]).square() * mask).sum((1, 2)) / total
        values.append(torch.stack([mean + 8, square.sqrt() + 1], dim=1).log())
    return (values[0] - values[1]).abs().amax(1)


def gain(first: Tensor, second: Tensor, found: Tensor) -> Tensor:
    """What the contrast of the second image is multiplied by to be that of the first."""
    mask = overlap(found, first.shape[-1])
    one, other = centred(first, mask), centred(resampled(second, found), mask)
    return (one * other).sum((1, 2)) / other.square().sum((1, 2)).clamp(min=1e-3)


def difference(
    first: Tensor, second: Tensor, contrast: Tensor, found: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and largest difference of colours, (pairs, 2, side, side), over what both show.

    Args:
        first: Bytes, 128 where there is no colour.
        second: The same.
        contrast: As from `gain`: who changes the brightness changes all colours with it.
        found: Where the first is on the second.
    """
    mask = overlap(found, first.shape[-1])
    apart = torch.zeros_like(mask)
    for at in range(2):
        other = (resampled(second[:, at], found) - 128) * contrast[:, None, None]
        apart += (first[:, at] - 128 - other).abs() * mask / 2
    return apart.sum((1, 2)) / mask.sum((1, 2)).clamp(min=1.0), apart.amax((1, 2))


def beyond(found: Tensor) -> Tensor:
    """How far two images reach beyond each other, (pairs,); 0 where one holds the other."""
    scale, shift = found[:, :, 0], found[:, :, 1].abs()
    first_out = (scale + shift - 1).amax(1).clamp(min=0.0)
    second_out = (1 - (scale - shift)).amax(1).clamp(min=0.0)
    return torch.minimum(first_out, second_out)


def resampled(image: Tensor, found: Tensor) -> Tensor:
    """The second image as the first would show it."""
    rows, columns = (sampling(found[:, axis], image.shape[-1]) for axis in range(2))
    return rows @ image @ columns.transpose(1, 2)


def shrunk(images: Tensor) -> Tensor:
    """(pairs, side, side) -> (pairs, ALIGNMENT_SIDE, ALIGNMENT_SIDE), by means of blocks."""
    return torch.nn.functional.adaptive_avg_pool2d(images, ALIGNMENT_SIDE)


def align(first: Tensor, second: Tensor, guess: Tensor, *, blur: float, steps: int) -> Tensor:
    """A better `guess`, of the same shape.

    Args:
        first: (pairs, side, side).
        second: The same.
        guess: As for `compare`.
        blur: In pixels; it makes a wrong guess less wrong.
        steps: Of Gauss-Newton.
    """
    side, found = first.shape[-1], guess
    place, kernel = places(side), blurring(first.shape[-1], blur)
    fixed, moving = kernel @ first @ kernel.T, kernel @ second @ kernel.T
    # gradients by a place from -1 to 1
    steep = [slope * (side / 2) for slope in torch.gradient(moving, dim=(1, 2))]
    for _ in range(steps):
        rows, columns = (sampling(found[:, axis], side) for axis in range(2))
        turned = columns.transpose(1, 2)
        warped, mask = rows @ moving @ turned, overlap(found, side)
        down, across = (rows @ slope @ turned for slope in steep)
        slopes = [down * place[:, None], down, across * place, across]
        target, matrix = standardised(fixed, warped, torch.stack(slopes, dim=1), mask)
        found = found + solve(matrix, target).view(-1, 2, 2)
        scale = found[:, :, 0].clamp(1 - LARGEST, 1 + LARGEST)
        shift = found[:, :, 1].clamp(-2 * LARGEST, 2 * LARGEST)
        found = torch.stack([scale, shift], dim=2)
    return found


def standardised(
    fixed: Tensor, warped: Tensor, matrix: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """What is left to explain, (pairs, pixels), and by what, (pairs, unknowns, pixels).

    Brightness and contrast of the second image become those of the first before.
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


def solve(matrix: Tensor, target: Tensor) -> Tensor:
    """Least squares, damped: (pairs, unknowns, pixels), (pairs, pixels) -> (pairs, unknowns)"""
    normal = matrix @ matrix.transpose(1, 2)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    normal = normal + torch.diag_embed(DAMPING * diagonal + 1e-3)
    solution: Tensor = torch.linalg.solve(normal, matrix @ target.unsqueeze(2))
    return solution.squeeze(2)


def whole(first: Tensor, second: Tensor, found: Tensor) -> Tensor:
    """Correlation of images over what both show."""
    return correlation(first, resampled(second, found), overlap(found, first.shape[-1]))


def details(first: Tensor, second: Tensor, found: Tensor) -> Tensor:
    """Correlation of what a blur takes away, in units of its strength around each pixel.

    So the edge of a thing, which many things share, counts no more than the grain of a plain
    surface, which only copies share. Less than FAINT is what compression leaves, and counts little.
    """
    side = first.shape[-1]
    mask, blur = overlap(found, side), blurring(side, FINE)
    one, other = (image - blur @ image @ blur.T for image in (first, resampled(second, found)))
    around = (blur @ mask @ blur.T).clamp(min=1e-3)
    power = blur @ ((one.square() + other.square()) / 2 * mask) @ blur.T / around
    unit = (power + FAINT**2).rsqrt()
    return correlation(one * unit, other * unit, mask)


def correlation(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Of (pairs, side, side) where `mask` is 1; 0 where one of them is flat."""
    first, second = centred(first, mask), centred(second, mask)
    power = first.square().sum((1, 2)) * second.square().sum((1, 2))
    return (first * second).sum((1, 2)) / power.clamp(min=1e-3).sqrt()


def centred(image: Tensor, mask: Tensor) -> Tensor:
    """With a mean of 0 where `mask` is 1, and 0 elsewhere."""
    total = mask.sum((1, 2), keepdim=True).clamp(min=1.0)
    return (image - (image * mask).sum((1, 2), keepdim=True) / total) * mask


def places(side: int) -> Tensor:
    """Centres of pixels, from -1 to 1."""
    return (torch.arange(side) + 0.5) * (2 / side) - 1


def sampling(line: Tensor, side: int) -> Tensor:
    """Matrices that read a line of pixels at other places: (pairs, 2) -> (pairs, side, side)"""
    at = ((line[:, :1] * places(side) + line[:, 1:]) + 1) * (side / 2) - 0.5
    distance = at.clamp(0, side - 1).unsqueeze(2) - torch.arange(side)
    return (1 - distance.abs()).clamp(min=0.0)


def overlap(found: Tensor, side: int) -> Tensor:
    """1 where a pixel of the first image is on the second one: (pairs, side, side)"""
    inside = ((found[:, :, :1] * places(side) + found[:, :, 1:]).abs() <= 1).float()
    return inside[:, 0, :, None] * inside[:, 1, None, :]


def blurring(side: int, sigma: float) -> Tensor:
    """A matrix that blurs a line of pixels by a Gaussian; rows sum to 1."""
    if not sigma:
        return torch.eye(side)
    place = torch.arange(side)
    weights = torch.exp(-((place[:, None] - place).float() ** 2) / (2 * sigma**2))
    return weights / weights.sum(1, keepdim=True)


Numbers = np.ndarray[Any, Any]
WAVES = 8
"""Of the transform: those of fewer half periods, over both sides together."""
WINDOWS = (
    *((0.0, 1.0, 0.0, 1.0), (0.05, 0.95, 0.05, 0.95), (0.1, 0.9, 0.1, 0.9)),
    *((0.0, 0.9, 0.0, 0.9), (0.1, 1.0, 0.0, 0.9), (0.0, 0.9, 0.1, 1.0), (0.1, 1.0, 0.1, 1.0)),
)
"""Cuts that are looked for: top, bottom, left, right as shares of the sides."""
SIMILAR = 0.87
"""Correlation of waves from which on a pair is looked at."""
NEAREST = 8
"""Pairs of an image that are looked at."""
ROWS, COLUMNS, GROUPS = 512, 4096, 32
"""Images compared with images at a time: a product that stays in the caches of a core."""
PAIRS = 4096
"""Pairs laid over each other at a time."""
TINY = 12
"""Pixels of a short side below which there are no details to tell copies by."""
CONTRAST = 3.0
"""Deviation of grey below which an image is too flat to be told from others."""
SHARP = 64
"""Pixels of a short side from which on details survive scaling and compression."""


class Pair(NamedTuple):
    """Two images that are nearly the same."""

    first: int
    """Place of the image; less than that of the second."""
    second: int
    score: float
    """Correlation of the images where they are laid over each other."""


DETAILS = {True: 0.82, False: 0.55}
"""Least correlation of details of images that are sharp in their copies, and of small ones."""
WHOLE = 0.94
"""Least correlation of the images."""
COLOURS, SPOT = 7.0, 30.0
"""Most difference of colours in bytes, in the mean and anywhere."""
TONE = 0.3
"""Most change of brightness or contrast, as a natural logarithm."""
OUTSIDE = 0.02
"""Most of half a side that each may show beside the other: one is a cut of the other."""


def find_near_duplicates(
    thumbnails: Sequence[bytes],
    short_sides: Sequence[int],
    *,
    workers: int | None = None,
    progress: Callable[[int], object] = lambda _rows: None,
) -> list[Pair]:
    """Pairs of images that are nearly the same, in the order of the images.

    Args:
        looks: As in Facts; none twice.
        short_sides: Of the images, in pixels.
        workers: Threads; one a core if None.
        progress: Told how many more images were compared with all others.
    """
    if len(thumbnails) < 2:
        return []
    images = _Looks.of(thumbnails, short_sides)
    flat = torch.cat([some.flatten(1).float().std(1) for some in torch.split(images.grey, 2**13)])
    kept = ((flat >= CONTRAST) & (images.sides >= TINY)).nonzero().squeeze(1)
    progress(len(thumbnails) - len(kept))
    with threads(workers) as pool:
        pairs, windows = candidates(images.grey[kept], pool, progress)
        return _judged(images, kept[pairs], windows, pool)


def verify_near_duplicates(
    thumbnails: Sequence[bytes], short_sides: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> list[Pair]:
    """Those of `pairs`, however they were found, that are nearly the same image.

    Args:
        looks: As in Facts.
        short_sides: Of the images, in pixels.
        pairs: Places of two different images each.
    """
    if not pairs:
        return []
    images, both = _Looks.of(thumbnails, short_sides), torch.tensor(pairs)
    both = both[(images.sides[both] >= TINY).all(1)]
    windows = torch.arange(len(WINDOWS)).repeat_interleave(len(both))
    with threads(None) as pool:
        return _judged(images, both.repeat(len(WINDOWS), 1), windows, pool)


class _Looks(NamedTuple):
    grey: Tensor
    colours: Tensor
    sides: Tensor

    @classmethod
    def of(cls, thumbnails: Sequence[bytes], short_sides: Sequence[int]) -> "_Looks":
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


def _judged(images: _Looks, pairs: Tensor, windows: Tensor, pool: ThreadPoolExecutor) -> list[Pair]:
    """Those that are nearly the same, each once."""

    def judge(some: tuple[Tensor, Tensor]) -> list[Pair]:
        (first, second), windows = some[0].T, some[1]
        both = images.colours[first], images.colours[second]
        score = compare(images.grey[first], images.grey[second], both, guesses[windows])
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
def threads(workers: int | None) -> Iterator[ThreadPoolExecutor]:
    """Threads that compute with one core each; what waits is dropped at an error."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = ThreadPoolExecutor(workers or cores or 1, initializer=lambda: torch.set_num_threads(1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def candidates(
    grey: Tensor,
    pool: ThreadPoolExecutor,
    progress: Callable[[int], object] = lambda _rows: None,
) -> tuple[Tensor, Tensor]:
    """Pairs worth a closer look, (pairs, 2), and which of WINDOWS the first is of the second.

    Args:
        grey: (images, SIDE, SIDE) bytes.
        pool: Does the work.
        progress: As for `find_near_duplicates`.
    """
    # padded by images that are like none, so that groups are whole
    room = (0, 0, 0, -len(grey) % GROUPS)
    tables = [F.pad(waves(grey, window), room) for window in WINDOWS]
    tops = range(0, len(grey), ROWS)
    pairs, windows = [torch.empty(0, 2, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    blocks = pool.map(lambda top: _block(tables, top, min(ROWS, len(grey) - top)), tops)
    for row, column, window in blocks:
        pairs.append(torch.stack([row, column], dim=1))
        windows.append(window)
        progress(ROWS if len(pairs) <= len(tops) else len(grey) - tops[-1])
    return _once(torch.cat(pairs), torch.cat(windows))


def _once(pairs: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Without pairs of whole images the other way round, which say the same."""
    second, first = pairs.T
    key = pairs.amin(1) * (int(pairs.max()) + 1 if len(pairs) else 1) + pairs.amax(1)
    mirrored = (windows == 0) & (first < second)
    there = torch.isin(key, key[(windows == 0) & ~mirrored])
    keep = ~(mirrored & there)
    return pairs[keep], windows[keep]


def _block(tables: Sequence[Tensor], top: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and window of the NEAREST most similar columns of each of so many rows."""
    rows = tables[0][top : top + number]
    found = [
        _similar(rows, top, left, table[left : left + COLUMNS], window)
        for left in range(0, len(tables[0]), COLUMNS)
        for window, table in enumerate(tables)
    ]
    return _nearest(np.concatenate(found, axis=1))


def _similar(rows: Tensor, top: int, left: int, table: Tensor, number: int) -> Numbers:
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


def _nearest(found: Numbers) -> tuple[Tensor, Tensor, Tensor]:
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


def waves(grey: Tensor, window: tuple[float, float, float, float]) -> Tensor:
    """Coarse waves of a window of images, of length 1: (images, side, side) -> (images, n)"""
    frequency = torch.arange(WAVES, dtype=torch.float32)
    total = frequency[:, None] + frequency
    slow = (total > 0) & (total < WAVES)
    # natural images have most power in slow waves; half of that advantage is taken back
    weight = ((frequency[:, None] ** 2 + frequency**2) ** 0.25)[slow]
    rows, columns = (cosines(*window[at : at + 2]) for at in (0, 2))
    parts = [
        F.normalize((rows @ some.float() @ columns.T)[:, slow] * weight, dim=1)
        for some in torch.split(grey, 2**13)
    ]
    return torch.cat(parts) if parts else torch.empty(0, len(weight))


def cosines(start: float, end: float) -> Tensor:
    """The transform of a part of a line of pixels, (WAVES, SIDE)."""
    at = (
        (start + (torch.arange(THUMBNAIL_SIDE) + 0.5) / THUMBNAIL_SIDE * (end - start))
        * THUMBNAIL_SIDE
        - 0.5
    ).clamp(0, THUMBNAIL_SIDE - 1)
    read = (1 - (at[:, None] - torch.arange(THUMBNAIL_SIDE)).abs()).clamp(min=0.0)
    places = (torch.arange(THUMBNAIL_SIDE) + 0.5) / THUMBNAIL_SIDE
    return torch.cos(math.pi * torch.arange(WAVES)[:, None] * places) @ read


def _guess(window: tuple[float, float, float, float]) -> list[list[float]]:
    top, bottom, left, right = window
    return [[bottom - top, top + bottom - 1], [right - left, left + right - 1]]


guesses = torch.tensor([_guess(window) for window in WINDOWS])
"""Where an image is on another one, of which it is a window: (windows, 2, 2)."""
