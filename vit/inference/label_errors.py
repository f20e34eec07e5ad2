"""Label errors and near duplicates, found by the features of a trained network.

A label is suspected if another class is more probable among the nearest neighbours of the image,
and at least as probable as on average in its own images: confident learning with out-of-sample
probabilities from nearest neighbours. Source: Northcutt et al., "Confident Learning", section 3,
arXiv:1911.00068; neighbours: Wu et al., arXiv:1805.01978, section 3.4.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.data.checks.check_listing import ListedImage
from vit.data.checks.dataset_check import (
    CheckReport,
    Progress,
    check_dataset,
    sort_by_severity,
)
from vit.data.checks.duplicates import near_duplicate_problem
from vit.data.checks.near_duplicates import verify_near_duplicates
from vit.data.checks.problems import Problem
from vit.data.sources.dataset_spec import DatasetSpec
from vit.inference.predictor import Predictor
from vit.text import printable

NEIGHBOURS = 20
TEMPERATURE = 0.07
SAME = 0.999
"""Cosine from which on a neighbour is a copy, and not counted."""
COPY = 0.9
"""Cosine from which on two images may be near duplicates."""
CENTROID_WEIGHT = 10.0
"""Weight of the cosine to the mean of a class beside a probability, in the order of suspects."""
BLOCK = 2**24
"""Similarities computed at a time."""


class Neighbours(NamedTuple):
    """The nearest other images of each image."""

    similarity: Tensor
    """Cosines, (images, neighbours), descending."""
    indices: Tensor
    """(images, neighbours)"""


class Suspect(NamedTuple):
    """An image whose label may be wrong."""

    image: int
    likely: int
    """The more probable class."""
    margin: float
    """Probability of that class less that of the label."""


def check(
    data: str | DatasetSpec,
    *,
    weights: str | None = None,
    device: str | None = None,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress = lambda _stage, _done, _total: None,
    notify: Callable[[str], object] = lambda _note: None,
) -> CheckReport:
    """Check a dataset, as `vit check`: `check_dataset`, then `find_label_errors` with `weights`."""
    report = check_dataset(data, workers=workers, cache=cache, progress=progress, notify=notify)
    if weights is None:
        return report
    return find_label_errors(report, weights, device=device, notify=notify)


def find_label_errors(
    report: CheckReport,
    weights: str,
    *,
    device: str | None = None,
    notify: Callable[[str], object] = lambda _note: None,
) -> CheckReport:
    """Add suspected labels and near duplicates to `report`, by the features of a network.

    Args:
        report: Report of the dataset.
        weights: Any source of weights; no head is needed.
        device: Device of the network; the best one by default.
        notify: Called with notes about the weights.

    Raises:
        VitError: The weights cannot be used.
    """
    predictor = Predictor(weights, device=device, embeddings=True, notify=notify)
    images = [one for one in report.listing.images if one.path in report.stats]
    outputs = (
        output for batch in predictor.batches([one.path for one in images]) for output in batch
    )
    pairs = [
        (one, output.embedding)
        for one, output in zip(images, outputs, strict=True)
        if output.embedding is not None
    ]
    if len(pairs) < 2:
        return report
    rows, features = [one for one, _ in pairs], torch.stack([feature for _, feature in pairs])
    nearest = neighbours(features)
    problems = [*report.problems, *near_duplicates(report, rows, nearest)]
    names = report.listing.classes
    indices = {name: index for index, name in enumerate(names)}
    if all(len(one.labels) == 1 and one.labels[0] in indices for one in rows):
        labels = torch.tensor([indices[one.labels[0]] for one in rows])
        suspected = [
            _label_problem(rows[one.image], names[one.likely], one.margin)
            for one in suspects(features, nearest, labels, len(names))
        ]
        problems += report.listing.with_lines(suspected)
    return dataclasses.replace(report, problems=sort_by_severity(problems))


def near_duplicates(
    report: CheckReport, rows: Sequence[ListedImage], nearest: Neighbours
) -> list[Problem]:
    """Images with nearly equal features and pixels that are not in the report yet.

    Features are not enough: a trained network gives all images of a class nearly the same.
    """
    where = {one.path: (one.split, one.labels) for one in rows}
    reported = {frozenset(problem.images) for problem in report.problems}
    stats = [report.stats[one.path] for one in rows]
    candidates = [
        (first, second)
        for first, second, _ in similar_pairs(nearest)
        if stats[first].digest != stats[second].digest
        and frozenset((rows[first].path, rows[second].path)) not in reported
    ]
    verified = verify_near_duplicates(
        [one.thumbnail for one in stats],
        [min(one.width, one.height) for one in stats],
        candidates,
    )
    return [
        near_duplicate_problem(
            [(rows[one.first].path, rows[one.second].path)], where, f"correlation {one.score:.3f}"
        )
        for one in verified
    ]


def _label_problem(image: ListedImage, likely: str, margin: float) -> Problem:
    label = image.labels[0]
    text = f"labelled {printable(label)}, looks like {printable(likely)} (margin {margin:.2f})"
    return Problem("suspected_label", text, (image.path,), labels=(label, likely))


def neighbours(features: Tensor, k: int = NEIGHBOURS) -> Neighbours:
    """The `k` nearest other images by cosine, fewer if there are fewer; features (images, dim)."""
    normalised = F.normalize(features.float(), dim=1)
    k = min(k, len(normalised) - 1)
    rows, found = max(BLOCK // len(normalised), 1), []
    for top in range(0, len(normalised), rows):
        similarity = normalised[top : top + rows] @ normalised.T
        own = torch.arange(len(similarity))
        similarity[own, own + top] = -2.0
        found.append(similarity.topk(k, dim=1))
    return Neighbours(*(torch.cat(part) for part in zip(*found, strict=True)))


def similar_pairs(nearest: Neighbours) -> list[tuple[int, int, float]]:
    """Pairs of images with nearly equal features, and their cosine; each pair once."""
    row, column = (nearest.similarity >= COPY).nonzero().unbind(1)
    pairs = {
        (min(one, two), max(one, two)): cosine
        for one, two, cosine in zip(
            row.tolist(),
            nearest.indices[row, column].tolist(),
            nearest.similarity[row, column].tolist(),
            strict=True,
        )
    }
    return [(*pair, cosine) for pair, cosine in sorted(pairs.items())]


def suspects(features: Tensor, nearest: Neighbours, labels: Tensor, classes: int) -> list[Suspect]:
    """Images whose label is probably wrong, the most certain first.

    Many have neighbours of one class only, and equal probabilities. The most certain ones are then
    those that are nearest to the mean of the other class, and farthest from that of their own.

    Args:
        features: (images, dim).
        nearest: Neighbours of each image.
        labels: (images,).
        classes: Number of classes.
    """
    similarity = nearest.similarity
    weights = ((similarity - similarity[:, :1]) / TEMPERATURE).exp()
    weights = weights.masked_fill(similarity > SAME, 0.0)
    votes = weights.new_zeros(len(labels), classes).scatter_add_(
        1, labels[nearest.indices], weights
    )
    probabilities = votes / votes.sum(1, keepdim=True).clamp(min=1e-12)
    own = probabilities.gather(1, labels[:, None]).squeeze(1)
    count = torch.bincount(labels, minlength=classes).clamp(min=1)
    threshold = torch.zeros(classes).scatter_add_(0, labels, own) / count
    best, likely = probabilities.masked_fill(probabilities < threshold, -1.0).max(1)
    wrong = (best > own) & (likely != labels) & (best > 0)
    margin = best - own
    normalised = F.normalize(features.float(), dim=1)
    means = torch.zeros(classes, normalised.shape[1]).index_add_(0, labels, normalised)
    cosines = normalised @ F.normalize(means, dim=1).T
    nearer = cosines.gather(1, torch.stack([likely, labels], dim=1))
    certainty = margin + CENTROID_WEIGHT * (nearer[:, 0] - nearer[:, 1])
    order = certainty.masked_fill(~wrong, -torch.inf).argsort(descending=True, stable=True)
    return [
        Suspect(index, int(likely[index]), float(margin[index]))
        for index in order[: int(wrong.sum())].tolist()
    ]
