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

from vit.inference.model_runner import to_probabilities
from vit.model.vision_transformer import VisionTransformer

STEPS = 10  # in which all patches are deleted
RANDOM_ORDERS = 9  # a map that knows nothing is better than all of them once in ten times
ROUNDING = 1e-4  # a random order that happens to be that of the map differs by less


@dataclass(frozen=True)
class Curve:
    """The probability of a class while more and more patches are deleted.

    Args:
        deleted: Shares of the patches, from 0 to 1.
        probabilities: What the network says then.
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
        curve: The strongest patches first.
        reverse: The weakest first.
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
    """Images that `deletions` shows the network for `maps` maps of as many patches."""
    return 2 + (len(steps(patches)) - 2) * (RANDOM_ORDERS + 2 * maps)


def steps(patches: int) -> list[int]:
    """How many patches are deleted at each step: from none to all."""
    return sorted({round(patches * step / STEPS) for step in range(STEPS + 1)})


def deletions(
    model: VisionTransformer,
    image: Tensor,
    maps: Tensor,
    classes: Sequence[int],
    *,
    batch_size: int,
    seed: int,
    multilabel: bool = False,
) -> list[Deletion]:
    """Deletion metric of each of `maps`; takes `passes` forward images.

    Args:
        model: In evaluation mode.
        image: Normalised, (channels, height, width).
        maps: How much each patch mattered, (maps, rows, cols); random among equals.
        classes: The class of each map.
        batch_size: Images in one pass.
        seed: Of the random orders, which all maps share.
        multilabel: Whether classes have probabilities of their own.
    """
    grid = (maps.shape[-2], maps.shape[-1])
    orders = _orders(maps.flatten(1).cpu(), seed)
    counts = steps(orders.shape[1])
    asked = partial(to_probabilities, multilabel=multilabel)
    found = _probabilities(model, image, orders, counts, grid, batch_size, asked)
    shares = tuple(count / orders.shape[1] for count in counts)

    def curve(order: int, wanted: int) -> Curve:
        return Curve(shares, tuple(found[order, :, wanted].tolist()))

    return [
        Deletion(
            curve(RANDOM_ORDERS + 2 * place, wanted),
            curve(RANDOM_ORDERS + 2 * place + 1, wanted),
            tuple(curve(order, wanted).score for order in range(RANDOM_ORDERS)),
        )
        for place, wanted in enumerate(classes)
    ]


def _orders(maps: Tensor, seed: int) -> Tensor:
    """Patches as they are deleted: in random orders, then by each map and by it reversed.

    Args:
        maps: (maps, patches).
        seed: Of the random orders.

    Returns:
        (RANDOM_ORDERS + 2 * maps, patches).
    """
    generator = torch.Generator().manual_seed(seed)
    patches = maps.shape[1]
    orders = [torch.randperm(patches, generator=generator) for _ in range(RANDOM_ORDERS)]
    for weights in maps:
        mixed = torch.randperm(patches, generator=generator)  # else equals are deleted row by row
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
    answers: Callable[[Tensor], Tensor],
) -> Tensor:
    """Of all classes, float64 on the CPU, (orders, steps, classes).

    The first and the last step, nothing and everything deleted, are computed once for all orders.
    """
    inner = torch.tensor(counts[1:-1])
    kept = orders.argsort(dim=1)[:, None, :] >= inner[:, None]  # (orders, inner steps, patches)
    patches = orders.shape[1]
    ends = torch.tensor([True, False])[:, None].expand(2, patches)
    seen = torch.cat([ends, kept.reshape(-1, patches)])
    rows, cols = grid
    height, width = image.shape[-2] // rows, image.shape[-1] // cols
    parts = []
    for some in torch.split(seen, batch_size):
        pixels = repeat(
            some.to(image),
            "batch (rows cols) -> batch 1 (rows height) (cols width)",
            rows=rows,
            height=height,
            width=width,
        )
        parts.append(answers(model(image * pixels)))
    found = torch.cat(parts)
    between = found[2:].view(*kept.shape[:2], found.shape[1])
    whole, empty = found[:2, None, None].expand(-1, len(orders), 1, -1)
    return torch.cat([whole, between, empty], dim=1)
