"""Finds pictures that are nearly the same: copies of other sizes, quality, brightness, or cuts.

Every picture is compared with all others by its coarse waves (a cosine transform, the idea of
pHash: Zauner, "Implementation and benchmarking of perceptual image hash functions", 2010), as it is
and cut in a few ways; the few nearest are laid over each other and compared in detail.
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

from vit.data.inspection.alignment import compare
from vit.data.inspection.facts import COARSE, SIDE

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
"""Pairs of a picture that are looked at."""
ROWS, COLUMNS, GROUPS = 512, 4096, 32
"""Pictures compared with pictures at a time: a product that stays in the caches of a core."""
PAIRS = 4096
"""Pairs laid over each other at a time."""
TINY = 12
"""Pixels of a short side below which there are no details to tell copies by."""
CONTRAST = 3.0
"""Deviation of grey below which a picture is too flat to be told from others."""
SHARP = 64
"""Pixels of a short side from which on details survive scaling and compression."""


class Pair(NamedTuple):
    """Two pictures that are nearly the same."""

    first: int
    """Place of the picture; less than that of the second."""
    second: int
    score: float
    """Correlation of the pictures where they are laid over each other."""


DETAILS = {True: 0.82, False: 0.55}
"""Least correlation of details of pictures that are sharp in their copies, and of small ones."""
WHOLE = 0.94
"""Least correlation of the pictures."""
COLOURS, SPOT = 7.0, 30.0
"""Most difference of colours in bytes, in the mean and anywhere."""
TONE = 0.3
"""Most change of brightness or contrast, as a natural logarithm."""
OUTSIDE = 0.02
"""Most of half a side that each may show beside the other: one is a cut of the other."""


def near_pairs(
    looks: Sequence[bytes],
    short_sides: Sequence[int],
    *,
    workers: int | None = None,
    progress: Callable[[int], object] = lambda _rows: None,
) -> list[Pair]:
    """Pairs of pictures that are nearly the same, in the order of the pictures.

    Args:
        looks: As in Facts; none twice.
        short_sides: Of the pictures, in pixels.
        workers: Threads; one a core if None.
        progress: Told how many more pictures were compared with all others.
    """
    if len(looks) < 2:
        return []
    pictures = _Looks.of(looks, short_sides)
    flat = torch.cat([some.flatten(1).float().std(1) for some in torch.split(pictures.grey, 2**13)])
    kept = ((flat >= CONTRAST) & (pictures.sides >= TINY)).nonzero().squeeze(1)
    progress(len(looks) - len(kept))
    with threads(workers) as pool:
        pairs, windows = candidates(pictures.grey[kept], pool, progress)
        return _judged(pictures, kept[pairs], windows, pool)


def confirmed(
    looks: Sequence[bytes], short_sides: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> list[Pair]:
    """Those of `pairs`, however they were found, that are nearly the same picture.

    Args:
        looks: As in Facts.
        short_sides: Of the pictures, in pixels.
        pairs: Places of two different pictures each.
    """
    if not pairs:
        return []
    pictures, both = _Looks.of(looks, short_sides), torch.tensor(pairs)
    both = both[(pictures.sides[both] >= TINY).all(1)]
    windows = torch.arange(len(WINDOWS)).repeat_interleave(len(both))
    with threads(None) as pool:
        return _judged(pictures, both.repeat(len(WINDOWS), 1), windows, pool)


class _Looks(NamedTuple):
    grey: Tensor
    colours: Tensor
    sides: Tensor

    @classmethod
    def of(cls, looks: Sequence[bytes], short_sides: Sequence[int]) -> "_Looks":
        copies = torch.from_numpy(np.frombuffer(b"".join(looks), dtype=np.uint8).copy())
        copies = copies.view(len(looks), -1)
        grey = copies[:, : SIDE * SIDE].view(-1, SIDE, SIDE)
        colours = copies[:, SIDE * SIDE :].view(-1, 2, COARSE, COARSE)
        return cls(grey, colours, torch.tensor(short_sides))


def _judged(
    pictures: _Looks, pairs: Tensor, windows: Tensor, pool: ThreadPoolExecutor
) -> list[Pair]:
    """Those that are nearly the same, each once."""

    def judge(some: tuple[Tensor, Tensor]) -> list[Pair]:
        (first, second), windows = some[0].T, some[1]
        both = pictures.colours[first], pictures.colours[second]
        score = compare(pictures.grey[first], pictures.grey[second], both, guesses[windows])
        sharp = torch.minimum(pictures.sides[first], pictures.sides[second]) >= SHARP
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
        grey: (pictures, SIDE, SIDE) bytes.
        pool: Does the work.
        progress: As for `near_pairs`.
    """
    # padded by pictures that are like none, so that groups are whole
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
    """Without pairs of whole pictures the other way round, which say the same."""
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
    """Coarse waves of a window of pictures, of length 1: (pictures, side, side) -> (pictures, n)"""
    frequency = torch.arange(WAVES, dtype=torch.float32)
    total = frequency[:, None] + frequency
    slow = (total > 0) & (total < WAVES)
    # natural pictures have most power in slow waves; half of that advantage is taken back
    weight = ((frequency[:, None] ** 2 + frequency**2) ** 0.25)[slow]
    rows, columns = (cosines(*window[at : at + 2]) for at in (0, 2))
    parts = [
        F.normalize((rows @ some.float() @ columns.T)[:, slow] * weight, dim=1)
        for some in torch.split(grey, 2**13)
    ]
    return torch.cat(parts) if parts else torch.empty(0, len(weight))


def cosines(start: float, end: float) -> Tensor:
    """The transform of a part of a line of pixels, (WAVES, SIDE)."""
    at = ((start + (torch.arange(SIDE) + 0.5) / SIDE * (end - start)) * SIDE - 0.5).clamp(
        0, SIDE - 1
    )
    read = (1 - (at[:, None] - torch.arange(SIDE)).abs()).clamp(min=0.0)
    places = (torch.arange(SIDE) + 0.5) / SIDE
    return torch.cos(math.pi * torch.arange(WAVES)[:, None] * places) @ read


def _guess(window: tuple[float, float, float, float]) -> list[list[float]]:
    top, bottom, left, right = window
    return [[bottom - top, top + bottom - 1], [right - left, left + right - 1]]


guesses = torch.tensor([_guess(window) for window in WINDOWS])
"""Where a picture is on another one, of which it is a window: (windows, 2, 2)."""
