"""LeJEPA: views of an image predict each other, and embeddings are an isotropic Gaussian.

    z_nv         embedding of view v of image n
    prediction = mean over n, v, dimensions of (mean over global views of z_n - z_nv)²
    SIGReg     = mean over views v and random directions a of EP({a . z_nv}_n)
    EP(x)      = N ∫ |mean_n exp(i t x_n) - exp(-t²/2)|² exp(-t²/2) dt,   t from -5 to 5
    loss       = (1 - weight) prediction + weight SIGReg

Design. The loader gives all views of an image as one tensor (MultiViewTransform), which is cut on
the device. Sums over images in EP are over all processes, so they agree; with micro-batches it is
the mean of their statistics. Directions follow from (seed, step). Validation uses fixed views:
an image, its mirror image, and its four corners as local views. No teacher, no stop-gradient.

Source: Balestriero and LeCun, "LeJEPA", sections 4 and 5, arXiv:2511.08544; the test: Epps and
Pulley, "A test for normality based on the empirical characteristic function", Biometrika 1983.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.data.dataset import Batch
from vit.data.multi_view import MultiViewTransform, ViewLayout
from vit.data.preprocessing import Preprocessing
from vit.data.random_seed import random_seed
from vit.errors import ConfigError
from vit.model.build import build_joint_embedding
from vit.model.projection_head import JointEmbedding
from vit.tasks.pretraining import Pretraining, blank_if_empty, frozen_statistics
from vit.tasks.task import TrainingRun

KNOTS, RANGE = 17, 5.0
"""Points of the trapezoidal rule, an odd number, and where it ends on both sides."""
Total = Callable[[Tensor], Tensor]
"""Differentiable sum of a vector over processes."""


class LeJEPA(Pretraining):
    """LeJEPA."""

    planned_settings: ClassVar[Mapping[str, Any]] = {
        "start_image_size": None,
        "batch_size": 128,
        "min_crop": 0.3,
        "auto_augment": "three",
        "color_jitter": 0.3,
    }
    least_spread = 0.1
    remedy = "lower --lr, or raise --sigreg-weight"

    def complete(self, config: Config, given: Sequence[str]) -> Config:
        """Check the sizes of the views."""
        config = super().complete(config, given)
        local, side, patch = local_side(config), config.model.image_size, config.model.patch_size
        if local % patch or local > side:
            raise ConfigError(
                f"local_size={local}: must be a multiple of patch_size={patch}, at most "
                f"image_size={side}"
            )
        if config.augment.random_crop == "simple":
            raise ConfigError(
                "random_crop=simple: task=lejepa compares crops of several sizes; leave it out"
            )
        if config.model.patch_sizes or config.model.position == "relative":
            name = "patch_sizes" if config.model.patch_sizes else "position=relative"
            raise ConfigError(f"{name}: task=lejepa embeds images of two sizes; leave it out")
        return config

    def build_network(self, config: Config) -> JointEmbedding:
        """The encoder with its projector."""
        return build_joint_embedding(config.model, config.pretraining)

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

    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch, (1,)."""
        config, settings = run.config, run.config.pretraining
        shown, weights = blank_if_empty(images)
        layout = view_layout(config, images.shape[-1])
        views = embed_views(run, layout.split(shown), len(shown), empty=not len(images))
        wrong = prediction_losses(views, settings.global_views) * weights
        directions = random_directions(config, run.step).to(views)
        statistic = sigreg(views, directions, weights=weights, total=run.sum_over_processes)
        weight = settings.sigreg_weight
        return ((1 - weight) * wrong.sum() + weight * statistic * weights.sum()).view(1)

    def validation_loss(self, run: TrainingRun, batch: Batch, images: Tensor) -> tuple[Tensor, ...]:
        """How well fixed views of each image predict each other, and embeddings of the images."""
        shown, _ = blank_if_empty(images)
        side = local_side(run.config)
        parts = [torch.cat([shown, shown.flip(-1)])]
        if run.config.pretraining.local_views:
            corners = [shown[..., :side], shown[..., -side:]]
            parts.append(
                torch.cat([c for one in corners for c in (one[..., :side, :], one[..., -side:, :])])
            )
        views = embed_views(run, parts, len(shown), empty=not len(images))
        count = len(images)
        return prediction_losses(views, 2)[:count], views[0, :count]

    def combined_loss(self, run: TrainingRun, losses: Tensor, *rows: Tensor) -> float:
        """The loss of training, with the embeddings of the images for SIGReg."""
        (embeddings,) = rows
        weight = run.config.pretraining.sigreg_weight
        statistic = sigreg(embeddings[None].double(), random_directions(run.config, 0).double())
        # as of a batch: the statistic grows with the number of images
        share = run.config.data.batch_size / len(embeddings)
        return float((1 - weight) * losses + weight * statistic * share)


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
    run: TrainingRun, views: Sequence[Tensor], count: int, *, empty: bool = False
) -> Tensor:
    """Embeddings of `views` of `count` images, (views, count, dim), in float32 or wider.

    With `empty`, the one image is a placeholder.
    """
    with frozen_statistics(run, empty=empty):
        embeddings: list[Tensor] = run.model(tuple(views))
    every = torch.cat([each.view(-1, count, each.shape[-1]) for each in embeddings])
    return every.float() if every.dtype.itemsize < 4 else every


def prediction_losses(views: Tensor, global_views: int) -> Tensor:
    """Mean squared distance of each image's views from the mean of its global ones, (images,).

    Args:
        views: Embeddings, (views, images, dim), global views first.
        global_views: How many of them are global.
    """
    centre = views[:global_views].mean(dim=0)
    losses: Tensor = (views - centre).square().mean(dim=(0, 2))
    return losses


def random_directions(config: Config, step: int) -> Tensor:
    """Unit vectors, (dim, projections), the same on all processes."""
    settings = config.pretraining
    seed = random_seed(config.training.seed, "sigreg", step)
    generator = torch.Generator().manual_seed(seed)
    shape = (settings.projector_dim, settings.sigreg_projections)
    return F.normalize(torch.randn(*shape, generator=generator), dim=0)


def sigreg(
    views: Tensor,
    directions: Tensor,
    *,
    weights: Tensor | None = None,
    total: Total = lambda mine: mine,
) -> Tensor:
    """Mean Epps-Pulley statistic over views and directions, ().

    Args:
        views: Embeddings, (views, images, dim).
        directions: Unit vectors, (dim, projections).
        weights: 1 for images that count, 0 for others, (images,); all count if omitted.
        total: Sum over processes.
    """
    # both halves of the integral are equal
    points = torch.linspace(0, RANGE, KNOTS // 2 + 1).to(views)
    gaussian = (-points.square() / 2).exp()
    counts = views.new_ones(views.shape[1]) if weights is None else weights.to(views)
    angles = (views @ directions).unsqueeze(-1) * points  # (views, images, projections, points)
    waves = torch.stack([angles.cos(), angles.sin()])
    sums = torch.einsum("wvnpk,n->wvpk", waves, counts)
    totals = total(torch.cat([sums.flatten(), counts.sum()[None]]))
    images = totals[-1].detach()
    real, imaginary = totals[:-1].view_as(sums) / images.clamp(min=1)
    errors = (real - gaussian).square() + imaginary.square()
    halves = torch.trapezoid(errors * gaussian, points, dim=-1)
    statistic: Tensor = 2 * halves.mean() * images
    return statistic
