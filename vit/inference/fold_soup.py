"""A network to deploy from the folds of a cross-validation: the mean of their weights.

    soup = 1/K sum_k weights of fold k                  all began with the same pretrained weights
    kept if loss(soup) <= 1/K sum_k loss(fold k)        on the images of all folds

Networks that were fine-tuned from the same weights lie in one basin of the loss, where their mean
is better than they are on average, and has learned from all images. No image is left to measure it:
its scores are those of the folds, and its temperature is fitted to their logits of images that they
have not seen. Nothing is proven of its own answers, so it has no threshold and no sets.

Source: Wortsman et al., "Model soups", arXiv:2203.05482.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vit.config.merge_settings import SOUP_FOLDER
from vit.config.parser import write_settings
from vit.config.stored_config import stored_config
from vit.data.dataset_types import NO_LABEL, Sample
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.held_out_split import SPLIT_FILE
from vit.data.sources.open_dataset import image_groups
from vit.evaluation.image_groups import number_groups
from vit.evaluation.temperature_scaling import fit_temperature, mean_loss
from vit.inference.evaluate import load_samples
from vit.inference.predictor import Predictor
from vit.score_calibration import ScoreCalibration
from vit.tasks.task import get_task
from vit.text import printable
from vit.weights.model_soup import average_weights
from vit.weights.safetensors_io import atomic_write, write_text
from vit.weights.saved_model import (
    WEIGHTS_FILE,
    LoadedRun,
    load_run,
    serialize_model,
    store_calibration,
)

MAX_IMAGES = 2000
"""Images that the networks are compared on, evenly spread."""


class HeldOut(NamedTuple):
    """The images of all folds."""

    samples: list[Sample]
    folds: Tensor
    """Place of the fold that holds out each image, (images,)."""
    groups: Tensor | None

    @property
    def labels(self) -> Tensor:
        """(images,)"""
        return torch.tensor([sample.label for sample in self.samples])


def save_fold_soup(folder: Path, folds: int) -> list[str]:
    """Average the folds of a cross-validation of pretrained weights into `folder`/soup.

    Args:
        folder: Folder of the finished runs fold-1, fold-2, ...
        folds: Their number.

    Returns:
        Lines for the user; none of a training from scratch, or with several classes an image.

    Raises:
        VitError: A run cannot be read, or the soup cannot be written.
    """
    out = folder / SOUP_FOLDER
    (out / WEIGHTS_FILE).unlink(missing_ok=True)  # of earlier folds
    runs = [folder / f"fold-{fold}" for fold in range(1, folds + 1)]
    config, soup = stored_config(runs[0]), load_run(runs[0]).without_calibration()
    one_class = soup.classes and soup.thresholds is None and soup.tokenizer is None
    if config.finetune.weights is None or not one_class:
        return []
    images = read_held_out(runs, soup)
    each: list[Tensor] = []

    def weights() -> Iterator[dict[str, Tensor]]:
        for run in runs:
            one = load_run(run).without_calibration()
            each.append(raw_logits(one, images.samples, config.run.device))
            yield one.model.state_dict()

    soup.model.load_state_dict(average_weights(weights()))
    after = raw_logits(soup, images.samples, config.run.device)
    readable = after.isfinite().all(dim=1)
    labels = images.labels[readable]
    loss = mean_loss(after[readable], labels)
    usual = statistics.fmean(mean_loss(one[readable], labels) for one in each)
    if not loss <= usual:
        return [
            "note: no network of all folds: the mean of their weights is worse than they are "
            f"(loss {loss:.3f} and {usual:.3f} on images of all folds); shorter or gentler "
            "trainings stay closer to each other, or train once without --folds"
        ]
    out.mkdir(exist_ok=True)
    whole = dataclasses.replace(config, data=dataclasses.replace(config.data, fold=None))
    header = "Settings of a cross-validation.\nRepeat it: vit train --config THIS"
    atomic_write(out / "config.yaml", lambda beside: write_settings(beside, whole, header))
    record = {**json.loads((runs[0] / SPLIT_FILE).read_text("utf-8")), "fold": None, "val": []}
    write_text(out / SPLIT_FILE, json.dumps(record, indent=1) + "\n")
    serialize_model(
        soup.model.state_dict(),
        config=config,
        classes=soup.classes,
        preprocessing=soup.preprocessing,
        terms=config.finetune.license,
    ).write(out)
    groups = None if images.groups is None else images.groups[readable]
    own = torch.stack(each)[images.folds, torch.arange(len(images.samples))]
    fitted = fit_temperature(own[readable], labels, groups)
    if fitted is not None:
        temperature, exponent = fitted.scaling
        calibration = ScoreCalibration(
            temperature=temperature, images=len(labels), exponent=exponent
        )
        store_calibration(out, calibration)
    return [
        f"network of all folds (the mean of their weights): {printable(out)}; the scores above are "
        f"those of its parts, which learned from {folds - 1} of {folds} images"
    ]


def read_held_out(runs: Sequence[Path], loaded: LoadedRun) -> HeldOut:
    """At most MAX_IMAGES labelled images, each held out by one of `runs`.

    Args:
        runs: The folds.
        loaded: The first of them.
    """
    spec = dataclasses.replace(DatasetSpec.from_config(stored_config(runs[0]).data), split="val")
    task = get_task(loaded.task_name)
    pairs = [
        (sample, place)
        for place, run in enumerate(runs)
        for sample in load_samples(task, run, spec, loaded.classes, lambda _note: None)
        if sample.label != NO_LABEL
    ]
    pairs = pairs[:: max(-(-len(pairs) // MAX_IMAGES), 1)]
    samples = [sample for sample, _ in pairs]
    names = image_groups(spec, [sample.path for sample in samples])
    groups = None if names is None else number_groups(names)
    return HeldOut(samples, torch.tensor([place for _, place in pairs]), groups)


def raw_logits(run: LoadedRun, samples: Sequence[Sample], device: str) -> Tensor:
    """Logarithms of the raw scores, (images, classes) float64; NaN of unreadable images."""
    predictor = Predictor(run, precision="fp32", device=None if device == "auto" else device)
    missing = torch.full((len(run.classes),), torch.nan, dtype=torch.float64)
    rows = [
        missing if output.probabilities is None else output.probabilities.double()
        for outputs in predictor.batches([sample.path for sample in samples])
        for output in outputs
    ]
    return torch.stack(rows).clamp(min=torch.finfo(torch.float64).tiny).log()
