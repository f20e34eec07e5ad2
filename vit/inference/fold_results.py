"""Results of a cross-validation: out-of-fold predictions, and the mean of the folds' weights.

    fold-1/rows.jsonl, fold-2/rows.jsonl, ...    each image by the network that has not seen it
    rows.jsonl           all of them, one row an image, with the number of the fold
    label_errors.csv     suspected labels, the least probable first (confident_learning)

    soup = 1/K sum_k weights of fold k                  all began with the same pretrained weights
    kept if loss(soup) <= 1/K sum_k loss(fold k)        on the images of all folds

Networks that were fine-tuned from the same weights usually lie in one basin of the loss, where
their mean is better than they are on average. No image is left to measure that: its scores are
those of the folds, the condition above finds only folds that ended far from each other, and its
temperature is fitted to logits of images that the folds have not seen. Nothing is proven of its own
answers, so it has no threshold and no sets.

Source: Wortsman et al., "Model soups", arXiv:2203.05482.
"""

import dataclasses
import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vit.atomic_files import atomic_folder, open_atomic, write_text
from vit.config.collect_settings import LABEL_ERRORS_FILE, ROWS_FILE, SOUP_FOLDER
from vit.config.setting_layers import write_settings
from vit.config.stored_config import stored_config, write_paths
from vit.data.dataset_types import NO_LABEL, Sample
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import image_groups
from vit.data.sources.scene_groups import read_groups
from vit.data.sources.split_file import SPLIT_FILE, read_split
from vit.errors import DataError, VitError, WeightsError
from vit.evaluation.confident_learning import (
    find_suspect_rows,
    read_labeled_rows,
    weak_predictions,
)
from vit.evaluation.intervals import number_groups
from vit.evaluation.temperature_scaling import fit_temperature, mean_loss
from vit.inference.evaluate import evaluate_held_out
from vit.inference.evaluation_data import load_samples
from vit.inference.predictor import Predictor
from vit.output.prediction_results import to_json, write_review_list
from vit.score_calibration import ScoreCalibration
from vit.tasks.task import get_task
from vit.text import Notify, ignore, plural, printable, quoted
from vit.weights.model_soup import average_weights, delete_fold_soup, is_fold_soup
from vit.weights.saved_model import (
    WEIGHTS_FILE,
    LoadedRun,
    load_run,
    serialize_model,
    store_calibration,
)

MAX_IMAGES = 2000
"""Images that the networks are compared on, evenly spread."""
SHARED = ("classes", "config", "preprocessing")
"""Fields of LoadedRun that all folds have in common, beside the weights that they began with."""


class HeldOut(NamedTuple):
    """Images of all folds."""

    samples: list[Sample]
    folds: Tensor
    """Place of the fold that holds out each image, (images,)."""
    groups: list[str] | None
    """Names of their groups, if they have some."""


def save_fold_soup(folder: Path, folds: int, notify: Notify) -> None:
    """Average the folds of a cross-validation of pretrained weights into `folder`/soup.

    A training from scratch, or with several classes an image, has none. One that is newer than the
    folds stays as it is. Errors become a note, for the folds are complete without it.
    """
    out = folder / SOUP_FOLDER
    runs = [folder / f"fold-{fold}" for fold in range(1, folds + 1)]
    config = stored_config(runs[-1])
    if config.finetune.weights is None or not config.training.single_label:
        return
    ready = f"network of all folds, the mean of their weights: {printable(out)}"
    try:
        if not is_newer(out, runs):
            first = load_run(runs[0])
            if first.thresholds is not None:
                return
            notify("averaging the folds into one network, and comparing it with them")
            soup, scaling = average_folds(runs, config.run.device)
            write_soup(out, runs[0], soup, scaling)
        notify(f"{ready}; each fold learned from {folds - 1}/{folds} of the images")
    except VitError as error:
        notify(f"note: no network of all folds: {error}")


def is_newer(out: Path, runs: Sequence[Path]) -> bool:
    """Whether `out` is the soup of `runs` as they are now."""
    if out.exists() and not is_fold_soup(out) and any(out.iterdir()):
        raise WeightsError(f"{out} has other files; move them away, and --resume")
    weights = out / WEIGHTS_FILE
    trained = max((run / WEIGHTS_FILE).stat().st_mtime_ns for run in runs)
    return weights.is_file() and weights.stat().st_mtime_ns >= trained


def average_folds(runs: Sequence[Path], device: str) -> tuple[LoadedRun, ScoreCalibration | None]:
    """The mean of the networks of `runs`, and its calibration if the images are enough."""
    soup = load_run(runs[0]).without_calibration()
    if soup.answers is not None:
        raise WeightsError("folds of numbers differ in their scale; train once without --folds")
    source = stored_config(runs[0]).finetune.weights
    images = read_held_out(runs, soup)
    each: list[Tensor] = []

    def weights() -> Iterator[dict[str, Tensor]]:
        for run in runs:
            one = load_run(run).without_calibration()
            same = [getattr(one, name) == getattr(soup, name) for name in SHARED]
            if not all(same) or stored_config(run).finetune.weights != source:
                raise WeightsError(
                    f"{run} differs from {runs[0]} in classes, network, "
                    "preprocessing or first weights"
                )
            each.append(raw_logits(one, images.samples, device))
            yield one.model.state_dict()

    soup.model.load_state_dict(average_weights(weights()))
    logits = raw_logits(soup, images.samples, device)
    readable = logits.isfinite().all(dim=1)
    if not readable.any():
        raise DataError("not one of their images can be read")
    labels = torch.tensor([sample.label for sample in images.samples])[readable]
    loss = mean_loss(logits[readable], labels)
    usual = statistics.fmean(mean_loss(one[readable], labels) for one in each)
    if not loss <= usual:
        raise WeightsError(
            f"the mean of their weights is worse than they are (loss {loss:.3f} and {usual:.3f} on "
            "images of all folds); shorter or gentler trainings stay closer to each other, or "
            "train once without --folds"
        )
    groups = None
    if images.groups is not None:
        kept = readable.tolist()
        groups = number_groups([one for one, ok in zip(images.groups, kept, strict=True) if ok])
    unseen = torch.stack(each)[images.folds, torch.arange(len(images.samples))][readable]
    fitted = fit_temperature(unseen, labels, groups)
    if fitted is None:
        return soup, None
    temperature, exponent = fitted.scaling
    return soup, ScoreCalibration(temperature=temperature, exponent=exponent, images=len(labels))


def write_soup(out: Path, run: Path, soup: LoadedRun, scaling: ScoreCalibration | None) -> None:
    """Write a run folder of `soup` to `out`, as a whole; without what only a training has."""
    config = stored_config(run)
    whole = dataclasses.replace(config, data=dataclasses.replace(config.data, fold=None))
    header = "Settings of a cross-validation.\nRepeat it: vit train --config THIS"
    record = json.loads((run / SPLIT_FILE).read_text("utf-8"))
    record |= {"fold": None, "val": [], "val_digests": []}
    delete_fold_soup(out.parent)
    with atomic_folder(out) as beside:
        if out.exists():  # with files of somebody else, such as an exported one
            shutil.copytree(out, beside, dirs_exist_ok=True)
        write_settings(beside / "config.yaml", whole, header)
        write_paths(beside, whole)
        write_text(beside / SPLIT_FILE, json.dumps(record, indent=1) + "\n")
        serialize_model(
            soup.model.state_dict(),
            config=config,
            classes=soup.classes,
            preprocessing=soup.preprocessing,
            terms=config.finetune.license,
        ).write(beside)
        if scaling is not None:
            store_calibration(beside, scaling)


def read_held_out(runs: Sequence[Path], loaded: LoadedRun) -> HeldOut:
    """At most MAX_IMAGES labelled images, each held out by one of `runs`."""
    spec = DatasetSpec.from_config(stored_config(runs[0]).data, split="val")
    task = get_task(loaded.task_name)
    pairs: list[tuple[Sample, int]] = []
    for place, run in enumerate(runs):
        record = read_split(run)
        samples = load_samples(task, run, spec, loaded.classes, ignore)
        if record is None or len(samples) > len(record.val):  # all images, if none of them is there
            raise DataError(f"the images that {run} held out are not there")
        pairs += [(sample, place) for sample in samples if sample.label != NO_LABEL]
    pairs = pairs[:: max(-(-len(pairs) // MAX_IMAGES), 1)]
    spec = dataclasses.replace(spec, groups=read_groups(runs[0]))
    groups = image_groups(spec, [sample.path for sample, _ in pairs])
    folds = torch.tensor([place for _, place in pairs])
    return HeldOut([sample for sample, _ in pairs], folds, groups)


def raw_logits(run: LoadedRun, samples: Sequence[Sample], device: str) -> Tensor:
    """Logarithms of the raw scores, (images, classes) float64; NaN of unreadable images."""
    predictor = Predictor(
        run,
        precision="fp32",
        device=None if device == "auto" else device,
        notify=ignore,
    )
    missing = torch.full((len(run.classes),), torch.nan, dtype=torch.float64)
    rows = [
        missing if output.probabilities is None else torch.as_tensor(output.probabilities)
        for outputs in predictor.batches([sample.path for sample in samples])
        for output in outputs
    ]
    return torch.stack(rows).clamp(min=torch.finfo(torch.float64).tiny).log()


COLUMNS = ("image", "label", "label_score", "likely", "likely_score", "margin")


def evaluate_fold(run: Path) -> dict[str, Any]:
    """Evaluate the run of a fold on its held-out images, and write their rows.

    With several labels an image the rows have the score of every class: predictions end at the
    thresholds, which differ between folds.
    """
    several = stored_config(run).training.multilabel
    return evaluate_held_out(run, out=run / ROWS_FILE, all_scores=several)


def join_folds(folder: Path, folds: int, data: str, labels: str | None = None) -> list[str]:
    """Write rows.jsonl and, with one class an image, label_errors.csv; return lines for the
    user."""
    single = True
    with open_atomic(folder / ROWS_FILE, "w", encoding="utf-8", newline="") as out:
        for fold in range(1, folds + 1):
            rows = folder / f"fold-{fold}" / ROWS_FILE
            if not rows.is_file():  # it was killed between its training and its rows
                evaluate_fold(rows.parent)
            with open(rows, encoding="utf-8") as file:
                for line in file:
                    record = json.loads(line)
                    single = single and ("error" in record or "label_score" in record)
                    out.write(to_json({**record, "fold": fold}) + "\n")
    path, errors = folder / ROWS_FILE, folder / LABEL_ERRORS_FILE
    lines = [f"out-of-fold predictions: {printable(path)}"]
    if not single:
        return lines
    found = read_labeled_rows(path)
    suspects = find_suspect_rows(found)
    listed_errors = [
        (
            *(one.row.image, one.row.label, repr(one.row.label_score)),
            *(one.likely, repr(one.likely_score), repr(one.margin)),
        )
        for one in suspects
    ]
    write_review_list(str(errors), COLUMNS, listed_errors)
    listed = "" if labels is None else f" --labels {quoted(labels)}"
    weak = weak_predictions(found)
    return [
        *lines,
        f"label errors: {len(suspects):,} of {plural(len(found), 'image')} are suspected, the most "
        f"certain first in {printable(errors)}; as images: vit check {quoted(data)}"
        f"{listed} --rows {quoted(path)} --html FILE",
        *([] if weak is None else [f"note: {weak}"]),
    ]
