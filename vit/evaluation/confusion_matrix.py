"""Confusion matrix of a report: confusable classes are neighbours, and cells have their images.

    similarity(a, b) = P(answer b | class a) + P(answer a | class b)

The classes are in the order of the leaves of their average-linkage tree. Where two branches meet,
each is turned so that the two most similar of their ends touch: the greedy form of Bar-Joseph et
al., "Fast optimal leaf ordering for hierarchical clustering", section 2, Bioinformatics 17, 2001.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from vit.evaluation.classification_metrics import Outcomes
from vit.evaluation.html_page import Thumbnail, read_thumbnail

FEW_CLASSES = 20
"""Classes up to which a matrix alone shows all; above, the most frequent pairs come first."""
MAX_MATRIX = 100
"""Classes up to which all are in the matrix."""
MAX_CONFUSED = 40
"""Classes in the matrix of the most frequent pairs, where there are more than MAX_MATRIX."""
MAX_PAIRS = 30
MAX_CELL_IMAGES = 8
MAX_IMAGES = 200
MAX_BYTES = 1_500_000
"""Of all images of cells in a page."""
CELL_THUMBNAIL = 128  # pixels

Indices = dict[tuple[int, int], list[int]]
"""Images by class and answer."""


@dataclass(frozen=True)
class Confusion:
    """Images of one class with one answer."""

    label: int
    answer: int
    count: int
    share: float

    @property
    def shade(self) -> float:
        """Opacity of the cell; a number on the darkest is still readable."""
        return 0.6 * math.sqrt(self.share)


@dataclass(frozen=True)
class CellImage:
    """An image of a cell, its file name, and the score of its answer."""

    image: Thumbnail
    name: str
    confidence: float


@dataclass(frozen=True)
class MatrixRow:
    """The answers for one class in the order of the matrix; None for a cell without images."""

    label: int
    cells: Sequence[Confusion | None]
    others: int


@dataclass(frozen=True, kw_only=True)
class ConfusionFindings:
    """What the macro `confusions` shows; its pairs are the MAX_PAIRS most frequent wrong ones."""

    classes: Sequence[str]
    order: Sequence[int]
    matrix: Sequence[MatrixRow]
    pairs: Sequence[Confusion]
    wrong_pairs: int
    ordered: bool = False
    images: Mapping[Confusion, Sequence[CellImage]] = field(default_factory=dict)
    few_classes: int = FEW_CLASSES


def confusion_findings(
    outcomes: Outcomes,
    classes: Sequence[str],
    paths: Sequence[str] = (),
    axes: str = "",
    *,
    ordered: bool = False,
) -> ConfusionFindings:
    """`counted_findings` of at least one image, with images in cells where there are `paths`."""
    indices: Indices = defaultdict(list)
    for index, pair in enumerate(
        zip(outcomes.labels.tolist(), outcomes.answers.tolist(), strict=True)
    ):
        indices[pair].append(index)
    found = counted_findings(outcomes.confusion(classes), classes, ordered=ordered)
    drawn = [cell for row in found.matrix for cell in row.cells if cell is not None]
    known = set(found.pairs)
    right = [cell for cell in drawn if cell.label == cell.answer]
    others = [cell for cell in drawn if cell.label != cell.answer and cell not in known]
    others.sort(key=lambda cell: -cell.count)
    wrong = [*found.pairs, *others]
    images = cell_images(wrong, right, indices, outcomes, paths, axes) if paths else {}
    return replace(found, images=images)


def counted_findings(
    counts: Mapping[str, Mapping[str, int]], classes: Sequence[str], *, ordered: bool = False
) -> ConfusionFindings:
    """The matrix and the most frequent wrong pairs, by the number of images of class and answer;
    grades keep their order."""
    index = {name: number for number, name in enumerate(classes)}
    totals = {index[name]: sum(answers.values()) for name, answers in counts.items()}
    cells: dict[tuple[int, int], Confusion] = {}
    for name, answers in counts.items():
        for other, count in answers.items():
            pair = index[name], index[other]
            cells[pair] = Confusion(*pair, count, count / totals[pair[0]])
    wrong = [cell for (label, answer), cell in cells.items() if label != answer]
    wrong.sort(key=lambda cell: -cell.count)
    pairs = wrong[:MAX_PAIRS]
    shown = range(len(classes)) if len(classes) <= MAX_MATRIX else confused_classes(pairs)
    order = [*shown]
    if not ordered:
        order = [shown[place] for place in similar_order(similarities(shown, cells))]
    matrix = []
    for label in order:
        row = [cells.get((label, answer)) for answer in order]
        inside = sum(cell.count for cell in row if cell is not None)
        matrix.append(MatrixRow(label, row, totals.get(label, 0) - inside))
    return ConfusionFindings(
        classes=classes,
        order=order,
        matrix=matrix,
        pairs=pairs,
        wrong_pairs=len(wrong),
        ordered=ordered,
    )


def confused_classes(pairs: Sequence[Confusion]) -> list[int]:
    """The classes of the first of `pairs`, at most MAX_CONFUSED, sorted."""
    found: set[int] = set()
    for cell in pairs:
        both = found | {cell.label, cell.answer}
        if len(both) <= MAX_CONFUSED:
            found = both
    return sorted(found)


def similarities(
    shown: Sequence[int], cells: Mapping[tuple[int, int], Confusion]
) -> NDArray[np.float64]:
    """How often the classes `shown` are taken for each other, (classes, classes), symmetric."""
    shares = np.zeros((len(shown), len(shown)))
    for row, label in enumerate(shown):
        for column, answer in enumerate(shown):
            cell = cells.get((label, answer))
            if cell is not None and label != answer:
                shares[row, column] = cell.share
    return shares + shares.T


def similar_order(similarity: NDArray[np.float64]) -> list[int]:
    """An order of classes in which those of high `similarity`, (classes, classes), are neighbours;
    classes that are similar to none keep their place."""
    count = len(similarity)
    branches = {index: [index] for index in range(count)}
    linkage = similarity.copy()
    np.fill_diagonal(linkage, 0.0)
    sizes = np.ones(count)
    while count and linkage.max() > 0:
        first, second = map(int, np.unravel_index(linkage.argmax(), linkage.shape))
        left, right = branches[first], branches.pop(second)
        turned = [(a, b) for a in (left, left[::-1]) for b in (right, right[::-1])]
        ends = max(turned, key=lambda pair: similarity[pair[0][-1], pair[1][0]])
        branches[first] = [*ends[0], *ends[1]]
        weights = sizes[[first, second]]
        sizes[first] = weights.sum()
        linkage[first] = weights @ linkage[[first, second]] / sizes[first]
        linkage[:, first] = linkage[first]
        linkage[first, first] = linkage[second] = linkage[:, second] = 0.0
    return [index for branch in branches.values() for index in branch]


def cell_images(
    wrong: Sequence[Confusion],
    right: Sequence[Confusion],
    indices: Indices,
    outcomes: Outcomes,
    paths: Sequence[str],
    axes: str = "",
) -> dict[Confusion, list[CellImage]]:
    """Thumbnails by cell: one of each cell of `wrong`, then a second one, and so on; then `right`.

    Wrong answers begin with the surest, right ones with the least sure. Images that cannot be read
    are left out; at most MAX_IMAGES are tried.
    """
    confidences = outcomes.confidences.tolist()

    def chosen(cell: Confusion) -> list[int]:
        sign = 1 if cell.label == cell.answer else -1
        found = indices[cell.label, cell.answer]
        return sorted(found, key=lambda index: sign * confidences[index])[:MAX_CELL_IMAGES]

    queue: list[tuple[Confusion, int]] = []
    for cells in (wrong, right):
        columns = zip_longest(*map(chosen, cells))
        queue += [
            (cell, index)
            for column in columns
            for cell, index in zip(cells, column, strict=True)
            if index is not None
        ]
    images: dict[Confusion, list[CellImage]] = defaultdict(list)
    size = 0
    for cell, index in queue[:MAX_IMAGES]:
        image = read_thumbnail(paths[index], CELL_THUMBNAIL, axes=axes)
        if image is None:
            continue
        size += len(image.source)
        if size > MAX_BYTES:
            break
        images[cell].append(CellImage(image, PurePath(paths[index]).name, confidences[index]))
    return dict(images)
