"""Deletion metric: faithfulness of an attribution map, whose strongest patches are deleted first.

A deleted patch has the mean colour of the preprocessing, which is zero in the network's input. The
score is the area under the probability of the class over the share of deleted patches: from 0 to 1,
lower is better. Random orders are the chance level; the reversed order is the upper reference.

Source: Petsiuk et al., "RISE", arXiv:1806.07421 (the deletion metric).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from einops import repeat
from torch import Tensor

from vit.inference.torch_engine import Activation, to_probabilities
from vit.model.vision_transformer import VisionTransformer

SOFTMAX: Activation = partial(torch.softmax, dim=1)
STEPS = 10  # until all patches are deleted
RANDOM_ORDERS = 9  # a random map beats all of them with probability 1/10
ROUNDING = 1e-4  # relative difference of scores that is no difference


@dataclass(frozen=True)
class Curve:
    """The probability of a class while more and more patches are deleted.

    Args:
        deleted: Shares of the patches, from 0 to 1.
    """

    deleted: tuple[float, ...]
    probabilities: tuple[float, ...]

    @property
    def score(self) -> float:
        """Area under the curve, by trapezoids."""
        return float(
            torch.trapezoid(
                torch.tensor(self.probabilities, dtype=torch.float64),
                torch.tensor(self.deleted, dtype=torch.float64),
            )
        )


@dataclass(frozen=True)
class Deletion:
    """Deletion metric of one map.

    Args:
        random: Scores of random orders.
    """

    curve: Curve
    reverse: Curve
    random: tuple[float, ...]

    @property
    def better(self) -> bool:
        """Whether the map is better than chance: its score is below that of all random orders."""
        return self.curve.score < min(self.random) * (1 - ROUNDING)

    @property
    def chance(self) -> float:
        """Mean score of the random orders."""
        return sum(self.random) / len(self.random)


def passes(patches: int, maps: int) -> int:
    """Forward passes of `deletions` for `maps` maps of `patches` patches."""
    return 2 + (len(steps(patches)) - 2) * (RANDOM_ORDERS + 2 * maps)


def steps(patches: int) -> list[int]:
    """Number of deleted patches at each step, from none to all."""
    return sorted({round(patches * step / STEPS) for step in range(STEPS + 1)})


def deletions(
    model: VisionTransformer,
    image: Tensor,
    maps: Tensor,
    classes: Sequence[int],
    *,
    batch_size: int,
    seed: int,
    activation: Activation = SOFTMAX,
) -> list[Deletion]:
    """Deletion metric of each of `maps`; takes `passes` forward images.

    Args:
        image: Normalised, (channels, height, width).
        maps: Weight of each patch, (maps, rows, cols); the order of equal ones is random.
        seed: Seed of the random orders, which all maps share.
    """
    grid = (maps.shape[-2], maps.shape[-1])
    orders = _orders(maps.flatten(1).cpu(), seed)
    counts = steps(orders.shape[1])
    probabilities_of = partial(to_probabilities, activation=activation)
    found = _probabilities(model, image, orders, counts, grid, batch_size, probabilities_of)
    shares = tuple(count / orders.shape[1] for count in counts)

    def curve(order: int, label: int) -> Curve:
        return Curve(shares, tuple(found[order, :, label].tolist()))

    return [
        Deletion(
            curve(RANDOM_ORDERS + 2 * number, label),
            curve(RANDOM_ORDERS + 2 * number + 1, label),
            tuple(curve(order, label).score for order in range(RANDOM_ORDERS)),
        )
        for number, label in enumerate(classes)
    ]


def _orders(maps: Tensor, seed: int) -> Tensor:
    """Orders of deletion: random ones, then each map, descending and ascending.

    (maps, patches) -> (RANDOM_ORDERS + 2 * maps, patches)
    """
    generator = torch.Generator().manual_seed(seed)
    patches = maps.shape[1]
    orders = [torch.randperm(patches, generator=generator) for _ in range(RANDOM_ORDERS)]
    for weights in maps:
        mixed = torch.randperm(patches, generator=generator)  # a random order of equal weights
        order = mixed[weights[mixed].argsort(descending=True, stable=True)]
        orders += [order, order.flip(0)]
    return torch.stack(orders)


@torch.inference_mode()
def _probabilities(
    model: VisionTransformer,
    image: Tensor,
    orders: Tensor,
    counts: list[int],
    grid: tuple[int, int],
    batch_size: int,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Probabilities of all classes, float64 on the CPU, (orders, steps, classes).

    The first and the last step are equal in all orders, and computed once.
    """
    inner = torch.tensor(counts[1:-1])
    kept = orders.argsort(dim=1)[:, None, :] >= inner[:, None]  # (orders, inner steps, patches)
    patches = orders.shape[1]
    ends = torch.tensor([True, False])[:, None].expand(2, patches)
    masks = torch.cat([ends, kept.reshape(-1, patches)])
    rows, cols = grid
    height, width = image.shape[-2] // rows, image.shape[-1] // cols
    parts = []
    for mask in torch.split(masks, batch_size):
        pixels = repeat(
            mask.to(image),
            "batch (rows cols) -> batch 1 (rows height) (cols width)",
            rows=rows,
            height=height,
            width=width,
        )
        parts.append(activation(model(image * pixels)))
    found = torch.cat(parts)
    between = found[2:].view(*kept.shape[:2], found.shape[1])
    whole, empty = found[:2, None, None].expand(-1, len(orders), 1, -1)
    return torch.cat([whole, between, empty], dim=1)
