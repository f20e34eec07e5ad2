"""Label errors and near duplicates, found by the features of a trained network.

A label is suspected if the nearest neighbours of the image mostly have another one, with at least
the usual probability of that class: the thresholds of confident learning, with out-of-sample
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
from vit.errors import printable
from vit.inference.predictor import Predictor

NEIGHBOURS = 20
TEMPERATURE = 0.07
SAME = 0.999
"""Cosine from which on a neighbour is a copy, which says nothing of a label."""
COPY = 0.9
"""Cosine from which on two images may be nearly the same."""
NEARER = 10.0
"""What a cosine to the middle of a class counts beside a chance."""
BLOCK = 2**24
"""Similarities computed at a time."""


class Neighbours(NamedTuple):
    """The nearest other images of each."""

    similarity: Tensor
    """Cosines, (images, neighbours), falling."""
    place: Tensor
    """Which images, (images, neighbours)."""


class Suspect(NamedTuple):
    """An image whose label may be wrong."""

    place: int
    likely: int
    """The class that it looks like."""
    margin: float
    """Probability of that class less that of its label."""


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
        report: Of the images.
        weights: Any source of weights; no head is needed.
        device: Where it computes; the best one here if None.
        notify: Called with notes about the weights.

    Raises:
        VitError: The weights cannot be used.
    """
    predictor = Predictor(weights, device=device, embeddings=True, notify=notify)
    images = [one for one in report.listing.images if one.path in report.stats]
    rows, features = [], []
    for answer, one in zip(
        (answer for batch in predictor.batches([one.path for one in images]) for answer in batch),
        images,
        strict=True,
    ):
        if answer.embedding is not None:
            rows.append(one)
            features.append(answer.embedding)
    if len(rows) < 2:
        return report
    found = neighbours(torch.stack(features))
    problems = [*report.problems, *more_copies(report, rows, found)]
    if all(len(one.labels) == 1 for one in rows):
        names = report.listing.classes
        numbers = {name: at for at, name in enumerate(names)}
        known = [at for at, one in enumerate(rows) if one.labels[0] in numbers]
        if len(known) == len(rows):
            labels = torch.tensor([numbers[one.labels[0]] for one in rows])
            suspected = [
                _told(rows[two.place].path, rows[two.place].labels[0], names, two)
                for two in suspects(torch.stack(features), found, labels, len(names))
            ]
            problems += report.listing.with_lines(suspected)
    return dataclasses.replace(report, problems=sort_by_severity(problems))


def more_copies(
    report: CheckReport, rows: Sequence[ListedImage], found: Neighbours
) -> list[Problem]:
    """Images with nearly equal features that are nearly the same, and are not told yet.

    Features alone say too much: a trained network gives all images of a class nearly the same.
    """
    where = {one.path: (one.split, one.labels) for one in rows}
    told = {frozenset(problem.images) for problem in report.problems}
    facts = [report.stats[one.path] for one in rows]
    likely = [
        (first, second)
        for first, second, _ in pairs(found)
        if facts[first].digest != facts[second].digest
        and frozenset((rows[first].path, rows[second].path)) not in told
    ]
    alike = verify_near_duplicates(
        [one.thumbnail for one in facts], [min(one.width, one.height) for one in facts], likely
    )
    return [
        near_duplicate_problem(
            [(rows[one.first].path, rows[one.second].path)], where, f"correlation {one.score:.3f}"
        )
        for one in alike
    ]


def _told(path: str, label: str, classes: Sequence[str], one: Suspect) -> Problem:
    likely = classes[one.likely]
    words = f"labelled {printable(label)}, looks like {printable(likely)} (margin {one.margin:.2f})"
    return Problem("suspected_label", words, (path,), labels=(label, likely))


def neighbours(features: Tensor, k: int = NEIGHBOURS) -> Neighbours:
    """The `k` nearest of the other images, by cosine.

    Args:
        features: (images, dim).
        k: Fewer where there are fewer.
    """
    known = F.normalize(features.float(), dim=1)
    k = min(k, len(known) - 1)
    rows, found = max(BLOCK // len(known), 1), []
    for top in range(0, len(known), rows):
        similar = known[top : top + rows] @ known.T
        own = torch.arange(len(similar))
        similar[own, own + top] = -2.0
        found.append(similar.topk(k, dim=1))
    return Neighbours(*(torch.cat(part) for part in zip(*found, strict=True)))


def pairs(found: Neighbours) -> list[tuple[int, int, float]]:
    """Images whose features are nearly equal, each pair once."""
    row, column = (found.similarity >= COPY).nonzero().unbind(1)
    pairs = {
        (min(one, two), max(one, two)): cosine
        for one, two, cosine in zip(
            row.tolist(),
            found.place[row, column].tolist(),
            found.similarity[row, column].tolist(),
            strict=True,
        )
    }
    return [(*pair, cosine) for pair, cosine in sorted(pairs.items())]


def suspects(features: Tensor, found: Neighbours, labels: Tensor, classes: int) -> list[Suspect]:
    """Images whose label is probably wrong, the surest first.

    The surest are those that lie nearest to the middle of the other class, and farthest from that
    of their own: many neighbours are of one class alone, so that chances are equal.

    Args:
        features: (images, dim).
        found: Neighbours of each image.
        labels: (images,).
        classes: Number of classes.
    """
    power = ((found.similarity - found.similarity[:, :1]) / TEMPERATURE).exp()
    power = power.masked_fill(found.similarity > SAME, 0.0)
    votes = power.new_zeros(len(labels), classes).scatter_add_(1, labels[found.place], power)
    chances = votes / votes.sum(1, keepdim=True).clamp(min=1e-12)
    own = chances.gather(1, labels[:, None]).squeeze(1)
    number = torch.bincount(labels, minlength=classes).clamp(min=1)
    usual = torch.zeros(classes).scatter_add_(0, labels, own) / number
    clear = chances.masked_fill(chances < usual, -1.0)
    best, likely = clear.max(1)
    wrong = (best > own) & (likely != labels) & (best > 0)
    margin = best - own
    known = F.normalize(features.float(), dim=1)
    middles = torch.zeros(classes, known.shape[1]).index_add_(0, labels, known)
    closeness = known @ F.normalize(middles, dim=1).T
    nearer = closeness.gather(1, torch.stack([likely, labels], dim=1))
    sure = margin + NEARER * (nearer[:, 0] - nearer[:, 1])
    order = sure.masked_fill(~wrong, -torch.inf).argsort(descending=True, stable=True)
    return [
        Suspect(place, int(likely[place]), float(margin[place]))
        for place in order[: int(wrong.sum())].tolist()
    ]
