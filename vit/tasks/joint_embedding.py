"""Pretraining by views: an encoder and a projector embed random views of each image.

    image -> global and local views in one tensor (MultiViewTransform), cut on the device
    view  -> encoder -> features -> projector -> embedding, which the loss of a method compares

Validation has fixed views: an image, its mirror image, and its four corners as local views, unless
the method compares only the former two.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from vit.config import Config
from vit.data.multi_view import MultiViewTransform, ViewLayout
from vit.data.preprocessing import Preprocessing
from vit.errors import ConfigError
from vit.model.build import build_joint_embedding
from vit.model.projection_head import JointEmbedding
from vit.precision import at_least_float32
from vit.tasks.pretraining import Pretraining, blank_if_empty, frozen_statistics
from vit.tasks.task import TrainingRun


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

    def complete(self, config: Config, given: Sequence[str]) -> Config:
        """Check the sizes of the views, and that there are other images where they are needed."""
        config = super().complete(config, given)
        self.check_others(config)
        task = config.training.task
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

    def check_others(self, config: Config) -> None:
        """Refuse settings that leave an image no other to be compared with."""
        task, repeats, data = config.training.task, config.augment.repeats, config.data
        if not self.why_several:
            return
        if repeats > 1:
            raise ConfigError(
                f"repeats={repeats}: task={task} would {self.why_no_repeats}; leave it out"
            )
        if data.batch_size < 2 * data.micro_batches:
            parts = "" if data.micro_batches == 1 else f" in {data.micro_batches} parts"
            raise ConfigError(
                f"batch_size={data.batch_size}{parts}: task={task} {self.why_several}; use a "
                "larger -b, or fewer parts (--accumulate)"
            )

    def build_network(self, config: Config) -> JointEmbedding:
        """The encoder with its projector."""
        prototypes = config.pretraining.prototypes if self.compares_prototypes else 0
        return build_joint_embedding(config.model, config.pretraining, prototypes=prototypes)

    def view_size(self, config: Config, side: int) -> tuple[int, int]:
        """That of all views in one tensor."""
        return view_layout(config, side).image_size

    def training_transform(
        self, config: Config, preprocessing: Preprocessing
    ) -> MultiViewTransform:
        """All views of an image."""
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
    """Embeddings of the views of `images`, (views, images, dim), in float32 or wider.

    Args:
        images: Of the tensors of the loader, (images, channels, height, width); may be none.
    """
    shown = blank_if_empty(images)
    with frozen_statistics(run, empty=not len(images)):
        embeddings: list[Tensor] = run.model(tuple(split(shown)))
    every = torch.cat([each.view(-1, len(shown), each.shape[-1]) for each in embeddings])
    every = every[:, : len(images)]
    return at_least_float32(every)


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
