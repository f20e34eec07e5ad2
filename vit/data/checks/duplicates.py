"""Exact and near duplicates as problems: leaks between splits, contradicting labels, copies."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

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


class Duplicates(NamedTuple):
    """Images that are the same, nearly the same, or of one scene."""

    problems: list[Problem]
    """Of the first two."""
    alike: list[list[str]]
    """Paths of images that belong together."""


def find_duplicates(
    images: Sequence[ListedImage],
    stats: Mapping[str, ImageStats],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> Duplicates:
    """Find files of equal content, and images that are nearly the same or of one scene."""
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
        max_overhang=MAX_MOVED,
        workers=workers,
        progress=advance,
    )
    alike = [*copies, *([members[pair.first][0], members[pair.second][0]] for pair in pairs)]
    distinct: list[list[str]] = []
    for group in members:  # of each split and classes one: copies may be thousands
        one_each: dict[tuple[str, tuple[str, ...]], str] = {}
        for path in group:
            one_each.setdefault(locations[path], path)
        distinct.append([*one_each.values()])
    for pair in pairs:
        if pair.overhang >= MAX_OVERHANG:
            continue
        candidates = product(distinct[pair.first], distinct[pair.second])
        problems.append(
            near_duplicate_problem(candidates, locations, f"correlation {pair.score:.3f}")
        )
    return Duplicates(problems, alike)


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
"""Maximum extent of each of two copies beyond the other, as a share of half a side."""
MAX_MOVED = 0.5
"""The same of two images of one scene, between which the camera has moved."""
PAIRS = 4096
"""Pairs that a thread compares at a time."""


class Pair(NamedTuple):
    """Two images that are nearly the same."""

    first: int
    """Index of the image; less than that of the second."""
    second: int
    score: float
    """Correlation of the aligned images."""
    overhang: float
    """Extent of each beyond the other, as a share of half a side."""


def find_near_duplicates(
    thumbnails: Sequence[bytes],
    short_sides: Sequence[int],
    *,
    max_overhang: float = MAX_OVERHANG,
    known: int = 0,
    workers: int | None = None,
    progress: Callable[[int], object] = lambda _rows: None,
) -> list[Pair]:
    """Find pairs of images that are nearly the same, in order; `short_sides` are in pixels."""
    if len(thumbnails) < 2:
        return []
    images = Thumbnails.decode(thumbnails, short_sides)
    contrast = torch.cat(
        [part.flatten(1).float().std(1) for part in torch.split(images.grey, 2**11)]
    )
    kept = ((contrast >= MIN_CONTRAST) & (images.sides >= TINY)).nonzero().squeeze(1)
    progress(len(thumbnails) - len(kept))
    if len(kept) < 2:
        return []
    with single_core_threads(workers) as pool:
        kept_known = int((kept < known).sum())
        tables = [scene_features(images, scale, kept) for scale in SCALES]
        pairs, scales = candidate_pairs(tables, pool, progress, known=kept_known)
        return _verify_pairs(images, kept[pairs], scales, pool, max_overhang)


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
    images, both = Thumbnails.decode(thumbnails, short_sides), torch.tensor(pairs)
    both = both[(images.sides[both] >= TINY).all(1)]
    both = torch.cat([both, both.flip(1)])
    scales = torch.arange(len(SCALES)).repeat_interleave(len(both))
    with single_core_threads(workers) as pool:
        return _verify_pairs(images, both.repeat(len(SCALES), 1), scales, pool)


class Thumbnails(NamedTuple):
    grey: Tensor
    """(images, side, side) uint8."""
    chroma: Tensor
    """(images, 2, smaller side, smaller side) uint8."""
    sides: Tensor
    """Short sides of the images, in pixels."""

    @classmethod
    def decode(cls, thumbnails: Sequence[bytes], short_sides: Sequence[int]) -> "Thumbnails":
        values = np.frombuffer(bytearray().join(thumbnails), dtype=np.uint8)
        grey, chroma = (
            torch.from_numpy(values).view(len(thumbnails), -1).tensor_split([THUMBNAIL_SIDE**2], 1)
        )
        return cls(
            grey.reshape(-1, THUMBNAIL_SIDE, THUMBNAIL_SIDE),
            chroma.reshape(-1, 2, CHROMA_SIDE, CHROMA_SIDE),
            torch.tensor(short_sides),
        )


def _verify_pairs(
    images: Thumbnails,
    pairs: Tensor,
    scales: Tensor,
    pool: ThreadPoolExecutor,
    max_overhang: float = MAX_OVERHANG,
) -> list[Pair]:
    """The pairs that are nearly the same, each once, with its best score."""
    if not len(pairs):
        return []

    def verify(part: tuple[Tensor, Tensor]) -> list[Pair]:
        (first, second), scale = part[0].T, torch.tensor(SCALES)[part[1]]
        grey, chroma = images.grey, images.chroma
        score = compare_pairs(grey[first], grey[second], chroma[first], chroma[second], scale)
        sharp = torch.minimum(images.sides[first], images.sides[second]) >= SHARP
        min_details = torch.where(sharp, MIN_DETAILS[True], MIN_DETAILS[False])
        same = (score.correlation > MIN_CORRELATION) & (score.details > min_details)
        same &= (score.tone < MAX_TONE_CHANGE) & (score.overhang < max_overhang)
        same &= (score.mean_colour < MAX_MEAN_COLOUR) & (score.colour < MAX_COLOUR)
        values = (first, second, score.correlation, score.overhang)
        rows = zip(*(value[same].tolist() for value in values), strict=True)
        return [Pair(min(a, b), max(a, b), *value) for a, b, *value in rows]

    parts = zip(torch.split(pairs, PAIRS), torch.split(scales, PAIRS), strict=True)
    best: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in (pair for found in pool.map(verify, parts) for pair in found):
        score, overhang = best.get(pair[:2], (0.0, MAX_MOVED))
        best[pair[:2]] = max(score, pair.score), min(overhang, pair.overhang)
    return [Pair(*key, *value) for key, value in sorted(best.items())]


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

FREQUENCIES = 6
"""Frequencies of the spectrum, per side, that describe an image wherever its content lies."""
SPECTRUM_POWER = 0.3
"""Power of the magnitudes: natural images have far larger ones at low frequencies."""
LAYOUT_SIDE, COLOUR_SIDE = 4, 2
"""Sides of the grey and the colour layout that describe an image beside its spectrum."""
LAYOUT_WEIGHT = 0.7
SCALES = (1.0, 0.9, 0.8)
"""Sides of the parts of images that are searched for, as shares; they may lie anywhere."""
MIN_SIMILARITY = 0.81
"""Minimum cosine similarity of the features of a candidate pair."""
NEAREST = 8
"""Candidate pairs per image; of whole images, with later ones."""
ROWS, COLUMNS, GROUPS = 512, 4096, 32
"""Block sizes of the comparison: a product that fits the caches of a core."""


def candidate_pairs(
    tables: Sequence[Tensor],
    pool: ThreadPoolExecutor,
    progress: Callable[[int], object] = lambda _rows: None,
    *,
    known: int = 0,
) -> tuple[Tensor, Tensor]:
    """Candidate pairs, (pairs, 2), and which of SCALES the part of the second image has that looks
    like the first, (pairs,), from the `scene_features` at each scale."""
    # padded to full groups with zero features, which are similar to none
    number = len(tables[0])
    tables = [F.pad(table, (0, 0, 0, -number % GROUPS)) for table in tables]
    tops, found = range(0, number, ROWS), [torch.empty(0, 3, dtype=torch.int64)]

    def search(top: int) -> Tensor:
        rows = min(ROWS, number - top)
        # whole groups; the pairs of known images in them are dropped below
        first = min(known, number - 1) // GROUPS * GROUPS if top + rows <= known else 0
        return _search_rows(tables, top, rows, first)

    for part in pool.map(search, tops):
        found.append(part[(part[:, :2] >= known).any(1)])
        progress(ROWS if len(found) <= len(tops) else number - tops[-1])
    pairs = torch.cat(found)
    return pairs[:, :2], pairs[:, 2]


def _search_rows(tables: Sequence[Tensor], top: int, number: int, first: int = 0) -> Tensor:
    """Row, column and scale, (pairs, 3), of the NEAREST most similar columns, from the first on, of
    each of so many rows."""
    rows = tables[0][top : top + number]
    found = [
        _similar_in_block(rows, top, left, table[left : left + COLUMNS], scale)
        for left in range(first, len(tables[0]), COLUMNS)
        for scale, table in enumerate(tables)
        if scale or left + COLUMNS > top
    ]
    row, column, scale, similarity = torch.cat(found, dim=1)
    order = similarity.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    pairs = torch.stack([row, column, scale], dim=1)[order].long()
    # the best scale of each pair
    _, place = torch.unique(pairs[:, :2], dim=0, return_inverse=True)
    ranks = torch.arange(len(pairs))
    best = torch.full((len(pairs),), len(pairs)).scatter_reduce(0, place, ranks, "amin")
    pairs = pairs[best[place] == ranks]
    counts = pairs[:, 0].bincount(minlength=1)
    rank = torch.arange(len(pairs)) - (counts.cumsum(0) - counts)[pairs[:, 0]]
    return pairs[rank < NEAREST]


def _similar_in_block(rows: Tensor, top: int, left: int, table: Tensor, scale: int) -> Tensor:
    """Row, column, scale and similarity of similar pairs of a block, (4, pairs) float64."""
    similar = rows @ table.T
    groups = similar.view(len(rows), GROUPS, -1)
    row, group = (groups.amax(1) > MIN_SIMILARITY).nonzero().unbind(1)
    if len(row) > 2 * len(rows):  # many: no more than can be needed
        values, column = similar.topk(min(NEAREST + 1, len(table)), dim=1)
        row = torch.arange(len(rows))[:, None].expand_as(column)
    else:
        values = groups[row, :, group]
        column = torch.arange(GROUPS) * groups.shape[2] + group[:, None]
        row = row[:, None].expand_as(column)
    row, column = row + top, column + left
    # of whole images both orders are the same pair
    other = row != column if scale else row < column
    keep = (values > MIN_SIMILARITY) & other
    row, column, values = row[keep], column[keep], values[keep].double()
    return torch.stack([row, column, torch.full_like(row, scale), values])


def scene_features(images: Thumbnails, scale: float, places: Tensor) -> Tensor:
    """Unit-length features of the central part of the images at `places`, `scale` of their sides,
    (images, features), that change little if the content moves.

    They are the magnitudes of the spectrum, which a shift keeps, relative to those of natural
    images, and a coarse layout of brightness and colours.
    """
    taper = window()
    usual = usual_spectrum(taper)
    found = []
    for some in torch.split(places, 2**11):
        parts = images.grey[some], images.chroma[some]
        image, colours = (warp(part.float(), central(scale)) for part in parts)
        mean = (image * taper).sum((1, 2), keepdim=True) / taper.sum()
        relative = torch.fft.rfft2((image - mean) * taper).abs() / usual
        both = relative[:, :FREQUENCIES], relative[:, 1 - FREQUENCIES :]
        spectrum = torch.cat(both, dim=1)[:, :, :FREQUENCIES].flatten(1) ** SPECTRUM_POWER
        colours = 2 * (F.adaptive_avg_pool2d(colours, COLOUR_SIDE) - 128)
        coarse = F.adaptive_avg_pool2d(image, LAYOUT_SIDE) - 128, colours
        layout = F.normalize(torch.cat([part.flatten(1) for part in coarse], dim=1), dim=1)
        spectrum = F.normalize(spectrum - spectrum.mean(1, keepdim=True), dim=1)
        found.append(F.normalize(torch.cat([spectrum, LAYOUT_WEIGHT * layout], dim=1), dim=1))
    return torch.cat(found)


def central(scale: float) -> Tensor:
    """The transform that maps an image to the central part of another one, (1, 2, 2)."""
    return torch.tensor([[[scale, 0.0], [scale, 0.0]]])


def window() -> Tensor:
    """Weights of the pixels of a thumbnail that fall to 0 at the edges, (side, side)."""
    line = torch.hann_window(THUMBNAIL_SIDE + 2, periodic=False)[1:-1]
    return line[:, None] * line


def usual_spectrum(taper: Tensor) -> Tensor:
    """Magnitudes of the spectrum of natural images through `taper`: power falls as 1 / f^2."""
    frequency = torch.fft.fftfreq(THUMBNAIL_SIDE, 1 / THUMBNAIL_SIDE)
    square = frequency[:, None] ** 2 + frequency**2
    power = torch.where(square > 0, 1 / square.clamp(min=1), 0.0)
    spread = torch.fft.fft2(taper).abs().square()
    mixed = torch.fft.ifft2(torch.fft.fft2(power) * torch.fft.fft2(spread)).real
    magnitudes: Tensor = mixed.clamp(min=1e-6).sqrt()
    return magnitudes[:, : THUMBNAIL_SIDE // 2 + 1]


MAX_SHIFT = 10
"""Largest shift between two images that is searched for, in pixels of the thumbnail."""


def find_shift(first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    """An initial alignment for `align`, (pairs, 2, 2), by cross-correlation.

    `first`, (pairs, side, side), looks like a part of `second` whose sides are the share `scale`,
    (pairs,), of its own.
    """
    size, shifts = 2 * THUMBNAIL_SIDE, torch.arange(-MAX_SHIFT, MAX_SHIFT + 1)
    transform = torch.stack([scale, torch.zeros_like(scale)], dim=1)[:, None].repeat(1, 2, 1)
    taper = window()
    one, two = (
        torch.fft.rfft2((image - image.mean((1, 2), keepdim=True)) * taper, s=(size, size))
        for image in (first, warp(second, transform))
    )
    products = torch.fft.irfft2(one.conj() * two, s=(size, size))[:, shifts][:, :, shifts]
    best = products.flatten(1).argmax(1)
    moved = torch.stack([shifts[best // len(shifts)], shifts[best % len(shifts)]], dim=1)
    transform[:, :, 1] = moved * scale[:, None] * (2 / THUMBNAIL_SIDE)
    return transform


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
    first: Tensor, second: Tensor, first_chroma: Tensor, second_chroma: Tensor, scale: Tensor
) -> Similarity:
    """Align pairs of grey images and compare them, with their colour differences, over their
    overlap; zeros for pairs that differ at low resolution already.

    Shapes are those of `Thumbnails`, and `scale` is that of `find_shift`.
    """
    result = torch.zeros(len(first), len(Similarity._fields))
    tensors = (first, second, first_chroma, second_chroma, scale, result)
    for one, two, chroma, other_chroma, share, scores in zip(
        *(torch.split(tensor, BLOCK) for tensor in tensors), strict=True
    ):
        one, two = one.float(), two.float()
        start = find_shift(one, two, share)
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
    """Refine the alignment `guess`, (pairs, 2, 2): for rows and columns the scale and the shift of
    coordinates in [-1, 1] that map the first image to the second.

    A larger `blur`, in pixels, widens the range of convergence.
    """
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
