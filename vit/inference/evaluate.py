"""Evaluates a saved model on labeled or captioned images, with a Predictor.

So the top-1 of `vit evaluate` is exactly the one counted from the output of `vit predict` on the
same files, and the captions that are scored are those that `vit predict` writes.

On request the metrics also have:

    slices         accuracy by properties of the images; vit/evaluation/accuracy_slices.py
    robustness     the score on corrupted images; vit/data/corruptions.py
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vit.atomic_files import open_atomic
from vit.config import SourceConfig
from vit.config.inference_config import (
    EvaluationConfig,
    InferenceConfig,
    accepts_settings,
)
from vit.config.settings import split_settings
from vit.config.stored_config import stored_config
from vit.data.corruptions import CORRUPTIONS, SEVERITIES, Corruption
from vit.data.dataset_types import NO_LABEL, Sample
from vit.data.sources.dataset_spec import VAL_NAMES, DatasetSpec, as_dataset_spec
from vit.data.sources.image_list import list_rows
from vit.data.sources.list_files import is_list
from vit.data.sources.open_dataset import ImageSources, image_groups, image_sources
from vit.errors import ConfigError, DataError, explain_full_memory
from vit.evaluation.accuracy_slices import ImageProperties, accuracy_slices
from vit.evaluation.intervals import count_groups, number_groups
from vit.evaluation.new_sources import measure_new_sources
from vit.inference.evaluation_data import column_cells, evaluated_spec, load_samples, source_of
from vit.inference.predictor import PathLike, Predictor, open_evaluated
from vit.output.output_file import open_output, resolve_link
from vit.output.prediction_results import (
    FORMATS,
    ImageOutput,
    Layout,
    Truth,
    byte_order_mark,
    check_classes,
    classes_per_row,
    csv_settings,
    write_workbook,
)
from vit.precision import autocast
from vit.text import Notify, Progress, ignore, printable
from vit.weights.saved_model import LoadedRun

CLASSIFIER_SCORES = {"top1": "top1", "kappa": "top1", "map": "map"}
"""Score that ranks the epochs of a classifier -> the one of its page and of corrupted images."""
CLASS_SCORE = "class_score_"
"""Begins the name of the column of the score of a class."""
TRUE = "true_"
"""Begins the name of the column of the number in the data."""
ROW_STYLES = {".jsonl": "jsonl", ".csv": "csv", ".xlsx": "xlsx"}


@accepts_settings(EvaluationConfig, SourceConfig, InferenceConfig)
def evaluate(
    model: PathLike | LoadedRun,
    data: PathLike | DatasetSpec,
    *,
    split: str = "val",
    notify: Notify = ignore,
    progress: Progress = ignore,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate `model` on one split of `data`; the metrics are JSON values, see `measure`.

    Classes are matched by name. If the training held out images of `data`, only those are used.

    Args:
        model: A run folder or any other source of weights with a head, an exported file of a
            classifier, or a loaded model.
        data: A folder or list of labelled images or captions, a built-in dataset, or a DatasetSpec.
        split: Part of `data`; `val` is the first validation split. A DatasetSpec has its own.
        notify: Called with notes.
        progress: Called with the images done and their total after each batch.
        settings: Fields of EvaluationConfig (rows, slices, corruptions), of SourceConfig (how
            `data` is read; by default as in the training, for its data), and of InferenceConfig.

    Raises:
        VitError: The model, the data or a setting cannot be used.
    """
    config, source, inference = split_settings(
        settings, "an evaluation", EvaluationConfig, SourceConfig, InferenceConfig
    )
    style = None if config.out is None else row_style(config.out)
    csv = csv_settings(config, style or "none", remedy="give --out FILE.csv")
    spec = as_dataset_spec(data, {"split": split}, source=source)
    spec = dataclasses.replace(spec, columns=(*spec.columns, *config.slice))
    predictor = open_evaluated(model, **vars(inference), notify=notify)
    score = predictor.task.metric.removeprefix("val_")
    score = CLASSIFIER_SCORES.get(score, score)
    if config.page and score not in (*CLASSIFIER_SCORES, "mae", "score"):
        raise ConfigError("html: pages show classifiers and numbers; --json FILE has all scores")
    if config.corruptions and score not in CLASSIFIER_SCORES:
        raise ConfigError(
            "corruptions: measures classifiers, and this network is not one; leave it out"
        )
    if config.corruptions and predictor.exported:
        raise ConfigError(
            "corruptions: an exported network resizes images itself, and corruptions are of "
            "resized ones; give the run it was exported from"
        )
    preprocessing = predictor.preprocessing
    if config.corruptions and (preprocessing.channels or preprocessing.tiles):
        raise ConfigError(
            "corruptions: are of whole RGB images, and this network takes others; leave it out"
        )
    trained = source_of(model, predictor)
    samples = load_samples(predictor.task, trained, spec, predictor.classes, notify)
    if config.page and all(sample.node for sample in samples):
        raise ConfigError("html: no image is of a class of the network; --json FILE has all scores")
    full_spec = evaluated_spec(predictor.task, trained, spec, predictor.classes)
    if source.group is not None and predictor.n_best and not predictor.classes:
        raise ConfigError(
            "group: intervals are those of classes, and this network has none; leave it out"
        )
    paths = [sample.path for sample in samples]
    groups = image_groups(full_spec, paths)
    # of groups that are named now, nothing is known
    is_held_out = full_spec.split in VAL_NAMES and source.group is None
    is_held_out = is_held_out and predictor.task.metric == "val_top1"
    passes = 1 + config.corruptions * len(CORRUPTIONS) * len(SEVERITIES)
    measured = partial(
        measure,
        predictor,
        samples,
        notify,
        lambda done, total: progress(done, passes * total),
        where=spec.data,
        columns=column_cells(full_spec, config.slice),
        groups=groups,
        sources=image_sources(full_spec, paths) if is_held_out else None,
    )
    if style is None:
        scores = measured()
    else:
        names = predictor.task.label_names(spec, predictor.classes)
        cells = list_rows(full_spec) if is_list(full_spec.data, full_spec.numbers) else {}
        rows = EvaluationRows(predictor, samples, names, style, config, csv=csv, cells=cells)
        scores = _measure_with_rows(measured, rows, config.out)
    if config.corruptions:
        scores["robustness"] = measure_robustness(
            predictor, samples, scores, score, progress, where=spec.data, groups=groups
        )
    return scores


def _measure_with_rows(
    measured: Callable[..., dict[str, Any]], rows: "EvaluationRows", out: str
) -> dict[str, Any]:
    """The scores, while the rows are written to `out`."""
    if rows.style == "xlsx":
        lines = [rows.header]
        scores = measured(write=lambda outputs, samples: lines.extend(rows.lines(outputs, samples)))
        with open_atomic(resolve_link(out)) as book:
            write_workbook(book, map(str.encode, lines), shares=rows.predictor.shares)
        return scores
    with open_output(out) as file:
        file.write(rows.header)
        return measured(
            write=lambda outputs, samples: file.writelines(rows.lines(outputs, samples))
        )


def measure_robustness(
    predictor: Predictor,
    samples: tuple[Sample, ...],
    clean: Mapping[str, Any],
    score: str,
    progress: Progress,
    *,
    where: str,
    groups: Sequence[str] | None = None,
) -> dict[str, Any]:
    """`score` on corrupted images: its value `clean`, its `mean`, and that of each of the
    `corruptions` with its interval."""
    rows: list[dict[str, Any]] = []
    pairs = [*itertools.product(CORRUPTIONS, SEVERITIES)]
    try:
        for number, (name, severity) in enumerate(pairs, start=1):

            def advance(done: int, total: int, number: int = number) -> None:
                progress(number * total + done, (1 + len(pairs)) * total)

            predictor.read.transform = Corruption(
                name=name, severity=severity, preprocessing=predictor.preprocessing
            )
            found = measure(
                predictor,
                samples,
                ignore,
                advance,
                where=where,
                groups=groups,
                brief=True,
            )
            interval = f"{score}_interval"
            row = {"corruption": name, "severity": severity, score: found[score]}
            rows.append({**row, interval: found[interval]})
    finally:
        predictor.read.transform = None
    known = [row[score] for row in rows if row[score] is not None]
    return {
        "score": score,
        "clean": clean[score],
        "mean": math.fsum(known) / len(known) if known else None,
        "corruptions": rows,
    }


def row_style(out: str) -> str:
    """The format of rows by the suffix of their file."""
    style = ROW_STYLES.get(Path(out).suffix.lower())
    if style is None:
        raise ConfigError(
            f"out={out}: rows are written as .jsonl or .csv or .xlsx; give such a name"
        )
    return style


class EvaluationRows:
    """Makes the rows of an evaluation."""

    def __init__(
        self,
        predictor: Predictor,
        samples: Sequence[Sample],
        names: Sequence[str],
        style: str,
        config: EvaluationConfig,
        *,
        csv: Mapping[str, Any],
        cells: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.predictor, self.names, self.style, self.config = predictor, names, style, config
        multilabel = predictor.thresholds is not None
        self.truth = ["true_labels"] if multilabel else []
        labelled = any(sample.label != NO_LABEL or sample.node for sample in samples)
        if not multilabel and labelled:
            self.truth = ["label"]
            if predictor.task.activation_name == "softmax":
                self.truth.append("label_score")
        answers = predictor.answers
        if answers is not None:
            check_classes((), answers.kind, top_k=config.top_k, all_scores=config.all_scores)
            self.truth = [f"{TRUE}{name}" for name in answers.names]
        if any(sample.captions for sample in samples):
            self.truth.append("references")
        classes = predictor.classes
        columns = [f"{CLASS_SCORE}{name}" for name in classes] if config.all_scores else []
        self.scored = {name: index for index, name in enumerate(columns)}
        self.truth += self.scored
        layout = Layout(
            0 if answers else classes_per_row(classes, predictor.thresholds, config.top_k),
            classes,
            [sample.path for sample in samples],
            predictor.n_best,
            multilabel,
            self.truth,
            answers=predictor.answer_columns(),
            cells=cells,
            **csv,
        )
        self.header, self.format_row = FORMATS[style](layout)
        if style == "csv":
            self.header = byte_order_mark(layout) + self.header

    def lines(self, outputs: Sequence[ImageOutput], samples: Sequence[Sample]) -> Iterator[str]:
        predictions = self.predictor.to_predictions(outputs, self.config.top_k)
        for prediction, output, sample in zip(predictions, outputs, samples, strict=True):
            truth = {name: self.truth_of(name, output, sample) for name in self.truth}
            yield self.format_row(dataclasses.replace(prediction, truth=truth))

    def truth_of(self, name: str, output: ImageOutput, sample: Sample) -> Truth:
        """A value of `Prediction.truth`; None if the data or the network has none."""
        if name in self.scored:
            scores = output.probabilities
            return None if scores is None else float(scores[self.scored[name]])
        if name == "references":
            return sample.captions
        if self.predictor.answers is not None:
            target = self.truth.index(name)
            truth: Truth = self.predictor.answers.truth(target, sample.numbers[target])
            return truth
        if name == "true_labels":
            return tuple(self.names[label] for label in sample.labels)
        if sample.label == NO_LABEL:
            return sample.node if name == "label" and sample.node else None
        if name == "label":
            return self.names[sample.label]
        found = output.probabilities
        return None if found is None else float(found[sample.label])


def evaluate_held_out(
    run: PathLike, data: PathLike | None = None, *, device: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Evaluate a run folder on the validation images of its training; see `evaluate`."""
    config = stored_config(Path(run))
    spec = DatasetSpec.from_config(config.data, split="val")
    if data is not None:
        spec = dataclasses.replace(spec, data=os.fspath(data))
    if device is None and config.run.device != "auto":
        device = config.run.device
    return evaluate(run, spec, device=device, **settings)


def measure(
    predictor: Predictor,
    samples: tuple[Sample, ...],
    notify: Notify,
    progress: Progress,
    *,
    where: str,
    write: Callable[[Sequence[ImageOutput], Sequence[Sample]], object] | None = None,
    columns: Mapping[str, Mapping[str, str]] | None = None,
    groups: Sequence[str] | None = None,
    sources: ImageSources | None = None,
    brief: bool = False,
) -> dict[str, Any]:
    """Scores of the task's `Evaluation` over the readable images, `failed` (the others) and, with
    `columns`, even if empty, `slices`."""
    evaluation = predictor.task.evaluation(predictor, samples, notify)
    if columns and evaluation.right is None:
        raise ConfigError("slice: accuracy is that of classifiers, and this network is not one")
    evaluation.brief = brief
    if groups is not None:  # of the images that the evaluation kept
        named = {sample.path: name for sample, name in zip(samples, groups, strict=True)}
        evaluation.groups = [named[sample.path] for sample in evaluation.samples]
    sliced = columns is not None and evaluation.right is not None
    properties = ImageProperties()
    paths = [sample.path for sample in evaluation.samples]
    failed: list[dict[str, str]] = []
    done = 0
    if not predictor.exported and predictor.preprocessing.tiles is None:
        display = predictor.preprocessing.to_display

        def observe(name: str, size: tuple[int, int], kind: str, pixels: Any) -> None:
            properties.add(name, size, kind, display(pixels))

        predictor.read.observe = observe if sliced else None
    elif sliced:  # the pixels that the network sees stay in the file
        properties.add_headers(paths)
    with torch.inference_mode():
        for outputs in predictor.batches(paths):
            with explain_full_memory(), autocast(predictor.precision, predictor.device):
                evaluation.add(outputs, done)
            if write is not None:
                write(outputs, evaluation.samples[done : done + len(outputs)])
            failed += [
                {"image": output.image, "error": output.error}
                for output in outputs
                if output.error is not None
            ]
            done += len(outputs)
            progress(done, len(paths))
    predictor.read.observe = None
    scores = evaluation.scores()
    if not scores:
        image, error = (printable(failed[0][name]) for name in ("image", "error"))
        raise DataError(
            f"{where}: none of {len(failed)} images can be measured; the first is {image}: {error}"
        )
    for note in evaluation.notes(scores):
        notify(note)
    if (numbers := evaluation.measured_groups()) is not None:
        scores["groups"] = count_groups(numbers)
    if sources is not None and evaluation.right is not None:
        measured = measure_new_sources(evaluation.right, sources.names, sources.new)
        scores |= {"new_source": measured.scores()} if measured else {}
    if sliced and evaluation.right is not None:
        classes = None
        if predictor.thresholds is None:
            classes = [one.node or predictor.classes[one.label] for one in evaluation.samples]
        features = properties.features(paths, classes=classes, columns=columns)
        numbers = None if evaluation.groups is None else number_groups(evaluation.groups)
        found = accuracy_slices(evaluation.right, features, numbers)
        scores["slices"] = [one.to_dict() for one in found]
    return {**scores, "failed": failed}
