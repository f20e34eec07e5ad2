"""MixUp and CutMix of pairs: images 2i and 2i + 1 of a step's batch mix with each other.

    MixUp    x' = lam x + (1 - lam) y        for the pixels and for the one-hot targets
    CutMix   x' = x outside a box, y inside; lam of the targets is the box's outside share

The random numbers of a step are seeded by (seed, "mix", epoch, step), and partners are found by
position. So the result does not depend on how the batch is split over devices and micro-batches, as
long as each part holds complete pairs; an image without its partner (on another device, or
unreadable) is not mixed.

Source: Zhang et al., arXiv:1710.09412; Yun et al., section 3.1, arXiv:1905.04899. Both images of
a pair get the same lam, as in torchvision's v2 transforms on a batch of two.
"""

from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from vit.config import AugmentConfig
from vit.data.random_seed import random_seed


@dataclass(frozen=True)
class MixPlan:
    """Random parameters of one step's batch; arrays with one entry per pair."""

    lam: np.ndarray
    """Weight of an image in its own mixture, (pairs,); 1 leaves the pair unchanged."""
    use_cutmix: np.ndarray
    """Whether the pair is mixed by CutMix instead of MixUp, (pairs,)."""
    centre: np.ndarray
    """Centre of CutMix's box, (pairs, 2): shares of the height and of the width."""


def sample_mix_plan(
    config: AugmentConfig, *, seed: int, epoch: int, step: int, batch_size: int
) -> MixPlan | None:
    """Sample the parameters of one step; None if mixing is off."""
    if not config.mixes:
        return None
    alphas = [config.mixup, config.cutmix]
    pairs = (batch_size + 1) // 2
    # only RandomState, not Generator, gives the same stream in all versions of NumPy
    seed_words = divmod(random_seed(seed, "mix", epoch, step), 2**32)
    random = np.random.RandomState(seed_words)
    mixed = random.random_sample(pairs) < config.mix_probability
    share = config.cutmix_share if all(alphas) else float(config.cutmix > 0)
    cut = random.random_sample(pairs) < share
    lams = [random.beta(alpha, alpha, pairs) if alpha else np.ones(pairs) for alpha in alphas]
    centre = random.random_sample((pairs, 2))
    return MixPlan(np.where(mixed, np.where(cut, lams[1], lams[0]), 1.0), cut, centre)


def mix(
    images: Tensor, targets: Tensor, positions: Tensor, plan: MixPlan | None
) -> tuple[Tensor, Tensor]:
    """Mix the pairs among normalised `images`, (batch, channels, height, width), on their device.

    `positions`, in the batch of the step, are on the CPU; without pairs the inputs are returned.
    """
    if plan is None or not len(images):
        return images, targets
    height, width = images.shape[-2:]
    partner, paired = _partners(positions.numpy())
    pair = positions.numpy() // 2
    cut = paired & plan.use_cutmix[pair]
    boxes = _boxes(plan.lam[pair], plan.centre[pair], height, width) * cut[:, None]
    share = 1 - (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / (height * width)
    lam = np.where(cut, share, np.where(paired, plan.lam[pair], 1.0))

    blend = np.where(cut, 1.0, lam)  # CutMix replaces pixels, and blends none
    order = _on_device(torch.from_numpy(partner), images.device)
    other = images[order]
    weight = rearrange(_column(blend, images), "batch -> batch 1 1 1")
    mixed = images * weight + other * (1 - weight)
    if cut.any():
        mixed = torch.where(_inside(boxes, height, width, images.device), other, mixed)
    weight = rearrange(_column(lam, targets), "batch -> batch 1")
    order = order.to(targets.device)
    return mixed, targets * weight + targets[order] * (1 - weight)


def _partners(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each image's partner (its own row without one), and whether there is one."""
    row_of = {int(position): row for row, position in enumerate(positions)}
    rows = [row_of.get(int(position) ^ 1, row) for row, position in enumerate(positions)]
    partner = np.array(rows, dtype=np.int64)
    return partner, partner != np.arange(len(positions))


def _boxes(lam: np.ndarray, centre: np.ndarray, height: int, width: int) -> np.ndarray:
    """CutMix's boxes, (batch, 4): top, bottom, left, right; of area 1 - lam before clipping.

    As in torchvision, half sides are rounded down around a centre pixel.
    """
    half = 0.5 * np.sqrt(1 - lam)
    middle = (centre * [height, width]).astype(np.int64)
    rows, cols = (half * height).astype(np.int64), (half * width).astype(np.int64)
    edges = [
        np.clip(middle[:, 0] - rows, 0, height),
        np.clip(middle[:, 0] + rows, 0, height),
        np.clip(middle[:, 1] - cols, 0, width),
        np.clip(middle[:, 1] + cols, 0, width),
    ]
    return np.stack(edges, axis=1)


def _inside(boxes: np.ndarray, height: int, width: int, device: torch.device) -> Tensor:
    """True inside each image's box, (batch, 1, height, width)."""
    edges = _on_device(torch.from_numpy(boxes), device)
    top, bottom, left, right = rearrange(edges, "batch edges -> edges batch 1")
    row, col = torch.arange(height, device=device), torch.arange(width, device=device)
    rows = rearrange((row >= top) & (row < bottom), "batch height -> batch 1 height 1")
    cols = rearrange((col >= left) & (col < right), "batch width -> batch 1 1 width")
    inside: Tensor = rows & cols
    return inside


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return _on_device(torch.tensor(values, dtype=like.dtype), like.device)


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`; a GPU copies them while the host goes on to queue the network.

    Only CUDA has copied memory that may be freed when such a copy returns.
    """
    return values.to(device, non_blocking=device.type == "cuda")
