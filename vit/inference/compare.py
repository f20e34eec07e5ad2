"""Compares two classifiers on the same labelled images: `vit compare`."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit.data.dataset_types import NO_LABEL
from vit.data.sources.dataset_spec import DatasetSpec
from vit.errors import ConfigError, DataError
from vit.evaluation.comparison_page import Flip, comparison_page
from vit.evaluation.paired_comparison import PairedComparison
from vit.inference.evaluate import load_samples
from vit.inference.predictor import PathLike, Predictor
from vit.text import plural, printable


@dataclass(frozen=True)
class Answer:
    """The answer of one classifier for an image: class name and probabilities."""

    label: str
    answer: str
    confidence: float
    likelihood: float


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Args:
        names: Of both runs.
        counts: The paired counts, with test and interval.
        flips: Images that only A, and that only B gets right.
        failed: Unreadable images, each {"image", "error"}.
    """

    names: tuple[str, str]
    counts: PairedComparison
    flips: tuple[list[Flip], list[Flip]]
    failed: list[dict[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `vit compare`."""
        return {**self.counts.to_dict(), "failed": self.failed}

    def page(self) -> str:
        """The HTML page, with thumbnails."""
        return comparison_page(self.names, self.counts, *self.flips)


def compare(
    run_a: PathLike,
    run_b: PathLike,
    data: str | DatasetSpec,
    *,
    split: str = "val",
    images: str | None = None,
    notify: Callable[[str], object] = lambda _note: None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
    **settings: Any,
) -> Comparison:
    """Compare run B with run A on one split of `data`, image by image.

    Classes are matched by name. Images that a training held out of the data are used if both did;
    the others are left out.

    Args:
        run_a, run_b: Run folders or other sources of weights with a head.
        data, split, images: As for `vit.evaluate`.
        notify: Called with notes.
        progress: Called with the images done and their total, of both runs, after each batch.
        settings: As for Predictor, of both.

    Raises:
        VitError: A model, the data or a setting cannot be used.
    """
    spec = (
        data if isinstance(data, DatasetSpec) else DatasetSpec(os.fspath(data), images, split=split)
    )
    predictors = [Predictor(run, **settings, notify=notify) for run in (run_a, run_b)]
    tables = []
    for run, predictor in zip((run_a, run_b), predictors, strict=True):
        if predictor.thresholds is not None or predictor.n_best or not predictor.classes:
            raise ConfigError(
                f"{printable(run)}: classifiers of one class an image are compared, and this "
                "network is none; vit evaluate measures it"
            )
        samples = load_samples(predictor.task, run, spec, predictor.classes, notify)
        tables.append({s.path: s.label for s in samples if s.label != NO_LABEL})
    paths = [path for path in tables[0] if path in tables[1]]
    if not paths:
        raise DataError(
            f"{printable(spec.data)}: no image is held out by both trainings; give data that "
            "neither was trained on"
        )
    left_out = max(map(len, tables)) - len(paths)
    if left_out:
        notify(f"note: {plural(left_out, 'image')} left out, which only one of the two held out")
    failed: dict[str, str] = {}
    answers = []
    for number, (predictor, table) in enumerate(zip(predictors, tables, strict=True)):
        done = number * len(paths)
        found: dict[str, Answer] = {}
        for outputs in predictor.batches(paths):
            for output in outputs:
                if output.probabilities is None:
                    failed[output.image] = output.error or ""
                    continue
                best, own = int(output.probabilities.argmax()), table[output.image]
                found[output.image] = Answer(
                    predictor.classes[own],
                    predictor.classes[best],
                    float(output.probabilities[best]),
                    float(output.probabilities[own]),
                )
            done += len(outputs)
            progress(done, 2 * len(paths))
        answers.append(found)
    both = [path for path in paths if path not in failed]
    if not both:
        raise DataError(f"{printable(spec.data)}: none of {len(paths)} images can be read")
    a_right, b_right = (
        torch.tensor([found[path].answer == found[path].label for path in both])
        for found in answers
    )
    return Comparison(
        (_name(run_a), _name(run_b)),
        PairedComparison.of(a_right, b_right),
        (_flips(answers[0], answers[1], both), _flips(answers[1], answers[0], both)),
        [{"image": image, "error": error} for image, error in failed.items()],
    )


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
        if right[path].answer == right[path].label and wrong[path].answer != wrong[path].label
    ]


def _name(run: PathLike) -> str:
    """The name of a run for a page."""
    return Path(run).name or os.fspath(run)
