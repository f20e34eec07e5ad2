"""Label errors and near duplicates, found by the features of a trained network or by predictions.

A label is suspected if another class is more probable, and at least as probable as on average in
its own images (vit/evaluation/confident_learning.py). Probabilities are those of the nearest
neighbours in feature space, or those in the rows of an evaluation.

Source: Northcutt et al., "Confident Learning", section 3, arXiv:1911.00068; neighbours: Wu et al.,
arXiv:1805.01978, section 3.4.
"""

import dataclasses
import os
import statistics
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.config import SourceConfig
from vit.config.inference_config import accepts_settings
from vit.config.settings import split_settings
from vit.config.stored_config import has_stored_config, run_folder_of, stored_config
from vit.data.checks.check_listing import ListedImage
from vit.data.checks.dataset_check import (
    CheckReport,
    StageProgress,
    check_dataset,
    sort_by_severity,
)
from vit.data.checks.duplicates import near_duplicate_problem, verify_near_duplicates
from vit.data.sources.dataset_problem import Problem
from vit.data.sources.dataset_spec import DatasetSpec, as_dataset_spec
from vit.data.sources.label_review import review_names
from vit.data.sources.open_dataset import with_target_kind
from vit.errors import ConfigError, DataError
from vit.evaluation.confident_learning import (
    MIN_AGREEMENT,
    LabeledRow,
    find_disagreement,
    find_suspect_rows,
    read_labeled_rows,
    read_rows,
    weak_predictions,
)
from vit.evaluation.feature_quality import NEIGHBOURS, TEMPERATURE
from vit.inference.predictor import PathLike, Predictor
from vit.output.prediction_results import write_review_list
from vit.text import Notify, ignore, join_names, plural, printable

SAME = 0.999
"""Cosine from which on a neighbour is a copy, and not counted."""
COPY = 0.9
"""Cosine from which on two images may be near duplicates."""
CENTROID_WEIGHT = 10.0
"""Weight of the cosine to the mean of a class beside a probability, in the order of suspects."""
ERRORS = 6.0
"""Times the median error of a target from which on a number is suspected."""
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


@accepts_settings(SourceConfig)
def check(
    data: PathLike | DatasetSpec,
    *,
    task: str | None = None,
    weights: PathLike | None = None,
    rows: str | Path | None = None,
    device: str | None = None,
    workers: int | None = None,
    cache: bool = True,
    axes: str = "",
    progress: StageProgress = ignore,
    notify: Notify = ignore,
    **settings: Any,
) -> CheckReport:
    """Check a dataset: `vit check`: `check_dataset`, then label errors by `weights` or `rows`.

    Args:
        data: A folder, a list, the name of a dataset, or a DatasetSpec.
        task: Task that a training would learn; classes by default.
        weights: Weights whose features find suspected labels; see `find_label_errors`.
        rows: As for `add_row_errors`.
        device: Device of the network of `weights`.
        workers, cache, axes, progress, notify: As for `check_dataset`.
        settings: Fields of SourceConfig: how `data` is read.

    Raises:
        VitError: The data, the weights, the rows or a setting cannot be used.
    """
    (source,) = split_settings(settings, "a check", SourceConfig)
    if rows is not None and weights is not None:
        raise ConfigError(f"rows={rows}: weights find label errors too; give one of both")
    spec = with_target_kind(as_dataset_spec(data, task=task, source=source))
    found = None if rows is None or spec.numbers else read_labeled_rows(rows)
    report = check_dataset(
        spec, workers=workers, cache=cache, axes=axes, progress=progress, notify=notify
    )
    if rows is not None and spec.numbers:
        return add_number_errors(report, rows)
    if found is not None:
        return add_row_errors(report, found, where=str(rows), notify=notify)
    if weights is None:
        return report
    return find_label_errors(
        report, weights, device=device, workers=workers, progress=progress, notify=notify
    )


def find_label_errors(
    report: CheckReport,
    weights: PathLike,
    *,
    device: str | None = None,
    workers: int | None = None,
    progress: StageProgress = ignore,
    notify: Notify = ignore,
) -> CheckReport:
    """Add suspected labels and near duplicates to `report`, by the features of a network."""
    predictor = Predictor(
        weights, engine="torch", device=device, workers=workers, embeddings=True, notify=notify
    )
    predictor.engine.caption_generator = None  # features need no captions
    images = [one for one in report.listing.images if one.path in report.stats]
    pairs: list[tuple[ListedImage, Tensor]] = []
    failed: list[str] = []
    done = 0
    for batch in predictor.batches([one.path for one in images]):
        for one, output in zip(images[done : done + len(batch)], batch, strict=True):
            if output.embedding is not None:
                pairs.append((one, output.embedding))
            else:
                failed.append(f"{printable(one.path)}: {output.error}")
        done += len(batch)
        progress("encoded", done, len(images))
    if failed:
        notify(f"note: without {plural(len(failed), 'image')}, such as {failed[0]}")
    if len(pairs) < 2:
        return report
    rows, features = [one for one, _ in pairs], torch.stack([feature for _, feature in pairs])
    nearest = neighbours(features)
    problems = [*report.problems, *near_duplicates(report, rows, nearest, workers)]
    names = report.listing.classes
    if any(len(one.labels) != 1 for one in rows):
        notify("note: label errors are not searched for: images have several labels, or none")
        return dataclasses.replace(report, problems=sort_by_severity(problems))
    indices = label_indices([one.labels[0] for one in rows], names)
    known = [place for place, index in enumerate(indices) if index is not None]
    if len(known) < len(rows):
        notify(
            f"note: {plural(len(rows) - len(known), 'image')} left out of the search for label "
            "errors, of classes that the training images do not have"
        )
        rows, features = [rows[place] for place in known], features[known]
        nearest = neighbours(features) if len(known) > 1 else nearest
    if len(known) > 1:
        labels = torch.tensor([index for index in indices if index is not None])
        agreement = neighbour_agreement(nearest, labels, len(names))
        suspected = [
            _label_problem(rows[one.image], names[one.likely], one.margin)
            for one in suspects(features, nearest, labels, len(names))
        ]
        largest = float(torch.bincount(labels).max()) / len(labels)
        if agreement - largest < MIN_AGREEMENT * (1 - largest):
            detail = (
                f"these features cannot tell the classes apart: the nearest images have the same "
                f"label for {agreement:.0%}, and {largest:.0%} are of one class. So "
                f"{plural(len(suspected), 'suspected label')} would mean nothing and are not "
                "listed; give weights that separate these classes, or use vit train --folds"
            )
            problems.append(Problem("weak_features", detail))
        else:
            problems += report.listing.with_lines(suspected)
        report = dataclasses.replace(report, neighbour_agreement=agreement)
        if has_learned(os.fspath(weights), report.listing.root):
            notify(
                f"note: {printable(weights)} was trained on these labels, errors included, and "
                "agrees with some of them; vit train --folds judges each image by a network that "
                "has not seen it"
            )
    return dataclasses.replace(report, problems=sort_by_severity(problems))


def label_indices(labels: Sequence[str], classes: Sequence[str]) -> list[int | None]:
    """The place of each label in `classes`, both in NFC as in training; None of unknown ones."""
    exact = {name: place for place, name in enumerate(classes)}
    equal = {unicodedata.normalize("NFC", name): place for name, place in exact.items()}
    return [exact.get(name, equal.get(unicodedata.normalize("NFC", name))) for name in labels]


def has_learned(weights: str, root: Path) -> bool:
    """Whether `weights` is a run that was trained on the data in folder `root`."""
    run = run_folder_of(weights)
    data = Path(stored_config(run).data.data).resolve() if has_stored_config(run) else None
    return data is not None and data.exists() and root.resolve() in (data, data.parent)


def add_row_errors(
    report: CheckReport,
    rows: Sequence[LabeledRow],
    *,
    where: str,
    notify: Notify = ignore,
) -> CheckReport:
    """Add the labels that out-of-sample predictions contradict to `report`."""
    listed = {os.path.realpath(one.path): one for one in report.listing.images}
    known = [row for row in rows if os.path.realpath(row.image) in listed]
    if not known:
        raise DataError(
            f"{where}: none of its {plural(len(rows), 'image')}, such as "
            f"{rows[0].image}, is in the data; give the rows of these data, run this in "
            "the folder in which the rows were made, and give --labels LIST if the training had it"
        )
    if len(known) < len(listed):
        notify(f"note: {len(listed) - len(known)} of {plural(len(listed), 'image')} have no row")
    if (weak := weak_predictions(known)) is not None:
        notify(f"note: {weak}")
    suspected = []
    for found in find_suspect_rows(known):
        image = listed[os.path.realpath(found.row.image)]
        own = label_indices(image.labels, [found.row.label])
        if own == [0]:  # a label that was corrected since is no problem
            suspected.append(_label_problem(image, found.likely, found.margin))
    problems = [*report.problems, *report.listing.with_lines(suspected)]
    return dataclasses.replace(report, problems=sort_by_severity(problems))


def add_number_errors(report: CheckReport, path: str | Path) -> CheckReport:
    """Add the numbers whose error in out-of-sample rows is 6 times the median one or more to
    `report`, the largest first; errors count by the width of their interval, if they have one."""

    def numbers(row: Any) -> tuple[str, dict[str, tuple[float, float, float]]]:
        ends = [(name, row.get(f"{name}_low", 0.0), row.get(f"{name}_high", 1.0)) for name in names]
        found = {
            name: (float(number), float(row[name]), float(high - low))
            for name, low, high in ends
            if (number := row[f"true_{name}"]) is not None
        }
        return os.path.realpath(row["image"]), found

    names, suspected = report.listing.targets, list[tuple[float, Problem]]()
    rows = read_rows(path, numbers, f"the numbers {join_names(names)}")
    listed = {os.path.realpath(one.path): one for one in report.listing.images}
    known = [(listed[image], found) for image, found in rows if image in listed]
    if not known:
        raise DataError(f"{path}: none of its {plural(len(rows), 'image')} is in the data")
    for place, name in enumerate(names):
        cells = [(image, *found[name]) for image, found in known if name in found]
        errors = [abs(number - found) / width for _, number, found, width in cells]
        usual = statistics.median(errors) if errors else 0.0
        for error, (image, number, found, _) in zip(errors, cells, strict=True):
            # a number that was corrected since is no problem
            if error >= ERRORS * usual > 0 and image.numbers[place] == number:
                labels, times = (f"{number:g}", f"{found:.4g}"), error / usual
                text = f"{printable(name)} is {labels[0]}, and {labels[1]} is predicted"
                text += f", {times:.0f} times the usual error away"
                problem = Problem("suspected_number", text, (image.path,), labels=labels)
                suspected.append((times, problem))
    suspected.sort(key=lambda pair: -pair[0])
    located = report.listing.with_lines([problem for _, problem in suspected])
    return dataclasses.replace(report, problems=sort_by_severity([*report.problems, *located]))


def write_suspects(report: CheckReport, path: str) -> int:
    """Write the suspected labels as a list that can be edited and given to `vit train`; returns
    their number.

    Columns: image, relative to the data; its label, which a reviewer corrects; the likely class.
    """
    columns = ("image", "label", "likely")
    kinds = ("suspected_label", "suspected_number")
    suspected = [one for one in report.problems if one.kind in kinds]
    paths = {one.path for one in report.listing.images} | {one.images[0] for one in suspected}
    names = review_names(paths, report.listing.root)
    rows = [(names[problem.images[0]], *problem.labels) for problem in suspected]
    write_review_list(path, columns, rows)
    return len(rows)


def near_duplicates(
    report: CheckReport, rows: Sequence[ListedImage], nearest: Neighbours, workers: int | None
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
        workers=workers,
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


def neighbour_probabilities(nearest: Neighbours, labels: Tensor, classes: int) -> Tensor:
    """Weighted share of each class among an image's neighbours, copies aside, (images, classes)."""
    similarity = nearest.similarity
    weights = ((similarity - similarity[:, :1]) / TEMPERATURE).exp()
    weights = weights.masked_fill(similarity > SAME, 0.0)
    votes = weights.new_zeros(len(labels), classes).scatter_add_(
        1, labels[nearest.indices], weights
    )
    return votes / votes.sum(1, keepdim=True).clamp(min=1e-12)


def have_votes(nearest: Neighbours) -> Tensor:
    """Whether an image has a neighbour that is no copy, (images,)."""
    return (nearest.similarity <= SAME).any(1)


def neighbour_agreement(nearest: Neighbours, labels: Tensor, classes: int) -> float:
    """Share of images whose label is the most probable one among its neighbours.

    Images with copies only do not count; 0 if all are such.
    """
    voted = have_votes(nearest)
    found = neighbour_probabilities(nearest, labels, classes).argmax(1)
    return float((found == labels)[voted].double().mean()) if voted.any() else 0.0


def suspects(features: Tensor, nearest: Neighbours, labels: Tensor, classes: int) -> list[Suspect]:
    """Images whose label is probably wrong by their `features`, (images, dim), the most certain
    first.

    Images with copies only are not suspected, and change no threshold. Many others have neighbours
    of one class only, and equal probabilities. The most certain ones are then those that are
    nearest to the mean of the other class, and farthest from that of their own.
    """
    voted = have_votes(nearest).nonzero().flatten()
    wrong, likely, margin = find_disagreement(
        neighbour_probabilities(nearest, labels, classes)[voted], labels[voted]
    )
    normalised = F.normalize(features.float(), dim=1)
    means = torch.zeros(classes, normalised.shape[1]).index_add_(0, labels, normalised)
    cosines = normalised @ F.normalize(means, dim=1).T
    nearer = cosines[voted].gather(1, torch.stack([likely, labels[voted]], dim=1))
    certainty = margin + CENTROID_WEIGHT * (nearer[:, 0] - nearer[:, 1])
    order = certainty.masked_fill(~wrong, -torch.inf).argsort(descending=True, stable=True)
    return [
        Suspect(int(voted[index]), int(likely[index]), float(margin[index]))
        for index in order[: int(wrong.sum())].tolist()
    ]
