"""Pretraining without labels: what its methods share.

    images, with or without class folders  ->  views or masks (the method)  ->  loss
    after each epoch, of the validation images' features: effective rank, spread, and where the
    data have classes k-NN accuracy, which trains nothing
    RUN/model.safetensors        the encoder: vit train --weights RUN, vit convert, --embeddings
    RUN/pretraining.safetensors  what only pretraining uses

SimCLR, LeJEPA and DINO embed random views of each image by an encoder and a projector:

    image -> global and local views in one tensor (MultiViewTransform), cut on the device
    view  -> encoder -> features -> projector -> embedding, which the loss of a method compares

The last epoch is kept: a loss without labels does not say which one is best for another task.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vit.config import Config
from vit.data.dataset import Batch
from vit.data.dataset_types import NO_LABEL, Sample, Splits
from vit.data.image_objects import to_rgb_image
from vit.data.multi_view import MultiViewTransform, ViewLayout
from vit.data.preprocessing import Preprocessing
from vit.data.sources.dataset_spec import DatasetSpec
from vit.errors import ConfigError
from vit.evaluation.feature_quality import (
    effective_rank,
    feature_spread,
    knn_accuracy,
    nearest_images,
)
from vit.evaluation.html_page import encode_thumbnail, read_thumbnail
from vit.evaluation.run_report import epoch_chart, write_run_report
from vit.model.build import build_joint_embedding
from vit.model.projection_head import JointEmbedding
from vit.precision import at_least_float32
from vit.tasks.finished_run import FinishedRun
from vit.tasks.task import (
    Evaluation,
    Event,
    Task,
    TrainingRun,
    blank_if_empty,
    forward,
)
from vit.text import Notify

QUERIES, NEIGHBOURS = 8, 5
"""Images of the report whose nearest others are shown, and how many of them."""
MOST_FEATURES = 2000
"""Most validation images whose features are compared."""
LEAST_RANK = 3.0
"""Effective rank of centred features below which they have collapsed to a few directions."""


class Pretraining(Task):
    """Base class of the methods."""

    metric = "val_loss"
    higher_is_better = False
    trained_head = "the encoder"
    title: ClassVar[str]
    least_spread: ClassVar[float]
    """Spread of the features below which they have collapsed: they hardly depend on the image."""
    remedy: ClassVar[str]
    """What to do about collapsed features."""
    measures_all = True
    """Whether the validation loss is of all images; else of those whose features are compared."""

    def dataset_spec(self, config: Config) -> DatasetSpec:
        """All images; classes only where every image has one."""
        return DatasetSpec.from_config(config.data, optional_labels=True)

    def check_data(self, config: Config, splits: Splits, notify: Notify) -> tuple[Config, Splits]:
        """Any images will do."""
        return config, splits

    def output_names(self, splits: Splits) -> tuple[str, ...]:
        """None: there is no head."""
        return ()

    def complete(self, config: Config) -> Config:
        """Check the network's settings; subclasses complete them."""
        if config.model.pooling == "none":
            raise ConfigError(
                f"pooling=none: task={config.training.task} measures one feature vector an image; "
                "use --pooling mean"
            )
        return config

    def summary(self, config: Config, splits: Splits) -> list[str]:
        """The numbers of images, and whether they have classes to measure k-NN accuracy with."""
        kind = "folders" if Path(config.data.data).is_dir() else "classes"
        found = f"{len(splits.classes)} {kind}, for k-NN alone" if splits.classes else "no classes"
        return [
            f"{len(splits.train):,} training and {len(splits.val):,} validation images, {found}"
        ]

    def rank(self, event: Event) -> tuple[float, float]:
        """Later epochs are better."""
        return float(event["epoch"]), 0.0

    def format_scores(self, event: Event) -> str:
        """Effective rank; where there are classes, k-NN accuracy and the share of the largest."""
        knn = f"  k-NN {event['val_knn']:.2%}" if "val_knn" in event else ""
        largest = f" (largest class {event['val_largest']:.2%})" if "val_largest" in event else ""
        return f"rank {event['val_rankme']:.1f}{knn}{largest}"

    def format_result(self, event: Event) -> str:
        return f"validation loss {event['val_loss']:.3f}, {self.format_scores(event)}"

    def next_command(self, folder: str) -> str:
        return (
            f"vit train DATA --weights {folder}; which images to label first: vit suggest IMAGES "
            f"--weights {folder} --out list.csv"
        )

    def preview(
        self, run: TrainingRun, batch: Batch, images: Tensor, classes: Sequence[str]
    ) -> tuple[Tensor, list[list[str]]]:
        """The images, without a line."""
        return images, [[] for _ in batch.indices]

    @abstractmethod
    def validation_loss(self, run: TrainingRun, batch: Batch, images: Tensor) -> tuple[Tensor, ...]:
        """Loss of each validation image, (images,), and other rows that `combined_loss` reads.

        Runs the forward pass, so all processes must make this call, also with an empty batch.
        """

    def combined_loss(self, run: TrainingRun, losses: Tensor, *rows: Tensor) -> float:
        """The validation loss, from the `rows` of the compared images, (images, ...); `losses`, the
        mean over all, is no number unless `measures_all`."""
        return float(losses)

    def tally(self, samples: Sequence[Sample]) -> "FeatureTally":
        return FeatureTally(self, samples)

    def warning(self, event: Event, config: Config) -> str | None:
        """A log line if the features have collapsed; else None."""
        spread, rank = event["val_spread"], event["val_centred_rank"]
        if spread >= self.least_spread and rank >= min(LEAST_RANK, config.model.pooled_dim / 16):
            return None
        return (
            f"warning: the features have collapsed in epoch {event['epoch']}: their spread is "
            f"{spread:.3f} and their effective rank {rank:.1f}, so they hardly depend on the "
            f"image; {self.remedy}"
        )

    def evaluation(self, model: Any, samples: Sequence[Sample], notify: Notify) -> Evaluation:
        """Refuse: there are no answers."""
        raise ConfigError(
            "the network was pretrained without classes, and has no answers to measure: add them "
            "with vit train DATA --weights RUN"
        )

    def write_report(self, run: FinishedRun) -> None:
        """Learning curves, rank of the features, and nearest neighbours."""
        failed: dict[str, str] = {}
        samples = compared(run.splits.val)
        found, labels, paths = [], [], list[str]()
        for batch, outputs in run.logits(samples, failed):
            found.append(outputs)
            labels += batch.labels.tolist()
            paths += [samples[index].path for index in batch.indices.tolist()]
        features, facts = torch.cat(found), run.facts(failed)
        classes = [run.splits.classes[label] if label != NO_LABEL else "" for label in labels]
        curves = {"training": ["train_loss"], "validation": ["val_loss"]}
        charts = [
            epoch_chart(facts, "Loss", curves),
            epoch_chart(facts, "Effective rank", {"validation": ["val_rankme"]}),
        ]
        labelled = all("val_knn" in event for event in facts.epochs)
        if labelled:
            charts.append(epoch_chart(facts, "k-NN accuracy", {"validation": ["val_knn"]}, "%"))
        write_run_report(
            facts,
            "pretraining_report.html.j2",
            charts=charts,
            final=facts.epochs[-1],
            labelled=labelled,
            dim=features.shape[1],
            compared=len(features),
            method=self.title,
            neighbours=neighbour_rows(features, classes, paths),
            reconstructions=[
                [
                    encode_thumbnail(to_rgb_image((image * 255).round().byte(), "a reconstruction"))
                    for image in row
                ]
                for row in self.reconstructions(run)
            ],
            score_name="Effective rank",
            score_key="val_rankme",
        )

    def reconstructions(self, run: FinishedRun) -> Sequence[tuple[Tensor, ...]]:
        """Rows of images for the report, each (3, height, width) in [0, 1]; none by default."""
        return ()


def compared(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples whose features are compared, evenly from all of them."""
    return samples[:: stride_of(len(samples))]


def neighbour_rows(
    features: Tensor, classes: Sequence[str], paths: Sequence[str]
) -> list[list[Mapping[str, Any]]]:
    """Some images, evenly from all, each followed by its nearest others."""
    if len(paths) < 2:
        return []
    nearest = nearest_images(features, NEIGHBOURS).tolist()
    queries = range(0, len(paths), max(len(paths) // QUERIES, 1))
    return [
        [
            {"image": read_thumbnail(paths[at], 128), "label": classes[at], "path": paths[at]}
            for at in (query, *nearest[query])
        ]
        for query in [*queries][:QUERIES]
    ]


def stride_of(count: int) -> int:
    """Stride between the validation images whose features are compared."""
    return max(math.ceil(count / MOST_FEATURES), 1)


class FeatureTally:
    """Loss, and the features of some images, compared at the end."""

    def __init__(self, task: Pretraining, samples: Sequence[Sample]) -> None:
        self.task, self.stride = task, stride_of(len(samples))
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.kept: list[tuple[Tensor, ...]] = []

    def add(self, run: TrainingRun, batch: Batch, images: Tensor) -> None:
        chosen = batch.indices % self.stride == 0
        some = images[chosen.to(images.device)]
        features = forward(run, some).float().cpu()
        whole = self.task.measures_all
        losses, *rows = self.task.validation_loss(run, batch, images if whole else some)
        self.sums += torch.stack([losses.double().sum().cpu(), torch.tensor(len(images)).double()])
        kept = (row.float().cpu()[chosen] if whole else row.float().cpu() for row in rows)
        self.kept.append((batch.indices[chosen], batch.labels[chosen], features, *kept))

    def scores(self, run: TrainingRun, totals: Sequence[float]) -> dict[str, Any]:
        """Mean loss, effective rank, spread, and k-NN accuracy if the images have classes."""
        parts = run.gather(self.kept)
        indices, labels, features, *rows = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        order = indices.argsort()
        features = features[order]
        rows = [row[order] for row in rows]
        loss, count = totals
        found = {
            "val_loss": self.task.combined_loss(run, torch.tensor(loss / count), *rows),
            "val_rankme": effective_rank(features),
            "val_centred_rank": effective_rank(features - features.mean(dim=0)),
            "val_spread": feature_spread(features),
        }
        if (labels != NO_LABEL).all() and len(labels) > 1:
            found["val_knn"] = knn_accuracy(features, labels[order])
            found["val_largest"] = float(labels.bincount().max()) / len(labels)
        return found


class JointEmbeddingPretraining(Pretraining):
    """Base class of the methods that compare views."""

    compares_images = True
    compares_prototypes: ClassVar[bool] = False
    """Whether embeddings are compared with prototypes, not with each other."""
    least_spread = 0.1
    why_several: ClassVar[str] = ""
    """Why each part of a batch must have several images, if it must."""
    why_no_repeats: ClassVar[str] = ""
    """Why there must then be no copies of an image among them."""

    def complete(self, config: Config) -> Config:
        """Check the sizes of the views, and that there are other images where they are needed."""
        config = super().complete(config)
        task, repeats, data = config.training.task, config.augment.repeats, config.data
        if self.why_several and repeats > 1:
            raise ConfigError(
                f"repeats={repeats}: task={task} would {self.why_no_repeats}; leave it out"
            )
        if self.why_several and data.batch_size < 2 * data.micro_batches:
            parts = "" if data.micro_batches == 1 else f" in {data.micro_batches} parts"
            raise ConfigError(
                f"batch_size={data.batch_size}{parts}: task={task} {self.why_several}; use a "
                "larger -b, or fewer parts (--accumulate)"
            )
        local, side, patch = local_side(config), config.model.image_size, config.model.patch_size
        if local % patch or local > side:
            raise ConfigError(
                f"local_size={local}: must be a multiple of patch_size={patch}, at most "
                f"image_size={side}"
            )
        if config.augment.random_crop == "simple":
            raise ConfigError(
                f"random_crop=simple: task={task} compares crops of several sizes; leave it out"
            )
        two_sizes = config.pretraining.local_views > 0
        if two_sizes and (config.model.patch_sizes or config.model.position == "relative"):
            name = "patch_sizes" if config.model.patch_sizes else "position=relative"
            raise ConfigError(f"{name}: task={task} embeds images of two sizes; leave it out")
        return config

    def build_network(self, config: Config) -> JointEmbedding:
        prototypes = config.pretraining.prototypes if self.compares_prototypes else 0
        return build_joint_embedding(config.model, config.pretraining, prototypes=prototypes)

    def view_size(self, config: Config, side: int) -> tuple[int, int]:
        """That of all views in one tensor."""
        return view_layout(config, side).image_size

    def training_transform(
        self, config: Config, preprocessing: Preprocessing
    ) -> MultiViewTransform:
        return MultiViewTransform(
            config.augment,
            preprocessing,
            view_layout(config, preprocessing.image_size[0]),
            config.pretraining.local_crop,
            fast_crop=config.data.decode == "fast",
        )


def local_side(config: Config) -> int:
    """Side of local views in pixels."""
    side, patch = config.model.image_size, config.model.patch_size
    return config.pretraining.local_size or max(round(side / 2 / patch), 1) * patch


def view_layout(config: Config, side: int) -> ViewLayout:
    """The views of an image of which global ones have `side` pixels."""
    settings = config.pretraining
    local = min(local_side(config), side)
    return ViewLayout(side, local, settings.global_views, settings.local_views)


def embed_views(
    run: TrainingRun, images: Tensor, split: Callable[[Tensor], Sequence[Tensor]]
) -> Tensor:
    """Embeddings of the views of `images` (maybe none), (views, images, dim), float32 or wider."""
    with blank_if_empty(run, images) as shown:
        embeddings: list[Tensor] = run.model(tuple(split(shown)))
    every = torch.cat([each.view(-1, len(shown), each.shape[-1]) for each in embeddings])
    return at_least_float32(every[:, : len(images)])


def random_views(run: TrainingRun, images: Tensor) -> Tensor:
    """Embeddings of the views that training draws, (views, images, dim), global views first.

    All processes must make this call, also without images.
    """
    return embed_views(run, images, view_layout(run.config, images.shape[-1]).split)


def whole_views(run: TrainingRun, images: Tensor) -> Tensor:
    """Embeddings of each image and its mirror image, (2, images, dim)."""
    return embed_views(run, images, lambda shown: [with_mirrored(shown)])


def fixed_views(run: TrainingRun, images: Tensor) -> Tensor:
    """Embeddings of each image, its mirror image and its corners, (views, images, dim)."""
    side = local_side(run.config)

    def split(shown: Tensor) -> list[Tensor]:
        halves = [shown[..., :side], shown[..., -side:]]
        corners = [c for one in halves for c in (one[..., :side, :], one[..., -side:, :])]
        return [with_mirrored(shown), torch.cat(corners)]

    local = run.config.pretraining.local_views > 0
    return embed_views(run, images, split) if local else whole_views(run, images)


def with_mirrored(images: Tensor) -> Tensor:
    """(batch, channels, height, width) -> the images, then their mirror images, in one batch"""
    return torch.cat([images, images.flip(-1)])
