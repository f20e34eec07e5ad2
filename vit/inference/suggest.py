"""Suggests the images that are worth labelling first: `vit suggest`.

IMAGES   data/sources/open_dataset.py    images of any source, without their labels
labels   data/sources/label_review.py    which of them have a label already
weights  inference/predictor.py          a feature vector per image, and the margins of a
                                         classifier, if they decide what is uncertain
         data/checks/duplicates.py       no near duplicate of another one, or of a labelled image
list     output/prediction_results.py    image, label (to fill in), likely -> vit train --labels
"""

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.config import SourceConfig
from vit.config.inference_config import InferenceConfig, accepts_settings
from vit.config.settings import split_settings
from vit.data.checks.dataset_check import StageProgress
from vit.data.checks.duplicates import find_near_duplicates
from vit.data.checks.image_stats import ImageStats, compute_stats
from vit.data.sources.dataset_spec import DatasetSpec, as_dataset_spec
from vit.data.sources.label_review import apply_review, label_list_spec, review_names
from vit.data.sources.list_columns import choose_columns, match_name
from vit.data.sources.list_formats import read_rows
from vit.data.sources.open_dataset import read_whole_source
from vit.errors import ConfigError, DataError
from vit.evaluation.feature_quality import NEIGHBOURS, TEMPERATURE, kmeans
from vit.inference.label_errors import BLOCK, SAME, neighbours
from vit.inference.predictor import PathLike, Predictor
from vit.output.prediction_results import write_review_list
from vit.process_resources import usable_cores
from vit.text import Notify, ignore, plural, printable

ORDERS = ("typical", "uncertain")
COLUMNS = ("image", "label", "likely")
COMPARED = 32
"""Images, at least, that are compared with the chosen ones at a time."""


@dataclass(frozen=True)
class Suggestion:
    """An image that is worth a label."""

    image: str
    """Name, relative to the data; the whole path where several images have that name."""
    path: str
    likely: str = ""
    """The most probable class, where one is known."""
    margin: float | None = None
    """How certain that is, from 0; None if the order is `typical`."""


@dataclass(frozen=True)
class Suggestions:
    """The result of `suggest`."""

    root: Path
    """Folder that names are relative to, where they are not whole paths."""
    order: str
    """typical or uncertain."""
    source: str
    """Source of the classes: network, labels (the labelled images) or nothing."""
    images: int
    """Readable images without a label."""
    labelled: int
    """Readable images with a label."""
    near_duplicates: int
    """Images that were passed over, as near duplicates of a chosen or labelled one."""
    suggested: list[Suggestion]
    """The best first."""
    failed: list[tuple[str, str]]
    """Unreadable images, named as the suggested ones, and the reasons."""
    columns: tuple[tuple[str, str], ...] = tuple(zip(COLUMNS, COLUMNS, strict=True))
    """Names of the columns of the list and what is in them: those of the list of labels."""
    delimiter: str = ","
    """Between the cells of a CSV file."""

    def lines(self) -> list[str]:
        """What was done, for a terminal."""
        how = {
            "nothing": "typical of the images",
            "labels": "uncertain by their labelled neighbours, and different",
            "network": "uncertain by the network, and different",
        }[self.source]
        first = f"{plural(len(self.suggested), 'image')} of {self.images:,} suggested: {how}"
        if self.labelled:
            first += f"; {self.labelled:,} have a label"
        if self.near_duplicates:
            first += f"; {plural(self.near_duplicates, 'near duplicate')} left out"
        return [first]

    def write(self, path: str | None) -> None:
        """Write the list that an annotator fills in; see `write_review_list`."""
        names, contents = zip(*self.columns, strict=True)
        cells = (
            {"image": one.image, "likely": one.likely, "split": "train"} for one in self.suggested
        )
        rows = [[row.get(content, "") for content in contents] for row in cells]
        write_review_list(path, names, rows, self.delimiter)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit suggest`."""
        return {
            "images": self.images,
            "labelled": self.labelled,
            "order": self.order,
            "near_duplicates": self.near_duplicates,
            "suggested": [
                {"image": one.image}
                | ({"likely": one.likely} if one.likely else {})
                | ({} if one.margin is None else {"margin": one.margin})
                for one in self.suggested
            ],
            "failed": [{"image": image, "error": reason} for image, reason in self.failed],
        }


@accepts_settings(SourceConfig, InferenceConfig)
def suggest(
    data: PathLike | DatasetSpec,
    *,
    weights: PathLike,
    n: int = 300,
    labels: str | None = None,
    order: str | None = None,
    seed: int = 0,
    progress: StageProgress = ignore,
    notify: Notify = ignore,
    **settings: Any,
) -> Suggestions:
    """Choose the images that are worth labelling first: `vit suggest`.

    Args:
        data: Images of any source that training reads; labels in it are ignored, and of several
            splits the training images are taken. Or a DatasetSpec without labels.
        weights: Any source of weights, by whose features images are compared; no head needed.
        n: Number of images.
        labels: List of images and the labels that they have already: these are not suggested.
        order: `typical`, or `uncertain` and different; by default uncertain with `labels`.
        seed: Of the clustering; the same arguments give the same images on the same machine.
        progress: Called with the stage, the images done and their total.
        notify: Called with notes about the data and the weights.
        settings: Fields of SourceConfig, whose columns are those of `labels` where `data` has none,
            such as a folder; and of InferenceConfig.

    Raises:
        VitError: The data, the weights, the labels or a setting cannot be used.
    """
    source, inference = split_settings(settings, "a suggestion", SourceConfig, InferenceConfig)
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"n={n!r}: must be at least 1, a whole number")
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed!r}: must be a whole number of at least 0")
    if order is not None and order not in ORDERS:
        raise ConfigError(f"order={printable(order)!r}: choose one of {', '.join(ORDERS)}")
    column = source.label_column if labels is not None else None  # else labels are ignored
    spec = as_dataset_spec(data, source=dataclasses.replace(source, label_column=column))
    if spec.target:
        raise ConfigError(f"target={','.join(spec.target)}: no numbers are read; leave it out")
    spec = dataclasses.replace(spec, labels=False)
    if labels is not None:
        spec = dataclasses.replace(spec, label_list=labels, unlabelled=True)
    whole, spec = read_whole_source(spec)
    index = apply_review(whole, spec)
    records, known = index.train, dict[str, tuple[str, ...]]()
    if labels is not None:
        labelled_records = [*chain(*index.splits.values())]
        records = [*index.unlabelled, *labelled_records]
        known = {record.path: record.labels for record in labelled_records}
    if not records:
        raise DataError(f"{spec.data}: no images to suggest from")
    for note in index.notes:
        notify(f"note: {note}")
    order = order or ("uncertain" if known else "typical")
    predictor = Predictor(
        weights, engine="torch", **{**vars(inference), "embeddings": True}, notify=notify
    )
    predictor.engine.caption_generator = None  # features need no captions
    answers = _source_of_classes(predictor, order, known, str(weights))
    paths = [*dict.fromkeys(record.path for record in records)]
    table = _extract(predictor, paths, margins=answers == "network", progress=progress)
    every = {record.path for record in chain(*whole.splits.values())}
    names = review_names(every, index.root)
    failed = [(names[path], reason) for path, reason in table.failed]
    if not table.paths:
        raise DataError(
            f"{spec.data}: none of {plural(len(paths), 'image')} can be read: "
            f"{failed[0][0]}: {failed[0][1]}"
        )
    labelled = torch.tensor([path in known for path in table.paths])
    if labelled.all():
        raise DataError(f"{spec.data}: all readable images have a label already")
    if answers == "labels" and not labelled.any():
        raise DataError(f"labels={labels}: none of its images can be read")
    directions = unit_directions(table.features)
    classes: Sequence[str] = predictor.classes
    if answers == "labels":
        table, classes = _with_neighbour_margins(table, directions, labelled, known)
    if answers == "nothing":
        candidates = order_by_typicality(directions, n, labelled, seed=seed)
    else:
        candidates = order_by_uncertainty(directions, table.margins, n, labelled, seed=seed)
    chosen, passed, broken = _without_near_duplicates(
        candidates,
        table.paths,
        labelled.nonzero().squeeze(1).tolist(),
        n,
        inference.workers,
        progress,
        axes=getattr(predictor.preprocessing.channels, "axes", ""),
    )
    failed += [(names[table.paths[place]], reason) for place, reason in broken]
    if len(chosen) < n:
        notify(f"note: only {plural(len(chosen), 'different image')} without a label, not {n:,}")
    likely, margins = table.likely.tolist(), table.margins.tolist()
    return Suggestions(
        root=index.root,
        order=order,
        source=answers,
        images=int((~labelled).sum()),
        labelled=int(labelled.sum()),
        near_duplicates=passed,
        suggested=[
            Suggestion(
                names[table.paths[place]],
                table.paths[place],
                "" if answers == "nothing" else classes[likely[place]],
                None if answers == "nothing" else margins[place],
            )
            for place in chosen
        ],
        failed=failed,
        **({} if labels is None else _columns_of(spec)),
    )


def _columns_of(spec: DatasetSpec) -> dict[str, Any]:
    """The columns and delimiter of the list of labels, to which the suggestions are appended."""
    listed = label_list_spec(spec)
    row = next(iter(read_rows(listed.data, listed, [])))
    found = choose_columns(row.names, listed.data, row.header, listed)
    likely = match_name(found.unused, ("likely",))
    contents = {found.split: "split", likely: "likely", "": ""}
    contents |= {found.image: "image", found.label: "label"}
    columns = tuple((name, contents.get(name, "")) for name in row.names)
    return {"columns": columns, "delimiter": row.delimiter or ","}


@dataclass(frozen=True)
class _Table:
    """Outputs of the network for the readable images."""

    paths: list[str]
    features: Tensor
    """(images, dim) float32."""
    likely: Tensor
    """Index of the most probable class, (images,)."""
    margins: Tensor
    """(images,) float64."""
    failed: list[tuple[str, str]]
    """Unreadable images and the reasons."""


def _source_of_classes(
    predictor: Predictor, order: str, known: dict[str, tuple[str, ...]], weights: str
) -> str:
    """Source of the margins of uncertainty: `network` if its classes include the labels, `labels`,
    or `nothing` if typical images are wanted."""
    if order == "typical":
        return "nothing"
    answers = predictor.thresholds is not None or predictor.task.activation_name == "softmax"
    suits = len(predictor.classes) > 1 and answers
    if not known:
        if suits:
            return "network"
        raise ConfigError(
            f"order=uncertain: {weights} has no classes; give the labelled images with "
            "--labels FILE, or leave it out for typical images"
        )
    return (
        "network"
        if suits and {name for names in known.values() for name in names} <= {*predictor.classes}
        else "labels"
    )


def _extract(
    predictor: Predictor, paths: list[str], *, margins: bool, progress: StageProgress
) -> _Table:
    """Features of the readable images, and margins of the network's answers if requested."""
    features = torch.empty(0, 0)
    kept: list[str] = []
    failed: list[tuple[str, str]] = []
    likely, certain, done = torch.zeros(len(paths), dtype=torch.int64), torch.zeros(len(paths)), 0
    for batch in predictor.batches(paths):
        for output in batch:
            if output.embedding is None or output.probabilities is None:
                failed.append((output.image, output.error or "no features"))
                continue
            if not kept:
                features = torch.empty(len(paths), len(output.embedding))
            features[len(kept)] = output.embedding
            if margins:
                row = torch.as_tensor(output.probabilities)[None]
                likely[len(kept)] = row.argmax()
                certain[len(kept)] = class_margins(row, predictor.thresholds)
            kept.append(output.image)
        done += len(batch)
        progress("read", done, len(paths))
    number = len(kept)
    return _Table(kept, features[:number], likely[:number], certain[:number], failed)


def _with_neighbour_margins(
    table: _Table, directions: Tensor, labelled: Tensor, known: dict[str, tuple[str, ...]]
) -> tuple[_Table, list[str]]:
    """`table` with the classes of the nearest labelled images, and their names."""
    names = sorted({name for labels in known.values() for name in labels})
    places = labelled.nonzero().squeeze(1)
    targets = torch.zeros(len(places), len(names))
    for row, place in enumerate(places.tolist()):
        for name in known[table.paths[place]]:
            targets[row, names.index(name)] = 1.0
    shares = neighbour_shares(directions, places, targets)
    several = bool((targets.sum(dim=1) > 1).any()) or len(names) == 1
    margins = class_margins(shares, [0.5] * len(names) if several else None)
    return dataclasses.replace(table, likely=shares.argmax(dim=1), margins=margins), names


def _without_near_duplicates(
    candidates: Iterator[int],
    paths: Sequence[str],
    labelled: Sequence[int],
    number: int,
    workers: int | None,
    progress: StageProgress,
    axes: str,
) -> tuple[list[int], int, list[tuple[int, str]]]:
    """Places of the first `number` candidates without near-duplicates of each other or of labelled
    images, the number passed over, and unreadable images with the reasons."""
    kept: list[tuple[int, ImageStats]] = []
    broken: list[tuple[int, str]] = []
    passed = 0

    with ThreadPoolExecutor(workers or usable_cores(), "compare-images") as pool:

        def read(places: Sequence[int]) -> list[tuple[int, ImageStats]]:
            found = []
            stats = pool.map(partial(compute_stats, axes=axes), (paths[place] for place in places))
            for place, one in zip(places, stats, strict=True):
                if isinstance(one, ImageStats):
                    found.append((place, one))
                else:
                    broken.append((place, one))
            return found

        kept = read(labelled)
        before = len(kept)
        broken.clear()  # what a labelled image looks like is not needed
        while len(kept) - before < number:
            more = [*islice(candidates, max(number - len(kept) + before, COMPARED))]
            if not more:
                break
            new = read(more)
            fresh = _different([one for _, one in kept], [one for _, one in new], workers)
            room = number - len(kept) + before
            chosen = [one for one, is_new in zip(new, fresh, strict=True) if is_new][:room]
            last = new.index(chosen[-1]) if len(chosen) == room else len(new) - 1
            passed += sum(not is_new for is_new in fresh[: last + 1])
            kept += chosen
            progress("compared", len(kept) - before, number)
    return [place for place, _ in kept[before:]], passed, broken


def _different(
    kept: Sequence[ImageStats], new: Sequence[ImageStats], workers: int | None
) -> list[bool]:
    """Whether each of `new` is nearly none of `kept`, nor one of `new` before it that is new."""
    every = [*kept, *new]
    first = {one.digest: place for place, one in reversed([*enumerate(every)])}
    different = [place for place, one in enumerate(every) if first[one.digest] == place]
    pairs = find_near_duplicates(
        [every[place].thumbnail for place in different],
        [min(every[place].width, every[place].height) for place in different],
        known=sum(place < len(kept) for place in different),
        workers=workers,
    )
    alike: dict[int, list[int]] = {}
    for pair in pairs:
        alike.setdefault(different[pair.second], []).append(different[pair.first])
    fresh = [True] * len(every)
    for place in range(len(kept), len(every)):
        copy = first[every[place].digest] != place
        fresh[place] = not copy and not any(fresh[one] for one in alike.get(place, ()))
    return fresh[len(kept) :]


MAX_CLUSTERS = 500
LEAST_CLUSTER = 5
"""Images of a cluster below which it comes after all others: outliers."""
PRESELECTED = 10
"""Uncertain images that are clustered, for each that is chosen."""


def unit_directions(features: Tensor) -> Tensor:
    """Features less their mean, at length 1; (images, dim) float32, replaced in place.

    What all images have in common would make all of them alike.
    """
    features -= features.mean(dim=0)
    features /= features.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return features


def order_by_typicality(
    directions: Tensor, number: int, labelled: Tensor, *, seed: int
) -> Iterator[int]:
    """Iterate over all images without a label, the most typical ones of all clusters of the unit
    vectors `directions`, (images, dim), first."""
    clusters = min(int(labelled.sum()) + number, MAX_CLUSTERS, len(directions))
    assigned = kmeans(directions, clusters, seed=seed).assigned
    sizes = torch.bincount(assigned, minlength=clusters).tolist()
    labels = torch.bincount(assigned[labelled], minlength=clusters).tolist()
    least = min(LEAST_CLUSTER, len(directions) / clusters / 2)
    heap = [(size < least, labels[one], -size, one) for one, size in enumerate(sizes) if size]
    heapq.heapify(heap)
    members: dict[int, Iterator[int]] = {}
    while heap:
        small, labels_before, size, cluster = heapq.heappop(heap)
        if cluster not in members:
            inside = (assigned == cluster).nonzero().squeeze(1)
            densest = inside[typicality(directions[inside]).argsort(descending=True, stable=True)]
            members[cluster] = iter(densest[~labelled[densest]].tolist())
        if (image := next(members[cluster], None)) is not None:
            yield image
            heapq.heappush(heap, (small, labels_before + 1, size, cluster))


def typicality(directions: Tensor) -> Tensor:
    """1 / mean distance from the nearest others, copies aside, (images,); 0 with copies only."""
    if len(directions) == 1:
        return directions.new_zeros(1)
    cosines = neighbours(directions, min(NEIGHBOURS, max(len(directions) // 2, 1))).similarity
    counted = cosines <= SAME
    distances = (2 - 2 * cosines).clamp(min=0).sqrt() * counted
    number = counted.sum(dim=1)
    return torch.where(number > 0, number / distances.sum(dim=1).clamp(min=1e-12), 0.0)


def order_by_uncertainty(
    directions: Tensor, margins: Tensor, number: int, labelled: Tensor, *, seed: int
) -> Iterator[int]:
    """Iterate over images without a label, uncertain and different ones first."""
    rest = (~labelled).nonzero().squeeze(1)
    rest = rest[margins[rest].argsort(stable=True)]
    pool = rest[: PRESELECTED * number]
    weights = (1 - margins[pool]).clamp(min=1e-3).float()
    found = kmeans(directions[pool], min(number, len(pool)), seed=seed, weights=weights)
    nearest: dict[int, int] = {}  # cluster -> place in the pool, which is sorted by margin
    squares, assigned = found.squares.tolist(), found.assigned.tolist()
    for place, cluster in enumerate(assigned):
        if cluster not in nearest or squares[place] < squares[nearest[cluster]]:
            nearest[cluster] = place
    chosen = sorted(nearest.values())
    yield from pool[chosen].tolist()
    kept = torch.ones(len(rest), dtype=torch.bool)
    kept[chosen] = False
    yield from rest[kept].tolist()


def class_margins(probabilities: Tensor, thresholds: Sequence[float] | None = None) -> Tensor:
    """How certain answers are, (images,): 0 between two classes, 1 at most; with thresholds, the
    distance of the nearest probability from its threshold."""
    if thresholds is not None:
        limits = torch.tensor(thresholds, dtype=probabilities.dtype)
        return (probabilities - limits).abs().amin(dim=1)
    first, second = probabilities.topk(2, dim=1).values.unbind(dim=1)
    return first - second


def neighbour_shares(directions: Tensor, labelled: Tensor, targets: Tensor) -> Tensor:
    """Share of each class among the nearest labelled images, (images, classes); `targets` are 0 and
    1, (labelled, classes).

    Source: k-NN of Wu et al., section 3.4, arXiv:1805.01978.
    """
    known, targets = directions[labelled], targets.float()
    found = []
    for part in torch.split(directions, max(BLOCK // len(known), 1)):
        best = (part @ known.T).topk(min(NEIGHBOURS, len(known)), dim=1)
        weights = ((best.values - best.values[:, :1]) / TEMPERATURE).exp()
        votes = part.new_zeros(len(part), len(known)).scatter_(1, best.indices, weights)
        found.append(votes @ targets / weights.sum(dim=1, keepdim=True))
    return torch.cat(found)
