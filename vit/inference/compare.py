"""Compares two or more classifiers on the same labelled images: `vit compare`.

Of one class an image by right answers, of several by mean average precision.
"""

import os
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vit.config.stored_config import run_folder_of
from vit.data.dataset_types import NO_LABEL, Sample
from vit.data.multilabel_targets import MultiHot, labels_of
from vit.data.sources.dataset_spec import DatasetSpec, as_dataset_spec
from vit.data.sources.open_dataset import image_groups
from vit.errors import ConfigError, DataError
from vit.evaluation.comparison_page import Disagreement, Flip, all_pairs_page, comparison_page
from vit.evaluation.image_groups import number_groups
from vit.evaluation.paired_comparison import MAX_RUNS, AllPairs, PairedComparison
from vit.evaluation.paired_groups import PairedGroups
from vit.evaluation.paired_map import MapScores, PairedMap
from vit.inference.evaluation_data import evaluated_spec, load_samples, source_of
from vit.inference.exported_predictor import ExportedPredictor, open_evaluated
from vit.inference.predictor import PathLike, Predictor
from vit.text import Notify, join_names, plural, printable

NO_CLASS = "(no class)"


@dataclass(frozen=True)
class Answer:
    """The answer of one classifier for an image, and the truth.

    Of several classes an image, a probability is the product of those of each decision, and the
    names are joined: other classes may have the same text.
    """

    label: str
    answer: str
    confidence: float
    likelihood: float
    right: bool


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Args:
        flips: Images that only A, and that only B gets right.
    """

    names: tuple[str, str]
    counts: PairedComparison
    flips: tuple[list[Flip], list[Flip]]
    failed: list[dict[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit compare`."""
        found = self.counts.to_dict()
        named = {
            key: {"run": name, **found[key]} for key, name in zip("ab", self.names, strict=True)
        }
        return {**found, **named, "failed": self.failed}

    def page(self) -> str:
        """The HTML page, with thumbnails."""
        return comparison_page(self.names, self.counts, *self.flips)


@dataclass(frozen=True)
class RunsComparison:
    """The result of `compare_runs`."""

    names: tuple[str, ...]
    result: AllPairs
    disagreements: list[Disagreement]
    failed: list[dict[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit compare` with more than two runs."""
        return {**self.result.to_dict(self.names), "failed": self.failed}

    def page(self) -> str:
        """The HTML page, with thumbnails."""
        return all_pairs_page(self.names, self.result, self.disagreements)


@dataclass(frozen=True)
class SharedAnswers:
    """Answers of several classifiers for the same images."""

    paths: list[str]
    """Images that can be read."""
    answers: list[dict[str, Answer]]
    """Of each classifier, by image."""
    failed: list[dict[str, str]]
    """Unreadable images, each {"image", "error"}."""
    scores: list[Tensor]
    """Of each multi-label classifier the probabilities, (images, classes of the first one)."""
    targets: Tensor
    """1 where an image has a class of a multi-label classifier, (images, classes)."""
    groups: Tensor | None = None
    """The group of each image; None of independent images."""

    def compared(self, a: int, b: int) -> PairedComparison:
        """The comparison of two classifiers by their places."""
        both = self.right[a], self.right[b]
        if self.scores:
            maps = self.maps[a], self.maps[b]
            return PairedMap.between(*maps, self.targets, both, self.groups)
        if self.groups is not None:
            return PairedGroups.of_groups(*both, self.groups)
        return PairedComparison.of(*both)

    @cached_property
    def maps(self) -> list[MapScores]:
        """Of each multi-label classifier, which all its pairs share."""
        return [MapScores.of(scores, self.targets, self.groups) for scores in self.scores]

    @cached_property
    def right(self) -> Tensor:
        """Whether each answer is right, (classifiers, images)."""
        return torch.tensor([[found[path].right for path in self.paths] for found in self.answers])


def compare(
    run_a: PathLike,
    run_b: PathLike,
    data: str | DatasetSpec,
    *,
    split: str = "val",
    images: str | None = None,
    group: str | None = None,
    notify: Notify = lambda _note: None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
    **settings: Any,
) -> Comparison:
    """Compare run B with run A on one split of `data`, image by image.

    Classes are matched by name. Images that a training held out of the data are used if both did;
    the others are left out, and those of classes that only one of them has. Both are compared with
    the same labels: corrections of one training are those of both, and different ones are refused.

    Args:
        run_a, run_b: Run folders, other sources of weights with a head, or exported files.
        data, split, images: As for `vit.evaluate`.
        group: Column of a list, or a regular expression over paths, that names the group of an
            image, such as a patient: groups are then independent, not images. By default that of
            the first training with groups, if the data are its own.
        notify: Called with notes.
        progress: Called with the images done and their total, of both runs, after each batch.
        settings: As for Predictor, of both.

    Raises:
        VitError: A model, the data or a setting cannot be used.
    """
    spec = as_dataset_spec(data, {"split": split}, images=images, group=group)
    answers = _answer((run_a, run_b), spec, notify, progress, settings)
    first, second = answers.answers
    return Comparison(
        (os.fspath(run_a), os.fspath(run_b)),
        answers.compared(0, 1),
        (_flips(first, second, answers.paths), _flips(second, first, answers.paths)),
        answers.failed,
    )


def compare_runs(
    runs: Sequence[PathLike],
    data: str | DatasetSpec,
    *,
    split: str = "val",
    images: str | None = None,
    group: str | None = None,
    notify: Notify = lambda _note: None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
    **settings: Any,
) -> RunsComparison:
    """Compare every two of several runs, with p values that are adjusted to their number.

        result = vit.compare_runs(["runs/a", "runs/b", "runs/c"], "photos").result
        print(result.sentence(), result.adjusted[0, 2])

    Images that a training held out of the data are used if all did; the others are left out, and
    those of classes that only some have.

    Args:
        runs: 2 to 26 run folders, other sources of weights with a head, or exported files.
        data, split, ..., settings: As for `compare`.

    Raises:
        VitError: A model, the data or a setting cannot be used.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ConfigError(f"{plural(len(runs), 'run')}: from 2 to {MAX_RUNS} are compared")
    spec = as_dataset_spec(data, {"split": split}, images=images, group=group)
    answers = _answer(runs, spec, notify, progress, settings)
    return RunsComparison(
        tuple(os.fspath(run) for run in runs),
        AllPairs.of(answers.right, answers.compared),
        _disagreements(answers),
        answers.failed,
    )


def _answer(
    runs: Sequence[PathLike],
    spec: DatasetSpec,
    notify: Notify,
    progress: Callable[[int, int], object],
    settings: dict[str, Any],
) -> SharedAnswers:
    """Answers of all `runs` for the images that no training has seen; as `compare`."""
    predictors = [open_evaluated(run, **settings, notify=notify) for run in runs]
    check_comparable(runs, predictors)
    several = predictors[0].thresholds is not None
    class_sets: list[set[str]] = [
        {unicodedata.normalize("NFC", name) for name in predictor.classes}
        for predictor in predictors
    ]
    unshared = set[str]().union(*class_sets) - class_sets[0].intersection(*class_sets)
    tables: list[dict[str, Sample]] = []
    said: set[str] = set()

    def notify_once(note: str) -> None:  # notes about the data are those of each run
        if note not in said:
            said.add(note)
            notify(note)

    sources = [source_of(run, predictor) for run, predictor in zip(runs, predictors, strict=True)]
    specs = [
        evaluated_spec(
            predictor.task,
            run_folder_of(source) if isinstance(source, str | os.PathLike) else None,
            spec,
            predictor.classes,
        )
        for source, predictor in zip(sources, predictors, strict=True)
    ]
    label_settings = _shared_label_settings(specs, notify)
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
        tables.append({s.path: s for s in samples if several or s.label != NO_LABEL})
    paths = [path for path in tables[0] if all(path in table for table in tables[1:])]
    two = len(runs) == 2
    if not paths:
        every, none = ("both", "neither") if two else ("all", "none")
        raise DataError(
            f"{printable(spec.data)}: no image is held out by {every} trainings; give data that "
            f"{none} was trained on"
        )
    left_out = len(set[str]().union(*tables)) - len(paths)
    if left_out:
        which = "only one of the two" if two else "only some of the runs"
        notify(f"note: {plural(left_out, 'image')} left out, which {which} held out")
    _check_same_labels(predictors, tables, paths, spec)
    if several:
        _require_a_class([labels_of(tables[0][path]) for path in paths], spec)
    failed: dict[str, str] = {}
    answers, rows = [], []
    for number, (predictor, table) in enumerate(zip(predictors, tables, strict=True)):
        done = number * len(paths)
        found: dict[str, Answer] = {}
        outputs_of: dict[str, Tensor] = {}
        order = [predictor.classes.index(name) for name in predictors[0].classes] if several else []
        for outputs in predictor.batches(paths):
            for output in outputs:
                if output.probabilities is None:
                    failed[output.image] = output.error or ""
                    continue
                found[output.image] = answer_of(
                    output.probabilities,
                    table[output.image],
                    predictor.classes,
                    predictor.thresholds,
                )
                if several:
                    outputs_of[output.image] = output.probabilities[order]
            done += len(outputs)
            progress(done, len(runs) * len(paths))
        answers.append(found)
        rows.append(outputs_of)
    readable = [path for path in paths if path not in failed]
    if not readable:
        raise DataError(f"{printable(spec.data)}: none of {len(paths)} images can be read")
    labels = [labels_of(tables[0][path]) if several else () for path in readable]
    if several:
        _require_a_class(labels, spec)
    names = image_groups(next((one for one in specs if one.group), spec), readable)
    return SharedAnswers(
        readable,
        answers,
        [{"image": image, "error": error} for image, error in failed.items()],
        [torch.stack([found[path] for path in readable]) for found in rows] if several else [],
        MultiHot(labels, len(predictors[0].classes))[torch.arange(len(labels))],
        None if names is None else number_groups(names),
    )


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
    """Refuse images of which none has one of several classes."""
    if not any(labels):
        raise DataError(
            f"{printable(spec.data)}: none of {plural(len(labels), 'image')} has a class, and "
            "networks are compared by the mean average precision of classes; give labelled images"
        )


def _check_same_labels(
    predictors: Sequence[Predictor | ExportedPredictor],
    tables: Sequence[dict[str, Sample]],
    paths: Sequence[str],
    spec: DatasetSpec,
) -> None:
    """Refuse to compare answers with labels that differ between the runs."""

    def names(predictor: Predictor | ExportedPredictor, sample: Sample) -> frozenset[str]:
        own = labels_of(sample) if predictor.thresholds is not None else (sample.label,)
        return frozenset(unicodedata.normalize("NFC", predictor.classes[at]) for at in own)

    different = sum(
        len({names(one, table[path]) for one, table in zip(predictors, tables, strict=True)}) > 1
        for path in paths
    )
    if different:
        raise DataError(
            f"{printable(spec.data)}: {different:,} of {plural(len(paths), 'image')} have other "
            "labels for one run than for another, by --corrections, --labels or --label-column of "
            "the trainings; write the right labels to one list and give that as the data"
        )


def check_comparable(
    runs: Sequence[PathLike], predictors: Sequence[Predictor | ExportedPredictor]
) -> None:
    """Refuse networks whose answers cannot be compared."""
    first, several = predictors[0], predictors[0].thresholds is not None
    for run, predictor in zip(runs, predictors, strict=True):
        if predictor.n_best or not predictor.classes:
            raise ConfigError(
                f"{printable(run)}: only classifiers are compared, and this network is none; vit "
                "evaluate measures it, with intervals to compare"
            )
        if (predictor.thresholds is not None) != several:
            one, other = ("several", "one") if several else ("one", "several")
            raise ConfigError(
                f"{printable(run)} has {other} of its classes an image, and {printable(runs[0])} "
                f"{one}: compare networks of one kind"
            )
        if several and {*predictor.classes} != {*first.classes}:
            different = {*predictor.classes} ^ {*first.classes}
            raise ConfigError(
                f"{printable(run)} has other classes than {printable(runs[0])} "
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
        best, own = int(probabilities.argmax()), sample.label
        return Answer(
            classes[own],
            classes[best],
            float(probabilities[best]),
            float(probabilities[own]),
            best == own,
        )
    named = probabilities >= torch.tensor(thresholds, dtype=torch.float64)
    true = torch.zeros(len(classes), dtype=torch.bool)
    true[[*labels_of(sample)]] = True

    def words(chosen: Tensor) -> str:
        return ", ".join(classes[at] for at in chosen.nonzero().flatten().tolist()) or NO_CLASS

    def likelihood(chosen: Tensor) -> float:
        return float(torch.where(chosen, probabilities, 1 - probabilities).prod())

    right = torch.equal(true, named)
    return Answer(words(true), words(named), likelihood(named), likelihood(true), right)


def _disagreements(answers: SharedAnswers) -> list[Disagreement]:
    """Images that some classifiers get right and others wrong."""
    return [
        Disagreement(
            path=path,
            label=answers.answers[0][path].label,
            answers=[(found[path].answer, found[path].confidence) for found in answers.answers],
            right=right,
        )
        for path, right in zip(answers.paths, answers.right.T.tolist(), strict=True)
        if any(right) and not all(right)
    ]


def _flips(right: dict[str, Answer], wrong: dict[str, Answer], paths: list[str]) -> list[Flip]:
    """Images that `right` answers right and `wrong` does not."""
    return [
        Flip(
            path=path,
            label=right[path].label,
            right=right[path].likelihood,
            answer=wrong[path].answer,
            wrong=wrong[path].confidence,
        )
        for path in paths
        if right[path].right and not wrong[path].right
    ]
