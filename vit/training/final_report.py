"""After the last epoch: what the task adds to the run folder, and report.html; `vit report`.

Only the main process does this, on all validation images, or on `caption_samples` of them for
captions. The run is complete before: an error in the report is logged, and does not fail the run.
"""

import contextlib
import dataclasses
import os
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.config import Config
from vit.config.parser import with_settings
from vit.config.stored_config import stored_config
from vit.data.dataloader import EvaluationLoader
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample, Splits
from vit.data.sources.held_out_split import read_split
from vit.errors import DataError, RunError, VitError
from vit.evaluation.accuracy_slices import ImageProperties
from vit.evaluation.fit_calibration import MIN_DISTANCES
from vit.evaluation.model_summary import forward_flops
from vit.evaluation.run_report import REPORT_FILE, RunFacts
from vit.evaluation.temperature_scaling import MIN_IMAGES
from vit.event_log import METRICS_FILE, read_event_log
from vit.model.feature_distance import DistanceFeatures, FeatureDistance, encode_with_features
from vit.paths import did_you_mean, path_argument
from vit.precision import autocast
from vit.stop_signals import Interrupted, Interruption
from vit.tasks.task import ValidationLogits, get_task
from vit.text import printable
from vit.training.checkpoint.run_folder import lock_folder
from vit.training.data_setup import prepare_data
from vit.training.distributed.devices import inference_precision, make_accelerator
from vit.training.logging.environment import read_environment
from vit.training.logging.metrics_logger import test_result
from vit.training.logging.training_progress import notify
from vit.training.teacher import with_teacher
from vit.training.training_loaders import caption_ids_of, micro_batch_size, num_workers
from vit.training.training_state import TrainingState
from vit.weights.saved_model import LoadedRun, load_run

DISTANCE_IMAGES = 2000
"""Training images, about, that the distance of other images is measured from."""


def distance_samples(splits: Splits) -> Sequence[Sample]:
    """The training images that the distance of other images is measured from.

    Empty if there are too few images to estimate the distances of ordinary ones.
    """
    samples = splits.train[:: max(1, len(splits.train) // DISTANCE_IMAGES)]
    few = len(samples) < MIN_IMAGES or len(splits.val) < MIN_DISTANCES
    return () if few else samples


class BestWeights:
    """The best weights of a finished training; the `vit.tasks.task.FinishedRun` of its task.

    Args:
        best_epoch: From 1.
    """

    def __init__(
        self,
        run: TrainingState,
        folder: Path,
        splits: Splits,
        *,
        best_epoch: int,
        calibrating: bool = False,
        robustness: Mapping[str, Any] | None = None,
    ) -> None:
        self.calibrating, self.robustness = calibrating, robustness
        self.run, self.folder, self.splits, self.best_epoch = run, folder, splits, best_epoch
        self.config, self.device, self.notify = run.config, run.accelerator.device, notify
        self.precision = inference_precision(run.config.run.precision, self.device)

    @cached_property
    def loaded(self) -> LoadedRun:
        """The network, on its device."""
        loaded = load_run(self.folder)
        loaded.model.to(self.device)
        return loaded

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of metrics.jsonl."""
        return read_event_log(self.folder / METRICS_FILE).events

    def facts(self, failed: Mapping[str, str]) -> RunFacts:
        """What every report shows of the run; `failed` could not be read, with the reason."""
        log, task = read_event_log(self.folder / METRICS_FILE), self.run.task
        events = log.events
        soups = [one["epochs"] for one in events if one["event"] == "soup" and one["better"]]
        return RunFacts(
            config=self.config,
            classes=self.splits.classes,
            parameters=sum(parameter.numel() for parameter in self.loaded.model.parameters()),
            machine=f"{self.run.processes} x {self.device.type} in {self.precision}",
            train_images=len(self.splits.train),
            root=self.splits.root,
            val_held_out=self.splits.made,
            best_epoch=self.best_epoch,
            soup=soups[0] if soups else (),
            unreadable={**self.run.failed, **failed},
            flops=forward_flops(self.loaded.model, self.config.model),
            environment=read_environment(self.folder),
            notes=(*self.splits.notes, *filter(None, [log.damage])),
            tested="".join(test_result(task, one) for one in events if one["event"] == "test"),
        )

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Compute in the precision of inference."""
        return autocast(self.precision, self.device)

    def logits(
        self,
        samples: Sequence[Sample],
        failed: dict[str, str],
        *,
        network: LoadedRun | None = None,
    ) -> Generator[tuple[Batch, Tensor], None, None]:
        """Batches of `samples` and their logits, float64 (images, classes); see `batches`."""
        model = (network or self.loaded).model
        with contextlib.closing(self.batches(samples, failed, network=network)) as batches:
            for batch, images in batches:
                with torch.inference_mode(), self.autocast():
                    logits = model(images)
                yield batch, logits.float().cpu().double()

    @cached_property
    def validation_logits(self) -> ValidationLogits:
        """Logits of all validation images, computed once for the task's calibration and report."""
        distance = self._fit_distance()
        failed: dict[str, str] = {}
        samples, logits, labels, paths = self.splits.val, [], [], list[str]()
        distances: list[Tensor] = []  # its two parts
        properties = ImageProperties()
        with contextlib.closing(self.batches(samples, failed)) as batches:
            for batch, images in batches:
                with torch.inference_mode(), self.autocast():
                    if distance is None:
                        outputs = self.loaded.model(images)
                    else:
                        _, _, features = encode_with_features(self.loaded.model, images)
                        outputs = self.loaded.model.head(features.pooled)
                        distances.append(distance.parts(features.float_cpu()))
                logits.append(outputs.float().cpu())
                labels.append(batch.labels)
                names = [samples[index].path for index in batch.indices.tolist()]
                properties.add_pixels(names, batch.images)
                paths += names
        if distance is not None:
            distance.standardise(torch.cat(distances))
        return ValidationLogits(
            torch.cat(logits),
            torch.cat(labels),
            paths,
            failed,
            distance,
            None if distance is None else distance.combine(torch.cat(distances)).double(),
            properties,
            self.run.task.dataset_spec(self.config),
        )

    def _fit_distance(self) -> FeatureDistance | None:
        """The distance from `distance_samples`, without augmentation, if the task has one."""
        samples = distance_samples(self.splits)
        if not (samples and self.calibrating and self.run.task.measures_distance):
            return None
        features = []
        with contextlib.closing(self.batches(samples, {})) as batches:
            for _, images in batches:
                with torch.inference_mode(), self.autocast():
                    found = encode_with_features(self.loaded.model, images)[2]
                features.append(found.float_cpu())
        return FeatureDistance.fit(DistanceFeatures.cat(features))

    def reload(self) -> None:
        """Read the run folder again, which the task has completed."""
        self.__dict__.pop("loaded", None)

    def batches(
        self,
        samples: Sequence[Sample],
        failed: dict[str, str],
        *,
        network: LoadedRun | None = None,
    ) -> Generator[tuple[Batch, Tensor], None, None]:
        """Batches of `samples` with their normalised images, on the device."""
        run, preprocessing = self.run, (network or self.loaded).preprocessing
        loader = EvaluationLoader(
            samples,
            preprocessing,
            batch_size=micro_batch_size(run),
            workers=num_workers(run),
            pin_memory=self.device.type == "cuda",
            caption_ids=caption_ids_of(run, samples),
            classes=run.task.label_width(run.config),
        )
        found = False
        try:
            for batch in loader:
                if run.interruption.number:
                    raise Interrupted(
                        f"interrupted before {REPORT_FILE} was written; the run is complete, and "
                        f"vit train --resume --out {printable(self.folder)} writes it",
                        run.interruption.number,
                    )
                failed.update((bad.path, bad.reason) for bad in batch.failed)
                if len(batch.labels):
                    found = True
                    images = batch.images.to(self.device, non_blocking=True)
                    yield batch, preprocessing.normalise(images)
        finally:
            loader.close()
        if not found:
            raise DataError("not one validation image can be read")


def finish_run(run: TrainingState, folder: Path, splits: Splits, *, epoch: int) -> None:
    """Let the task complete the run folder, and write report.html, or log why it cannot be.

    Args:
        epoch: The best epoch, from 1.
    """
    best = BestWeights(run, folder, splits, best_epoch=epoch, calibrating=True)
    run.task.finish(best)
    best.reload()
    try:
        run.task.write_report(best)
    except Interrupted:
        raise
    except (VitError, OSError, RuntimeError, ValueError, MemoryError) as error:
        notify(f"note: no {REPORT_FILE}, but the run is complete: {printable(error)}")
    except Exception as error:  # a bug in the report does not make the run incomplete
        reason = f"{type(error).__name__}: {printable(error)}"
        notify(f"note: no {REPORT_FILE}, but the run is complete: {reason}")
    else:
        notify(f"report: {printable(folder / REPORT_FILE)}")


def report(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    workers: int | None = None,
    robustness: Mapping[str, Any] | None = None,
) -> Path:
    """Write report.html of a finished run again, and return its path: `vit report`.

    Args:
        run: The run folder.
        data: Where the images of the training are now; where they were by default.
        device: cpu, cuda, cuda:N or mps; that of the training by default.
        workers: Loader processes.
        robustness: That of `vit.evaluate(run, data, corruptions=True)`, which becomes a section.

    Raises:
        VitError: The run has no finished epoch, its data are not there, or have other classes.
    """
    folder = Path(path_argument("run", run, "a run folder"))
    config = finished_config(folder)
    path = None if data is None else path_argument("data", data, "the images of the training")
    chosen = {"report": "full", "data": path, "device": device, "workers": workers}
    config = with_settings(config, **{n: v for n, v in chosen.items() if v is not None})
    accelerator = make_accelerator(config.run)
    log = read_event_log(folder / METRICS_FILE, "epoch")
    if log.damage:
        notify(f"note: {log.damage}; the report has what is left")
    loaded = load_run(folder)
    with lock_folder(folder), Interruption() as signals:
        found, splits, failed = prepare_data(config, (), accelerator, notify, folder)
        if splits.unlabelled:  # their classes are those of the teacher
            splits = with_teacher(found, splits, accelerator, notify, folder)
        task = get_task(config.training.task).with_data(found, splits)
        if tuple(task.output_names(splits)) != tuple(loaded.classes):
            raise DataError(
                f"{printable(config.data.data)} has other classes than the run; vit evaluate "
                "measures it on them, matched by name"
            )
        splits = with_held_out(splits, folder)
        state = TrainingState(
            config=found,
            accelerator=accelerator,
            network=loaded.model,
            model=loaded.model,
            optimizer=torch.optim.SGD(loaded.model.parameters(), lr=0.0),  # makes no step
            average=None,
            preprocessing=loaded.preprocessing,
            lr_at=lambda _step: 0.0,
            task=task,
            tokenizer=splits.tokenizer,
            failed=failed,
            interruption=signals,
        )
        best = max(log.events, key=task.rank)["epoch"]
        task.write_report(
            BestWeights(state, folder, splits, best_epoch=best, robustness=robustness)
        )
    return folder / REPORT_FILE


def finished_config(folder: Path) -> Config:
    """The settings of a run that has finished an epoch."""
    needed = ("config.yaml", METRICS_FILE, "model.safetensors")
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        hint = did_you_mean(folder) if not folder.exists() else ""
        raise RunError(
            f"{printable(folder)} is no run folder with a finished epoch: it has no "
            f"{missing[0]}{hint}"
        )
    log = read_event_log(folder / METRICS_FILE, "epoch")
    if not log.events:
        why = log.damage or "nothing to report"
        raise RunError(f"{printable(folder)} has no finished epoch: {why}")
    return stored_config(folder)


def with_held_out(splits: Splits, folder: Path) -> Splits:
    """`splits` with the validation images that the run in `folder` held out.

    Images that were added to the data since may have changed the split.
    """
    split = read_split(folder) if splits.made else None
    if split is None:
        return splits
    every = (*splits.train, *splits.val)
    match = split.find((one.path for one in every), splits.root)
    if len(match.paths) < match.recorded:
        notify(f"note: {match.describe(len(splits.val))}")
    if not match.known:  # the same seed and names usually make the same split
        return splits
    held = [one for one in every if one.path in match.paths]
    if not held:
        raise DataError(f"none of the images that {printable(folder)} held out is there")
    train = [one for one in splits.train if one.path not in match.paths]
    return dataclasses.replace(splits, train=tuple(train), val=tuple(held))
