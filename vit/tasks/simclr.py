"""SimCLR: an image is recognised by another view of it, among the other images of the batch.

    z_nv      embedding of view v of image n, of unit length;  s(x, y) = x . y / temperature
    loss_nvw  = -log(exp s(z_nv, z_nw) / (sum_m exp s(z_nv, z_mw) + sum_{m != n} exp s(z_nv, z_mv)))
    loss      = mean over images n, global views v and other views w

Design. With two global views and no local ones this is NT-Xent. The images m are those of all
processes, which agree; with micro-batches they are those of one. Rows are put at their places in
the batch and summed over processes, so one message gathers them, and its gradient comes back.

Source: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations",
section 2.1, arXiv:2002.05709.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.data.dataset import Batch
from vit.tasks.pretraining import JointEmbeddingPretraining, random_views, whole_views
from vit.tasks.task import TrainingRun

FAR = -1e4
"""Similarity of what is no other image: its exponential is 0."""


class SimCLR(JointEmbeddingPretraining):
    """SimCLR."""

    title = "SimCLR"
    planned_settings: ClassVar[Mapping[str, Any]] = {
        "drop_path": 0.0,
        "min_crop": 0.35,
        "auto_augment": "three",
        "color_jitter": 0.4,
    }
    planned_batch = 128
    pass_cost = 2.0  # two views
    # measured for the size of photographs in 20 minutes, and for small images in 4: lab-notebook.md
    passes_factor, tiny_passes_factor = 12.0, 2.0
    remedy = "lower --lr, or raise --warmup-epochs"
    measures_all = False
    why_several = "tells an image from the others beside it"
    why_no_repeats = "tell copies of an image apart"

    def loss(self, run: TrainingRun, batch: Batch, images: Tensor, epoch: int) -> Tensor:
        """Summed contrastive loss of one micro-batch against the images of all processes, (1,)."""
        settings = run.config.pretraining
        views = F.normalize(random_views(run, images), dim=-1)
        places = batch.positions.to(views.device, non_blocking=True)
        keys, present = gather_views(run, views, places)
        losses = contrastive_losses(
            views,
            keys,
            places,
            present=present,
            global_views=settings.global_views,
            temperature=settings.contrastive_temperature,
        )
        return losses.sum().view(1)

    def validation_loss(self, run: TrainingRun, batch: Batch, images: Tensor) -> tuple[Tensor, ...]:
        """Distance of each image from its mirror image, and the embeddings of both."""
        image, mirrored = F.normalize(whole_views(run, images), dim=-1)
        return (image - mirrored).square().sum(dim=1), image, mirrored

    def combined_loss(self, run: TrainingRun, losses: Tensor, *rows: Tensor) -> float:
        """The loss of training, of images and mirror images, in batches of its size."""
        temperature = run.config.pretraining.contrastive_temperature
        views, size = torch.stack(rows), run.config.data.batch_size
        total = 0.0
        for start in range(0, views.shape[1], size):
            batch = views[:, start : start + size]
            own = torch.arange(batch.shape[1])
            found = contrastive_losses(batch, batch, own, global_views=2, temperature=temperature)
            total += float(found.sum())
        return total / views.shape[1]


def gather_views(run: TrainingRun, views: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings of the images of all processes at their places in the batch, (views, batch, dim),
    and which places have an image, (batch,)."""
    rows = torch.cat([views.transpose(0, 1).flatten(1), views.new_ones(len(places), 1)], dim=1)
    placed = rows.new_zeros(run.config.data.batch_size, rows.shape[1]).index_copy(0, places, rows)
    everyone = run.sum_over_processes(placed.flatten()).view_as(placed)
    keys = everyone[:, :-1].view(len(placed), *views.shape[::2]).transpose(0, 1)
    return keys, everyone[:, -1] > 0


def contrastive_losses(
    views: Tensor,
    keys: Tensor,
    places: Tensor,
    *,
    global_views: int,
    temperature: float,
    present: Tensor | None = None,
) -> Tensor:
    """Loss of each image, (images,).

    Args:
        views: Embeddings of unit length, (views, images, dim), global views first.
        keys: Those of the images to tell apart, (views, batch, dim), among them these.
        places: Where these images are in `keys`, (images,).
    """
    own = places[:, None] == torch.arange(keys.shape[1], device=places.device)
    pairs = []
    for first in range(global_views):
        similar = views[first] @ keys.transpose(1, 2) / temperature  # (views, images, batch)
        if present is not None:
            similar = similar.masked_fill(~present, FAR)
        others = similar[first].masked_fill(own, FAR).logsumexp(dim=1)
        for second in range(len(views)):
            if second != first:
                every = torch.logaddexp(similar[second].logsumexp(dim=1), others)
                pairs.append(every - similar[second].gather(1, places[:, None])[:, 0])
    losses: Tensor = torch.stack(pairs).mean(dim=0)
    return losses
