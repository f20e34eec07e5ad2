"""Compares later images of a classifier with those of its calibration: `vit drift`.

lines of vit serve --watch, or images -> predictor -> counts in the bins of the reference
    -> find_drift (vit/evaluation/drift_detection.py)
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.calibration_reference import CalibrationReference, load_reference
from vit.errors import ConfigError, DataError
from vit.evaluation.drift_detection import Drift, find_drift
from vit.event_log import read_event_log
from vit.inference.prediction_job import find_images, input_paths
from vit.inference.predictor import PathLike, Predictor
from vit.output.prediction_results import ImageOutput
from vit.text import Notify, Progress, ignore, plural
from vit.weights.saved_model import load_run

LINE_IMAGES = 50
"""Images of a line where images are compared."""
Lines = list[dict[str, Any]]


def drift(
    run: PathLike,
    data: PathLike | Sequence[PathLike],
    *,
    batch_size: int | None = None,
    device: str | None = None,
    precision: str = "auto",
    workers: int | None = None,
    notify: Notify = ignore,
    progress: Progress = ignore,
) -> Drift:
    """Compare later images with those of the calibration of a run.

        result = vit.drift("runs/photos", "field.jsonl")
        print(result.different, result.sentence())

    Args:
        run: The run folder of a classifier of one class an image.
        data: A file of `vit serve --watch` (.jsonl); or images, folders or patterns, which are
            compared in their order, that of time: sorted by class they are a stream that changes.
        batch_size, device, precision, workers: As for Predictor, of images.
        notify: Called with notes.
        progress: Called with the images done and their total after each batch.

    Raises:
        VitError: The run has no reference, or the data have no images.
    """
    loaded = load_run(run)
    others = (loaded.thresholds, loaded.answers, loaded.tokenizer)
    if not loaded.classes or any(one is not None for one in others):
        raise ConfigError(
            f"{run}: only classifiers of one class an image have a reference, and this network's "
            f"task is {loaded.task_name}"
        )
    reference = load_reference(Path(run), loaded.calibration)
    inputs, failed = input_paths(data), list[dict[str, str]]()
    if len(inputs) == 1 and inputs[0].endswith(".jsonl"):
        lines = read_watch_file(Path(inputs[0]), reference, notify)
    else:
        predictor = Predictor(
            loaded,
            batch_size=batch_size,
            device=device,
            precision=precision,
            workers=workers,
            notify=notify,
        )
        predictor.engine.returns_distances = True
        lines, outputs, done = [], list[ImageOutput](), 0
        paths = find_images(inputs, notify=notify)
        for batch in predictor.batches(paths):
            failed += [{"image": one.image, "error": one.error} for one in batch if one.error]
            outputs += [one for one in batch if one.error is None]
            done += len(batch)
            progress(done, len(paths))
            while len(outputs) >= LINE_IMAGES or (outputs and done == len(paths)):
                lines.append({"time": None, **reference.count(outputs[:LINE_IMAGES])})
                del outputs[:LINE_IMAGES]
        if not lines:
            raise DataError(f"{', '.join(inputs)}: no image can be read: {failed[0]['error']}")
    own = reference.counts()
    classes = [*reference.answers]
    return find_drift(
        {name: count_row(counts, classes) for name, counts in own.items()},
        {name: torch.stack([count_row(one[name], classes) for one in lines]) for name in own},
        classes,
        [one["time"] for one in lines],
        run=os.fspath(run),
        failed=failed,
    )


def count_row(counts: Mapping[str, int] | Sequence[int], classes: Sequence[str]) -> Tensor:
    """Counts as numbers, those of answers in the order of the classes."""
    if isinstance(counts, Mapping):
        counts = [counts.get(name, 0) for name in classes]
    return torch.tensor(counts, dtype=torch.float64)


def read_watch_file(path: Path, reference: CalibrationReference, notify: Notify) -> Lines:
    """Lines of the calibration of `reference`; others, and damaged ones, are left out."""
    if not path.is_file():
        raise DataError(f"{path} is no file; `vit serve RUN --watch {path}` writes it")
    log = read_event_log(path, key="time")
    if log.damage:
        notify(f"note: {log.damage}")
    lines = [one for one in log.events if one.get("calibration") == reference.calibration]
    if other := len(log.events) - len(lines):
        notify(f"note: {plural(other, 'line')} of another calibration left out")
    if not lines:
        raise DataError(
            f"{path} has no images yet that the run answered with its calibration; the server "
            "writes them once an hour or more often, and when it stops"
        )
    return lines
