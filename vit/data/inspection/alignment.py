"""Lays one small grey picture over another, as if one were cut out of the other, and compares.

    x of the second = scale * x of the first + shift,    the same for y, each with its own numbers

Gauss-Newton on the difference of brightness, from blurred to sharp. Source: Lucas and Kanade, "An
iterative image registration technique", IJCAI 1981.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

COARSE = 16
"""Side of the pictures that are laid over each other first."""
PROMISING = 0.85
"""Correlation of those from which on the larger ones are compared."""
FINE = 1.5
"""Pixels of blur: what it takes away are the details."""
FAINT = 1.0
"""Strength of details, in bytes, below which they count less."""
LARGEST = 0.3
"""Change of scale, and shift as a share of a side, that are still the same picture."""
DAMPING = 1e-2
BLOCK = 256
"""Pairs at a time: what is computed stays in the caches of a core."""


class Likeness(NamedTuple):
    """How alike pairs of pictures are where both show the same; each is (pairs,)."""

    whole: Tensor
    """Correlation of the pictures."""
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
    """How alike pairs of pictures are where they are laid over each other.

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
    for picture in (first, resampled(second, found)):
        mean = (picture * mask).sum((1, 2)) / total
        square = ((picture - mean[:, None, None]).square() * mask).sum((1, 2)) / total
        values.append(torch.stack([mean + 8, square.sqrt() + 1], dim=1).log())
    return (values[0] - values[1]).abs().amax(1)


def gain(first: Tensor, second: Tensor, found: Tensor) -> Tensor:
    """What the contrast of the second picture is multiplied by to be that of the first."""
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
    """How far two pictures reach beyond each other, (pairs,); 0 where one holds the other."""
    scale, shift = found[:, :, 0], found[:, :, 1].abs()
    first_out = (scale + shift - 1).amax(1).clamp(min=0.0)
    second_out = (1 - (scale - shift)).amax(1).clamp(min=0.0)
    return torch.minimum(first_out, second_out)


def resampled(picture: Tensor, found: Tensor) -> Tensor:
    """The second picture as the first would show it."""
    rows, columns = (sampling(found[:, axis], picture.shape[-1]) for axis in range(2))
    return rows @ picture @ columns.transpose(1, 2)


def shrunk(pictures: Tensor) -> Tensor:
    """(pairs, side, side) -> (pairs, COARSE, COARSE), by means of blocks."""
    return torch.nn.functional.adaptive_avg_pool2d(pictures, COARSE)


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

    Brightness and contrast of the second picture become those of the first before.
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
    """Correlation of pictures over what both show."""
    return correlation(first, resampled(second, found), overlap(found, first.shape[-1]))


def details(first: Tensor, second: Tensor, found: Tensor) -> Tensor:
    """Correlation of what a blur takes away, in units of its strength around each pixel.

    So the edge of a thing, which many things share, counts no more than the grain of a plain
    surface, which only copies share. Less than FAINT is what compression leaves, and counts little.
    """
    side = first.shape[-1]
    mask, blur = overlap(found, side), blurring(side, FINE)
    one, other = (
        picture - blur @ picture @ blur.T for picture in (first, resampled(second, found))
    )
    around = (blur @ mask @ blur.T).clamp(min=1e-3)
    power = blur @ ((one.square() + other.square()) / 2 * mask) @ blur.T / around
    unit = (power + FAINT**2).rsqrt()
    return correlation(one * unit, other * unit, mask)


def correlation(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Of (pairs, side, side) where `mask` is 1; 0 where one of them is flat."""
    first, second = centred(first, mask), centred(second, mask)
    power = first.square().sum((1, 2)) * second.square().sum((1, 2))
    return (first * second).sum((1, 2)) / power.clamp(min=1e-3).sqrt()


def centred(picture: Tensor, mask: Tensor) -> Tensor:
    """With a mean of 0 where `mask` is 1, and 0 elsewhere."""
    total = mask.sum((1, 2), keepdim=True).clamp(min=1.0)
    return (picture - (picture * mask).sum((1, 2), keepdim=True) / total) * mask


def places(side: int) -> Tensor:
    """Centres of pixels, from -1 to 1."""
    return (torch.arange(side) + 0.5) * (2 / side) - 1


def sampling(line: Tensor, side: int) -> Tensor:
    """Matrices that read a line of pixels at other places: (pairs, 2) -> (pairs, side, side)"""
    at = ((line[:, :1] * places(side) + line[:, 1:]) + 1) * (side / 2) - 0.5
    distance = at.clamp(0, side - 1).unsqueeze(2) - torch.arange(side)
    return (1 - distance.abs()).clamp(min=0.0)


def overlap(found: Tensor, side: int) -> Tensor:
    """1 where a pixel of the first picture is on the second one: (pairs, side, side)"""
    inside = ((found[:, :, :1] * places(side) + found[:, :, 1:]).abs() <= 1).float()
    return inside[:, 0, :, None] * inside[:, 1, None, :]


def blurring(side: int, sigma: float) -> Tensor:
    """A matrix that blurs a line of pixels by a Gaussian; rows sum to 1."""
    if not sigma:
        return torch.eye(side)
    place = torch.arange(side)
    weights = torch.exp(-((place[:, None] - place).float() ** 2) / (2 * sigma**2))
    return weights / weights.sum(1, keepdim=True)
