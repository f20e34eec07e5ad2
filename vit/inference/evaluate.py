"""Evaluates a saved model on labeled or captioned images, with a Predictor.

So the top-1 of `vit evaluate` is exactly the one counted from the output of `vit predict` on the
same files, and the captions that are scored are those that `vit predict` writes.

The loss of a captioner is measured twice, as in the validation of its training:

    loss           mean cross-entropy of a token of the images' first captions
    loss_shuffled  the same captions, each paired with another image

The two are equal for a decoder that ignores the images.

With `out`, each image has a row in a file: its ground truth and its prediction.

    slices         accuracy by properties of the images; vit/evaluation/accuracy_slices.py
    robustness     the score on corrupted images; vit/data/corruptions.py
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from vit.config.stored_config import has_stored_config, run_folder_of, stored_config
from vit.data.corruptions import CORRUPTIONS, SEVERITIES, Corruption
from vit.data.dataset_types import NO_LABEL, Sample
from vit.data.sources.dataset_spec import DatasetSpec, as_dataset_spec
from vit.data.sources.held_out_split import read_split
from vit.data.sources.image_list import list_rows
from vit.data.sources.list_files import is_list
from vit.data.sources.open_dataset import image_groups, open_eval_split, read_source
from vit.errors import ConfigError, DataError, VitError, explain_full_memory
from vit.evaluation.accuracy_slices import ImageProperties, accuracy_slices
from vit.evaluation.classification_report import check_page
from vit.evaluation.intervals import count_groups, number_groups
from vit.generation.generation_config import Search
from vit.inference.predictor import (
    ImageOutput,
    PathLike,
    Predictor,
    open_evaluated,
    source_run,
)
from vit.output.output_file import atomic_file, open_output, resolve_link
from vit.output.prediction_results import (
    FORMATS,
    Layout,
    Truth,
    byte_order_mark,
    check_top_k,
    csv_settings,
    resolve_top_k,
    write_workbook,
)
from vit.precision import autocast
from vit.tasks.task import Task
from vit.text import Notify, plural, printable
from vit.weights.saved_model import LoadedRun

ROBUSTNESS_SCORES = ("top1", "map")
CLASS_SCORE = "class_score_"
"""Begins the name of the column of the score of a class."""
ROW_STYLES = {".jsonl": "jsonl", ".csv": "csv", ".xlsx": "xlsx"}


def evaluate(
    model: PathLike | LoadedRun,
    data: PathLike | DatasetSpec,
    *,
    split: str = "val",
    images: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    caption_column: str | None = None,
    allow_outside: bool = False,
    group: str | None = None,
    device: str | None = None,
    batch_size: int | None = None,
    precision: str = "auto",
    workers: int | None = None,
    merge_tokens: int | None = None,
    patch_size: int | None = None,
    keep_aspect: bool = False,
    search: Search | None = None,
    tta: Literal["flip", "crops"] | None = None,
    compile: bool = False,  # noqa: A002
    intensity_range: tuple[float, float] | None = None,
    out: PathLike | None = None,
    top_k: int | None = None,
    all_scores: bool = False,
    csv_separator: str | None = None,
    csv_digits: int | str | None = None,
    no_calibration: bool = False,
    slice: Sequence[str] = (),  # noqa: A002
    corruptions: bool = False,
    page: bool = False,
    notify: Notify = lambda _note: None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> dict[str, Any]:
    """Evaluate `model` on one split of `data`; the metrics are JSON values, see `measure`.

    Classes are matched by name. If the training held out images of `data`, only those are used.

    Args:
        model: A run folder or any other source of weights with a head, an exported file of a
            classifier, or a loaded model.
        data: A folder or list of labelled images or captions, a built-in dataset, or a DatasetSpec.
        split: Part of `data`; `val` is the first validation split. A DatasetSpec has its own.
        images, image_column, ..., allow_outside: Of a list, as in DatasetSpec.
        group: Column of a list, or a regular expression over paths, that names the group of an
            image, such as a patient: intervals then take groups as independent, not images. That of
            the training by default, if the data are the same.
        device, batch_size, ..., no_calibration: As for Predictor.
        out: File of a row for each image, .jsonl, .csv or .xlsx; an older file is replaced.
        top_k: Number of predicted classes in a row; 5 by default, and with several labels an image
            all above their thresholds.
        all_scores: Whether a row has the score of every class too, as `class_score_NAME`.
        csv_separator, csv_digits: Of rows as .csv: comma, semicolon or tab, and decimal digits of
            scores, 4 by default, or `full`.
        slice: Columns of a list, by whose values `slices` has the accuracy too.
        corruptions: Measure the score on corrupted images as well, in 30 more passes over the data.
        page: The scores are for `evaluation_page`: a network that it does not show is refused
            before any image is read.
        notify: Called with notes.
        progress: Called with the images done and their total after each batch.

    Raises:
        VitError: The model, the data or a setting cannot be used.
    """
    style = None if out is None else row_style(os.fspath(out))
    check_top_k(top_k)
    csv = csv_settings(csv_separator, csv_digits, style or "none", remedy="give --out FILE.csv")
    spec = as_dataset_spec(
        data,
        {"split": split},
        images=images,
        image_column=image_column,
        label_column=label_column,
        caption_column=caption_column,
        allow_outside=allow_outside,
        group=group,
    )
    spec = dataclasses.replace(spec, columns=(*spec.columns, *slice))
    predictor = open_evaluated(
        model,
        device=device,
        batch_size=batch_size,
        precision=precision,
        workers=workers,
        merge_tokens=merge_tokens,
        patch_size=patch_size,
        keep_aspect=keep_aspect,
        search=search,
        tta=tta,
        compile=compile,
        intensity_range=intensity_range,
        no_calibration=no_calibration,
        notify=notify,
    )
    if page:
        check_page(predictor.task.metric.removeprefix("val_"), captions=bool(predictor.n_best))
    score = robustness_score(predictor) if corruptions else ""
    source = source_of(model, predictor)
    samples = load_samples(predictor.task, source, spec, predictor.classes, notify)
    run = run_folder_of(source) if isinstance(source, str | os.PathLike) else None
    full_spec = evaluated_spec(predictor.task, run, spec, predictor.classes)
    columns = column_cells(full_spec, slice)
    groups = image_groups(full_spec, [sample.path for sample in samples])
    if predictor.n_best and not predictor.classes and spec.group is not None:
        without = dataclasses.replace(spec, group=None)
        if evaluated_spec(predictor.task, run, without, predictor.classes).group != spec.group:
            raise ConfigError(
                "group: intervals are those of classes, and this network has none; leave it out"
            )
    passes = 1 + corruptions * len(CORRUPTIONS) * len(SEVERITIES)

    def advance(done: int, total: int) -> None:
        progress(done, passes * total)

    measured = partial(
        measure,
        predictor,
        samples,
        notify,
        advance,
        where=spec.data,
        columns=columns,
        groups=groups,
    )
    if out is None or style is None:
        scores = measured()
    else:
        names = predictor.task.label_names(spec, predictor.classes)
        rows = EvaluationRows(
            predictor,
            samples,
            names,
            style,
            top_k,
            all_scores=all_scores,
            csv=csv,
            cells=list_rows(full_spec) if is_list(full_spec.data) else {},
        )
        scores = _measure_with_rows(measured, rows, os.fspath(out))
    if corruptions:
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
        with atomic_file(resolve_link(out)) as book:
            write_workbook(book, map(str.encode, lines), shares=rows.predictor.shares)
        return scores
    with open_output(out) as file:
        file.write(rows.header)
        return measured(
            write=lambda outputs, samples: file.writelines(rows.lines(outputs, samples))
        )


def robustness_score(predictor: Predictor) -> str:
    """The score that is measured on corrupted images: top-1, or mAP of several classes an image."""
    if predictor.exported:
        raise ConfigError(
            "corruptions: an exported network resizes images itself, and corruptions are of "
            "resized ones; give the run it was exported from"
        )
    name = predictor.task.metric.removeprefix("val_")
    if name not in ROBUSTNESS_SCORES:
        raise ConfigError(
            "corruptions: measures classifiers, and this network is none; leave it out"
        )
    return name


def measure_robustness(
    predictor: Predictor,
    samples: tuple[Sample, ...],
    clean: Mapping[str, Any],
    score: str,
    progress: Callable[[int, int], object],
    *,
    where: str,
    groups: Sequence[str] | None = None,
) -> dict[str, Any]:
    """`score` on the images with each corruption of each severity.

    Returns:
        `score`, its value `clean` and its `mean` over all corruptions; and `corruptions`: name,
        severity, score and its interval of each.
    """
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
                lambda _note: None,
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
            f"out={printable(out)}: rows are written as .jsonl or .csv or .xlsx; give such a name"
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
        top_k: int | None = None,
        *,
        all_scores: bool = False,
        csv: Mapping[str, Any],
        cells: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.predictor, self.names, self.style, self.top_k = predictor, names, style, top_k
        multilabel = predictor.thresholds is not None
        self.truth = ["true_labels"] if multilabel else []
        if not multilabel and any(sample.label != NO_LABEL for sample in samples):
            self.truth = ["label"]
            if predictor.task.activation_name == "softmax":
                self.truth.append("label_score")
        if any(sample.captions for sample in samples):
            self.truth.append("references")
        classes = predictor.classes
        self.scored = {f"{CLASS_SCORE}{name}": n for n, name in enumerate(classes) if all_scores}
        self.truth += self.scored
        most, _ = resolve_top_k(classes, predictor.thresholds, top_k, None)
        layout = Layout(
            min(most, len(classes)),
            classes,
            [sample.path for sample in samples],
            predictor.n_best,
            multilabel,
            self.truth,
            cells=cells,
            **csv,
        )
        self.header, self.format_row = FORMATS[style](layout)
        if style == "csv":
            self.header = byte_order_mark(layout) + self.header

    def lines(self, outputs: Sequence[ImageOutput], samples: Sequence[Sample]) -> Iterator[str]:
        """Rows of a batch of `samples`."""
        predictions = self.predictor.to_predictions(outputs, self.top_k)
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
        if name == "true_labels":
            return tuple(self.names[label] for label in sample.labels)
        if sample.label == NO_LABEL:
            return None
        if name == "label":
            return self.names[sample.label]
        found = output.probabilities
        return None if found is None else float(found[sample.label])


def evaluate_held_out(
    run: PathLike,
    data: PathLike | None = None,
    *,
    device: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate a run folder on the validation images of its training; see `evaluate`."""
    config = stored_config(Path(run))
    spec = DatasetSpec.from_config(config.data, split="val")
    if data is not None:
        spec = dataclasses.replace(spec, data=os.fspath(data))
    if device is None and config.run.device != "auto":
        device = config.run.device
    return evaluate(run, spec, device=device, **settings)


def source_of(model: PathLike | LoadedRun, predictor: Predictor) -> PathLike | LoadedRun | None:
    """What was trained: `model`, or the run that an exported file comes from, if it is here."""
    return source_run(predictor) if predictor.exported else model


def load_samples(
    task: Task,
    model: PathLike | LoadedRun | None,
    spec: DatasetSpec,
    classes: tuple[str, ...],
    notify: Notify,
    unshared_classes: Collection[str] = (),
    *,
    label_settings: Mapping[str, Any] | None = None,
) -> tuple[Sample, ...]:
    """The images of a split for the evaluation of a network of `task` with `classes`.

    If the training of `model` held out images of the same data, only those; all where it is None.
    Of `unshared_classes`, in NFC, none. `label_settings`, fields of `spec`, replace those of the
    training.
    """
    run = run_folder_of(model) if isinstance(model, str | os.PathLike) else None
    spec = evaluated_spec(task, run, spec, classes, notify)
    spec = dataclasses.replace(spec, **(label_settings or {}))
    samples, notes = open_eval_split(
        spec,
        split=str(spec.split),
        classes=task.label_names(spec, classes),
        held_out=None if run is None else read_split(run),
        unshared_classes=unshared_classes,
    )
    for note in notes:
        notify(note)
    task.check_samples(samples, spec.data)
    if run is not None and spec.split == "val" and (seen := count_trained_on(run, samples)):
        notify(
            f"note: {printable(run)} was trained on {seen:,} of these "
            f"{plural(len(samples), 'image')}, so the numbers are too good for new ones; give "
            "images that it has not seen"
        )
    return samples


def count_trained_on(run: Path, samples: Sequence[Sample]) -> int:
    """How many of `samples` the training of `run` learned from, if it held out its own images.

    Its data are read again if images of `samples` are in their folder; 0 if they are gone.
    """
    record = read_split(run)
    if record is None:
        return 0
    held_out = {os.path.realpath(record.root / name) for name in record.val}
    paths = {os.path.realpath(sample.path) for sample in samples}
    inside = os.path.join(os.path.realpath(record.root), "")
    if not any(path.startswith(inside) for path in paths - held_out):
        return 0
    try:
        index = read_source(DatasetSpec.from_config(stored_config(run).data))
    except VitError:
        return 0
    learned = {one.path for one in index.train}
    match = record.find(learned, index.root)
    if record.val and not match.paths:  # other images are there now
        return 0
    return len(paths & {os.path.realpath(path) for path in learned - match.paths})


def evaluated_spec(
    task: Task,
    run: Path | None,
    spec: DatasetSpec,
    classes: tuple[str, ...],
    notify: Notify = lambda _note: None,
) -> DatasetSpec:
    """What `load_samples` reads, with the settings of the training in run folder `run`."""
    spec = with_training_settings(task.eval_spec(spec, classes), run, notify)
    return dataclasses.replace(spec, split=spec.split or "val")


def column_cells(spec: DatasetSpec, columns: Sequence[str]) -> dict[str, dict[str, str]]:
    """The cells of columns of a list, by column and by the path of the image.

    A list is read once; of tables and shards, each column by itself.
    """
    found: dict[str, dict[str, str]] = {}
    if columns and is_list(spec.data):
        index = read_source(dataclasses.replace(spec, columns=tuple(columns)))
        records = [*itertools.chain.from_iterable(index.splits.values())]
        cells = zip(*(record.cells for record in records), strict=True)
        for column, values in zip(columns, cells, strict=True):
            named = zip(records, values, strict=True)
            found[column] = {record.path: value for record, value in named}
    else:
        for column in columns:
            index = read_source(dataclasses.replace(spec, group=column))
            records = [*itertools.chain.from_iterable(index.splits.values())]
            if index.has_groups:
                found[column] = {record.path: record.group for record in records}
    for column in columns:
        if not any(found.get(column, {}).values()):
            raise ConfigError(
                f"slice={printable(column)}: {printable(spec.data)} has no such column, or "
                "nothing in it; name one of a list (.csv, .jsonl, .xlsx) or table"
            )
    return found


def with_training_settings(
    spec: DatasetSpec, run: Path | None, notify: Notify = lambda _note: None
) -> DatasetSpec:
    """`spec` with the dataset settings of the training in run folder `run` where it has none.

    The image folder, whether images may lie outside of it, groups, and lists that people edit are
    for the same data only, also a copy; `notify` is called with a note about those not taken.
    """
    if run is None or not has_stored_config(run):
        return spec
    changed_lists: list[str] = []
    data = stored_config(run, changed_lists.append).data
    split, own = read_split(run), os.path.realpath(spec.data) == os.path.realpath(data.data)
    own = own or (split is not None and split.lies_in(Path(spec.data)))
    stored, files = DatasetSpec.from_config(data), ("exclude", "corrections", "label_list")
    columns: tuple[str, ...] = ("image_column", "label_column", "caption_column")
    usable = columns if own or is_list(spec.data) else ()
    if own:
        for note in changed_lists:
            notify(note)
        lists = [name for name in ("images", *files) if os.path.exists(getattr(stored, name) or "")]
        usable = (*columns, *lists, "allow_outside", "group")
    chosen = {name: getattr(spec, name) or getattr(stored, name) for name in usable}
    found = dataclasses.replace(spec, **chosen)
    named = own or Path(spec.data).name == Path(data.data).name  # lists of other data are of no use
    columns = () if Path(spec.data).is_dir() else columns
    missing = [
        f"{'labels' if name == 'label_list' else name}={printable(value)}"
        for name in ("group", *(files if named else ()), *columns, *(["images"] * own))
        if (value := getattr(stored, name)) is not None and getattr(found, name) is None
    ]
    if missing:
        why = f"{printable(spec.data)} is not its data; if it should be, give it again"
        if own:  # an earlier version did not store where they are
            why = "the files are not found; start in the folder in which it was trained"
        notify(
            f"note: {printable(run)} was trained with {', '.join(missing)} on "
            f"{printable(data.data)}, not applied: {why}"
        )
    return found


def measure(
    predictor: Predictor,
    samples: tuple[Sample, ...],
    notify: Notify,
    progress: Callable[[int, int], object],
    *,
    where: str,
    write: Callable[[Sequence[ImageOutput], Sequence[Sample]], object] | None = None,
    columns: Mapping[str, Mapping[str, str]] | None = None,
    groups: Sequence[str] | None = None,
    brief: bool = False,
) -> dict[str, Any]:
    """Scores of the task's `Evaluation` over the readable images, and `failed`, the others.

    Args:
        columns: Cells of columns by path. If given, also empty, there are `slices` where answers
            are right or wrong.
    """
    evaluation = predictor.task.evaluation(predictor, samples, notify)
    if columns and evaluation.right is None:
        raise ConfigError("slice: accuracy is that of classifiers, and this network is none")
    evaluation.brief = brief
    if groups is not None:  # of the images that the evaluation kept
        named = {sample.path: name for sample, name in zip(samples, groups, strict=True)}
        evaluation.groups = [named[sample.path] for sample in evaluation.samples]
    sliced = columns is not None and evaluation.right is not None
    properties = ImageProperties()
    paths = [sample.path for sample in evaluation.samples]
    failed: list[dict[str, str]] = []
    done = 0
    if not predictor.exported:
        predictor.read.observe = properties.add if sliced else None
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
            f"{printable(where)}: none of {len(failed)} images can be measured; the first is "
            f"{image}: {error}"
        )
    for note in evaluation.notes(scores):
        notify(note)
    if (numbers := evaluation.measured_groups()) is not None:
        scores["groups"] = count_groups(numbers)
    if sliced and evaluation.right is not None:
        classes = None
        if predictor.thresholds is None:
            classes = [predictor.classes[sample.label] for sample in evaluation.samples]
        features = properties.features(paths, classes=classes, columns=columns)
        numbers = None if evaluation.groups is None else number_groups(evaluation.groups)
        found = accuracy_slices(evaluation.right, features, numbers)
        scores["slices"] = [one.to_dict() for one in found]
    return {**scores, "failed": failed}
