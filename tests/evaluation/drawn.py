"""Made-up scores of a classifier that is often right, and the labels."""

import torch
from torch import Tensor

from vit.evaluation.classification_metrics import Outcomes


def draw_scores(
    images: int,
    classes: int,
    *,
    lean: float = 1.0,
    sharpness: float = 1.0,
    seed: int = 0,
    present: range | None = None,
) -> tuple[Tensor, Tensor]:
    """Probabilities (images, classes) that lean to the true label, and labels of those present."""
    generator = torch.Generator().manual_seed(seed)
    places = present or range(classes)
    labels = torch.randint(places.start, places.stop, (images,), generator=generator)
    logits = torch.randn(images, classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(images), labels] += lean
    return (sharpness * logits).softmax(dim=1), labels


def draw_outcomes(classes: int, images: int = 40, *, lean: float = 1.0) -> Outcomes:
    """Outcomes that are right about half of the time."""
    return Outcomes.of(*draw_scores(images, classes, lean=lean))
