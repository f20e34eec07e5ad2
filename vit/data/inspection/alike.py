"""Finds pictures that are nearly the same: copies of other sizes, quality, brightness, or cuts.

Every picture is compared with all others by its coarse waves (a cosine transform, the idea of
pHash: Zauner, "Implementation and benchmarking of perceptual image hash functions", 2010), as it is
and cut in a few ways; the few nearest are laid over each other and compared in detail.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit.data.inspection.alignment import Likeness, compare
from vit.data.inspection.facts import COARSE, SIDE

Numbers = np.ndarray[Any, Any]
WAVES = 7
"""Of the transform: those of fewer half periods, over both sides together."""
WINDOWS = (
    *((0.0, 1.0, 0.0, 1.0), (0.05, 0.95, 0.05, 0.95), (0.1, 0.9, 0.1, 0.9)),
    *((0.0, 0.9, 0.0, 0.9), (0.1, 1.0, 0.0, 0.9), (0.0, 0.9, 0.1, 1.0), (0.1, 1.0, 0.1, 1.0)),
)
"""Cuts that are looked for: top, bottom, left, right as shares of the sides."""
SIMILAR = 0.84
"""Correlation of waves from which on a pair is looked at."""
NEAREST = 4
"""Pairs of a picture that are looked at."""
ROWS, COLUMNS = 512, 4096
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


class Limits(NamedTuple):
    """What pictures must have in common to be nearly the same."""

    whole: float
    """Correlation of the pictures."""
    details: float
    """Correlation of their details."""
    colours: float
    """Mean difference of colour, in bytes."""


LIMITS = {True: Limits(0.95, 0.87, 7.0), False: Limits(0.94, 0.65, 6.0)}
"""Of pictures that are sharp in their copies, and of small ones."""
TONE = 0.3
"""Most change of brightness or contrast, as a natural logarithm."""
OUTSIDE = 0.02
"""Most of half a side that each may show beside the other: one is a cut of the other."""


def near_pairs(
    looks: Sequence[bytes],
    short_sides: Sequence[int],
    *,
    progress: Callable[[int], object] = lambda _rows: None,
) -> list[Pair]:
    """Pairs of pictures that are nearly the same, in the order of the pictures.

    Args:
        looks: As in Facts; none twice.
        short_sides: Of the pictures, in pixels.
        progress: Told how many more pictures were compared with all others.
    """
    if len(looks) < 2:
        return []
    bytes_ = torch.from_numpy(np.frombuffer(b"".join(looks), dtype=np.uint8).copy())
    copies = bytes_.view(len(looks), -1)
    grey = copies[:, : SIDE * SIDE].view(-1, SIDE, SIDE)
    pairs, windows = candidates(grey, progress)
    if not len(pairs):
        return []
    first, second = pairs.T
    colours = copies[:, SIDE * SIDE :].view(-1, 2, COARSE, COARSE)
    parts = (torch.split(part, 2**14) for part in (first, second, windows))
    seen = [
        compare(grey[one], grey[two], (colours[one], colours[two]), guesses[window])
        for one, two, window in zip(*parts, strict=True)
    ]
    score = Likeness(*(torch.cat(values) for values in zip(*seen, strict=True)))
    sides = torch.tensor(short_sides)
    sharp = torch.minimum(sides[first], sides[second]) >= SHARP
    alike = (score.tone < TONE) & (score.outside < OUTSIDE)
    for kind, limits in LIMITS.items():
        like = (score.whole > limits.whole) & (score.details > limits.details)
        alike &= (like & (score.colours < limits.colours)) | (sharp != kind)
    best: dict[tuple[int, int], float] = {}
    for one, two, value in zip(
        first[alike].tolist(), second[alike].tolist(), score.whole[alike].tolist(), strict=True
    ):
        key = (min(one, two), max(one, two))
        best[key] = max(best.get(key, 0.0), value)
    return [Pair(*key, value) for key, value in sorted(best.items())]


def candidates(
    grey: Tensor, progress: Callable[[int], object] = lambda _rows: None
) -> tuple[Tensor, Tensor]:
    """Pairs worth a closer look, (pairs, 2), and which of WINDOWS the first is of the second.

    Args:
        grey: (pictures, SIDE, SIDE) bytes.
        progress: As for `near_pairs`.
    """
    kept = (grey.flatten(1).float().std(1) >= CONTRAST).nonzero().squeeze(1)
    tables = [waves(grey[kept], window) for window in WINDOWS]
    pairs, windows = [torch.empty(0, 2, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for top in range(0, len(kept), ROWS):
        rows = tables[0][top : top + ROWS]
        found = [
            _similar(rows, top, left, table[left : left + COLUMNS], number)
            for left in range(0, len(kept), COLUMNS)
            for number, table in enumerate(tables)
        ]
        row, column, window = _nearest(np.concatenate(found, axis=1))
        pairs.append(torch.stack([kept[top + row], kept[column]], dim=1))
        windows.append(window)
        progress(len(rows))
    progress(len(grey) - len(kept))
    return torch.cat(pairs), torch.cat(windows)


def _similar(rows: Tensor, top: int, left: int, table: Tensor, number: int) -> Numbers:
    """Row, column, window and similarity of all similar pairs of a block, (4, pairs)."""
    similar = rows @ table.T
    row, column = (similar > SIMILAR).nonzero().unbind(1)
    other = row + top != column + left
    row, column = row[other], column[other]
    values = similar[row, column]
    window = torch.full_like(values, number)
    return torch.stack([row.double(), (column + left).double(), window, values]).numpy()


def _nearest(found: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and window of the NEAREST most similar columns of each row."""
    found = found[:, np.lexsort((-found[3], found[0]))]
    _, once = np.unique(found[:2], axis=1, return_index=True)  # of a pair its best window
    found = found[:, np.sort(once)]
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
