"""LeJEPA: views of an image predict each other, and embeddings are an isotropic Gaussian.

    z_nv         embedding of view v of image n
    prediction = mean over n, v, dimensions of (mean over global views of z_n - z_nv)²
    SIGReg     = mean over views v and random directions a of EP({a . z_nv}_n)
    EP(x)      = N ∫ |mean_n exp(i t x_n) - exp(-t²/2)|² exp(-t²/2) dt,   t from -5 to 5
    loss       = (1 - weight) prediction + weight SIGReg

Design. Sums over images in EP are over all processes, so they agree; with micro-batches it is the
mean of their statistics. Directions follow from (seed, step). No teacher, no stop-gradient.

Source: Balestriero and LeCun, "LeJEPA", sections 4 and 5, arXiv:2511.08544; the test: Epps and
Pulley, "A test for normality based on the empirical characteristic function", Biometrika 1983.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.config import Config
from vit.data.dataset import Batch
from vit.data.random_seed import random_seed
from vit.tasks.pretraining import JointEmbeddingPretraining, fixed_views, random_views
from vit.tasks.task import TrainingRun

KNOTS, RANGE = 17, 5.0
"""Points of the trapezoidal rule, an odd number, and where it ends on both sides."""
Total = Callable[[Tensor], Tensor]
"""Differentiable sum of a vector over processes."""


class LeJEPA(JointEmbeddingPretraining):
    """LeJEPA."""

    title = "LeJEPA"
    planned_settings: ClassVar[Mapping[str, Any]] = {
        "start_image_size": None,
        "local_views": 4,
        "min_crop": 0.3,
        "auto_augment": "three",
        "color_jitter": 0.3,
    }
    planned_batch = 128
    pass_cost = 3.0  # four small views cost about as much as one
    remedy = "lower --lr, or raise --sigreg-weight"

    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed loss of one micro-batch: the weighted sum of prediction and SIGReg, (1,)."""
        config, settings = run.config, run.config.pretraining
        views = random_views(run, images)
        wrong = prediction_losses(views, settings.global_views)
        directions = random_directions(config, run.step).to(views, non_blocking=views.is_cuda)
        statistic = sigreg(views, directions, total=run.sum_over_processes)
        weight = settings.sigreg_weight
        return ((1 - weight) * wrong.sum() + weight * statistic * views.shape[1]).view(1)

    def validation_loss(self, run: TrainingRun, batch: Batch, images: Tensor) -> tuple[Tensor, ...]:
        """How well fixed views of each image predict each other, and embeddings of the images."""
        views = fixed_views(run, images)
        return prediction_losses(views, 2), views[0]

    def combined_loss(self, run: TrainingRun, losses: Tensor, *rows: Tensor) -> float:
        """The loss of training, with the embeddings of the images for SIGReg."""
        (embeddings,) = rows
        weight = run.config.pretraining.sigreg_weight
        statistic = sigreg(embeddings[None].double(), random_directions(run.config, 0).double())
        # as of a batch: the statistic grows with the number of images
        share = run.config.data.batch_size / len(embeddings)
        return float((1 - weight) * losses + weight * statistic * share)


def prediction_losses(views: Tensor, global_views: int) -> Tensor:
    """Mean squared distance of each image's views, (views, images, dim), from the mean of its
    global ones, which come first, (images,)."""
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


def sigreg(views: Tensor, directions: Tensor, *, total: Total = lambda mine: mine) -> Tensor:
    """Mean Epps-Pulley statistic, (), over this process's views, (views, images, dim), and unit
    directions, (dim, projections)."""
    # both halves of the integral are equal
    points = torch.linspace(0, RANGE, KNOTS // 2 + 1, device=views.device).to(views)
    gaussian = (-points.square() / 2).exp()
    angles = (views @ directions).unsqueeze(-1) * points  # (views, images, projections, points)
    waves = torch.stack([angles.cos(), angles.sin()])
    sums = waves.sum(dim=2)
    totals = total(torch.cat([sums.flatten(), sums.new_full((1,), views.shape[1])]))
    images = totals[-1].detach()
    real, imaginary = totals[:-1].view_as(sums) / images.clamp(min=1)
    errors = (real - gaussian).square() + imaginary.square()
    halves = torch.trapezoid(errors * gaussian, points, dim=-1)
    statistic: Tensor = 2 * halves.mean() * images
    return statistic
