"""Compares two or more classifiers on the same labelled images: `vit compare`.

Of one class an image by right answers, of several by mean average precision.
"""

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vit.data.dataset import MultiHot
from vit.data.dataset_types import NO_LABEL, Sample, labels_of
from vit.data.sources.dataset_spec import DatasetSpec, as_dataset_spec
from vit.data.sources.open_dataset import image_groups
from vit.errors import ConfigError, DataError
from vit.evaluation.intervals import number_groups
from vit.evaluation.paired_comparison import (
    MAX_RUNS,
    Disagreement,
    RunsComparison,
    compare_all_pairs,
)
from vit.inference.evaluation_data import evaluated_spec, load_samples, source_of
from vit.inference.predictor import PathLike, Predictor, open_evaluated
from vit.text import Notify, Progress, ignore, join_names, plural, printable

NO_CLASS = "(no class)"


@dataclass(frozen=True)
class Answer:
    """The answer of one classifier for an image, and the truth.

    Of several classes an image, the probability is the product of those of each decision, and the
    names are joined: other classes may have the same text.
    """

    label: str
    answer: str
    confidence: float
    right: bool


def compare(
    run_a: PathLike, run_b: PathLike, data: str | DatasetSpec, **options: Any
) -> RunsComparison:
    """Compare run B with run A on one split of `data`, image by image; as `compare_runs`."""
    return compare_runs([run_a, run_b], data, **options)


def compare_runs(
    runs: Sequence[PathLike],
    data: str | DatasetSpec,
    *,
    split: str = "val",
    images: str | None = None,
    group: str | None = None,
    notify: Notify = ignore,
    progress: Progress = ignore,
    **settings: Any,
) -> RunsComparison:
    """Compare every two of several runs, with p values that are adjusted to their number.

        result = vit.compare_runs(["runs/a", "runs/b", "runs/c"], "photos")
        print(result.sentence(), result.adjusted[0, 2])

    Classes are matched by name. Images that a training held out of the data are used if all did;
    the others are left out, and those of classes that only some have. All are compared with the
    same labels: corrections of one training are those of all, and different ones are refused.

    Args:
        runs: 2 to 26 run folders, other sources of weights with a head, or exported files.
        data, split, images: As for `vit.evaluate`.
        group: Column of a list, or a regular expression over paths, that names the group of an
            image, such as a patient: groups are then independent, not images. By default that of
            the first training with groups, if the data are its own.
        notify: Called with notes.
        progress: Called with the images done and their total, of all runs, after each batch.
        settings: As for Predictor, of all runs.

    Raises:
        VitError: A model, the data or a setting cannot be used.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ConfigError(f"{plural(len(runs), 'run')}: from 2 to {MAX_RUNS} are compared")
    spec = as_dataset_spec(data, {"split": split}, images=images, group=group)
    predictors = [open_evaluated(run, **settings, notify=notify) for run in runs]
    check_comparable(runs, predictors)
    first, several = predictors[0], predictors[0].thresholds is not None
    sources = [source_of(run, predictor) for run, predictor in zip(runs, predictors, strict=True)]
    specs = [
        evaluated_spec(predictor.task, source, spec, predictor.classes)
        for source, predictor in zip(sources, predictors, strict=True)
    ]
    tables = _held_out_samples(predictors, sources, specs, spec, notify)
    paths = [path for path in tables[0] if all(path in table for table in tables[1:])]
    if not paths:
        raise DataError(
            f"{spec.data}: no image is held out by all trainings; give data that none was "
            "trained on"
        )
    if left_out := len(set[str]().union(*tables)) - len(paths):
        images = plural(left_out, "image")
        notify(f"note: {images} left out, which only some of the runs held out")
    _check_same_labels(predictors, tables, paths, spec)
    if several:
        _require_a_class([labels_of(tables[0][path]) for path in paths], spec)
    failed: dict[str, str] = {}
    answers: list[dict[str, Answer]] = []
    rows: list[dict[str, Tensor]] = []
    done = 0
    for predictor, table in zip(predictors, tables, strict=True):
        answers.append({})
        rows.append({})
        order = [predictor.classes.index(name) for name in first.classes] if several else []
        for outputs in predictor.batches(paths):
            for output in outputs:
                image = output.image
                if output.probabilities is None:
                    failed[image] = output.error or ""
                    continue
                probabilities = torch.as_tensor(output.probabilities)
                answers[-1][image] = answer_of(
                    probabilities, table[image], predictor.classes, predictor.thresholds
                )
                if several:
                    rows[-1][image] = probabilities[order]
            done += len(outputs)
            progress(done, len(runs) * len(paths))
    readable = [path for path in paths if path not in failed]
    if not readable:
        raise DataError(f"{spec.data}: none of {len(paths)} images can be read")
    labels = [labels_of(tables[0][path]) if several else () for path in readable]
    if several:
        _require_a_class(labels, spec)
    names = image_groups(next((one for one in specs if one.group), spec), readable)
    by_image = {path: [each[path] for each in answers] for path in readable}
    right = torch.tensor([[one.right for one in by_image[path]] for path in readable]).T
    pairs = compare_all_pairs(
        right,
        None if names is None else number_groups(names),
        scores=[torch.stack([each[path] for path in readable]) for each in rows] if several else [],
        targets=MultiHot(labels, len(first.classes))[torch.arange(len(labels))],
    )
    disagreements = [
        Disagreement(
            path=path,
            label=given[0].label,
            answers=[(one.answer, one.confidence) for one in given],
            right=[one.right for one in given],
        )
        for path, given in by_image.items()
        if len({one.right for one in given}) == 2
    ]
    return RunsComparison(
        [os.fspath(run) for run in runs],
        pairs,
        disagreements,
        [{"image": image, "error": error} for image, error in failed.items()],
    )


def _held_out_samples(
    predictors: Sequence[Predictor],
    sources: Sequence[Any],
    specs: Sequence[DatasetSpec],
    spec: DatasetSpec,
    notify: Notify,
) -> list[dict[str, Sample]]:
    """Of each network the samples that its training has not seen, by path."""
    class_sets: list[set[str]] = [
        {unicodedata.normalize("NFC", name) for name in predictor.classes}
        for predictor in predictors
    ]
    unshared = set[str]().union(*class_sets) - class_sets[0].intersection(*class_sets)
    notes: set[str] = set()

    def notify_once(note: str) -> None:  # notes about the data are those of each run
        if note not in notes:
            notes.add(note)
            notify(note)

    label_settings = _shared_label_settings(specs, notify)
    tables: list[dict[str, Sample]] = []
    for source, predictor in zip(sources, predictors, strict=True):
        samples = load_samples(
            predictor.task,
            source,
            spec,
            predictor.classes,
            notify_once,
            unshared,
            label_settings=label_settings,
        )
        several = predictor.thresholds is not None
        tables.append({s.path: s for s in samples if several or s.label != NO_LABEL})
    return tables


def _shared_label_settings(specs: Sequence[DatasetSpec], notify: Notify) -> dict[str, str | None]:
    """The corrections and the list of labels of all runs, where only some were trained with them.

    Each answer has to be compared with the same label. Nothing where no training has them, or
    several have different ones.
    """
    pairs = [(one.corrections, one.label_list) for one in specs]
    files = {tuple(path and os.path.realpath(path) for path in pair) for pair in pairs}
    distinct = files - {(None, None)}
    if len(distinct) != 1 or len(files) == 1:
        return {}
    corrections, labels = next(pair for pair in pairs if any(pair))
    given = [
        f"{name}={printable(path)}"
        for name, path in (("corrections", corrections), ("labels", labels))
        if path
    ]
    notify(f"note: all runs are compared with {' and '.join(given)}, as some were trained with")
    return {"corrections": corrections, "label_list": labels}


def _require_a_class(labels: Sequence[Sequence[int]], spec: DatasetSpec) -> None:
    """Raise if no image has any label."""
    if not any(labels):
        raise DataError(
            f"{spec.data}: none of {plural(len(labels), 'image')} has a class, and "
            "networks are compared by the mean average precision of classes; give labelled images"
        )


def _check_same_labels(
    predictors: Sequence[Predictor],
    tables: Sequence[dict[str, Sample]],
    paths: Sequence[str],
    spec: DatasetSpec,
) -> None:
    """Refuse to compare answers with labels that differ between the runs."""

    def names(predictor: Predictor, sample: Sample) -> frozenset[str]:
        own = labels_of(sample) if predictor.thresholds is not None else (sample.label,)
        return frozenset(unicodedata.normalize("NFC", predictor.classes[at]) for at in own)

    different = sum(
        len({names(one, table[path]) for one, table in zip(predictors, tables, strict=True)}) > 1
        for path in paths
    )
    if different:
        raise DataError(
            f"{spec.data}: {different:,} of {plural(len(paths), 'image')} have other "
            "labels for one run than for another, by --corrections, --labels or --label-column of "
            "the trainings; write the right labels to one list and give that as the data"
        )


def check_comparable(runs: Sequence[PathLike], predictors: Sequence[Predictor]) -> None:
    """Refuse networks whose answers cannot be compared."""
    first, several = predictors[0], predictors[0].thresholds is not None
    for run, predictor in zip(runs, predictors, strict=True):
        if predictor.n_best or predictor.answers or not predictor.classes:
            raise ConfigError(
                f"{run}: only classifiers are compared, and this network is not one; vit "
                "evaluate measures it, with intervals to compare"
            )
        if (predictor.thresholds is not None) != several:
            one, other = ("several", "one") if several else ("one", "several")
            raise ConfigError(
                f"{run} has {other} of its classes an image, and {runs[0]} "
                f"{one}: compare networks of one kind"
            )
        if several and {*predictor.classes} != {*first.classes}:
            different = {*predictor.classes} ^ {*first.classes}
            raise ConfigError(
                f"{run} has other classes than {runs[0]} "
                f"({join_names(sorted(different))}): a mean over classes needs the same ones"
            )


def answer_of(
    probabilities: Tensor,
    sample: Sample,
    classes: Sequence[str],
    thresholds: Sequence[float] | None,
) -> Answer:
    """The answer for an image, from the probabilities of the classes, (classes,)."""
    if thresholds is None:
        best = int(probabilities.argmax())
        return Answer(
            classes[sample.label], classes[best], float(probabilities[best]), best == sample.label
        )
    named = probabilities >= torch.tensor(thresholds, dtype=torch.float64)
    true = torch.zeros(len(classes), dtype=torch.bool)
    true[[*labels_of(sample)]] = True
    label, answer = (
        ", ".join(classes[at] for at in chosen.nonzero().flatten().tolist()) or NO_CLASS
        for chosen in (true, named)
    )
    confidence = float(torch.where(named, probabilities, 1 - probabilities).prod())
    return Answer(label, answer, confidence, torch.equal(true, named))
