"""Calibrates the scores of a saved classifier on labelled images: `vit calibrate`.

DATA -> predictor without calibration -> probabilities -> log -> fit_calibration -> config.json

The logarithm of probabilities is the logits up to a constant per image, which softmax ignores.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.config import SourceConfig
from vit.config.inference_config import InferenceConfig, accepts_settings
from vit.config.settings import TREE_TASKS, split_settings
from vit.data.dataset import MultiHot
from vit.data.dataset_types import NO_LABEL, labels_of
from vit.data.sources.dataset_spec import DatasetSpec, as_dataset_spec
from vit.data.sources.open_dataset import image_groups
from vit.errors import ConfigError, DataError, RunError
from vit.evaluation.classification_metrics import Outcomes, summarize
from vit.evaluation.fit_calibration import (
    FittedCalibration,
    calibration_reference,
    describe_calibration,
    fit_calibration,
)
from vit.evaluation.intervals import number_groups
from vit.evaluation.multilabel_metrics import calibration_scores
from vit.evaluation.temperature_scaling import MIN_IMAGES
from vit.exported.engine import SHARES
from vit.inference.evaluation_data import evaluated_spec, load_samples
from vit.inference.predictor import PathLike, Predictor
from vit.output.output_file import check_folder
from vit.score_calibration import rescale_thresholds
from vit.tasks.task import get_task
from vit.text import Notify, Progress, ignore, nearest
from vit.weights.saved_model import (
    CALIBRATION,
    CALIBRATION_ERROR,
    LoadedRun,
    load_run,
    update_run,
)

CALIBRATION_SCORES = ("top1", "nll", "brier", "ece", "ece_chance", "ece_debiased")


@accepts_settings(SourceConfig, InferenceConfig)
def calibrate(
    run: PathLike,
    data: str | DatasetSpec,
    *,
    split: str = "val",
    target_precision: float | None = None,
    target_class: str | Sequence[str] = (),
    notify: Notify = ignore,
    progress: Progress = ignore,
    **settings: Any,
) -> dict[str, Any]:
    """Calibrate the scores of a run folder on one split of `data`, and store it in the folder.

    Temperature, threshold of `--reject` and prediction sets. The thresholds of the classes of a
    multi-label run then decide as before.

    Args:
        run: The run folder, which is changed.
        data, split: As for `vit.evaluate`; images that were not trained on.
        target_precision: Share of the answers of `--reject` that has to be right; None: the highest
            of 0.99, 0.98, 0.95, 0.9, 0.85 and 0.8 that the images prove; 0.95 of a taxonomy.
        target_class: Classes whose answers have to be so often right each on its own.
        notify: Called with notes and the result.
        progress: Called with the images done and their total after each batch.
        settings: Fields of SourceConfig and of InferenceConfig. With `group`, which names the group
            of an image, such as a patient, threshold and sets hold for images of a new group.

    Returns:
        `calibration` and `calibration_error`, as config.json has them; scores of held-out images
        `before` and `after`; and `failed`, unreadable images with the reason.

    Raises:
        VitError: The run or the data cannot be used, the run cannot be written, there are fewer
            than 50 labelled images, or they do not prove `target_precision`.
    """
    source, inference = split_settings(settings, "a calibration", SourceConfig, InferenceConfig)
    if target_precision is not None and not 0 < target_precision < 1:
        raise ConfigError(f"target_precision={target_precision:g}: a share above 0 and below 1")
    if not Path(run).is_dir():
        raise RunError(f"{run} is no run folder: calibrations are stored in one")
    check_folder(os.fspath(run), overwrite=True, content="calibration")
    loaded = load_run(run)
    task = get_task(loaded.task_name)
    scored = task.activation_name in SHARES
    if loaded.tokenizer is not None or not (loaded.classes and scored):
        raise ConfigError(
            f"{run}: only scores of classifiers are calibrated, and this network's task "
            f"is {loaded.task_name}"
        )
    for name in ("merge_tokens", "patch_size"):
        if getattr(inference, name) not in (None, getattr(loaded.config, name)):
            inference.refuse(name, "the run keeps a calibration of its own network; leave it out")
    if inference.keep_aspect and not loaded.preprocessing.native:
        inference.refuse("keep_aspect", "the run keeps a calibration of square crops; leave it out")
    chosen = {} if target_precision is None else {"target_precision": target_precision}
    places = _target_places(
        [target_class] if isinstance(target_class, str) else target_class, loaded
    )
    plain = dataclasses.replace(loaded.without_calibration(), distance=loaded.distance)
    predictor = Predictor(plain, **vars(inference), notify=notify)
    if loaded.distance is None and loaded.thresholds is None:
        notify(
            "note: this run has no distances from its training images, which only a training "
            "measures: --reject depends on scores alone"
        )
    predictor.engine.returns_distances = True
    spec = as_dataset_spec(data, {"split": split}, source=source)
    samples = load_samples(predictor.task, run, spec, predictor.classes, notify)
    full_spec = evaluated_spec(predictor.task, run, spec, predictor.classes)
    group_names = image_groups(full_spec, [sample.path for sample in samples])
    rows, targets, failed = [], [], []
    distances: list[float] = []
    done = 0
    groups: list[str] = []
    for outputs in predictor.batches([sample.path for sample in samples]):
        for place, output in enumerate(outputs, done):
            sample = samples[place]
            if output.error is not None:
                failed.append({"image": output.image, "error": output.error})
            elif loaded.thresholds is not None or sample.label != NO_LABEL:
                rows.append(torch.as_tensor(output.probabilities))
                distances += [] if output.distance is None else [output.distance]
                targets.append(sample)
                groups += [] if group_names is None else [group_names[place]]
        done += len(outputs)
        progress(done, len(samples))
    if len(rows) < MIN_IMAGES:
        raise DataError(
            f"{spec.data}: {len(rows)} labelled images can be read, and a calibration "
            f"needs {MIN_IMAGES}; give more"
        )
    probabilities = torch.stack(rows)
    if loaded.thresholds is None:
        logits = probabilities.clamp(min=torch.finfo(torch.float64).tiny).log()
        truth = torch.tensor([sample.label for sample in targets])
    else:
        logits = probabilities.logit(eps=2**-53)
        names = MultiHot(map(labels_of, targets), len(loaded.classes))
        truth = names[torch.arange(len(targets))]
    measured = torch.tensor(distances, dtype=torch.float64) if distances else None
    numbers = number_groups(groups) if groups else None
    fitted = fit_calibration(
        logits,
        truth,
        distances=measured,
        target_classes=places,
        thresholds=plain.thresholds,
        groups=numbers,
        **(task.calibration_settings(loaded.classes) | chosen),
    )
    if fitted is None:
        raise ConfigError(f"{run}: a network of one class has nothing to calibrate")
    if target_precision is not None and not fitted.calibration.rejects:
        why = describe_calibration(fitted)[1].removeprefix("note: ")
        raise DataError(f"{run} keeps its calibration: {why}")
    changes: dict[str, Any] = {
        CALIBRATION: fitted.calibration.to_dict(),
        CALIBRATION_ERROR: fitted.error,
    }
    if loaded.thresholds is not None:
        before = loaded.calibration.temperature if loaded.calibration else 1.0
        factor = before / fitted.calibration.temperature
        changes["thresholds"] = list(rescale_thresholds(loaded.thresholds, factor))
    kept = (logits, measured, loaded.classes, fitted.calibration, numbers)
    reference = calibration_reference(*kept)
    if reference is not None:
        reference.write(Path(run))
    update_run(run, changes)
    for line in describe_calibration(fitted):
        notify(line)
    return {
        **json.loads(json.dumps(changes)),
        **_scores(logits, truth, fitted, loaded.classes),
        "failed": failed,
    }


def _target_places(names: Sequence[str], loaded: LoadedRun) -> dict[str, int]:
    if names and loaded.thresholds is not None:
        raise ConfigError(
            "target_class: an answer of this multi-label network is a list of classes, which is "
            "right as a whole; leave it out"
        )
    if names and loaded.task_name in TREE_TASKS:
        raise ConfigError("target_class: answers of a taxonomy are nodes of a tree; leave it out")
    for name in names:
        if name not in loaded.classes:
            hint = nearest(name, loaded.classes)
            raise ConfigError(f"target_class={name}: the run has no such class{hint}")
    return {name: loaded.classes.index(name) for name in names}


def _scores(
    logits: Tensor, truth: Tensor, fitted: FittedCalibration, classes: tuple[str, ...]
) -> dict[str, Any]:
    """Calibration measures of raw scores, and of each image at a temperature without it."""
    scaled = {"before": logits, "after": fitted.temperature.held_out}
    found = {}
    for name, values in scaled.items():
        if truth.ndim == 2:
            found[name] = calibration_scores(values.sigmoid(), truth)
        else:
            scores = summarize(Outcomes.of(values.softmax(dim=1), truth), classes)
            found[name] = {key: scores[key] for key in CALIBRATION_SCORES}
    return found
