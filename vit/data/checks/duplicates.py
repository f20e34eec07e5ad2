"""Exact and near duplicates as problems: leaks between splits, contradicting labels, copies."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit.data.checks.check_listing import ListedImage
from vit.data.checks.image_stats import CHROMA_SIDE, THUMBNAIL_SIDE, ImageStats
from vit.data.sources.dataset_problem import Problem
from vit.data.sources.dataset_warnings import compare_origins
from vit.process_resources import usable_cores
from vit.text import printable

SplitAndClasses = Mapping[str, tuple[str, tuple[str, ...]]]
"""Split and classes by path."""
IN_CLASSES = "in two classes"


def find_duplicates(
    images: Sequence[ListedImage],
    stats: Mapping[str, ImageStats],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> list[Problem]:
    """Find files of equal content, and images that are nearly the same."""
    locations = {one.path: (one.split, one.labels) for one in images if one.path in stats}
    groups: dict[bytes, list[str]] = defaultdict(list)
    for path in locations:
        groups[stats[path].digest].append(path)
    copies = [group for group in groups.values() if len(group) > 1]
    problems = [one for group in copies for one in exact_duplicate_problems(group, locations)]
    members = [group for group in groups.values() if not stats[group[0]].blank]
    firsts = [stats[group[0]] for group in members]
    done = 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        progress(done, len(firsts))

    pairs = find_near_duplicates(
        [one.thumbnail for one in firsts],
        [min(one.width, one.height) for one in firsts],
        workers=workers,
        progress=advance,
    )
    distinct: list[list[str]] = []
    for group in members:  # of each split and classes one: copies may be thousands
        one_each: dict[tuple[str, tuple[str, ...]], str] = {}
        for path in group:
            one_each.setdefault(locations[path], path)
        distinct.append([*one_each.values()])
    for pair in pairs:
        candidates = product(distinct[pair.first], distinct[pair.second])
        problems.append(
            near_duplicate_problem(candidates, locations, f"correlation {pair.score:.3f}")
        )
    return problems


def exact_duplicate_problems(group: Sequence[str], locations: SplitAndClasses) -> list[Problem]:
    """The problems of files with the same content."""
    first, other, kinds = compare_origins(group, locations)
    paths = (first, other, *(path for path in group[1:] if path != other))
    labels = class_names(paths, locations)
    problems = []
    if "split" in kinds:
        splits = " and ".join(dict.fromkeys(locations[path][0] for path in group))
        problems.append(Problem("leak", f"the same file in {splits}", paths, labels=labels))
    if "class" in kinds:
        where = _differing_labels(paths, locations)
        remedy = "keep it in one" if where == IN_CLASSES else "give it the same"
        detail = f"the same file {where}; {remedy}"
        problems.append(Problem("two_labels", detail, paths, labels=labels))
    return problems or [Problem("duplicate", "the same file", paths, labels=labels)]


def near_duplicate_problem(
    pairs: Iterable[tuple[str, str]], locations: SplitAndClasses, how: str
) -> Problem:
    """The problem of two images that are nearly the same; each may have exact copies in `pairs`."""
    order = ("split", "class")
    worst = max(
        pairs, key=lambda pair: [name in compare_origins(pair, locations)[2] for name in order]
    )
    _, _, kinds = compare_origins(worst, locations)
    labels = class_names(worst, locations)
    kind, where = "near_duplicate", ""
    if "split" in kinds:
        splits = " and ".join(locations[path][0] for path in worst)
        where = f" in {splits}" + (", under two labels" if "class" in kinds else "")
        kind = "near_leak"
    elif "class" in kinds:
        kind, where = "near_two_labels", f" {_differing_labels(worst, locations)}"
    return Problem(kind, f"nearly the same image{where} ({how})", worst, labels=labels)


def _differing_labels(paths: Sequence[str], locations: SplitAndClasses) -> str:
    """How images that are the same differ; where each may have several classes, in their labels."""
    single = all(len(locations[path][1]) == 1 for path in paths)
    return IN_CLASSES if single else "with different labels"


def class_names(paths: Sequence[str], locations: SplitAndClasses) -> tuple[str, ...]:
    """The names of the classes of each image."""
    return tuple(", ".join(map(printable, locations[path][1])) for path in paths)


TINY = 12
"""Short side in pixels below which an image has too few details to compare."""
MIN_CONTRAST = 3.0
"""Standard deviation of grey below which an image is too flat to compare."""
SHARP = 64
"""Short side in pixels from which on details survive scaling and compression."""
MIN_CORRELATION = 0.94
"""Minimum correlation of two aligned images."""
MIN_DETAILS = {True: 0.82, False: 0.55}
"""Minimum correlation of their details, for large images (True) and small ones (False)."""
MAX_TONE_CHANGE = 0.3
"""Maximum change of brightness or contrast, as a natural logarithm."""
MAX_MEAN_COLOUR, MAX_COLOUR = 7.0, 30.0
"""Maximum colour difference in [0, 255]: mean, and anywhere."""
MAX_OVERHANG = 0.02
"""Maximum extent of each image beyond the other, as a share of half a side."""
PAIRS = 4096
"""Pairs that a thread compares at a time."""


class Pair(NamedTuple):
    """Two images that are nearly the same."""

    first: int
    """Index of the image; less than that of the second."""
    second: int
    score: float
    """Correlation of the aligned images."""


def find_near_duplicates(
    thumbnails: Sequence[bytes],
    short_sides: Sequence[int],
    *,
    known: int = 0,
    workers: int | None = None,
    progress: Callable[[int], object] = lambda _rows: None,
) -> list[Pair]:
    """Find pairs of images that are nearly the same, in order; `short_sides` are in pixels."""
    if len(thumbnails) < 2:
        return []
    images = _Thumbnails.decode(thumbnails, short_sides)
    contrast = torch.cat(
        [part.flatten(1).float().std(1) for part in torch.split(images.grey, 2**13)]
    )
    kept = ((contrast >= MIN_CONTRAST) & (images.sides >= TINY)).nonzero().squeeze(1)
    progress(len(thumbnails) - len(kept))
    with single_core_threads(workers) as pool:
        kept_known = int((kept < known).sum())
        pairs, windows = candidate_pairs(images.grey[kept], pool, progress, known=kept_known)
        return _verify_pairs(images, kept[pairs], windows, pool)


def verify_near_duplicates(
    thumbnails: Sequence[bytes],
    short_sides: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    *,
    workers: int | None = None,
) -> list[Pair]:
    """Those of `pairs` that are nearly the same image; `short_sides` are in pixels."""
    if not pairs:
        return []
    images, both = _Thumbnails.decode(thumbnails, short_sides), torch.tensor(pairs)
    both = both[(images.sides[both] >= TINY).all(1)]
    windows = torch.arange(len(WINDOWS)).repeat_interleave(len(both))
    with single_core_threads(workers) as pool:
        return _verify_pairs(images, both.repeat(len(WINDOWS), 1), windows, pool)


class _Thumbnails(NamedTuple):
    grey: Tensor
    """(images, side, side) uint8."""
    chroma: Tensor
    """(images, 2, smaller side, smaller side) uint8."""
    sides: Tensor
    """Short sides of the images, in pixels."""

    @classmethod
    def decode(cls, thumbnails: Sequence[bytes], short_sides: Sequence[int]) -> "_Thumbnails":
        values = np.frombuffer(b"".join(thumbnails), dtype=np.uint8).copy()
        grey, chroma = (
            torch.from_numpy(values).view(len(thumbnails), -1).tensor_split([THUMBNAIL_SIDE**2], 1)
        )
        return cls(
            grey.reshape(-1, THUMBNAIL_SIDE, THUMBNAIL_SIDE),
            chroma.reshape(-1, 2, CHROMA_SIDE, CHROMA_SIDE),
            torch.tensor(short_sides),
        )


def _verify_pairs(
    images: _Thumbnails, pairs: Tensor, windows: Tensor, pool: ThreadPoolExecutor
) -> list[Pair]:
    """The pairs that are nearly the same, each once, with its best score."""

    def verify(part: tuple[Tensor, Tensor]) -> list[Pair]:
        (first, second), guess = part[0].T, WINDOW_TRANSFORMS[part[1]]
        grey, chroma = images.grey, images.chroma
        score = compare_pairs(grey[first], grey[second], chroma[first], chroma[second], guess)
        sharp = torch.minimum(images.sides[first], images.sides[second]) >= SHARP
        min_details = torch.where(sharp, MIN_DETAILS[True], MIN_DETAILS[False])
        same = (score.correlation > MIN_CORRELATION) & (score.details > min_details)
        same &= (score.tone < MAX_TONE_CHANGE) & (score.overhang < MAX_OVERHANG)
        same &= (score.mean_colour < MAX_MEAN_COLOUR) & (score.colour < MAX_COLOUR)
        values = (first[same].tolist(), second[same].tolist(), score.correlation[same].tolist())
        return [Pair(min(a, b), max(a, b), value) for a, b, value in zip(*values, strict=True)]

    parts = zip(torch.split(pairs, PAIRS), torch.split(windows, PAIRS), strict=True)
    best: dict[tuple[int, int], float] = {}
    for pair in (pair for found in pool.map(verify, parts) for pair in found):
        best[pair[:2]] = max(best.get(pair[:2], 0.0), pair.score)
    return [Pair(*key, value) for key, value in sorted(best.items())]


@contextmanager
def single_core_threads(workers: int | None) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that use one core each; pending work is cancelled on an error."""
    before = torch.get_num_threads()
    number = workers or usable_cores()
    pool = ThreadPoolExecutor(number, initializer=lambda: torch.set_num_threads(1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


# --- candidates ----------------------------------------------------------------------------------

WINDOWS = (
    *((0.0, 1.0, 0.0, 1.0), (0.05, 0.95, 0.05, 0.95), (0.1, 0.9, 0.1, 0.9)),
    *((0.0, 0.9, 0.0, 0.9), (0.1, 1.0, 0.0, 0.9), (0.0, 0.9, 0.1, 1.0), (0.1, 1.0, 0.1, 1.0)),
)
"""Crops that are searched for: top, bottom, left, right as shares of the sides."""
WINDOW_TRANSFORMS = torch.tensor(
    [
        [[bottom - top, top + bottom - 1], [right - left, left + right - 1]]
        for top, bottom, left, right in WINDOWS
    ]
)
"""Scale and shift of rows and columns that map an image to each window, (windows, 2, 2)."""
NUM_FREQUENCIES = 8
"""Frequencies of the transform: those of fewer half periods, over both sides together."""
MIN_FEATURE_CORRELATION = 0.87
"""Minimum correlation of cosine features of a candidate pair."""
NEAREST = 8
"""Candidate pairs per image."""
ROWS, COLUMNS, GROUPS = 512, 4096, 32
"""Block sizes of the comparison: a product that fits the caches of a core."""


def candidate_pairs(
    grey: Tensor,
    pool: ThreadPoolExecutor,
    progress: Callable[[int], object] = lambda _rows: None,
    *,
    known: int = 0,
) -> tuple[Tensor, Tensor]:
    """Candidate pairs, (pairs, 2), and which of WINDOWS the first image is of the second,
    (pairs,)."""
    # padded to full groups with zero features, which are similar to none
    padding = (0, 0, 0, -len(grey) % GROUPS)
    tables = [F.pad(dct_features(grey, window), padding) for window in WINDOW_TRANSFORMS]
    tops = range(0, len(grey), ROWS)
    pairs, windows = [torch.empty(0, 2, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]

    def search(top: int) -> tuple[Tensor, Tensor, Tensor]:
        number = min(ROWS, len(grey) - top)
        # whole groups; the pairs of known images in them are dropped below
        first = min(known, len(grey) - 1) // GROUPS * GROUPS if top + number <= known else 0
        return _search_rows(tables, top, number, first)

    for row, column, window in pool.map(search, tops):
        new = torch.maximum(row, column) >= known
        row, column, window = row[new], column[new], window[new]
        pairs.append(torch.stack([row, column], dim=1))
        windows.append(window)
        progress(ROWS if len(pairs) <= len(tops) else len(grey) - tops[-1])
    return _without_mirrored(torch.cat(pairs), torch.cat(windows))


def _without_mirrored(pairs: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Without pairs of whole images that are also there in the other order."""
    second, first = pairs.T
    key = pairs.amin(1) * (int(pairs.max()) + 1 if len(pairs) else 1) + pairs.amax(1)
    mirrored = (windows == 0) & (first < second)
    keep = ~(mirrored & torch.isin(key, key[(windows == 0) & ~mirrored]))
    return pairs[keep], windows[keep]


def _search_rows(
    tables: Sequence[Tensor], top: int, number: int, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and window of the NEAREST most similar columns, from the first on, of each of so
    many rows."""
    rows = tables[0][top : top + number]
    found = [
        _similar_in_block(rows, top, left, table[left : left + COLUMNS], window)
        for left in range(first, len(tables[0]), COLUMNS)
        for window, table in enumerate(tables)
    ]
    return _nearest_per_row(np.concatenate(found, axis=1))


def _similar_in_block(
    rows: Tensor, top: int, left: int, table: Tensor, window: int
) -> np.ndarray[Any, Any]:
    """Row, column, window and similarity of similar pairs of a block, (4, pairs) float64."""
    similar = rows @ table.T
    groups = similar.view(len(rows), GROUPS, -1)
    row, group = (groups.amax(1) > MIN_FEATURE_CORRELATION).nonzero().unbind(1)
    if len(row) > 2 * len(rows):  # many: no more than can be needed
        values, column = similar.topk(min(NEAREST + 1, len(table)), dim=1)
        row = torch.arange(len(rows))[:, None].expand_as(column)
    else:
        values = groups[row, :, group]
        column = torch.arange(GROUPS) * groups.shape[2] + group[:, None]
        row = row[:, None].expand_as(column)
    keep = (values > MIN_FEATURE_CORRELATION) & (row + top != column + left)
    row, column, values = row[keep] + top, column[keep] + left, values[keep].double()
    return torch.stack([row, column, torch.full_like(row, window), values]).numpy()


def _nearest_per_row(found: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and window of the NEAREST most similar columns of each row."""
    found = found[:, np.argsort(-found[3], kind="stable")]
    # the best window of each pair; indices are whole numbers below 2^26
    _, once = np.unique(found[0] * 2**26 + found[1], return_index=True)
    found = found[:, np.sort(once)]
    found = found[:, np.argsort(found[0], kind="stable")]
    _, starts, counts = np.unique(found[0], return_index=True, return_counts=True)
    rank = np.arange(found.shape[1]) - np.repeat(starts, counts)
    row, column, window = torch.from_numpy(found[:3, rank < NEAREST]).long()
    return row, column, window


def dct_features(grey: Tensor, window: Tensor) -> Tensor:
    """Unit-length cosine features of a window of uint8, (images, side, side) -> (images,
    features)."""
    frequency = torch.arange(NUM_FREQUENCIES, dtype=torch.float32)
    total = frequency[:, None] + frequency
    low = (total > 0) & (total < NUM_FREQUENCIES)
    # natural images have most power at low frequencies; this removes half of that excess
    weight = ((frequency[:, None] ** 2 + frequency**2) ** 0.25)[low]
    centres = (torch.arange(THUMBNAIL_SIDE) + 0.5) / THUMBNAIL_SIDE
    cosines = torch.cos(math.pi * frequency[:, None] * centres)
    rows, columns = cosines @ interpolation_matrices(window, THUMBNAIL_SIDE)
    parts = [
        F.normalize((rows @ part.float() @ columns.T)[:, low] * weight, dim=1)
        for part in torch.split(grey, 2**13)
    ]
    return torch.cat(parts) if parts else torch.empty(0, len(weight))


# --- alignment -----------------------------------------------------------------------------------

ALIGNMENT_SIDE = 16
"""Side of the downsampled images that are aligned first, in pixels."""
PROMISING = 0.85
"""Minimum correlation of those for a comparison at full size."""
DETAIL_BLUR = 1.5
"""Standard deviation in pixels of the blur that separates details from the rest."""
FAINT = 1.0
"""Strength of details, in [0, 255], below which they count less."""
MAX_SCALE_CHANGE = 0.3
"""Maximum change of scale, and maximum shift as a share of a side."""
DAMPING = 1e-2
BLOCK = 256
"""Pairs at a time: their images fit the caches of a core."""


class Similarity(NamedTuple):
    """Similarity of aligned pairs of images over their overlap; each is (pairs,)."""

    correlation: Tensor
    """Correlation of the images."""
    details: Tensor
    """Correlation of the details, normalised by their local strength."""
    tone: Tensor
    """The larger change of brightness and contrast, as a natural logarithm."""
    mean_colour: Tensor
    """Mean colour difference at equal contrast, in [0, 255]."""
    colour: Tensor
    """Largest colour difference."""
    overhang: Tensor
    """Extent of each beyond the other, as a share of half a side; 0 for a crop."""


def compare_pairs(
    first: Tensor, second: Tensor, first_chroma: Tensor, second_chroma: Tensor, guess: Tensor
) -> Similarity:
    """Align pairs of images and compare them over their overlap.

    Args:
        first, second: Grey images, (pairs, side, side) uint8.
        first_chroma, second_chroma: Colour differences, (pairs, 2, smaller side, smaller side)
            uint8; 128 is grey.
        guess: Initial alignment, (pairs, 2, 2): for rows and columns the scale and the shift of
            coordinates in [-1, 1] that map the first image to the second.

    Returns:
        Zeros for pairs that differ at low resolution already.
    """
    result = torch.zeros(len(first), len(Similarity._fields))
    tensors = (first, second, first_chroma, second_chroma, guess, result)
    for one, two, chroma, other_chroma, start, scores in zip(
        *(torch.split(tensor, BLOCK) for tensor in tensors), strict=True
    ):
        one, two = one.float(), two.float()
        small, other_small = (F.adaptive_avg_pool2d(x, ALIGNMENT_SIDE) for x in (one, two))
        aligned = align(small, other_small, start, blur=0.7, steps=4)
        mask = overlap(aligned, ALIGNMENT_SIDE)
        kept = correlation(small, warp(other_small, aligned), mask) > PROMISING
        if kept.any():
            one, two = one[kept], two[kept]
            aligned = align(one, two, aligned[kept], blur=0.7, steps=4)
            aligned = align(one, two, aligned, blur=0.0, steps=4)
            scores[kept] = torch.stack(
                similarity(one, two, chroma[kept].float(), other_chroma[kept].float(), aligned), 1
            )
    return Similarity(*result.T)


def similarity(
    first: Tensor, second: Tensor, first_chroma: Tensor, second_chroma: Tensor, transform: Tensor
) -> Similarity:
    """`compare_pairs` of images that are aligned by `transform`, a refined `guess`."""
    side = first.shape[-1]
    mask, warped = overlap(transform, side), warp(second, transform)
    one, two = zero_mean(first, mask), zero_mean(warped, mask)
    contrast = (one * two).sum((1, 2)) / two.square().sum((1, 2)).clamp(min=1e-3)
    # a change of contrast changes all colours with it
    chroma = (warp(second_chroma, transform) - 128) * contrast[:, None, None, None]
    chroma_mask = overlap(transform, first_chroma.shape[-1])
    colour = ((first_chroma - 128 - chroma).abs() * chroma_mask[:, None]).mean(1)
    scale, shift = transform[:, :, 0], transform[:, :, 1].abs()
    beyond_second = (scale + shift - 1).amax(1).clamp(min=0.0)
    beyond_first = (1 - (scale - shift)).amax(1).clamp(min=0.0)
    return Similarity(
        correlation=correlation(first, warped, mask),
        details=detail_correlation(first, warped, mask),
        tone=tone_change(first, warped, mask),
        mean_colour=colour.sum((1, 2)) / chroma_mask.sum((1, 2)).clamp(min=1.0),
        colour=colour.amax((1, 2)),
        overhang=torch.minimum(beyond_first, beyond_second),
    )


def align(first: Tensor, second: Tensor, guess: Tensor, *, blur: float, steps: int) -> Tensor:
    """Refine the alignment `guess`, of the same shape; a larger `blur`, in pixels, widens the range
    of convergence."""
    side, transform = first.shape[-1], guess
    centres, kernel = pixel_centres(side), blur_matrix(side, blur)
    fixed, moving = kernel @ first @ kernel.T, kernel @ second @ kernel.T
    # gradients with respect to coordinates in [-1, 1]
    gradients = [slope * (side / 2) for slope in torch.gradient(moving, dim=(1, 2))]
    stack = torch.stack([moving, *gradients], dim=1)
    for _ in range(steps):
        warped, down, across = warp(stack, transform).unbind(1)
        slopes = torch.stack([down * centres[:, None], down, across * centres, across], dim=1)
        mask = overlap(transform, side)
        residual, jacobian = residual_and_jacobian(fixed, warped, slopes, mask)
        transform = transform + damped_least_squares(jacobian, residual).view(-1, 2, 2)
        scale = transform[:, :, 0].clamp(1 - MAX_SCALE_CHANGE, 1 + MAX_SCALE_CHANGE)
        shift = transform[:, :, 1].clamp(-2 * MAX_SCALE_CHANGE, 2 * MAX_SCALE_CHANGE)
        transform = torch.stack([scale, shift], dim=2)
    return transform


def residual_and_jacobian(
    fixed: Tensor, warped: Tensor, slopes: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Residual, (pairs, pixels), and Jacobian, (pairs, unknowns, pixels).

    Brightness and contrast of the second image are first matched to those of the first.
    """
    fixed, warped = zero_mean(fixed, mask).flatten(1), zero_mean(warped, mask).flatten(1)
    mask, jacobian = mask.flatten(1), slopes.flatten(2)
    power = warped.square().sum(1, keepdim=True).clamp(min=1e-6)
    gain = ((fixed * warped).sum(1, keepdim=True) / power).clamp(0.2, 5.0)
    total = mask.sum(1, keepdim=True).clamp(min=1.0)
    jacobian = jacobian - (jacobian @ mask.unsqueeze(2)) / total.unsqueeze(2)
    return fixed - gain * warped, jacobian * (gain * mask).unsqueeze(1)


def damped_least_squares(jacobian: Tensor, residual: Tensor) -> Tensor:
    """(pairs, unknowns, pixels), (pairs, pixels) -> (pairs, unknowns)"""
    normal = jacobian @ jacobian.mT
    normal = normal + torch.diag_embed(DAMPING * normal.diagonal(dim1=1, dim2=2) + 1e-3)
    solution: Tensor = torch.linalg.solve(normal, jacobian @ residual.unsqueeze(2))
    return solution.squeeze(2)


def tone_change(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """The larger change of brightness and contrast, as a natural logarithm, (pairs,)."""
    total = mask.sum((1, 2)).clamp(min=1.0)
    logs = []
    for image in (first, second):
        mean = (image * mask).sum((1, 2)) / total
        variance = ((image - mean[:, None, None]).square() * mask).sum((1, 2)) / total
        logs.append(torch.stack([mean + 8, variance.sqrt() + 1], dim=1).log())
    return (logs[0] - logs[1]).abs().amax(1)


def detail_correlation(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Correlation of the details (the image less its blur), divided by their local strength.

    So an edge, which many images share, counts no more than the texture of a plain surface, which
    only copies share. Details weaker than FAINT are compression noise, and count little.
    """
    blur = blur_matrix(first.shape[-1], DETAIL_BLUR)
    one, two = (image - blur @ image @ blur.T for image in (first, second))
    weight = (blur @ mask @ blur.T).clamp(min=1e-3)
    power = blur @ ((one.square() + two.square()) / 2 * mask) @ blur.T / weight
    unit = (power + FAINT**2).rsqrt()
    return correlation(one * unit, two * unit, mask)


def correlation(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Correlation of (pairs, side, side) where `mask` is 1; 0 if one of them is constant."""
    first, second = zero_mean(first, mask), zero_mean(second, mask)
    power = first.square().sum((1, 2)) * second.square().sum((1, 2))
    return (first * second).sum((1, 2)) / power.clamp(min=1e-3).sqrt()


def zero_mean(image: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean where `mask` is 1; 0 elsewhere."""
    total = mask.sum((1, 2), keepdim=True).clamp(min=1.0)
    return (image - (image * mask).sum((1, 2), keepdim=True) / total) * mask


def warp(images: Tensor, transform: Tensor) -> Tensor:
    """Warp second images, (pairs, side, side) or (pairs, channels, side, side), to the first."""
    rows, columns = interpolation_matrices(transform, images.shape[-1]).unbind(1)
    if images.ndim == 4:
        rows, columns = rows[:, None], columns[:, None]
    return rows @ images @ columns.mT


def interpolation_matrices(transform: Tensor, side: int) -> Tensor:
    """Matrices of linear interpolation along lines of pixels: (..., 2) -> (..., side, side)"""
    at = (transform[..., :1] * pixel_centres(side) + transform[..., 1:] + 1) * (side / 2) - 0.5
    distance = at.clamp(0, side - 1).unsqueeze(-1) - torch.arange(side)
    return (1 - distance.abs()).clamp(min=0.0)


def overlap(transform: Tensor, side: int) -> Tensor:
    """1 where a pixel of the first image lies in the second, (pairs, side, side)."""
    coordinates = transform[:, :, :1] * pixel_centres(side) + transform[:, :, 1:]
    inside = (coordinates.abs() <= 1).float()
    return inside[:, 0, :, None] * inside[:, 1, None, :]


def pixel_centres(side: int) -> Tensor:
    """Coordinates of pixel centres, in [-1, 1]."""
    return (torch.arange(side) + 0.5) * (2 / side) - 1


def blur_matrix(side: int, sigma: float) -> Tensor:
    """Matrix of a Gaussian blur along a line of pixels; rows sum to 1."""
    if not sigma:
        return torch.eye(side)
    position = torch.arange(side)
    weights = torch.exp(-((position[:, None] - position).float() ** 2) / (2 * sigma**2))
    return weights / weights.sum(1, keepdim=True)
