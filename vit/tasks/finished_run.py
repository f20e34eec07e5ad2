"""A training whose last epoch is over, as its task completes and reports it."""

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vit.config import Config
from vit.data.contact_sheet import overlay
from vit.data.dataset import Batch
from vit.data.dataset_types import Sample, Splits
from vit.data.image_tiles import TiledImage
from vit.data.preprocessing import Preprocessing
from vit.data.sources.dataset_spec import DatasetSpec
from vit.data.sources.open_dataset import image_groups, image_sources
from vit.errors import BadImage, DataError, VitError
from vit.evaluation.accuracy_slices import ImageProperties, accuracy_slices
from vit.evaluation.html_page import THUMBNAIL, Thumbnail, encode_thumbnail
from vit.evaluation.intervals import number_groups
from vit.evaluation.new_sources import NewSources, measure_new_sources
from vit.evaluation.run_report import REPORT_FILE, RunFacts
from vit.evaluation.temperature_scaling import FittedTemperature, fit_temperature
from vit.event_log import METRICS_FILE, read_event_log
from vit.model.feature_distance import (
    DistanceFeatures,
    FeatureDistance,
    encode_with_features,
    features_of_sizes,
)
from vit.model.sequence_packing import cut_images
from vit.model.tiled_classifier import TiledClassifier
from vit.precision import Precision, autocast
from vit.stop_signals import Interrupted, Interruption
from vit.tasks.task import Task
from vit.text import Notify, printable
from vit.weights.saved_model import LoadedRun, load_run

if TYPE_CHECKING:  # prediction needs none of it
    from vit.data.dataloader import EvaluationLoader

MAX_HEADERS = 10_000
"""Images up to which the report opens files for their size and format."""


@dataclass(frozen=True)
class ValidationLogits:
    """Outputs of the best weights for the validation images that can be read."""

    logits: Tensor
    """(images, outputs), float32."""
    labels: Tensor
    """As `Batch.labels`."""
    paths: list[str]
    failed: dict[str, str]
    """Files that cannot be read, with the reason."""
    distance: "FeatureDistance | None" = None
    """The distance from the training images, for a single-label classifier."""
    distances: Tensor | None = None
    """Distance of each image, (images,), float64."""
    properties: ImageProperties | None = None
    data: DatasetSpec | None = None
    """What they were read from, by which their groups are found."""

    @cached_property
    def groups(self) -> Tensor | None:
        """The group of each image, for the report; None of independent images."""
        names = None if self.data is None else image_groups(self.data, self.paths)
        return None if names is None else number_groups(names)

    def calibration_groups(self, notify: Notify) -> Tensor | None:
        """`groups`; if they cannot be read again all images are one, which proves nothing."""
        try:
            return self.groups
        except VitError as error:
            notify(
                "note: the groups of the validation images cannot be read again, so all images are "
                f"one group, which proves nothing: {printable(error)}"
            )
            return torch.zeros(len(self.paths), dtype=torch.int64)

    @cached_property
    def temperature(self) -> FittedTemperature | None:
        """The scaling of these logits, for the calibration and for the report."""
        groups = self.calibration_groups(lambda _note: None)
        return fit_temperature(self.logits, self.labels, groups)

    def slices(
        self,
        right: Sequence[bool],
        *,
        classes: Sequence[str] | None = None,
        training_counts: Mapping[str, int] | None = None,
        fast: bool = False,
    ) -> list[dict[str, Any]]:
        """Rows of accuracy by slices, for the report; a multi-label network has no `classes`."""
        if self.properties is None:
            return []
        if len(self.paths) <= MAX_HEADERS and not fast:
            self.properties.add_headers(self.paths)
        features = self.properties.features(
            self.paths, classes=classes, training_counts=training_counts
        )
        return [one.to_dict() for one in accuracy_slices(right, features, self.groups)]


@dataclass
class FinishedRun:
    """A training whose last epoch is over, with its best weights, on the main process."""

    _: KW_ONLY
    config: Config
    task: Task
    folder: Path
    splits: Splits
    best_epoch: int
    device: torch.device
    precision: Precision
    processes: int
    open_loader: Callable[[Sequence[Sample], Preprocessing], "EvaluationLoader"]
    interruption: Interruption
    notify: Notify
    failed: Mapping[str, str]
    environment: Sequence[dict[str, Any]]
    distance_samples: Sequence[Sample] = ()
    robustness: Mapping[str, Any] | None = None

    @cached_property
    def loaded(self) -> LoadedRun:
        """The network, on its device."""
        loaded = load_run(self.folder)
        loaded.model.to(self.device)
        return loaded

    def facts(self, failed: Mapping[str, str]) -> RunFacts:
        """What every report shows of the run; `failed` could not be read, with the reason."""
        from vit.evaluation.model_summary import forward_flops

        log, processes = read_event_log(self.folder / METRICS_FILE), self.processes
        events = log.events
        soups = [one["epochs"] for one in events if one["event"] == "soup" and one["better"]]
        return RunFacts(
            folder=self.folder,
            epochs=[one for one in events if one["event"] == "epoch"],
            robustness=self.robustness,
            config=self.config,
            classes=self.splits.classes,
            parameters=sum(parameter.numel() for parameter in self.loaded.model.parameters()),
            machine=f"{processes} x {self.device.type} in {self.precision}",
            train_images=len(self.splits.train),
            root=self.splits.root,
            val_held_out=self.splits.made,
            best_epoch=self.best_epoch,
            soup=soups[0] if soups else (),
            unreadable={**self.failed, **failed},
            flops=forward_flops(self.loaded.model, self.config.model),
            environment=self.environment,
            notes=(*self.splits.notes, *filter(None, [log.damage])),
            tile_map=self.tile_map if self.config.data.tiles else None,
            new_source=self.new_sources and self.new_sources.scores(),
            tested="".join(self.task.format_test(one) for one in events if one["event"] == "test"),
        )

    @torch.inference_mode()
    def tile_map(self, path: str, label: int) -> Thumbnail | None:
        """A large image under the map of its tiles for a class; None if unreadable."""
        loaded, numbers, features = self.loaded, list[int](), []
        model = loaded.model
        assert isinstance(model, TiledClassifier)
        try:
            image = loaded.preprocessing.read(path)
            assert isinstance(image, TiledImage)
            for some, tiles in loaded.preprocessing.tile_chunks(image):
                numbers += some
                normalised = loaded.preprocessing.normalise(tiles.to(self.device))
                features.append(model.features(normalised))
            shown = image.thumbnail(THUMBNAIL)
        except BadImage:
            return None
        exclusive, weights = loaded.thresholds is None, torch.zeros(math.prod(image.shape))
        found = model.relevance(torch.cat(features), [label], exclusive=exclusive)
        weights[numbers] = found[0].cpu()
        return encode_thumbnail(overlay(shown, weights.view(image.shape)))

    def autocast(self) -> contextlib.AbstractContextManager[object]:
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
                    logits = model(images, batch.sizes)
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
                        outputs = self.loaded.model(images, batch.sizes)
                    else:
                        features = self._features(images, batch)
                        outputs = self.loaded.model.head(features.pooled)
                        distances.append(distance.parts(features.float_cpu()))
                logits.append(outputs.float().cpu())
                labels.append(batch.labels)
                names = [samples[index].path for index in batch.indices.tolist()]
                display = self.loaded.preprocessing.to_display
                if batch.sizes is not None:
                    cut = cut_images(batch.images, batch.sizes)
                    for name, image in zip(names, cut, strict=True):
                        properties.add_pixels([name], display(image)[None])
                elif not isinstance(self.loaded.model, TiledClassifier):
                    properties.add_pixels(names, display(batch.images))
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
            replace(self.task.dataset_spec(self.config), groups=self.splits.groups),
        )

    @cached_property
    def new_sources(self) -> NewSources | None:
        """The accuracy of a single-label network on new sources; None if it is not measured, or its
        images cannot be read again."""
        if self.task.metric != "val_top1":
            return None
        with contextlib.suppress(VitError):
            found = self.validation_logits
            sources = None if found.data is None else image_sources(found.data, found.paths)
            if sources is not None:
                right = (found.logits.argmax(dim=1) == found.labels).tolist()
                return measure_new_sources(right, sources.names, sources.new)
        return None

    def _fit_distance(self) -> FeatureDistance | None:
        """The distance from `distance_samples`, without augmentation, if there are some."""
        if not self.distance_samples:
            return None
        features = []
        with contextlib.closing(self.batches(self.distance_samples, {})) as batches:
            for batch, images in batches:
                with torch.inference_mode(), self.autocast():
                    found = self._features(images, batch)
                features.append(found.float_cpu())
        return FeatureDistance.fit(DistanceFeatures.cat(features))

    def _features(self, images: Tensor, batch: Batch) -> DistanceFeatures:
        """What the distance of normalised `images` is measured on."""
        if batch.sizes is None:
            return encode_with_features(self.loaded.model, images)[2]
        return features_of_sizes(self.loaded.model, cut_images(images, batch.sizes))

    def batches(
        self,
        samples: Sequence[Sample],
        failed: dict[str, str],
        *,
        network: LoadedRun | None = None,
    ) -> Generator[tuple[Batch, Tensor], None, None]:
        """Batches of `samples` with normalised images, or features of tiles, on the device."""
        loaded = network or self.loaded
        normalise: Callable[[Tensor], Tensor] = loaded.preprocessing.normalise
        if isinstance(loaded.model, TiledClassifier):
            normalise = partial(loaded.model.encode_tiles, normalise=normalise)
        loader = self.open_loader(samples, loaded.preprocessing)
        found = False
        try:
            for batch in loader:
                if signal := self.interruption.number:
                    raise Interrupted(
                        f"interrupted before {REPORT_FILE} was written; the run is complete, and "
                        f"vit train --resume --out {self.folder} writes it",
                        signal,
                    )
                failed.update((bad.path, bad.reason) for bad in batch.failed)
                if len(batch.labels):
                    found = True
                    images = batch.images.to(self.device, non_blocking=True)
                    with torch.inference_mode(), self.autocast():
                        prepared = normalise(images)
                    yield batch, prepared
        finally:
            loader.close()
        if not found:
            raise DataError("not one validation image can be read")
