"""Evaluates a saved model on labeled or captioned images, with a Predictor.

So the top-1 of `vit evaluate` is exactly the one counted from the output of `vit predict` on the
same files, and the captions that are scored are those that `vit predict` writes.

The loss of a captioner is measured twice, as in the validation of its training:

    loss           mean cross-entropy of a token of the images' first captions
    loss_shuffled  the same captions, each paired with another image

The two are equal for a decoder that ignores the images.

With `out`, each image has a row in a file: what the data say of it, and the prediction.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vit.config.parser import make_config, read_settings
from vit.data.archives import relative
from vit.data.dataset_types import NO_LABEL, Sample
from vit.data.sources.dataset_spec import DatasetSpec, as_dataset_spec, resolve_folder
from vit.data.sources.list_files import is_list
from vit.data.sources.open_dataset import open_eval_split
from vit.errors import ConfigError, DataError, RunError
from vit.generation.generation_config import Search
from vit.inference.predictor import ImageOutput, PathLike, Predictor
from vit.inference.tta import Views
from vit.output.output_file import atomic_file, open_output, resolve_link
from vit.output.prediction_results import (
    FORMATS,
    Layout,
    Truth,
    check_top_k,
    resolve_top_k,
    write_workbook,
)
from vit.precision import autocast
from vit.tasks.task import Task
from vit.text import printable
from vit.weights.saved_model import LoadedRun

SPLIT_FILE = "split.json"
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
    device: str | None = None,
    batch_size: int | None = None,
    precision: str = "auto",
    workers: int | None = None,
    merge_tokens: int | None = None,
    patch_size: int | None = None,
    keep_aspect: bool = False,
    search: Search | None = None,
    tta: Views | None = None,
    compile: bool = False,  # noqa: A002
    intensity_range: tuple[float, float] | None = None,
    out: PathLike | None = None,
    top_k: int | None = None,
    no_calibration: bool = False,
    notify: Callable[[str], object] = lambda _note: None,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> dict[str, Any]:
    """Evaluate `model` on one split of `data`; the metrics are JSON values, see `measure`.

    Classes are matched by name. If the training held out images of `data`, only those are used.

    Args:
        model: A run folder or any other source of weights with a head, or one that is loaded.
        data: A folder or list of labelled images or captions, a built-in dataset, or a DatasetSpec.
        split: Part of `data`; `val` is the first validation split. A DatasetSpec has its own.
        images, image_column, ..., allow_outside: Of a list, as in DatasetSpec.
        device, batch_size, ..., no_calibration: As for Predictor.
        out: File of a row for each image, .jsonl, .csv or .xlsx; an older file is replaced.
        top_k: Number of predicted classes in a row; 5 by default.
        notify: Called with notes.
        progress: Called with the images done and their total after each batch.

    Raises:
        VitError: The model, the data or a setting cannot be used.
    """
    style = None if out is None else row_style(os.fspath(out))
    check_top_k(top_k)
    spec = as_dataset_spec(
        data,
        {"split": split},
        images=images,
        image_column=image_column,
        label_column=label_column,
        caption_column=caption_column,
        allow_outside=allow_outside,
    )
    predictor = Predictor(
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
    samples = load_samples(predictor.task, model, spec, predictor.classes, notify)
    if out is None or style is None:
        return measure(predictor, samples, notify, progress, where=spec.data)
    names = predictor.task.label_names(spec, predictor.classes)
    rows = EvaluationRows(predictor, samples, names, style, top_k)
    if style == "xlsx":
        lines = [rows.header]
        scores = measure(
            predictor,
            samples,
            notify,
            progress,
            where=spec.data,
            write=lambda outputs, samples: lines.extend(rows.lines(outputs, samples)),
        )
        with atomic_file(resolve_link(os.fspath(out))) as book:
            write_workbook(book, map(str.encode, lines), shares=predictor.shares)
        return scores
    with open_output(os.fspath(out)) as file:
        file.write(rows.header)

        def write(outputs: Sequence[ImageOutput], samples: Sequence[Sample]) -> None:
            file.writelines(rows.lines(outputs, samples))

        return measure(predictor, samples, notify, progress, where=spec.data, write=write)


def row_style(out: str) -> str:
    """The format of rows by the suffix of their file.

    Raises:
        ConfigError: There is no such format.
    """
    style = ROW_STYLES.get(Path(out).suffix.lower())
    if style is None:
        raise ConfigError(
            f"out={printable(out)}: rows are written as .jsonl or .csv or .xlsx; give such a name"
        )
    return style


class EvaluationRows:
    """Makes the rows of an evaluation.

    Args:
        predictor: The network.
        samples: The images.
        names: Class names that their labels are indices into.
        style: A format of vit/output/prediction_results.py.
        top_k: Number of predicted classes in a row; 5 by default.
    """

    def __init__(
        self,
        predictor: Predictor,
        samples: Sequence[Sample],
        names: Sequence[str],
        style: str,
        top_k: int | None = None,
    ) -> None:
        self.predictor, self.names, self.top_k = predictor, names, top_k
        multilabel = predictor.thresholds is not None
        self.truth = ["true_labels"] if multilabel else []
        if not multilabel and any(sample.label != NO_LABEL for sample in samples):
            self.truth = ["label"]
            if predictor.task.activation_name == "softmax":
                self.truth.append("label_score")
        if any(sample.captions for sample in samples):
            self.truth.append("references")
        classes = predictor.classes
        most, _ = resolve_top_k(classes, predictor.thresholds, top_k, None)
        layout = Layout(
            min(most, len(classes)),
            classes,
            [sample.path for sample in samples],
            predictor.n_best,
            multilabel,
            self.truth,
        )
        self.header, self.format_row = FORMATS[style](layout)

    def lines(self, outputs: Sequence[ImageOutput], samples: Sequence[Sample]) -> Iterator[str]:
        """Rows of a batch of `samples`."""
        predictions = self.predictor.to_predictions(outputs, self.top_k)
        for prediction, output, sample in zip(predictions, outputs, samples, strict=True):
            truth = {name: self.truth_of(name, output, sample) for name in self.truth}
            yield self.format_row(dataclasses.replace(prediction, truth=truth))

    def truth_of(self, name: str, output: ImageOutput, sample: Sample) -> Truth:
        """A value of `Prediction.truth`; None if the data or the network has none."""
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


def evaluate_held_out(run: PathLike, *, out: PathLike | None = None) -> dict[str, Any]:
    """Evaluate a run folder on the validation images of its training; see `evaluate`."""
    config = make_config(read_settings(Path(run) / "config.yaml"), complete=True)
    spec = dataclasses.replace(DatasetSpec.from_config(config.data), split="val")
    device = config.run.device
    return evaluate(run, spec, device=None if device == "auto" else device, out=out)


def load_samples(
    task: Task,
    model: PathLike | LoadedRun,
    spec: DatasetSpec,
    classes: tuple[str, ...],
    notify: Callable[[str], object],
) -> tuple[Sample, ...]:
    """The images of a split for the evaluation of a network of `task` with `classes`.

    If the training of `model` held out images of the same data, only those.

    Raises:
        ConfigError: The labels, or a setting of the data, do not suit the network.
    """
    run = None if isinstance(model, LoadedRun) else run_folder_of(model)
    spec = with_training_settings(task.eval_spec(spec, classes), run)

    def held_out(root: Path, known: Collection[str]) -> list[str]:
        return [] if run is None else held_out_images(run, spec.data, root, known)

    samples, notes = open_eval_split(
        spec,
        split=spec.split or "val",
        classes=task.label_names(spec, classes),
        held_out=held_out,
    )
    for note in notes:
        notify(note)
    task.check_samples(samples, spec.data)
    return samples


def with_training_settings(spec: DatasetSpec, run: Path | None) -> DatasetSpec:
    """`spec` with the dataset settings of the training in run folder `run` where it has none.

    The image folder, and whether images may lie outside of it, are taken for the same list only.
    """
    path = None if run is None else run / "config.yaml"
    if path is None or not path.is_file():
        return spec
    data = make_config(read_settings(path), complete=True).data
    own = os.path.realpath(data.data) == os.path.realpath(spec.data)
    if not own and not is_list(spec.data):
        return spec
    return dataclasses.replace(
        spec,
        images=spec.images or (data.images if own else None),
        image_column=spec.image_column or data.image_column,
        label_column=spec.label_column or data.label_column,
        caption_column=spec.caption_column or data.caption_column,
        allow_outside=spec.allow_outside or (own and data.allow_outside),
    )


def held_out_images(
    run: Path, data: str, root: Path | None = None, known: Collection[str] = ()
) -> list[str]:
    """Names of the images that the training of `run` held out from `data` for validation.

    `data` is what it split if the folder is the same, or has all of the names (moved or copied).
    Else the names are made relative to `data`, where only the same files match.

    Args:
        run: The run folder.
        data: As for `evaluate`.
        root: Folder that the names are relative to; that of `data` by default.
        known: Names in it, besides its files.

    Raises:
        RunError: split.json of the run is damaged.
    """
    path = run / SPLIT_FILE
    if not path.is_file():
        return []
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        names, origin = [os.fspath(name) for name in record["val"]], Path(record["root"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{printable(path)} is damaged ({printable(error)}); restore it") from None
    root = resolve_folder(data)[0] if root is None else root
    names_there = set(known)
    if root.resolve() == origin or all(n in names_there or (root / n).is_file() for n in names):
        return names
    # the same files may be named from another folder, such as that of a list
    elsewhere = (relative(str(origin / name), root.resolve()) for name in names)
    return [name for name in elsewhere if not name.startswith("../")]


def run_folder_of(model: PathLike) -> Path:
    """The run folder of a source, which may name its weights file."""
    path = Path(model)
    return path.parent if path.is_file() else path


def measure(
    predictor: Predictor,
    samples: tuple[Sample, ...],
    notify: Callable[[str], object],
    progress: Callable[[int, int], object],
    *,
    where: str,
    write: Callable[[Sequence[ImageOutput], Sequence[Sample]], object] | None = None,
) -> dict[str, Any]:
    """Scores of the task's `Evaluation` over the readable images, and `failed`, the others.

    `write` is called with the outputs of each batch, and its samples.

    Raises:
        DataError: No image can be read, or no caption fits into the decoder.
    """
    evaluation = predictor.task.evaluation(predictor, samples, notify)
    paths = [sample.path for sample in evaluation.samples]
    failed: list[dict[str, str]] = []
    done = 0
    with torch.inference_mode():
        for outputs in predictor.batches(paths):
            with autocast(predictor.precision, predictor.device):
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
    scores = evaluation.scores()
    if not scores:
        image, error = (printable(failed[0][name]) for name in ("image", "error"))
        raise DataError(
            f"{printable(where)}: none of {len(failed)} images can be measured; the first is "
            f"{image}: {error}"
        )
    for note in evaluation.notes(scores):
        notify(note)
    return {**scores, "failed": failed}
